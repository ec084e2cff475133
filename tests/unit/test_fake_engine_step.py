"""The physics of the fake engine against numbers worked out by hand."""

from typing import Any

import pytest

from backends.catalog.spec import Coefficients
from loadtest.fake_engine.step import (
    EngineLimits,
    EngineState,
    SequenceRequest,
    StepResult,
    TokenEventKind,
    TooLarge,
    cancel,
    new_engine,
    next_step_s,
    step,
    step_ms,
    submit,
)

# Powers of two, so that sums are exact.
COEFFICIENTS = Coefficients(
    version="test", source="made up", prefill_base_ms=16, prefill_ms_per_token=0.25, prefill_ms_per_pair=2**-10,
    decode_base_ms=8, decode_ms_per_seq=0.5, decode_ms_per_seq_token=2**-6, host_ms=1, first_token_overhead_ms=0,
)
FIRST, RESUMED, PREEMPTED, FINISHED = (
    TokenEventKind.FIRST_TOKEN, TokenEventKind.RESUMED, TokenEventKind.PREEMPTED, TokenEventKind.FINISHED,
)


def engine(coefficients: Coefficients = COEFFICIENTS, kv_capacity_tokens: int = 100_000, **limits: Any) -> EngineState:
    return new_engine(coefficients, EngineLimits(kv_capacity_tokens, **limits))


def ask(name: str, prompt: int, output: int, arrival_s: float = 0.0, **more: Any) -> SequenceRequest:
    return SequenceRequest(name, prompt, output, arrival_s, **more)


def run_one(state: EngineState) -> StepResult:
    start = next_step_s(state)
    assert start is not None
    _, result = step(state, start)
    return result


def told(result: StepResult) -> list[tuple[TokenEventKind, object]]:
    return [(event.kind, event.id) for event in result.events]


def milliseconds(result: StepResult) -> float:
    return (result.ended_at_s - result.started_at_s) * 1000


def test_step_time_by_hand() -> None:
    # Prefill alone: 1 + 16 + 0.25·64 + (64²/2)/1024 = 35
    assert step_ms(COEFFICIENTS, 64, 64 * 64 / 2, 0, 0) == 35
    # Decode alone, 4 sequences of mean context 128: 1 + 8 + 0.5·4 + 4·128/64 = 19
    assert step_ms(COEFFICIENTS, 0, 0, 4, 512) == 19
    # Both: the decode base stands for the step, 19 + 16 + 2
    assert step_ms(COEFFICIENTS, 64, 2048, 4, 512) == 37


def test_one_request_from_prompt_to_last_token() -> None:
    state = submit(engine(), ask("a", 64, 3, arrival_s=2.0))
    assert next_step_s(state) == 2.0
    prefill = run_one(state)
    assert milliseconds(prefill) == pytest.approx(35)
    assert told(prefill) == [(FIRST, "a")]
    assert (prefill.prefill_tokens, prefill.decode_seqs) == (64, 0)
    assert state.kv_used_tokens == 65
    second = run_one(state)
    assert milliseconds(second) == pytest.approx(1 + 8 + 0.5 + 65 / 64)
    assert told(second) == []
    third = run_one(state)
    assert milliseconds(third) == pytest.approx(1 + 8 + 0.5 + 66 / 64)
    assert told(third) == [(FINISHED, "a")]
    assert third.events[0].generated_tokens == 3
    assert third.events[0].at_s == third.ended_at_s
    assert (state.kv_used_tokens, state.running_seqs, next_step_s(state)) == (0, 0, None)


def test_a_single_token_finishes_with_the_prefill() -> None:
    result = run_one(submit(engine(), ask("a", 10, 1)))
    assert told(result) == [(FIRST, "a"), (FINISHED, "a")]


