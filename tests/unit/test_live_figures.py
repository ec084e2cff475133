"""From answers to rows: fates, cost, intervals, verdicts. Numbers in, numbers out."""

import json
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.catalog.spec import BackendSpec, Coefficients
from loadtest.live import showing
from loadtest.live.classes import LiveClass
from loadtest.live.figures import UNFINISHED, Fate, Outcome, Sums, accounted_cost, figures, outcomes, sums
from loadtest.live.intervals import Compared, Interval, compare
from loadtest.live.rows import Row, judge, summarize
from loadtest.live.schedule import Block
from loadtest.openai_stream import StreamRecord
from loadtest.traffic import Arrival, Lengths

CLASS = LiveClass("tight", 1.0, Lengths(32, 0.5, 96), Lengths(8, 0.5, 16), ttft_s=1.0, inter_token_s=0.1)
CLASSES = {"tight": CLASS}
BACKENDS = ("fast", "slow")
RECORD = StreamRecord(
    intended_at_s=0.0, lag_s=0.001, prompt_tokens=100, max_tokens=4, latency_class="tight", status=200, backend="fast",
    overhead_ms=0.4, ttft_s=0.5, e2e_s=1.0, gaps_s=(0.1, 0.1, 0.1), tokens=4, lost_tokens=0, failure=None)
REFUSED = replace(RECORD, status=503, backend=None, ttft_s=None, gaps_s=(), tokens=0, failure="http_503")


def block_of(count: int) -> Block:
    return Block(1, 10.0, tuple(Arrival(float(at), 100, 4, "tight") for at in range(count)), ("text",) * count)


def fate_of(record: StreamRecord) -> Fate:
    return outcomes(block_of(1), {0: record}, CLASSES, lambda *_: 1.0)[0].fate


# --- fates


@pytest.mark.parametrize(("record", "fate"), [
    (RECORD, Fate.IN_BUDGET),
    (replace(RECORD, ttft_s=1.01), Fate.LATE),
    (replace(RECORD, ttft_s=0.99, gaps_s=(0.1, 0.1, 0.1)), Fate.IN_BUDGET),
    (replace(RECORD, ttft_s=0.5, gaps_s=(0.1, 0.6, 0.05)), Fate.IN_BUDGET),      # an early start pays for a late gap
    (replace(RECORD, ttft_s=0.9, gaps_s=(0.1, 0.25, 0.1)), Fate.LATE),
    (replace(RECORD, gaps_s=(), tokens=1), Fate.IN_BUDGET),
    (REFUSED, Fate.SHED),
    (replace(REFUSED, status=429, failure="http_429"), Fate.SHED),
    (replace(REFUSED, status=502, failure="http_502"), Fate.LOST),
    (replace(RECORD, failure="truncated"), Fate.LOST),
    (replace(RECORD, status=None, ttft_s=None, gaps_s=(), tokens=0, failure="connect"), Fate.LOST),
])
def test_fates(record: StreamRecord, fate: Fate) -> None:
    assert fate_of(record) is fate


def test_an_arrival_without_an_answer_is_lost_and_not_forgotten() -> None:
    found = outcomes(block_of(3), {0: RECORD, 2: REFUSED}, CLASSES, lambda *_: 1.0)
    assert [outcome.fate for outcome in found] == [Fate.IN_BUDGET, Fate.LOST, Fate.SHED]
    assert found[1].failure == UNFINISHED
    assert [outcome.cost for outcome in found] == [1.0, 0.0, 0.0]


# --- cost


def spec(name: str, price_per_hour: float) -> BackendSpec:
    return BackendSpec(name, "http://127.0.0.1:1", "llamacpp", "m", "m", "cpu", slots=4, price_per_hour=price_per_hour,
                       coefficients=Coefficients("v", "made up", prefill_base_ms=40.0, prefill_ms_per_token=2.0,
                                                 prefill_ms_per_pair=0.0, decode_base_ms=20.0, decode_ms_per_seq=5.0,
                                                 decode_ms_per_seq_token=0.0))


def test_cost_is_the_price_of_calibrated_machine_time() -> None:
    """Four slots, so four sequences share the fixed part of a step: 100 tokens and a quarter of a base, 10 steps."""
    cost = accounted_cost([spec("fast", 3.6), spec("free", 0.0)])
    assert cost("fast", 100, 10) == pytest.approx(3.6 / 3600 * (100 * 2 + 40 / 4 + 10 * (5 + 20 / 4)) / 1000)
    assert cost("free", 100, 10) == 0.0
    assert cost("unheard of", 100, 10) == 0.0


