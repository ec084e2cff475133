"""The life of a loan: its table, recalls and their deadlines, clocks, and the page that shows it."""

import re
from collections import deque
from itertools import product
from pathlib import Path

import pytest

from allocator.clock import Reading, resumed, running
from allocator.effects import EffectKind
from allocator.events import (
    DevicesVacated,
    HandBackProbed,
    KillOrdered,
    LoanGivenBack,
    LoanOverdue,
    LoanRecalled,
    LoanWithdrawn,
    RunExited,
    RunPlaced,
    ShrinkOrdered,
    SignalAccepted,
    StopOrdered,
)
from allocator.loan.states import AWAY, OWNER, TABLE, TERMINAL, Facts, Guard, LoanState, Step, next_state
from allocator.model.jobs import Outcome
from allocator.queueing.bench import why
from allocator.reasons import Pending, Reason
from tests.allocator_worlds import Stage, a_config, a_job, a_node, a_stage, lent_stage, only

PAGE = Path(__file__).resolve().parents[2] / "docs" / "allocator.md"
ALL_FACTS = [Facts(*values) for values in product((False, True), repeat=3)]


def state_of(stage: Stage, name: str = "") -> LoanState:
    return stage.loan(name).state


def recall(stage: Stage, deadline_s: float, reason: Reason = Reason.OPERATOR, name: str = "") -> LoanRecalled:
    loan = stage.loan(name)
    return LoanRecalled(at_s=stage.now_s, loan=loan.id, epoch=loan.epoch, deadline_s=deadline_s,
                        why=why(stage.world, reason))


# --- the table -------------------------------------------------------------------------------------------------------


def test_the_page_shows_the_table_that_the_program_uses() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| ([^|]*?) \| `(\w+)` \|$", PAGE.read_text("utf-8"), re.M)
    assert rows == [(row.state.value, row.step.value, row.guard.value or "always", row.to.value) for row in TABLE]
    owners = re.findall(r"^\| `(\w+)` \| (lender|borrower|hand-over|quarantine) \|", PAGE.read_text("utf-8"), re.M)
    assert owners == [(state.value, owner.value) for state, owner in OWNER.items()]


def test_I7_nothing_leads_from_a_recall_back_to_lent() -> None:
    seen: set[LoanState] = set()
    frontier = deque([LoanState.RECALL_REQUESTED])
    while frontier:
        state = frontier.popleft()
        following = {row.to for row in TABLE if row.state is state} - seen
        seen |= following
        frontier += following
    assert LoanState.LENT not in seen
    assert LoanState.OFFERED not in seen


def test_every_state_is_reached_and_every_loan_can_end() -> None:
    assert {row.to for row in TABLE} | {LoanState.OFFERED} == set(LoanState)
    assert not [row for row in TABLE if row.state in TERMINAL]
    for state in set(LoanState) - TERMINAL:
        seen, frontier = {state}, deque([state])
        while frontier:
            new = {row.to for row in TABLE if row.state is frontier[0]} - seen
            frontier.popleft()
            seen |= new
            frontier += new
        assert seen & TERMINAL, state


def test_every_row_can_be_taken_and_no_row_hides_another() -> None:
    for row in TABLE:
        assert any(next_state(row.state, row.step, facts) is row.to for facts in ALL_FACTS), row
    assert {row.guard for row in TABLE} == set(Guard)
    assert {row.step for row in TABLE} == set(Step)


def test_I5_no_way_home_leads_past_the_proof() -> None:
    """Into RETURNING or RETURNED only where no run is on the devices."""
    home = {LoanState.RETURNING, LoanState.RETURNED}
    for state, step, facts in product(LoanState, Step, ALL_FACTS):
        to = next_state(state, step, facts)
        if to in home and state not in home:
            assert facts.empty, (state, step)


def test_I6_every_recalled_state_has_a_deadline_row() -> None:
    due = {row.state for row in TABLE if row.step is Step.DUE}
    assert due == AWAY - {LoanState.LENT, LoanState.OVERDUE}


# --- recalls ---------------------------------------------------------------------------------------------------------


