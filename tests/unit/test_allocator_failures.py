"""Failures F1 to F20 of the allocator's pure core, each by its name.

Elsewhere: F6, F7, F8, F10, F16, F19 in `test_allocator_loans`, F13 in `test_allocator_quota`, F18 in
`test_allocator_units`, F20 in the property tests. With real processes (SIGKILL at the points of F1, signals of F2 to
F4): the tests of the execution engine.
"""

from dataclasses import replace

import pytest

from allocator.apply import apply, replay
from allocator.effects import EffectKind, outstanding
from allocator.events import (
    CheckpointAcknowledged,
    ClaimMade,
    ConfigLoaded,
    DevicesJudged,
    DevicesVacated,
    JobCancelled,
    KillOrdered,
    LoanGivenBack,
    LoanOverdue,
    LoanRecalled,
    LoanWithdrawn,
    NodeDown,
    NodeReported,
    NodeUp,
    RunBroke,
    RunExited,
    RunPlaced,
    RunReachable,
    StopOrdered,
)
from allocator.loan.states import LoanState
from allocator.model.declared import check_config
from allocator.model.inventory import Condition
from allocator.model.jobs import Kind, Outcome, RunPhase
from allocator.model.pools import BadConfig, Pool, PoolKind
from allocator.plan import plan, survey
from allocator.queueing.bench import why
from allocator.reasons import Pending, Reason
from allocator.store.history import Move, What, moves
from allocator.store.snapshot import from_bytes, to_bytes
from tests.allocator_worlds import (
    INFERENCE,
    TRAINING,
    Stage,
    a_config,
    a_job,
    a_node,
    a_queue,
    a_stage,
    lent_stage,
    only,
)


def recalled(replicas: int = 1, gang: int = 4, name: str = "i0-0") -> Stage:
    """A job on lent replicas, one of which was recalled at 10 s, due at 80 s; the stop is ordered."""
    stage = lent_stage(replicas, gang)
    loan = stage.loan(name)
    stage.happens(LoanRecalled(at_s=10.0, loan=name, epoch=loan.epoch, deadline_s=80.0,
                               why=why(stage.world, Reason.OPERATOR)))
    stage.tick()
    return stage


def test_F1_from_every_prefix_of_the_journal_the_recall_is_kept() -> None:
    """Killed anywhere between two lines of the journal: replay, look what is outstanding, go on."""
    whole = recalled().leave()
    whole.tick()
    whole.obey()
    recall_at = next(index for index, event in enumerate(whole.journal) if isinstance(event, LoanRecalled))
    assert len(whole.journal) - recall_at > 4
    for length in range(recall_at + 1, len(whole.journal) + 1):
        again = Stage(replay(whole.first, whole.journal[:length]), 10.0)
        for now_s in (11.0, 12.0, 13.0, 14.0):
            again.tick(now_s)
            again.leave().obey(EffectKind.PROBE)
        assert again.world.loans == {}, f"killed after {length} events"
        assert again.world.jobs["j"].recalls == 1


def test_F1_what_was_decided_is_outstanding_until_it_is_confirmed() -> None:
    stage = recalled()
    run = stage.run_of("j")
    (signal,) = [effect for effect in outstanding(stage.world) if effect.kind is EffectKind.SIGNAL]
    assert (signal.target, signal.epoch, signal.deadline_s) == (run.id, run.epoch, 80.0)
    assert [effect for effect in outstanding(stage.world) if effect.kind is EffectKind.SIGNAL] == [signal]
    stage.obey(EffectKind.SIGNAL)
    kinds = {effect.kind for effect in outstanding(stage.world)}
    assert EffectKind.SIGNAL not in kinds
    assert EffectKind.PROVE in kinds


def test_F2_who_ignores_the_signal_is_killed_and_gone_by_the_deadline() -> None:
    stage = recalled()
    stage.obey(EffectKind.SIGNAL)
    (kill,) = only(KillOrdered, stage.tick(75.0))
    assert kill.why.reason is Reason.KILL_MARGIN
    assert EffectKind.KILL in {effect.kind for effect in outstanding(stage.world)}
    stage.vacate(kill.run).tick(76.0)
    stage.obey(EffectKind.PROBE)
    assert only(LoanOverdue, stage.tick(80.0)) == []
    assert stage.world.loans == {}


