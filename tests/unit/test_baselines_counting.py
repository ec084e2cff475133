"""Peers that count: turns, requests in flight, prices and hashes."""

from dataclasses import replace
from itertools import pairwise
from math import ceil

import pytest

from backends.catalog.views import BackendView
from policies.pickers.capacity import capacity_rps
from policies.registry import PolicySpec, build_pipeline
from tests.policy_fleet import A100_PAIR, a_backend, a_request, choose, name_of, shares
from tests.policy_memory import Router

TWICE = replace(A100_PAIR, prefill_base_ms=10.0, prefill_ms_per_token=0.0625, prefill_ms_per_pair=3e-6,
                decode_base_ms=12.0, decode_ms_per_seq=0.045, decode_ms_per_seq_token=4.3e-5, host_ms=1.0)
"""Every step of A100_PAIR in half the time."""


def test_capacity_is_of_the_coefficients_alone() -> None:
    slow, fast = a_backend(), a_backend(coefficients=TWICE)
    assert capacity_rps(fast) == pytest.approx(2 * capacity_rps(slow))
    assert capacity_rps(replace(slow, drift=3.0, in_flight_requests=50)) == capacity_rps(slow)
    assert capacity_rps(a_backend(coefficients=None)) < capacity_rps(slow)


def test_weighted_turns_follow_weight_and_capacity() -> None:
    fleet = (a_backend("a"), a_backend("b", coefficients=TWICE), a_backend("c", weight=3.0))
    assert Router("weighted_round_robin").shares(a_request(), *fleet, picks=600) == {"a": 100, "b": 200, "c": 300}


def test_weighted_turns_are_smooth() -> None:
    """With shares of 5, 1 and 1 of 7, turns of the heavy one stand apart and no stretch is off by more than one."""
    fleet = (a_backend("a", weight=5.0), a_backend("b"), a_backend("c"))
    router = Router("weighted_round_robin")
    turns = [router.choose(a_request(), *fleet) for _ in range(700)]
    for start in range(693):
        assert 4 <= turns[start:start + 7].count("a") <= 6
        assert turns[start:start + 7].count("b") <= 2
    gaps = [after - before for before, after in pairwise([at for at, name in enumerate(turns) if name == "b"])]
    assert set(gaps) <= {6, 7, 8}


def test_turns_lie_in_the_middle_of_their_stretches() -> None:
    fleet, router = (a_backend("a", weight=4.0), a_backend("b"), a_backend("c")), Router("weighted_round_robin")
    assert "".join([router.choose(a_request(), *fleet) for _ in range(18)]) == "aabcaa" * 3


def test_a_backend_that_was_away_does_not_catch_up() -> None:
    router, both = Router("weighted_round_robin"), (a_backend("a"), a_backend("b"))
    for _ in range(100):
        router.choose(a_request(), a_backend("a"))
    assert [router.choose(a_request(), *both) for _ in range(6)].count("b") <= 4


def test_turns_of_one_model_do_not_starve_another() -> None:
    router = Router("weighted_round_robin")
    fleet = (a_backend("a"), a_backend("b"), a_backend("x", model="n"), a_backend("y", model="n"))
    rare = []
    for _ in range(20):
        for _ in range(9):
            router.choose(a_request(), *fleet)
        rare.append(router.choose(a_request(model="n"), *fleet))
    assert rare.count("x") == rare.count("y") == 10


def test_weighted_turns_without_memory_still_follow_the_weights() -> None:
    fleet = (a_backend("a"), a_backend("b", coefficients=TWICE))
    counts = shares(build_pipeline(PolicySpec("weighted_round_robin")), a_request(), *fleet, picks=300)
    assert abs(counts["b"] - 200) <= 2


def test_weighted_least_request_takes_the_least_seconds_of_work() -> None:
    pipeline = build_pipeline(PolicySpec("weighted_least_request"))
    fast, slow = a_backend("fast", coefficients=TWICE, in_flight_requests=6), a_backend("slow", in_flight_requests=3)
    assert name_of(choose(pipeline, a_request(), fast, slow)) == "fast"
    assert name_of(choose(pipeline, a_request(), replace(fast, in_flight_requests=8), slow)) == "slow"


def test_lowest_token_price_looks_at_nothing_else() -> None:
    pipeline = build_pipeline(PolicySpec("litellm_cost"))
    cheap, dear = a_backend("z", price_per_hour=1.0, in_flight_requests=500), a_backend("a", price_per_hour=1.01)
    assert name_of(choose(pipeline, a_request(), cheap, dear)) == "z"
    # Twice as fast at less than twice the price is the lower price per token.
    assert name_of(choose(pipeline, a_request(), cheap, a_backend("f", price_per_hour=1.9, coefficients=TWICE))) == "f"


