"""What a request would meet on a backend: wait, first token, pace and end, in seconds. Pure arithmetic, no history.

With the coefficients of `backends.catalog.spec.Coefficients` and, on the backend now, `n` decoding sequences, `k`
tokens of context in them and `q` prompt tokens ahead in the queue, a request of `P` prompt and `D` output tokens is
predicted, in milliseconds::

    step   = host + max(prefill_base, decode_base + d·n + e·k)     prefill_base alone where n = 0
    pace   = host + decode_base + d·n' + e·(k + q + P + D/2)       n' = min(requests + 1, slots)
    steps  = ceil((q + P) / CHUNK) - ceil(P / CHUNK)               prefill steps that the queue adds
    rest   = (step + b·min(q, CHUNK)) / 2                          of the iteration under way; 0 where idle
    slot   = (requests - slots + 1/2) / slots · D · pace           until a slot frees; 0 while one is free
    memory = max(0, k + q + P - 0.95·K) / (0.95·K) · D · pace / 2  until the KV cache has room
    drain  = drift · (rest + steps·step + (b + a·QUEUED/2)·q + slot + memory)
    ttft   = drain + drift · (ceil(P / CHUNK)·step + b·P + a·P²/2 + first_token_overhead)
    tpot   = drift · pace
    e2e    = ttft + (D - 1)·tpot

with `b` and `a` the prefill's time per token and per pair, `d` and `e` the decode's per sequence and per token of
context, and `K` the KV capacity in tokens.

This is the mean of chunked-prefill continuous batching with the prompts of later arrivals left out; the caller's
margin covers them. Every term grows with every load figure, so more load never makes an estimate smaller, and none
looks at another backend, so an unchosen one never changes a choice.

Where a signal is missing: no coefficients → `ASSUMED`; no sample, or one older than `SAMPLE_FRESH_S` → this router's
own books alone; unknown slots or KV capacity → no wait for them. What is not a number comes out as infinity.
"""

from math import inf
from typing import NamedTuple

from backends.catalog.spec import Coefficients
from backends.catalog.views import BackendView
from policies.facts import RequestFacts

ASSUMED = Coefficients(
    version="assumed",
    source="no measurement: a deliberately slow stand-in, about a 7B model on one entry-level card",
    prefill_base_ms=50.0,
    prefill_ms_per_token=1.0,
    prefill_ms_per_pair=0.0,
    decode_base_ms=50.0,
    decode_ms_per_seq=2.0,
    decode_ms_per_seq_token=0.001,
)
"""Stands in until a backend is measured. Slow, so that a measured backend wins in doubt; drift soon corrects it."""

CHUNK_TOKENS = 2048
"""Prompt tokens that an engine prefills in one iteration: vLLM's default `max_num_batched_tokens` for serving."""

QUEUED_PROMPT_TOKENS = 1024
"""Assumed prompt length of a request whose own is not known: for the attention pairs of the queue and for the
requests that wait at the engine on behalf of others."""

SAMPLE_FRESH_S = 5.0
"""A sample older than this says nothing of the load now: most requests that it counted have ended."""

KV_USABLE_RATIO = 0.95
"""Share of the KV cache that fills before an engine holds admissions back."""

DRIFT_RANGE = (0.05, 20.0)
"""A drift beyond this is a fault of the measurement, not a slow backend."""


class Estimate(NamedTuple):
    """Predicted seconds for one request on one backend."""

    drain_s: float
    """Until the engine turns to this request: what is in flight ahead is done, or has made room."""
    ttft_s: float
    tpot_s: float
    """Per output token after the first."""
    e2e_s: float


def bounded_drift(backend: BackendView) -> float:
    """The backend's drift within `DRIFT_RANGE`; 1 where it is not a number."""
    drift = backend.drift
    low, high = DRIFT_RANGE
    if low <= drift <= high:
        return drift
    if drift != drift:
        return 1.0
    return low if drift < low else high


def engine_load(backend: BackendView, now: float) -> tuple[int, int, int]:
    """Requests at the engine, how many of them decode, and how many wait there on behalf of others.

    The engine counts everyone's requests, this router's books only its own. Beyond the books are as many as the last
    fresh sample counted over what we had in flight at the scrape (`in_flight_at_sample`). Where that is not known,
    the larger of both counts stands: it misses others' load while ours is larger, and for one scrape takes our own
    finished requests for someone else's, but it never falls when we send more.
    """
    requests, decoding = backend.in_flight_requests, backend.in_flight_decode_requests
    sample = backend.sample
    if sample is None or sample.running_requests is None or sample.age_s(now) > SAMPLE_FRESH_S:
        return requests, decoding, 0
    running, waiting = sample.running_requests, sample.waiting_requests or 0
    ours = backend.in_flight_at_sample
    if ours is None:
        return max(requests, running + waiting), max(decoding, running), 0
    others = max(0, running + waiting - ours)
    others_waiting = min(waiting, others)
    return requests + others, decoding + others - others_waiting, others_waiting


