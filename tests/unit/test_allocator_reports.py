"""What engines and lenders report, as events: pure."""

from dataclasses import replace

import pytest

from allocator.apply import consider
from allocator.effects import EffectKind
from allocator.events import (
    BackendGone,
    BackendReported,
    CheckpointAcknowledged,
    Event,
    RunBroke,
    RunExited,
    RunReachable,
    RunStarted,
    SupplyReported,
)
from allocator.execution.devices import Device
from allocator.execution.values import Evidence, Holder, MemberReport, Released, ReleaseProof, Report, RunState
from allocator.model.inventory import Backend, BackendState, Supply
from allocator.model.jobs import Outcome, RunPhase
from allocator.model.world import World
from allocator.service.job_request import Saved
from allocator.service.lender import Seen
from allocator.service.reconcile import lender_events
from allocator.service.reports import evidence_of, is_last_word, observed, strangers
from tests.allocator_worlds import Stage, a_job, a_node, a_stage, lent_stage

STARTED_S = 100.0


def running_stage() -> Stage:
    stage = a_stage(a_node("n0"))
    stage.submit_and_tick(a_job("j", gang=2))
    stage.now_s = STARTED_S
    return stage.obey(EffectKind.START)


def events_of(world: World, *reports: Report, starting: tuple[str, ...] = (), steps: int | None = None,
              now_s: float = 200.0) -> list[Event]:
    known = {"j": steps} if steps else {}
    return [one.event for one in observed(world, {report.run_id: report for report in reports}, starting, now_s, known)]


def report(state: RunState, acknowledged: bool = False, step: int | None = None) -> Report:
    members = tuple(MemberReport(rank, alive=False, acknowledged=acknowledged, resume_from=f"/ck/{rank}", step=step)
                    for rank in range(2))
    return Report("j.1", state, 1, members)


@pytest.mark.parametrize(("state", "outcome"), [
    (RunState.COMPLETED, Outcome.COMPLETED), (RunState.STOPPED, Outcome.STOPPED), (RunState.KILLED, Outcome.STOPPED),
    (RunState.FAILED, Outcome.FAILED), (RunState.CHECKPOINTED, Outcome.STOPPED),
])
def test_a_run_that_is_over_has_exited_and_its_devices_are_another_matter(state: RunState, outcome: Outcome) -> None:
    stage = running_stage()
    (event,) = events_of(stage.world, report(state))
    assert isinstance(event, RunExited)
    assert event.outcome is outcome
    stage.happens(event)
    assert stage.run_of("j").devices
    assert events_of(stage.world, report(state)) == []


def test_an_error_after_the_order_to_go_is_no_crash() -> None:
    stage = lent_stage(replicas=1, gang=4)
    stage.supply(0)
    stage.tick(50.0)
    run = stage.run_of("j")
    (event,) = events_of(stage.world, Report(run.id, RunState.FAILED, run.epoch))
    assert isinstance(event, RunExited)
    assert event.outcome is Outcome.STOPPED


def test_a_gang_is_up_once_and_broken_once() -> None:
    stage = a_stage(a_node("n0"))
    stage.submit_and_tick(a_job("j", gang=2))
    assert events_of(stage.world, report(RunState.STARTING)) == []
    (started,) = events_of(stage.world, report(RunState.RUNNING))
    assert isinstance(started, RunStarted)
    stage.happens(started)
    assert events_of(stage.world, report(RunState.RUNNING)) == []
    (broke,) = events_of(stage.world, report(RunState.BROKEN))
    assert isinstance(broke, RunBroke)
    stage.happens(broke)
    assert events_of(stage.world, report(RunState.BROKEN)) == []


def test_a_start_that_failed_is_a_broken_gang() -> None:
    stage = a_stage(a_node("n0"))
    stage.submit_and_tick(a_job("j"))
    (event,) = events_of(stage.world, replace(report(RunState.NOT_STARTED), note="no program"))
    assert isinstance(event, RunBroke)
    assert event.detail == "no program"


def test_unknown_is_neither_gone_nor_there() -> None:
    """F14."""
    stage = running_stage()
    (event,) = events_of(stage.world, report(RunState.UNKNOWN))
    assert event == RunReachable(at_s=200.0, run="j.1", epoch=1, reachable=False)
    stage.happens(event)
    assert events_of(stage.world, report(RunState.UNKNOWN)) == []
    assert events_of(stage.world, report(RunState.RUNNING)) == [
        RunReachable(at_s=200.0, run="j.1", epoch=1, reachable=True)]


def test_a_run_without_a_record_is_broken_unless_its_start_is_under_way() -> None:
    stage = running_stage()
    (event,) = events_of(stage.world)
    assert isinstance(event, RunBroke)
    assert events_of(stage.world, starting=("j.1",)) == []
    waiting = a_stage(a_node("n0"))
    waiting.submit_and_tick(a_job("j"))
    assert events_of(waiting.world) == []       # journalled and not begun: the start is still to come