def test_F3_an_acknowledgement_is_no_proof() -> None:
    """The job says it is done, and a child holds the device."""
    stage = recalled()
    stage.obey(EffectKind.SIGNAL)
    run = stage.run_of("j")
    stage.happens(CheckpointAcknowledged(at_s=20.0, run=run.id, epoch=run.epoch, done_unit_s=40.0),
                  RunExited(at_s=21.0, run=run.id, epoch=run.epoch, outcome=Outcome.STOPPED))
    stage.tick(22.0)
    assert stage.loan().state is LoanState.DRAINING
    assert stage.world.runs[run.id].devices == run.devices
    assert len(only(KillOrdered, stage.tick(75.0))) == 1
    stage.vacate(run.id, "i0:0", "i0:1", "i0:2").tick(78.0)
    assert stage.loan().state is LoanState.DRAINING
    assert len(only(LoanOverdue, stage.tick(80.0))) == 1
    stage.vacate(run.id).tick(81.0)
    assert stage.loan().state is LoanState.RETURNING
    assert stage.world.jobs["j"].done_unit_s == 40.0


def test_a_cordon_is_no_way_out_of_quarantine() -> None:
    stage = a_stage(a_node("n"))
    stage.happens(DevicesJudged(at_s=1.0, devices=("n:0",), condition=Condition.QUARANTINED))
    stage.happens(DevicesJudged(at_s=2.0, devices=("n:0", "n:1"), condition=Condition.CORDONED))
    assert stage.world.conditions == {"n:0": Condition.QUARANTINED, "n:1": Condition.CORDONED}
    stage.happens(DevicesJudged(at_s=3.0, devices=("n:0", "n:1"), condition=Condition.HEALTHY))
    assert stage.world.conditions == {"n:0": Condition.QUARANTINED}
    assert "takes evidence" in stage.refused(
        DevicesJudged(at_s=4.0, devices=("n:0",), condition=Condition.HEALTHY))


def test_a_cordon_outlasts_the_quarantine_and_the_reboot_that_it_meets() -> None:
    """Proof that a device is idle ends its quarantine, and no cordon. A cordon of all is lifted from all."""
    stage = a_stage(a_node("n", devices=2))
    both = ("n:0", "n:1")
    proven = DevicesJudged(at_s=5.0, devices=("n:0",), condition=Condition.HEALTHY, evidence="no process")
    stage.happens(DevicesJudged(at_s=1.0, devices=("n:0",), condition=Condition.QUARANTINED),
                  DevicesJudged(at_s=2.0, devices=both, condition=Condition.CORDONED), proven)
    assert stage.world.conditions == dict.fromkeys(both, Condition.CORDONED)
    stage.happens(NodeDown(at_s=6.0, node="n"), NodeUp(at_s=7.0, node="n"), proven)
    assert stage.world.conditions == {"n:0": Condition.CORDONED, "n:1": Condition.QUARANTINED}
    stage.happens(DevicesJudged(at_s=8.0, devices=both, condition=Condition.HEALTHY))
    assert stage.world.conditions == {"n:1": Condition.QUARANTINED}
    assert "takes evidence" in stage.refused(DevicesJudged(at_s=9.0, devices=both, condition=Condition.HEALTHY))
    stage.happens(DevicesJudged(at_s=9.0, devices=("n:1",), condition=Condition.HEALTHY, evidence="no process"))
    assert stage.world.conditions == {}
    assert stage.world.cordoned == frozenset()
    assert from_bytes(to_bytes(stage.world)) == stage.world
    stage.replays()


def past_of(stage: Stage, since_s: float) -> list[Move]:
    """What became of jobs from a time on."""
    world, found = stage.first, list[Move]()
    for event in stage.journal:
        after = apply(world, event)
        found += [move for move in moves(world, event, after) if event.at_s >= since_s and move.what is What.JOB]
        world = after
    return found


def test_F4_a_checkpoint_that_fails_is_told_and_its_work_is_lost() -> None:
    stage = recalled()
    stage.obey(EffectKind.SIGNAL)
    run = stage.run_of("j")
    stage.happens(RunExited(at_s=21.0, run=run.id, epoch=run.epoch, outcome=Outcome.STOPPED,
                            detail="member 0 ended with exit code 1"))
    stage.now_s = 22.0
    stage.vacate(run.id)
    (state,) = stage.world.jobs.values()
    assert (state.unsaved, state.recalls, state.crashes, state.done_unit_s) == (1, 1, 0, 0.0)
    gone = past_of(stage, 22.0)[-1]
    assert gone.reason == "loan_recalled"
    assert gone.figures["saved"] is False
    assert gone.figures["lost_unit_s"] == pytest.approx(4 * 12.0)       # four V100 since 10 s
    assert gone.figures["detail"] == \
        "told to save, it ended without having saved: member 0 ended with exit code 1"
    stage.replays()