def test_a_long_prompt_goes_in_chunks_and_decoding_goes_on_beside_it() -> None:
    state = submit(engine(max_num_batched_tokens=256), ask("a", 100, 50))
    run_one(state)
    submit(state, ask("b", 400, 2))
    first = run_one(state)
    # One token of the budget of 256 is a's.
    assert (first.prefill_tokens, first.decode_seqs, told(first)) == (255, 1, [])
    assert milliseconds(first) == pytest.approx(1 + 8 + 0.5 + 101 / 64 + 0.25 * 255 + (255 * 255 / 2) / 1024)
    rest = run_one(state)
    assert (rest.prefill_tokens, rest.decode_seqs, told(rest)) == (145, 1, [(FIRST, "b")])
    assert milliseconds(rest) == pytest.approx(
        1 + 8 + 0.5 + 102 / 64 + 0.25 * 145 + (145 * 255 + 145 * 145 / 2) / 1024
    )


def test_without_chunked_prefill_decoding_waits_for_whole_prompts() -> None:
    limits = EngineLimits(kv_capacity_tokens=10_000, max_num_batched_tokens=256, chunked_prefill=False)
    state = submit(new_engine(COEFFICIENTS, limits), ask("a", 100, 50))
    run_one(state)
    submit(state, ask("b", 200, 2))
    submit(state, ask("c", 200, 2))
    b = run_one(state)
    assert (b.prefill_tokens, b.decode_seqs, told(b)) == (200, 0, [(FIRST, "b")])
    assert milliseconds(b) == pytest.approx(1 + 16 + 50 + 200 * 200 / 2 / 1024)
    c = run_one(state)
    assert (c.prefill_tokens, c.decode_seqs) == (200, 0)
    assert run_one(state).decode_seqs == 3
    with pytest.raises(ValueError, match="whole prefill"):
        submit(state, ask("d", 250, 20))


def test_cached_tokens_are_not_computed_again() -> None:
    result = run_one(submit(engine(), ask("a", 512, 2, cached_tokens=384)))
    assert result.prefill_tokens == 128
    pairs = (512**2 - 384**2) / 2
    assert milliseconds(result) == pytest.approx(1 + 16 + 0.25 * 128 + pairs / 1024)


def test_a_fully_cached_prompt_still_computes_its_last_token() -> None:
    assert run_one(submit(engine(), ask("a", 512, 2, cached_tokens=512))).prefill_tokens == 1


def test_the_prefix_cache_knows_what_was_prefilled() -> None:
    state = engine(prefix_block_tokens=16)
    run_one(submit(state, ask("a", 50, 1, prefix_keys=("k1", "k2", "k3"))))
    assert state.prefix_cached_tokens == 48
    other_end = run_one(submit(state, ask("b", 50, 1, prefix_keys=("k1", "k2", "other"))))
    assert other_end.prefill_tokens == 50 - 32
    hole = run_one(submit(state, ask("c", 50, 1, prefix_keys=("unknown", "k2", "k3"))))
    assert hole.prefill_tokens == 50
    assert (state.prefix_queried_tokens, state.prefix_hit_tokens) == (150, 32)


def test_the_prefix_cache_evicts_the_end_of_the_oldest_prefix_first() -> None:
    state = engine(kv_capacity_tokens=160, prefix_block_tokens=16)
    run_one(submit(state, ask("a", 50, 1, prefix_keys=("a1", "a2", "a3"))))
    run_one(submit(state, ask("b", 17, 1, prefix_keys=("b1",))))
    assert state.prefix_cached_tokens == 64
    run_one(submit(state, ask("big", 94, 20)))
    run_one(submit(state, ask("b again", 20, 1, prefix_keys=("b1",))))
    # 96 and 21 tokens in use: 43 are left, two blocks.
    assert state.prefix_cached_tokens == 32
    cancel(state, "big")
    a_again = run_one(submit(state, ask("a again", 50, 1, prefix_keys=("a1", "a2", "a3"))))
    assert a_again.prefill_tokens == 50 - 16, "of a's blocks the first outlives the others"


