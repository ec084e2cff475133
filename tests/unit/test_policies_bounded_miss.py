"""The rule of the plan: a bound on the chance of a miss, adapting by class; misses priced where nobody keeps it."""

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.catalog.views import BackendView, FleetView
from policies.attempts import FailureCause
from policies.beliefs.classes import TARGET
from policies.chance import weighed
from policies.facts import RequestFacts
from policies.learners.miss_bounds import RANGE, STEP, MissBounds
from policies.learning import End
from policies.pickers.bounded_miss import HOPELESS
from policies.pipeline import decide
from policies.policy import Decision, Priced
from policies.registry import PolicySpec, build_learner, build_pipeline
from tests.beliefs import CHAT, CODE, streaming
from tests.policy_fleet import NOW_S, a_backend, decoding, name_of
from tests.property.test_policy_properties import backends

RULE = build_pipeline(PolicySpec("bounded_miss"))
CHEAP, DEAR = 1.0, 3.0


def learner() -> MissBounds:
    found = build_learner(PolicySpec("bounded_miss"))
    assert isinstance(found, MissBounds)
    return found


def on(facts: RequestFacts, memory: MissBounds, *views: BackendView, **settings: float) -> Decision:
    """A decision that sees what the learner believes; the learner does not hear of it."""
    pipeline = build_pipeline(PolicySpec("bounded_miss", settings=settings)) if settings else RULE
    believed = tuple(replace(view, belief=memory.belief(view.spec.name, NOW_S)) for view in views)
    return decide(pipeline, facts, FleetView(believed, "c0ffee", belief=memory.pool_belief(NOW_S)), NOW_S, Random(0))


def ends(memory: MissBounds, facts: RequestFacts, *, late: bool, times: int = 1) -> None:
    """So many answers came, in time or far too late."""
    view = a_backend("elsewhere")
    for _ in range(times):
        sent = memory.sent(facts, Priced(view, 1e-4), NOW_S)
        memory.first_token(sent, NOW_S + (60.0 if late else 0.1))
        memory.ended(sent, End(10), NOW_S + (60.5 if late else 0.2))


def miss_of(view: BackendView, facts: RequestFacts) -> float:
    found = weighed(facts, Priced(view, 0.0), facts.budget, 0.8, NOW_S).miss
    assert found is not None
    return found


def loaded_until(holds: Callable[[float], bool], facts: RequestFacts = CHAT, **given: float) -> BackendView:
    """A cheap backend with as many streams as make the chance of a miss so."""
    for streams in range(2000):
        view = decoding("cheap", streams, price_per_hour=CHEAP, **given)
        if holds(miss_of(view, facts)):
            return view
    raise AssertionError("no load does")


def dear(streams: int = 0) -> BackendView:
    return decoding("dear", streams, price_per_hour=DEAR)


# --- the bound ----------------------------------------------------------------------------------------------------


def test_the_cheapest_within_the_bound_is_taken_and_none_beyond_it() -> None:
    memory, risky = learner(), loaded_until(lambda miss: TARGET < miss < RANGE[1])
    assert name_of(on(CHAT, memory, decoding("cheap", 0, price_per_hour=CHEAP), dear())) == "cheap"
    assert name_of(on(CHAT, memory, risky, dear())) == "dear"
    ends(memory, CHAT, late=False, times=1500)
    assert memory.alpha(CHAT) == RANGE[1]
    assert name_of(on(CHAT, memory, risky, dear())) == "cheap", "a class that keeps its promises accepts more"


def test_the_bound_moves_with_each_end_of_its_class_alone() -> None:
    memory = learner()
    assert memory.alpha(CHAT) == TARGET
    ends(memory, CHAT, late=False)
    assert memory.alpha(CHAT) == pytest.approx(TARGET + STEP * TARGET)
    ends(memory, CODE, late=True)
    assert memory.alpha(CODE) == pytest.approx(TARGET + STEP * (TARGET - 1.0))
    assert memory.alpha(CHAT) == pytest.approx(TARGET + STEP * TARGET)
    ends(memory, CODE, late=True, times=50)
    assert memory.alpha(CODE) == RANGE[0]