def test_a_recall_that_is_obeyed() -> None:
    stage = lent_stage(1, 4)
    stage.happens(recall(stage, 80.0))
    (stop,) = only(StopOrdered, stage.tick())
    assert (stop.deadline_s, stop.why.reason) == (80.0, Reason.LOAN_RECALLED)
    assert state_of(stage) is LoanState.RECALL_REQUESTED
    stage.obey(EffectKind.SIGNAL)
    assert state_of(stage) is LoanState.DRAINING
    stage.obey(EffectKind.PROVE)
    assert state_of(stage) is LoanState.RETURNING
    assert stage.pending("j") is not Pending.NOT_WAITING
    stage.obey(EffectKind.PROBE)
    assert stage.world.loans == {}
    stage.replays()


def test_freed_devices_of_a_recall_are_for_the_lender_alone() -> None:
    stage = lent_stage(2, 8)
    stage.happens(recall(stage, 80.0, name="i0-0"))
    stage.tick()
    stage.submit_and_tick(a_job("thief", gang=4, priority=99), a_job("small"))
    stage.leave().tick()
    assert state_of(stage, "i0-0") is LoanState.RETURNING
    assert all(run.devices[0].startswith("i1") for run in stage.world.runs.values())


def test_an_elastic_job_gives_up_what_it_can_spare_and_goes_on() -> None:
    stage = lent_stage(2, 4)
    stage.submit_and_tick(a_job("k", gang=4))
    stage.obey().tick()
    stage.obey(EffectKind.START).ends("k").ends("j")
    stage.submit_and_tick(a_job("j", gang_min=2, gang_max=8, work_unit_s=1e5))
    stage.obey(EffectKind.START)
    assert len(stage.run_of("j").devices) == 8
    stage.happens(recall(stage, 80.0, name="i0-0"))
    (shrink,) = only(ShrinkOrdered, stage.tick())
    assert shrink.devices == ("i0:0", "i0:1", "i0:2", "i0:3")
    stage.obey(EffectKind.SIGNAL)
    assert state_of(stage, "i0-0") is LoanState.DRAINING
    before_s = stage.run_of("j").ends_s
    stage.obey(EffectKind.PROVE)
    run = stage.run_of("j")
    assert len(run.devices) == 4
    assert not run.stopping
    assert run.ends_s > before_s
    assert state_of(stage, "i0-0") is LoanState.RETURNING


def test_a_job_that_ends_in_time_by_itself_is_not_disturbed() -> None:
    stage = lent_stage(1, 4, work_unit_s=4 * 30.0)
    stage.happens(recall(stage, 80.0))
    assert stage.tick() == []
    stage.now_s = 40.0
    stage.ends("j").tick()
    assert state_of(stage) is LoanState.RETURNING
    assert stage.world.jobs == {}


def test_F16_one_that_had_promised_to_end_is_told_at_the_last_moment() -> None:
    stage = lent_stage(1, 4, work_unit_s=4 * 30.0)
    stage.happens(recall(stage, 80.0)).tick()
    (stop,) = only(StopOrdered, [event for now_s in range(11, 80) for event in stage.tick(float(now_s))])
    # Its prediction is past at 40 s, and a run that overran is not expected within the next minute.
    assert stop.at_s == 40.0


def test_F7_of_two_recalls_the_earlier_deadline_stands() -> None:
    stage = lent_stage(1, 4)
    stage.happens(recall(stage, 200.0)).tick()
    stage.happens(recall(stage, 90.0)).tick()
    assert stage.loan().recall_deadline_s == 90.0
    assert stage.run_of("j").stop_by_s == 90.0
    assert "changes nothing" in stage.refused(recall(stage, 300.0))
    assert stage.loan().recall_deadline_s == 90.0


def test_P67_less_than_the_promised_grace_takes_an_emergency() -> None:
    stage = lent_stage(1, 4)
    assert "closer than the promised grace" in stage.refused(recall(stage, 30.0))
    stage.happens(recall(stage, 30.0, Reason.P99_EMERGENCY)).tick()
    assert stage.loan().recall_reason == "p99_emergency"
    assert [event.at_s for event in only(KillOrdered, stage.tick(25.0))] == [25.0]


def test_P67_nobody_is_killed_before_the_kill_margin() -> None:
    stage = lent_stage(1, 4)
    stage.happens(recall(stage, 80.0)).tick()
    assert stage.tick(74.9) == []
    assert len(only(KillOrdered, stage.tick(75.0))) == 1


