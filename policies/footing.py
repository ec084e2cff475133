"""The part of a backend's estimate that does not depend on the request: worked out once for each view of it.

The formula is `policies.estimate`'s. Time enters in ticks of a tenth of a second, so that a remembered footing equals
a new one, and a decision can be replayed.
"""

from math import inf

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


class Footing:
    """Milliseconds and tokens, before slowness; `slow_s` turns them into seconds. Not changed once it is made.

    No frozen dataclass: one is made for each view that a decision weighs, and that would take three times as long.
    """

    __slots__ = ("ahead_ms", "burst_s", "first_token_overhead_ms", "half_ms_per_pair", "head_ms", "kv_usable_tokens",
                 "ms_per_context_token", "occupied_tokens", "pace_ms", "prefill_ms_per_token", "rest_ms",
                 "room_tokens", "slot_share", "slow_s", "step_ms", "tick", "turned_at_s", "until_s",
                 "version")  # fmt: skip

    def __init__(
        self, step_ms: float, room_tokens: int, pace_ms: float, ms_per_context_token: float, occupied_tokens: int,
        rest_ms: float, ahead_ms: float, head_ms: float, turned_at_s: float, slot_share: float,
        kv_usable_tokens: float, prefill_ms_per_token: float,
        half_ms_per_pair: float, first_token_overhead_ms: float, slow_s: float, burst_s: float,
        version: int, tick: float, until_s: float
    ) -> None:
        self.step_ms = step_ms
        self.room_tokens = room_tokens
        self.pace_ms = pace_ms
        """`pace` without the request's own context."""
        self.ms_per_context_token = ms_per_context_token
        self.occupied_tokens = occupied_tokens
        self.rest_ms = rest_ms
        """Of the iteration under way, where no prompt waits."""
        self.ahead_ms = ahead_ms
        """Of the prompts ahead, as if the engine turned to them at `turned_at_s`; 0 where none waits."""
        self.head_ms = head_ms
        """Of these, what can have been done since; 0 where nobody knows when the engine turned to them."""
        self.turned_at_s = turned_at_s
        self.slot_share = slot_share
        """`slot` over `D · pace`; 0 while a slot is free."""
        self.kv_usable_tokens = kv_usable_tokens
        """Infinite where the capacity is not known."""
        self.prefill_ms_per_token = prefill_ms_per_token
        self.half_ms_per_pair = half_ms_per_pair
        self.first_token_overhead_ms = first_token_overhead_ms
        self.slow_s = slow_s
        """Drift and stall, over 1000."""
        self.burst_s = burst_s
        """`s²·burst`."""
        self.version = version
        """Of the belief that it was worked out from."""
        self.tick = tick
        """The tenth of a second for which it holds, ..."""
        self.until_s = until_s
        """... and until when at the longest: then the view's sample is too old."""


def footing(backend: BackendView, now: float) -> Footing:
    """The backend's footing now; remembered with the view."""
    belief = belief_of(backend)
    version, tick = 0, 0.0
    if belief is not None:
        version, tick = belief.version, now // TICK_S
    known: Footing | None = backend.memo.get("footing")
    if known is not None and known.tick == tick and known.version == version and now <= known.until_s:
        return known
    sample = backend.sample
    until_s = inf
    if sample is not None and sample.age_s(now) <= SAMPLE_FRESH_S:
        until_s = sample.taken_at_s + SAMPLE_FRESH_S
    made = backend.memo["footing"] = _footing(backend, belief, now, version, tick, until_s)
    return made


def _footing(
    backend: BackendView, belief: BackendBelief | None, now: float, version: int, tick: float, until_s: float
) -> Footing:
    tick_s = tick * TICK_S
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
    prefill, decode = (1.0, 1.0) if belief is None else (belief.prefill.factor, belief.decode.factor)
    token_ms = prefill * (c.prefill_ms_per_token + c.prefill_ms_per_pair * (0.5 * QUEUED_PROMPT_TOKENS))
    chunk_ms = prefill * c.prefill_ms_per_token * min(ahead, chunk)
    rest_ms = ahead_ms = head_ms = turned_at_s = slot_share = 0.0
    if requests > 0:
        rest_ms = 0.5 * step_ms
        if ahead > 0:
            ahead_ms = max(1.0, ahead / room) * step_ms + ahead * token_ms
            head = 0 if belief is None else belief.waiting.head_tokens
            if belief is not None and head > 0:
                head_ms = max(1.0, head / room) * step_ms + head * token_ms
                turned_at_s = belief.waiting.turned_at_s
            else:
                # Another router's: half of its iteration is over in the mean.
                ahead_ms -= 0.5 * (step_ms + chunk_ms)
        if slots and requests >= slots:
            slot_share = (requests - slots + 0.5) / slots
    slowness, share, burst_s = drift_of(backend, now), 0.0, 0.0
    if belief is not None:
        if belief.open_requests > 0:
            # Streams show life with each iteration; prompts alone only when the first of them is through.
            quiet_ms = SILENCE_ITERATIONS * (step_ms + chunk_ms)
            if not decoding:
                quiet_ms += rest_ms + 0.5 * chunk_ms + ahead / room * step_ms + ahead * token_ms
                quiet_ms += c.first_token_overhead_ms
            limit_s = SILENCE_SLACK_S + slowness * quiet_ms / 1000.0
            slowness *= max(1.0, belief.silence_s(tick_s) / limit_s)
        share, burst_s = belief.arrivals.at(tick_s)
    rho = slowness * share * prefill
    stretch = 1.0 / (1.0 - (rho if rho < LARGEST_RHO else LARGEST_RHO))
    kv_capacity = c.kv_capacity_tokens
    if not kv_capacity and backend.sample is not None:
        kv_capacity = backend.sample.kv_capacity_tokens
    return Footing(
        step_ms=step_ms,
        room_tokens=room,
        pace_ms=(c.host_ms + c.decode_base_ms + c.decode_ms_per_seq * batch) * decode * stretch,
        ms_per_context_token=c.decode_ms_per_seq_token * decode * stretch,
        occupied_tokens=context + prompts_ahead,
        rest_ms=rest_ms,
        ahead_ms=ahead_ms,
        head_ms=head_ms,
        turned_at_s=turned_at_s,
        slot_share=slot_share,
        kv_usable_tokens=KV_USABLE_RATIO * kv_capacity if kv_capacity else inf,
        prefill_ms_per_token=c.prefill_ms_per_token * prefill,
        half_ms_per_pair=0.5 * c.prefill_ms_per_pair * prefill,
        first_token_overhead_ms=c.first_token_overhead_ms,
        slow_s=slowness / 1000.0,
        burst_s=slowness * slowness * prefill * prefill * burst_s,
        version=version,
        tick=tick,
        until_s=until_s,
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
