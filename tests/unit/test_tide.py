"""Traffic in waves: as many requests as the rate adds up to, when it does."""

from random import Random

import pytest

from loadtest.tide import Wave

WAVE = Wave(trough_per_s=2.0, peak_per_s=10.0, period_s=60.0)


def test_it_begins_in_the_trough_and_repeats() -> None:
    assert WAVE.rate_per_s(0.0) == pytest.approx(2.0)
    assert WAVE.rate_per_s(30.0) == pytest.approx(10.0)
    assert WAVE.rate_per_s(75.0) == pytest.approx(4.0), "a quarter of the way up after a quarter of the time"


def test_it_begins_anywhere() -> None:
    late = Wave(2.0, 10.0, 60.0, begins_at=0.75)
    assert late.rate_per_s(0.0) == pytest.approx(WAVE.rate_per_s(45.0))
    assert late.due(50.0) == pytest.approx(WAVE.due(95.0) - WAVE.due(45.0))


@pytest.mark.parametrize("even", [True, False])
def test_requests_come_as_the_rate_says(even: bool) -> None:
    found = list(WAVE.even_arrivals(600.0) if even else WAVE.arrivals(Random(1), 600.0))
    assert len(found) == pytest.approx(3000, rel=0.05), "the mean is three eighths of the way up"
    assert found == sorted(found)
    assert max(found) < 600.0
    low, high = (sum(first <= at_s % 60.0 < first + 10.0 for at_s in found) for first in (55.0, 25.0))
    assert 3.0 < high / max(low, 1) < 12.0


def test_even_ones_are_exactly_as_many_at_any_time() -> None:
    found = list(WAVE.even_arrivals(90.0))
    for until_s in (10.0, 33.0, 61.0, 90.0):
        assert sum(at_s <= until_s for at_s in found) == pytest.approx(WAVE.due(until_s), abs=1.0)


@pytest.mark.parametrize("wave", [Wave(-1.0, 2.0, 9.0), Wave(3.0, 2.0, 9.0), Wave(0.0, 0.0, 9.0), Wave(1.0, 2.0, 0.0)])
def test_rates_that_are_none_are_refused(wave: Wave) -> None:
    with pytest.raises(ValueError, match="trough"):
        next(wave.arrivals(Random(1), 9.0))
