"""`headrace bench policies` from end to end: two real fake-engine processes, a gateway a policy, locust."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loadtest.live.prompts import MARK_DIGITS
from loadtest.live.run import PoliciesOptions, run_policies
from loadtest.measured import Promise
from loadtest.stack import simulated_stack

pytestmark = pytest.mark.load
POLICIES = ("headrace", "round_robin")
CARDS = ("h100x2-fp8", "l40sx2-fp8")


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Path]:
    """The file of a fleet of two cards that runs."""
    with simulated_stack(tmp_path, cards=CARDS, time_scale=1.0, policy="p2c", classes={"any": Promise()}):
        yield tmp_path / "fleet.yaml"


def schedules(report: Path, block: int) -> list[dict[str, Any]]:
    """What was sent in the visits of a block, in the order of the visits."""
    found = [json.loads((report / f"visit-{block}-{place}" / "schedule.json").read_text()) for place in (0, 1)]
    assert not (report / f"visit-{block}-2").exists()
    return found


def test_both_policies_meet_the_same_arrivals_and_every_one_is_accounted_for(
    fleet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report"
    code = run_policies(PoliciesOptions(
        policies=POLICIES, fleet=fleet, minutes=5, rounds=2, block_s=2.0, rate_per_s=8.0, report=report, json=True))
    said = capsys.readouterr()
    assert code == 0, said.err
    document = json.loads(said.out)
    assert document == json.loads((report / "rows.json").read_text())
    rows = {row["policy"]: row for row in document["rows"]}
    assert tuple(rows) == POLICIES

    sent = 0
    for block in (1, 2):
        one, other = schedules(report, block)
        sent += len(one["asks"])
        assert [{**ask, "prompt": ask["prompt"][MARK_DIGITS:]} for ask in one["asks"]] == [
            {**ask, "prompt": ask["prompt"][MARK_DIGITS:]} for ask in other["asks"]]
        assert [ask["prompt"] for ask in one["asks"]] != [ask["prompt"] for ask in other["asks"]]
    assert sent > 10

    outcomes = [json.loads(line) for line in (report / "outcomes.jsonl").read_text().splitlines()]
    for policy, row in rows.items():
        of_policy = [outcome for outcome in outcomes if outcome["policy"] == policy]
        assert row["requests"] == len(of_policy) == sent
        assert row["in_budget"] + row["late"] + row["shed"] + row["lost"] == pytest.approx(1.0)
        assert row["lost"] == 0.0, row["failures"]
        assert sum(row["shares"].values()) == pytest.approx(1.0)
        assert set(row["shares"]) == set(CARDS)
        assert row["cost_per_1k_in_budget"] > 0
        assert 0 < row["ttft_p50_s"] <= row["ttft_p99_s"]
        assert row["in_budget_ci"][0] <= row["in_budget"] <= row["in_budget_ci"][1]
        # A fake engine always says as much as it may.
        assert all(outcome["tokens"] == outcome["max_tokens"] for outcome in of_policy)
    assert min(rows["round_robin"]["shares"].values()) > 0.4, "turn by turn, so about half each"
    assert rows["headrace"]["in_budget_minus_ours"] == 0.0
    assert document["goal"]["best_other"] == "round_robin"
    assert document["setting"]["blocks"] == 2
    # The turn changes from block to block, so nobody always has the engines first.
    assert "round 1, round_robin" in said.err.partition("round 1, headrace")[0]
    assert "round 2, headrace" in said.err.partition("round 2, round_robin")[0]


@pytest.mark.parametrize(("options", "said"), [
    (PoliciesOptions(policies=("headrace", "astrology")), "no preset 'astrology'"),
    (PoliciesOptions(policies=("headrace:nonsense=1",)), "nonsense"),
    (PoliciesOptions(policies=("headrace",), minutes=0.2), "give --minutes"),
    (PoliciesOptions(policies=()), "name one policy"),
    (PoliciesOptions(fleet=Path("/nowhere/fleet.yaml")), "/nowhere/fleet.yaml"),
])
def test_a_run_that_cannot_take_place_says_why_before_anything_starts(
    options: PoliciesOptions, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_policies(options) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert "starting engines" not in shown.err
    assert shown.out == ""


def test_engines_without_coefficients_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = {"version": 1, "models": [{"name": "m"}], "backends": [
        {"name": "dark", "url": "http://127.0.0.1:9", "engine": "openai", "model": "m", "card": {"type": "x"}}]}
    (tmp_path / "fleet.yaml").write_text(json.dumps(document))
    assert run_policies(PoliciesOptions(fleet=tmp_path / "fleet.yaml")) == 2
    assert "no coefficients of dark" in capsys.readouterr().err


def test_an_engine_that_does_not_answer_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    coefficients = {"version": "v", "source": "made up", "prefill_base_ms": 1.0, "prefill_ms_per_token": 1.0,
                    "prefill_ms_per_pair": 0.0, "decode_base_ms": 1.0, "decode_ms_per_seq": 1.0,
                    "decode_ms_per_seq_token": 0.0}
    document = {"version": 1, "models": [{"name": "m"}], "backends": [
        {"name": "gone", "url": "http://127.0.0.1:9", "engine": "openai", "model": "m", "card": {"type": "x"},
         "coefficients": coefficients}]}
    (tmp_path / "fleet.yaml").write_text(json.dumps(document))
    assert run_policies(PoliciesOptions(fleet=tmp_path / "fleet.yaml")) == 2
    assert "gone at http://127.0.0.1:9 does not answer: connect" in capsys.readouterr().err
