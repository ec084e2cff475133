"""What holds of every policy of the registry, whatever its learner has been told."""

from dataclasses import replace
from random import Random
from time import thread_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.catalog.health import Health, HealthState
from backends.catalog.sample import LoadSample
from backends.catalog.spec import BackendSpec, Coefficients
from backends.catalog.views import BackendView
from policies.attempts import FailureCause
from policies.baselines.roster import PRESETS
from policies.facts import Budget, RequestFacts
from policies.learning import End, NoLearner, Sent
from policies.pipeline import MAX_REASON_CHARS, decide
from policies.policy import Decision, Priced
from policies.registry import BUILT_IN, PolicySpec, build_learner, build_pipeline
from tests.policy_fleet import NOW_S, a_fleet, a_request, decoding

NAMES = list(BUILT_IN.presets)
PEERS = [preset.name for preset in PRESETS]
FEWER = settings(max_examples=30)
"""For each of two dozen policies."""

any_ms = st.floats(0.0, 1e9) | st.sampled_from([0.0, 1e-300, 1e300])
coefficients = st.builds(
    Coefficients, st.just("v"), st.just("drawn"), any_ms, any_ms, any_ms, any_ms, any_ms, any_ms,
    kv_capacity_tokens=st.none() | st.integers(0, 1_000_000))
count = st.none() | st.integers(0, 300)
samples = st.builds(LoadSample, taken_at_s=st.floats(NOW_S - 20, NOW_S + 1), running_requests=count,
                    waiting_requests=count, kv_usage_ratio=st.none() | st.floats(-1.0, 2.0), kv_capacity_tokens=count)


@st.composite
def backend(draw: st.DrawFn, name: str) -> BackendView:
    prefill, decode = draw(st.integers(0, 40)), draw(st.integers(0, 300))
    spec = BackendSpec(name, "http://x", "vllm", "m", "m", "card", slots=draw(st.none() | st.integers(1, 300)),
                       price_per_hour=draw(st.floats(0.0, 1e6)), weight=draw(st.floats(1e-6, 1e6)),
                       coefficients=draw(st.none() | coefficients))
    return BackendView(
        spec, Health(HealthState.HEALTHY), in_flight_requests=prefill + decode, in_flight_prefill_requests=prefill,
        in_flight_prefill_tokens=draw(st.integers(0, 10**7)), in_flight_decode_requests=decode,
        in_flight_context_tokens=draw(st.integers(0, 10**7)), sample=draw(st.none() | samples),
        drift=draw(st.floats(allow_nan=True)), served_requests=draw(st.integers(0, 3)))


fleets = st.integers(1, 5).flatmap(lambda size: st.tuples(*[backend(f"b{index}") for index in range(size)]))
seconds = st.none() | st.floats(0.0, 1e6)
requests = st.builds(
    RequestFacts, model=st.just("m"), prompt_tokens=st.integers(0, 200_000),
    expected_output_tokens=st.integers(1, 10_000), stream=st.booleans(),
    budget=st.builds(Budget, seconds, seconds, seconds),
    session_key=st.none() | st.sampled_from(["s", "t", "\ud800", ""]),
    prefix_keys=st.lists(st.integers(0, 3), max_size=4).map(tuple), waited_s=st.floats(0.0, 100.0))
failures = st.none() | st.sampled_from(FailureCause)
events = st.lists(st.tuples(
    requests, st.floats(0.0, 100.0), st.none() | st.floats(0.0, 50.0), st.integers(0, 5000), failures), max_size=12)


