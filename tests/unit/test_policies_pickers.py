"""Choosing among priced candidates: ties, weights, exploration, budgets."""

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from policies.facts import Budget
from policies.pickers.weighing import draw, pull, toss
from policies.pipeline import decide
from policies.policy import Pipeline
from policies.registry import PolicySpec, build_pipeline
from tests.policy_fleet import NOW_S, ROOMY, a_backend, a_fleet, a_request, choose, decoding, name_of, shares

FEASIBLE = build_pipeline(PolicySpec("cheapest_feasible", settings={"explore_share": 0.0}))
EXPLORING = build_pipeline(PolicySpec("cheapest_feasible", settings={"explore_share": 0.05, "stale_after_s": 30.0}))
ROUND_ROBIN = build_pipeline(PolicySpec("round_robin"))
LEAST_INFLIGHT = build_pipeline(PolicySpec("least_inflight"))
P2C = build_pipeline(PolicySpec("p2c"))


def chi_square(counts: Counter[str], expected: dict[str, float]) -> float:
    return sum((counts[name] - share) ** 2 / share for name, share in expected.items())


# 0.999 quantiles of chi-square with 1, 2 and 3 degrees of freedom.
CHI_SQUARE_999 = {1: 10.83, 2: 13.82, 3: 16.27}


@pytest.mark.parametrize("pipeline", [FEASIBLE, LEAST_INFLIGHT, P2C], ids=lambda pipeline: pipeline.name)
def test_p41_ties_are_spread(pipeline: Pipeline) -> None:
    four = [a_backend(name) for name in "abcd"]
    counts = shares(pipeline, a_request(), *four, picks=10_000)
    assert chi_square(counts, dict.fromkeys("abcd", 2500.0)) < CHI_SQUARE_999[3]


@pytest.mark.parametrize("pipeline", [FEASIBLE, P2C], ids=lambda pipeline: pipeline.name)
def test_idle_ties_follow_operator_weights(pipeline: Pipeline) -> None:
    # Equal price per weight, so that only the weights are left to decide.
    light, heavy = a_backend("light", price_per_hour=0.0), a_backend("heavy", price_per_hour=0.0, weight=3.0)
    counts = shares(pipeline, a_request(), light, heavy, picks=4000)
    assert chi_square(counts, {"light": 1000, "heavy": 3000}) < CHI_SQUARE_999[1]


def test_least_late_first_once_everyone_is_late() -> None:
    tight = a_request(budget=Budget(ttft_s=0.05))
    cheap, quick = decoding("cheap", 60, price_per_hour=0.1), a_backend("quick", price_per_hour=9.0)
    decision = choose(FEASIBLE, tight, cheap, quick)
    assert name_of(decision) == "quick"
    assert decision.reason.startswith("least late 0.")


def test_equally_late_goes_by_price() -> None:
    tight = a_request(budget=Budget(ttft_s=0.01))
    assert name_of(choose(FEASIBLE, tight, a_backend("a", price_per_hour=3.0), a_backend("b"))) == "b"


def test_budget_before_money() -> None:
    facts = a_request(budget=Budget(inter_token_s=0.06))   # holds for a mean of 30 ms, the margin being 2
    crowded, dear = decoding("crowded", 100, price_per_hour=0.1), a_backend("dear", price_per_hour=9.0)
    decision = choose(FEASIBLE, facts, crowded, dear)
    assert name_of(decision) == "dear"
    assert decision.reason.endswith(" of 1")
    assert name_of(choose(FEASIBLE, replace(facts, budget=ROOMY), crowded, dear)) == "crowded"


def test_exploration_goes_to_the_stalest_within_its_share() -> None:
    stale = [a_backend("a"), a_backend("b", price_per_hour=9.0, last_outcome_at_s=NOW_S - 41),
             a_backend("c", price_per_hour=9.0, last_outcome_at_s=NOW_S - 35)]
    counts = shares(EXPLORING, a_request(), *stale, picks=10_000)
    assert counts["c"] == 0
    assert 400 < counts["b"] < 600
    reasons = {choose(EXPLORING, a_request(), *stale, seed=seed).reason for seed in range(100)}
    assert "explore stale 41s" in reasons


@pytest.mark.parametrize("news", [
    {"last_outcome_at_s": NOW_S - 29}, {"last_outcome_at_s": NOW_S - 60, "in_flight_requests": 1},
])
def test_nothing_is_explored_where_news_is_fresh_or_on_its_way(news: dict[str, float]) -> None:
    dear = a_backend("dear", price_per_hour=9.0, **news)
    assert shares(EXPLORING, a_request(), a_backend("a"), dear, picks=500)["dear"] == 0


