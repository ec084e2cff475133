"""Filter, price, pick: what a decision says, and to whom a request may go at all."""

from dataclasses import replace
from math import inf, nan
from random import Random

import pytest

from backends.catalog.health import Health, HealthRules, HealthState
from backends.catalog.views import BackendView
from policies.filters import Rejection
from policies.pipeline import decide
from policies.policy import Decision, Pipeline
from policies.registry import BUILT_IN, PolicySpec, build_pipeline
from tests.policy_fleet import NOW_S, a_backend, a_fleet, a_request, choose, decoding, name_of

FEASIBLE = build_pipeline(PolicySpec("cheapest_feasible", settings={"explore_share": 0.0}))
POLICIES = [build_pipeline(PolicySpec(name)) for name in BUILT_IN.presets]


def words(decision: Decision) -> dict[str, str]:
    return {rejected.backend: rejected.reason for rejected in decision.rejected}


def test_a_decision_says_why() -> None:
    other = a_backend("c", model="other")
    decision = choose(FEASIBLE, a_request(), a_backend("a", price_per_hour=4.0), a_backend("b"), other)
    assert name_of(decision) == "b"
    assert decision.policy == "cheapest_feasible"
    assert decision.config_hash == "c0ffee"
    assert decision.reason.startswith("cheapest price=9.5e-05")
    assert decision.reason.endswith(" of 2")
    assert words(decision) == {"c": Rejection.OTHER_MODEL}
    assert [priced.backend.spec.name for priced in decision.candidates] == ["a", "b"]
    for priced in decision.candidates:
        assert [name for name, _ in priced.terms] == ["request_cost", "drain_time"]
        assert priced.price == pytest.approx(sum(term for _, term in priced.terms))
    assert decision.price == decision.candidates[1].price


def test_the_only_candidate_needs_no_picker() -> None:
    assert choose(FEASIBLE, a_request(), a_backend("a")).reason == "only candidate"


@pytest.mark.parametrize("pipeline", POLICIES, ids=lambda pipeline: pipeline.name)
def test_nobody_is_an_answer_that_names_the_filters(pipeline: Pipeline) -> None:
    ejected = Health(HealthState.EJECTED, until_s=NOW_S + 5)
    backends = [a_backend("a", health=ejected), a_backend("b", context_tokens=100), a_backend("c", health=ejected),
                a_backend("d", draining=True), a_backend("e", model="other")]
    decision = choose(pipeline, a_request(), *backends)
    assert decision.chosen is None
    assert decision.price is None
    assert decision.reason == "no backend: context_too_small 1, draining 1, other_model 1, unhealthy 2"
    assert decision.reason.isascii()
    assert len(decision.reason) < 120


def test_an_empty_fleet_is_an_answer() -> None:
    assert choose(FEASIBLE, a_request()).reason == "no backend: the fleet is empty"


@pytest.mark.parametrize(("prompt", "cap", "window", "fits"), [
    (100, 28, 128, True), (100, 29, 128, False), (127, None, 128, True), (128, None, 128, False),
    (10**9, 10**9, None, True),
])
def test_fits_context_counts_prompt_and_cap(prompt: int, cap: int | None, window: int | None, fits: bool) -> None:
    facts = a_request(prompt_tokens=prompt, max_output_tokens=cap)
    assert (choose(FEASIBLE, facts, a_backend(context_tokens=window)).chosen is not None) == fits


def test_weight_zero_drains() -> None:
    assert words(choose(FEASIBLE, a_request(), a_backend("a", weight=0.0), a_backend("b"))) == {"a": Rejection.DRAINING}


@pytest.mark.parametrize("pipeline", POLICIES, ids=lambda pipeline: pipeline.name)
def test_p34_a_half_open_backend_gets_no_more_than_its_trials(pipeline: Pipeline) -> None:
    trial = Health(HealthState.HALF_OPEN, rules=HealthRules(trial_requests=2))
    for in_flight in range(4):
        back = a_backend("back", health=trial, in_flight_requests=in_flight, in_flight_decode_requests=in_flight)
        decision = choose(pipeline, a_request(), back)
        assert (decision.chosen is not None) == (in_flight < 2)


def test_p35_a_request_never_goes_to_another_model() -> None:
    down = Health(HealthState.UNHEALTHY)
    decision = choose(FEASIBLE, a_request(tried=("a",)), a_backend("a", health=down), a_backend("b", model="other"))
    assert decision.chosen is None
    assert words(decision) == {"a": Rejection.UNHEALTHY, "b": Rejection.OTHER_MODEL}


def test_p31_a_retry_goes_elsewhere_first() -> None:
    cheap, dear = a_backend("cheap", price_per_hour=0.1), a_backend("dear", price_per_hour=9.0)
    decision = choose(FEASIBLE, a_request(tried=("cheap",)), cheap, dear)
    assert name_of(decision) == "dear"
    assert words(decision) == {"cheap": Rejection.ALREADY_TRIED}
    again = choose(FEASIBLE, a_request(tried=("cheap", "dear")), cheap, dear)
    assert name_of(again) == "cheap"
    assert again.rejected == ()


