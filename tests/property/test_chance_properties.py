"""What holds of every decision of the `headrace` policy, whatever is believed of the fleet."""

from dataclasses import replace
from math import inf, isfinite, nan
from random import Random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from backends.catalog.views import BackendView, FleetView
from policies.beliefs.backend import BackendBelief
from policies.chance import miss_probability, weighed
from policies.facts import Budget, RequestFacts
from policies.hopeless import lateness
from policies.pickers.chance_constrained import ChanceConstrained
from policies.pickers.least_score import HOPELESS, LATEST
from policies.pipeline import decide
from policies.policy import Decision, Priced
from policies.registry import PartSpec, PolicySpec, build_pipeline
from tests.beliefs import CHAT, CODE, a_pool, believed_fleets, believing, fleet_of
from tests.policy_fleet import NOW_S, a_backend, name_of
from tests.property.test_policy_properties import LOADS, backend, backends, loaded, odd_float, odd_request, odd_view

HEADRACE = build_pipeline(PolicySpec(settings={"first_request": False}))
PICKER = HEADRACE.picker
assert isinstance(PICKER, ChanceConstrained)

some_seconds = st.floats(0.01, 100.0)
requests = st.one_of(
    st.just(CHAT), st.just(CODE),
    st.builds(RequestFacts, st.just("m"), st.integers(1, 50_000), expected_output_tokens=st.integers(1, 4000),
              latency_class=st.sampled_from(["chat", "other"]), waited_s=st.floats(0.0, 2.0),
              budget=st.builds(Budget, st.none() | some_seconds, st.none() | some_seconds, st.none() | some_seconds)))
fleets = believed_fleets(backends())
pairs = believed_fleets(backends(at_least=2))


def on(facts: RequestFacts, fleet: FleetView, seed: int = 0) -> Decision:
    decision = decide(HEADRACE, facts, fleet, NOW_S, Random(seed))
    assert not decision.reason.startswith("model fault")
    return decision


def without_memory(fleet: FleetView) -> FleetView:
    return replace(fleet, backends=tuple(replace(view) for view in fleet.backends))


def scores(facts: RequestFacts, fleet: FleetView) -> dict[str, float]:
    """Every candidate's score, made one by one."""
    kind = fleet.belief.class_of(facts)
    lengths = fleet.belief.lengths_of(facts)
    weight, spread = 1.0 if kind is None else kind.weight, 0.8 if lengths is None else lengths.spread
    value = PICKER.miss_value * fleet.belief.mean_price["m"]   # type: ignore[attr-defined]
    budget = PICKER.budget_of(facts)   # type: ignore[attr-defined]
    found = {}
    for candidate in on(facts, fleet).candidates:
        each = weighed(facts, Priced(candidate.backend, candidate.price), budget, spread, NOW_S)
        assert each.miss is not None
        misses = weight * each.miss + each.crowding
        if each.miss > HOPELESS:
            misses += min(lateness(facts, budget, each.estimate), LATEST) / LATEST
        found[candidate.backend.spec.name] = each.price + value * misses
    return found


@given(requests, fleets, st.integers(0, 50))
def test_looking_no_further_than_needed_finds_the_lowest_score(
    facts: RequestFacts, fleet: FleetView, seed: int
) -> None:
    decision = on(facts, fleet, seed)
    if decision.candidates and not decision.reason.startswith("late"):
        found = scores(facts, fleet)
        assert found[str(name_of(decision))] == pytest.approx(min(found.values()), rel=1e-9)


@settings(max_examples=40)
@given(requests, pairs, st.data())
def test_taking_away_one_that_was_not_chosen_changes_nothing(
    facts: RequestFacts, fleet: FleetView, data: st.DataObject
) -> None:
    decision = on(facts, fleet)
    found = sorted(scores(facts, fleet).values())
    if len(found) < 2 or decision.reason.startswith("late") or found[0] == found[1]:
        return   # nobody else, or dice and lateness have a say
    gone = data.draw(st.sampled_from([v for v in fleet.backends if v.spec.name != name_of(decision)]))
    rest = replace(fleet, backends=tuple(v for v in fleet.backends if v is not gone))
    after = on(facts, rest)
    # The last in hope that leaves makes the rest hopeless, and then lateness is what counts.
    assert name_of(after) == name_of(decision) or after.reason.startswith("late")


