"""Why a job waits: a sentence for every cause, and the first thing that would have to change."""

import re
from math import inf
from pathlib import Path
from typing import Any

import pytest

from allocator.events import ClaimMade, DevicesJudged, LoanOffered, LoanRecalled
from allocator.model.inventory import BackendState, Condition
from allocator.model.jobs import Checkpoint, Level
from allocator.model.pools import Quota
from allocator.queueing.bench import Verdict, why
from allocator.reasons import Pending, Reason
from allocator.why import answer, why_pending
from tests.allocator_worlds import Stage, a_config, a_job, a_node, a_queue, a_stage, only


@pytest.mark.parametrize("code", Pending)
def test_every_cause_has_a_sentence(code: Pending) -> None:
    sentence = answer(Verdict("j", code), 0.0).sentence
    assert sentence.endswith(".")
    assert "{" not in sentence


def test_an_unknown_job_has_no_answer() -> None:
    assert why_pending(a_stage(a_node("n")).world, "nobody", 0.0) is None


def test_the_first_thing_to_change_comes_first() -> None:
    """Too large and without the memory: memory is what no waiting cures, so it is named."""
    stage = a_stage(a_node("n", memory_gb=16.0))
    stage.submit_and_tick(a_job("j", gang=64, memory_gb=40.0))
    assert stage.pending("j") is Pending.MEMORY
    assert stage.why("j").facts["memory_gb"] == 40.0


def test_figures_come_with_the_sentence() -> None:
    stage = a_stage(a_node("n"))
    stage.submit_and_tick(a_job("runs", gang=3))
    stage.submit_and_tick(a_job("j", gang=2))
    found = stage.why("j")
    assert found.facts == {"card": "v100", "needs": 2, "free": 1, "at_s": 600.0}
    assert found.sentence == "It needs 2 v100, 1 are free: enough are expected in about 10 min."


def test_fragments_are_told_from_lack() -> None:
    stage = a_stage(a_node("n", devices=1), a_node("m", devices=1), a_node("o", devices=2))
    stage.submit_and_tick(a_job("o", gang=2, widest=Level.NODE))
    stage.submit_and_tick(a_job("j", gang=2, widest=Level.NODE))
    assert stage.pending("j") is Pending.FRAGMENTED
    assert "but not 2 within one node" in stage.why("j").sentence


def test_limits_are_told_from_use() -> None:
    stage = a_stage(a_node("n"), config=a_config(a_queue("a", v100=Quota(1.0, borrowing_limit=1.0)), a_queue("b")))
    stage.submit_and_tick(a_job("never", "a", 3), a_job("fits", "a", 2))
    stage.submit_and_tick(a_job("later", "a", 1))
    assert stage.pending("never") is Pending.QUOTA_LIMIT
    assert stage.pending("later") is Pending.QUOTA_BUSY
    assert stage.pending("fits") is Pending.NOT_WAITING


def lendable_only(**rules: Any) -> Stage:
    """A pool without a v100 of its own, beside a replica of four that can be spared."""
    stage = a_stage(a_node("t", "k80"), a_node("i", pool="inference"), backends=4, config=a_config(**rules))
    return stage.supply(1)


def test_a_job_that_cannot_save_and_takes_longer_than_a_loan_is_told_so() -> None:
    """The replica could be lent, so it is neither devices nor time that is missing."""
    stage = lendable_only()
    assert only(LoanOffered, stage.submit_and_tick(a_job("j", gang=2, checkpoint=None, work_unit_s=None))) == []
    assert stage.pending("j") is Pending.LOAN_TOO_SHORT
    assert stage.why("j").sentence == (
        "Of its own the pool has 0 v100 for the 2 that it needs, and lent ones are not for it: it takes 24.0 h, as is "
        "assumed without `work_unit_s`, cannot save, and loans are promised for 30 min. Give it a checkpoint, or a "
        "shorter estimate where that is true.")


def test_what_the_sentence_asks_for_is_what_was_missing() -> None:
    for change in ({"work_unit_s": None}, {"checkpoint": None, "work_unit_s": 600.0}):
        assert only(LoanOffered, lendable_only().submit_and_tick(a_job("j", gang=2, **change))) != []