def test_F4_a_run_that_is_killed_before_it_has_saved_is_told_too() -> None:
    stage = recalled()
    stage.obey(EffectKind.SIGNAL)
    stage.tick(75.0)
    stage.now_s = 76.0
    stage.leave()
    assert stage.world.jobs["j"].unsaved == 1
    assert past_of(stage, 76.0)[-1].figures["saved"] is False


@pytest.mark.parametrize("outcome", [Outcome.STOPPED, Outcome.COMPLETED])
def test_F4_who_has_saved_or_is_done_has_lost_nothing(outcome: Outcome) -> None:
    stage = recalled()
    stage.obey(EffectKind.SIGNAL)
    run = stage.run_of("j")
    if outcome is Outcome.STOPPED:
        stage.happens(CheckpointAcknowledged(at_s=20.0, run=run.id, epoch=run.epoch, done_unit_s=40.0))
    stage.happens(RunExited(at_s=21.0, run=run.id, epoch=run.epoch, outcome=outcome))
    stage.now_s = 22.0
    stage.vacate(run.id)
    assert sum(state.unsaved for state in stage.world.jobs.values()) == 0
    assert past_of(stage, 22.0)[-1].figures.get("saved") is (True if outcome is Outcome.STOPPED else None)


def test_F3_a_run_that_exits_by_itself_and_leaves_something_behind() -> None:
    stage = a_stage(a_node("n"))
    stage.submit_and_tick(a_job("j", gang=2))
    run = stage.run_of("j")
    stage.happens(RunExited(at_s=5.0, run=run.id, epoch=run.epoch, outcome=Outcome.COMPLETED))
    (stop,) = only(StopOrdered, stage.tick(5.0))
    assert stop.why.reason is Reason.LEFTOVERS
    assert len(only(KillOrdered, stage.tick(60.0))) == 1
    stage.vacate(run.id)
    assert stage.world.jobs == {}, "it had completed, whatever became of what it left"


def test_F4_a_checkpoint_that_outlasts_the_grace_is_lost_and_the_last_one_counts() -> None:
    from allocator.events import RunProgressed
    stage = lent_stage(1, 4)
    run = stage.run_of("j")
    stage.happens(RunProgressed(at_s=12.0, run=run.id, epoch=run.epoch, done_unit_s=100.0))
    loan = stage.loan()
    stage.now_s = 20.0
    stage.happens(LoanRecalled(at_s=20.0, loan=loan.id, epoch=loan.epoch, deadline_s=80.0,
                               why=why(stage.world, Reason.OPERATOR)))
    stage.tick()
    stage.obey(EffectKind.SIGNAL).tick(75.0)
    stage.vacate(run.id)
    assert stage.world.jobs["j"].done_unit_s == 100.0
    assert stage.world.jobs["j"].recalls == 1
    assert stage.world.jobs["j"].crashes == 0


@pytest.mark.parametrize("when", ["lent", "draining"])
def test_F5_a_node_that_dies_on_loan_and_comes_back_with_an_old_process(when: str) -> None:
    stage = lent_stage(1, 4) if when == "lent" else recalled()
    if when == "draining":
        stage.obey(EffectKind.SIGNAL)
        assert stage.loan().state is LoanState.DRAINING
    old = stage.run_of("j")
    stage.happens(NodeDown(at_s=30.0, node="i0", detail="no heartbeat")).tick(30.0)
    assert stage.loan().state is LoanState.LOST
    assert stage.runs() == {}
    epoch = stage.world.epoch
    stage.happens(NodeUp(at_s=40.0, node="i0"))
    stage.supply(1).tick(41.0)
    assert set(stage.world.conditions.values()) == {Condition.QUARANTINED}
    late = DevicesVacated(at_s=42.0, run=old.id, epoch=old.epoch, devices=old.devices, evidence="group empty")
    assert "over or unknown" in stage.refused(late)
    devices = stage.world.nodes["i0"].device_ids
    judged = DevicesJudged(at_s=43.0, devices=devices, condition=Condition.HEALTHY)
    assert "takes evidence" in stage.refused(judged)
    stage.happens(DevicesJudged(at_s=43.0, devices=devices, condition=Condition.HEALTHY, evidence="old process killed"))
    assert stage.world.loans == {}
    assert stage.world.epoch > epoch
    stage.replays()


