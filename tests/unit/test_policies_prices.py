"""Prices in money, against sums done by hand."""

from math import inf, log, nan

import pytest

from policies.estimate import Estimate
from policies.facts import Budget
from policies.policy import Price
from policies.prices.drain_time import DrainTime
from policies.prices.lateness import Lateness
from policies.prices.request_cost import RequestCost
from tests.beliefs import a_pool, believing
from tests.policy_fleet import A100_PAIR, NOW_S, a_backend, a_request, decoding

ESTIMATE = Estimate(drain_s=3.0, ttft_s=4.0, tpot_s=0.1, e2e_s=14.0)


def test_request_cost_is_machine_time_at_the_hourly_price() -> None:
    cost = RequestCost(reference_batch=16)   # as many share a step, where slots are not known
    found = cost(a_request(prompt_tokens=400, expected_output_tokens=100), a_backend(), ESTIMATE, NOW_S)
    prefill_ms = 0.125 * 400 + 6e-6 * 400**2 / 2 + 22 / 16
    decode_ms = 100 * (0.09 + 26 / 16) + 8.6e-5 * (400 * 100 + 100**2 / 2)
    assert found == pytest.approx(2.0 / 3600 * (prefill_ms + decode_ms) / 1000)


def test_request_cost_follows_price_drift_and_sharing() -> None:
    cost = RequestCost()
    base = cost(a_request(), a_backend(), ESTIMATE, NOW_S)
    assert cost(a_request(), a_backend(price_per_hour=6.0), ESTIMATE, NOW_S) == pytest.approx(3 * base)
    assert cost(a_request(), a_backend(drift=2.0), ESTIMATE, NOW_S) == pytest.approx(2 * base)
    assert cost(a_request(), a_backend(slots=2), ESTIMATE, NOW_S) > 4 * base
    assert cost(a_request(), a_backend(slots=4 * 32), ESTIMATE, NOW_S) == base   # a quarter of the slots share a step
    assert cost(a_request(), a_backend(slots=4 * 64), ESTIMATE, NOW_S) < base
    assert cost(a_request(), a_backend(price_per_hour=0.0), ESTIMATE, NOW_S) == 0


def test_request_cost_leaves_out_what_is_cached() -> None:
    cost, pool = RequestCost(reference_batch=16), a_pool()
    view, facts = believing(a_backend(), pool), a_request(prompt_tokens=6000, session_key="s")
    cold = cost(facts, view, ESTIMATE, NOW_S)
    view.belief.cache.passed(facts, 4000, 4000)
    saved_ms = 0.125 * 4000 + 6e-6 * 4000**2 / 2
    assert cold - cost(facts, view, ESTIMATE, NOW_S) == pytest.approx(2.0 / 3600 * saved_ms / 1000)


def test_request_cost_follows_what_is_learned_of_a_calibration_and_of_none() -> None:
    cost, pool = RequestCost(), a_pool()
    for coefficients, expected in ((A100_PAIR, 0.5), (None, 1.0)):
        view = believing(a_backend(coefficients=coefficients), pool)
        before = cost(a_request(), view, ESTIMATE, NOW_S)
        view.belief.prefill.set(-log(2.0))
        view.belief.decode.set(-log(2.0))
        assert cost(a_request(), view, ESTIMATE, NOW_S) == pytest.approx(expected * before)


def test_request_cost_does_not_look_at_load() -> None:
    cost = RequestCost()
    assert cost(a_request(), decoding("a", 50), ESTIMATE, NOW_S) == cost(a_request(), a_backend("a"), ESTIMATE, NOW_S)


def test_drain_time_is_seconds_at_a_rate() -> None:
    assert DrainTime(price_per_s=0.002)(a_request(), a_backend(), ESTIMATE, NOW_S) == pytest.approx(0.006)


def test_lateness_is_seconds_over_budget_at_a_rate() -> None:
    price = Lateness(price_per_late_s=0.5, tail_ratio=1.5)
    assert price(a_request(budget=Budget(ttft_s=5.0)), a_backend(), ESTIMATE, NOW_S) == pytest.approx(0.5)
    assert price(a_request(), a_backend(), ESTIMATE, NOW_S) == 0


@pytest.mark.parametrize("price", [RequestCost(), DrainTime(), Lateness()], ids=lambda price: price.name)
@pytest.mark.parametrize("odd", [inf, 0.0, nan])
def test_prices_take_odd_numbers(price: Price, odd: float) -> None:
    facts = a_request(budget=Budget(ttft_s=1.0))
    price(facts, a_backend(price_per_hour=odd, drift=odd), Estimate(odd, odd, odd, odd), NOW_S)
