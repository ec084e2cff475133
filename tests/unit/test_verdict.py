"""The gate: what passes, what fails, and that a frozen backend cannot slip through (P51)."""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.catalog.spec import Coefficients
from loadtest.fake_engine.cards import find_card
from loadtest.measured import Promise, failures, measure, percentile, shares, unloaded_inter_token_s, unloaded_ttft_s
from loadtest.openai_stream import StreamRecord
from loadtest.run import CLASSES, LoadOptions, planned_requests, read_thresholds
from loadtest.stack import at_time_scale, fleet_document
from loadtest.traffic import AZURE_CONV_PROMPTS, Lengths, Traffic, arrivals, prompt_text, user_dice
from loadtest.verdict import Row, Threshold, ThresholdsError, judge, parse_thresholds, passed
from router.config.fleet_file import load_fleet

CARDS = {name: at_time_scale(find_card(name).coefficients, LoadOptions().time_scale) for name in LoadOptions().cards}
SIMULATED = read_thresholds(LoadOptions().thresholds, "simulated")
DURATION_S = 30.0


def answered(at_s: float, backend: str, dice: Random) -> StreamRecord:
    """A request that its card answered as fast as it can, give or take some queueing."""
    prompt, output = AZURE_CONV_PROMPTS.draw(dice), dice.randint(20, 300)
    ttft_s = unloaded_ttft_s(CARDS[backend], prompt) * dice.uniform(1.0, 1.6)
    gap_s = unloaded_inter_token_s(CARDS[backend], prompt)
    gaps = tuple(gap_s * dice.uniform(0.9, 1.4) for _ in range(output - 1))
    return StreamRecord(
        intended_at_s=at_s, lag_s=0.001, prompt_tokens=prompt, max_tokens=output, latency_class="interactive",
        status=200, backend=backend, overhead_ms=dice.uniform(0.3, 2.0), ttft_s=ttft_s, e2e_s=ttft_s + sum(gaps),
        gaps_s=gaps, tokens=output, lost_tokens=0, failure=None)


def healthy_run(seed: int = 7) -> list[StreamRecord]:
    dice = Random(seed)
    schedule = arrivals(Traffic(8.0), dice, DURATION_S)
    return [answered(arrival.at_s, dice.choice(list(CARDS)), dice) for arrival in schedule]


def frozen(record: StreamRecord, from_s: float, to_s: float) -> StreamRecord:
    """The same request where its backend stops between two instants and then goes on as if nothing had been."""
    assert record.ttft_s is not None
    event_s = [record.intended_at_s + record.ttft_s]
    for gap in record.gaps_s:
        event_s.append(event_s[-1] + gap)
    # Everything that was due after the freeze began comes later by what is left of the freeze at its start.
    pause_s = max(0.0, to_s - max(from_s, record.intended_at_s))
    moved = [at if at < from_s else at + pause_s for at in event_s] if record.intended_at_s < to_s else event_s
    return replace(record, ttft_s=moved[0] - record.intended_at_s, e2e_s=moved[-1] - record.intended_at_s,
                   gaps_s=tuple(later - earlier for earlier, later in pairwise(moved)))


def judged(records: Sequence[StreamRecord], planned: int | None = None) -> dict[str, Row]:
    measured = measure(records, planned=len(records) if planned is None else planned, duration_s=DURATION_S,
                       backends=tuple(CARDS), cards=CARDS, classes=CLASSES)
    return {row.threshold.name: row for row in judge(measured, SIMULATED)}


def broken(rows: dict[str, Row]) -> set[str]:
    return {name for name, row in rows.items() if not row.passed}


def test_a_healthy_run_passes_the_shipped_thresholds() -> None:
    assert broken(judged(healthy_run())) == set()


@pytest.mark.parametrize("seed", range(5))
def test_p51_a_backend_frozen_for_six_seconds_fails(seed: int) -> None:
    records = [frozen(record, 10.0, 16.0) if record.backend == "a100x2-bf16" else record
               for record in healthy_run(seed)]
    rows = judged(records)
    assert {"ttft_p99_s", "kept_budget_ratio"} <= broken(rows)
    assert rows["failed_requests"].passed, "a gate on errors alone would open"


def test_p51_slow_tokens_after_a_fast_first_one_fail() -> None:
    """TTFT 50 ms, then five seconds of nothing in each fiftieth answer."""
    records = healthy_run()
    for index in range(0, len(records), 50):
        record = records[index]
        records[index] = replace(record, ttft_s=0.05, gaps_s=(5.0, *record.gaps_s[1:]), e2e_s=record.e2e_s + 5)
    rows = judged(records)
    assert "worst_gap_p99_s" in broken(rows)
    assert measure(records, planned=0, duration_s=1)["inter_token_p99_s"] < 0.1, "the P99 over all gaps is blind to it"


