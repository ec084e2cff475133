"""What is left to decide where no backend keeps the budget: how late, and when to come again."""

from collections.abc import Sequence
from math import ceil, inf
from typing import NamedTuple

from backends.catalog.views import BackendView
from policies.estimate import Estimate, predict
from policies.facts import Budget, RequestFacts
from policies.footing import drift_of
from policies.policy import Choice, Priced

MAX_RETRY_AFTER_S = 60.0
SHORTEST_PROMISE_S = 1e-3


def lateness(facts: RequestFacts, budget: Budget, estimate: Estimate | None) -> float:
    """Predicted over promised time, of first token, last token or end, the worst; infinite where unpredicted."""
    if estimate is None:
        return inf
    waited_s, gaps, late = facts.waited_s, max(0, facts.expected_output_tokens - 1), 0.0
    if budget.ttft_s is not None:
        late = (waited_s + estimate.ttft_s) / max(SHORTEST_PROMISE_S, budget.ttft_s)
    if budget.inter_token_s is not None:
        if budget.ttft_s is None:
            took_s, promised_s = gaps * estimate.tpot_s, gaps * budget.inter_token_s
        else:
            took_s, promised_s = waited_s + estimate.e2e_s, budget.ttft_s + gaps * budget.inter_token_s
        late = max(late, took_s / max(SHORTEST_PROMISE_S, promised_s))
    if budget.e2e_s is not None:
        late = max(late, (waited_s + estimate.e2e_s) / max(SHORTEST_PROMISE_S, budget.e2e_s))
    return late if late == late else inf


def shed(facts: RequestFacts, budget: Budget, candidates: Sequence[Priced], miss: float) -> Choice:
    """The refusal of a request, by the least of what it would miss with and be late by; `miss` is a probability."""
    late = min([lateness(facts, budget, candidate.estimate) for candidate in candidates])
    return Choice(None, f"shed p={miss:.2g} late {late:.2g} budgets of {len(candidates)}", candidates,
                  retry_after_s(facts, budget, candidates))


class BeyondIdle(NamedTuple):
    """A budget that no backend can keep, whatever is in flight."""

    budget: str
    """`ttft`, `inter_token` or `e2e`."""
    promised_s: float
    needed_s: float
    """What the quickest would need, idle."""


def beyond_idle(facts: RequestFacts, candidates: Sequence[Priced], now: float) -> BeyondIdle | None:
    """The budget that the quickest of `candidates` would miss by most, though it were idle; `None` where one of them
    could keep all, or nobody knows because one was never measured."""
    quickest: tuple[float, BeyondIdle] | None = None
    for view in [candidate.backend for candidate in candidates]:
        if view.spec.coefficients is None:
            return None
        idle = BackendView(view.spec, view.health, drift=drift_of(view, now))
        missed = _missed(facts, predict(facts, idle, now))
        if missed is None:
            return None
        if quickest is None or missed[0] < quickest[0]:
            quickest = missed
    return None if quickest is None else quickest[1]


def _missed(facts: RequestFacts, estimate: Estimate) -> tuple[float, BeyondIdle] | None:
    """By which factor the budgets are missed, and the one that is missed by most."""
    budget, gaps = facts.budget, facts.expected_output_tokens - 1
    asked = [("ttft", budget.ttft_s, estimate.ttft_s), ("e2e", budget.e2e_s, estimate.e2e_s)]
    if gaps > 0 and budget.inter_token_s is not None:
        # What an early first token leaves over may be spent on the pace.
        spare_s = 0.0 if budget.ttft_s is None else max(0.0, budget.ttft_s - estimate.ttft_s)
        asked.append(("inter_token", budget.inter_token_s, estimate.tpot_s - spare_s / gaps))
    missed = [(needed_s / max(SHORTEST_PROMISE_S, promised_s), BeyondIdle(name, promised_s, needed_s))
              for name, promised_s, needed_s in asked if promised_s is not None and needed_s > promised_s]
    return max(missed, default=None)


def retry_after_s(facts: RequestFacts, budget: Budget, candidates: Sequence[Priced]) -> float:
    """Whole seconds until one of them is predicted to have an even chance, 1 to 60, if nothing more is sent there.

    A queue shortens by a second a second. Where the pace is too slow, as many streams have to end as make it so, and
    half of an answer is left of each in the mean.
    """
    soonest_s = MAX_RETRY_AFTER_S
    for candidate in candidates:
        estimate, over_s = candidate.estimate, 0.0
        if estimate is None:
            continue
        if budget.ttft_s is not None:
            over_s = estimate.ttft_s - budget.ttft_s
        if budget.e2e_s is not None:
            over_s = max(over_s, estimate.e2e_s - budget.e2e_s)
        if budget.inter_token_s is not None and budget.inter_token_s < estimate.tpot_s < inf:
            share = 1.0 - budget.inter_token_s / estimate.tpot_s
            over_s = max(over_s, share * 0.5 * facts.expected_output_tokens * estimate.tpot_s)
        soonest_s = min(soonest_s, over_s)
    return float(ceil(max(1.0, soonest_s)))
