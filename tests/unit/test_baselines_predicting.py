"""Idealised peers, which choose by our prediction."""

from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

from backends.catalog.views import BackendView
from policies.estimate import predict
from policies.facts import Budget
from policies.learning import End
from policies.pipeline import decide
from policies.policy import Pipeline, Priced
from policies.registry import PolicySpec, build_learner, build_pipeline
from tests.policy_fleet import A100_PAIR, NOW_S, a_backend, a_fleet, a_request, choose, decoding, name_of

FAST = replace(A100_PAIR, prefill_base_ms=5.0, prefill_ms_per_token=0.03, decode_base_ms=6.0)
SED = build_pipeline(PolicySpec("shortest_expected_delay"))
LEAST = build_pipeline(PolicySpec("llmd_headroom_least", settings={"explore_share": 0.0}))
MOST = build_pipeline(PolicySpec("llmd_headroom_most", settings={"explore_share": 0.0}))
GRADIENT = build_pipeline(PolicySpec("polyserve", settings={"margin": 1.0}))
WIDE = a_request(budget=Budget(ttft_s=5.0, inter_token_s=0.2))


def slow(name: str = "slow", streams: int = 0) -> BackendView:
    return decoding(name, streams)


def fast(name: str = "fast", streams: int = 0) -> BackendView:
    return decoding(name, streams, coefficients=FAST)


def test_shortest_delay_is_the_lowest_prediction_whatever_budget_and_price() -> None:
    fleet = [slow("a"), slow("b", 100), fast("c", 40), fast("d", 3)]
    by_hand = min(fleet, key=lambda view: predict(WIDE, view, NOW_S).e2e_s)
    assert name_of(choose(SED, WIDE, *fleet)) == by_hand.spec.name == "d"
    assert name_of(choose(SED, WIDE, slow(), replace(fast(), spec=replace(fast().spec, price_per_hour=1e6)))) == "fast"
    assert {name_of(choose(SED, WIDE, slow("a"), slow("b"), seed=seed)) for seed in range(20)} == {"a", "b"}


def test_least_headroom_takes_the_slowest_that_keeps_the_budget_and_most_the_fastest() -> None:
    fleet = (slow(), fast(), slow("busy", 150))
    assert name_of(choose(LEAST, WIDE, *fleet)) == "busy"
    assert name_of(choose(MOST, WIDE, *fleet)) == "fast"
    # With a pace that the busy one cannot hold it is in the other tier, whichever strategy.
    tight = a_request(budget=Budget(ttft_s=5.0, inter_token_s=0.04))
    assert name_of(choose(LEAST, tight, *fleet)) == "slow"
    assert name_of(choose(MOST, tight, *fleet)) == "fast"


def test_headroom_blends_both_dimensions_by_weight() -> None:
    """One is early with a slow pace, the other late with a quick one: 0.8 for the first token decides."""
    early = a_backend("early", coefficients=replace(A100_PAIR, prefill_ms_per_token=0.01))
    quick = a_backend("quick", coefficients=replace(A100_PAIR, decode_base_ms=12.0))
    assert name_of(choose(MOST, WIDE, early, quick)) == "early"
    pace_first = build_pipeline(PolicySpec("llmd_headroom_most", settings={"ttft_weight": 0.2, "explore_share": 0.0}))
    assert name_of(choose(pace_first, WIDE, early, quick)) == "quick"


@pytest.mark.parametrize("pipeline", [LEAST, MOST])
def test_over_budget_the_smallest_miss_is_taken_by_either_strategy(pipeline: Pipeline) -> None:
    hopeless = a_request(budget=Budget(ttft_s=0.001, inter_token_s=0.0001))
    assert name_of(choose(pipeline, hopeless, slow("a", 5), slow("b", 50), fast("c", 5))) == "c"
    # An idle one is preferred over one that misses less.
    assert name_of(choose(pipeline, hopeless, slow("a"), fast("c", 1))) == "a"
    # Missing the pace alone is milder than missing the first token.
    first_token = a_backend("first", in_flight_requests=1, in_flight_prefill_requests=1,
                            in_flight_prefill_tokens=100_000, coefficients=FAST)
    pace = slow("pace", 100)
    halves = a_request(budget=Budget(ttft_s=2.0, inter_token_s=0.03))
    assert name_of(choose(pipeline, halves, first_token, pace)) == "pace"


