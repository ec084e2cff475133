"""What holds of every hedge, whatever is believed of the fleet."""

from dataclasses import replace
from random import Random

from hypothesis import assume, given
from hypothesis import strategies as st

from backends.catalog.views import FleetView
from policies.facts import Budget, RequestFacts
from policies.hedging import (
    BUDGET_CAPACITY,
    EVEN,
    GRAIN_S,
    First,
    Hedge,
    HedgeBudget,
    HedgeRules,
    Never,
    Wait,
    Withheld,
    awaited_of,
    first_of,
    has_room,
    hedge,
    promised_s,
)
from policies.policy import Priced
from tests.beliefs import CHAT, CODE, believed_fleets
from tests.policy_fleet import NOW_S
from tests.property.test_policy_properties import backends

some_seconds = st.floats(0.01, 100.0)
requests = st.one_of(
    st.just(CHAT), st.just(CODE),
    st.builds(RequestFacts, st.just("m"), st.integers(1, 50_000), expected_output_tokens=st.integers(0, 4000),
              stream=st.booleans(), budget=st.builds(Budget, some_seconds, st.none(), some_seconds)))
fleets = believed_fleets(backends(at_least=2))
rules = st.builds(HedgeRules, st.floats(0.5, 0.9999))
shares = st.floats(0.0, 1.2)


def candidates_of(fleet: FleetView, prices: Random) -> list[Priced]:
    return [Priced(view, prices.random()) for view in fleet.backends]


def sent(how: HedgeRules, facts: RequestFacts, fleet: FleetView) -> First:
    left_s = promised_s(facts)
    assume(left_s is not None)
    assert left_s is not None
    first = first_of(how, facts, fleet.backends[0], left_s, NOW_S)
    assume(first is not None)
    assert first is not None
    return first


@given(rules, requests, fleets, st.randoms(use_true_random=False), shares)
def test_a_hedge_can_still_be_in_time_and_the_first_is_late_or_will_be(
    how: HedgeRules, facts: RequestFacts, fleet: FleetView, prices: Random, share: float
) -> None:
    first = sent(how, facts, fleet)
    elapsed_s = share * first.budget_s
    found = hedge(facts, first, elapsed_s, candidates_of(fleet, prices), NOW_S)
    if isinstance(found, Hedge):
        second = found.second.backend
        awaited = awaited_of(facts, second, NOW_S)
        assert awaited is not None
        assert second.spec.name != first.backend
        assert elapsed_s + awaited.within_s(0.99) <= first.budget_s
        assert has_room(second, NOW_S)
        assert elapsed_s + GRAIN_S >= first.late_s or first.awaited.miss(first.budget_s, elapsed_s) >= EVEN - 1e-9
    elif isinstance(found, Wait):
        assert elapsed_s < found.until_s < first.budget_s


@given(rules, requests, fleets, st.randoms(use_true_random=False))
def test_asking_again_when_told_to_comes_to_an_end(
    how: HedgeRules, facts: RequestFacts, fleet: FleetView, prices: Random
) -> None:
    first = sent(how, facts, fleet)
    candidates, elapsed_s = candidates_of(fleet, prices), first.look_after_s
    for _ in range(len(candidates) + 1):  # each wait is for one of them, and may find it no longer in time
        found = hedge(facts, first, elapsed_s, candidates, NOW_S)
        if not isinstance(found, Wait):
            return
        elapsed_s = found.until_s
    raise AssertionError("it waits for ever")


@given(rules, requests, fleets, st.randoms(use_true_random=False), shares, st.randoms(use_true_random=False))
def test_the_order_of_the_candidates_and_those_that_are_late_do_not_matter(
    how: HedgeRules, facts: RequestFacts, fleet: FleetView, prices: Random, share: float, dice: Random
) -> None:
    first = sent(how, facts, fleet)
    elapsed_s = share * first.budget_s
    candidates = candidates_of(fleet, prices)
    found = hedge(facts, first, elapsed_s, candidates, NOW_S)
    shuffled = list(candidates)
    dice.shuffle(shuffled)
    assert hedge(facts, first, elapsed_s, shuffled, NOW_S) == found
    in_time = [each for each in candidates
               if (a := awaited_of(facts, each.backend, NOW_S)) is not None
               and elapsed_s + a.within_s(0.99) <= first.budget_s]
    after = hedge(facts, first, elapsed_s, in_time, NOW_S)
    assert after == found or (isinstance(found, Never) and isinstance(after, Never))


@given(requests, fleets, st.floats(0.01, 100.0), st.floats(0.0, 50.0), st.floats(0.0, 50.0))
def test_silence_only_makes_a_miss_likelier(
    facts: RequestFacts, fleet: FleetView, budget_s: float, sooner_s: float, longer_s: float
) -> None:
    awaited = awaited_of(facts, fleet.backends[0], NOW_S)
    assume(awaited is not None)
    assert awaited is not None
    before, after = awaited.miss(budget_s, sooner_s), awaited.miss(budget_s, sooner_s + longer_s)
    assert 0.0 <= before <= 1.0 + 1e-12
    assert before <= after + 1e-9


@given(rules, requests, fleets, st.floats(1.0, 3.0))
def test_more_time_is_never_looked_at_sooner(
    how: HedgeRules, facts: RequestFacts, fleet: FleetView, factor: float
) -> None:
    first = sent(how, facts, fleet)
    longer = first_of(how, facts, fleet.backends[0], first.budget_s * factor, NOW_S)
    assert longer is not None
    assert longer.look_after_s >= first.look_after_s


@given(st.floats(0.0, 0.25), st.floats(0.0, 5.0), st.lists(st.tuples(st.floats(0.0, 2.0), st.integers(0, 20)),
                                                          max_size=60))
def test_hedges_are_within_their_share_and_floor(
    ratio: float, floor_per_s: float, steps: list[tuple[float, int]]
) -> None:
    """Over any stretch: no more than was saved up, the share of the requests, and the floor."""
    budget = HedgeBudget(ratio, floor_per_s, BUDGET_CAPACITY, tokens=1.0, at_s=0.0)
    now, requests_, hedges = 0.0, 0, 0
    for passed_s, count in steps:
        now += passed_s
        requests_ += count
        budget = replace(budget, tokens=min(budget.capacity, budget.tokens + count * ratio))
        for _ in range(3):
            paid = budget.withdraw(now)
            if paid is not None:
                budget, hedges = paid, hedges + 1
    assert hedges <= 1.0 + ratio * requests_ + floor_per_s * now + 1e-6


@given(rules, requests, fleets)
def test_with_nobody_else_there_is_no_hedge(how: HedgeRules, facts: RequestFacts, fleet: FleetView) -> None:
    first = sent(how, facts, fleet)
    alone = [Priced(fleet.backends[0], 1.0)]
    assert hedge(facts, first, first.look_after_s, alone, NOW_S) == Never(Withheld.NO_OTHER)
