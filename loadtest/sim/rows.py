"""One row a scenario and policy: means over seeds, and how far seeds lie apart."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from statistics import mean, stdev

from loadtest.sim.measures import Measures, Tally

DIGITS = 9
"""Of figures in JSON: enough for any use, few enough that sums in another order would not show."""


@dataclass(frozen=True, slots=True)
class Row:
    """All seeds of one scenario under one policy."""

    scenario: str
    policy: str
    pool: str
    rate_per_s: float
    seconds: float
    seeds: tuple[int, ...]
    runs: tuple[Measures, ...]
    """In the order of the seeds."""
    cost_over_bound: float | None = None
    goodput_over_bound: float | None = None
    events: Mapping[str, float] | None = None
    """Moments of the scenario, in seconds."""

    def mean(self, figure: str) -> float | None:
        """Over the seeds in which it is known."""
        known = self._known(figure)
        return mean(known) if known else None

    def sd(self, figure: str) -> float | None:
        """Sample standard deviation over seeds; `None` for fewer than two."""
        known = self._known(figure)
        return stdev(known) if len(known) > 1 else None

    def means(self, figure: str) -> dict[str, float]:
        """The same of a figure that has a value for each backend or class."""
        names = dict.fromkeys(name for run in self.runs for name in getattr(run, figure))
        return {name: mean([getattr(run, figure)[name] for run in self.runs if name in getattr(run, figure)])
                for name in names}

    def coverage(self) -> dict[str, dict[str, Tally]]:
        """First tokens within their predicted P99, by backend and class, over all seeds."""
        return pooled([run.coverage for run in self.runs])

    def _known(self, figure: str) -> list[float]:
        return [value for run in self.runs if (value := getattr(run, figure)) is not None]

    def as_json(self, *, timing: bool = False) -> dict[str, object]:
        """The row for programs. Decision times differ from run to run, so they are there only where asked for."""
        return {
            "scenario": self.scenario, "policy": self.policy, "seeds": list(self.seeds),
            **{name: _rounded(self.mean(name)) for name in (
                "in_budget", "late", "shed", "lost", "cost_per_1k_in_budget", "ttft_p50_s", "ttft_p99_s", "itl_p99_s")},
            "shares": {name: _rounded(value) for name, value in self.means("shares").items()},
            "coverage_p99": _rounded(self.mean("coverage_p99")),
            "decision_us": _rounded(self.mean("decision_us")) if timing else None,
            "cost_over_bound": _rounded(self.cost_over_bound),
            "goodput_over_bound": _rounded(self.goodput_over_bound),
        }

    def details(self) -> dict[str, object]:
        """What the row has beyond its figures: spread over seeds, classes, backends, faults."""
        spread = ("in_budget", "cost_per_1k_in_budget", "ttft_p99_s", "late", "shed", "lost")
        more = ("worst_class", "retried", "coverage_e2e_p99", "miss_predicted", "miss_seen", "hit_rate", "detection_s")
        covered = self.coverage()
        return {
            "scenario": self.scenario, "policy": self.policy, "pool": self.pool, "rate_per_s": self.rate_per_s,
            "seconds": self.seconds, "requests": sum(run.requests for run in self.runs),
            "sd": {name: _rounded(self.sd(name)) for name in spread},
            "in_budget_by_seed": [_rounded(run.in_budget) for run in self.runs],
            "cost_by_seed": [_rounded(run.cost_per_1k_in_budget) for run in self.runs],
            **{name: _rounded(self.mean(name)) for name in more},
            **{name: {key: _rounded(value) for key, value in self.means(name).items()}
               for name in ("by_class", "busy")},
            "coverage_by_backend": {name: _rounded(tally.share) for name, tally in by_backend(covered).items()},
            "coverage_by_class": {name: _rounded(tally.share) for name, tally in by_class(covered).items()},
            "coverage": {backend: {name: list(tally) for name, tally in cells.items()}
                         for backend, cells in covered.items()},
        }


def pooled(runs: Iterable[Mapping[str, Mapping[str, Tally]]]) -> dict[str, dict[str, Tally]]:
    """Tallies of several runs in one, in the order in which backends and classes are first met."""
    found: dict[str, dict[str, Tally]] = {}
    for run in runs:
        for backend, cells in run.items():
            row = found.setdefault(backend, {})
            for name, tally in cells.items():
                row[name] = row.get(name, Tally()).plus(tally)
    return found


def by_backend(coverage: Mapping[str, Mapping[str, Tally]]) -> dict[str, Tally]:
    """Over classes."""
    return {backend: reduce(Tally.plus, cells.values(), Tally()) for backend, cells in coverage.items()}


def by_class(coverage: Mapping[str, Mapping[str, Tally]]) -> dict[str, Tally]:
    """Over backends, by name."""
    names = sorted({name for cells in coverage.values() for name in cells})
    return {name: reduce(Tally.plus, [cells[name] for cells in coverage.values() if name in cells], Tally())
            for name in names}


def gather(jobs_per_row: Sequence[tuple[str, str, str, float, float, tuple[int, ...]]],
           results: Sequence[Measures], events: Mapping[str, Mapping[str, float]]) -> tuple[Row, ...]:
    """Rows out of results that lie in the order of rows and, within each, of seeds."""
    rows, at = [], 0
    for scenario, policy, pool, rate_per_s, seconds, seeds in jobs_per_row:
        runs = tuple(results[at : at + len(seeds)])
        at += len(seeds)
        rows.append(Row(scenario, policy, pool, rate_per_s, seconds, seeds, runs, events=events.get(scenario)))
    return tuple(rows)


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{DIGITS}g}")
