"""The rows of `headrace sim` against the bound: `cost_over_bound` and `goodput_over_bound`, means over the seeds.

Each run is compared with the bound of its own trace, at its own number of requests in budget. A run with none of them
says nothing about cost and is left out of that mean.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

from loadtest.sim.bound.clairvoyant import Bound
from loadtest.sim.bound.simulated import instance_of
from loadtest.sim.measures import Measures
from loadtest.sim.pools import find_pool
from loadtest.sim.rows import Row
from loadtest.sim.run import Job, lay_out


@dataclass(frozen=True, slots=True)
class Trace:
    """What settles a trace: all of a job but its policy."""

    scenario: str
    pool: str
    seed: int
    rate_per_s: float
    seconds: float
    trace_dir: Path | None = None

    def job(self, policy: str) -> Job:
        return Job(self.scenario, self.pool, policy, self.seed, self.rate_per_s, self.seconds, self.trace_dir)


def bounds_of(trace: Trace, good_requests: Sequence[int]) -> dict[int, Bound]:
    """The bound of one trace for each of these numbers of requests in budget."""
    pool = find_pool(trace.pool)
    clairvoyant = instance_of(pool, lay_out(trace.job("bound")), trace.seed).clairvoyant()
    return {good: clairvoyant.bound(good) for good in dict.fromkeys(good_requests)}


def with_bounds(
    rows: Sequence[Row], folder: Path | None = None, advance: Callable[[str], None] = lambda what: None
) -> tuple[Row, ...]:
    """The same rows with their two ratios; `advance` hears of each trace that is done."""
    wanted: dict[Trace, list[int]] = {}
    for row in rows:
        for trace, run in _runs(row, folder):
            wanted.setdefault(trace, []).append(good_requests(run))
    bounds: dict[Trace, Mapping[int, Bound]] = {}
    for trace, numbers in wanted.items():
        bounds[trace] = bounds_of(trace, numbers)
        advance(f"bound of {trace.scenario}, seed {trace.seed}")
    compared = []
    for row in rows:
        against = [(run, bounds[trace][good_requests(run)]) for trace, run in _runs(row, folder)]
        costs = [bound.cost_over_bound(run.cost_per_1k_in_budget * bound.good_requests / 1000)
                 for run, bound in against if run.cost_per_1k_in_budget is not None]
        goods = [bound.goodput_over_bound(bound.good_requests) for _, bound in against]
        compared.append(replace(row, cost_over_bound=_mean(costs), goodput_over_bound=_mean(goods)))
    return tuple(compared)


def good_requests(run: Measures) -> int:
    """Requests in budget of a run."""
    return round(run.in_budget * run.requests)


def _runs(row: Row, folder: Path | None) -> list[tuple[Trace, Measures]]:
    return [(Trace(row.scenario, row.pool, seed, row.rate_per_s, row.seconds, folder), run)
            for seed, run in zip(row.seeds, row.runs, strict=True)]


def _mean(ratios: Sequence[float | None]) -> float | None:
    known = [ratio for ratio in ratios if ratio is not None]
    return mean(known) if known else None
