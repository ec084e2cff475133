"""The part of a backend's estimate that does not depend on the request: worked out once for each view of it.

The formula is `policies.estimate`'s. Time enters in ticks of a tenth of a second, so that a remembered footing equals
a new one, and a decision can be replayed.
"""

from math import inf
from typing import NamedTuple

from backends.catalog.spec import Coefficients
from backends.catalog.views import BackendView
from policies.beliefs.backend import BackendBelief
from policies.beliefs.drift import faded

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

MIN_ROOM_TOKENS = 64
LARGEST_RHO = 0.85
TICK_S = 0.1
SILENCE_ITERATIONS = 4.0
SILENCE_SLACK_S = 0.15
"""Longest time between two reports of a backend's pace; silence within it means nothing."""


def belief_of(backend: BackendView) -> BackendBelief | None:
    """What is believed of it, where the learner is one whose beliefs are ours to read."""
    belief = backend.belief
    return belief if type(belief) is BackendBelief else None


def coefficients_of(backend: BackendView) -> Coefficients:
    """Its measured coefficients, else the learner's stand-in, else `ASSUMED`."""
    known = backend.spec.coefficients
    if known is not None:
        return known
    belief = belief_of(backend)
    return ASSUMED if belief is None or belief.stand_in is None else belief.stand_in


def bounded_drift(backend: BackendView) -> float:
    """The backend's drift within `DRIFT_RANGE`; 1 where it is not a number."""
    drift = backend.drift
    low, high = DRIFT_RANGE
    if low <= drift <= high:
        return drift
    if drift != drift:
        return 1.0
    return low if drift < low else high


