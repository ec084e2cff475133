"""What holds of every decision, whatever the fleet looks like."""

from dataclasses import replace
from math import inf
from random import Random

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from backends.catalog.health import Health, HealthState
from backends.catalog.sample import LoadSample
from backends.catalog.spec import BackendSpec, Coefficients
from backends.catalog.views import BackendView
from policies.attempts import RetryBudget
from policies.estimate import predict
from policies.facts import Budget, RequestFacts
from policies.pipeline import decide
from policies.policy import Pipeline
from policies.registry import BUILT_IN, PartSpec, PolicySpec, build_pipeline
from tests.policy_fleet import NOW_S, a_backend, a_fleet, a_request, choose, name_of

PRESETS = [build_pipeline(PolicySpec(name)) for name in BUILT_IN.presets]
ALL_PRICES = tuple(PartSpec(name) for name in BUILT_IN.prices)


def headrace(scale: float = 1.0) -> Pipeline:
    """Every price in money, exploration off; `scale` multiplies the exchange rates."""
    return build_pipeline(PolicySpec(
        "cheapest_feasible", prices=(PartSpec("request_cost"), PartSpec("drain_time", {"price_per_s": 0.0005 * scale}),
                PartSpec("lateness", {"price_per_late_s": 0.01 * scale})),
        settings={"explore_share": 0.0, "first_request": False}))


HEADRACE = headrace()

ms = st.floats(0.0, 200.0)
coefficients = st.builds(
    Coefficients, st.just("v"), st.just("drawn"), prefill_base_ms=ms, prefill_ms_per_token=st.floats(1e-3, 5.0),
    prefill_ms_per_pair=st.floats(0.0, 1e-3), decode_base_ms=st.floats(0.1, 200.0),
    decode_ms_per_seq=st.floats(0.0, 10.0), decode_ms_per_seq_token=st.floats(0.0, 0.01), host_ms=ms,
    first_token_overhead_ms=ms, kv_capacity_tokens=st.none() | st.integers(1, 1_000_000))


@st.composite
def backend(draw: st.DrawFn, name: str = "a") -> BackendView:
    """Any backend that serves model m; its books add up."""
    prefill, decode = draw(st.integers(0, 40)), draw(st.integers(0, 300))
    count = st.none() | st.integers(0, 300)
    sample = draw(st.none() | st.builds(LoadSample, taken_at_s=st.floats(NOW_S - 20, NOW_S),
                                        running_requests=count, waiting_requests=count))
    spec = BackendSpec(
        name, "http://x", "vllm", "m", "m", "card", context_tokens=draw(st.none() | st.integers(1, 200_000)),
        slots=draw(st.none() | st.integers(1, 300)), price_per_hour=draw(st.floats(0.01, 100.0)),
        weight=draw(st.floats(0.1, 10.0)), coefficients=draw(st.none() | coefficients))
    return BackendView(
        spec, Health(draw(st.sampled_from([HealthState.HEALTHY, HealthState.UNKNOWN]))),
        in_flight_requests=prefill + decode, in_flight_prefill_requests=prefill,
        in_flight_prefill_tokens=draw(st.integers(prefill, 3000 * prefill + 1)), in_flight_decode_requests=decode,
        in_flight_context_tokens=draw(st.integers(decode, 5000 * decode + 1)), sample=sample,
        in_flight_at_sample=draw(st.none() | st.integers(0, 300)), drift=draw(st.floats(0.1, 10.0)),
        served_requests=draw(st.integers(0, 3)), last_outcome_at_s=draw(st.none() | st.floats(0.0, NOW_S)))


@st.composite
def backends(draw: st.DrawFn, at_least: int = 1) -> list[BackendView]:
    count = draw(st.integers(at_least, 5))
    return [draw(backend(f"b{index}")) for index in range(count)]


seconds = st.none() | st.floats(0.01, 100.0)
requests = st.builds(
    RequestFacts, model=st.just("m"), prompt_tokens=st.integers(1, 100_000),
    max_output_tokens=st.none() | st.integers(1, 10_000), expected_output_tokens=st.integers(1, 4000),
    budget=st.builds(Budget, seconds, seconds, seconds),
    tried=st.lists(st.sampled_from(["b0", "b1", "b2"]), max_size=2, unique=True).map(tuple))


def tied(decision_prices: list[tuple[float, float]]) -> bool:
    return decision_prices.count(min(decision_prices)) > 1


@given(requests, backends(at_least=2), st.data())
def test_adding_an_unchosen_backend_changes_no_choice(
    facts: RequestFacts, fleet: list[BackendView], data: st.DataObject
) -> None:
    with_all = choose(HEADRACE, facts, *fleet)
    assume(len(with_all.candidates) > 1)
    assume(not tied([(c.late_s, 0.0 if c.late_s else c.price) for c in with_all.candidates]))
    unchosen = data.draw(st.sampled_from([b for b in fleet if b.spec.name != name_of(with_all)]))
    assert name_of(choose(HEADRACE, facts, *(b for b in fleet if b is not unchosen))) == name_of(with_all)


