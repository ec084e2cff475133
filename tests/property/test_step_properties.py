"""Continuous batching: what holds for any load on any engine.

The engine keeps a batch in O(1) a step. `NaiveEngine` does the same work the plain way, token by token, and both have
to agree to the last event.
"""

import copy
import random
from collections.abc import Hashable
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from backends.catalog.spec import Coefficients
from loadtest.fake_engine.step import (
    EngineLimits,
    EngineState,
    SequenceRequest,
    StepResult,
    TokenEventKind,
    cancel,
    new_engine,
    next_step_s,
    step,
    step_ms,
    submit,
)

milliseconds = st.floats(0, 100, allow_subnormal=False)
small_ms = st.floats(0, 1, allow_subnormal=False)
coefficients = st.builds(
    Coefficients,
    version=st.just("drawn"), source=st.just("drawn"),
    prefill_base_ms=st.floats(0.1, 100), prefill_ms_per_token=small_ms, prefill_ms_per_pair=small_ms,
    decode_base_ms=st.floats(0.1, 100), decode_ms_per_seq=small_ms, decode_ms_per_seq_token=small_ms,
    host_ms=milliseconds, first_token_overhead_ms=milliseconds,
)


@st.composite
def engine_limits(draw: st.DrawFn, chunked: bool | None = None) -> EngineLimits:
    seqs = draw(st.integers(1, 8))
    is_chunked = draw(st.booleans()) if chunked is None else chunked
    # Whole prefills need a budget for the longest prompt and output together.
    least = seqs if is_chunked else 70
    return EngineLimits(
        kv_capacity_tokens=draw(st.integers(70, 200)), max_num_seqs=seqs,
        max_num_batched_tokens=draw(st.integers(least, 80)), chunked_prefill=is_chunked,
    )


@st.composite
def arrivals(draw: st.DrawFn) -> list[SequenceRequest]:
    now, requests = 0.0, []
    for number in range(draw(st.integers(1, 14))):
        now += draw(st.sampled_from([0.0, 0.0, 0.001, 0.1, 3.0]))
        prompt = draw(st.integers(1, 40))
        requests.append(SequenceRequest(
            number, prompt, draw(st.integers(1, 30)), now, cached_tokens=draw(st.integers(0, prompt)),
        ))
    return requests


@dataclass
class Naive:
    request: SequenceRequest
    ready_s: float
    generated: int = 0
    done: int = 0
    target: int = 0

    @property
    def decodes(self) -> bool:
        return self.done == self.target


@dataclass
class NaiveEngine:
    """One list of running sequences, each token counted by hand, memory summed anew wherever it is needed."""

    coefficients: Coefficients
    limits: EngineLimits
    waiting: list[Naive] = field(default_factory=list)
    running: list[Naive] = field(default_factory=list)

    def held(self) -> int:
        return sum(one.request.prompt_tokens + one.generated + (not one.decodes) for one in self.running)

    def run(self, now: float) -> tuple[float, int, int, list[tuple[str, object, int]]]:
        events: list[tuple[str, object, int]] = []
        decoding = [one for one in self.running if one.decodes]
        preempted = False
        while decoding and self.held() + len(decoding) > self.limits.kv_capacity_tokens:
            victim = self.running.pop()
            victim.done = victim.target = 0
            self.waiting.insert(0, victim)
            events.append(("preempted", victim.request.id, victim.generated))
            decoding = [one for one in self.running if one.decodes]
            preempted = True
        budget = self.limits.max_num_batched_tokens - (len(decoding) if self.limits.chunked_prefill else 0)
        tokens, pairs, prefilling = 0, 0.0, [one for one in self.running if not one.decodes]
        for one in prefilling:
            chunk = min(budget - tokens, one.target - one.done)
            tokens, pairs, one.done = tokens + chunk, pairs + chunk * one.done + chunk * chunk / 2, one.done + chunk
        room = self.limits.kv_capacity_tokens - len(decoding) - sum(
            one.request.prompt_tokens + one.generated + (one not in decoding) for one in self.running
        )
        while not preempted and self.waiting and tokens < budget and len(self.running) < self.limits.max_num_seqs:
            one = self.waiting[0]
            target = one.request.prompt_tokens + one.generated
            cached = min(one.request.cached_tokens, one.request.prompt_tokens - 1)
            chunk = min(budget - tokens, target - cached)
            whole = chunk == target - cached
            if one.ready_s > now or target + 1 > room or not (whole or self.limits.chunked_prefill):
                break
            self.waiting.pop(0)
            self.running.append(one)
            prefilling.append(one)
            room -= target + 1
            one.target, one.done = target, cached + chunk
            tokens, pairs = tokens + chunk, pairs + chunk * cached + chunk * chunk / 2
        if tokens and not self.limits.chunked_prefill:
            decoding = []
        context = sum(one.request.prompt_tokens + one.generated for one in decoding)
        took = step_ms(self.coefficients, tokens, pairs, len(decoding), context) if tokens or decoding else 0.0
        for one in decoding:
            one.generated += 1
            one.target = one.done = one.request.prompt_tokens + one.generated
        finished = [one for one in decoding if one.generated == one.request.output_tokens]
        events += sorted(
            [("finished", one.request.id, one.generated) for one in finished], key=lambda event: str(event[1])
        )
        for one in [one for one in prefilling if one.decodes]:
            events.append(("resumed" if one.generated else "first_token", one.request.id, one.generated + 1))
            one.generated += 1
            one.target = one.done = one.request.prompt_tokens + one.generated
            if one.generated == one.request.output_tokens:
                events.append(("finished", one.request.id, one.generated))
                finished.append(one)
        self.running = [one for one in self.running if one not in finished]
        return now + took / 1000, tokens, len(decoding), events