def test_a_restart_that_a_loan_is_not_worth_is_told() -> None:
    stage = lendable_only()
    stage.submit_and_tick(a_job("j", gang=2, checkpoint=Checkpoint(restart_s=900.0)))
    assert stage.pending("j") is Pending.LOAN_NOT_WORTH
    assert "15 min go with its restart" in stage.why("j").sentence


def test_recalled_too_often_is_told() -> None:
    stage = lendable_only(max_recalls=0)
    stage.submit_and_tick(a_job("j", gang=2))
    assert stage.pending("j") is Pending.RECALLED_TOO_OFTEN


def test_own_devices_that_are_sick_are_told_before_loans() -> None:
    stage = lendable_only()
    stage.submit_and_tick(a_job("j", gang=2, cards=("k80",), checkpoint=None, work_unit_s=None))
    assert stage.pending("j") is Pending.NOT_WAITING
    stage = lendable_only()
    stage.happens(DevicesJudged(at_s=0.0, devices=("t:0", "t:1", "t:2"), condition=Condition.CORDONED))
    stage.submit_and_tick(a_job("j", gang=2, cards=("v100", "k80"), checkpoint=None, work_unit_s=None))
    assert stage.pending("j") is Pending.LOAN_TOO_SHORT
    stage.submit_and_tick(a_job("k", gang=2, cards=("k80",), checkpoint=None, work_unit_s=None))
    assert stage.pending("k") is Pending.NOT_HEALTHY


def test_what_keeps_replicas_with_their_lender_is_told() -> None:
    """None can be spared; then one can, but for how long is open; then it is lent, recalled by hand, and kept."""
    stage = lendable_only(surplus_hold_s=100.0, recall_keep_s=600.0).supply(0)
    stage.submit_and_tick(a_job("j", gang=2))
    assert stage.why("j").sentence == \
        "It needs 2 v100, 0 are free, and inference can spare no more: it lends 0 replicas at most."
    stage.supply(1).tick(40.0)
    assert stage.pending("j") is Pending.SURPLUS_NEW
    assert "has held for a while, in about 60 s" in stage.why("j").sentence
    stage.tick(100.0)
    assert stage.pending("j") is Pending.CLAIM
    loan = stage.loan()
    stage.happens(LoanRecalled(at_s=100.0, loan=loan.id, epoch=loan.epoch, deadline_s=160.0,
                               by_hand=True, why=why(stage.world, Reason.OPERATOR))).tick()
    assert stage.pending("j") is Pending.KEPT_BY_HAND
    assert "may be lent in about 10 min, or once `headrace supply` says" in stage.why("j").sentence
    assert only(LoanOffered, stage.obey().tick(701.0)) != []


def test_who_may_not_borrow_is_in_nobodys_way() -> None:
    """At the head of its queue, with nothing that it could ever start on."""
    stage = lendable_only()
    stage.submit(a_job("never", gang=2, priority=9, checkpoint=None, work_unit_s=None), a_job("next", gang=4))
    assert [event.claim.job for event in only(ClaimMade, stage.tick())] == ["next"]


def test_a_claim_is_told() -> None:
    stage = a_stage(a_node("t", "k80"), a_node("i", pool="inference"), backends=4).supply(1)
    stage.submit_and_tick(a_job("j", gang=4))
    assert stage.why("j").sentence == "4 v100 are kept for it and are being freed."
    assert stage.world.backends["i-0"].state is BackendState.SERVING


def test_the_page_names_every_reason_and_every_cause() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "allocator.md").read_text("utf-8")
    section = page.split("## Reasons")[1].split("## What holds")[0]
    named = re.findall(r"`([a-z0-9_]+)`", section)
    assert named == [*(reason.value for reason in Reason), *(code.value for code in Pending)]


def test_a_time_that_is_not_known_reads_as_a_sentence() -> None:
    unknown = Verdict("j", Pending.DEVICES_BUSY, {"card": "v100", "needs": 2, "free": 0, "at_s": inf})
    assert answer(unknown, 0.0).sentence == \
        "It needs 2 v100, 0 are free: enough are expected at a time that nobody knows yet."