@given(requests, pairs, st.randoms(use_true_random=False), st.integers(0, 50))
def test_the_order_of_the_fleet_does_not_matter(
    facts: RequestFacts, fleet: FleetView, dice: Random, seed: int
) -> None:
    shuffled = list(fleet.backends)
    dice.shuffle(shuffled)
    assert on(facts, fleet, seed) == on(facts, replace(fleet, backends=tuple(shuffled)), seed)


@given(requests, fleets, st.floats(0.0, 0.2), st.floats(0.0, 0.2))
def test_what_is_remembered_never_changes_a_decision(
    facts: RequestFacts, fleet: FleetView, before_s: float, now_s: float
) -> None:
    decide(HEADRACE, facts, fleet, NOW_S + before_s, Random(0))   # fills the memory of the views
    now = NOW_S + now_s
    fresh = without_memory(fleet)
    assert decide(HEADRACE, facts, fleet, now, Random(0)) == decide(HEADRACE, facts, fresh, now, Random(0))


@given(requests, fleets, st.integers(-8, 8))
def test_scaling_all_prices_changes_no_choice(facts: RequestFacts, fleet: FleetView, power: int) -> None:
    rate = 2.0 ** power   # exact in floating point
    pool = a_pool(fleet.belief.mean_price["m"] * rate)
    pool.classes = fleet.belief.classes
    dearer = FleetView(tuple(replace(v, spec=replace(v.spec, price_per_hour=v.spec.price_per_hour * rate))
                             for v in fleet.backends), "c0ffee", belief=pool)
    here, there = on(facts, fleet), on(facts, dearer)
    assert name_of(here) == name_of(there)
    assert [c.price * rate for c in here.candidates] == [c.price for c in there.candidates]


@given(requests, fleets, st.floats(1.01, 10.0), st.integers(0, 50))
def test_a_dearer_copy_is_never_chosen_before_its_twin(
    facts: RequestFacts, fleet: FleetView, times: float, seed: int
) -> None:
    twin = fleet.backends[0]
    twin = replace(twin, spec=replace(twin.spec, name="twin"))
    copy = replace(twin, spec=replace(twin.spec, name="a-copy", price_per_hour=twin.spec.price_per_hour * times))
    assert name_of(on(facts, replace(fleet, backends=(copy, twin, *fleet.backends)), seed)) != "a-copy"


@given(requests, fleets, st.sampled_from(["ttft_s", "inter_token_s", "e2e_s"]), st.floats(0.0, 10.0))
def test_raising_a_budget_never_raises_a_miss_nor_what_a_request_costs_with_it(
    facts: RequestFacts, fleet: FleetView, which: str, more_s: float
) -> None:
    assume(getattr(facts.budget, which) is not None)
    # One class for both, for a class of its own would come with beliefs of its own.
    pool = replace(fleet, belief=a_pool(fleet.belief.mean_price["m"]))
    tight = replace(facts, latency_class="neither")
    roomy = replace(tight, budget=replace(facts.budget, **{which: getattr(facts.budget, which) + more_s}))
    before, after = scores(tight, pool), scores(roomy, pool)
    for name, score in before.items():
        assert after[name] <= score * (1 + 1e-9)
    if before:
        assert min(after.values()) <= min(before.values()) * (1 + 1e-9)


@given(requests, believed_fleets(backend().map(lambda view: [view])), LOADS, st.integers(1, 50))
def test_more_load_never_makes_a_miss_less_likely(
    facts: RequestFacts, fleet: FleetView, load: dict[str, int], times: int
) -> None:
    (view,) = fleet.backends
    belief: BackendBelief = view.belief
    # Prompts that are believed cached are ahead too, but they are no load; and silence is judged by what is in flight.
    belief.cached_ahead_tokens = belief.open_requests = 0
    busier = loaded(view, load, times)
    budget = PICKER.budget_of(facts)   # type: ignore[attr-defined]
    less, more = (weighed(facts, Priced(each, 1.0), budget, 0.8, NOW_S).miss for each in (view, busier))
    assert less is not None
    assert more is not None
    assert more >= less - 1e-9


