"""The kinds of value in an allocator file and in a request, beside those of every file (`settings.fields`)."""

from typing import Annotated

from pydantic import AfterValidator, Field

from settings.fields import matching, wrong


def _word(text: str) -> str:
    # Not quoted: a command or a variable of a job may hold a secret.
    if "\x00" in text or len(text) > 4096:
        raise wrong("must be at most 4,096 characters, none of them zero")
    return text


Word = Annotated[str, AfterValidator(_word)]
TimeOfDay = Annotated[str, AfterValidator(matching(
    r"([01]\d|2[0-3]):[0-5]\d", "must be a time of day such as `22:00`, in quotes"))]
Seconds = Annotated[float, Field(gt=0, le=31_536_000)]
SecondsFromZero = Annotated[float, Field(ge=0, le=31_536_000)]
Amount = Annotated[float, Field(ge=0, le=1e12)]
Count = Annotated[int, Field(ge=0, le=1_000_000)]
