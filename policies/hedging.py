"""Whether a request whose first attempt is silent is sent to a second backend too, when, and to which.

Hedging and its term are from Dean and Barroso, "The Tail at Scale" (CACM 56(2), 2013): the same request goes to a
second server once the first has been silent for longer than nearly all such requests are, and the first answer counts.
They send it as soon as that. Here each request has a budget, and what is wanted is that it is kept: so the second is
sent as late as it can still be in time, for until then the first may answer and nothing is wasted.

With `B` what was left of the budget when the first attempt was sent, and `t` the seconds since::

    late   = what `after` of such first attempts are predicted to stay within     (0.99: one in a hundred is later)
    p99    = what 99 of 100 such requests are predicted to stay within on the second
    due    = B - 1.5·p99                            the second can get half as slow again, and still be in time
    hedge    at t >= due
    if       t >= late    or    P(first > B | first > t) >= 1/2         the first is likely to miss the budget
    and      t + p99 <= B                                               and the second is not

The second is the cheapest that can be in time: it is the policy's aim, asked of the time that is left. One that would
queue the request is none: redundancy turns capacity that is left into latency, and where none is left it only takes
from others (Vulimiri et al., "Low latency via redundancy", CoNEXT 2013).

What is awaited is the first token of a stream, under the TTFT budget, and the end of an answer that is none, under the
budget to the end. A request without that budget is never hedged: nothing says when it is late. Predictions and their
tails are the policy's own (`estimate`, `beliefs.tails`); where they are known not to fit (`BackendBelief.lost`), nobody
hedges on them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import isfinite
from typing import NamedTuple

from backends.catalog.views import BackendView
from policies.attempts import RetryBudget
from policies.beliefs.lengths import FIRST_SPREAD
from policies.beliefs.tails import PRIOR, Table, quantile, survival
from policies.chance import end_sd_s
from policies.estimate import engine_load, predict
from policies.facts import RequestFacts
from policies.footing import SAMPLE_FRESH_S, belief_of
from policies.policy import Priced

SLACK = 1.5
"""Times the second's P99 that are left when a hedge is due."""
EVEN = 0.5
P99 = 0.99
GRAIN_S = 0.005
"""A hedge that is due within so little is due now."""
BUDGET_CAPACITY = 10.0
"""Hedges that can be saved up, hence the largest burst of them."""

HedgeBudget = RetryBudget
"""Hedges have a bucket of their own, of the same kind as that of retries: neither draws on the other."""


class Withheld(StrEnum):
    """Why a request was not hedged though its first attempt was late; also the metric label."""

    NO_OTHER = "no_other"
    """No other backend may serve it."""
    TOO_LATE = "too_late"
    """No other is predicted to be in time."""
    OVERLOADED = "overloaded"
    """Others would be in time, but have no room to spare, or the gateway has none."""
    BUDGET_EMPTY = "budget_empty"


@dataclass(frozen=True, slots=True)
class HedgeRules:
    """When requests are hedged."""

    after: float = 0.99
    """Share of first attempts that are predicted to have answered by the time that one counts as late."""
    classes: frozenset[str] = field(default_factory=frozenset)
    """Latency classes that are hedged; empty: all."""


class Awaited(NamedTuple):
    """When an answer is predicted to begin: seconds after its request is sent."""

    mean_s: float
    sd_s: float
    tail: Table
    """Survival of the residual in standard deviations (`beliefs.tails`)."""

    def within_s(self, share: float) -> float:
        """What `share` of such answers stay within."""
        return max(0.0, self.mean_s + quantile(self.tail, share) * self.sd_s)

    def miss(self, budget_s: float, elapsed_s: float) -> float:
        """Probability of coming later than `budget_s`, where nothing has come for `elapsed_s`."""
        if elapsed_s >= budget_s:
            return 1.0
        silent = survival(self.tail, (elapsed_s - self.mean_s) / self.sd_s)
        return survival(self.tail, (budget_s - self.mean_s) / self.sd_s) / silent if silent > 0.0 else 1.0


class First(NamedTuple):
    """The attempt that is under way."""

    backend: str
    awaited: Awaited
    budget_s: float
    """Left when it was sent."""
    late_s: float
    """After so much silence it is later than nearly all such attempts."""
    look_after_s: float
    """After how much silence `hedge` is to be asked first: at once where the budget is likely to be missed."""


