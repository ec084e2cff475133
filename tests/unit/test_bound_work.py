"""The least work of a request: by hand, at the edges of what is feasible, and what loosens it."""

from dataclasses import replace

import numpy as np
import pytest

from loadtest.fake_engine.step import EngineLimits
from loadtest.sim.bound.instance import (
    BadInstance,
    BoundBackend,
    BoundRequest,
    SpeedSpan,
    accounted_cost,
    least_uncached,
    work_at_pace_s,
)
from loadtest.sim.bound.slots import alike, merged, slot_table
from loadtest.sim.bound.work import StepNoise, work_table
from tests.bound_instances import FAST, POOL, SLOW, backend, request, trace


def test_one_pair_by_hand() -> None:
    table = work_table([request(prompt=1000, output=101, ttft_s=1.0, tpot_s=0.03)], [FAST])
    # Two chunks of 512 at most: two steps of 8 ms, and 40 µs a token.
    ttft_s = (2 * 8.0 + 1000 * 0.040) / 1000
    assert table.earliest_first_token_s[0, 0] == pytest.approx(ttft_s)
    assert table.prefill_s[0, 0] == pytest.approx(0.040)
    # 100 steps in what is left; all of the batch have its context, it being the smallest of the trace.
    allowed_ms = (1.0 - ttft_s + 100 * 0.03) * 1000 / 100
    batch = min((allowed_ms - 8.0) / (0.060 + 1e-4 * 1001), 64)
    own_ms = 1e-4 * (1000 * 100 + 101 * 100 / 2)
    assert table.decode_s[0, 0] == pytest.approx((100 * (0.060 + 8.0 / batch) + own_ms) / 1000)
    assert table.cost[0, 0] == pytest.approx(accounted_cost(FAST, request(prompt=1000, output=101)))
    assert table.can_serve.all()


def test_pairs_are_counted_once_whatever_the_chunks() -> None:
    paired = replace(FAST, coefficients=replace(FAST.coefficients, prefill_ms_per_token=0.0, prefill_ms_per_pair=1e-5))
    whole, half = request(prompt=1000), request(prompt=1000, uncached=500)
    table = work_table([whole, half], [paired])
    assert table.prefill_s[:, 0] == pytest.approx([1e-8 * 1000**2 / 2, 1e-8 * (1000**2 - 500**2) / 2])


@pytest.mark.parametrize(("given", "why"), [
    (request(tpot_s=0.015, output=500), "the bare step is longer than the pace"),
    (request(prompt=20_000, ttft_s=1.0), "the prefill alone is longer than the TTFT budget"),
    (request(prompt=99_990, output=50, ttft_s=100.0), "the KV cache is too small"),
])
def test_what_no_idle_card_could_do_is_no_pair(given: BoundRequest, why: str) -> None:
    assert not work_table([given], [SLOW]).can_serve.any(), why


def test_a_late_first_token_costs_the_rest_its_time_and_an_early_one_gives_it() -> None:
    """At 19 ms a token, below the bare step of 20 ms, only a few tokens can live on what is left of the TTFT budget."""
    outputs = [2, 100, 400, 1000]
    table = work_table([request(prompt=100, output=output, ttft_s=0.5, tpot_s=0.019) for output in outputs], [SLOW])
    assert table.can_serve[:, 0].tolist() == [True, True, True, False]


def test_an_unchunked_engine_takes_no_more_than_a_whole_prefill() -> None:
    whole = replace(FAST, limits=EngineLimits(100_000, 64, 2048, chunked_prefill=False))
    assert work_table([request(prompt=1900), request(prompt=2040)], [whole]).can_serve[:, 0].tolist() == [True, False]


def test_one_token_needs_no_decoding() -> None:
    table = work_table([request(output=1, tpot_s=0.0)], POOL)
    assert table.can_serve.all()
    assert (table.decode_s == 0).all()


def test_a_closed_backend_serves_when_it_opens_if_that_is_in_time() -> None:
    lent = replace(FAST, closed=((10.0, 20.0),))
    table = work_table([request(at) for at in (9.9, 10.0, 18.0, 19.5, 20.0)], [lent])
    assert table.can_serve[:, 0].tolist() == [True, False, False, True, True]
    assert table.earliest_first_token_s[3, 0] > 20.0


def test_a_dead_backend_serves_nobody_and_a_fast_one_more() -> None:
    dead = replace(SLOW, spans=(SpeedSpan(0.0, 100.0, 0.0),))
    hurried = replace(SLOW, spans=(SpeedSpan(0.0, 100.0, 4.0),))
    tight = request(tpot_s=0.015, output=500)
    assert not work_table([tight], [dead]).can_serve.any()
    assert work_table([tight], [hurried]).can_serve.all()


def test_a_fast_card_is_granted_its_pace_and_a_slow_one_held_to_it() -> None:
    given = request(10.0, prompt=1000)
    usual, fast, slow = (work_table([given], [replace(FAST, spans=(SpeedSpan(0.0, 100.0, speed),))])
                         for speed in (1.0, 2.0, 0.5))
    took_s = usual.earliest_first_token_s[0, 0] - 10.0
    assert fast.earliest_first_token_s[0, 0] - 10.0 == pytest.approx(took_s / 2)
    assert slow.earliest_first_token_s[0, 0] - 10.0 == pytest.approx(took_s * 2)
    # More steps fit into the same time, so more sequences may share each.
    assert fast.decode_s[0, 0] <= usual.decode_s[0, 0] <= slow.decode_s[0, 0]
    # A window that a fast spell touches is granted it all along.
    touched = work_table([given], [replace(FAST, spans=(SpeedSpan(11.0, 11.1, 2.0),))])
    assert touched.earliest_first_token_s[0, 0] == fast.earliest_first_token_s[0, 0]