class Footing(NamedTuple):
    """All of a backend's estimate that does not depend on the request: worked out once for each view of it.

    Milliseconds and tokens, before drift; `drift_s` turns the result into seconds.
    """

    until_s: float
    """Past this time the sample that it counts on is stale."""
    step_ms: float
    pace_ms: float
    """`tpot` without the terms of the request's own context."""
    ms_per_context_token: float
    occupied_tokens: int
    ahead_tokens: int
    queue_ms: float
    """The part of `drain` that is the same for every request: rest of the step under way, prompts ahead."""
    slot_share: float
    """`slot` over `D · tpot`; 0 while a slot is free."""
    kv_usable_tokens: float
    """Infinite where the capacity is not known."""
    prefill_ms_per_token: float
    half_ms_per_pair: float
    first_token_overhead_ms: float
    drift_s: float


def footing(backend: BackendView, now: float) -> Footing:
    """The backend's `Footing` now; remembered with the view."""
    known: Footing | None = backend.memo.get("footing")
    if known is not None and now <= known.until_s:
        return known
    made = backend.memo["footing"] = _footing(backend, now)
    return made


def _footing(backend: BackendView, now: float) -> Footing:
    spec = backend.spec
    c = spec.coefficients or ASSUMED
    requests, decoding, others_waiting = engine_load(backend, now)
    context = backend.in_flight_context_tokens
    ahead = backend.in_flight_prefill_tokens + QUEUED_PROMPT_TOKENS * others_waiting
    slots = spec.slots
    batch = requests + 1
    if slots and batch > slots:
        batch = slots
        decoding = min(decoding, slots)
    step_ms = c.prefill_base_ms
    if decoding > 0:
        step_ms = max(step_ms, c.decode_base_ms + c.decode_ms_per_seq * decoding + c.decode_ms_per_seq_token * context)
    step_ms += c.host_ms
    queue_ms = slot_share = 0.0
    if requests > 0:
        queue_ms = 0.5 * (step_ms + c.prefill_ms_per_token * min(ahead, CHUNK_TOKENS)) + ahead * (
            c.prefill_ms_per_token + c.prefill_ms_per_pair * (0.5 * QUEUED_PROMPT_TOKENS))
        if slots and requests >= slots:
            slot_share = (requests - slots + 0.5) / slots
    sample = backend.sample
    fresh_until_s = inf
    if sample is not None and sample.age_s(now) <= SAMPLE_FRESH_S:
        fresh_until_s = sample.taken_at_s + SAMPLE_FRESH_S
    return Footing(
        until_s=fresh_until_s,
        step_ms=step_ms,
        pace_ms=c.host_ms + c.decode_base_ms + c.decode_ms_per_seq * batch,
        ms_per_context_token=c.decode_ms_per_seq_token,
        occupied_tokens=context + ahead,
        ahead_tokens=ahead if requests > 0 else 0,
        queue_ms=queue_ms,
        slot_share=slot_share,
        kv_usable_tokens=KV_USABLE_RATIO * c.kv_capacity_tokens if c.kv_capacity_tokens else inf,
        prefill_ms_per_token=c.prefill_ms_per_token,
        half_ms_per_pair=0.5 * c.prefill_ms_per_pair,
        first_token_overhead_ms=c.first_token_overhead_ms,
        drift_s=bounded_drift(backend) / 1000.0,
    )


# Runs once per candidate of each decision, so comparisons stand where `min` and `max` would read as well: a call of
# either costs as much as ten multiplications.
def predict(facts: RequestFacts, backend: BackendView, now: float) -> Estimate:
    """The estimate of the module's formula. Total: never raises, never NaN, never negative on sane coefficients."""
    (_, step_ms, pace_ms, ms_per_context_token, occupied, ahead, drain_ms, slot_share, kv_usable, ms_per_token,
     half_ms_per_pair, overhead_ms, drift_s) = footing(backend, now)
    prompt = facts.prompt_tokens
    output = facts.expected_output_tokens if facts.expected_output_tokens > 1 else 1
    occupied += prompt
    tpot_ms = pace_ms + ms_per_context_token * (occupied + 0.5 * output)
    own_steps = -(-prompt // CHUNK_TOKENS) or 1
    if ahead:
        drain_ms += (-(-(ahead + prompt) // CHUNK_TOKENS) - own_steps) * step_ms
    if slot_share:
        drain_ms += slot_share * output * tpot_ms
    if occupied > kv_usable:
        drain_ms += (occupied - kv_usable) / kv_usable * 0.5 * output * tpot_ms
    own_ms = own_steps * step_ms + prompt * (ms_per_token + half_ms_per_pair * prompt) + overhead_ms
    drain_s = drain_ms * drift_s
    ttft_s = drain_s + own_ms * drift_s
    tpot_s = tpot_ms * drift_s
    e2e_s = ttft_s + (output - 1) * tpot_s if output > 1 else ttft_s
    if e2e_s != e2e_s or tpot_s != tpot_s or drain_s != drain_s:
        return Estimate(inf, inf, inf, inf)
    return Estimate(drain_s, ttft_s, tpot_s, e2e_s)


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
