"""One row a scenario and policy: the figures of each seed, and their means."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import ceil
from statistics import mean, stdev

from loadtest.sim.drawing import Point

DIGITS = 6
HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Figures:
    """What one run came to. `None`: does not apply, or nothing of the kind happened."""

    queue_wait_mean_s: float
    """Of all that a job waits: before its first start, and after every stop."""
    queue_wait_p95_s: float
    gang16_wait_mean_s: float | None
    """Of gangs of 16 and more."""
    jct_mean_s: float
    """From submission to completion."""
    jct_p95_s: float
    utilisation: float | None
    """Units of work done for good over the units that all cards could have done."""
    unit_cost: float | None
    """Money for all cards, busy or not, by unit · hour of work done for good."""
    recalls: int | None = None
    recall_p99_s: float | None = None
    """From the recall to the devices proven free and probed."""
    overdue: int | None = None
    lost_device_h: float | None = None
    """Device · hours that stops for others cost: work undone, checkpoints written, restarts."""
    lost_over_optimum: float | None = None
    """Work put at stake by the choice of whom to stop, over that of the best choice of the same recall."""
    p99_breach: float | None = None
    """Share of inference requests that missed their latency budget."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run: its figures, and what is drawn of it."""

    figures: Figures
    curves: Mapping[str, tuple[Point, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Row:
    """All seeds of one scenario under one policy."""

    scenario: str
    policy: str
    seeds: tuple[int, ...]
    runs: tuple[Figures, ...]
    """In the order of the seeds."""
    curves: Mapping[str, tuple[Point, ...]] = field(default_factory=dict)
    """Of the first seed."""

    def mean(self, figure: str) -> float | None:
        """Over the seeds in which it is known."""
        known = [value for run in self.runs if (value := getattr(run, figure)) is not None]
        return mean(known) if known else None

    def sd(self, figure: str) -> float | None:
        """Sample standard deviation over seeds; `None` for fewer than two."""
        known = [value for run in self.runs if (value := getattr(run, figure)) is not None]
        return stdev(known) if len(known) > 1 else None

    def as_json(self) -> dict[str, object]:
        """The row for programs; counts are means over seeds too."""
        return {"scenario": self.scenario, "policy": self.policy, "seeds": list(self.seeds),
                **{name: _rounded(self.mean(name)) for name in FIGURES}}

    def by_seed(self) -> dict[str, object]:
        """The same figures seed by seed."""
        return {"scenario": self.scenario, "policy": self.policy, "seeds": list(self.seeds),
                **{name: [_rounded(getattr(run, name)) for run in self.runs] for name in FIGURES}}


def row_of(scenario: str, policy: str, seeds: tuple[int, ...], outcomes: Sequence[Outcome]) -> Row:
    """A row out of its runs, in the order of the seeds."""
    return Row(scenario, policy, seeds, tuple(outcome.figures for outcome in outcomes), outcomes[0].curves)


FIGURES = tuple(each.name for each in fields(Figures))


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of all is not over."""
    ordered = sorted(values)
    return ordered[max(0, ceil(share * len(ordered)) - 1)]


def cumulated(values_s: Sequence[float], per: float = HOUR_S, points: int = 60) -> tuple[Point, ...]:
    """The distribution of some times, in hours, as points of its curve."""
    ordered = sorted(values_s)
    places = [min(len(ordered) - 1, step * len(ordered) // points) for step in range(points)] + [len(ordered) - 1]
    return tuple((ordered[place] / per, (place + 1) / len(ordered)) for place in places)


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{DIGITS}g}")
