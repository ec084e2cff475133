"""Continuous batching of one engine, one iteration a call.

The scheduler is vLLM's V1 in outline: every decoding sequence gets one token an iteration; what is left of the token
budget goes to prompts, first come first served, in chunks; memory short, the newest sequence is preempted and later
recomputed. The time of an iteration follows from `backends.catalog.spec.Coefficients` (see `step_ms`).

An iteration in which nobody comes or goes costs O(1), however large the batch: all decoding sequences move in step, so
one round counter stands for their progress, and each has its place in a table of rounds at which sequences finish.
That is why `step` reports comings and goings only. **Between its FIRST_TOKEN (or RESUMED) and its FINISHED (or
PREEMPTED) a sequence emits exactly one token in each iteration whose `decode_seqs` is not 0.**

The functions read as pure and are deterministic, but `submit`, `cancel` and `step` consume the state they are given:
go on with the one that they return, and `copy.deepcopy` a state to branch from it. Time, noise and slowness are the
caller's: no clock and no dice in here.
"""

from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import StrEnum

from backends.catalog.spec import Coefficients


class TooLarge(ValueError):
    """The request could never run: it needs more KV cache than the engine has."""


class TokenEventKind(StrEnum):
    FIRST_TOKEN = "first_token"  # noqa: S105
    RESUMED = "resumed"
    """A preempted sequence is back, with its next token."""
    PREEMPTED = "preempted"
    """Thrown out at the start of the iteration: it emits nothing in it."""
    FINISHED = "finished"
    """Its last token came in this iteration."""


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """A sequence came, left or went back to the queue. `generated_tokens` counts all of its tokens so far."""

    kind: TokenEventKind
    id: Hashable
    at_s: float
    generated_tokens: int


