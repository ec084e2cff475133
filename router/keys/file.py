"""The keys file: rows of hashed keys beside the fleet file, YAML or JSON, as strict as the fleet file itself."""

import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationError, model_validator

from router.keys.ring import DEFAULT_TENANT, KeyRow, digest_of
from settings.fields import Name, Section, wrong
from settings.problems import Finding, problems_of, validation_error
from settings.source import ConfigError, Problem, SourceDocument, parse_source, quoted, read_source

KEY_PREFIX = "hr-"
_FRESH_KEY = re.compile(re.escape(KEY_PREFIX) + r"[A-Za-z0-9_-]{32}")
_EMPTY_SHA256 = digest_of(b"").hex()
_NEWLINE_SHA256 = digest_of(b"\n").hex()


def _no_key(text: str) -> str:
    # Not quoted: it is the secret itself, pasted where its hash or its name belongs.
    if _FRESH_KEY.fullmatch(text):
        raise wrong("is an API key itself; the file holds hashes only",
                    "it is no secret any more where others read this file: make a new one with `headrace keys new`")
    return text


def _sha256(text: str) -> str:
    if not re.fullmatch(r"[0-9A-Fa-f]{64}", _no_key(text)):
        raise wrong("must be a SHA-256: 64 hexadecimal digits", "printf %s \"$KEY\" | sha256sum")
    if text.lower() in (_EMPTY_SHA256, _NEWLINE_SHA256):
        raise wrong("is the hash of no text at all", "printf %s \"$KEY\" | sha256sum, with KEY set")
    return text.lower()


def _instant(text: str) -> str:
    instant_of(text)
    return text


def instant_of(text: str) -> float:
    """A date (its first instant in UTC) or a time with its zone, as Unix time.

    Raises:
        PydanticCustomError: it is neither.
    """
    try:
        instant = datetime.fromisoformat(text)
        if re.fullmatch(r"\d{4}-\d{2}-\d{2}", text):
            instant = instant.replace(tzinfo=UTC)
        if instant.tzinfo is not None:
            return instant.timestamp()
    except (ValueError, OverflowError):
        pass
    raise wrong("must be a date or a time with its zone", "for example 2027-01-31 or 2027-01-31T18:00:00+01:00")


Id = Annotated[Name, AfterValidator(_no_key)]


class KeySection(Section):
    """One key, by its hash."""

    id: Id = Field(description="Unique; names the key in decision records and logs.", examples=["search-1"])
    sha256: Annotated[str, AfterValidator(_sha256)] = Field(
        description="SHA-256 of the key, in hexadecimal.", examples=["9f86d081…"])
    tenant: Id = Field(default=DEFAULT_TENANT, description="Whose key it is.", examples=["search"])
    max_parallel: Annotated[int, Field(ge=1, le=1_000_000)] | None = Field(
        default=None,
        description="Requests that it may have in flight at once; left out: as many as the gateway takes.",
        examples=[16])
    disabled: bool = Field(default=False, description="Refuse it, and keep its row.", examples=[True])
    expires: Annotated[str, AfterValidator(_instant)] | None = Field(
        default=None, description="Refuse it from then on: a date (in UTC) or a time with its zone.",
        examples=["2027-01-31"])

    def row(self) -> KeyRow:
        """The key as requests are checked against it."""
        return KeyRow(self.id, bytes.fromhex(self.sha256), self.tenant, self.max_parallel, self.disabled,
                      inf if self.expires is None else instant_of(self.expires))


class KeysFile(Section):
    """A whole keys file."""

    version: Literal[1] = Field(default=1, description="Version of this format.", examples=[1])
    keys: Annotated[tuple[KeySection, ...], Field(max_length=100_000)] = Field(
        strict=False, description="The keys.", examples=[[{"id": "search-1", "sha256": "9f86d081…"}]])

    @model_validator(mode="after")
    def _are_unique(self) -> "KeysFile":
        if findings := [*self._repeated("id"), *self._repeated("sha256")]:
            raise validation_error(findings)
        return self

    def _repeated(self, name: str) -> Iterator[Finding]:
        first: dict[str, int] = {}
        for index, key in enumerate(self.keys):
            value = getattr(key, name)
            if value in first:
                yield Finding(("keys", index, name), f"is that of keys[{first[value]}] too",
                              "one row a key" if name == "sha256" else "give each row an id of its own")
            first.setdefault(value, index)


def load_keys(path: Path) -> tuple[KeyRow, ...]:
    """The rows of a keys file.

    Raises:
        ConfigError: with every problem found, each with its file, line and row.
    """
    return parse_keys(read_source(path), str(path))


def parse_keys(raw: bytes, file: str) -> tuple[KeyRow, ...]:
    """`load_keys` on bytes already read; `file` is the name that problems carry.

    Raises:
        ConfigError: as `load_keys`.
    """
    try:
        document = parse_source(raw, file)
    except ConfigError as error:
        raise ConfigError([_without_values(_own_hint(problem)) for problem in error.problems]) from None
    try:
        keys = KeysFile.model_validate(document.content).keys
    except ValidationError as error:
        problems = problems_of(error, document, KeysFile)
        raise ConfigError([_with_id(_without_values(problem), document) for problem in problems]) from None
    return tuple([key.row() for key in keys])


def unique_rows(file: str, in_file: tuple[KeyRow, ...], in_environment: tuple[KeyRow, ...]) -> tuple[KeyRow, ...]:
    """All rows together.

    Raises:
        ConfigError: a variable holds a key that the file has as well: whose it is would be open.
    """
    known = {row.digest: row.id for row in in_file}
    problems = [
        Problem(file, None, None, "keys", f"key {known[row.digest]} is also in environment variable "
                                          f"{row.id.removeprefix('env:')}", "take it out of one of the two")
        for row in in_environment if row.digest in known
    ]
    if problems:
        raise ConfigError(problems)
    return (*in_file, *in_environment)


def _own_hint(problem: Problem) -> Problem:
    """A problem of the text itself; one that came without a hint, such as an empty file, gets this file's own."""
    if problem.hint is not None:
        return problem
    return replace(problem, hint="it begins with `keys:`; `headrace keys new` prints rows")


def _without_values(problem: Problem) -> Problem:
    """The problem without what stands in the file: under a mistaken name that may well be a key."""
    message = re.sub(r", got (the text )?\".*", "", problem.message)
    return replace(problem, message=_FRESH_KEY.sub("[key]", message), path=_FRESH_KEY.sub("[key]", problem.path))


def _with_id(problem: Problem, document: SourceDocument) -> Problem:
    """The row's id beside its number, since nobody counts rows."""
    found = re.match(r"keys\[(\d+)\](\.(?!id\b)|$)", problem.path)
    rows = document.content.get("keys")
    if found is None or not isinstance(rows, list):
        return problem
    row = rows[int(found[1])]
    named = row.get("id") if isinstance(row, dict) else None
    if not isinstance(named, str) or not named or _FRESH_KEY.search(named):
        return problem
    return replace(problem, message=f"{problem.message} (key {quoted(named, 64)[1:-1]})")