def test_headroom_explores_the_tier_over_budget_at_its_share() -> None:
    pipeline = build_pipeline(PolicySpec("llmd_headroom_least", settings={"explore_share": 0.2}))
    tight = a_request(budget=Budget(ttft_s=5.0, inter_token_s=0.03))
    names = [name_of(choose(pipeline, tight, slow("in"), slow("out", 150), seed=seed)) for seed in range(1000)]
    assert names.count("out") / 1000 == pytest.approx(0.2, abs=0.05)
    # Where nobody else is left there is nothing to explore.
    assert choose(pipeline, tight, slow("a", 150), slow("b", 149)).reason.startswith("over budget")


def test_the_time_a_request_has_waited_is_gone_from_its_headroom() -> None:
    budget = Budget(ttft_s=1.0, inter_token_s=0.2)
    assert choose(LEAST, a_request(budget=budget), slow("a"), slow("b")).reason.startswith("headroom")
    assert choose(LEAST, a_request(budget=budget, waited_s=0.95), slow("a"), slow("b")).reason.startswith("over budget")


def test_the_load_gradient_fills_one_backend_up_to_the_budget_before_the_next() -> None:
    request = a_request(budget=Budget(ttft_s=2.0, inter_token_s=0.035))
    loads = {"a": 0, "b": 0, "c": 0}
    order = []
    for _ in range(200):
        name = name_of(choose(GRADIENT, request, *[slow(name, count) for name, count in loads.items()]))
        assert name is not None
        order.append(name)
        loads[name] += 1
    assert sum(before != after for before, after in pairwise(order)) == 2
    filled = loads[order[0]]
    assert predict(request, slow(streams=filled - 1), NOW_S).tpot_s <= 0.035 < predict(
        request, slow(streams=filled), NOW_S).tpot_s


def test_the_load_gradient_starts_at_the_strongest_and_falls_back_to_the_least_late() -> None:
    assert name_of(choose(GRADIENT, WIDE, slow("a"), fast("b"))) == "b"
    hopeless = a_request(budget=Budget(ttft_s=0.001))
    assert name_of(choose(GRADIENT, hopeless, slow("a", 90), fast("b", 90))) == "b"
    assert choose(GRADIENT, hopeless, slow("a", 90), fast("b", 90)).reason.startswith("least late")


def test_the_load_gradient_spares_the_streams_that_are_there() -> None:
    """A caller of loose pace would pile up on the fuller backend, were there not a stream of tight pace on it."""
    learner = build_learner(PolicySpec("polyserve"))
    loose, tight = a_request(budget=Budget(5.0, 1.0)), a_request(budget=Budget(5.0, 0.03))

    def chosen() -> str | None:
        views = [replace(view, belief=learner.belief(view.spec.name, NOW_S)) for view in (slow("a", 60), slow("b"))]
        fleet = replace(a_fleet(*views), belief=learner.pool_belief(NOW_S))
        return name_of(decide(GRADIENT, loose, fleet, NOW_S, Random(0)))

    assert chosen() == "a"
    sent = learner.sent(tight, Priced(slow("a", 59), 0.0, estimate=predict(tight, slow("a", 59), NOW_S)), NOW_S - 1.0)
    learner.first_token(sent, NOW_S - 0.5)
    assert chosen() == "b"
    learner.ended(sent, End(20), NOW_S)
    assert chosen() == "a"


def test_the_load_gradient_has_its_margin() -> None:
    careful = build_pipeline(PolicySpec("polyserve", settings={"margin": 3.0}))
    request = a_request(budget=Budget(inter_token_s=0.06))
    assert name_of(choose(GRADIENT, request, slow("a", 60), slow("b"))) == "a"
    assert name_of(choose(careful, request, slow("a", 60), slow("b"))) == "b"
