"""`headrace top`: a frame from a document, and the time line of a loan."""

import io
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from headrace.allocator.tables import jobs_table, span
from headrace.allocator.top import BAR, frame, time_line

LOAN: dict[str, Any] = {
    "loan": "chat-0", "epoch": 3, "state": "lent", "owner": "borrower", "lender": "chat", "borrower": "training",
    "card": "v100", "devices": ["n:0", "n:1"], "jobs": ["j"], "offered_s_ago": 61.0, "lent_s_ago": 60.0,
    "promised_for_s": 60.0, "grace_s": 20.0, "recalled_s_ago": None, "due_in_s": None, "recall_reason": None,
    "overdue": False, "coefficients": "c"}


def line(**changes: Any) -> str:
    return time_line({**LOAN, **changes}).plain


def test_half_of_what_was_promised_is_half_a_line() -> None:
    assert line() == "█" * (BAR // 2) + "·" * (BAR // 2)
    assert line(promised_for_s=-5.0) == "█" * BAR
    assert line(lent_s_ago=None) == "·" * BAR


def test_after_a_recall_the_line_ends_at_the_deadline() -> None:
    assert line(recalled_s_ago=10.0, due_in_s=20.0) == "█" * 25 + "▒" * 5 + "░" * 10
    assert line(recalled_s_ago=30.0, due_in_s=-10.0) == "█" * 20 + "!" * 20


@given(lent_s=st.none() | st.floats(0, 1e7), promised_s=st.floats(-1e7, 1e7), recalled_s=st.none() | st.floats(0, 1e7),
       due_s=st.none() | st.floats(-1e7, 1e7))
def test_a_line_is_as_long_as_any_other(lent_s: float | None, promised_s: float, recalled_s: float | None,
                                        due_s: float | None) -> None:
    drawn = line(lent_s_ago=lent_s, promised_for_s=promised_s, recalled_s_ago=recalled_s, due_in_s=due_s)
    assert len(drawn) == BAR
    assert ("!" in drawn) <= (due_s is not None and due_s <= 0.0)


@pytest.mark.parametrize(("seconds", "shown"), [
    (None, "–"), (0.0, "0.0 s"), (9.96, "10.0 s"), (59.6, "60 s"), (600.0, "10 min"), (-3.0, "-3.0 s"),
    (9000.0, "2.5 h"), (400_000.0, "4.6 d")])
def test_durations_are_short(seconds: float | None, shown: str) -> None:
    assert span(seconds) == shown


def test_a_frame_shows_pools_loans_and_the_queue() -> None:
    job = {"job": "j", "state": "running", "queue": "q", "kind": "training", "gang": [2, 2], "priority": 0,
           "attempts": 1, "run": {"card": "v100", "devices": ["n:0", "n:1"], "pool": "training", "loans": ["chat-0"],
                                  "for_s": 60.0, "stop_in_s": 12.0, "stop_reason": "loan_recalled"}}
    waiting = {**job, "job": "w", "state": "waiting", "run": None, "waiting_s": 5.0,
               "why": {"code": "devices_busy", "sentence": "It needs 2 v100, 0 are free."}}
    pool = {"pool": "chat", "kind": "inference", "open": True, "running": 0, "waiting": 0, "cards": [
        {"card": "v100", "devices": 4, "healthy": 4, "used": 0, "free": 0, "lent": 2, "borrowed": 0, "lendable": None,
         "spare": None}]}
    found = {"wall_unix_s": 0.0, "jobs": [waiting] * 30 + [job], "loans": [LOAN], "pools": [pool], "term": 2,
             "seq": 99, "config": "c0", "coefficients": "u0",
             "figures": {"utilisation": 0.5, "busy": None, "queue_wait_mean_s": 3.0, "jct_mean_s": None,
                         "cost_per_unit_h": 1.25}}
    console = Console(width=180, file=io.StringIO())
    console.print(frame(found))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "1 run, 30 wait" in text
    assert "utilisation 50% · busy –" in text
    assert "unit·h 1.250" in text
    assert "chat → training" in text
    assert "leaves in 12 s (loan_recalled)" in text
    assert "It needs 2 v100, 0 are free." in text
    assert "and 11 more: headrace jobs list" in text
    assert text.index("leaves in 12 s") < text.index("It needs 2 v100")


@pytest.mark.parametrize(("stop_in_s", "cancelled", "said"), [
    (12.0, False, "leaves in 12 s (operator)"), (-3.4, False, "late by 3.4 s (operator)"),
    (None, True, "is about to be told to leave (cancelled)")])
def test_a_job_that_has_to_go_says_when(stop_in_s: float | None, cancelled: bool, said: str) -> None:
    job = {"job": "j", "state": "running", "queue": "q", "kind": "training", "gang": [1, 1], "priority": 0,
           "attempts": 1, "cancelled": cancelled,
           "run": {"card": "v100", "devices": ["n:0"], "pool": "training", "loans": [], "for_s": 60.0,
                   "stop_in_s": stop_in_s, "stop_reason": "operator" if stop_in_s else None}}
    out = io.StringIO()
    Console(file=out, width=200).print(jobs_table([job]))
    assert said in out.getvalue()