def comparable(result: StepResult) -> list[tuple[str, object, int]]:
    """Events as tuples; those that finish by decoding have no order among themselves."""
    events = [(event.kind.value, event.id, event.generated_tokens) for event in result.events]
    heads = [event for event in events if event[0] == "preempted"]
    tail = events[len(heads):]
    decoded = 0
    while decoded < len(tail) and tail[decoded][0] == "finished":
        decoded += 1
    return heads + sorted(tail[:decoded], key=lambda event: str(event[1])) + tail[decoded:]


def run_all(state: EngineState, requests: list[SequenceRequest]) -> list[StepResult]:
    results, todo = [], list(requests)
    while todo or next_step_s(state) is not None:
        start = next_step_s(state)
        if todo and (start is None or todo[0].arrival_s <= start):
            state = submit(state, todo.pop(0))
            continue
        assert start is not None
        state, result = step(state, start)
        results.append(result)
        assert state.kv_used_tokens <= state.limits.kv_capacity_tokens
        assert state.running_seqs <= state.limits.max_num_seqs
        assert result.prefill_tokens + result.decode_seqs <= state.limits.max_num_batched_tokens
    return results


@settings(max_examples=300)
@given(coefficients, engine_limits(), arrivals())
def test_agrees_with_the_naive_engine(
    drawn: Coefficients, limits: EngineLimits, requests: list[SequenceRequest]
) -> None:
    state, naive, todo = new_engine(drawn, limits), NaiveEngine(drawn, limits), list(requests)
    while todo or next_step_s(state) is not None:
        start = next_step_s(state)
        if todo and (start is None or todo[0].arrival_s <= start):
            request = todo.pop(0)
            state = submit(state, request)
            naive.waiting.append(Naive(request, request.arrival_s + drawn.first_token_overhead_ms / 1000))
            continue
        assert start is not None
        state, result = step(state, start)
        end, tokens, decode_seqs, events = naive.run(start)
        assert (result.prefill_tokens, result.decode_seqs) == (tokens, decode_seqs)
        assert comparable(result) == events
        assert abs(result.ended_at_s - end) < 1e-9
        assert state.kv_used_tokens == naive.held()
        assert (state.running_seqs, state.waiting_seqs) == (len(naive.running), len(naive.waiting))


