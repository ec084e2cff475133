"""From the outcomes of one run to its numbers. Pure.

Everything counts requests that arrive after the warm-up. *In budget* is the share of all of them, shed and lost ones
included, whose first and last token came by their deadlines; *late* were served whole, but not so. Cost counts what was
computed for every request, of use or not, over those in budget. *Coverage* is the share of served requests that were
no slower than the P99 predicted for them: 99 % where predictions are right.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import NamedTuple

from loadtest.measured import percentile
from loadtest.sim.flight import Fate, Outcome
from loadtest.sim.workload import Workload
from loadtest.sim.world import World

CDF_POINTS = 101
TIME_BINS = 80
MOST_LINES = 16
"""Nobody can read the time lines of more backends."""


class Tally(NamedTuple):
    """How many of how many: a share that says how much is known of it."""

    within: int = 0
    of: int = 0

    @property
    def share(self) -> float | None:
        """`None` of nothing."""
        return self.within / self.of if self.of else None

    def plus(self, other: "Tally") -> "Tally":
        """Both together."""
        return Tally(self.within + other.within, self.of + other.of)


class NothingCounted(ValueError):
    """No request came after the warm-up, so there is nothing to say."""


@dataclass(frozen=True, slots=True)
class Measures:
    """One run of one policy. Shares are 0 to 1; what cannot be known is `None`."""

    requests: int
    in_budget: float
    worst_class: float
    late: float
    shed: float
    lost: float
    retried: float
    cost_per_1k_in_budget: float | None
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    itl_p99_s: float | None
    """P99 over requests of each one's mean gap between tokens."""
    shares: Mapping[str, float]
    busy: Mapping[str, float]
    """Share of the run in which each engine was iterating."""
    by_class: Mapping[str, float]
    """In-budget share by latency class."""
    coverage_p99: float | None
    """Of first tokens."""
    coverage_e2e_p99: float | None
    coverage: Mapping[str, Mapping[str, Tally]]
    """Of first tokens, by backend and class; only pairs that served."""
    coverage_timelines: Mapping[str, tuple[Tally, ...]]
    """The same by backend and time of arrival, in bins as `timeline`."""
    miss_predicted: float | None
    """Mean probability of a miss that the policy gave the requests it accepted; beside it, what came true."""
    miss_seen: float | None
    hit_rate: float | None
    detection_s: float | None
    decision_us: float
    """Median of real time: a machine that is busy with something else interrupts few decisions, but those for long."""
    decision_p99_us: float
    ttft_cdf: tuple[float, ...]
    """Quantiles 0, 1, … 100 % of first-token time over its budget, of served requests that have one."""
    timeline: tuple[float | None, ...]
    """In-budget share by time of arrival, in equal bins over the run; `None` where nobody came."""
    share_timelines: Mapping[str, tuple[float, ...]]
    """Share of each backend among the requests of each bin."""


def measure(world: World) -> Measures:
    """The numbers of a world that has run. Raises `NothingCounted`."""
    workload = world.workload
    counted = [outcome for outcome in world.outcomes if outcome.request.arrival_s >= workload.warm_up_s]
    if not counted:
        raise NothingCounted(
            f"no request after the warm-up of {workload.warm_up_s:g} s: it needs a longer run or a higher rate")
    counted.sort(key=lambda outcome: outcome.request.arrival_s)
    total = len(counted)
    served = [outcome for outcome in counted if outcome.fate is Fate.SERVED]
    good = sum(outcome.in_budget for outcome in counted)
    fates = Counter(outcome.fate for outcome in counted)
    names = [backend.name for backend in world.pool.backends]
    by_class = _shares_by(counted, lambda outcome: outcome.request.latency_class, lambda outcome: outcome.in_budget)
    covered = [outcome for outcome in served if outcome.predicted_ttft_p99_s is not None]
    judged = [outcome for outcome in counted if outcome.miss is not None and outcome.fate is not Fate.SHED]
    ttfts = [_ttft_s(outcome) for outcome in served]
    seconds = max(workload.seconds, 1e-9)
    times = [took for gateway in world.gateways for took in gateway.decision_times_s]
    return Measures(
        requests=total,
        in_budget=good / total,
        worst_class=min(by_class.values()),
        late=(len(served) - good) / total,
        shed=fates[Fate.SHED] / total,
        lost=fates[Fate.LOST] / total,
        retried=sum(outcome.attempts > 1 for outcome in counted) / total,
        cost_per_1k_in_budget=1000.0 * sum(outcome.cost for outcome in counted) / good if good else None,
        ttft_p50_s=percentile(ttfts, 0.5),
        ttft_p99_s=percentile(ttfts, 0.99),
        itl_p99_s=percentile([gap for outcome in served if (gap := _mean_gap_s(outcome)) is not None], 0.99),
        shares=_backend_shares(served, names),
        busy={name: min(1.0, engine.busy_s / seconds) for name, engine in zip(names, world.engines, strict=True)},
        by_class=by_class,
        coverage_p99=_share(covered, _within_ttft),
        coverage_e2e_p99=_share([o for o in served if o.predicted_e2e_p99_s is not None], _within_e2e),
        coverage=_coverage(covered, names),
        coverage_timelines=_coverage_timelines(covered, names, workload.seconds),
        miss_predicted=mean([outcome.miss or 0.0 for outcome in judged]) if judged else None,
        miss_seen=_share(judged, lambda outcome: not outcome.in_budget),
        hit_rate=_hit_rate(served, workload),
        detection_s=world.watch.detected_after_s,
        decision_us=1e6 * median(times),
        decision_p99_us=1e6 * (percentile(times, 0.99) or 0.0),
        ttft_cdf=_cdf([ratio for outcome in served if (ratio := _over_budget(outcome, workload)) is not None]),
        timeline=_timeline(counted, workload.seconds),
        share_timelines=_share_timelines(served, names, workload.seconds),
    )