def test_memory_short_the_newest_is_preempted_and_comes_back() -> None:
    state = submit(submit(engine(kv_capacity_tokens=64), ask("old", 20, 20)), ask("new", 20, 20))
    assert told(run_one(state)) == [(FIRST, "old"), (FIRST, "new")]
    while not (result := run_one(state)).events:
        assert state.kv_used_tokens <= 64
    assert told(result) == [(PREEMPTED, "new")]
    # 2 · (20 + 12) = 64: each has 12 tokens when a thirteenth fits no more.
    assert result.events[0].generated_tokens == 12
    assert result.decode_seqs == 1, "the preempted one emits nothing in that step"
    assert (state.preemptions, state.waiting_seqs) == (1, 1)
    while not (result := run_one(state)).events:
        pass
    assert told(result) == [(FINISHED, "old")]
    back = run_one(state)
    assert told(back) == [(RESUMED, "new")]
    assert back.prefill_tokens == 32, "its prompt and all that it had generated"
    assert back.events[0].generated_tokens == 13
    steps = 0
    while next_step_s(state) is not None:
        result, steps = run_one(state), steps + 1
    assert (steps, told(result), result.events[0].generated_tokens) == (7, [(FINISHED, "new")], 20)


def test_slots_bound_the_batch() -> None:
    state = engine(max_num_seqs=2)
    for name in "abc":
        submit(state, ask(name, 10, 3))
    run_one(state)
    assert (state.running_seqs, state.waiting_seqs) == (2, 1)


def test_the_overhead_of_the_first_token_is_spent_before_the_queue() -> None:
    slow_front = Coefficients(
        version="test", source="made up", prefill_base_ms=16, prefill_ms_per_token=0.25, prefill_ms_per_pair=0,
        decode_base_ms=8, decode_ms_per_seq=0, decode_ms_per_seq_token=0, first_token_overhead_ms=125,
    )
    state = submit(engine(slow_front), ask("a", 64, 1, arrival_s=1.0))
    assert next_step_s(state) == 1.125
    assert run_one(state).ended_at_s == pytest.approx(1.0 + 0.125 + 0.016 + 0.016)


def test_a_request_that_arrives_during_a_step_waits_for_the_next() -> None:
    state = submit(engine(), ask("a", 64, 5))
    end = run_one(state).ended_at_s
    submit(state, ask("b", 64, 5, arrival_s=end + 0.001))
    assert run_one(state).prefill_tokens == 0
    assert run_one(state).prefill_tokens == 64


def test_the_factor_stretches_a_step() -> None:
    state = submit(engine(), ask("a", 64, 2))
    _, result = step(state, 0.0, factor=3.0)
    assert milliseconds(result) == pytest.approx(3 * 35)


def test_cancel_in_each_phase() -> None:
    state = engine(max_num_batched_tokens=300)
    submit(state, ask("decoding", 100, 9))
    run_one(state)
    submit(state, ask("prefilling", 500, 9))
    run_one(state)
    submit(state, ask("waiting", 500, 9))
    assert (state.decoding_seqs, state.prefilling_seqs, state.waiting_seqs) == (1, 1, 1)
    for name in ("waiting", "prefilling", "decoding", "never seen", "waiting"):
        cancel(state, name)
    assert (state.kv_used_tokens, state.running_seqs, state.waiting_seqs) == (0, 0, 0)
    assert next_step_s(state) is None
    submit(state, ask("waiting", 10, 1))  # the name is free again


@pytest.mark.parametrize(("prompt", "output"), [(0, 1), (1, 0)])
def test_empty_sequences_are_refused(prompt: int, output: int) -> None:
    with pytest.raises(ValueError, match="at least one"):
        submit(engine(), ask("a", prompt, output))


def test_what_can_never_run_is_refused() -> None:
    state = engine(kv_capacity_tokens=100)
    with pytest.raises(TooLarge, match="101 tokens exceed the KV cache of 100"):
        submit(state, ask("a", 60, 41))
    submit(state, ask("a", 60, 40))
    with pytest.raises(ValueError, match="already in the engine"):
        submit(state, ask("a", 1, 1))
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        EngineLimits(kv_capacity_tokens=100, max_num_seqs=64, max_num_batched_tokens=63)


def test_steps_do_not_overlap_and_idle_steps_take_no_time() -> None:
    state = submit(engine(), ask("a", 64, 1))
    end = run_one(state).ended_at_s
    with pytest.raises(ValueError, match="cannot start"):
        step(state, end / 2)
    _, idle = step(state, end + 1)
    assert (idle.prefill_tokens, idle.decode_seqs, idle.events, milliseconds(idle)) == (0, 0, (), 0)
