"""The kinds of value in an allocator file and in a request: strict, finite, refused with a sentence of their own."""

import re
from collections.abc import Callable, Mapping
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError


class Section(BaseModel):
    """A mapping of settings: strict types, no unknown settings, never changed once built."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True)


def wrong(why: str, hint: str | None = None) -> PydanticCustomError:
    """A refusal in our own words. Its type is that of the fleet file, whose printer shows both."""
    return PydanticCustomError("fleet", "{why}", {"why": why, "hint": hint or ""})


def _matching(pattern: str, rule: str) -> Callable[[str], str]:
    compiled = re.compile(pattern)

    def check(text: str) -> str:
        if not compiled.fullmatch(text):
            raise wrong(rule)
        return text

    return check


Name = Annotated[str, AfterValidator(_matching(
    r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", "must be 1 to 64 letters, digits, `.`, `_` or `-`"))]
"""Nodes, pools, queues, backends, jobs: these go in file names and metric labels."""

Text = Annotated[str, AfterValidator(_matching(
    r"(?=.*\S)[^\x00-\x1f\x7f]{1,200}", "must be 1 to 200 characters on one line"))]
Word = Annotated[str, AfterValidator(_matching(
    r"[^\x00]{0,4096}", "must be at most 4,096 characters, none of them zero"))]
Host = Annotated[str, AfterValidator(_matching(
    r"[A-Za-z0-9._:%-]{1,253}", "must be an address or host name without scheme, port or brackets"))]
VariableName = Annotated[str, AfterValidator(_matching(
    r"[A-Za-z_][A-Za-z0-9_]{0,127}", "must be the name of an environment variable: letters, digits and `_`"))]
TimeOfDay = Annotated[str, AfterValidator(_matching(
    r"([01]\d|2[0-3]):[0-5]\d", "must be a time of day such as `22:00`, in quotes"))]


def _labels(labels: Mapping[str, str]) -> Mapping[str, str]:
    for key in labels:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,62}", key):
            raise wrong(f"has the key {key[:63]!a}; keys are 1 to 63 letters, digits, `.`, `_`, `/` or `-`")
    return labels


Labels = Annotated[dict[str, str], AfterValidator(_labels), Field(max_length=32)]
Seconds = Annotated[float, Field(gt=0, le=31_536_000)]
SecondsFromZero = Annotated[float, Field(ge=0, le=31_536_000)]
Amount = Annotated[float, Field(ge=0, le=1e12)]
Count = Annotated[int, Field(ge=0, le=1_000_000)]
Port = Annotated[int, Field(ge=0, le=65_535)]
