"""`headrace sim training`: the jobs are Gavel's, the physics are plain, and the promise of issue 5 is kept."""

import json
from pathlib import Path
from statistics import mean

import pytest
from typer.testing import CliRunner

from allocator.apply import apply
from allocator.events import JobCancelled, NodeReported
from allocator.model.jobs import Checkpoint
from allocator.model.world import new_world
from allocator.plan import plan
from allocator.units.load import shipped
from headrace import cli
from loadtest.sim.training.gavel import CARDS, FAMILIES, PUBLISHED_JCT_H, draw_jobs
from loadtest.sim.training.machines import Machines
from loadtest.sim.training.rounds import replay_fifo_perf
from loadtest.sim.training.rows import FIGURES, cumulated, quantile
from loadtest.sim.training.runs import POLICIES, run_policy, soonest_jct_s
from tests.allocator_worlds import a_config, a_job, a_node

HOUR_S = 3600.0
FIELDS = ["scenario", "policy", "seeds", "queue_wait_mean_s", "queue_wait_p95_s", "gang16_wait_mean_s", "jct_mean_s",
          "jct_p95_s", "utilisation", "unit_cost", "recalls", "recall_p99_s", "overdue", "lost_device_h",
          "lost_over_optimum", "p99_breach"]
"""As issue 5 names them."""


# --- the jobs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1])
def test_the_jobs_are_gavels_for_its_own_policy_comes_to_its_published_mean(seed: int) -> None:
    hours = mean(replay_fifo_perf(draw_jobs(seed, 1200), shipped()).values()) / HOUR_S
    assert round(hours, 1) == PUBLISHED_JCT_H["gavel fifo_perf"][seed]


def test_every_family_of_a_job_was_measured_on_every_card() -> None:
    assert len(FAMILIES) == 26
    assert all(shipped().speeds[family][card][1] > 0.0 for family, _ in FAMILIES for card in CARDS)


# --- the promise -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["headrace", "headrace_untold"])
@pytest.mark.parametrize("seed", [0, 1])
def test_jobs_that_stay_on_one_card_type_end_no_later_than_by_the_best_of_gavels_policies(policy: str,
                                                                                          seed: int) -> None:
    hours = run_policy(policy, seed, 2.0).figures.jct_mean_s / HOUR_S
    assert hours <= PUBLISHED_JCT_H["gavel max_min_fairness_perf"][seed]
    assert hours <= PUBLISHED_JCT_H["gavel fifo_perf"][seed]
    assert hours >= soonest_jct_s(seed, 2.0) / HOUR_S


def test_choosing_by_measured_speed_beats_dice() -> None:
    by_dice, ours = (run_policy(policy, 1, 2.0).figures for policy in ("fifo", "headrace"))
    assert ours.jct_mean_s < 0.8 * by_dice.jct_mean_s


# --- the machines ----------------------------------------------------------------------------------------------------


def one_card(checkpoint: Checkpoint) -> Machines:
    world = new_world(a_config(), shipped())
    world = apply(world, NodeReported(at_s=0.0, node=a_node("n", devices=1), evidence="new"))
    machines = Machines(world, plan)
    machines.submit(a_job("j", checkpoint=checkpoint), 100.0, 600.0)
    return machines


def all_done(machines: Machines) -> bool:
    return all(story.ended_s is not None for story in machines.stories.values())


def test_a_job_alone_takes_its_work_over_the_speed_of_its_card() -> None:
    machines = one_card(Checkpoint())
    machines.run(until=lambda: all_done(machines))
    story = machines.stories["j"]
    assert (story.ended_s, story.waited_s, story.cards) == (700.0, 0.0, ["v100"])
    assert machines.lost_device_s == 0.0


def test_who_waits_is_told_apart_from_who_runs() -> None:
    machines = one_card(Checkpoint())
    machines.submit(a_job("later"), 150.0, 600.0)
    machines.run(until=lambda: all_done(machines))
    assert machines.stories["later"].waited_s == 550.0
    assert machines.stories["later"].ended_s == 1300.0