@given(coefficients, engine_limits(), arrivals())
def test_everyone_gets_the_tokens_asked_for_and_memory_is_given_back(
    drawn: Coefficients, limits: EngineLimits, requests: list[SequenceRequest]
) -> None:
    state = new_engine(drawn, limits)
    emitted = dict.fromkeys((request.id for request in requests), 0)
    emitting: set[Hashable] = set()
    for result in run_all(state, requests):
        emitting -= {event.id for event in result.events if event.kind is TokenEventKind.PREEMPTED}
        if result.decode_seqs:
            assert result.decode_seqs == len(emitting)
            for sequence_id in emitting:
                emitted[sequence_id] += 1
        for event in result.events:
            if event.kind in (TokenEventKind.FIRST_TOKEN, TokenEventKind.RESUMED):
                emitting.add(event.id)
                emitted[event.id] += 1
            elif event.kind is TokenEventKind.FINISHED:
                emitting.discard(event.id)
            assert event.generated_tokens == emitted[event.id]
    assert emitted == {request.id: request.output_tokens for request in requests}
    assert (state.kv_used_tokens, state.running_seqs, state.waiting_seqs) == (0, 0, 0)


@given(coefficients, engine_limits(), arrivals())
def test_first_come_first_served(drawn: Coefficients, limits: EngineLimits, requests: list[SequenceRequest]) -> None:
    results = run_all(new_engine(drawn, limits), requests)
    firsts = [event.id for result in results for event in result.events if event.kind is TokenEventKind.FIRST_TOKEN]
    assert firsts == [request.id for request in requests]
    starts_and_ends = [time for result in results for time in (result.started_at_s, result.ended_at_s)]
    assert starts_and_ends == sorted(starts_and_ends)


@given(coefficients, engine_limits(), arrivals(), st.integers(0, 60), st.randoms(use_true_random=False))
def test_cancelling_all_at_any_moment_frees_everything(
    drawn: Coefficients, limits: EngineLimits, requests: list[SequenceRequest], steps: int,
    rng: random.Random,
) -> None:
    state = new_engine(drawn, limits)
    for request in requests:
        submit(state, request)
    for _ in range(steps):
        start = next_step_s(state)
        if start is None:
            break
        step(state, start)
    ids = [request.id for request in requests]
    rng.shuffle(ids)
    for sequence_id in ids:
        cancel(state, sequence_id)
    assert (state.kv_used_tokens, state.running_seqs, state.waiting_seqs) == (0, 0, 0)
    assert next_step_s(state) is None
    # As good as new: the same load runs as on a fresh engine, later.
    again = [event.kind for result in run_all(state, requests) for event in result.events]
    fresh = [event.kind for result in run_all(new_engine(drawn, limits), requests) for event in result.events]
    assert again.count(TokenEventKind.FINISHED) == fresh.count(TokenEventKind.FINISHED) == len(requests)


@given(coefficients, engine_limits(), arrivals(), st.integers(0, 30))
def test_same_state_same_step(
    drawn: Coefficients, limits: EngineLimits, requests: list[SequenceRequest], steps: int
) -> None:
    state = new_engine(drawn, limits)
    for request in requests:
        submit(state, request)
    for _ in range(steps):
        if (start := next_step_s(state)) is None:
            return
        twin = copy.deepcopy(state)
        _, result = step(state, start, 1.5)
        assert step(twin, start, 1.5)[1] == result


@given(coefficients, engine_limits(chunked=True), arrivals(), st.integers(0, 30))
def test_one_more_request_in_the_queue_never_makes_a_step_shorter(
    drawn: Coefficients, limits: EngineLimits, requests: list[SequenceRequest], steps: int
) -> None:
    state = new_engine(drawn, limits)
    for request in requests:
        submit(state, request)
    for _ in range(steps):
        if (start := next_step_s(state)) is None:
            return
        busier = submit(copy.deepcopy(state), SequenceRequest("one more", 20, 5, requests[-1].arrival_s))
        _, result = step(state, start)
        assert step(busier, start)[1].ended_at_s >= result.ended_at_s


work = st.tuples(st.integers(0, 4096), st.integers(0, 10**6), st.integers(1, 256), st.integers(0, 10**6))


@given(coefficients, work, work)
def test_more_work_never_takes_less_time(
    drawn: Coefficients, some: tuple[int, int, int, int], more: tuple[int, int, int, int]
) -> None:
    both = [mine + other for mine, other in zip(some, more, strict=True)]
    assert step_ms(drawn, *both) >= step_ms(drawn, *some)