def test_round_robin_shares_follow_weights_closely() -> None:
    weights = {"a": 1.0, "b": 2.0, "c": 4.0}
    counts = shares(ROUND_ROBIN, a_request(), *(a_backend(n, weight=w) for n, w in weights.items()), picks=700)
    assert all(abs(counts[name] - 100 * weight) <= 3 for name, weight in weights.items())


@pytest.mark.parametrize("every", [2, 3, 4, 6])
def test_round_robin_stays_even_for_every_nth_decision(every: int) -> None:
    """The counter is shared with other models and retries; a cycle of theirs must not starve a backend of ours."""
    backends, rng, counts = [a_backend(name) for name in "abcd"], Random(0), Counter[str]()
    for turn in range(400):
        decision = decide(ROUND_ROBIN, a_request(), a_fleet(*backends, sequence=turn * every), NOW_S, rng)
        counts[str(name_of(decision))] += 1
    assert all(abs(counts[name] - 100) <= 4 for name in "abcd")


def test_round_robin_is_exact_after_years() -> None:
    backends, rng, counts = [a_backend(name) for name in "ab"], Random(0), Counter[str]()
    for sequence in range(10**15, 10**15 + 400):
        decision = decide(ROUND_ROBIN, a_request(), a_fleet(*backends, sequence=sequence), NOW_S, rng)
        counts[str(name_of(decision))] += 1
    assert abs(counts["a"] - 200) <= 2


def test_least_inflight_counts_per_weight() -> None:
    assert name_of(choose(LEAST_INFLIGHT, a_request(), decoding("a", 3), decoding("b", 2))) == "b"
    assert name_of(choose(LEAST_INFLIGHT, a_request(), decoding("a", 3, weight=2.0), decoding("b", 2))) == "a"
    assert choose(LEAST_INFLIGHT, a_request(), decoding("a", 3), decoding("b", 2)).reason == "least inflight 2 of 2"


def test_p2c_of_two_takes_the_less_loaded() -> None:
    assert shares(P2C, a_request(), decoding("a", 5), decoding("b", 1), picks=100) == {"b": 100}


def test_p2c_never_takes_the_most_loaded_and_mixes_the_rest() -> None:
    counts = shares(P2C, a_request(), decoding("a", 9), decoding("b", 1), decoding("c", 0), picks=3000)
    assert counts["a"] == 0
    assert counts["b"] == pytest.approx(1000, rel=0.15)


def fill(pipeline_name: str, weights: dict[str, float], requests: int) -> Counter[str]:
    """Send requests that stay, so that load is felt, and count where they went."""
    pipeline, rng = build_pipeline(PolicySpec(pipeline_name)), Random(5)
    held = dict.fromkeys(weights, 0)
    for sequence in range(requests):
        views = [decoding(name, held[name], weight=weight) for name, weight in weights.items()]
        held[str(name_of(decide(pipeline, a_request(), a_fleet(*views, sequence=sequence), NOW_S, rng)))] += 1
    return Counter(held)


# The peers do as their originals, of which many know no weights.
@pytest.mark.parametrize("name", ["headrace", "cheapest_feasible", "round_robin", "least_inflight", "p2c"])
def test_weights_move_the_shares(name: str) -> None:
    even, tilted = (fill(name, {"a": weight, "b": 1.0, "c": 1.0}, 120)["a"] for weight in (1.0, 4.0))
    assert 30 <= even <= 50
    assert tilted >= 1.5 * even


def test_draw_gives_each_item_its_width() -> None:
    items, pulls = "abc", [1.0, 2.0, 1.0]
    assert [items[draw(items, pulls, share)] for share in (0.0, 0.24, 0.26, 0.74, 0.76, 0.999)] == list("aabbcc")
    assert draw(items, [0.1] * 3, 1.0) == 2


def test_toss_of_one_takes_no_dice() -> None:
    rng = Random(1)
    before = rng.getstate()
    assert toss(["a"], [1.0], rng) == "a"
    assert rng.getstate() == before


@pytest.mark.parametrize("weight", [float("inf"), 0.0, -1.0, float("nan")])
def test_pull_is_always_a_finite_positive_number(weight: float) -> None:
    assert 0 < pull(a_backend(weight=weight), NOW_S) < float("inf")