def test_p51_requests_that_were_never_sent_fail() -> None:
    """A closed loop sends less while it waits; what the schedule held and nobody recorded is counted."""
    records = healthy_run()
    assert broken(judged(records[:-3], planned=len(records))) == {"unfinished_requests"}


def test_one_failed_request_fails_and_is_named() -> None:
    records = healthy_run()
    records[4] = replace(records[4], failure="truncated", lost_tokens=12)
    assert broken(judged(records)) == {"failed_requests", "lost_tokens"}
    assert failures(records) == {"truncated": 1}


def test_a_backend_that_served_nobody_fails() -> None:
    records = [record for record in healthy_run() if record.backend != "ascend910b2x2-bf16"]
    assert broken(judged(records)) == {"unused_backends"}
    assert set(shares(records)) == {"a100x2-bf16", "l40sx2-fp8"}
    assert sum(shares(records).values()) == pytest.approx(1.0)


def test_nothing_measured_passes_nothing() -> None:
    rows = judge({}, SIMULATED)
    assert len(rows) == len(SIMULATED)
    assert not any(row.passed for row in rows)
    assert not passed(rows)
    assert not passed(())


def test_a_run_without_records_fails_although_nothing_failed_in_it() -> None:
    assert not passed(tuple(judged([]).values()))


LIMIT = Threshold("x", "<=", 2.0, "s", "because")


@pytest.mark.parametrize(("must_be", "value", "holds"), [
    ("<=", 2.0, True), ("<=", 2.1, False), (">=", 2.0, True), (">=", 1.9, False), ("==", 2.0, True), ("==", 0.0, False),
    ("<=", float("nan"), False), (">=", float("inf"), False),
])
def test_comparisons(must_be: str, value: float, holds: bool) -> None:
    (row,) = judge({"x": value}, [replace(LIMIT, must_be=must_be)])  # type: ignore[arg-type]
    assert row.passed is holds


def entry(**changes: object) -> dict[str, object]:
    return {"name": "x", "must_be": "<=", "limit": 1, "unit": "s", "why": "because", **changes}


@pytest.mark.parametrize(("document", "complaint"), [
    (None, "no list"), ({"host": []}, "no list of thresholds under 'g'"), ({"g": []}, "empty"),
    ({"g": [entry(why="  ")]}, "say where the limit comes from"),
    ({"g": [entry(must_be="<")]}, "must_be is one of"), ({"g": [entry(limit="1")]}, "finite number"),
    ({"g": [entry(limit=True)]}, "finite number"), ({"g": [entry(limit=float("nan"))]}, "finite number"),
    ({"g": [entry(), entry()]}, "twice"), ({"g": [entry(note="x")]}, "exactly"), ({"g": ["x"]}, "exactly"),
])
def test_thresholds_that_cannot_be_judged_by_are_refused(document: object, complaint: str) -> None:
    with pytest.raises(ThresholdsError, match=complaint):
        parse_thresholds(document, "g")


@pytest.mark.parametrize("group", ["simulated", "host"])
def test_each_shipped_threshold_names_a_number_that_a_run_measures(group: str) -> None:
    known = measure(healthy_run(), planned=1, duration_s=1.0, backends=["b"], cards=CARDS, classes=CLASSES)
    thresholds = read_thresholds(LoadOptions().thresholds, group)
    assert {threshold.name for threshold in thresholds} <= set(known)
    for threshold in thresholds:
        assert len(threshold.why) > 40, f"{threshold.name}: where does {threshold.limit} come from?"


@pytest.mark.parametrize("text", [None, "a: [", "\xff", "simulated: 3"])
def test_a_thresholds_file_that_cannot_be_read_says_so(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "thresholds.yaml"
    if text is not None:
        path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ThresholdsError, match=r"thresholds\.yaml"):
        read_thresholds(path, "simulated")


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=300), st.floats(0.001, 1.0))
def test_percentile_is_the_smallest_value_that_enough_do_not_exceed(values: list[float], share: float) -> None:
    found = percentile(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values) - 1e-9
    assert sum(value < found for value in values) < share * len(values) + 1e-9


def test_p99_of_fewer_than_a_hundred_is_the_worst() -> None:
    assert percentile([1.0] * 98 + [9.0], 0.99) == 9.0
    assert percentile([], 0.99) is None