@pytest.mark.parametrize(("takes_s", "gone_s", "done_unit_s", "lost_device_s"), [
    (20.0, 420.0, 300.0, 20.0),    # it writes what it has, and is gone
    (500.0, 456.0, 200.0, 156.0),  # it would be writing still: killed, and back at the checkpoint of second 300
])
def test_a_stop_costs_the_time_to_write_or_else_the_work_since_the_last_checkpoint(
        takes_s: float, gone_s: float, done_unit_s: float, lost_device_s: float) -> None:
    machines = one_card(Checkpoint(every_s=200.0, takes_s=takes_s, restart_s=30.0))
    machines.at(400.0, lambda now_s: [JobCancelled(at_s=now_s, job="j")])
    machines.run(until=lambda: machines.now_s >= 400.0 and not machines.world.runs)
    assert machines.now_s == gone_s
    assert machines.stories["j"].done_unit_s == done_unit_s
    assert machines.lost_device_s == lost_device_s


def test_a_stretch_ends_where_its_work_is_safe() -> None:
    machines = one_card(Checkpoint(every_s=200.0, takes_s=500.0))
    machines.at(400.0, lambda now_s: [JobCancelled(at_s=now_s, job="j")])
    machines.run(until=lambda: machines.now_s >= 400.0 and not machines.world.runs)
    assert [(each.from_s, each.to_s) for each in machines.stretches] == [(100.0, 300.0)]


def test_late_news_of_a_run_changes_nothing() -> None:
    machines = one_card(Checkpoint())
    machines.run(until=lambda: all_done(machines))
    before = machines.world
    machines.take(JobCancelled(at_s=900.0, job="j"))
    assert machines.world is before


# --- rows and the command --------------------------------------------------------------------------------------------


def test_a_quantile_is_a_value_that_so_many_are_not_over() -> None:
    assert quantile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.0
    assert quantile([4.0, 1.0, 3.0, 2.0], 0.95) == 4.0
    assert cumulated([3600.0, 7200.0])[-1] == (2.0, 1.0)


def invoke(*arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(cli.app, ["sim", "training", *arguments])
    return done.exit_code, done.stdout, done.stderr


def test_the_command_prints_rows_with_the_names_that_were_promised() -> None:
    code, printed, _ = invoke("--policies", "fifo,headrace", "--seeds", "1", "--json")
    document = json.loads(printed)
    assert code == 0
    assert [list(row) for row in document["rows"]] == [FIELDS, FIELDS]
    assert list(FIGURES) == FIELDS[3:]
    assert [row["policy"] for row in document["rows"]] == ["fifo", "headrace"]
    assert document["published_jct_mean_h"]["gavel max_min_fairness_perf"] == [13.9, 12.3]
    again = invoke("--policies", "fifo,headrace", "--seeds", "1", "--json", "--jobs", "2")
    assert again[1] == printed


def test_the_table_has_published_figures_only_beside_the_same_seeds() -> None:
    _, beside, _ = invoke("--policies", "fifo_fastest", "--seeds", "0,1")
    _, alone, _ = invoke("--policies", "fifo_fastest", "--seeds", "1")
    assert "gavel max_min_fairness_perf    13.9    12.3" in beside
    assert "gavel" not in alone.replace("Gavel's jobs", "")


def test_an_unknown_policy_is_told_with_those_there_are() -> None:
    code, _, told = invoke("--policies", "sjf")
    assert code == 2
    assert "'sjf'" in told
    assert all(name in told for name in POLICIES)


def test_the_page_shows_the_curves(tmp_path: Path) -> None:
    code, _, _ = invoke("--policies", "headrace", "--seeds", "1", "--html", str(tmp_path / "sub" / "page.html"))
    page = (tmp_path / "sub" / "page.html").read_text("utf-8")
    assert code == 0
    assert page.count("<polyline") == 1
    assert json.loads((tmp_path / "sub" / "page.json").read_text("utf-8"))["rows"][0]["policy"] == "headrace"
