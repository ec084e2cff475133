"""The measurement of a decision's cost measures decisions."""

import json

import pytest

from loadtest.bench.decide import main, measure


def test_a_cost_is_of_decisions_that_predict() -> None:
    cost = measure("headrace", 8, 40, new_views=True)
    assert cost.backends == 8
    assert 0 < cost.p50_us <= cost.p99_us
    assert 1 <= cost.weighed <= 8


def test_a_thousand_backends_cost_as_their_sample_does() -> None:
    few, many = (measure("headrace", size, 60, new_views=False) for size in (64, 1000))
    assert many.p50_us < 5 * few.p50_us
    assert many.weighed < 64


def test_it_prints_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadtest.bench.decide.SIZES", (4,))
    main(["--decisions", "5", "--json", "--policy", "p2c"])
    rows = json.loads(capsys.readouterr().out)
    assert [(row["policy"], row["backends"], row["views"]) for row in rows] == [("p2c", 4, "kept"), ("p2c", 4, "new")]
