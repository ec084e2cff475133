"""`headrace sim lending`: its parts against what they stand for, and the promise of issue 5 in the small."""

import json
from itertools import combinations
from math import ceil, inf
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from allocator.invariants import violations
from allocator.model.inventory import Supply
from allocator.model.world import World
from allocator.plan import Plan, plan
from allocator.recall import choose_cells, lost
from headrace import cli
from loadtest.sim.lending import cluster, validation
from loadtest.sim.lending.optimum import MOST_RUNS, least_loss
from loadtest.sim.lending.policies import DAY_MINUTES, POLICIES, day_of_minutes
from loadtest.sim.lending.router import HEADROOM, ByForecast, Reactive, Router, serving
from loadtest.sim.lending.runs import Recalls, asked_job, run_policy
from loadtest.sim.lending.series import DAY_S, LONGEST_S, demand_rates, jobs_of_run, minutes_of_demand, trace_jobs
from loadtest.sim.lending.serving import (
    MISS_TARGET,
    MISSES,
    miss_share,
    peak_per_s,
    pool_capacity_per_s,
    share_of_pool_needed,
    whole_pool,
)
from loadtest.sim.training.machines import Machines
from loadtest.sim.training.rows import Figures
from tests.allocator_worlds import a_job

# --- the optimum -----------------------------------------------------------------------------------------------------

placements = st.lists(st.tuples(st.integers(1, 50), st.sets(st.integers(0, 5), min_size=1, max_size=3)), max_size=7)


@given(placements, st.integers(0, 6))
def test_the_least_loss_is_that_of_the_best_set_of_loans(runs: list[tuple[int, set[int]]], need: int) -> None:
    loans = [f"l{index}" for index in range(6)]
    weights = {f"r{index}": float(weight) for index, (weight, _) in enumerate(runs)}
    lies_on = {f"r{index}": {f"l{loan}" for loan in on} for index, (_, on) in enumerate(runs)}
    under = {loan: [run for run, on in lies_on.items() if loan in on] for loan in loans}
    best = min((lost(chosen, weights, under) for chosen in combinations(loans, need)), default=inf)
    found = least_loss(need, loans, weights, lies_on)
    assert found == best
    greedy = lost(choose_cells(need, dict.fromkeys(loans, 1.0), weights, lies_on), weights, under)
    assert greedy >= found


def test_a_part_too_large_to_be_sure_of_is_not_guessed() -> None:
    runs = [f"r{index}" for index in range(MOST_RUNS + 1)]
    assert least_loss(1, ["l"], dict.fromkeys(runs, 1.0), {run: {"l"} for run in runs}) is None


# --- serving ---------------------------------------------------------------------------------------------------------


def test_the_share_that_is_needed_is_the_one_at_which_as_many_requests_miss_as_may() -> None:
    count = sum(whole_pool().values())
    for per_s in (20.0, 60.0, peak_per_s()):
        share = share_of_pool_needed(per_s)
        load = per_s / (share * pool_capacity_per_s(whole_pool()))
        slack = (1.0 - load) * (share * count) ** 0.5
        below = max(x for x, _ in MISSES if x <= slack)
        above = min(x for x, _ in MISSES if x >= slack)
        assert dict(MISSES)[below] >= MISS_TARGET >= dict(MISSES)[above]
    assert share_of_pool_needed(peak_per_s()) == pytest.approx(1.0)


@given(st.floats(0.05, 3.0), st.floats(0.05, 3.0), st.integers(1, 40))
def test_more_load_never_misses_less_and_more_replicas_never_more(one: float, other: float, replicas: int) -> None:
    low, high = sorted((one, other))
    assert miss_share(low, replicas) <= miss_share(high, replicas) + 1e-12
    if high <= 1.0:
        assert miss_share(high, replicas + 1) <= miss_share(high, replicas) + 1e-12
    assert 0.0 < miss_share(high, replicas) <= 1.0


def test_no_replica_serves_nobody() -> None:
    assert miss_share(0.5, 0) == 1.0


def test_the_stand_in_is_near_the_simulation_of_each_request() -> None:
    found = validation.compare(pools=({"h100": 2, "a100": 8},), loads=(0.75,), seconds=120.0)
    assert found.agrees(), found.points
    assert all(point.requests > 1500 for point in found.points)


# --- series ----------------------------------------------------------------------------------------------------------


def test_the_demand_has_days_and_nights_and_no_gaps() -> None:
    for scenario, least in (("diurnal", 2.0), ("surges", 1.5)):
        rates = demand_rates(scenario)
        hours = [sum(rates[day * 144 + 6 * hour + step] for day in range(14) for step in range(6))
                 for hour in range(24)]
        assert len(rates) == 14 * 144
        assert min(rates) > 0.0
        assert max(hours) > least * min(hours)
    assert max(demand_rates("surges")) > 2.0 * max(demand_rates("diurnal"))


