"""From outcomes to figures, rows, tables and pages."""

import json
from dataclasses import replace

import pytest

from loadtest.sim.capacity import crossing, parse_rates
from loadtest.sim.charts import html
from loadtest.sim.flight import Fate, Outcome
from loadtest.sim.measures import CDF_POINTS, TIME_BINS, Measures, measure
from loadtest.sim.rows import Row, gather
from loadtest.sim.run import Job, SimError, parse_seeds, policy_spec, run_job, run_world
from loadtest.sim.showing import as_json, cells, columns
from loadtest.sim.workload import SimRequest
from loadtest.sim.world import World

ISSUE_ROW = [
    "scenario", "policy", "seeds", "in_budget", "late", "shed", "lost", "cost_per_1k_in_budget", "ttft_p50_s",
    "ttft_p99_s", "itl_p99_s", "shares", "coverage_p99", "decision_us", "cost_over_bound", "goodput_over_bound",
]


@pytest.fixture(scope="module")
def world() -> World:
    return run_world(Job("burst", "site", "p2c", 1, 3.0, 60.0))


@pytest.fixture(scope="module")
def run() -> Measures:
    return run_job(Job("burst", "site", "headrace", 1, 4.0, 60.0))


def outcome(at_s: float, *, fate: Fate = Fate.SERVED, first_s: float | None = 0.2, end_s: float = 1.0,
            in_budget: bool = True, latency_class: str = "chat", p99_s: float | None = None) -> Outcome:
    request = SimRequest(at_s, latency_class, 100, 11)
    first_token_at_s = None if first_s is None else at_s + first_s
    return Outcome(request, fate, 0, first_token_at_s, at_s + end_s, 1, 0.002, 0, p99_s, None, None, in_budget)


def of(world: World, *outcomes: Outcome) -> Measures:
    world.outcomes = list(outcomes)
    return measure(world)


def test_shares_count_everything_that_arrives_after_the_warm_up(world: World) -> None:
    found = of(
        world, outcome(10.0, in_budget=False),
        outcome(31.0), outcome(32.0), outcome(33.0, in_budget=False, latency_class="code"),
        outcome(34.0, fate=Fate.SHED, first_s=None, in_budget=False),
        outcome(35.0, fate=Fate.LOST, in_budget=False),
    )
    assert found.requests == 5
    assert (found.in_budget, found.late, found.shed, found.lost) == pytest.approx((0.4, 0.2, 0.2, 0.2))
    assert found.in_budget + found.late + found.shed + found.lost == pytest.approx(1.0)
    assert found.by_class == {"chat": 0.5, "code": 0.0}
    assert found.worst_class == 0.0
    assert found.cost_per_1k_in_budget == pytest.approx(1000 * 5 * 0.002 / 2)
    assert found.itl_p99_s == pytest.approx(0.08)


def test_coverage_is_the_share_within_the_predicted_p99(world: World) -> None:
    found = of(world, outcome(31.0, p99_s=0.3), outcome(32.0, p99_s=0.1), outcome(33.0, p99_s=0.25),
               outcome(34.0))
    assert found.coverage_p99 == pytest.approx(2 / 3)
    assert of(world, outcome(31.0)).coverage_p99 is None


def test_the_token_deadline_lets_an_early_first_token_be_spent_later() -> None:
    world = run_world(Job("steady", "site", "least_inflight", 1, 3.0, 60.0))
    for one in world.outcomes:
        budget = world.workload.classes[one.request.latency_class].budget
        assert one.first_token_at_s is not None
        assert budget.ttft_s is not None
        assert budget.inter_token_s is not None
        first = one.first_token_at_s - one.request.arrival_s <= budget.ttft_s
        last = (one.end_s - one.request.arrival_s
                <= budget.ttft_s + (one.request.output_tokens - 1) * budget.inter_token_s)
        assert one.in_budget == (first and last)


def test_a_run_that_counts_nothing_says_so() -> None:
    with pytest.raises(SimError, match="no request after the warm-up"):
        run_job(Job("steady", "site", "p2c", 1, 0.001, 31.0))