def _ttft_s(outcome: Outcome) -> float:
    assert outcome.first_token_at_s is not None
    return outcome.first_token_at_s - outcome.request.arrival_s


def _mean_gap_s(outcome: Outcome) -> float | None:
    gaps = outcome.request.output_tokens - 1
    assert outcome.first_token_at_s is not None
    return (outcome.end_s - outcome.first_token_at_s) / gaps if gaps else None


def _within_ttft(outcome: Outcome) -> bool:
    assert outcome.predicted_ttft_p99_s is not None
    return _ttft_s(outcome) <= outcome.predicted_ttft_p99_s


def _within_e2e(outcome: Outcome) -> bool:
    assert outcome.predicted_e2e_p99_s is not None
    return outcome.end_s - outcome.request.arrival_s <= outcome.predicted_e2e_p99_s


def _over_budget(outcome: Outcome, workload: Workload) -> float | None:
    budget_s = workload.classes[outcome.request.latency_class].budget.ttft_s
    return None if budget_s is None else _ttft_s(outcome) / budget_s


def _share(outcomes: Sequence[Outcome], holds: Callable[[Outcome], bool]) -> float | None:
    return sum(map(holds, outcomes)) / len(outcomes) if outcomes else None


def _shares_by(
    outcomes: Sequence[Outcome], key: Callable[[Outcome], str], holds: Callable[[Outcome], bool]
) -> dict[str, float]:
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(key(outcome), []).append(outcome)
    return {name: sum(map(holds, group)) / len(group) for name, group in sorted(groups.items())}


def _coverage(covered: Sequence[Outcome], names: Sequence[str]) -> dict[str, dict[str, Tally]]:
    asked: Counter[tuple[int, str]] = Counter()
    kept: Counter[tuple[int, str]] = Counter()
    for outcome in covered:
        pair = (outcome.backend or 0, outcome.request.latency_class)
        asked[pair] += 1
        kept[pair] += _within_ttft(outcome)
    found: dict[str, dict[str, Tally]] = {}
    for backend, name in sorted(asked):
        found.setdefault(names[backend], {})[name] = Tally(kept[backend, name], asked[backend, name])
    return found


def _coverage_timelines(
    covered: Sequence[Outcome], names: Sequence[str], seconds: float
) -> dict[str, tuple[Tally, ...]]:
    if len(names) > MOST_LINES:
        return {}
    bins = [[[0, 0] for _ in range(TIME_BINS)] for _ in names]
    for outcome in covered:
        tally = bins[outcome.backend or 0][_bin(outcome.request.arrival_s, seconds)]
        tally[0] += _within_ttft(outcome)
        tally[1] += 1
    return {name: tuple([Tally(*tally) for tally in row]) for name, row in zip(names, bins, strict=True)}


def _backend_shares(served: Sequence[Outcome], names: Sequence[str]) -> dict[str, float]:
    counts = Counter(outcome.backend for outcome in served)
    return {name: counts[number] / len(served) if served else 0.0 for number, name in enumerate(names)}


def _hit_rate(served: Sequence[Outcome], workload: Workload) -> float | None:
    """Share of prompt tokens that a prefix cache had."""
    if not workload.physics.prefix_cache_share or not served:
        return None
    prompts = sum(outcome.request.prompt_tokens for outcome in served)
    return sum(outcome.cached_tokens for outcome in served) / prompts


def _cdf(values: list[float]) -> tuple[float, ...]:
    if not values:
        return ()
    values.sort()
    last = len(values) - 1
    return tuple([values[round(point / (CDF_POINTS - 1) * last)] for point in range(CDF_POINTS)])


def _bin(at_s: float, seconds: float) -> int:
    return min(TIME_BINS - 1, int(at_s / seconds * TIME_BINS))


def _timeline(counted: Sequence[Outcome], seconds: float) -> tuple[float | None, ...]:
    came, kept = [0] * TIME_BINS, [0] * TIME_BINS
    for outcome in counted:
        place = _bin(outcome.request.arrival_s, seconds)
        came[place] += 1
        kept[place] += outcome.in_budget
    return tuple([k / c if c else None for k, c in zip(kept, came, strict=True)])


def _share_timelines(served: Sequence[Outcome], names: Sequence[str], seconds: float) -> dict[str, tuple[float, ...]]:
    if len(names) > MOST_LINES:
        return {}
    counts = [[0] * TIME_BINS for _ in names]
    for outcome in served:
        counts[outcome.backend or 0][_bin(outcome.request.arrival_s, seconds)] += 1
    totals = [max(1, sum(column)) for column in zip(*counts, strict=True)]
    return {name: tuple([count / total for count, total in zip(row, totals, strict=True)])
            for name, row in zip(names, counts, strict=True)}
