"""From what came back to what it is worth: fates, deadlines, cost, and the numbers of one policy's blocks. Pure.

A request is *in budget* if its first token came within `B_t` of its intended start and its last within
``B_t + (D - 1)·B_o`` for the `D` tokens that came; *late* if it came whole, but not so; *shed* if the gateway refused
it with 429 or 503; *lost* else, with what was still open when the drain time was over. Every arrival has one fate.

Cost is accounted, not measured, as in `loadtest.sim`: the price of the machine time that prompt and answer take by the
engine's calibrated coefficients (`policies.prices.request_cost`), so that no policy is charged for its neighbours. Late
and lost requests cost what was computed for them as far as the client can know; all of it is divided by the requests in
budget.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from backends.catalog.health import Health
from backends.catalog.spec import BackendSpec
from backends.catalog.views import BackendView
from loadtest.live.classes import LiveClass
from loadtest.live.schedule import Block
from loadtest.measured import percentile
from loadtest.openai_stream import StreamRecord
from policies.estimate import NEVER
from policies.facts import RequestFacts
from policies.prices.request_cost import RequestCost

REFUSALS = (429, 503)
UNFINISHED = "unfinished"
CostOf = Callable[[str, int, int], float]
"""Backend, prompt tokens, output tokens → money; 0 for a backend that nobody knows."""


class Fate(StrEnum):
    """What became of an arrival."""

    IN_BUDGET = "in_budget"
    LATE = "late"
    SHED = "shed"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One arrival under one policy. Times are seconds after the intended start; `None` where the phase never came."""

    latency_class: str
    fate: Fate
    cost: float
    backend: str | None = None
    ttft_s: float | None = None
    last_token_s: float | None = None
    tokens: int = 0
    lag_s: float | None = None
    failure: str | None = None

    @property
    def mean_gap_s(self) -> float | None:
        """Between tokens, of an answer that came whole and has two of them."""
        if self.failure or self.tokens < 2 or self.ttft_s is None or self.last_token_s is None:
            return None
        return (self.last_token_s - self.ttft_s) / (self.tokens - 1)


def accounted_cost(specs: Sequence[BackendSpec]) -> CostOf:
    """Prices by `request_cost`, with every engine as calibrated: no drift, nothing cached."""
    price, views = RequestCost(), {spec.name: BackendView(spec, Health()) for spec in specs}

    def cost(backend: str, prompt_tokens: int, output_tokens: int) -> float:
        view = views.get(backend)
        if view is None:
            return 0.0
        facts = RequestFacts(view.spec.model, prompt_tokens, expected_output_tokens=output_tokens)
        return price(facts, view, NEVER, 0.0)

    return cost


def outcomes(
    block: Block, records: Mapping[int, StreamRecord], classes: Mapping[str, LiveClass], cost_of: CostOf
) -> tuple[Outcome, ...]:
    """One outcome an arrival, in their order; `records` go by the arrival's number."""
    return tuple(
        _outcome(records[number], classes[arrival.latency_class or ""], cost_of) if number in records else
        Outcome(arrival.latency_class or "", Fate.LOST, 0.0, failure=UNFINISHED)
        for number, arrival in enumerate(block.arrivals))


def _outcome(record: StreamRecord, latency_class: LiveClass, cost_of: CostOf) -> Outcome:
    last_s = None if record.ttft_s is None else record.ttft_s + sum(record.gaps_s)
    cost = cost_of(record.backend, record.prompt_tokens, record.tokens) if record.backend else 0.0
    fate = _fate(record, last_s, latency_class)
    return Outcome(latency_class.name, fate, 0.0 if fate is Fate.SHED else cost, record.backend, record.ttft_s, last_s,
                   record.tokens, record.lag_s, record.failure)


def _fate(record: StreamRecord, last_s: float | None, latency_class: LiveClass) -> Fate:
    if record.status in REFUSALS:
        return Fate.SHED
    if record.failure or record.ttft_s is None or last_s is None:
        return Fate.LOST
    kept = record.ttft_s <= latency_class.ttft_s and last_s <= latency_class.deadline_s(record.tokens)
    return Fate.IN_BUDGET if kept else Fate.LATE


@dataclass(frozen=True, slots=True)
class Sums:
    """What adds up over blocks: the means and ratios of `Figures` are quotients of these."""

    requests: float = 0.0
    in_budget: float = 0.0
    cost: float = 0.0

    @property
    def share_in_budget(self) -> float:
        return self.in_budget / self.requests if self.requests else 0.0

    @property
    def cost_per_1k_in_budget(self) -> float | None:
        return 1000.0 * self.cost / self.in_budget if self.in_budget else None


def sums(block: Sequence[Outcome]) -> Sums:
    """Of one block."""
    return Sums(len(block), sum(outcome.fate is Fate.IN_BUDGET for outcome in block),
                sum(outcome.cost for outcome in block))


@dataclass(frozen=True, slots=True)
class Figures:
    """All counted blocks of one policy. Shares are 0 to 1; the four fates add up to 1."""

    requests: int
    in_budget: float
    late: float
    shed: float
    lost: float
    cost_per_1k_in_budget: float | None
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    itl_p99_s: float | None
    """P99 over requests of each one's mean gap between tokens."""
    shares: Mapping[str, float]
    """Of the answers that came whole, by backend."""
    by_class: Mapping[str, float]
    """In-budget share by latency class."""
    failures: Mapping[str, int]
    lag_p99_s: float | None
    """How late the load client itself sent."""


def figures(blocks: Sequence[Sequence[Outcome]], backends: Sequence[str], classes: Sequence[str]) -> Figures:
    """The numbers of a policy. Raises `ValueError` where there is no request."""
    every = [outcome for block in blocks for outcome in block]
    if not every:
        raise ValueError("no request, no figures")
    total = len(every)
    fates = Counter(outcome.fate for outcome in every)
    whole = [outcome for outcome in every if outcome.fate in (Fate.IN_BUDGET, Fate.LATE)]
    served_by = Counter(outcome.backend for outcome in whole)
    ttfts = [outcome.ttft_s for outcome in whole if outcome.ttft_s is not None]
    return Figures(
        requests=total,
        in_budget=fates[Fate.IN_BUDGET] / total, late=fates[Fate.LATE] / total, shed=fates[Fate.SHED] / total,
        lost=fates[Fate.LOST] / total,
        cost_per_1k_in_budget=sums(every).cost_per_1k_in_budget,
        ttft_p50_s=percentile(ttfts, 0.5), ttft_p99_s=percentile(ttfts, 0.99),
        itl_p99_s=percentile([gap for outcome in whole if (gap := outcome.mean_gap_s) is not None], 0.99),
        shares={name: served_by[name] / len(whole) if whole else 0.0 for name in backends},
        by_class={name: sum(outcome.fate is Fate.IN_BUDGET for outcome in of_class) / len(of_class)
                  for name in classes if (of_class := [one for one in every if one.latency_class == name])},
        failures=dict(Counter(outcome.failure for outcome in every if outcome.failure).most_common()),
        lag_p99_s=percentile([outcome.lag_s for outcome in every if outcome.lag_s is not None], 0.99),
    )
