"""Whether promises were kept: the caller's budgets by the answer, and the router's predictions by the attempt. Pure.

A budget of `Bt` to the first token, `Bo` a token after it and `Be` to the end is kept where

    first ≤ Bt        last ≤ (Bt, or first where none is promised) + (D - 1)·Bo        last ≤ Be

in seconds since the request's last byte, with `D` generated tokens: what an early first token leaves over may be spent
later, as the decision reckons too (`policies.chance`). An answer that is no stream has no first token of its own, and
is held against the other two.

Judged are requests that the gateway owed an answer. Where the client left, or was at fault, nobody broke a promise.
"""

from typing import NamedTuple

from policies.attempts import FailureCause
from router.request.exchange import Exchange, Outcome

FAULTLESS = frozenset({Outcome.CLIENT_CLOSED, Outcome.CLIENT_ERROR, Outcome.REFUSED})
"""How a request may end without an answer that anybody owed."""
TOO_LATE = frozenset({FailureCause.FIRST_TOKEN_TIMEOUT, FailureCause.HEAD_TIMEOUT})
ALL = "all"
"""Every budget of the request: the share of these that are kept is the share in budget."""


class Judged(NamedTuple):
    """One budget of one request that has ended."""

    budget: str
    """`ttft`, `inter_token`, `e2e`, or `all`."""
    kept: bool
    late_s: float = 0.0


def judge(exchange: Exchange) -> list[Judged]:
    """The budgets of a request that has ended; none where none was given or nobody owed an answer."""
    facts, outcome = exchange.facts, exchange.outcome
    if facts is None or outcome in FAULTLESS:
        return []
    budget = facts.budget
    ttft_s, inter_token_s, e2e_s = budget.ttft_s, budget.inter_token_s, budget.e2e_s
    if ttft_s is None and inter_token_s is None and e2e_s is None:
        return []
    if outcome is not Outcome.OK:
        return [Judged(ALL, False)]
    first_at_s, received_at_s = exchange.first_token_at_s, exchange.received_at_s
    last_s = (exchange.last_token_at_s or exchange.ended_at_s) - received_at_s
    judged = []
    if ttft_s is not None and first_at_s is not None:
        judged.append(_held("ttft", first_at_s - received_at_s - ttft_s))
    if inter_token_s is not None:
        from_s = ttft_s
        if from_s is None:
            from_s = 0.0 if first_at_s is None else first_at_s - received_at_s
        usage = exchange.usage
        tokens = exchange.generated_tokens if usage is None else usage.completion_tokens or exchange.generated_tokens
        judged.append(_held("inter_token", last_s - from_s - max(0, tokens - 1) * inter_token_s))
    if e2e_s is not None:
        judged.append(_held("e2e", last_s - e2e_s))
    if judged:
        judged.append(Judged(ALL, all(entry.kept for entry in judged)))
    return judged


def _held(budget: str, late_s: float) -> Judged:
    return Judged(budget, late_s <= 0.0, max(0.0, late_s))


class Prediction(NamedTuple):
    """What one attempt was sent on, and when it got there. Monotonic seconds; `None`: not predicted, or never came."""

    sent_at_s: float
    ttft_p99_s: float | None
    e2e_p99_s: float | None
    first_at_s: float | None


def within(prediction: Prediction, cause: FailureCause | None, ended_at_s: float) -> list[tuple[str, bool]]:
    """Which predicted P99s (`ttft`, `e2e`) an attempt that has ended was held against, and whether it was within.

    A first token that never came in time was later than predicted; other failures say nothing about it.
    """
    sent_at_s, ttft_p99_s, e2e_p99_s, first_at_s = prediction
    judged = []
    if ttft_p99_s is not None and (first_at_s is not None or cause in TOO_LATE):
        judged.append(("ttft", first_at_s is not None and first_at_s - sent_at_s <= ttft_p99_s))
    if e2e_p99_s is not None and cause is None:
        judged.append(("e2e", ended_at_s - sent_at_s <= e2e_p99_s))
    return judged