def story(name: str, fleet: tuple[BackendView, ...], told: list[tuple[RequestFacts, float, float | None, int,
                                                                     FailureCause | None]]) -> list[Decision]:
    """Decisions one after the other; the learner hears at once of each, and of its end before the next."""
    spec = PolicySpec(name)
    pipeline, learner, rng, now = build_pipeline(spec), build_learner(spec), Random(0), NOW_S
    made = []
    for facts, gap_s, ttft_s, output_tokens, failure in told:
        views = tuple(replace(view, belief=learner.belief(view.spec.name, now)) for view in fleet)
        facts = replace(facts, expected_output_tokens=learner.expect_output(facts))
        decision = decide(pipeline, facts, replace(a_fleet(*views), belief=learner.pool_belief(now)), now, rng)
        made.append(decision)
        if decision.chosen is None:
            continue
        sent: Sent = learner.sent(facts, _priced(decision), now)
        if ttft_s is not None:
            learner.first_token(sent, now + ttft_s)
        now += (ttft_s or 0.0) + gap_s
        learner.ended(sent, End(output_tokens, failure), now)
    return made


def _priced(decision: Decision) -> Priced:
    assert decision.chosen is not None
    name = decision.chosen.spec.name
    return next(each for each in decision.candidates if each.backend.spec.name == name)


@pytest.mark.parametrize("name", NAMES)
@FEWER
@given(fleet=fleets, told=events)
def test_every_policy_decides_whatever_happened_and_says_why_in_ascii(
    name: str, fleet: tuple[BackendView, ...],
    told: list[tuple[RequestFacts, float, float | None, int, FailureCause | None]],
) -> None:
    first = story(name, fleet, told)
    for decision in first:
        assert decision.chosen is not None or decision.retry_after_s is not None
        assert decision.chosen is None or decision.chosen.spec.name in {view.spec.name for view in fleet}
        assert decision.reason
        assert decision.reason.isascii()
        assert decision.reason.isprintable()
        assert len(decision.reason) <= MAX_REASON_CHARS
    again = story(name, fleet, told)
    assert [(_name(d), d.reason) for d in again] == [(_name(d), d.reason) for d in first]


def _name(decision: Decision) -> str | None:
    return decision.chosen.spec.name if decision.chosen else None


@pytest.mark.parametrize("name", PEERS)
@FEWER
@given(fleet=fleets, facts=requests)
def test_a_peer_goes_on_without_its_memory_or_with_another_ones(
    name: str, fleet: tuple[BackendView, ...], facts: RequestFacts
) -> None:
    pipeline = build_pipeline(PolicySpec(name))
    for belief in (None, NoLearner(), "what another policy believes"):
        decision = decide(pipeline, facts, replace(a_fleet(*fleet), belief=belief), NOW_S, Random(1))
        assert decision.chosen is not None


@pytest.mark.parametrize("name", PEERS)
@FEWER
@given(fleet=fleets, facts=requests, data=st.data())
def test_the_order_of_the_fleet_decides_nothing(
    name: str, fleet: tuple[BackendView, ...], facts: RequestFacts, data: st.DataObject
) -> None:
    pipeline = build_pipeline(PolicySpec(name))
    shuffled = data.draw(st.permutations(fleet))
    one = decide(pipeline, facts, a_fleet(*fleet), NOW_S, Random(1))
    other = decide(pipeline, facts, a_fleet(*shuffled), NOW_S, Random(1))
    assert _name(one) == _name(other)


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.real_time
def test_a_decision_costs_no_more_than_its_candidates(name: str) -> None:
    """Eight times the fleet may take eight times as long, not sixty-four."""
    spec = PolicySpec(name)
    pipeline, learner = build_pipeline(spec), build_learner(spec)

    def best_s(size: int) -> float:
        fleet = tuple([decoding(f"b{index:04}", index % 40) for index in range(size)])
        facts = a_request(stream=True, session_key="s", prefix_keys=(1, 2, 3))
        for view in fleet:
            learner.ended(learner.sent(facts, Priced(view, 0.0), NOW_S - 2.0), End(10), NOW_S - 1.0)
        picture = replace(a_fleet(*fleet), belief=learner.pool_belief(NOW_S))
        times = []
        for _ in range(15):
            start = thread_time()
            decide(pipeline, facts, picture, NOW_S, Random(0))
            times.append(thread_time() - start)
        return min(times)

    small, large = best_s(100), best_s(800)
    assert large / small < 24
