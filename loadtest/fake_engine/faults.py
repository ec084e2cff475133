"""What goes wrong with an engine, and when. Pure: the clock and the dice are the caller's.

A fault is written as one line::

    slow x3 from 5 to 10            steps take three times as long
    error 503:2 p 0.1               one request in ten is answered 503 with Retry-After: 2
    hang from 20                    requests are accepted and never answered
    cut 8                           responses break off after 8 chunks: the connection is dropped
    cut 8 clean                     ... or end without a final chunk and without [DONE], as if complete
    freeze-metrics                  /metrics repeats the first page that was asked for while the fault is on
    lie-metrics                     /metrics says that the engine is idle
    slow-health 3                   /health takes three seconds
    die from 30                     the process exits at once

`from` and `to` are seconds since the engine started (or since a change of the schedule, where it is changed live);
without them a fault is always on. `p` is a probability per request, for error, hang and cut.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from math import inf
from typing import Any


class FaultKind(StrEnum):
    SLOW = "slow"
    ERROR = "error"
    HANG = "hang"
    CUT = "cut"
    FREEZE_METRICS = "freeze-metrics"
    LIE_METRICS = "lie-metrics"
    SLOW_HEALTH = "slow-health"
    DIE = "die"


_PER_REQUEST = frozenset({FaultKind.ERROR, FaultKind.HANG, FaultKind.CUT})


class BadFault(ValueError):
    """A fault that cannot be read; the message says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault and its time. Fields of other kinds keep their defaults."""

    kind: FaultKind
    from_s: float = 0.0
    to_s: float = inf
    probability: float = 1.0
    factor: float = 1.0
    """slow: step times are multiplied by it."""
    status: int = 500
    """error: the HTTP status."""
    retry_after_s: int | None = None
    """error: the Retry-After header, where there is one."""
    after_chunks: int = 1
    """cut: chunks that still come through."""
    clean: bool = False
    """cut: the body ends as if it were complete, instead of a dropped connection."""
    delay_s: float = 0.0
    """slow-health: seconds before the answer."""

    def __post_init__(self) -> None:
        checks = (
            (0 <= self.from_s < self.to_s, "the time must run from a moment to a later one"),
            (0 < self.probability <= 1, "p must be over 0 and at most 1"),
            (0 < self.factor < inf, "the factor must be over 0"),
            (400 <= self.status <= 599, "the status must be 400 to 599"),
            (self.retry_after_s is None or self.retry_after_s >= 0, "Retry-After must be 0 or more"),
            (self.after_chunks >= 0, "the number of chunks must be 0 or more"),
            (0 <= self.delay_s < inf, "the delay must be 0 or more"),
            (self.probability == 1 or self.kind in _PER_REQUEST, f"p means nothing for {self.kind}"),
        )
        for holds, wrong in checks:
            if not holds:
                raise BadFault(f"fault {self.kind}: {wrong}")

    def __str__(self) -> str:
        words = [str(self.kind)]
        match self.kind:
            case FaultKind.SLOW:
                words.append(f"x{self.factor:g}")
            case FaultKind.ERROR:
                words.append(f"{self.status}" + (f":{self.retry_after_s}" if self.retry_after_s is not None else ""))
            case FaultKind.CUT:
                words.append(f"{self.after_chunks}" + (" clean" if self.clean else ""))
            case FaultKind.SLOW_HEALTH:
                words.append(f"{self.delay_s:g}")
        if self.probability < 1:
            words.append(f"p {self.probability:g}")
        if self.from_s > 0:
            words.append(f"from {self.from_s:g}")
        if self.to_s < inf:
            words.append(f"to {self.to_s:g}")
        return " ".join(words)


def parse_fault(line: str) -> Fault:
    """Reads one fault from a line.

    Raises:
        BadFault: the line is not one of the forms in this module's head.
    """
    words = line.split()
    if not words:
        raise BadFault("an empty fault")
    try:
        kind = FaultKind(words[0])
    except ValueError:
        raise BadFault(f"no fault {words[0]!r}; there are {', '.join(FaultKind)}") from None
    try:
        return Fault(kind=kind, **_read_arguments(kind, words[1:]))
    except BadFault as problem:
        raise BadFault(f"{line!r}: {problem}") from None
    except (ValueError, IndexError):
        raise BadFault(f"{line!r} is not a fault: see the forms of {kind} in the documentation") from None


def _read_arguments(kind: FaultKind, words: list[str]) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    rest = list(words)
    match kind:
        case FaultKind.SLOW:
            arguments["factor"] = float(rest.pop(0).removeprefix("x"))
        case FaultKind.ERROR:
            status, _, retry_after = rest.pop(0).partition(":")
            arguments["status"] = int(status)
            if retry_after:
                arguments["retry_after_s"] = int(retry_after)
        case FaultKind.CUT:
            arguments["after_chunks"] = int(rest.pop(0))
            if rest and rest[0] in ("clean", "abort"):
                arguments["clean"] = rest.pop(0) == "clean"
        case FaultKind.SLOW_HEALTH:
            arguments["delay_s"] = float(rest.pop(0).removesuffix("s"))
    names = {"from": "from_s", "to": "to_s", "p": "probability"}
    while rest:
        word = rest.pop(0)
        if word not in names or names[word] in arguments:
            raise BadFault(f"{word!r} is out of place")
        arguments[names[word]] = float(rest.pop(0).removesuffix("s"))
    return arguments


def read_faults(entries: Iterable[str | Mapping[str, Any]]) -> tuple[Fault, ...]:
    """Reads a schedule: lines, or mappings of `Fault`'s fields (as YAML and JSON give them).

    Raises:
        BadFault: an entry is neither, or says something impossible.
    """
    return tuple(parse_fault(entry) if isinstance(entry, str) else _from_mapping(entry) for entry in entries)


def _from_mapping(entry: Mapping[str, Any]) -> Fault:
    if not isinstance(entry, Mapping) or "kind" not in entry:
        raise BadFault(f"a fault is a line or a mapping with `kind`, not {entry!r}")
    known = {field.name for field in fields(Fault)}
    unknown = sorted(set(entry) - known)
    if unknown:
        raise BadFault(f"fault {entry['kind']!r}: unknown field {', '.join(map(repr, unknown))}")
    try:
        return Fault(**{**entry, "kind": FaultKind(entry["kind"])})
    except TypeError as problem:
        raise BadFault(f"fault {entry['kind']!r}: {problem}") from None
    except BadFault:
        raise
    except ValueError:
        raise BadFault(f"no fault {entry['kind']!r}; there are {', '.join(FaultKind)}") from None


def active(faults: Iterable[Fault], t_s: float) -> tuple[Fault, ...]:
    """The faults that are on at `t_s`, in the order of the schedule. `from_s` belongs to a fault's time, `to_s` not."""
    return tuple(fault for fault in faults if fault.from_s <= t_s < fault.to_s)


def slow_factor(faults: Iterable[Fault], t_s: float) -> float:
    """By how much steps are stretched at `t_s`; overlapping slow faults multiply."""
    factor = 1.0
    for fault in faults:
        if fault.kind is FaultKind.SLOW and fault.from_s <= t_s < fault.to_s:
            factor *= fault.factor
    return factor


def find_active(faults: Iterable[Fault], kind: FaultKind, t_s: float, dice: float = 0.0) -> Fault | None:
    """The first fault of that kind that is on at `t_s` and hits; `dice` is uniform in [0, 1)."""
    for fault in faults:
        if fault.kind is kind and fault.from_s <= t_s < fault.to_s and dice < fault.probability:
            return fault
    return None


def death_s(faults: Iterable[Fault]) -> float | None:
    """When the process is due to die, if it is."""
    return min((fault.from_s for fault in faults if fault.kind is FaultKind.DIE), default=None)