def test_a_backend_that_asked_for_silence_is_left_alone_while_others_serve() -> None:
    resting = a_backend("a", price_per_hour=0.1, backoff_until_s=NOW_S + 3)
    decision = choose(FEASIBLE, a_request(), resting, a_backend("b"))
    assert name_of(decision) == "b"
    assert words(decision) == {"a": Rejection.BACKING_OFF}
    assert name_of(choose(FEASIBLE, a_request(), replace(resting, backoff_until_s=NOW_S), a_backend("b"))) == "a"
    assert name_of(choose(FEASIBLE, a_request(), resting)) == "a"


def test_a_resting_backend_comes_before_one_that_failed_this_request() -> None:
    resting = a_backend("resting", backoff_until_s=NOW_S + 3, price_per_hour=9.0)
    failed = a_backend("failed")
    decision = choose(FEASIBLE, a_request(tried=("failed",)), resting, failed)
    assert name_of(decision) == "resting"
    assert words(decision) == {"failed": Rejection.ALREADY_TRIED}


def test_p32_a_retry_never_returns_to_a_backend_that_asked_for_silence() -> None:
    limited = a_backend("a", backoff_until_s=NOW_S + 3)
    decision = choose(FEASIBLE, a_request(tried=("a",)), limited)
    assert decision.chosen is None
    assert decision.reason == "no backend: backing_off 1"
    assert name_of(choose(FEASIBLE, a_request(tried=("a", "b")), limited, a_backend("b", price_per_hour=9.0))) == "b"


def test_a_soft_word_never_hides_a_hard_one() -> None:
    dead = a_backend("a", health=Health(HealthState.UNHEALTHY), backoff_until_s=NOW_S + 3)
    assert words(choose(FEASIBLE, a_request(tried=("a",)), dead)) == {"a": Rejection.UNHEALTHY}


def test_a_returning_backend_is_dearer_until_it_has_warmed_up() -> None:
    def price(elapsed_s: float) -> float:
        health = Health(HealthState.SLOW_START, since_s=NOW_S - elapsed_s, rules=HealthRules(slow_start_s=10.0))
        found = choose(FEASIBLE, a_request(), a_backend("a", health=health)).price
        assert found is not None
        return found

    assert price(2.0) == pytest.approx(2 * price(4.0))
    assert price(0.0) > price(2.0) > price(10.0)
    assert price(10.0) == choose(FEASIBLE, a_request(), a_backend("a")).price


def test_a_weight_of_two_accepts_twice_the_price() -> None:
    dear = a_backend("dear", price_per_hour=2.0)
    assert name_of(choose(FEASIBLE, a_request(), a_backend("cheap", price_per_hour=1.1), dear)) == "cheap"
    assert name_of(choose(FEASIBLE, a_request(), a_backend("cheap", price_per_hour=1.1),
                          a_backend("dear", price_per_hour=2.0, weight=2.0))) == "dear"


@pytest.mark.parametrize("name", ["a", "c"])
def test_a_price_that_is_not_a_number_never_wins(name: str) -> None:
    decision = choose(FEASIBLE, a_request(), a_backend(name, price_per_hour=nan), a_backend("b", price_per_hour=50.0))
    assert name_of(decision) == "b"
    assert inf in [priced.price for priced in decision.candidates]


def test_a_custom_policy_goes_without_prediction_where_it_needs_none() -> None:
    pipeline = build_pipeline(PolicySpec("round_robin"))
    decision = choose(pipeline, a_request(), a_backend("a"), a_backend("b"))
    assert decision.price is None
    assert all(priced.terms == () and priced.late_s == 0 for priced in decision.candidates)


def serve_in_turn(pipeline_name: str, backends: list[BackendView], requests: int) -> list[str]:
    """Requests one after another, each booked as served before the next comes."""
    rng, pipeline = Random(3), build_pipeline(PolicySpec(pipeline_name))
    chosen: list[str] = []
    for sequence in range(requests):
        now = NOW_S + sequence
        view = decide(pipeline, a_request(), a_fleet(*backends, sequence=sequence), now, rng).chosen
        assert view is not None
        chosen.append(view.spec.name)
        backends = [replace(b, served_requests=b.served_requests + 1, last_outcome_at_s=now)
                    if b.spec.name == view.spec.name else b for b in backends]
    return chosen


@pytest.mark.parametrize("name", ["headrace", "cheapest_feasible", "round_robin", "least_inflight", "p2c"])
def test_a_cold_fleet_of_three_has_all_served_within_thirty_requests(name: str) -> None:
    cold = [a_backend(each, served_requests=0, last_outcome_at_s=None, price_per_hour=price)
            for each, price in (("a", 1.0), ("b", 5.0), ("c", 9.0))]
    assert set(serve_in_turn(name, cold, 30)) == {"a", "b", "c"}


def test_a_cold_backend_that_failed_once_is_not_tried_by_everyone() -> None:
    failed = a_backend("a", served_requests=0, last_outcome_at_s=NOW_S - 1, price_per_hour=9.0)
    assert name_of(choose(FEASIBLE, a_request(), failed, a_backend("b"))) == "b"


def test_a_cold_backend_under_trial_gets_no_second_request() -> None:
    trying = decoding("a", 1, served_requests=0, last_outcome_at_s=None, price_per_hour=9.0)
    assert name_of(choose(FEASIBLE, a_request(), trying, a_backend("b"))) == "b"
