"""The kinds of value that a fleet file alone holds, beside those of every file (`settings.fields`)."""

import math
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from settings.fields import matching, wrong
from settings.source import quoted

ModelName = Annotated[str, AfterValidator(matching(
    r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}", "must be 1 to 128 letters, digits or `._:/@+-`"))]

Setting = str | int | float | bool


def _settings(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    for key, value in settings.items():
        if not isinstance(value, Setting) or (isinstance(value, float) and not math.isfinite(value)):
            raise wrong(f"{quoted(key)} must be a finite number, text, true or false")
    return settings


Settings = Annotated[dict[str, Any], AfterValidator(_settings)]
"""Settings of a policy part; the part itself knows which there are (`policies.registry`)."""

Seconds = Annotated[float, Field(gt=0, le=86_400)]
SecondsFromZero = Annotated[float, Field(ge=0, le=86_400)]
Milliseconds = Annotated[float, Field(ge=0, le=60_000)]
Share = Annotated[float, Field(ge=0, le=1)]
Degree = Annotated[int, Field(ge=1, le=4_096)]
Tokens = Annotated[int, Field(ge=1, le=1_000_000_000)]