@dataclass(frozen=True, slots=True)
class SequenceRequest:
    """One request as the engine sees it. `output_tokens` is how many it will generate, which only the caller knows."""

    id: Hashable
    prompt_tokens: int
    output_tokens: int
    arrival_s: float
    cached_tokens: int = 0
    """Prompt tokens known to be in the prefix cache; the cache of this engine may know of more."""
    prefix_keys: tuple[Hashable, ...] = ()
    """One key per full block of `EngineLimits.prefix_block_tokens` prompt tokens, each standing for all up to there."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What bounds a batch. The defaults are vLLM's, save the KV capacity, which is the card's."""

    kv_capacity_tokens: int
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    chunked_prefill: bool = True
    """False: a prompt runs whole, alone in its iteration, while decoding waits (engines before chunked prefill)."""
    prefix_block_tokens: int = 16

    def __post_init__(self) -> None:
        if min(self.kv_capacity_tokens, self.max_num_seqs, self.prefix_block_tokens) < 1:
            raise ValueError("kv_capacity_tokens, max_num_seqs and prefix_block_tokens must be at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError("max_num_batched_tokens must be at least max_num_seqs: each sequence decodes every step")


@dataclass(frozen=True, slots=True)
class StepResult:
    """One iteration, done as soon as the clock says `ended_at_s`."""

    started_at_s: float
    ended_at_s: float
    prefill_tokens: int
    decode_seqs: int
    """Sequences that got one token by decoding; those that got their first are in `events`."""
    events: tuple[TokenEvent, ...]


@dataclass(slots=True, eq=False)
class _Sequence:
    request: SequenceRequest
    ready_s: float
    """From then on the scheduler sees it."""
    generated: int = 0
    """Tokens generated when it last joined or left the decoding batch."""
    prefill_target: int = 0
    prefill_done: int = 0
    joined_round: int = -1
    """The round after which it began to decode; -1 while it does not."""
    finish_round: int = -1

    def generated_by(self, round_number: int) -> int:
        return self.generated + (round_number - self.joined_round if self.joined_round >= 0 else 0)


@dataclass(slots=True, eq=False)
class EngineState:
    """All that one engine remembers. Made by `new_engine`; read it freely, change it through the functions below."""

    coefficients: Coefficients
    limits: EngineLimits
    busy_until_s: float = 0.0
    """End of the last iteration."""
    kv_used_tokens: int = 0
    """Tokens held by sequences that run: prompt, generated, and the slot of the token in the making."""
    preemptions: int = 0
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    _sequences: dict[Hashable, _Sequence] = field(default_factory=dict)
    _waiting: deque[_Sequence] = field(default_factory=deque)
    _prefilling: list[_Sequence] = field(default_factory=list)
    _decoding: dict[Hashable, _Sequence] = field(default_factory=dict)
    """In the order of admission, as `_prefilling` is; all of these were admitted before any of those."""
    _round: int = 0
    _finishing: dict[int, list[_Sequence]] = field(default_factory=dict)
    _context_tokens: int = 0
    """Prompt and generated tokens of all that decode."""
    _prefix_lru: OrderedDict[Hashable, None] = field(default_factory=OrderedDict)

    @property
    def waiting_seqs(self) -> int:
        return len(self._waiting)

    @property
    def prefilling_seqs(self) -> int:
        return len(self._prefilling)

    @property
    def decoding_seqs(self) -> int:
        return len(self._decoding)

    @property
    def running_seqs(self) -> int:
        """Admitted: prefilling or decoding."""
        return len(self._prefilling) + len(self._decoding)

    @property
    def kv_usage_ratio(self) -> float:
        return self.kv_used_tokens / self.limits.kv_capacity_tokens

    @property
    def prefix_cached_tokens(self) -> int:
        """Tokens that the prefix cache holds."""
        return len(self._prefix_lru) * self.limits.prefix_block_tokens


def new_engine(coefficients: Coefficients, limits: EngineLimits) -> EngineState:
    """An idle engine."""
    return EngineState(coefficients=coefficients, limits=limits)


def step_ms(
    coefficients: Coefficients, prefill_tokens: int, prefill_pairs: float, decode_seqs: int, context_tokens: int
) -> float:
    """Milliseconds of one iteration.

    `prefill_pairs` is Σ(c·done + c²/2) over the prompt chunks of `c` tokens after `done` others: the attention pairs.
    `context_tokens` is B·ctx, the context of all decoding sequences together. The form is `Coefficients`' own.
    """
    base = (
        coefficients.decode_base_ms
        + coefficients.decode_ms_per_seq * decode_seqs
        + coefficients.decode_ms_per_seq_token * context_tokens
        if decode_seqs
        else coefficients.prefill_base_ms
    )
    return (
        coefficients.host_ms
        + base
        + coefficients.prefill_ms_per_token * prefill_tokens
        + coefficients.prefill_ms_per_pair * prefill_pairs
    )


def submit(state: EngineState, request: SequenceRequest) -> EngineState:
    """Queues a request. Call it in the order of arrival.

    The coefficients' `first_token_overhead_ms` (tokenizing, the engine's own front) is spent before the queue.

    Raises:
        TooLarge: prompt and output together exceed the engine's KV cache.
        ValueError: sizes below 1, an id that is in use, or a prompt over the token budget of an unchunked engine.
    """
    limits = state.limits
    if request.prompt_tokens < 1 or request.output_tokens < 1:
        raise ValueError("a sequence has at least one prompt token and one output token")
    if request.id in state._sequences:
        raise ValueError(f"sequence {request.id!r} is already in the engine")
    needed = request.prompt_tokens + request.output_tokens
    if needed > limits.kv_capacity_tokens:
        raise TooLarge(f"{needed} tokens exceed the KV cache of {limits.kv_capacity_tokens}")
    if not limits.chunked_prefill and needed > limits.max_num_batched_tokens:
        # Whole: after a preemption, the tokens generated so far are part of the prompt.
        raise ValueError(f"{needed} tokens exceed a whole prefill of {limits.max_num_batched_tokens}")
    sequence = _Sequence(request, request.arrival_s + state.coefficients.first_token_overhead_ms / 1000)
    state._sequences[request.id] = sequence
    state._waiting.append(sequence)
    return state


def cancel(state: EngineState, sequence_id: Hashable) -> EngineState:
    """Drops a sequence wherever it is and frees what it held. One that is unknown or done already is no error."""
    sequence = state._sequences.pop(sequence_id, None)
    if sequence is None:
        return state
    if sequence_id in state._decoding:
        _leave_decoding(state, sequence)
    elif sequence in state._prefilling:
        state._prefilling.remove(sequence)
        state.kv_used_tokens -= sequence.prefill_target + 1
    else:
        state._waiting.remove(sequence)
    return state


def next_step_s(state: EngineState) -> float | None:
    """When the next iteration can start, given what is known now; `None` while there is nothing to do."""
    if state._decoding or state._prefilling:
        return state.busy_until_s
    if state._waiting:
        return max(state.busy_until_s, state._waiting[0].ready_s)
    return None


def step(state: EngineState, now_s: float, factor: float = 1.0) -> tuple[EngineState, StepResult]:
    """Runs the iteration that starts at `now_s`; `factor` stretches it (noise, a slow card).

    With nothing to run it returns an iteration of no tokens that takes no time.
    """
    if now_s < state.busy_until_s:
        raise ValueError(f"an iteration cannot start at {now_s} s: the last one ends at {state.busy_until_s} s")
    events: list[TokenEvent] = []
    if state.kv_used_tokens + len(state._decoding) > state.limits.kv_capacity_tokens:
        _preempt(state, now_s, events)
    prefill_tokens, pairs = 0, 0.0
    if state._prefilling or state._waiting:
        prefill_tokens, pairs = _schedule_prefill(state, now_s)
    decode_seqs = len(state._decoding)
    if prefill_tokens and not state.limits.chunked_prefill:
        decode_seqs = 0
    if not decode_seqs and not prefill_tokens:
        state.busy_until_s = now_s
        return state, StepResult(now_s, now_s, 0, 0, tuple(events))

    context_tokens = state._context_tokens if decode_seqs else 0
    took_ms = step_ms(state.coefficients, prefill_tokens, pairs, decode_seqs, context_tokens) * factor
    end_s = state.busy_until_s = now_s + took_ms / 1000
    if decode_seqs:
        _decode_round(state, decode_seqs, end_s, events)
    if prefill_tokens:
        _join_decoding(state, end_s, events)
    return state, StepResult(now_s, end_s, prefill_tokens, decode_seqs, tuple(events))


def _preempt(state: EngineState, now_s: float, events: list[TokenEvent]) -> None:
    """Sends the newest sequences back to the head of the queue until each that decodes has room for one more token."""
    while state.kv_used_tokens + len(state._decoding) > state.limits.kv_capacity_tokens:
        if state._prefilling:
            sequence = state._prefilling.pop()
            state.kv_used_tokens -= sequence.prefill_target + 1
        else:
            sequence = next(reversed(state._decoding.values()))
            _leave_decoding(state, sequence)
        state._waiting.appendleft(sequence)
        state.preemptions += 1
        events.append(TokenEvent(TokenEventKind.PREEMPTED, sequence.request.id, now_s, sequence.generated))


def _schedule_prefill(state: EngineState, now_s: float) -> tuple[int, float]:
    """Deals out the token budget that decoding leaves; returns the new prompt tokens and their attention pairs."""
    limits = state.limits
    budget = limits.max_num_batched_tokens - (len(state._decoding) if limits.chunked_prefill else 0)
    total_tokens, pairs = 0, 0.0
    for sequence in state._prefilling:
        chunk = min(budget - total_tokens, sequence.prefill_target - sequence.prefill_done)
        pairs += chunk * sequence.prefill_done + chunk * chunk / 2
        sequence.prefill_done += chunk
        total_tokens += chunk
    # Room for one token of all that decode: without it an admission, first of all that of a sequence just preempted,
    # would be undone at once.
    kv_free = limits.kv_capacity_tokens - len(state._decoding)
    waiting = state._waiting
    while waiting and total_tokens < budget and state.running_seqs < limits.max_num_seqs:
        sequence = waiting[0]
        target = sequence.request.prompt_tokens + sequence.generated
        if sequence.ready_s > now_s or state.kv_used_tokens + target + 1 > kv_free:
            break
        cached = _look_up_prefix(state, sequence.request)
        chunk = target - cached
        if chunk > budget - total_tokens:
            if not limits.chunked_prefill:
                break
            chunk = budget - total_tokens
        waiting.popleft()
        state.prefix_queried_tokens += sequence.request.prompt_tokens
        state.prefix_hit_tokens += cached
        sequence.prefill_target = target
        sequence.prefill_done = cached + chunk
        pairs += chunk * cached + chunk * chunk / 2
        total_tokens += chunk
        state._prefilling.append(sequence)
        state.kv_used_tokens += target + 1
    return total_tokens, pairs


def _decode_round(state: EngineState, decode_seqs: int, end_s: float, events: list[TokenEvent]) -> None:
    state._round += 1
    state._context_tokens += decode_seqs
    state.kv_used_tokens += decode_seqs
    for sequence in state._finishing.pop(state._round, ()):
        request = sequence.request
        held = request.prompt_tokens + request.output_tokens
        state.kv_used_tokens -= held
        state._context_tokens -= held
        del state._decoding[request.id], state._sequences[request.id]
        events.append(TokenEvent(TokenEventKind.FINISHED, request.id, end_s, request.output_tokens))


def _join_decoding(state: EngineState, end_s: float, events: list[TokenEvent]) -> None:
    """The prompts that are through: each has its next token, and decodes from the next round on."""
    still_prefilling = []
    for sequence in state._prefilling:
        if sequence.prefill_done < sequence.prefill_target:
            still_prefilling.append(sequence)
            continue
        request = sequence.request
        kind = TokenEventKind.RESUMED if sequence.generated else TokenEventKind.FIRST_TOKEN
        sequence.generated += 1
        events.append(TokenEvent(kind, request.id, end_s, sequence.generated))
        if request.prefix_keys:
            _remember_prefix(state, request)
        if sequence.generated == request.output_tokens:
            state.kv_used_tokens -= sequence.prefill_target + 1
            del state._sequences[request.id]
            events.append(TokenEvent(TokenEventKind.FINISHED, request.id, end_s, sequence.generated))
            continue
        sequence.joined_round = state._round
        sequence.finish_round = state._round + request.output_tokens - sequence.generated
        state._finishing.setdefault(sequence.finish_round, []).append(sequence)
        state._decoding[request.id] = sequence
        state._context_tokens += request.prompt_tokens + sequence.generated
    state._prefilling = still_prefilling


def _leave_decoding(state: EngineState, sequence: _Sequence) -> None:
    """Takes a sequence out of the batch before its time and frees its memory."""
    sequence.generated = sequence.generated_by(state._round)
    sequence.joined_round = -1
    finishing = state._finishing[sequence.finish_round]
    finishing.remove(sequence)
    if not finishing:
        del state._finishing[sequence.finish_round]
    del state._decoding[sequence.request.id]
    held = sequence.request.prompt_tokens + sequence.generated
    state.kv_used_tokens -= held
    state._context_tokens -= held


def _look_up_prefix(state: EngineState, request: SequenceRequest) -> int:
    """Prompt tokens that need no computing. At least one always does: the first token comes out of it."""
    hits = 0
    if request.prefix_keys and state._prefix_lru:
        _trim_prefix_cache(state)
        for key in request.prefix_keys:
            if key not in state._prefix_lru:
                break
            hits += 1
        _touch_prefix(state, request.prefix_keys[:hits])
    cached = max(request.cached_tokens, hits * state.limits.prefix_block_tokens)
    return min(cached, request.prompt_tokens - 1)


def _remember_prefix(state: EngineState, request: SequenceRequest) -> None:
    _touch_prefix(state, request.prefix_keys)
    _trim_prefix_cache(state)


def _touch_prefix(state: EngineState, keys: tuple[Hashable, ...]) -> None:
    # The tail goes first and is the older: eviction then takes a prefix from its end and leaves no hole in the middle.
    for key in reversed(keys):
        state._prefix_lru[key] = None
        state._prefix_lru.move_to_end(key)


def _trim_prefix_cache(state: EngineState) -> None:
    """Evicts the least recently used blocks. Cached prefixes live in memory that no running sequence needs.

    A running sequence's own blocks count twice (as its memory and as cache), so a full engine caches a little less
    than vLLM, which shares them.
    """
    room_blocks = (state.limits.kv_capacity_tokens - state.kv_used_tokens) // state.limits.prefix_block_tokens
    while len(state._prefix_lru) > room_blocks:
        state._prefix_lru.popitem(last=False)