def test_the_busiest_ten_minutes_ask_for_the_peak() -> None:
    minutes = minutes_of_demand("diurnal", 14.0, 100.0, Random(1))
    tens = [sum(minutes[first:first + 10]) / 10 for first in range(0, len(minutes), 10)]
    assert len(minutes) == 14 * DAY_MINUTES
    assert max(tens) == pytest.approx(100.0, rel=0.03)


@pytest.mark.parametrize("seed", [1, 3, 77])
def test_jobs_bring_the_work_that_was_asked_for_in_the_order_of_their_arrival(seed: int) -> None:
    jobs = jobs_of_run(seed, 14.0, 50.0)
    work_s = sum(job.gang * job.duration_s for job in jobs)
    assert work_s == pytest.approx(50.0 * 14.0 * DAY_S, rel=0.05)
    assert [job.arrival_s for job in jobs] == sorted(job.arrival_s for job in jobs)
    assert jobs[0].arrival_s >= 0.0
    assert jobs[-1].arrival_s < 14.0 * DAY_S
    assert max(job.duration_s for job in jobs) <= LONGEST_S
    assert sum(job.gang >= 16 for job in trace_jobs()) > 100


# --- policies --------------------------------------------------------------------------------------------------------


def test_an_autoscaler_gives_up_replicas_slowly_and_takes_them_back_at_once() -> None:
    lending = Reactive()
    lending.learn(100.0)
    for _ in range(4):
        lending.learn(20.0)
    still = lending.supply("a100", 32)
    lending.learn(20.0)
    calm = lending.supply("a100", 32)
    lending.learn(100.0)
    back = lending.supply("a100", 32)
    assert still is not None
    assert calm is not None
    assert back is not None
    assert still.lendable < calm.lendable
    assert still.spare == calm.spare
    assert back.spare == still.lendable


def test_what_demand_needs_and_the_headroom_are_never_lent() -> None:
    lending = ByForecast(day_of_minutes(), 7200.0, 120.0)
    for _ in range(4 * DAY_MINUTES):
        lending.learn(40.0)
    needed = {card: ceil(share_of_pool_needed(40.0) * cluster.replicas(card)) for card in cluster.SERVING_NODES}
    for card, count in needed.items():
        supply = lending.supply(card, cluster.replicas(card))
        assert supply is not None
        assert supply.lendable == supply.spare == cluster.replicas(card) - count - HEADROOM.get(card, 0)


# --- whole runs ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_days() -> dict[str, Figures]:
    policies = ("no_lending", "headrace", "kueue_like")
    return {policy: run_policy("diurnal", policy, 1, 2.0).figures for policy in policies}


def test_lending_shortens_queues_and_jobs_and_no_request_pays_for_it(two_days: dict[str, Figures]) -> None:
    alone, lending = two_days["no_lending"], two_days["headrace"]
    assert lending.p99_breach is not None
    assert alone.p99_breach is not None
    assert lending.utilisation is not None
    assert alone.utilisation is not None
    assert lending.unit_cost is not None
    assert alone.unit_cost is not None
    assert alone.queue_wait_mean_s >= 1.6 * lending.queue_wait_mean_s
    assert alone.jct_mean_s >= 1.3 * lending.jct_mean_s
    assert lending.p99_breach <= alone.p99_breach + 0.001
    assert lending.utilisation > alone.utilisation
    assert lending.unit_cost < alone.unit_cost


def test_recalls_are_kept_on_time_and_lose_little(two_days: dict[str, Figures]) -> None:
    lending, kueue = two_days["headrace"], two_days["kueue_like"]
    assert lending.recalls is not None
    assert lending.recall_p99_s is not None
    assert lending.lost_over_optimum is not None
    assert kueue.lost_over_optimum is not None
    assert lending.recalls > 0
    assert lending.overdue == 0
    assert lending.recall_p99_s <= POLICIES["headrace"].rules.grace_s
    assert 1.0 <= lending.lost_over_optimum <= 1.15
    assert kueue.lost_over_optimum > lending.lost_over_optimum


def test_who_lends_nothing_recalls_nothing(two_days: dict[str, Figures]) -> None:
    alone = two_days["no_lending"]
    assert (alone.recalls, alone.overdue, alone.lost_device_h) == (0, 0, 0.0)
    assert alone.recall_p99_s is alone.lost_over_optimum is None