def test_I6_a_recall_that_is_not_kept_is_loud_and_then_written_off() -> None:
    stage = lent_stage(1, 4)
    stage.happens(recall(stage, 80.0)).tick()
    stage.obey(EffectKind.SIGNAL)
    stage.tick(75.0)
    (alarm,) = only(LoanOverdue, stage.tick(80.0))
    assert alarm.why.detail == "operator"
    assert stage.loan().overdue_s == 80.0
    assert stage.tick(179.0) == []
    assert [type(event).__name__ for event in stage.tick(180.0)] == ["LoanLost"]
    assert state_of(stage) is LoanState.LOST
    assert set(stage.world.conditions) == {"i0:0", "i0:1", "i0:2", "i0:3"}
    stage.submit_and_tick(a_job("next", gang=4))
    assert "next" not in stage.runs()
    stage.replays()


def test_a_late_return_is_not_alarmed_twice() -> None:
    stage = lent_stage(1, 4)
    stage.happens(recall(stage, 80.0)).tick()
    stage.tick(80.0)
    stage.leave()
    assert state_of(stage) is LoanState.RETURNING
    assert only(LoanOverdue, stage.tick(85.0)) == []


def test_a_hand_over_that_hangs_is_overdue_too() -> None:
    stage = lent_stage(1, 4)
    stage.happens(recall(stage, 80.0)).tick()
    stage.leave().tick()
    assert len(only(LoanOverdue, stage.tick(80.0))) == 1
    stage.obey(EffectKind.PROBE)
    assert stage.world.loans == {}


def test_devices_that_fail_their_probe_do_not_go_home() -> None:
    stage = lent_stage(1, 4)
    stage.happens(recall(stage, 80.0)).tick()
    stage.leave()
    loan = stage.loan()
    stage.happens(HandBackProbed(at_s=20.0, loan=loan.id, epoch=loan.epoch, good=False, detail="ECC errors"))
    assert state_of(stage) is LoanState.LOST
    assert len(stage.world.conditions) == 4


# --- F8: two things in one tick --------------------------------------------------------------------------------------


def test_F8_recall_and_completion_in_one_tick() -> None:
    for first in ("recall", "end"):
        stage = lent_stage(1, 4)
        if first == "recall":
            stage.happens(recall(stage, 80.0)).ends("j")
        else:
            stage.ends("j").happens(recall(stage, 80.0))
        assert stage.tick() == []
        assert state_of(stage) is LoanState.RETURNING
        assert stage.loan().recall_deadline_s == 80.0


def test_F8_recall_of_an_offer_withdraws_it_and_its_claim() -> None:
    stage = a_stage(a_node("t", "k80"), a_node("i", pool="inference"), backends=4).supply(1)
    stage.submit_and_tick(a_job("j", gang=4))
    stage.obey()
    stage.supply(0).happens(recall(stage, 60.0))
    assert stage.world.loans == {}
    stage.tick()
    assert stage.world.claims == {}
    assert stage.runs() == {}


def test_F8_withdrawal_before_acceptance_wins() -> None:
    stage = a_stage(a_node("t", "k80"), a_node("i", pool="inference"), backends=4).supply(1)
    stage.submit_and_tick(a_job("j", gang=4))
    stage.obey().supply(0)
    events = stage.tick()
    assert len(only(LoanWithdrawn, events)) == 1
    assert only(RunPlaced, events) == []


def test_F8_giving_back_what_is_recalled() -> None:
    stage = lent_stage(1, 4)
    stage.ends("j").happens(recall(stage, 80.0))
    loan = stage.loan()
    assert "does not apply" in stage.refused(LoanGivenBack(at_s=11.0, loan=loan.id, epoch=loan.epoch,
                                                           why=why(stage.world, Reason.IDLE)))


def test_F10_a_storm_of_recalls_and_then_quiet() -> None:
    """Everything is called back, then the traffic falls: the loans still end, and new ones have new epochs."""
    stage = lent_stage(2, 4)
    stage.submit_and_tick(a_job("k", gang=4))
    stage.obey().tick()
    stage.obey(EffectKind.START)
    epochs = {loan.epoch for loan in stage.world.loans.values()}
    stage.supply(0, spare=0).tick(20.0)
    assert {loan.state for loan in stage.world.loans.values()} == {LoanState.RECALL_REQUESTED}
    stage.supply(2).tick(21.0)
    assert {loan.state for loan in stage.world.loans.values()} == {LoanState.RECALL_REQUESTED}
    for now_s in (22.0, 23.0, 24.0, 25.0, 26.0):
        stage.now_s = now_s
        stage.obey().supply(2).tick()
    assert {loan.state for loan in stage.world.loans.values()} <= {LoanState.OFFERED, LoanState.LENT}
    assert len(stage.world.loans) == 2
    assert min(loan.epoch for loan in stage.world.loans.values()) > max(epochs)
    stage.replays()


