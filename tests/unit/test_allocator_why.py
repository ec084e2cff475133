"""Why a job waits: a sentence for every cause, and the first thing that would have to change."""

import re
from math import inf
from pathlib import Path

import pytest

from allocator.model.inventory import BackendState
from allocator.model.jobs import Level
from allocator.model.pools import Quota
from allocator.queueing.bench import Verdict
from allocator.reasons import Pending, Reason
from allocator.why import answer, why_pending
from tests.allocator_worlds import a_config, a_job, a_node, a_queue, a_stage


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
