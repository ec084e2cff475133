"""Predictions against sums done by hand, and what happens when a signal is missing or old."""

from dataclasses import replace
from math import inf, isinf, log, nan

import pytest

from backends.catalog.sample import LoadSample
from policies.beliefs.backend import BackendBelief, PoolTails
from policies.estimate import ASSUMED, SAMPLE_FRESH_S, Estimate, engine_load, lateness_s, predict
from policies.facts import Budget
from policies.registry import PolicySpec, build_pipeline
from tests.policy_fleet import A100_PAIR, NOW_S, a_backend, a_request, decoding, shares


def test_an_idle_backend_prefills_at_once() -> None:
    found = predict(a_request(prompt_tokens=400, expected_output_tokens=100), a_backend(), NOW_S)
    prefill_ms = 2 + 20 + 0.125 * 400 + 6e-6 * 400**2 / 2 + 30
    pace_ms = 2 + 24 + 0.09 + 8.6e-5 * (400 + 50)
    assert found.drain_s == 0
    assert found.ttft_s == pytest.approx(prefill_ms / 1000)
    assert found.tpot_s == pytest.approx(pace_ms / 1000)
    assert found.e2e_s == pytest.approx((prefill_ms + 99 * pace_ms) / 1000)


def test_a_queue_of_prompts_is_waited_for() -> None:
    backend = a_backend(in_flight_requests=3, in_flight_prefill_requests=3, in_flight_prefill_tokens=6000)
    found = predict(a_request(), backend, NOW_S)
    step_ms = 22
    done_ms = (step_ms + 0.125 * 2048) / 2   # nobody knows how far the engine is: half of an iteration in the mean
    queue_ms = 6000 / 2048 * step_ms + 6000 * (0.125 + 6e-6 * 512)
    assert found.drain_s == pytest.approx((queue_ms - done_ms) / 1000)
    assert found.ttft_s - found.drain_s == pytest.approx(predict(a_request(), a_backend(), NOW_S).ttft_s)


def test_what_the_engine_has_done_of_the_queue_is_not_waited_for() -> None:
    """The head has been under way since the engine turned to it, and no more than the head can be done."""
    backend = a_backend(in_flight_requests=2, in_flight_prefill_requests=2, in_flight_prefill_tokens=5000)
    backend = replace(backend, belief=BackendBelief(PoolTails()))
    for tokens in (4000, 1000):
        backend.belief.waiting.sent(tokens, NOW_S)
    whole_s, head_s = ((max(1, tokens / 2048) * 22 + tokens * (0.125 + 6e-6 * 512)) / 1000 for tokens in (5000, 4000))
    for elapsed_s, done_s in ((0.0, 0.0), (0.2, 0.2), (0.5, 0.5), (60.0, head_s)):
        assert predict(a_request(), backend, NOW_S + elapsed_s).drain_s == pytest.approx(whole_s - done_s)
    backend.belief.waiting.through(4000, NOW_S + 0.6)
    backend.belief.version += 1
    backend = replace(backend, in_flight_requests=1, in_flight_prefill_tokens=1000)
    assert predict(a_request(), backend, NOW_S + 0.6).drain_s == pytest.approx((22 + 1000 * 0.128072) / 1000)


def test_corrections_stretch_what_they_are_of() -> None:
    backend = replace(decoding("a", 3), belief=BackendBelief(PoolTails()))
    before = predict(a_request(), backend, NOW_S)
    backend.belief.prefill.set(log(2.0))
    backend.belief.version += 1
    slower = predict(a_request(), backend, NOW_S)
    assert slower.ttft_s - before.ttft_s == pytest.approx((0.125 * 400 + 6e-6 * 400**2 / 2) / 1000)
    assert slower.tpot_s == before.tpot_s
    backend.belief.decode.set(log(1.5))
    backend.belief.version += 1
    assert predict(a_request(), backend, NOW_S).tpot_s == pytest.approx(1.5 * before.tpot_s)


def test_full_slots_make_a_request_wait_for_one() -> None:
    facts = a_request(expected_output_tokens=100)
    free, full, queued = (predict(facts, decoding("a", streams, slots=2), NOW_S) for streams in (1, 2, 4))
    assert free.drain_s < 0.1
    assert full.drain_s == pytest.approx(0.5 / 2 * 100 * full.tpot_s, rel=0.05)
    assert queued.drain_s == pytest.approx(2.5 / 2 * 100 * queued.tpot_s, rel=0.05)
    assert queued.tpot_s < predict(facts, decoding("a", 4), NOW_S).tpot_s   # two at a time are quicker than five