def test_a_first_token_that_never_came_is_a_miss_and_a_client_that_left_is_none() -> None:
    memory = learner()
    for cause in (FailureCause.CLIENT_GONE, FailureCause.CONNECT, FailureCause.FIRST_TOKEN_TIMEOUT):
        sent = memory.sent(CHAT, Priced(a_backend("a"), 1e-4), NOW_S)
        before = memory.alpha(CHAT)
        memory.ended(sent, End(0, cause), NOW_S + 30.0)
        assert (memory.alpha(CHAT) < before) == (cause is FailureCause.FIRST_TOKEN_TIMEOUT)


@given(st.lists(st.booleans(), min_size=200, max_size=600))
def test_while_the_bound_is_free_one_in_a_hundred_misses_whatever_comes(late: list[bool]) -> None:
    """The guarantee of adaptive conformal inference: what alpha has moved is what misses are off by."""
    memory = learner()
    alphas = [memory.alpha(CHAT)]
    for each in late:
        ends(memory, CHAT, late=each)
        alphas.append(memory.alpha(CHAT))
    assert all(RANGE[0] <= alpha <= RANGE[1] for alpha in alphas)
    for before, after, each in zip(alphas, alphas[1:], late, strict=False):
        if RANGE[0] < after < RANGE[1]:
            assert after - before == pytest.approx(STEP * (TARGET - each), abs=1e-12)


def test_crowding_others_is_bounded_too() -> None:
    memory = learner()
    ends(memory, CODE, late=False)
    cheap = decoding("cheap", 20, price_per_hour=CHEAP)
    assert name_of(on(CHAT, memory, cheap, dear())) == "cheap"
    crowded = replace(cheap, belief=memory.belief("cheap", NOW_S))
    long = replace(CHAT, prompt_tokens=1500, budget=replace(CHAT.budget, ttft_s=30.0, inter_token_s=1.0))
    assert name_of(on(long, memory, crowded, dear())) == "cheap"
    streaming(crowded, memory._ccr.pool, CODE, 20)
    decision = on(long, memory, crowded, dear())
    assert name_of(decision) == "dear"
    assert next(each for each in decision.candidates if each.backend.spec.name == "cheap").crowding > 0.05
    assert name_of(on(long, memory, crowded, dear(), crowding_limit=100.0)) == "cheap"


def test_of_those_equal_in_price_the_least_risk_is_taken() -> None:
    for names in ("ab", "ba"):
        busy, calm = (decoding(name, streams, price_per_hour=CHEAP)
                      for name, streams in zip(names, (30, 2), strict=True))
        assert miss_of(calm, CHAT) < miss_of(busy, CHAT) < TARGET
        assert name_of(on(CHAT, learner(), busy, calm)) == names[1]


def test_where_nobody_is_safe_crowding_is_priced_as_a_miss_is() -> None:
    memory = learner()
    ends(memory, CODE, late=False)
    long = replace(CHAT, prompt_tokens=1500, budget=replace(CHAT.budget, ttft_s=30.0, inter_token_s=1.0))
    few, many = (replace(decoding(name, 20, price_per_hour=price), belief=memory.belief(name, NOW_S))
                 for name, price in (("few", DEAR), ("many", CHEAP)))
    streaming(few, memory._ccr.pool, CODE, 4)
    streaming(many, memory._ccr.pool, CODE, 40)
    decision = on(long, memory, few, many)
    assert decision.reason.startswith("none safe")
    assert name_of(decision) == "few"
    assert name_of(on(long, memory, few, many, miss_value=0.0)) == "many"


def test_crowding_counts_misses_and_no_class_for_more() -> None:
    memory = learner()
    ends(memory, CODE, late=True, times=100)
    kind = memory.class_of(CODE)
    assert kind is not None
    assert kind.weight == 1.0


