"""Reads an allocator file and a job file: YAML with places, so that each problem names its line."""

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from allocator.service.config import AllocatorConfig, Declared, build
from allocator.service.job_request import JobRequest
from allocator.units.table import BadCoefficients
from settings.problems import problems_of
from settings.source import ConfigError, Problem, SourceDocument, parse_source, read_source

Model = TypeVar("Model", bound=BaseModel)


def load_allocator(path: Path) -> Declared:
    """Reads, validates and builds an allocator file; nothing is started or changed.

    Raises:
        ConfigError: with every problem found, each with its line where it has one.
    """
    document, config = _read(path, AllocatorConfig, "deploy/allocator.example.yaml")
    try:
        declared, findings = build(config, path.absolute().parent)
    except BadCoefficients as problem:
        raise ConfigError([document.problem(("coefficients",), str(problem))]) from None
    if declared is None:
        raise ConfigError([document.problem(one.loc, one.message, one.hint or None) for one in findings])
    return declared


def load_job(path: Path) -> JobRequest:
    """Reads and validates a job file. Raises ConfigError."""
    return _read(path, JobRequest)[1]


def lines_of(problems: tuple[Problem, ...]) -> tuple[str, ...]:
    """Each problem as one line, with what would be right."""
    return tuple(str(problem) + (f" ({problem.hint})" if problem.hint else "") for problem in problems)


def _read(path: Path, model: type[Model], example: str | None = None) -> tuple[SourceDocument, Model]:
    document = parse_source(read_source(path), str(path), example)
    try:
        return document, model.model_validate(document.content)
    except ValidationError as error:
        raise ConfigError(problems_of(error, document, model)) from None