def test_late_answers_cost_and_only_kept_ones_divide() -> None:
    found = outcomes(block_of(4), {0: RECORD, 1: RECORD, 2: replace(RECORD, ttft_s=5.0),
                                   3: replace(RECORD, failure="truncated", tokens=2)}, CLASSES,
                     lambda _, prompt, output: prompt * 0.01 + output)
    assert [outcome.cost for outcome in found] == [5.0, 5.0, 5.0, 3.0]
    assert sums(found).cost_per_1k_in_budget == pytest.approx(1000 * 18 / 2)


# --- figures


def test_figures_of_a_policy() -> None:
    blocks = [outcomes(block_of(2), {0: RECORD, 1: replace(RECORD, ttft_s=2.0, backend="slow")}, CLASSES,
                       lambda *_: 1.0),
              outcomes(block_of(2), {0: RECORD, 1: REFUSED}, CLASSES, lambda *_: 1.0)]
    found = figures(blocks, BACKENDS, ["tight"])
    assert (found.requests, found.in_budget, found.late, found.shed, found.lost) == (4, 0.5, 0.25, 0.25, 0.0)
    assert found.shares == {"fast": pytest.approx(2 / 3), "slow": pytest.approx(1 / 3)}
    assert (found.ttft_p50_s, found.ttft_p99_s) == (0.5, 2.0)
    assert found.itl_p99_s == pytest.approx(0.1)
    assert found.cost_per_1k_in_budget == pytest.approx(1500.0)
    assert found.by_class == {"tight": 0.5}
    assert found.failures == {"http_503": 1}
    assert found.lag_p99_s == 0.001


FATES = st.sampled_from([RECORD, replace(RECORD, ttft_s=3.0), REFUSED, replace(RECORD, failure="truncated"), None])


@given(st.lists(FATES, min_size=1, max_size=40))
def test_every_arrival_has_one_fate(records: list[StreamRecord | None]) -> None:
    given_records = {number: record for number, record in enumerate(records) if record is not None}
    found = figures([outcomes(block_of(len(records)), given_records, CLASSES, lambda *_: 1.0)], BACKENDS, ["tight"])
    assert found.requests == len(records)
    assert found.in_budget + found.late + found.shed + found.lost == pytest.approx(1.0)


def test_nothing_kept_is_no_cost_rather_than_none() -> None:
    found = figures([outcomes(block_of(1), {0: REFUSED}, CLASSES, lambda *_: 1.0)], BACKENDS, ["tight"])
    assert found.cost_per_1k_in_budget is None
    assert found.ttft_p50_s is None
    assert found.shares == {"fast": 0.0, "slow": 0.0}


# --- intervals


def drawn(rng: Random, share: float, cost: float, blocks: int = 12) -> list[Sums]:
    return [Sums(50, sum(rng.random() < share for _ in range(50)), 50 * cost * rng.uniform(0.9, 1.1))
            for _ in range(blocks)]


def test_a_policy_beside_itself_does_not_differ_at_all() -> None:
    blocks = drawn(Random(1), 0.8, 1.0)
    found = compare({"ours": blocks, "twin": list(blocks)}, seed=1)["twin"]
    assert (found.in_budget_minus_ours, found.in_budget_minus_ours_ci) == (0.0, Interval(0.0, 0.0))
    assert (found.cost_over_ours, found.cost_over_ours_ci) == (1.0, Interval(1.0, 1.0))


def test_pairing_takes_out_what_a_block_does_to_all() -> None:
    """Blocks lie far apart, the two policies always five points: alone neither is sure, their difference is."""
    ours = [Sums(100, kept, 100.0) for kept in (95, 60, 90, 50, 85, 70, 92, 55)]
    theirs = [replace(each, in_budget=each.in_budget - 5) for each in ours]
    found = compare({"ours": ours, "theirs": theirs}, seed=1)["theirs"]
    assert found.in_budget_ci is not None
    assert found.in_budget_ci.high - found.in_budget_ci.low > 0.1
    assert list(found.in_budget_minus_ours_ci or ()) == pytest.approx([-0.05, -0.05])


def test_intervals_hold_the_truth_about_as_often_as_they_say() -> None:
    hits = 0
    for trial in range(40):
        rng = Random(trial)
        found = compare({"ours": drawn(rng, 0.9, 1.0), "theirs": drawn(rng, 0.8, 1.0)}, trial)["theirs"]
        assert found.in_budget_minus_ours_ci is not None
        hits += found.in_budget_minus_ours_ci.low <= -0.1 <= found.in_budget_minus_ours_ci.high
    assert 33 <= hits <= 39


def test_the_same_seed_gives_the_same_intervals() -> None:
    blocks = {"ours": drawn(Random(1), 0.9, 1.0), "theirs": drawn(Random(2), 0.7, 1.3)}
    assert compare(blocks, seed=3) == compare(blocks, seed=3)
    assert compare(blocks, seed=3) != compare(blocks, seed=4)


