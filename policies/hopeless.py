"""What is left to decide where no backend keeps the budget: how late, and when to come again."""

from collections.abc import Sequence
from math import ceil, inf

from policies.estimate import Estimate
from policies.facts import Budget, RequestFacts
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
