"""Deviations of counts: what few requests teach holds for many, and what is assumed gives way to what was seen."""

from math import exp, sqrt
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.forecast.deviations import ENOUGH, KEPT, Deviations, scale


def poisson(mean: float, rng: Random) -> int:
    """Knuth's product of uniforms; for means up to some hundred."""
    count, product, least = 0, rng.random(), exp(-mean)
    while product > least:
        count, product = count + 1, product * rng.random()
    return count


def learned(means: list[float], seed: int = 1) -> Deviations:
    rng, found = Random(seed), Deviations()
    for mean in means:
        found.add(mean, poisson(mean, rng))
    return found


def reached(found: Deviations, mean: float, quantile: float = 0.99) -> float:
    """The share of bins of this mean that stay below the forecast quantile."""
    rng, most = Random(99), mean + scale(mean) * found.at(quantile)
    return sum(poisson(mean, rng) <= most for _ in range(4_000)) / 4_000


@pytest.mark.parametrize("taught_at", [2.0, 12.0, 40.0])
@pytest.mark.parametrize("asked_at", [2.0, 12.0, 40.0])
def test_what_one_level_teaches_holds_at_another(taught_at: float, asked_at: float) -> None:
    found = learned([taught_at] * 800)
    assert reached(found, asked_at) >= 0.97
    assert asked_at + scale(asked_at) * found.at(0.99) < asked_at + 4.5 * sqrt(asked_at) + 0.4 * asked_at


def test_a_share_is_a_share_of_many() -> None:
    found = Deviations()
    for _ in range(ENOUGH):
        found.add(10_000.0, 13_000.0)
    assert 1e6 + scale(1e6) * found.at(0.99) == pytest.approx(1.3e6, rel=0.001)


def test_unlearnt_it_is_about_half_as_much_again_of_many_and_more_of_few() -> None:
    z = Deviations().at(0.99)
    assert 1e4 + scale(1e4) * z == pytest.approx(1.47e4, rel=0.01)
    assert 4.0 + scale(4.0) * z > 2.0 * 4.0
    assert Deviations().at(0.5) == 0.0


def test_calm_narrows_what_is_assumed_and_a_surge_widens_it_at_once() -> None:
    found = Deviations()
    for _ in range(20):
        found.add(25.0, 25.0)
    assert found.at(0.99) == pytest.approx(Deviations().at(0.99) / sqrt(2.0))
    found.add(25.0, 75.0)
    assert found.at(0.99) == pytest.approx(50.0 / scale(25.0)), "the worst that was seen"


@given(st.lists(st.tuples(st.floats(0.0, 1e6), st.floats(0.0, 1e6)), max_size=150), st.floats(0.5, 0.999))
def test_higher_quantiles_are_never_lower_nor_lost(seen: list[tuple[float, float]], quantile: float) -> None:
    found, after = Deviations(), Deviations()
    for expected, actual in seen:
        found.add(expected, actual)
    assert found.at(quantile) <= found.at(0.999) + 1e-9
    after.restore(found.export())
    assert after.at(quantile) == pytest.approx(found.at(quantile))


def test_no_more_than_a_week_is_kept() -> None:
    found = Deviations()
    for _ in range(KEPT):
        found.add(9.0, 99.0)
    for _ in range(KEPT):
        found.add(9.0, 9.0)
    assert found.at(0.99) == 0.0
    assert len(found.export()) == KEPT