def test_spill_fills_the_cheapest_and_then_the_next() -> None:
    pipeline = build_pipeline(PolicySpec("cheapest_with_spill", settings={"cap": 4}))
    names = []
    loads = {"cheap": 0, "middle": 0, "dear": 0}
    prices = {"cheap": 1.0, "middle": 2.0, "dear": 3.0}
    for _ in range(12):
        fleet = [a_backend(name, price_per_hour=prices[name], in_flight_requests=load) for name, load in loads.items()]
        name = name_of(choose(pipeline, a_request(), *fleet))
        assert name is not None
        names.append(name)
        loads[name] += 1
    assert names == ["cheap"] * 4 + ["middle"] * 4 + ["dear"] * 4
    full = [a_backend(name, price_per_hour=prices[name], in_flight_requests=9) for name in ("cheap", "middle")]
    left = a_backend("dear", price_per_hour=3.0, in_flight_requests=5)
    assert choose(pipeline, a_request(), *full, left).reason.startswith("all full")
    assert name_of(choose(pipeline, a_request(), *full, left)) == "dear"


def hash_fleet(**in_flight: int) -> list[BackendView]:
    return [a_backend(name, in_flight_requests=count) for name, count in in_flight.items()]


def test_a_session_stays_and_sessions_spread() -> None:
    pipeline = build_pipeline(PolicySpec("session_hash"))
    fleet = hash_fleet(a=10, b=10, c=10)
    homes = {f"s{index}": name_of(choose(pipeline, a_request(session_key=f"s{index}"), *fleet, seed=index))
             for index in range(600)}
    for name in "abc":
        assert list(homes.values()).count(name) == pytest.approx(200, abs=60)
    for session, home in homes.items():
        request = a_request(session_key=session)
        assert name_of(choose(pipeline, request, *fleet, seed=1)) == home
        # Whoever is not at home on the backend that leaves stays where it is.
        left = [view for view in fleet if view.spec.name != "c"]
        if home != "c":
            assert name_of(choose(pipeline, request, *left)) == home


def test_sessions_spread_by_weight_and_capacity() -> None:
    pipeline = build_pipeline(PolicySpec("session_hash", settings={"load_factor": 1000.0}))
    fleet = (a_backend("a"), a_backend("b", coefficients=TWICE), a_backend("c", weight=3.0))
    homes = [name_of(choose(pipeline, a_request(session_key=f"s{index}"), *fleet)) for index in range(1200)]
    assert [homes.count(name) for name in "abc"] == [pytest.approx(200 * part, abs=60) for part in (1, 2, 3)]


@pytest.mark.parametrize("factor", [1.0, 1.25, 2.0])
def test_no_backend_goes_above_its_bound(factor: float) -> None:
    """One hot session only, and nothing ever ends: the worst for a hash."""
    pipeline = build_pipeline(PolicySpec("session_hash", settings={"load_factor": factor}))
    loads = dict.fromkeys("abcd", 0)
    for total in range(1, 200):
        name = name_of(choose(pipeline, a_request(session_key="hot"), *hash_fleet(**loads)))
        assert name is not None
        loads[name] += 1
        assert max(loads.values()) <= ceil(factor * total / 4)
    ordered = sorted(loads.values())
    assert ordered[-1] == pytest.approx(factor * 199 / 4, abs=1), "the bound is used up before anybody else is asked"


def test_overflow_is_in_the_sessions_own_order() -> None:
    """What one full backend overflows lands on all others, not on one neighbour."""
    pipeline = build_pipeline(PolicySpec("session_hash"))
    nexts = {name_of(choose(pipeline, a_request(session_key=f"s{index}"), *hash_fleet(a=100, b=0, c=0, d=0)))
             for index in range(60)}
    assert nexts == {"b", "c", "d"}


def test_without_a_session_the_first_block_is_hashed_and_without_both_load_decides() -> None:
    pipeline = build_pipeline(PolicySpec("session_hash"))
    fleet = hash_fleet(a=3, b=3, c=3)
    homes = {name_of(choose(pipeline, a_request(prefix_keys=(7, tail)), *fleet, seed=tail)) for tail in range(20)}
    assert len(homes) == 1
    assert name_of(choose(pipeline, a_request(), *hash_fleet(a=3, b=1, c=2))) == "b"
