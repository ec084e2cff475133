"""What a request would meet on a backend: wait, first token, pace and end, in seconds. Pure arithmetic.

With the coefficients of `backends.catalog.spec.Coefficients` and, on the backend now, `n` decoding sequences, `k`
tokens of context in them and `q` uncached of `Q` prompt tokens ahead in the queue, a request of `P` prompt tokens, `h`
of them cached, and `D` output tokens is predicted, in milliseconds::

    step   = host + max(prefill_base, decode_base + d·n + e·k)     prefill_base alone where n = 0
    room   = max(C - n, 64)                                        prompt tokens an iteration takes
    n'     = min(requests + 1, slots)
    pace   = (host + decode_base + d·n' + e·(k + Q + P + D/2)) / (1 - rho)
    rest   = step / 2                                              of the iteration under way; 0 where idle
    ahead  = max(1, q/room)·step + (b + a·QUEUED/2)·q - done       prompts ahead; 0 where q = 0
    done   = min((now - turned)/s, the same of the head alone)     by the engine, of the prompt at the queue's head
             (step + b·min(q, C)) / 2                              where that is no prompt of this router's
    slot   = (requests - slots + 1/2) / slots · D · pace           until a slot frees; 0 while one is free
    memory = max(0, k + Q + P - 0.95·K) / (0.95·K) · D · pace / 2  until the KV cache has room
    drain  = s · (max(rest, ahead) + slot + memory)
    ttft   = drain + s · (ceil((P - h)/room)·step + b·(P - h) + a·(P² - h²)/2 + first_token_overhead)
    tpot   = s · pace
    e2e    = ttft + (D - 1)·tpot

    ttft_sd² = (0.12·ttft + 4 ms)²
    tpot_sd² = (0.12·tpot)² + s²·burst·tpot / D

with `b` and `a` the prefill's time per token and per pair, `d` and `e` the decode's per sequence and per token of
context, `C` the tokens of an iteration and `K` the KV capacity in tokens.

What is believed of the backend (`policies.beliefs`) brings six things in. `s` is its drift, and where it falls silent
while work is open there, its stall: silence over what the longest iteration may take. `rho = min(0.85, s·share)` is the
part of its time that goes to prompts yet to come, and `burst` their variance (`beliefs.arrivals`). `h` is what its
prefix cache is believed to hold. `turned` is when the engine turned to the head of the queue (`beliefs.waiting`). And
`b` and `a` are multiplied by what the calibration of prefills has been found to be off by, `pace` by what that of
decoding has (`beliefs.correction`). Without beliefs, `s` is the view's drift, factors are 1, and the rest is 0.

The means are those of chunked-prefill continuous batching. Every term grows with every load figure, so more load never
makes an estimate smaller, and none looks at another backend, so an unchosen one never changes a choice.

Where a signal is missing: no coefficients → the stand-in that the learner made of the other backends, else `ASSUMED`;
no sample, or one older than `SAMPLE_FRESH_S` → this router's own books alone; unknown slots or KV capacity → no wait
for them. What is not a number comes out as infinity.

A footing is remembered with its view; time enters it in ticks of a tenth of a second, so that a remembered one equals
a new one and a decision can be replayed.
"""

from math import inf, sqrt
from typing import NamedTuple

from backends.catalog.views import BackendView
from policies.facts import RequestFacts
from policies.footing import (
    ASSUMED,
    CHUNK_TOKENS,
    DRIFT_RANGE,
    SAMPLE_FRESH_S,
    Footing,
    belief_of,
    bounded_drift,
    coefficients_of,
    engine_load,
    footing,
)

__all__ = ["ASSUMED", "CHUNK_TOKENS", "DRIFT_RANGE", "SAMPLE_FRESH_S", "Estimate", "bounded_drift", "cached_tokens",
           "coefficients_of", "engine_load", "lateness_s", "predict", "predicted"]

SD_RATIO = 0.12
"""Standard deviation of a first token and of a pace over their means; what it gets wrong, the residuals learn."""
SD_FLOOR_S = 0.004

# Called as what it is, a tuple's: the named constructor takes three times as long.
new_tuple = tuple.__new__


