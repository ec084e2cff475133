"""Random events against I1 to I15: as many seeds as fit into the time of a test run. For more, and for long::

    python -m allocator.soak --seeds 10000
"""

import json
import os
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allocator.apply import apply
from allocator.events import BadEvent, ClaimMade, Event, LoanOffered, RunStarted, from_json, to_json
from allocator.invariants import violations
from allocator.plan import plan
from allocator.soak import tick
from allocator.soak.__main__ import main
from allocator.soak.machine import Seed, run_seed
from tests.allocator_worlds import Stage, a_job, a_node, a_stage

SEEDS = int(os.environ.get("HEADRACE_SOAK_SEEDS", "60"))
STEPS = 200


@pytest.fixture(scope="module")
def soaked() -> list[Seed]:
    return [run_seed(seed, STEPS) for seed in range(SEEDS)]


def test_F20_no_seed_breaks_an_invariant(soaked: list[Seed]) -> None:
    broken = {result.seed: result.found[:3] for result in soaked if result.found}
    assert broken == {}


def test_the_seeds_do_see_what_they_are_for(soaked: list[Seed]) -> None:
    """Loans, recalls kept and missed, reclaims: a soak in which nothing happens holds nothing."""
    for name in ("placed", "lent", "recalled", "returned", "overdue", "reclaimed"):
        assert sum(getattr(result, name) for result in soaked) >= SEEDS // 10, name


@settings(max_examples=10, deadline=None)
@given(st.integers(min_value=1_000_000), st.integers(1, 40))
def test_any_seed_at_all(seed: int, steps: int) -> None:
    """Hypothesis looks for a seed that breaks something, and shrinks it."""
    assert run_seed(seed, steps).found == []


def test_a_seed_is_the_same_each_time() -> None:
    assert run_seed(5, 60) == run_seed(5, 60)


def test_the_soak_finds_a_planner_that_books_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: `apply` that does not look whether a device is held. The soak must not stay silent."""
    from allocator.applying import jobs
    from allocator.model.world import World
    monkeypatch.setattr(jobs, "_placement_fault", lambda world, state, run: None)
    monkeypatch.setattr(World, "holders", property(lambda world: {}))
    assert any("I1" in found for seed in range(5) for found in run_seed(seed, 100).found)


def test_the_command_prints_one_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "2", "--steps", "20", "--workers", "1", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["scenario"], row["seeds"], row["broken"]) == ("allocator_soak", 2, 0)
    assert row["events"] > 40


def a_journal() -> list[Event]:
    stage = a_stage(a_node("n"), a_node("i", pool="inference"), backends=2).supply(2)
    stage.submit_and_tick(a_job("j", gang=6, cards=("v100", "p100")))
    stage.obey().tick()
    stage.obey().ends("j")
    return stage.journal


def test_events_go_to_json_and_back() -> None:
    journal = a_journal()
    assert len({type(event) for event in journal}) > 8
    assert [from_json(to_json(event)) for event in journal] == journal


@pytest.mark.parametrize("text", [b"", b"{}", b'{"event": "moon_landing"}', b'{"event": "run_started", "run": 3}'])
def test_what_is_no_event_is_told(text: bytes) -> None:
    with pytest.raises(BadEvent, match="not an event"):
        from_json(text)


@given(st.lists(st.integers(0, 200), max_size=60), st.floats(0, 2000))
def test_any_subset_of_a_journal_in_any_order_is_taken_without_error(picks: list[int], now_s: float) -> None:
    journal = a_journal()
    first = Stage(a_stage().world).world
    world = first
    for pick in picks:
        world = apply(world, journal[pick % len(journal)])
    plan(world, now_s)


def test_time_that_is_no_number_changes_nothing() -> None:
    world = a_stage(a_node("n")).world
    assert apply(world, RunStarted(at_s=float("nan"), run="x", epoch=1)) is world
    assert replace(world, version=world.version) == world


@pytest.mark.parametrize(("case", "wanted"), [("backfill", None), ("reclaim", ClaimMade), ("fragments", ClaimMade),
                                              ("lending", LoanOffered)])
def test_the_clusters_that_ticks_are_measured_on_are_full_and_as_they_are_called(
    case: str, wanted: type[Event] | None
) -> None:
    world, now_s = tick.busy_world(case, nodes=6, waiting=20)
    own = [node for node in world.nodes.values() if node.pool == "training"]
    assert sum(node.devices for node in own) == len(world.holders) == 48
    assert sum(state.run is None for state in world.jobs.values()) == 20
    planned = plan(world, now_s)
    assert planned.refused == ()
    assert wanted is None or any(isinstance(event, wanted) for event in planned.events)
    assert violations(planned.world) == []
    assert tick.busy_world(case, nodes=6, waiting=20) == (world, now_s)


def test_the_tick_command_prints_one_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert tick.main(["--nodes", "4", "--waiting", "5", "--seeds", "1"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["scenario"] == "allocator_tick"
    assert all(row[case]["worst_ms"] >= row[case]["median_ms"] > 0.0 for case in tick.CASES)