def test_a_full_kv_cache_is_waited_for() -> None:
    small = replace(A100_PAIR, kv_capacity_tokens=2000)
    with_room = predict(a_request(), decoding("a", 2, coefficients=small), NOW_S)
    without = predict(a_request(), decoding("a", 4, coefficients=small), NOW_S)
    assert with_room.drain_s < 0.05
    assert without.drain_s > 0.3


def test_company_never_makes_a_prefill_quicker() -> None:
    slow_prefill = replace(A100_PAIR, prefill_base_ms=100.0, decode_base_ms=1.0)
    idle, busy = (predict(a_request(), decoding("a", streams, coefficients=slow_prefill), NOW_S) for streams in (0, 1))
    assert busy.ttft_s > idle.ttft_s


def test_drift_scales_everything_within_bounds() -> None:
    base = predict(a_request(), decoding("a", 3), NOW_S)
    for drift, factor in ((2.0, 2.0), (0.5, 0.5), (1e9, 20.0), (inf, 20.0), (0.0, 0.05), (-3.0, 0.05), (nan, 1.0)):
        found = predict(a_request(), decoding("a", 3, drift=drift), NOW_S)
        assert found[:4] == pytest.approx(tuple(factor * value for value in base[:4]))
        assert found.tpot_sd_s == pytest.approx(factor * base.tpot_sd_s)


def test_an_unmeasured_backend_is_taken_for_a_slow_one() -> None:
    unmeasured = predict(a_request(), a_backend(coefficients=None), NOW_S)
    assert unmeasured == predict(a_request(), a_backend(coefficients=ASSUMED), NOW_S)
    assert unmeasured.ttft_s > predict(a_request(), a_backend(), NOW_S).ttft_s
    assert unmeasured.tpot_s > predict(a_request(), a_backend(), NOW_S).tpot_s


def test_what_is_not_a_number_is_infinitely_slow() -> None:
    broken = replace(A100_PAIR, prefill_ms_per_token=nan)
    assert isinf(predict(a_request(), a_backend(coefficients=broken), NOW_S).ttft_s)


def test_load_of_others_is_what_the_engine_counts_beyond_ours() -> None:
    sample = LoadSample(NOW_S - 1, running_requests=8, waiting_requests=3)
    assert engine_load(decoding("a", 2, sample=sample, in_flight_at_sample=4), NOW_S) == (9, 6, 3)
    assert engine_load(decoding("a", 2, sample=sample, in_flight_at_sample=20), NOW_S) == (2, 2, 0)
    assert engine_load(decoding("a", 2, sample=sample), NOW_S) == (11, 8, 0)
    assert engine_load(decoding("a", 20, sample=sample), NOW_S) == (20, 20, 0)
    alone = predict(a_request(), decoding("a", 2), NOW_S)
    shared = predict(a_request(), decoding("a", 2, sample=sample, in_flight_at_sample=4), NOW_S)
    assert shared.ttft_s > alone.ttft_s + 0.2
    assert shared.tpot_s > alone.tpot_s


def test_p41_a_frozen_sample_stops_counting() -> None:
    old = LoadSample(NOW_S - SAMPLE_FRESH_S - 0.1, running_requests=50, waiting_requests=50)
    assert predict(a_request(), decoding("a", 2, sample=old), NOW_S) == predict(a_request(), decoding("a", 2), NOW_S)


def test_p40_a_backend_without_metrics_gets_its_share() -> None:
    pipeline = build_pipeline(PolicySpec())
    blank, zero = LoadSample(NOW_S), LoadSample(NOW_S, running_requests=2, waiting_requests=0)
    counts = shares(pipeline, a_request(), decoding("blank", 2, sample=blank), decoding("none", 2),
                    decoding("told", 2, sample=zero, in_flight_at_sample=2), picks=3000)
    assert all(count == pytest.approx(1000, rel=0.1) for count in counts.values())


def test_lateness_is_the_worst_promise() -> None:
    estimate = Estimate(drain_s=0.0, ttft_s=1.0, tpot_s=0.1, e2e_s=11.0)
    facts = a_request(expected_output_tokens=101)

    def late(margin: float = 1.0, **promises: float) -> float:
        return lateness_s(replace(facts, budget=Budget(**promises)), estimate, margin)

    assert late() == 0
    assert late(ttft_s=1.0, inter_token_s=0.1, e2e_s=11.0) == 0
    assert late(ttft_s=0.8) == pytest.approx(0.2)
    assert late(inter_token_s=0.08) == pytest.approx(2.0)
    assert late(e2e_s=10.0) == pytest.approx(1.0)
    assert late(ttft_s=0.8, inter_token_s=0.08, e2e_s=10.0) == pytest.approx(2.0)
    assert late(margin=2.0, ttft_s=1.5) == pytest.approx(0.5)
    one_token = replace(facts, expected_output_tokens=1, budget=Budget(inter_token_s=0.01))
    assert lateness_s(one_token, estimate, 1.0) == 0