def test_measures_have_their_shapes(run: Measures) -> None:
    assert len(run.ttft_cdf) == CDF_POINTS
    assert list(run.ttft_cdf) == sorted(run.ttft_cdf)
    assert len(run.timeline) == TIME_BINS
    assert sum(run.shares.values()) == pytest.approx(1.0)
    assert set(run.shares) == set(run.share_timelines) == set(run.busy)
    assert run.decision_us > 0
    assert run.coverage_p99 is not None, "the policy gives a P99 with each prediction"
    assert set(run.coverage) <= set(run.shares)
    cells = [(name, tally) for row in run.coverage.values() for name, tally in row.items()]
    assert {name for name, _ in cells} <= set(run.by_class)
    assert sum(tally.within for _, tally in cells) / sum(tally.of for _, tally in cells) == pytest.approx(
        run.coverage_p99)
    for backend, bins in run.coverage_timelines.items():
        assert len(bins) == TIME_BINS
        assert sum(tally.of for tally in bins) == sum(tally.of for tally in run.coverage.get(backend, {}).values())


def row(run: Measures, *, cost_over_bound: float | None = None) -> Row:
    other = replace(run, in_budget=run.in_budget / 2, cost_per_1k_in_budget=None)
    return Row("burst", "head<race", "site", 4.0, 60.0, (1, 2), (run, other), cost_over_bound, events={"crowd": 30.0})


def test_a_row_is_the_one_that_the_issue_names(run: Measures) -> None:
    found = row(run).as_json()
    assert list(found) == ISSUE_ROW
    assert found["in_budget"] == pytest.approx(0.75 * run.in_budget)
    assert found["cost_per_1k_in_budget"] == pytest.approx(run.cost_per_1k_in_budget)
    assert found["decision_us"] is None
    assert row(run).as_json(timing=True)["decision_us"] == pytest.approx(run.decision_us, rel=1e-6)
    assert found["cost_over_bound"] is None
    whole = as_json([row(run)])
    assert json.loads(json.dumps(whole)) == whole
    assert row(run).sd("in_budget") == pytest.approx(run.in_budget / 2 / 2**0.5)
    assert row(run).sd("cost_per_1k_in_budget") is None


def test_results_go_to_their_rows(run: Measures) -> None:
    other = replace(run, in_budget=0.5)
    rows = gather([("burst", "a", "site", 1.0, 60.0, (1, 2)), ("burst", "b", "site", 1.0, 60.0, (1, 2))],
                  [run, run, other, other], {"burst": {"x": 1.0}})
    assert [found.mean("in_budget") for found in rows] == [run.in_budget, 0.5]


def test_the_table_shows_the_bound_where_there_is_one(run: Measures) -> None:
    plain, bounded = row(run), row(run, cost_over_bound=1.2)
    assert len(cells(plain, bounded=False)) == len(columns([plain])) + 1
    assert len(cells(bounded, bounded=True)) == len(columns([plain, bounded])) + 1
    assert "1.20" in cells(bounded, bounded=True)


def test_the_page_stands_alone_and_escapes_names(run: Measures) -> None:
    page = html([row(run), replace(row(run), policy="p2c")])
    assert page.count("<svg") == 4
    assert "head&lt;race" in page
    assert "head<race" not in page
    for foreign in ("<script", "http:", "https:", "src="):
        assert foreign not in page


@pytest.mark.parametrize(("curve", "expected"), [
    ([(1, 1.0), (2, 0.995), (4, 0.985)], 3.0), ([(1, 0.98), (2, 0.97)], None), ([(1, 0.995), (2, 0.99)], 2.0),
    ([(1, 0.98), (2, 0.995), (3, 0.985)], 2.5), ([], None),
])
def test_capacity_lies_where_the_curve_crosses(curve: list[tuple[float, float]], expected: float | None) -> None:
    found = crossing(curve, 0.99)
    assert found == (None if expected is None else pytest.approx(expected))


@pytest.mark.parametrize(("text", "expected"), [("1-3", (1, 2, 3)), ("7", (7,)), ("1-2,2,9", (1, 2, 9))])
def test_seeds(text: str, expected: tuple[int, ...]) -> None:
    assert parse_seeds(text) == expected


@pytest.mark.parametrize("text", ["", "a", "3-1", "1-", "-1", "1-100000", "1.5"])
def test_seeds_that_are_none(text: str) -> None:
    with pytest.raises(SimError, match="seeds"):
        parse_seeds(text)


def test_rates_rise() -> None:
    assert parse_rates("8,2,2.5") == (2.0, 2.5, 8.0)
    for text in ("x", "0,1", ","):
        with pytest.raises(SimError, match="rates"):
            parse_rates(text)


def test_policies_take_settings() -> None:
    assert policy_spec("cheapest_feasible:margin=1.5").settings == {"margin": 1.5}
    for text in ("nobody", "p2c:x=1", "cheapest_feasible:margin", "cheapest_feasible:margin=lots"):
        with pytest.raises(SimError, match=text.partition(":")[0]):
            policy_spec(text)