def test_F5_half_a_gang_on_a_node_that_died_leaves_the_other_half() -> None:
    stage = lent_stage(2, 8)
    stage.happens(NodeDown(at_s=30.0, node="i0"))
    (stop,) = only(StopOrdered, stage.tick(30.0))
    assert stop.why.reason is Reason.GANG_BROKEN
    assert stage.run_of("j").devices == stage.world.nodes["i1"].device_ids
    stage.leave()
    assert stage.world.jobs["j"].run is None
    assert stage.world.jobs["j"].crashes == 0, "a lost node is not the job's fault"
    assert stage.world.loans["i1-0"].state is LoanState.LENT


def test_F9_three_victims_end_at_different_times_and_nobody_takes_the_first_ones_devices() -> None:
    stage = a_stage(a_node("n", devices=6), config=a_config(a_queue("a"), a_queue("b", v100=6)))
    stage.submit_and_tick(*(a_job(f"a{n}", "a", 2) for n in range(3)))
    stage.submit(a_job("b", "b", 6)).tick(100.0)
    runs = [run.id for run in stage.world.runs.values()]
    for index, run in enumerate(runs):
        stage.submit_and_tick(a_job(f"thief{index}", "a", priority=99), a_job(f"b-thief{index}", "b", priority=99))
        assert {found.job[0] for found in stage.world.runs.values()} == {"a"}
        stage.now_s = 101.0 + index
        stage.vacate(run)
    assert [event.run.job for event in only(RunPlaced, stage.tick())] == ["b"]


def test_F11_quota_and_coefficients_change_with_loans_out() -> None:
    from allocator.events import CoefficientsActivated
    from allocator.units.load import shipped
    stage = lent_stage(2, 8)
    run, loans = stage.run_of("j"), dict(stage.world.loans)
    stage.happens(ConfigLoaded(at_s=11.0, config=a_config(a_queue("q", v100=0), version="c1")),
                  CoefficientsActivated(at_s=11.0, table=replace(shipped(), version="next")))
    stage.tick(12.0)
    assert stage.run_of("j") == run
    assert stage.world.loans == loans
    assert run.coefficients == "gavel-c4fa400"


def test_F12_a_label_that_puts_a_node_in_two_pools_is_refused() -> None:
    both = Pool("gold", PoolKind.TRAINING, {"tier": "gold"})
    node = replace(a_node("n"), labels={"pool": "training", "tier": "gold"})
    with pytest.raises(BadConfig, match="in two pools, training and gold"):
        check_config(a_config(pools=(TRAINING, INFERENCE, both)), [node])
    stage = a_stage(a_node("n"), config=a_config(pools=(TRAINING, INFERENCE, both)))
    assert "in two pools" in stage.refused(NodeReported(at_s=1.0, node=node))
    assert stage.world.nodes["n"].pool == "training"


def test_F12_a_label_that_changes_under_a_run_waits_for_its_end() -> None:
    stage = a_stage(a_node("n"))
    stage.submit_and_tick(a_job("j", gang=2))
    labels = stage.world.labels
    stage.happens(NodeReported(at_s=1.0, node=a_node("n", pool="inference")))
    assert stage.world.labels == labels + 1
    assert stage.world.nodes["n"].pool == "training"
    stage.submit_and_tick(a_job("next"))
    assert "next" not in stage.runs(), "a node that is leaving takes nothing new"
    stage.ends("j")
    assert [type(event).__name__ for event in stage.tick(2.0)] == ["NodeMoved"]
    assert stage.world.nodes["n"].pool == "inference"


def test_F14_silence_of_the_execution_engine_frees_nothing() -> None:
    stage = recalled()
    run = stage.run_of("j")
    stage.happens(RunReachable(at_s=11.0, run=run.id, epoch=run.epoch, reachable=False))
    for now_s in (20.0, 75.0, 80.0, 180.0, 500.0):
        stage.tick(now_s)
        assert stage.world.runs[run.id].devices == run.devices
    assert stage.loan().state is LoanState.LOST
    assert stage.world.jobs["j"].run == run.id, "it is not started twice either"
    stage.happens(RunReachable(at_s=501.0, run=run.id, epoch=run.epoch, reachable=True))
    stage.now_s = 502.0
    stage.vacate(run.id)
    devices = stage.world.nodes["i0"].device_ids
    stage.happens(DevicesJudged(at_s=503.0, devices=devices, condition=Condition.HEALTHY, evidence="probe"))
    assert stage.world.loans == {}