def drift_of(backend: BackendView, now: float) -> float:
    """How much slower than calibrated it is believed to be: as its learner says, else as the view does."""
    belief = belief_of(backend)
    if belief is None:
        return 1.0 if backend.drift == 1.0 else bounded_drift(backend)
    applied = belief.drift.applied
    return applied if applied == 1.0 else faded(applied, belief.idle_s(now // TICK_S * TICK_S))


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
    """Milliseconds and tokens, before slowness; `slow_s` turns them into seconds."""

    step_ms: float
    room_tokens: int
    pace_ms: float
    """`pace` without the request's own context."""
    ms_per_context_token: float
    occupied_tokens: int
    queue_ms: float
    """The part of `drain` that is the same for every request: rest of the step under way, prompts ahead."""
    slot_share: float
    """`slot` over `D · pace`; 0 while a slot is free."""
    kv_usable_tokens: float
    """Infinite where the capacity is not known."""
    prefill_ms_per_token: float
    half_ms_per_pair: float
    first_token_overhead_ms: float
    slow_s: float
    """Drift and stall, over 1000."""
    burst_s: float
    """`s²·burst`."""


class _Remembered(NamedTuple):
    footing: Footing
    version: int
    tick: float
    until_s: float


def footing(backend: BackendView, now: float) -> Footing:
    """The backend's footing now; remembered with the view."""
    belief = belief_of(backend)
    version, tick = (0, 0.0) if belief is None else (belief.version, now // TICK_S)
    known: _Remembered | None = backend.memo.get("footing")
    if known is not None and known.tick == tick and known.version == version and now <= known.until_s:
        return known.footing
    sample = backend.sample
    until_s = inf
    if sample is not None and sample.age_s(now) <= SAMPLE_FRESH_S:
        until_s = sample.taken_at_s + SAMPLE_FRESH_S
    made = _footing(backend, belief, now, tick * TICK_S)
    backend.memo["footing"] = _Remembered(made, version, tick, until_s)
    return made


def _footing(backend: BackendView, belief: BackendBelief | None, now: float, tick_s: float) -> Footing:
    spec = backend.spec
    c = coefficients_of(backend)
    requests, decoding, others_waiting = engine_load(backend, now)
    context = backend.in_flight_context_tokens
    prompts_ahead = backend.in_flight_prefill_tokens + QUEUED_PROMPT_TOKENS * others_waiting
    ahead = prompts_ahead
    if belief is not None and belief.cached_ahead_tokens > 0:
        ahead = max(0, ahead - belief.cached_ahead_tokens)
    slots = spec.slots
    batch = requests + 1
    if slots and batch > slots:
        batch = slots
        decoding = min(decoding, slots)
    chunk = c.chunk_tokens or CHUNK_TOKENS
    room = max(chunk - decoding, MIN_ROOM_TOKENS)
    step_ms = c.prefill_base_ms
    if decoding > 0:
        step_ms = max(step_ms, c.decode_base_ms + c.decode_ms_per_seq * decoding + c.decode_ms_per_seq_token * context)
    step_ms += c.host_ms
    queue_ms = ahead_share = slot_share = 0.0
    chunk_ms = c.prefill_ms_per_token * min(ahead, chunk)
    if requests > 0:
        ahead_share = ahead / room
        queue_ms = 0.5 * (step_ms + chunk_ms) + ahead * (
            c.prefill_ms_per_token + c.prefill_ms_per_pair * (0.5 * QUEUED_PROMPT_TOKENS))
        if slots and requests >= slots:
            slot_share = (requests - slots + 0.5) / slots
    slowness, share, burst_s = drift_of(backend, now), 0.0, 0.0
    if belief is not None:
        if belief.open_requests > 0:
            # Streams show life with each iteration; prompts alone only when the first of them is through.
            quiet_ms = SILENCE_ITERATIONS * (step_ms + chunk_ms)
            if not decoding:
                quiet_ms += ahead_share * step_ms + queue_ms + c.first_token_overhead_ms
            limit_s = SILENCE_SLACK_S + slowness * quiet_ms / 1000.0
            slowness *= max(1.0, belief.silence_s(tick_s) / limit_s)
        share, burst_s = belief.arrivals.at(tick_s)
    rho = slowness * share
    stretch = 1.0 / (1.0 - (rho if rho < LARGEST_RHO else LARGEST_RHO))
    kv_capacity = c.kv_capacity_tokens
    if not kv_capacity and backend.sample is not None:
        kv_capacity = backend.sample.kv_capacity_tokens
    return Footing(
        step_ms=step_ms,
        room_tokens=room,
        pace_ms=(c.host_ms + c.decode_base_ms + c.decode_ms_per_seq * batch) * stretch,
        ms_per_context_token=c.decode_ms_per_seq_token * stretch,
        occupied_tokens=context + prompts_ahead,
        queue_ms=queue_ms + ahead_share * step_ms,
        slot_share=slot_share,
        kv_usable_tokens=KV_USABLE_RATIO * kv_capacity if kv_capacity else inf,
        prefill_ms_per_token=c.prefill_ms_per_token,
        half_ms_per_pair=0.5 * c.prefill_ms_per_pair,
        first_token_overhead_ms=c.first_token_overhead_ms,
        slow_s=slowness / 1000.0,
        burst_s=slowness * slowness * burst_s,
    )


def gaps_s(backend: BackendView, least_a_token: float, most_a_token: float, now: float) -> tuple[float, float]:
    """What the calibration says of the gap between two tokens of a stream there, its drift and stalls left out.

    ::

        gap = host + decode_base + d·n + e·k + b·min(prefilled, room)

    Of the prompt tokens that were prefilled between two tokens of the stream only bounds are known, hence two gaps.
    """
    c = coefficients_of(backend)
    _, decoding, _ = engine_load(backend, now)
    slots = backend.spec.slots
    if slots and decoding > slots:
        decoding = slots
    room = max((c.chunk_tokens or CHUNK_TOKENS) - decoding, MIN_ROOM_TOKENS)
    step_ms = (c.host_ms + c.decode_base_ms + c.decode_ms_per_seq * max(1, decoding)
               + c.decode_ms_per_seq_token * backend.in_flight_context_tokens)
    return ((step_ms + c.prefill_ms_per_token * min(least_a_token, room)) / 1000.0,
            (step_ms + c.prefill_ms_per_token * min(most_a_token, room)) / 1000.0)