# --- where nobody is safe -----------------------------------------------------------------------------------------


def test_where_nobody_is_safe_a_miss_has_its_price() -> None:
    memory, risky = learner(), loaded_until(lambda miss: miss > 0.6)
    safer = replace(dear(), in_flight_requests=1, in_flight_prefill_requests=1)
    for tokens in range(1000, 100_000, 100):
        safer = replace(safer, in_flight_prefill_tokens=tokens)
        if miss_of(safer, CHAT) > 0.1:
            break
    decision = on(CHAT, memory, risky, safer)
    assert name_of(decision) == "dear"
    assert decision.reason.startswith("none safe")
    assert name_of(on(CHAT, memory, risky, safer, miss_value=0.1)) == "cheap"


def test_what_may_be_shed_is_where_it_would_miss_and_all_else_is_served() -> None:
    memory, lost = learner(), loaded_until(lambda miss: miss >= HOPELESS)
    decision = on(replace(CHAT, sheddable=True), memory, lost)
    assert decision.chosen is None
    assert decision.reason.startswith("shed p=")
    assert decision.retry_after_s is not None
    assert name_of(on(CHAT, memory, lost)) == "cheap"
    even = loaded_until(lambda miss: 0.7 < miss < HOPELESS)
    assert name_of(on(replace(CHAT, sheddable=True), memory, even)) == "cheap"


# --- sessions, and what is missing --------------------------------------------------------------------------------


def test_a_session_stays_for_five_percent_and_only_where_it_is_safe() -> None:
    memory, talk = learner(), replace(CHAT, session_key="s")
    old = decoding("old", 0, price_per_hour=1.04)
    assert name_of(on(talk, memory, a_backend("new", price_per_hour=1.0), old)) == "new"
    memory.sent(talk, Priced(old, 1e-4), NOW_S)
    assert name_of(on(talk, memory, a_backend("new", price_per_hour=1.0), old)) == "old"
    assert name_of(on(talk, memory, a_backend("new", price_per_hour=0.9), old)) == "new"
    busy = replace(loaded_until(lambda miss: miss > RANGE[1]).spec, name="old", price_per_hour=1.04)
    full = replace(loaded_until(lambda miss: miss > RANGE[1]), spec=busy)
    assert name_of(on(talk, memory, a_backend("new", price_per_hour=1.0), full)) == "new"


def test_without_its_learner_the_bound_is_one_percent() -> None:
    risky = loaded_until(lambda miss: TARGET < miss < RANGE[1])
    fleet = FleetView((risky, dear()), "c0ffee")
    assert name_of(decide(RULE, CHAT, fleet, NOW_S, Random(0))) == "dear"


@given(backends(at_least=2), st.sampled_from([CHAT, CODE]), st.integers(0, 20))
def test_looking_no_further_than_needed_finds_the_cheapest_safe_one(
    views: list[BackendView], facts: RequestFacts, seed: int
) -> None:
    decision = decide(RULE, facts, FleetView(tuple(views), "c0ffee"), NOW_S, Random(seed))
    weighed_all = [weighed(facts, Priced(each.backend, each.price), facts.budget, 0.8, NOW_S)
                   for each in decision.candidates]
    safe = [each.price for each in weighed_all if each.miss is not None and each.miss <= TARGET]
    assert decision.reason.startswith("cheapest safe") == bool(safe)
    if safe:
        assert decision.price == min(safe)


def test_what_was_learned_of_latencies_outlives_a_restart_and_no_weight_of_another_policy() -> None:
    memory, again = learner(), learner()
    ends(memory, CHAT, late=True, times=30)
    state = memory.export()
    assert state["classes"]
    for row in state["classes"]:
        row["weight"] = 5.0     # as `ccr` leaves it
    again.restore(state, 0.0)
    kind = again.class_of(CHAT)
    assert kind is not None
    assert kind.weight == 1.0
    assert again.expect_output(CHAT) == memory.expect_output(CHAT)