class Estimate(NamedTuple):
    """Predicted seconds for one request on one backend."""

    drain_s: float
    """Until the engine turns to this request: what is in flight ahead is done, or has made room."""
    ttft_s: float
    tpot_s: float
    """Per output token after the first."""
    e2e_s: float
    ttft_sd_s: float = 0.0
    tpot_sd_s: float = 0.0
    """Of the mean pace over the whole answer, not of a single gap."""
    cached_tokens: int = 0
    """Prompt tokens that are believed to be in the backend's prefix cache."""
    ttft_p99_s: float | None = None
    """Within which 99 of 100 first tokens are predicted to come; `None` where nobody asked the residuals (`chance`)."""
    e2e_p99_s: float | None = None


NEVER = Estimate(inf, inf, inf, inf, inf, inf)


def cached_tokens(facts: RequestFacts, backend: BackendView) -> int:
    """Prompt tokens that the backend is believed to have in its prefix cache; less than the prompt."""
    if facts.session_key is None and not facts.prefix_keys:
        return 0
    belief = belief_of(backend)
    return 0 if belief is None else belief.cache.believed_tokens(facts)


def predict(facts: RequestFacts, backend: BackendView, now: float) -> Estimate:
    """The estimate of the module's formula. Total: never raises, never NaN, never negative on sane coefficients."""
    return predicted(facts, backend, footing(backend, now), now)


# Runs once per candidate of each decision, so comparisons stand where `min` and `max` would read as well: a call of
# either costs as much as ten multiplications.
def predicted(facts: RequestFacts, backend: BackendView, ground: Footing, now: float) -> Estimate:
    """The same for whoever has the backend's footing of this moment already."""
    prompt = facts.prompt_tokens
    cached = cached_tokens(facts, backend) if facts.session_key is not None or facts.prefix_keys else 0
    new = prompt - cached
    output = facts.expected_output_tokens if facts.expected_output_tokens > 1 else 1
    occupied, drain_ms, slow_s = ground.occupied_tokens + prompt, ground.rest_ms, ground.slow_s
    ahead_ms, head_ms = ground.ahead_ms, ground.head_ms
    if head_ms > 0.0 and slow_s > 0.0:
        done_ms = (now - ground.turned_at_s) / slow_s
        if done_ms > 0.0:
            ahead_ms -= done_ms if done_ms < head_ms else head_ms
    if ahead_ms > drain_ms:
        drain_ms = ahead_ms
    tpot_ms = ground.pace_ms + ground.ms_per_context_token * (occupied + 0.5 * output)
    slot_share, kv_usable = ground.slot_share, ground.kv_usable_tokens
    if slot_share:
        drain_ms += slot_share * output * tpot_ms
    if occupied > kv_usable:
        drain_ms += (occupied - kv_usable) / kv_usable * 0.5 * output * tpot_ms
    own_ms = ((-(-new // ground.room_tokens) or 1) * ground.step_ms
              + new * (ground.prefill_ms_per_token + ground.half_ms_per_pair * (prompt + cached))
              + ground.first_token_overhead_ms)
    drain_s = drain_ms * slow_s
    ttft_s = drain_s + own_ms * slow_s
    tpot_s = tpot_ms * slow_s
    e2e_s = ttft_s + (output - 1) * tpot_s if output > 1 else ttft_s
    if e2e_s != e2e_s or tpot_s != tpot_s or drain_s != drain_s:
        return NEVER
    spread_s = SD_RATIO * tpot_s
    variance = spread_s * spread_s + ground.burst_s * tpot_s / output
    return new_tuple(Estimate, (
        drain_s, ttft_s, tpot_s, e2e_s, SD_RATIO * ttft_s + SD_FLOOR_S, sqrt(variance) if variance >= 0.0 else inf,
        cached, None, None))


def lateness_s(facts: RequestFacts, estimate: Estimate, margin: float) -> float:
    """Seconds by which `margin` times the estimate misses the caller's budget; 0 where it is kept or none was given.

    The worst of three: first token, last token at the promised pace (the miss of one gap times the gaps), and end.
    """
    budget = facts.budget
    late_s = 0.0
    if budget.ttft_s is not None:
        over_s = margin * estimate.ttft_s - budget.ttft_s
        if over_s > late_s:
            late_s = over_s
    if budget.inter_token_s is not None:
        over_s = margin * estimate.tpot_s - budget.inter_token_s
        gaps = facts.expected_output_tokens - 1
        if over_s > 0.0 and gaps > 0 and over_s * gaps > late_s:
            late_s = over_s * gaps
    if budget.e2e_s is not None:
        over_s = margin * estimate.e2e_s - budget.e2e_s
        if over_s > late_s:
            late_s = over_s
    return late_s
