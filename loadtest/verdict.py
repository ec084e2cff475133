"""Measured numbers against thresholds. Pure: the file is read by the caller.

A threshold whose number was not measured fails: a gate that cannot see must not open.
"""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Comparison = Literal["==", "<=", ">="]
_COMPARE: dict[str, Callable[[float, float], bool]] = {"==": operator.eq, "<=": operator.le, ">=": operator.ge}
_FIELDS = {"name", "must_be", "limit", "unit", "why"}


class ThresholdsError(ValueError):
    """A thresholds file that cannot be judged by; the message says which entry and what would be right."""


@dataclass(frozen=True, slots=True)
class Threshold:
    """One line of the gate. `why` is its provenance: what measurement or promise the limit comes from."""

    name: str
    must_be: Comparison
    limit: float
    unit: str
    why: str


@dataclass(frozen=True, slots=True)
class Row:
    """One judged threshold; `measured` is `None` where the run gave no such number."""

    threshold: Threshold
    measured: float | None
    passed: bool


def judge(measured: Mapping[str, float], thresholds: Sequence[Threshold]) -> tuple[Row, ...]:
    """One row a threshold, in their order."""
    return tuple(_judge_one(measured.get(threshold.name), threshold) for threshold in thresholds)


def _judge_one(value: float | None, threshold: Threshold) -> Row:
    if value is None or not math.isfinite(value):
        return Row(threshold, None, passed=False)
    return Row(threshold, value, _COMPARE[threshold.must_be](value, threshold.limit))


def passed(rows: Sequence[Row]) -> bool:
    """True where there is something to judge and all of it holds."""
    return bool(rows) and all(row.passed for row in rows)


def parse_thresholds(document: Any, group: str) -> tuple[Threshold, ...]:
    """The thresholds of one group of a loaded file. Raises `ThresholdsError`."""
    if not isinstance(document, Mapping) or not isinstance(document.get(group), Sequence):
        raise ThresholdsError(f"no list of thresholds under {group!r}")
    found: dict[str, Threshold] = {}
    for index, entry in enumerate(document[group]):
        threshold = _parse_one(entry, f"{group}[{index}]")
        if threshold.name in found:
            raise ThresholdsError(f"{group}[{index}]: {threshold.name} stands there twice")
        found[threshold.name] = threshold
    if not found:
        raise ThresholdsError(f"{group!r} is empty: nothing would be judged")
    return tuple(found.values())


def _parse_one(entry: Any, where: str) -> Threshold:
    if not isinstance(entry, Mapping) or set(entry) != _FIELDS:
        raise ThresholdsError(f"{where}: needs exactly {', '.join(sorted(_FIELDS))}")
    if entry["must_be"] not in _COMPARE:
        raise ThresholdsError(f"{where}: must_be is one of {', '.join(_COMPARE)}, got {entry['must_be']!r}")
    limit = entry["limit"]
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not math.isfinite(limit):
        raise ThresholdsError(f"{where}: limit is a finite number, got {limit!r}")
    if not str(entry["why"]).strip():
        raise ThresholdsError(f"{where}: why is empty; say where the limit comes from")
    why = " ".join(str(entry["why"]).split())
    return Threshold(str(entry["name"]), entry["must_be"], float(limit), str(entry["unit"]), why)
