"""The kinds of value that a file of settings holds: text for headers and labels, addresses, names of variables.

Each refuses with a sentence of its own (`wrong`), which `settings.problems` passes on as it stands. A sentence quotes
the refused value only where it cannot hold a secret.
"""

import re
from collections.abc import Callable, Mapping
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from settings.source import quoted

OURS = "settings"
"""The type of pydantic's errors that are in our own words."""


class Section(BaseModel):
    """A mapping of settings: strict types, no unknown settings, no NaN or infinity, never changed once built."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True)


def wrong(why: str, hint: str | None = None) -> PydanticCustomError:
    """A refusal in our own words."""
    return PydanticCustomError(OURS, "{why}", {"why": why, "hint": hint or ""})


def matching(pattern: str, rule: str) -> Callable[[str], str]:
    """A validator: text that the whole pattern matches, else the rule as a sentence, with what was given."""
    compiled = re.compile(pattern)

    def check(text: str) -> str:
        if not compiled.fullmatch(text):
            raise wrong(f"{rule}, got {quoted(text)}")
        return text

    return check


Name = Annotated[str, AfterValidator(matching(
    r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", "must be 1 to 64 letters, digits, `.`, `_` or `-`"))]
"""Backends, classes, nodes, pools, queues, jobs: these go in headers, file names and metric labels."""

Text = Annotated[str, AfterValidator(matching(
    r"(?=.*\S)[^\x00-\x1f\x7f]{1,200}", "must be 1 to 200 characters on one line"))]


def _host(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._:%-]{1,253}", text):
        raise wrong("must be an address or host name without scheme, port or brackets",
                    "for example 127.0.0.1, :: or 0.0.0.0")
    return text


Host = Annotated[str, AfterValidator(_host)]


def _base_url(text: str) -> str:
    """A backend's base address, without the trailing slash. The text is never quoted: it may hold a password."""
    if re.search(r"[\s\x00-\x1f\x7f\\]", text):
        raise wrong("must be a URL without spaces, control characters or backslashes")
    try:
        url = urlsplit(text)
        port = url.port
    except ValueError:
        raise wrong("is not a URL: its host or port cannot be read", _URL_EXAMPLE) from None
    if url.scheme not in ("http", "https"):
        raise wrong("must begin with http:// or https://", _URL_EXAMPLE)
    if url.username is not None or url.password is not None:
        raise wrong("must not hold a user or password",
                    "put the secret in an environment variable and name it in api_key_env")
    if not url.hostname or port == 0:
        raise wrong("must name a host, and a port other than 0", _URL_EXAMPLE)
    if url.query or url.fragment or "?" in text or "#" in text:
        raise wrong("must not hold a query or fragment", _URL_EXAMPLE)
    if url.path.rstrip("/") == "/v1":
        raise wrong("must be the base address without /v1, which Headrace adds", "leave out the /v1")
    if url.path.strip("/"):
        raise wrong("must not hold a path", _URL_EXAMPLE)
    return f"{url.scheme}://{url.netloc.lower()}"


_URL_EXAMPLE = "for example http://10.0.0.7:8000"
BaseUrl = Annotated[str, AfterValidator(_base_url)]


def _variable_name(text: str) -> str:
    # The value is not quoted: the usual mistake is to paste the secret itself here.
    if not re.fullmatch(r"[A-Z_][A-Z0-9_]{0,63}", text):
        raise wrong("must be the name of an environment variable: capitals, digits and `_`",
                    "export the value as LLAMA_KEY, say, and write that name; secrets never stand in this file")
    return text


VariableName = Annotated[str, AfterValidator(_variable_name)]


def _labels(labels: Mapping[str, str]) -> Mapping[str, str]:
    for key in labels:
        if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._/-]{0,62})", key):
            raise wrong(f"has the key {quoted(key)}; keys are 1 to 63 letters, digits, `.`, `_`, `/` or `-`")
    return labels


Labels = Annotated[dict[str, str], AfterValidator(_labels), Field(max_length=32)]
Port = Annotated[int, Field(ge=0, le=65_535)]
