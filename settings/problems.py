"""pydantic's findings → problems with a line, in words that say what would be right."""

import json
import math
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from types import UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel, Tag, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, InitErrorDetails

from settings.fields import OURS, wrong
from settings.source import Loc, Problem, SourceDocument, quoted

_BOUNDS = {"greater_than_equal": ("≥", "ge"), "greater_than": (">", "gt"),
           "less_than_equal": ("≤", "le"), "less_than": ("<", "lt")}
_TYPES = {
    "string_type": "must be text", "int_type": "must be a whole number", "float_type": "must be a number",
    "bool_type": "must be true or false", "tuple_type": "must be a list", "dict_type": "must be a mapping",
    "model_type": "must be a mapping of settings", "finite_number": "must be a finite number",
    "int_from_float": "must be a whole number", "int_parsing_size": "must be a whole number of sensible size",
}


class Finding(NamedTuple):
    """Something to say about one setting."""

    loc: Loc
    message: str
    hint: str | None = None


def nearest(word: str, known: Iterable[str]) -> str | None:
    """A hint that names the known word most like `word`, or all known words where none is near."""
    known = sorted(known)
    if not known:
        return None
    if close := get_close_matches(word.lower(), known, n=1, cutoff=0.6):
        return f"did you mean {quoted(close[0])}?"
    shown = ", ".join(known[:20]) + (", …" if len(known) > 20 else "")
    return f"known here: {shown}"


def validation_error(findings: Iterable[Finding]) -> ValidationError:
    """Findings as pydantic's own error, for a validator to raise: it adds where it stands to each place."""
    return ValidationError.from_exception_data("settings", [
        InitErrorDetails(type=wrong(finding.message, finding.hint), loc=finding.loc, input=None)
        for finding in findings
    ])


def problems_of(error: ValidationError, document: SourceDocument, model: type[BaseModel]) -> tuple[Problem, ...]:
    """Every error of a validation as a problem, in the order of the file."""
    details = error.errors(include_url=False)
    problems = [_problem(detail, document, model) for detail in details if not _is_echo(detail)]
    return tuple(sorted(problems, key=lambda problem: (problem.line or 0, problem.column or 0)))


def _is_echo(detail: ErrorDetails) -> bool:
    """pydantic also calls a list too short where its items were refused; their own errors say it all."""
    return detail["type"] == "too_short" and len(detail["input"]) >= detail["ctx"]["min_length"]


def _problem(detail: ErrorDetails, document: SourceDocument, model: type[BaseModel]) -> Problem:
    loc = untagged(model, detail["loc"])
    if detail["type"] == "extra_forbidden":
        # The value of an unknown setting is not quoted: it may be a secret under a mistaken name.
        return document.problem(loc, "unknown setting", nearest(str(loc[-1]), _known_settings(model, loc[:-1])))
    message, hint = _words(detail)
    return document.problem(loc, message, hint or _example(model, loc, detail))


def untagged(model: type[BaseModel], loc: Loc) -> Loc:
    """`loc` without the names that the members of a union have there: nobody has written those."""
    kept: list[str | int] = []
    tags: set[str] = set()
    section: type[BaseModel] | None = model
    for part in loc:
        if part in tags:
            tags = set()
            continue
        kept.append(part)
        if isinstance(part, str):
            info = section.model_fields.get(part) if section else None
            section = section_in(info.annotation) if info else None
            tags = set(_tags_in(info.annotation)) if info else set()
    return tuple(kept)


def _tags_in(annotation: Any) -> Iterable[str]:
    if get_origin(annotation) in (Union, UnionType):
        for member in get_args(annotation):
            yield from (one.tag for one in getattr(member, "__metadata__", ()) if isinstance(one, Tag))


def _words(detail: ErrorDetails) -> tuple[str, str | None]:
    kind, given, limits = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == OURS:
        return limits["why"], limits["hint"] or None
    if kind == "missing":
        return "is missing", None
    if kind in _BOUNDS:
        sign, key = _BOUNDS[kind]
        return f"must be {sign} {limits[key]:g}, got {_shown(given)}", None
    if kind in _TYPES:
        return f"{_TYPES[kind]}, got {_shown(given)}", _quotes_hint(kind, given)
    if kind == "literal_error":
        return f"must be {limits['expected']}, got {_shown(given)}", None
    if kind == "too_short":
        return "must not be empty" if limits["min_length"] == 1 else f"must hold ≥ {limits['min_length']} items", None
    if kind in ("too_long", "string_too_long"):
        return f"must be at most {limits['max_length']} long", None
    return detail["msg"], None


def _shown(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f"the text {quoted(value)}"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else "infinity"
    return quoted(str(value))[1:-1]


def _quotes_hint(kind: str, given: Any) -> str | None:
    if kind == "string_type" and isinstance(given, int | float):
        return f"put it in quotes: {quoted(_yaml(given))}"
    if kind in ("int_type", "float_type") and isinstance(given, str):
        try:
            float(given)
        except ValueError:
            return None
        return f"write it without quotes: {given.strip()[:40]}"
    return None


def _example(model: type[BaseModel], loc: Loc, detail: ErrorDetails) -> str | None:
    """`for example `weight: 1.0``, from the setting's own field."""
    info, key = None, ""
    for end in range(len(loc), 0, -1):
        if isinstance(loc[end - 1], str):
            info, key = _field(model, loc[:end]), str(loc[end - 1])
            break
    if info is None or not info.examples:
        return None
    if detail["type"] in _BOUNDS and info.description:
        return info.description
    return f"for example `{key}: {_yaml(info.examples[0])}`"


def _yaml(value: Any) -> str:
    """A value in YAML's flow style."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_yaml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_yaml, value)) + "]"
    return value if isinstance(value, str) else json.dumps(value)


def _known_settings(model: type[BaseModel], loc: Loc) -> Sequence[str]:
    section = _section(model, loc)
    return list(section.model_fields) if section else []


def _field(model: type[BaseModel], loc: Loc) -> FieldInfo | None:
    section = _section(model, loc[:-1])
    return section.model_fields.get(str(loc[-1])) if section else None


def _section(model: type[BaseModel], loc: Loc) -> type[BaseModel] | None:
    """The section's class at `loc`: `("backends", 1, "card")` → `CardSection`."""
    section: type[BaseModel] | None = model
    for part in loc:
        if isinstance(part, str):
            info = section.model_fields.get(part) if section else None
            section = section_in(info.annotation) if info else None
    return section


def section_in(annotation: Any) -> type[BaseModel] | None:
    """The section inside an annotation: itself, in a tuple, or beside None."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (tuple, Union, UnionType) or hasattr(annotation, "__metadata__"):
        for argument in get_args(annotation):
            if found := section_in(argument):
                return found
    return None