def test_where_a_preempted_prompt_costs_less_than_a_step_the_charge_is_no_more_than_that() -> None:
    free = replace(FAST, coefficients=replace(FAST.coefficients, prefill_ms_per_token=0.0))
    cheap = replace(FAST, coefficients=replace(FAST.coefficients, prefill_ms_per_token=1e-4))
    usual, charged, nothing = (work_table([request(prompt=9, output=51)], [card]).decode_s[0, 0]
                               for card in (FAST, cheap, free))
    assert charged == pytest.approx(50 * 10 * 1e-4 / 1000)
    assert nothing == 0.0 < charged < usual


def test_windows_meet_the_slots_that_they_touch() -> None:
    given = request(7.0, prompt=1000, output=101, ttft_s=4.0, tpot_s=0.05)
    slots = slot_table(work_table([given], [FAST]), [FAST], 2.0)
    assert (slots.prefill_from[0], slots.prefill_until[0]) == (3, 5)      # 7 s to 11 s
    assert (slots.decode_from[0, 0], slots.decode_until[0]) == (3, 8)     # 7.06 s to 16 s
    assert slots.capacity_s.shape == (1, 9)


def test_noise_only_loosens() -> None:
    requests = trace(3, 5.0, 60.0)
    still, noisy = work_table(requests, POOL), work_table(requests, POOL, StepNoise(0.06))
    assert (noisy.can_serve >= still.can_serve).all()
    assert (noisy.earliest_first_token_s <= still.earliest_first_token_s).all()
    both = still.can_serve & noisy.can_serve
    assert (noisy.decode_s <= still.decode_s + 1e-12)[both].all()
    assert StepNoise(0.06).capacity_factor(400.0) > 1.0 == StepNoise().capacity_factor(400.0)


def test_a_merged_row_is_as_kind_as_the_kindest_of_its_members() -> None:
    requests = trace(4, 8.0, 100.0)
    table, groups = work_table(requests, POOL), alike(requests, 5.0)
    small = merged(table, groups)
    assert len(small.count) < len(requests) == small.requests
    for row, group in enumerate(groups):
        for at in range(2):
            if table.can_serve[row, at]:
                assert small.can_serve[group, at]
                for column in ("cost", "prefill_s", "decode_s", "earliest_first_token_s"):
                    assert getattr(small, column)[group, at] <= getattr(table, column)[row, at]
        assert small.arrival_s[group] <= table.arrival_s[row]
        assert small.ttft_deadline_s[group] >= table.ttft_deadline_s[row]
        assert small.last_token_deadline_s[group] >= table.last_token_deadline_s[row]


def test_capacity_follows_the_speed() -> None:
    lame = replace(FAST, spans=(SpeedSpan(3.0, 12.0, 0.4),))
    slots = slot_table(work_table([request(0.0, ttft_s=14.0)], [lame]), [lame], 5.0, copies=[2])
    assert slots.capacity_s[0, :3] == pytest.approx([2 * (3 + 2 * 0.4), 2 * 5 * 0.4, 2 * (2 * 0.4 + 3)])


def test_prefixes_that_an_earlier_request_could_have_left() -> None:
    prompts = [(1100, ("a", "b")), (1100, ("a", "c")), (1024, ("a", "b")), (600, ()), (1100, ("x", "b"))]
    assert least_uncached(prompts, 512) == [1100, 588, 1, 600, 1100]


def test_work_at_a_pace() -> None:
    given = request(prompt=1000, output=100)
    bare_ms = 1000 * 0.040 + 100 * 0.060 + 1e-4 * 100 * (1000 + 50)
    assert work_at_pace_s(FAST, given, 0.016) == pytest.approx(bare_ms / 1000 / (1 - 8 / 16))
    assert work_at_pace_s(FAST, given, 0.008) == float("inf")


@pytest.mark.parametrize(("make", "says"), [
    (lambda: request(uncached=501), "501 uncached of 500"),
    (lambda: request(output=0), "an output token"),
    (lambda: SpeedSpan(5.0, 5.0, 1.0), "must end after it begins"),
    (lambda: replace(FAST, spans=(SpeedSpan(0, 5, 2.0), SpeedSpan(4, 6, 1.0))), "overlap"),
    (lambda: replace(FAST, closed=((5.0, 5.0),)), "closed"),
    (lambda: replace(FAST, reference_batch=0), "reference_batch"),
    (lambda: work_table([], POOL), "at least one request"),
    (lambda: work_table([request()], [FAST, FAST]), "repeat"),
    (lambda: slot_table(work_table([request()], POOL), POOL, 0.0), "slot_s"),
])
def test_bad_instances_say_what_is_wrong(make: object, says: str) -> None:
    with pytest.raises(BadInstance, match=says):
        make()  # type: ignore[operator]


def test_the_smallest_context_counts_for_the_batch() -> None:
    """Batch mates may be smaller than the request itself, and then more of them fit."""
    card: BoundBackend = backend("card", 8.0, 40.0, 0.0, 1.0, seqs=512)
    alone = work_table([request(prompt=4000)], [card])
    beside = work_table([request(prompt=4000), request(prompt=10)], [card])
    assert beside.decode_s[0, 0] < alone.decode_s[0, 0]
    assert np.isclose(beside.cost[0, 0], alone.cost[0, 0])