LOADS = st.sampled_from([
    {"in_flight_requests": 1, "in_flight_decode_requests": 1, "in_flight_context_tokens": 700},
    {"in_flight_requests": 1, "in_flight_prefill_requests": 1, "in_flight_prefill_tokens": 1},
    {"in_flight_requests": 1, "in_flight_prefill_requests": 1, "in_flight_prefill_tokens": 5000},
    {"in_flight_context_tokens": 100},
])


def loaded(view: BackendView, load: dict[str, int], times: int) -> BackendView:
    return replace(view, **{key: getattr(view, key) + times * more for key, more in load.items()})


@given(requests, backend(), LOADS, st.integers(1, 50))
@example(  # our request takes the place of one that the engine counted without saying whose
    a_request(), a_backend(sample=LoadSample(NOW_S, running_requests=1)),
    {"in_flight_requests": 1, "in_flight_prefill_requests": 1, "in_flight_prefill_tokens": 1}, 1)
def test_more_load_never_makes_a_backend_cheaper_or_quicker(
    facts: RequestFacts, view: BackendView, load: dict[str, int], times: int
) -> None:
    facts = replace(facts, tried=())
    busier = loaded(view, load, times)
    for less, more in zip(predict(facts, view, NOW_S)[:6], predict(facts, busier, NOW_S)[:6], strict=True):
        assert more >= less or more == pytest.approx(less, rel=1e-12)
    before, after = choose(HEADRACE, facts, view), choose(HEADRACE, facts, busier)
    assert (before.chosen is None) == (after.chosen is None)
    if before.candidates:
        (less_priced,), (more_priced,) = before.candidates, after.candidates
        assert more_priced.price >= less_priced.price * (1 - 1e-12)
        assert more_priced.late_s >= less_priced.late_s * (1 - 1e-12)


@given(requests, backend(), st.integers(0, 100), st.integers(0, 100), st.sampled_from(["running", "waiting"]))
def test_more_load_of_others_never_makes_a_backend_quicker(
    facts: RequestFacts, view: BackendView, running: int, waiting: int, which: str
) -> None:
    less = LoadSample(NOW_S, running_requests=running, waiting_requests=waiting)
    more = replace(less, **{f"{which}_requests": getattr(less, f"{which}_requests") + 5})
    before = predict(facts, replace(view, sample=less), NOW_S)[:6]
    after = predict(facts, replace(view, sample=more), NOW_S)[:6]
    assert all(b >= a or b == pytest.approx(a, rel=1e-12) for a, b in zip(before, after, strict=True))


@given(requests, backends(), st.integers(0, 100))
def test_over_budget_is_never_chosen_while_one_within_exists(
    facts: RequestFacts, fleet: list[BackendView], seed: int
) -> None:
    decision = choose(HEADRACE, facts, *fleet, seed=seed)
    late = {c.backend.spec.name: c.late_s for c in decision.candidates}
    if decision.chosen is not None:
        chosen_late_s = late[decision.chosen.spec.name]
        assert chosen_late_s == min(late.values())


@pytest.mark.parametrize("pipeline", PRESETS, ids=lambda pipeline: pipeline.name)
@given(requests, backends(), st.randoms(use_true_random=False), st.integers(0, 1000))
def test_the_order_of_backends_does_not_matter(
    pipeline: Pipeline, facts: RequestFacts, fleet: list[BackendView], dice: Random, seed: int
) -> None:
    shuffled = list(fleet)
    dice.shuffle(shuffled)
    assert choose(pipeline, facts, *fleet, seed=seed) == choose(pipeline, facts, *shuffled, seed=seed)


@given(requests, backends(), st.integers(-8, 8))
def test_the_currency_does_not_matter(facts: RequestFacts, fleet: list[BackendView], power: int) -> None:
    # A power of two is exact in floating point, so that not even near-ties may turn.
    rate = 2.0 ** power
    exchanged = [replace(b, spec=replace(b.spec, price_per_hour=b.spec.price_per_hour * rate)) for b in fleet]
    here, there = choose(headrace(), facts, *fleet), choose(headrace(rate), facts, *exchanged)
    assert name_of(here) == name_of(there)
    for ours, theirs in zip(here.candidates, there.candidates, strict=True):
        assert theirs.price == ours.price * rate