def test_a_checkpoint_counts_by_the_jobs_own_steps_or_else_by_time() -> None:
    stage = running_stage()         # 1,200 unit seconds of work; at 200 s two V100 have run for 200 s
    by_time = events_of(stage.world, report(RunState.DRAINING, acknowledged=True))
    assert isinstance(by_time[0], CheckpointAcknowledged)
    assert by_time[0].done_unit_s == pytest.approx(2 * 200.0)
    (by_step,) = events_of(stage.world, report(RunState.DRAINING, acknowledged=True, step=25), steps=100)
    assert isinstance(by_step, CheckpointAcknowledged)
    assert by_step.done_unit_s == pytest.approx(0.25 * 1200.0)
    stage.happens(by_step)
    assert events_of(stage.world, report(RunState.DRAINING, acknowledged=True)) == []


def test_a_checkpoint_of_half_a_gang_is_none() -> None:
    stage = running_stage()
    half = report(RunState.DRAINING, acknowledged=True)
    half = replace(half, members=(half.members[0], replace(half.members[1], acknowledged=False)))
    assert events_of(stage.world, half) == []


def test_the_last_word_of_a_run_brings_checkpoint_and_exit_together() -> None:
    stage = running_stage()
    last = report(RunState.CHECKPOINTED, acknowledged=True, step=9)
    found = list(observed(stage.world, {"j.1": last}, (), 200.0, {}))
    assert [type(one.event) for one in found] == [CheckpointAcknowledged, RunExited]
    assert found[0].saved == Saved("/ck/0", 9)


@pytest.mark.parametrize("state", list(RunState))
@pytest.mark.parametrize("phase", list(RunPhase))
def test_whatever_is_reported_the_world_takes_it(state: RunState, phase: RunPhase) -> None:
    stage = running_stage()
    world = stage.world.evolved(runs={"j.1": replace(stage.run_of("j"), phase=phase)})
    for event in events_of(world, report(state, acknowledged=True)):
        after = consider(world, event)
        assert isinstance(after, World), after
        world = after


def test_strangers_are_live_runs_that_the_world_has_given_no_devices() -> None:
    stage = running_stage()
    reports = [report(RunState.RUNNING), Report("old.7", RunState.RUNNING), Report("over.8", RunState.COMPLETED),
               Report("serve-chat-1", RunState.RUNNING), Report("dark.9", RunState.UNKNOWN)]
    found = strangers(stage.world, {one.run_id: one for one in reports}, ["serve-chat-1"])
    assert [one.run_id for one in found] == ["old.7"]


def test_a_lender_is_heard_once_and_again_before_its_word_goes_stale() -> None:
    stage = a_stage(a_node("i0", pool="inference"))
    backend = Backend("i0-0", "inference", "v100", ("i0:0", "i0:1"))
    seen = Seen((backend,), (Supply("inference", "v100", 1, 1),))
    for event in lender_events(stage.world, seen, 10.0):
        stage.happens(event)
    assert [type(event).__name__ for event in stage.journal[-2:]] == ["BackendReported", "SupplyReported"]
    assert list(lender_events(stage.world, seen, 11.0)) == []
    fresh_s = stage.world.config.rules.supply_fresh_s
    (again,) = lender_events(stage.world, seen, 11.0 + fresh_s)
    assert isinstance(again, SupplyReported)
    released = replace(backend, state=BackendState.RELEASED)
    (moved,) = lender_events(stage.world, Seen((released,), seen.supplies), 12.0)
    assert isinstance(moved, BackendReported)
    (gone,) = lender_events(stage.world, Seen((), seen.supplies), 12.0)
    assert gone == BackendGone(at_s=12.0, backend="i0-0")


def test_a_lent_backend_that_is_no_longer_named_is_not_taken_away() -> None:
    stage = lent_stage(replicas=1, gang=4)
    assert list(lender_events(stage.world, Seen((), ()), 20.0)) == []


@pytest.mark.parametrize(("state", "is_last"), [
    (RunState.RUNNING, False), (RunState.ENDING, False), (RunState.DRAINING, False), (RunState.CHECKPOINTED, True),
    (RunState.FAILED, True), (RunState.ABSENT, True), (RunState.UNKNOWN, True)])
def test_whose_devices_are_idle_is_waited_for_until_it_has_said_how_it_ended(state: RunState, is_last: bool) -> None:
    stage = lent_stage(replicas=1, gang=4)
    stage.supply(0)
    stage.tick(50.0)
    run = stage.run_of("j")
    assert run.stop_by_s == 110.0
    assert is_last_word(Report(run.id, state, run.epoch), run, 109.0) is is_last
    assert is_last_word(Report(run.id, state, run.epoch), run, 110.0)


def test_evidence_says_what_was_looked_at() -> None:
    device = Device("cpu", "x")
    proof = ReleaseProof((Evidence(device, Released.RELEASED),), "the process table", 12.5)
    assert evidence_of(proof, ["n0:0"]) == "n0:0: no process at 12.500; the process table"
    held = Evidence(device, Released.HELD, (Holder("serve-chat-1", 7, "sh", "S", "descent"),))
    assert evidence_of(proof, ["n0:0"], held) == "n0:0: nothing but serve-chat-1 at 12.500; the process table"