def test_F15_a_gang_that_starts_partly_goes_whole() -> None:
    stage = a_stage(a_node("n"))
    stage.submit_and_tick(a_job("j", gang=4))
    run = stage.run_of("j")
    stage.happens(RunBroke(at_s=1.0, run=run.id, epoch=run.epoch, detail="2 of 4 up"))
    (stop,) = only(StopOrdered, stage.tick(1.0))
    assert stop.why.reason is Reason.GANG_BROKEN
    stage.submit_and_tick(a_job("next"))
    assert "next" not in stage.runs()
    stage.leave().tick(2.0)
    assert stage.world.jobs["j"].crashes == 1
    assert stage.run_of("j").epoch > run.epoch


def test_F15_a_member_that_vanishes_breaks_the_gang() -> None:
    stage = a_stage(a_node("n"))
    stage.submit_and_tick(a_job("j", gang=4))
    stage.obey()
    run = stage.run_of("j")
    stage.vacate(run.id, "n:2")
    assert stage.run_of("j").phase is RunPhase.BROKEN
    assert len(only(StopOrdered, stage.tick(2.0))) == 1


def test_F17_a_job_recalled_again_and_again_is_given_what_cannot_be_recalled() -> None:
    stage = lent_stage(1, 4, max_recalls=3)
    for round_number in range(3):
        loan = stage.loan()
        now_s = stage.now_s = 100.0 * (round_number + 1)
        stage.happens(LoanRecalled(at_s=now_s, loan=loan.id, epoch=loan.epoch, deadline_s=now_s + 60.0,
                                   why=why(stage.world, Reason.OPERATOR)))
        stage.tick()
        stage.leave().tick()
        stage.obey(EffectKind.PROBE).obey(EffectKind.SERVE).supply(1)
        stage.tick(now_s + 10.0)
        stage.obey(EffectKind.DRAIN).tick(now_s + 11.0)
        stage.obey(EffectKind.START)
    assert stage.world.jobs["j"].recalls == 3
    assert stage.runs() == {}
    assert stage.world.loans == {}
    stage.happens(NodeReported(at_s=400.0, node=a_node("own"), evidence="new"))
    stage.submit(a_job("young", gang=4)).tick(400.0)
    assert stage.run_of("j").devices[0] == "own:0", "it has kept its age in the queue"


def test_a_recall_needs_nothing_free_to_begin() -> None:
    """P64: the cluster is full, and the queue's first entries are jobs that can never run."""
    stage = lent_stage(1, 4)
    stage.submit_and_tick(a_job("never", gang=99), a_job("alien", cards=("b200",)))
    stage.supply(0, spare=0)
    assert {type(event).__name__ for event in stage.tick(20.0)} == {"LoanRecalled", "StopOrdered"}


def test_planning_an_empty_or_ruined_world_is_no_error() -> None:
    stage = a_stage(a_node("n"))
    assert plan(stage.world, 0.0).events == ()
    stage.happens(NodeDown(at_s=1.0, node="n"))
    stage.submit_and_tick(a_job("j"))
    assert stage.pending("j") is Pending.NOT_HEALTHY


def test_I12_an_idle_loan_stays_while_the_first_waiting_gang_counts_on_it() -> None:
    stage = a_stage(a_node("i0", pool="inference"), backends=2).supply(2)
    stage.submit_and_tick(a_job("wide", gang=4))
    stage.obey().tick()
    stage.obey()
    stage.now_s = 100.0
    stage.ends("wide").submit_and_tick(a_job("small", work_unit_s=200.0))
    stage.obey(EffectKind.START)
    stage.submit_and_tick(a_job("four", gang=4, work_unit_s=400.0))
    assert stage.pending("four") is Pending.DEVICES_BUSY
    assert only(LoanGivenBack, stage.tick(150.0)) == []
    assert len(stage.world.loans) == 2
    stage.happens(JobCancelled(at_s=160.0, job="four"))
    (home,) = only(LoanGivenBack, stage.tick(160.0))
    assert home.loan not in {stage.world.loaned[device] for device in stage.run_of("small").devices}


