"""How many requests per second one backend can take for ever and keep its promises: a closed form.

Of a request of `P` prompt and `D` output tokens, in milliseconds, with the coefficients of `backends.catalog.spec`::

    work = b·P + a·P²/2 + d·D + e·(P·D + D²/2)

and each step costs `base = host + decode_base` besides, whatever is in it. Where streams must keep a pace of `B` per
token, at most the share `1 - base/B` of the time is left for work; and where no more than `n` sequences run at once
(slots, or what the KV cache holds), each step's base is shared by `n` at most. So with `s` the drift::

    busy = max(work / (1 - base/B),  work + D·base/n)
    requests per second = target · 1000 / (s · Σ share · busy)

Both follow from `B·(1 - rho) ≥ base + d·n + e·context`, the first at the pace, the second at the slots. It is linear in
arrival rates, so classes add up. At `target` 1 the *mean* pace would be the budget and the queue before the first token
endless; below 1, what is left keeps the P99.

A class whose pace or first token this backend cannot keep even alone gives it no capacity at all for the whole mix.
That is too little where other classes are served there; too little only ever lends less.
"""

from collections.abc import Sequence
from math import inf

from backends.catalog.spec import Coefficients
from policies.facts import Budget
from policies.forecast.mix import ClassMix, Moments

USABLE_CACHE_SHARE = 0.95
"""Of the KV cache, before an engine queues or preempts."""


def capacity_per_s(coefficients: Coefficients, slots: int | None, drift: float, mix: Sequence[ClassMix],
                   target: float) -> float | None:
    """Requests of this mix per second; 0 where a promise of it cannot be kept there, `None` without a mix."""
    if not mix:
        return None
    busy_ms = 0.0
    for share, budget, moments in mix:
        of_one_ms = _busy_ms(coefficients, slots, drift, budget, moments)
        if of_one_ms is None:
            return 0.0
        busy_ms += share * of_one_ms
    return target * 1000.0 / (drift * busy_ms) if busy_ms > 0.0 else None


def _busy_ms(coefficients: Coefficients, slots: int | None, drift: float, budget: Budget,
             moments: Moments) -> float | None:
    """Machine time that one request takes, drift left out; `None` where its promises cannot be kept."""
    prefill_ms = (coefficients.prefill_ms_per_token * moments.prompt
                  + coefficients.prefill_ms_per_pair * moments.prompt_squared / 2.0)
    decode_ms = (coefficients.decode_ms_per_seq * moments.output
                 + coefficients.decode_ms_per_seq_token * (moments.prompt_output + moments.output_squared / 2.0))
    base_ms = coefficients.host_ms + coefficients.decode_base_ms
    first_token_ms = base_ms + prefill_ms + coefficients.first_token_overhead_ms
    if budget.ttft_s is not None and drift * first_token_ms > 1000.0 * budget.ttft_s:
        return None
    pace_ms = _promised_pace_ms(budget, moments) / drift
    if pace_ms <= base_ms:
        return None
    work_ms = prefill_ms + decode_ms
    return max(work_ms / (1.0 - base_ms / pace_ms),
               work_ms + moments.output * base_ms / _most_at_once(coefficients, slots, moments))


def _promised_pace_ms(budget: Budget, moments: Moments) -> float:
    """The slowest pace at which the mean request of the class keeps its budget; infinite where none was promised."""
    pace_s = inf if budget.inter_token_s is None else budget.inter_token_s
    if budget.e2e_s is not None and moments.output > 1.0:
        pace_s = min(pace_s, (budget.e2e_s - (budget.ttft_s or 0.0)) / (moments.output - 1.0))
    return 1000.0 * pace_s


def _most_at_once(coefficients: Coefficients, slots: int | None, moments: Moments) -> float:
    """Sequences that run at once, as far as anything bounds them."""
    context = moments.prompt + moments.output / 2.0
    most = inf if slots is None else float(slots)
    if coefficients.kv_capacity_tokens is not None and context > 0.0:
        most = min(most, max(1.0, USABLE_CACHE_SHARE * coefficients.kv_capacity_tokens / context))
    return most