# --- epochs and clocks -----------------------------------------------------------------------------------------------


def test_reports_of_another_epoch_change_nothing() -> None:
    stage = lent_stage(1, 4)
    run, loan = stage.run_of("j"), stage.loan()
    for event in (
            SignalAccepted(at_s=11.0, run=run.id, epoch=run.epoch - 1),
            RunExited(at_s=11.0, run=run.id, epoch=run.epoch + 1, outcome=Outcome.COMPLETED),
            DevicesVacated(at_s=11.0, run=run.id, epoch=0, devices=run.devices, evidence="group empty"),
            HandBackProbed(at_s=11.0, loan=loan.id, epoch=loan.epoch - 1, good=True)):
        assert "over or unknown" in stage.refused(event)


def test_P61_proof_that_comes_twice_frees_once() -> None:
    stage = lent_stage(1, 4)
    run = stage.run_of("j")
    proof = DevicesVacated(at_s=20.0, run=run.id, epoch=run.epoch, devices=run.devices, evidence="group empty")
    stage.happens(RunExited(at_s=20.0, run=run.id, epoch=run.epoch, outcome=Outcome.COMPLETED), proof)
    served = dict(stage.world.served_ms)
    assert "over or unknown" in stage.refused(proof)
    assert stage.world.served_ms == served


def test_devices_without_evidence_stay_where_they_are() -> None:
    stage = lent_stage(1, 4)
    run = stage.run_of("j")
    assert "no evidence" in stage.refused(
        DevicesVacated(at_s=20.0, run=run.id, epoch=run.epoch, devices=run.devices, evidence=""))


START = Reading(world_s=1000.0, wall_s=50_000.0, boot_s=300.0, boot_id="b1")


@pytest.mark.parametrize("jump_s", [-3600.0, 0.0, 3600.0])
def test_F6_P66_a_restart_under_a_clock_that_jumped_never_lengthens_a_deadline(jump_s: float) -> None:
    """Down for 40 s by the boot clock; the wall clock was set meanwhile."""
    again = resumed(START, 50_040.0 + jump_s, 340.0, "b1")
    deadline_s = 1060.0
    assert deadline_s - again.world_s <= deadline_s - START.world_s - 40.0
    assert again.world_s == 1040.0 + max(0.0, jump_s)


def test_P66_over_a_reboot_the_wall_clock_counts_and_never_backwards() -> None:
    assert resumed(START, 50_040.0, 5.0, "b2").world_s == 1040.0
    assert resumed(START, 40_000.0, 5.0, "b2").world_s == 1000.0


def test_F6_while_running_the_wall_clock_does_not_count() -> None:
    from allocator.events import ClockRead
    assert running(START, 330.0) == 1030.0
    assert running(START, 200.0) == 1000.0
    for jump_s in (-3600.0, 3600.0):
        stage = lent_stage(1, 4)
        stage.happens(recall(stage, 80.0)).tick()
        stage.happens(ClockRead(at_s=11.0, wall_s=1_000_000.0 + jump_s))
        assert only(KillOrdered, stage.tick(74.0)) == []
        assert len(only(KillOrdered, stage.tick(75.0))) == 1
        assert stage.loan().recall_deadline_s == 80.0


def test_F19_a_reload_under_a_recall_changes_nothing_of_it() -> None:
    from allocator.events import ConfigLoaded
    stage = lent_stage(1, 4)
    stage.happens(recall(stage, 80.0)).tick()
    loan, run = stage.loan(), stage.run_of("j")
    stage.happens(ConfigLoaded(at_s=11.0, config=a_config(version="c1", grace_s=600.0, promised_min_s=1.0)))
    assert stage.loan() == loan
    assert stage.run_of("j") == run
    assert stage.tick(11.0) == []
    (kill,) = only(KillOrdered, stage.tick(75.0))
    assert kill.why.config == "c1"
    assert stage.world.runs[kill.run].config == "c0"
