"""The reliability figures at the size of CI, by the command that takes them; each value is printed beside its bound."""

import gc

import pytest

from loadtest.reliability.measured import Measured, Size, quantile
from loadtest.reliability.run import FIGURES, measure, run_reliability

pytestmark = pytest.mark.anyio
BUSY = 50.0
"""By how much a busy machine may stretch a time. Counts are held exactly."""


@pytest.mark.parametrize("figure", FIGURES)
async def test_figure(figure: str) -> None:
    gc.collect()  # what earlier tests left would else be collected in the middle of a measurement
    found = await measure(figure, Size.CI)
    for value in found:
        print(value.line())
    assert len(found) > 3
    assert [value.line() for value in found if not (value.holds or tolerable(value))] == []


def tolerable(value: Measured) -> bool:
    return value.unit in ("ms", "s") and value.bound is not None and value.value <= BUSY * value.bound


def test_a_missed_bound_shows() -> None:
    assert not Measured("X", "a", 3, bound=2).holds
    assert "MISSED" in Measured("X", "a", 3, bound=2).line()
    assert Measured("X", "a", 2, bound=2).holds
    assert not Measured("X", "a", 3, bound=4, relation=">=").holds
    assert not Measured("X", "a", 3, bound=4, relation="==").holds
    assert Measured("X", "a", 3).holds


def test_quantiles_are_values_that_were_seen() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([float(n) for n in range(1, 101)], 0.99) == 99.0
    assert quantile([1.0], 0.99) == 1.0
    assert quantile([], 0.5) == 0.0


def test_a_figure_that_there_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_reliability(["Z"]) == 2
    assert "B, C, E, G, H, J, T" in capsys.readouterr().err