class Hedge(NamedTuple):
    """Send the request to this backend too, now."""

    second: Priced


class Wait(NamedTuple):
    """Ask again when the first attempt has been silent for so long."""

    until_s: float


class Never(NamedTuple):
    """This request is not hedged."""

    why: Withheld


def promised_s(facts: RequestFacts) -> float | None:
    """The budget for the beginning of the answer, in seconds since the request came; `None`: there is none."""
    return facts.budget.ttft_s if facts.stream else facts.budget.e2e_s


def first_of(rules: HedgeRules, facts: RequestFacts, backend: BackendView, left_s: float, now: float) -> First | None:
    """A request that is sent to `backend` now, as far as it may be hedged; `None` where it never is.

    `left_s` is left of what was promised (`promised_s`).
    """
    if rules.classes and facts.latency_class not in rules.classes:
        return None
    awaited = awaited_of(facts, backend, now)
    if awaited is None:
        return None
    late_s = awaited.within_s(rules.after)
    look_after_s = 0.0 if awaited.miss(left_s, 0.0) >= EVEN else late_s
    return First(backend.spec.name, awaited, left_s, late_s, look_after_s) if look_after_s < left_s else None


def hedge(
    facts: RequestFacts, first: First, elapsed_s: float, candidates: Sequence[Priced], now: float
) -> Hedge | Wait | Never:
    """What to do about a first attempt that has been silent for `elapsed_s`. Total and pure.

    Args:
        candidates: backends that may serve the request now, the first among them or not.
    """
    left_s = first.budget_s - elapsed_s
    others = [candidate for candidate in candidates if candidate.backend.spec.name != first.backend]
    if not others:
        return Never(Withheld.NO_OTHER)
    in_time = [(candidate, p99_s) for candidate in others
               if (p99_s := _p99_s(facts, candidate.backend, now)) is not None and p99_s <= left_s]
    if not in_time:
        return Never(Withheld.TOO_LATE)
    idle = [entry for entry in in_time if has_room(entry[0].backend, now)]
    if not idle:
        return Never(Withheld.OVERLOADED)
    second, p99_s = min(idle, key=lambda entry: (entry[0].price, entry[1], entry[0].backend.spec.name))
    due_s = first.budget_s - SLACK * p99_s
    if due_s < first.late_s and first.awaited.miss(first.budget_s, max(elapsed_s, due_s)) < EVEN:
        due_s = first.late_s
    if due_s <= elapsed_s + GRAIN_S:
        return Hedge(second)
    return Wait(due_s) if due_s + p99_s <= first.budget_s else Never(Withheld.TOO_LATE)


def awaited_of(facts: RequestFacts, backend: BackendView, now: float) -> Awaited | None:
    """When the backend is predicted to begin its answer to a request sent now; `None` where nobody can tell."""
    belief = belief_of(backend)
    if belief is not None and belief.lost(now):
        return None
    estimate = predict(facts, backend, now)
    if facts.stream:
        mean_s, sd_s, tail = estimate.ttft_s, estimate.ttft_sd_s, PRIOR if belief is None else belief.ttft.table
    else:
        mean_s, sd_s = estimate.e2e_s, end_sd_s(facts, estimate, FIRST_SPREAD)
        tail = PRIOR if belief is None else belief.end.table
    return Awaited(mean_s, sd_s, tail) if isfinite(mean_s) and isfinite(sd_s) and sd_s > 0.0 else None


def has_room(backend: BackendView, now: float) -> bool:
    """Whether a hedge would start there at once: in service, a slot free as far as slots are known, nobody queued."""
    if not backend.health.at(now).in_service:
        return False  # on trial, and no trial is worth a second caller's wait
    slots, sample = backend.spec.slots, backend.sample
    if sample is not None and sample.waiting_requests and sample.age_s(now) <= SAMPLE_FRESH_S:
        return False
    return slots is None or engine_load(backend, now)[0] < slots


def _p99_s(facts: RequestFacts, backend: BackendView, now: float) -> float | None:
    awaited = awaited_of(facts, backend, now)
    return None if awaited is None else awaited.within_s(P99)