def test_I12_a_node_that_is_kept_whole_is_not_filled_around_a_reservation() -> None:
    pool = replace(TRAINING, keep_whole_nodes=1)
    stage = a_stage(a_node("n0", devices=2), a_node("n1"), config=a_config(a_queue("q"), pools=(pool, INFERENCE)))
    stage.submit_and_tick(a_job("before", gang=2, work_unit_s=60.0))
    assert stage.runs() == {"before": "v100"}
    stage.now_s = 10.0
    stage.submit_and_tick(a_job("first"), a_job("fills", gang=3, kind=Kind.BATCH))
    assert stage.runs().keys() == {"before"}, "the only whole node is kept, with a reservation on it or without"
    assert survey(stage.world, 10.0).reservations == (), "whom a larger gang may overtake has no promise"
    stage.submit_and_tick(a_job("as large", gang=4))
    assert stage.runs().keys() == {"before", "as large"}, "it is kept for gangs as large as it is"
    stage.now_s = 20.0
    stage.ends("as large").ends("before").tick()
    assert "first" in stage.runs()


def test_I12_what_would_be_recalled_as_soon_as_it_is_lent_is_not_offered_and_an_offer_of_it_is_withdrawn() -> None:
    """A lender whose short outlook is worse than its long one: lending on the long one would recall what it lends."""
    nodes = (a_node("i0", pool="inference"), a_node("i1", pool="inference"))
    stage = a_stage(*nodes, backends=4).supply(2, spare=1)
    stage.submit_and_tick(a_job("wide", gang=8))
    assert stage.world.loans == {}
    stage.supply(2, spare=2).tick(1.0)
    assert len(stage.world.loans) == 2
    stage.obey(EffectKind.DRAIN).supply(2, spare=1)
    events = stage.tick(2.0)
    assert {event.why.reason for event in only(LoanWithdrawn, events)} >= {Reason.SURPLUS_GONE}
    assert only(RunPlaced, events) == []
    assert only(LoanRecalled, events) == []


def test_I12_a_job_that_has_to_bring_its_data_first_is_held_against_the_reservation_with_that_time() -> None:
    stage = a_stage(a_node("n0", site="here"))
    stage.submit_and_tick(a_job("before", gang=2, work_unit_s=120.0))
    stage.submit_and_tick(a_job("whole", gang=4))
    (reservation,) = survey(stage.world, 0.0).reservations
    assert 55.0 < reservation.at_s < 65.0
    stage.now_s = 1.0
    far = a_job("far", gang=2, work_unit_s=60.0, data_site="there", data_gb=100.0)      # 80 s to come, 30 s to run
    stage.submit_and_tick(far, a_job("near", work_unit_s=30.0))
    assert stage.runs().keys() == {"before", "near"}
    assert survey(stage.world, 1.0).reservations[0].at_s == reservation.at_s


def test_I12_nobody_is_stopped_for_devices_that_a_gang_before_waits_for() -> None:
    stage = a_stage(a_node("n0"), config=a_config(a_queue("a", v100=2), a_queue("b")))
    stage.submit_and_tick(a_job("b0", "b", 2, work_unit_s=2000.0), a_job("b1", "b", 2, work_unit_s=2000.0))
    stage.now_s = 100.0
    stage.submit(a_job("first", "a", 4))
    stage.now_s = 101.0
    events = stage.submit_and_tick(a_job("second", "a", 2))
    (reservation,) = survey(stage.world, 101.0).reservations
    assert reservation.job == "first"
    assert only(ClaimMade, events) == []
    stage.happens(JobCancelled(at_s=102.0, job="first"))
    assert len(only(ClaimMade, stage.tick(102.0))) == 1, "with nobody before it the guarantee holds"


def test_I14_a_claim_that_comes_true_when_its_pool_has_ended_starts_nothing() -> None:
    window = Pool("window", PoolKind.TRANSITIONAL, {"pool": "window"}, starts_wall_s=999_000.0, ends_wall_s=1_000_050.0,
                  then_pool="training")
    stage = a_stage(a_node("n0", pool="window"), config=a_config(
        a_queue("w", parent="window"), pools=(TRAINING, INFERENCE, window)))
    stage.submit_and_tick(a_job("low", "w", 4, work_unit_s=80.0))
    stage.obey()
    stage.now_s = 10.0
    events = stage.submit_and_tick(a_job("high", "w", 4, priority=9, work_unit_s=40.0))
    assert len(only(ClaimMade, events)) == 1
    stage.obey(EffectKind.SIGNAL)
    stage.now_s = 55.0
    stage.vacate(stage.run_of("low").id)
    assert only(RunPlaced, stage.tick()) == []
    assert stage.world.claims == {}
