"""Budgets that no backend could keep, whatever is in flight."""

from dataclasses import replace

import pytest

from backends.catalog.views import BackendView
from policies.estimate import predict
from policies.facts import Budget
from policies.hopeless import beyond_idle
from policies.policy import Priced
from tests.policy_fleet import A100_PAIR, NOW_S, a_backend, a_request

SLOW = replace(A100_PAIR, prefill_base_ms=3000.0)
IDLE = predict(a_request(), a_backend(), NOW_S)


def priced(*views: BackendView) -> list[Priced]:
    return [Priced(view, 1.0) for view in views]


@pytest.mark.parametrize(("budget", "name", "needed_s"), [
    (Budget(ttft_s=IDLE.ttft_s / 3), "ttft", IDLE.ttft_s),
    (Budget(e2e_s=IDLE.e2e_s / 2), "e2e", IDLE.e2e_s),
    (Budget(inter_token_s=IDLE.tpot_s / 2), "inter_token", IDLE.tpot_s),
    (Budget(ttft_s=IDLE.ttft_s / 2, e2e_s=IDLE.e2e_s / 9), "e2e", IDLE.e2e_s),
])
def test_the_budget_that_is_missed_by_most_is_named_with_what_the_quickest_needs(
    budget: Budget, name: str, needed_s: float
) -> None:
    busy = a_backend("a", in_flight_requests=9, in_flight_prefill_requests=9, in_flight_prefill_tokens=90_000)
    found = beyond_idle(a_request(budget=budget), priced(a_backend("b", coefficients=SLOW), busy), NOW_S)
    assert found is not None
    assert found.budget == name
    assert found.needed_s == pytest.approx(needed_s)
    assert found.promised_s == getattr(budget, f"{name}_s")


def test_a_queue_is_not_beyond_idle() -> None:
    busy = a_backend(in_flight_requests=9, in_flight_prefill_requests=9, in_flight_prefill_tokens=90_000)
    budget = Budget(ttft_s=IDLE.ttft_s * 1.1, e2e_s=IDLE.e2e_s * 1.1)
    assert predict(a_request(), busy, NOW_S).ttft_s > 2 * IDLE.ttft_s
    assert beyond_idle(a_request(budget=budget), priced(a_backend("b", coefficients=SLOW), busy), NOW_S) is None


def test_what_an_early_first_token_leaves_over_goes_to_the_pace() -> None:
    gaps = a_request().expected_output_tokens - 1
    spare = Budget(ttft_s=IDLE.ttft_s + gaps * IDLE.tpot_s, inter_token_s=IDLE.tpot_s / 100)
    assert beyond_idle(a_request(budget=spare), priced(a_backend()), NOW_S) is None


def test_what_nobody_has_measured_is_not_judged() -> None:
    budget = Budget(ttft_s=1e-6)
    assert beyond_idle(a_request(budget=budget), priced(a_backend(), a_backend("b", coefficients=None)), NOW_S) is None
    assert beyond_idle(a_request(budget=budget), [], NOW_S) is None


def test_a_slow_spell_counts() -> None:
    budget = Budget(ttft_s=IDLE.ttft_s * 1.1)
    assert beyond_idle(a_request(budget=budget), priced(a_backend(drift=3.0)), NOW_S) is not None