odd_beliefs = st.builds(lambda: BackendBelief(a_pool().tails))


@st.composite
def odd_belief(draw: st.DrawFn) -> BackendBelief | str | None:
    belief = draw(odd_beliefs)
    for tail in (belief.ttft, belief.pace, belief.end):
        for _ in range(draw(st.integers(0, 25))):
            tail.observe(draw(odd_float))
    belief.drift.observe(*[draw(odd_float) for _ in range(5)])
    belief.drift.set(draw(st.floats(-9.0, 9.0)))
    for _ in range(2):
        belief.arrivals.add(draw(odd_float), draw(st.floats(0.0, 2000.0)))
    belief.open_requests = draw(st.integers(-1, 5))
    belief.cached_ahead_tokens = draw(st.sampled_from([-5, 0, 10**12]))
    belief.heard_at_s = draw(st.none() | odd_float)
    return draw(st.sampled_from([belief, None, "foreign"]))


@given(odd_request, st.lists(odd_view, max_size=4), st.data(), odd_float, st.booleans(), odd_float)
def test_a_decision_is_total_whatever_is_believed(
    facts: RequestFacts, views: list[BackendView], data: st.DataObject, now: float, first: bool, mean_price: float
) -> None:
    pipeline = build_pipeline(PolicySpec(settings={"first_request": first}))
    pool = a_pool(mean_price)
    believed = tuple(replace(view, belief=data.draw(odd_belief())) for view in views)
    fleet = FleetView(believed, belief=data.draw(st.sampled_from([pool, None, "foreign"])))
    decision = decide(pipeline, facts, fleet, now, Random(0))
    assert not decision.reason.startswith("model fault")
    assert decision.reason.isascii()
    assert 0 < len(decision.reason) < 120
    assert len(decision.candidates) + len(decision.rejected) == len(views)
    assert (decision.chosen is None) == (not decision.candidates)
    assert all(c.price == c.price and c.late_s >= 0 and (c.miss is None or 0 <= c.miss <= 1)
               for c in decision.candidates)


@given(st.lists(odd_view, max_size=5), odd_request, odd_float)
def test_asking_a_filter_for_all_is_asking_it_one_by_one(
    views: list[BackendView], facts: RequestFacts, now: float
) -> None:
    fleet = FleetView(tuple(views))
    pipelines = [HEADRACE, build_pipeline(PolicySpec(filters=(PartSpec("quality_floor", {"floor_bits": 8.0}),)))]
    for part in [part for pipeline in pipelines for part in pipeline.filters]:
        passing = part.passing(facts, views, now)   # type: ignore[attr-defined]
        assert list(passing) == [view for view in views if part(facts, view, fleet, now) is None]


@given(requests, fleets)
def test_prices_of_all_are_the_prices_one_by_one(facts: RequestFacts, fleet: FleetView) -> None:
    (price,) = HEADRACE.prices
    views = fleet.backends
    each = [price(facts, view, None, NOW_S) for view in views]   # type: ignore[arg-type]
    assert price.of_all(facts, views, NOW_S) == each   # type: ignore[attr-defined]


@pytest.mark.parametrize("odd", [nan, inf, -inf, 0.0])
def test_odd_budgets_have_odd_but_possible_chances(odd: float) -> None:
    pool = a_pool()
    view = believing(a_backend(), pool)
    facts = replace(CHAT, budget=Budget(odd, odd, odd))
    decision = on(facts, fleet_of(view, pool=pool))
    (candidate,) = decision.candidates
    assert candidate.estimate is not None
    miss = miss_probability(facts, facts.budget, 0.8, candidate.estimate, view.belief)
    assert isfinite(miss)
    assert 0 <= miss <= 1