def test_one_block_gives_figures_and_no_interval() -> None:
    found = compare({"ours": [Sums(10, 9, 1.0)], "theirs": [Sums(10, 8, 2.0)]}, seed=1)["theirs"]
    assert found == Compared(None, None, found.in_budget_minus_ours, None, found.cost_over_ours, None)
    assert found.in_budget_minus_ours == pytest.approx(-0.1)
    assert found.cost_over_ours == pytest.approx(2.25)


def test_a_cost_that_some_draws_do_not_have_gets_no_interval() -> None:
    found = compare({"ours": [Sums(1, 1, 1.0)] * 2, "theirs": [Sums(1, 1, 1.0), Sums(1, 0, 1.0)]}, seed=1)["theirs"]
    assert found.cost_over_ours == 2.0
    assert found.cost_over_ours_ci is None
    assert found.in_budget_ci == Interval(0.0, 1.0)


def test_blocks_that_do_not_match_are_refused() -> None:
    with pytest.raises(ValueError, match="the same blocks"):
        compare({"ours": [Sums(1, 1, 1.0)], "theirs": []}, seed=1)


# --- rows and verdict


def outcome(fate: Fate, cost: float) -> Outcome:
    return Outcome("tight", fate, cost, "fast", 0.5, 0.8, 4, 0.001)


def blocks_of(kept: int, cost: float, blocks: int = 3) -> list[tuple[Outcome, ...]]:
    block = (*[outcome(Fate.IN_BUDGET, cost)] * kept, *[outcome(Fate.LATE, cost)] * (10 - kept))
    return [block] * blocks


def rows_of(**policies: tuple[int, float]) -> tuple[Row, ...]:
    return summarize({name: blocks_of(*given) for name, given in policies.items()}, BACKENDS, ["tight"], seed=1)


@pytest.mark.parametrize(("ours", "theirs", "met"), [
    ((10, 1.0), (9, 1.0), True),
    ((9, 0.8), (9, 1.0), True),
    ((9, 1.0), (9, 1.0), False),         # as good, and no cheaper
    ((8, 0.1), (9, 1.0), False),         # cheaper, and fewer in budget
    ((10, 5.0), (9, 1.0), False),
])
def test_the_goal_is_as_many_in_budget_at_lower_cost(
    ours: tuple[int, float], theirs: tuple[int, float], met: bool
) -> None:
    verdict = judge(rows_of(headrace=ours, p2c=theirs))
    assert verdict is not None
    assert verdict.met is met
    assert verdict.ahead == pytest.approx((ours[0] - theirs[0]) / 10)


def test_the_yardstick_is_the_best_of_the_others_and_the_cheaper_of_equals() -> None:
    verdict = judge(rows_of(headrace=(10, 1.0), bad=(5, 0.1), dear=(9, 3.0), best=(9, 2.0)))
    assert verdict is not None
    assert verdict.best_other == "best"
    assert verdict.cost_ratio is not None
    assert verdict.cost_ratio_ci is not None
    assert verdict.cost_ratio == pytest.approx((10 / 10) / (20 / 9))
    assert verdict.cost_ratio_ci.low <= verdict.cost_ratio <= verdict.cost_ratio_ci.high


def test_nobody_to_compare_with_is_no_verdict() -> None:
    assert judge(rows_of(headrace=(10, 1.0))) is None


def test_a_row_is_complete_and_plain_json() -> None:
    row = json.loads(json.dumps(rows_of(headrace=(10, 1.0), p2c=(9, 2.0))[1].as_json()))
    assert set(row) == {
        "policy", "blocks", "requests", "in_budget", "late", "shed", "lost", "cost_per_1k_in_budget", "ttft_p50_s",
        "ttft_p99_s", "itl_p99_s", "shares", "by_class", "failures", "lag_p99_s", "in_budget_ci", "cost_ci",
        "in_budget_minus_ours", "in_budget_minus_ours_ci", "cost_over_ours", "cost_over_ours_ci"}
    assert row["in_budget_minus_ours"] == -0.1
    assert row["cost_over_ours"] == pytest.approx(20 / 9, rel=1e-4)
    assert row["blocks"] == 3


def test_the_table_has_every_policy_every_warning_and_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    rows = rows_of(headrace=(10, 1.0), p2c=(9, 2.0))
    showing.show(rows, judge(rows), [CLASS], {"blocks": 3, "warnings": ["a noisy machine"]}, json=False, report=None)
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert "…" not in out
    assert lines[1].split()[:2] == ["headrace", "30"]
    assert lines[2].split()[:2] == ["p2c", "30"]
    assert "-10.0 [-10.0, -10.0]" in lines[2]
    assert "goal met    headrace beside p2c" in out
    assert "warning: a noisy machine" in out
