"""The checks themselves: each finds the fault that is planted for it. A check that cannot fail holds nothing."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from allocator.apply import apply
from allocator.events import (
    DevicesVacated,
    LoanOffered,
    LoanRecalled,
    RunPlaced,
    StopOrdered,
)
from allocator.invariants import step_violations, violations
from allocator.loan.states import LoanState
from allocator.model.inventory import Condition
from allocator.model.world import World
from allocator.plan import plan, survey
from allocator.queueing.bench import why
from allocator.reasons import Reason
from allocator.soak.machine import shadow_violations
from tests.allocator_worlds import Stage, a_config, a_job, a_node, a_queue, a_stage, lent_stage, only


def rules(world: World) -> set[str]:
    return {found.rule for found in violations(world)}


def with_run(stage: Stage, **changes: Any) -> World:
    run = stage.run_of("j")
    return stage.world.evolved(runs={**stage.world.runs, run.id: replace(run, **changes)})


def with_loan(stage: Stage, **changes: Any) -> World:
    loan = stage.loan()
    return stage.world.evolved(loans={**stage.world.loans, loan.id: replace(loan, **changes)})


def test_a_sound_world_has_no_violations() -> None:
    assert violations(lent_stage(2, 8).world) == []


def test_I1_a_device_in_two_runs() -> None:
    stage = lent_stage(1, 4)
    twin = replace(stage.run_of("j"), id="twin", job="twin")
    assert "I1" in rules(stage.world.evolved(runs={**stage.world.runs, "twin": twin}))


def test_I1_a_run_on_another_pools_device() -> None:
    assert "I1" in rules(lent_stage(1, 4).world.evolved(loans={}))


def test_I2_a_condition_of_nothing() -> None:
    assert "I2" in rules(lent_stage(1, 4).world.evolved(conditions={"ghost:0": Condition.OFFLINE}))


def test_I2_a_node_taken_by_two_loans() -> None:
    stage = lent_stage(1, 4)
    twin = replace(stage.loan(), id="twin", borrower="nobody")
    assert {"I1", "I2"} <= rules(stage.world.evolved(loans={**stage.world.loans, "twin": twin}))


def test_I3_two_card_types_in_one_job() -> None:
    stage = lent_stage(1, 4)
    assert "I3" in rules(with_run(stage, devices=(*stage.run_of("j").devices[:3], "t0:0")))


def test_I4_a_gang_that_is_not_whole() -> None:
    stage = lent_stage(1, 4)
    assert "I4" in rules(with_run(stage, devices=stage.run_of("j").devices[:3]))
    assert "I4" in rules(stage.world.evolved(runs={}))


def test_I5_a_loan_that_goes_home_with_a_run_on_it() -> None:
    assert "I5" in rules(with_loan(lent_stage(1, 4), state=LoanState.RETURNING))


def test_I6_a_recall_that_is_quietly_late() -> None:
    stage = lent_stage(1, 4)
    world = with_loan(stage, state=LoanState.DRAINING, recall_deadline_s=12.0)
    assert "I6" not in rules(world.evolved(now_s=13.0))
    assert "I6" in rules(world.evolved(now_s=13.1))
    assert "I6" not in rules(with_loan(stage, state=LoanState.OVERDUE, recall_deadline_s=12.0,
                                       overdue_s=12.0).evolved(now_s=99.0))


def test_I7_lent_under_a_recall_and_epochs_from_nowhere() -> None:
    stage = lent_stage(1, 4)
    assert "I7" in rules(with_loan(stage, recall_deadline_s=99.0))
    assert "I7" in rules(with_loan(stage, epoch=99))


def step_rules(before: World, event: Any, after: World) -> set[str]:
    return {found.rule for found in step_violations(before, event, after)}


def a_recall(stage: Stage) -> LoanRecalled:
    loan = stage.loan()
    return LoanRecalled(at_s=10.0, loan=loan.id, epoch=loan.epoch, deadline_s=80.0,
                        why=why(stage.world, Reason.OPERATOR))


def test_I6_I7_a_step_that_lengthens_a_deadline_or_goes_back() -> None:
    stage = lent_stage(1, 4)
    event = a_recall(stage)
    before = apply(stage.world, event)
    loan = before.loans["i0-0"]
    for change, rule in (({"recall_deadline_s": 81.0}, "I6"), ({"recall_deadline_s": None}, "I6"),
                         ({"state": LoanState.LENT}, "I7"), ({"epoch": 0}, "I7")):
        after = before.evolved(loans={"i0-0": replace(loan, **change)})
        assert rule in step_rules(before, event, after)
    assert step_rules(stage.world, event, before) == set()


def test_I8_a_gang_over_the_quota() -> None:
    stage = a_stage(a_node("n"))
    stage.submit(a_job("j", gang=2))
    (event,) = only(RunPlaced, list(plan(stage.world, 0.0).events))
    strict = stage.world.evolved(config=a_config(a_queue("q"), a_queue("other", v100=4)))
    strict = strict.evolved(config=replace(strict.config, queues=(
        strict.config.queues[0], replace(strict.config.queues[1], quotas={
            "v100": replace(strict.config.queues[1].quotas["v100"], lending_limit=0.0)}))))
    assert "I8" in step_rules(strict, event, apply(strict, event))
    assert step_rules(stage.world, event, apply(stage.world, event)) == set()


def test_I9_taking_from_who_keeps_to_the_guarantee() -> None:
    stage = a_stage(a_node("n"), config=a_config(a_queue("q", v100=4)))
    stage.submit_and_tick(a_job("j", gang=2))
    run = stage.run_of("j")
    event = StopOrdered(at_s=1.0, run=run.id, epoch=run.epoch, deadline_s=61.0,
                        why=why(stage.world, Reason.RECLAIMED))
    assert "I9" in step_rules(stage.world, event, apply(stage.world, event))


def test_I10_I5_charging_wrong_and_letting_go_without_proof() -> None:
    stage = lent_stage(1, 4)
    run = stage.run_of("j")
    proof = DevicesVacated(at_s=20.0, run=run.id, epoch=run.epoch, devices=run.devices, evidence="group empty")
    after = apply(stage.world, proof)
    assert step_rules(stage.world, proof, after) == set()
    assert "I10" in step_rules(stage.world, proof, after.evolved(served_ms={}))
    assert "I5" in step_rules(stage.world, msgspec.structs.replace(proof, evidence=""), after)
    assert "I5" in step_rules(stage.world, a_recall(stage), after)


def test_I11_an_offer_below_the_floor() -> None:
    stage = a_stage(a_node("t", "k80"), a_node("i", pool="inference"), backends=4).supply(1)
    stage.submit(a_job("j", gang=4))
    event = only(LoanOffered, list(plan(stage.world, 0.0).events))[0]
    assert step_rules(stage.world, event, apply(stage.world, event)) == set()
    stage.supply(0)
    assert "I11" in step_rules(stage.world, event, apply(stage.world, event))


def test_I12_a_start_that_moves() -> None:
    stage = a_stage(a_node("n"))
    stage.submit_and_tick(a_job("runs", gang=4))
    stage.submit_and_tick(a_job("head", gang=4))
    (was,) = survey(stage.world, 0.0).reservations
    assert shadow_violations({"v100": was}, {"v100": was}) == []
    assert shadow_violations({"v100": was}, {"v100": replace(was, at_s=was.at_s + 1.0)}) != []


def test_I14_a_device_that_is_not_to_be_used() -> None:
    stage = a_stage(a_node("n"))
    stage.submit(a_job("j", gang=2))
    (event,) = only(RunPlaced, list(plan(stage.world, 0.0).events))
    cordoned = stage.world.evolved(conditions={"n:0": Condition.CORDONED})
    assert "I14" in step_rules(cordoned, event, stage.world.evolved(jobs=apply(stage.world, event).jobs))


@pytest.mark.parametrize("change", [{"config": "other"}, {"labels": 99}, {"coefficients": "other"}])
def test_I15_a_decision_under_unknown_versions(change: dict[str, Any]) -> None:
    stage = lent_stage(1, 4)
    event = a_recall(stage)
    event = msgspec.structs.replace(event, why=msgspec.structs.replace(event.why, **change))
    assert "I15" in step_rules(stage.world, event, apply(stage.world, event))
