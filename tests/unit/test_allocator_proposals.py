"""Several planners on one world: nothing is booked twice, conflicts are told and planned again."""

from dataclasses import replace
from itertools import permutations
from random import Random

import pytest

from allocator.apply import replay
from allocator.events import ClaimMade, ConfigLoaded, JobSubmitted, RunPlaced, StopOrdered
from allocator.invariants import step_violations, violations
from allocator.model.jobs import Kind
from allocator.model.pools import Quota
from allocator.model.world import World
from allocator.plan import plan
from allocator.proposals import Proposal, commit
from tests.allocator_worlds import Stage, a_config, a_job, a_node, a_queue, a_stage, only

PLANNERS = {"training": frozenset({Kind.TRAINING}), "finetune": frozenset({Kind.FINETUNE}),
            "batch": frozenset({Kind.BATCH})}


def propose(world: World, planner: str, now_s: float) -> Proposal:
    planned = plan(world, now_s, kinds=PLANNERS[planner], housekeeping=planner == "training")
    return Proposal(planner, world.version, planned.events)


def crowded() -> Stage:
    """Eight devices, and twenty from each kind of job."""
    stage = a_stage(a_node("n"), a_node("m"), config=a_config(a_queue("a", v100=4), a_queue("b", v100=4)))
    rng = Random(3)
    return stage.submit(*(a_job(f"{kind.value}{n}", rng.choice("ab"), rng.randint(1, 3), kind=kind)
                          for kind in Kind for n in range(20)))


@pytest.mark.parametrize("order", list(permutations(PLANNERS)))
def test_three_planners_at_once_book_nothing_twice(order: tuple[str, ...]) -> None:
    """All plan on the same world. The first is taken whole, the others where they still can be, the rest replanned."""
    stage = crowded()
    world, journal = stage.world, list(stage.journal)
    proposals = [propose(world, planner, 0.0) for planner in order]
    wanted = [device for proposal in proposals for event in only(RunPlaced, list(proposal.events))
              for device in event.run.devices]
    assert len(wanted) > len(set(wanted)), "they do want the same devices"
    conflicts = 0
    for proposal in proposals:
        done = commit(world, proposal)
        for event in done.taken:
            after = replay(world, [event])
            assert step_violations(world, event, after) == []
            world = after
        assert world == done.world
        journal += done.taken
        conflicts += len(done.conflicts)
        for _, reason in done.conflicts:
            assert "held by run" in reason or "over its quota" in reason or "kept for" in reason
        if done.conflicts:
            again = commit(world, propose(world, proposal.planner, 0.0))
            assert again.conflicts == ()
            world = again.world
            journal += again.taken
        assert violations(world) == []
    assert conflicts > 0
    assert sum(len(run.devices) for run in world.runs.values()) == 8
    assert replay(stage.first, journal) == world
    assert len({run.epoch for run in world.runs.values()}) == len(world.runs)


def test_a_fresh_proposal_is_taken_as_it_is() -> None:
    stage = crowded()
    proposal = propose(stage.world, "training", 0.0)
    done = commit(stage.world, proposal)
    assert done.taken == proposal.events
    assert done.conflicts == ()


def test_F13_two_gangs_each_within_the_quota_are_not_together_over_it() -> None:
    stage = a_stage(a_node("n", devices=8), config=a_config(
        a_queue("a", v100=Quota(2.0, borrowing_limit=2.0)), a_queue("b", v100=6)))
    stage.submit(a_job("train", "a", 3), a_job("tune", "a", 3, kind=Kind.FINETUNE))
    first, second = (propose(stage.world, planner, 0.0) for planner in ("training", "finetune"))
    (other,) = only(RunPlaced, list(second.events))
    run = other.run
    moved = type(other)(at_s=0.0, why=other.why, run=type(run)(**{
        **{name: getattr(run, name) for name in run.__dataclass_fields__}, "devices": ("n:5", "n:6", "n:7")}))
    world = commit(stage.world, first).world
    done = commit(world, Proposal("finetune", second.version, (moved,)))
    assert done.taken == ()
    assert "over its quota" in done.conflicts[0][1]


def test_apply_alone_refuses_a_device_that_is_held_or_kept_for_another() -> None:
    stage = a_stage(a_node("n"), config=a_config(a_queue("a"), a_queue("b", v100=4)))
    stage.submit(a_job("a0", "a", 4), a_job("other", "a", 4))
    (event,) = only(RunPlaced, list(plan(stage.world, 0.0).events))
    twin = type(event)(at_s=0.0, why=event.why, run=replace(event.run, id="twin", job="other", epoch=9))
    stage.happens(event)
    assert "is held by run a0.1" in stage.refused(twin)
    stage.now_s = 10.0
    stage.submit_and_tick(a_job("b", "b", 4))
    stage.vacate("a0.1")
    assert "is kept for job b" in stage.refused(twin)


def test_a_claim_that_conflicts_stops_nobody() -> None:
    """The stops of a reclaim and its claim go in together or not at all."""
    stage = a_stage(a_node("n"), config=a_config(a_queue("a"), a_queue("b", v100=4)))
    stage.submit_and_tick(a_job("a0", "a", 2), a_job("a1", "a", 2))
    stage.now_s = 100.0
    stage.submit(a_job("b", "b", 4))
    proposal = propose(stage.world, "training", 100.0)
    assert len(only(StopOrdered, list(proposal.events))) == 2
    stage.ends("a0").submit(a_job("quick", "b", 2, kind=Kind.FINETUNE))
    world = commit(stage.world, propose(stage.world, "finetune", 100.0)).world
    assert any(run.job == "quick" for run in world.runs.values())
    done = commit(world, proposal)
    assert done.taken == ()
    assert len(done.conflicts) == 1
    assert all(run.stop_by_s is None for run in done.world.runs.values())


def test_I15_what_was_planned_under_another_config_is_planned_again() -> None:
    stage = crowded()
    proposal = propose(stage.world, "training", 0.0)
    stage.happens(ConfigLoaded(at_s=0.0, config=a_config(a_queue("a"), a_queue("b"), version="c1")))
    done = commit(stage.world, proposal)
    assert done.taken == ()
    assert "planned under config c0" in done.conflicts[0][1]


def test_news_that_touches_nobody_is_no_conflict() -> None:
    stage = crowded()
    proposal = propose(stage.world, "training", 0.0)
    stage.happens(JobSubmitted(at_s=0.0, job=a_job("late", "a")))
    done = commit(stage.world, proposal)
    assert done.conflicts == ()
    assert len(done.taken) == len(proposal.events)
    assert only(ClaimMade, list(done.taken)) == []