@given(requests, backends(), st.floats(1.01, 10.0), st.integers(0, 100))
def test_a_dearer_copy_is_never_chosen_before_its_twin(
    facts: RequestFacts, fleet: list[BackendView], times: float, seed: int
) -> None:
    # Idle, for a queue that costs a fortune would drown the difference in rounding.
    twin = replace(fleet[0], in_flight_requests=0, in_flight_decode_requests=0, in_flight_prefill_tokens=0,
                   in_flight_context_tokens=0, sample=None)
    twin = replace(twin, spec=replace(twin.spec, name="twin"))
    copy = replace(twin, spec=replace(twin.spec, name="a-copy", price_per_hour=twin.spec.price_per_hour * times))
    assert name_of(choose(HEADRACE, replace(facts, tried=()), copy, twin, *fleet, seed=seed)) != "a-copy"


odd_float = st.sampled_from([0.0, -0.0, -1.0, 1.0, 1e-300, 1e300, inf, -inf, float("nan")])
odd_int = st.sampled_from([-1, 0, 1, 2, 1000, 10**12, 10**30])
odd_sample = st.none() | st.builds(LoadSample, odd_float, st.none() | odd_int, st.none() | odd_int, odd_float)
odd_coefficients = st.builds(Coefficients, st.just("v"), st.just("odd"), odd_float, odd_float, odd_float, odd_float,
                             odd_float, odd_float, odd_float, odd_float, st.none() | odd_int)
odd_spec = st.builds(
    BackendSpec, st.text(max_size=3), st.just("http://x"), st.just("vllm"), st.sampled_from(["m", "n"]), st.just("m"),
    st.just("card"), context_tokens=st.none() | odd_int, slots=st.none() | odd_int, price_per_hour=odd_float,
    weight=odd_float, coefficients=st.none() | odd_coefficients)
odd_view = st.builds(
    BackendView, odd_spec, st.builds(Health, st.sampled_from(HealthState), since_s=odd_float, until_s=odd_float),
    draining=st.booleans(), in_flight_requests=odd_int, in_flight_prefill_tokens=odd_int,
    in_flight_decode_requests=odd_int, in_flight_context_tokens=odd_int, sample=odd_sample,
    in_flight_at_sample=st.none() | odd_int, backoff_until_s=odd_float, drift=odd_float, served_requests=odd_int,
    last_outcome_at_s=st.none() | odd_float)
odd_request = st.builds(
    RequestFacts, st.sampled_from(["m", "n"]), odd_int, st.none() | odd_int, odd_int,
    budget=st.builds(Budget, st.none() | odd_float, st.none() | odd_float, st.none() | odd_float),
    tried=st.lists(st.text(max_size=3), max_size=2).map(tuple))
EVERYTHING = [*PRESETS, HEADRACE, build_pipeline(PolicySpec("p2c", prices=ALL_PRICES, settings={"margin": 0.0}))]


@given(odd_request, st.lists(odd_view, max_size=5), odd_int, odd_float, st.sampled_from(EVERYTHING))
def test_a_decision_is_total(
    facts: RequestFacts, fleet: list[BackendView], sequence: int, now: float, pipeline: Pipeline
) -> None:
    decision = decide(pipeline, facts, a_fleet(*fleet, sequence=sequence), now, Random(0))
    assert decision.reason.isascii()
    assert 0 < len(decision.reason) < 120
    assert "\n" not in decision.reason
    assert len(decision.candidates) + len(decision.rejected) == len(fleet)
    assert (decision.chosen is None) == (not decision.candidates)
    assert all(c.price == c.price and c.late_s >= 0 for c in decision.candidates)


@given(backends(at_least=2), st.sampled_from([0.0, 0.01, 0.1, 0.5]), st.integers(0, 1000))
def test_exploration_stays_within_its_share(fleet: list[BackendView], share: float, seed: int) -> None:
    pipeline = build_pipeline(PolicySpec(
        "cheapest_feasible", settings={"explore_share": share, "first_request": False}))
    rng, picks = Random(seed), 400
    explored = sum(
        decide(pipeline, a_request(), a_fleet(*fleet), NOW_S, rng).reason.startswith("explore") for _ in range(picks))
    # Six standard deviations of the binomial: a chance of one in a hundred million.
    assert explored <= picks * share + 6 * (picks * share * (1 - share)) ** 0.5


@given(st.lists(st.tuples(st.sampled_from(["request", "retry"]), st.floats(0.0, 2.0)), max_size=200),
       st.floats(0.0, 1.0), st.floats(0.0, 20.0))
def test_retries_stay_within_their_budget(events: list[tuple[str, float]], ratio: float, floor_per_s: float) -> None:
    budget, now, requested, retried = RetryBudget(ratio, floor_per_s, tokens=5.0, at_s=0.0), 0.0, 0, 0
    for kind, pause_s in events:
        now += pause_s
        if kind == "request":
            budget, requested = budget.deposit(), requested + 1
        elif (paid := budget.withdraw(now)) is not None:
            budget, retried = paid, retried + 1
        assert retried <= budget.capacity + ratio * requested + floor_per_s * now + 1e-6
        assert 0 <= budget.available(now) <= budget.capacity