@pytest.mark.parametrize("policy", ["headrace", "kueue_like"])
def test_no_invariant_of_the_allocator_is_broken_on_the_way(policy: str) -> None:
    chosen = POLICIES[policy]
    machines = Machines(cluster.first_world(chosen.rules, {}), chosen.planner)
    lending = chosen.lending()
    minutes = minutes_of_demand("surges", 4.0, peak_per_s(), Random(2))
    for per_s in minutes[:3 * DAY_MINUTES]:
        lending.learn(per_s)
    Router(machines, minutes[3 * DAY_MINUTES:], lending)
    Recalls(machines)
    for number, job in enumerate(jobs_of_run(2, 1.0, 120.0)):
        machines.submit(asked_job(f"j{number}", job, Random(number)), job.arrival_s, job.duration_s * job.gang)
    lent: set[str] = set()

    def look(before: World, planned: Plan, now_s: float) -> None:
        assert violations(planned.world) == []
        lent.update(planned.world.loans)

    machines.on_plan = look
    machines.run(until=lambda: machines.now_s > DAY_S)
    assert len(lent) > 5


class TenAnHour:
    """Lends ten A100 replicas for the first hour of the run, and none after."""

    def __init__(self) -> None:
        self.minutes = 0

    def learn(self, per_s: float) -> None:
        self.minutes += 1

    def supply(self, card: str, healthy: int) -> Supply | None:
        count = 10 if card == "a100" and self.minutes < 60 else 0
        return Supply(cluster.INFERENCE, card, count, count)


def test_after_a_recall_of_all_the_whole_pool_serves_again_in_notice_probe_and_reload() -> None:
    machines = Machines(cluster.first_world(POLICIES["headrace"].rules, {}), plan)
    router = Router(machines, (10.0,) * 120, TenAnHour())
    for number in range(20):
        machines.submit(a_job(f"j{number}", cluster.QUEUE, 4, family="A3C", cards=("a100",), work_unit_s=40_000.0),
                        10.0, 40_000.0)
    machines.run(until=lambda: machines.now_s >= 3540.0)
    assert serving(machines.world) == {"a100": 22, "h100": 8}
    rules = POLICIES["headrace"].rules
    back_s = 3600.0 + rules.grace_s + machines.delays.probe_s + cluster.RELOAD_S["a100"]
    machines.run(until=lambda: machines.now_s >= back_s)
    assert serving(machines.world) == whole_pool()
    assert machines.world.loans == {}
    machines.run(until=lambda: machines.now_s >= 7200.0)
    assert router.asked == 120 * 60 * 10.0


def test_nodes_that_train_for_good_serve_no_more() -> None:
    world = cluster.first_world(POLICIES["static_split"].rules, {"a100": 3})
    assert len(world.backends) == 40 - 12
    assert sum(node.pool == cluster.TRAINING for node in world.nodes.values()) == 8 + 3


# --- the command -----------------------------------------------------------------------------------------------------


def invoke(*arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(cli.app, ["sim", "lending", *arguments])
    return done.exit_code, done.stdout, done.stderr


def test_the_command_prints_rows_and_draws_a_page_the_same_every_time(tmp_path: Path) -> None:
    asked = ("diurnal", "--policies", "no_lending,headrace", "--seeds", "1", "--days", "1")
    code, printed, _ = invoke(*asked, "--json", "--html", str(tmp_path / "page.html"))
    document = json.loads(printed)
    assert code == 0
    assert [(row["scenario"], row["policy"]) for row in document["rows"]] == [
        ("diurnal", "no_lending"), ("diurnal", "headrace")]
    assert (tmp_path / "page.html").read_text("utf-8").count("<svg") == 3
    assert json.loads((tmp_path / "page.json").read_text("utf-8")) == document
    assert invoke(*asked, "--json", "--jobs", "2")[1] == printed


@pytest.mark.parametrize(("arguments", "told"), [
    (("nocturnal",), "diurnal"), (("--policies", "kueue"), "kueue_like"), (("--seeds", "x"), "1-5"),
    (("--days", "0.5"), "a day at least"),
])
def test_what_is_wrong_is_told(arguments: tuple[str, ...], told: str) -> None:
    code, _, error = invoke(*arguments)
    assert code == 2
    assert told in error


def test_the_load_is_the_work_that_jobs_bring() -> None:
    rows = [json.loads(invoke("--policies", "no_lending", "--seeds", "1", "--days", "1", "--load", load, "--json")[1])
            ["rows"][0] for load in ("0.5", "1.5")]
    assert rows[0]["queue_wait_mean_s"] < rows[1]["queue_wait_mean_s"]