def test_a_promise_is_kept_by_whole_answers_in_time_only() -> None:
    record = answered(0.0, "a100x2-bf16", Random(1))
    slow = replace(record, ttft_s=3.0)
    promise = Promise(ttft_s=2.0, inter_token_s=1.0)
    assert promise.kept_by(record)
    assert not promise.kept_by(slow)
    assert not promise.kept_by(replace(record, failure="truncated"))
    assert not Promise().kept_by(replace(record, ttft_s=None))
    assert Promise().kept_by(slow)


def test_unloaded_times_by_hand() -> None:
    card = Coefficients("v", "s", prefill_base_ms=10, prefill_ms_per_token=0.1, prefill_ms_per_pair=1e-5,
                        decode_base_ms=20, decode_ms_per_seq=0.5, decode_ms_per_seq_token=1e-4, host_ms=1,
                        first_token_overhead_ms=30)
    # Two chunks of 2,048 and 952 tokens: 30 + 2·(1 + 10) + 0.1·3000 + 1e-5·(2048²/2 + 952·2048 + 952²/2)
    assert unloaded_ttft_s(card, 3000) == pytest.approx((30 + 22 + 300 + 45.0) / 1000)
    assert unloaded_inter_token_s(card, 1000) == pytest.approx((1 + 20 + 0.5 + 0.1) / 1000)


def test_a_card_at_twice_its_speed_needs_half_the_time() -> None:
    card = find_card("a100x2-bf16").coefficients
    fast = at_time_scale(card, 2.0)
    assert unloaded_ttft_s(fast, 3000) == pytest.approx(unloaded_ttft_s(card, 3000) / 2)
    assert unloaded_inter_token_s(fast, 3000) == pytest.approx(unloaded_inter_token_s(card, 3000) / 2)
    assert (fast.version, fast.kv_capacity_tokens) == (card.version, card.kv_capacity_tokens)


def test_the_fleet_file_of_a_run_is_one_that_the_gateway_accepts(tmp_path: Path) -> None:
    engines = [(f"http://127.0.0.1:{9000 + index}", find_card(name)) for index, name in enumerate(LoadOptions().cards)]
    document = fleet_document(engines, port=8080, admin_port=8081, policy="headrace", classes=CLASSES, time_scale=2.0)
    path = tmp_path / "fleet.yaml"
    path.write_text(json.dumps(document))
    loaded = load_fleet(path, {})
    assert {spec.name: spec.coefficients for spec in loaded.specs} == CARDS
    assert loaded.config.budget_of("interactive").ttft_s == CLASSES["interactive"].ttft_s


def test_the_planned_number_is_what_the_users_send() -> None:
    options = LoadOptions(users=5, rate_per_s=50.0, duration_s=20.0, seed=3)
    planned = planned_requests(options, {"interactive": 1.0})
    assert planned == pytest.approx(1000, abs=130), "a Poisson count: four standard deviations"
    assert planned == planned_requests(options, {"interactive": 1.0})
    assert planned != planned_requests(replace(options, seed=4), {"interactive": 1.0})


def test_sizes_follow_the_trace_and_their_cap() -> None:
    dice = user_dice(1, 0)
    drawn = sorted(AZURE_CONV_PROMPTS.draw(dice) for _ in range(4000))
    assert drawn[2000] == pytest.approx(1020, rel=0.1)
    assert 1 <= drawn[0] <= drawn[-1] <= 4142
    assert {Lengths(100, 3.0, 7).draw(dice) for _ in range(50)} <= set(range(1, 8))


def test_other_medians_keep_the_spread_and_cut_at_four_times() -> None:
    options = LoadOptions().with_medians(60, None)
    assert options.prompts == Lengths(60, AZURE_CONV_PROMPTS.spread, 240)
    assert options.outputs == LoadOptions().outputs


def test_classes_come_by_their_shares() -> None:
    traffic = Traffic(100.0, classes={"interactive": 3.0, "batch": 1.0})
    classes = [arrival.latency_class for arrival in arrivals(traffic, Random(1), 40.0)]
    assert classes.count("interactive") / len(classes) == pytest.approx(0.75, abs=0.05)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="rate_per_s"):
        next(arrivals(Traffic(rate), Random(1)))


def test_prompts_weigh_what_they_should_and_share_no_prefix() -> None:
    dice = Random(1)
    prompts = [prompt_text(tokens, dice) for tokens in (1, 10, 1000)]
    assert [len(prompt.encode()) // 4 for prompt in prompts] == [1, 10, 1000]
    assert len({prompt[:3] for prompt in prompts}) == 3
