"""What an event did to jobs and loans, as moves from one state to another with the figures of the moment.

Worked out from the worlds before and after, so that no caller has to remember to note anything: `moves(before, event,
after)` is the only source of the history that people ask for, and of every duration in the metrics.

    wait_s       waiting → starting          since it was submitted, or stopped
    held_s       starting/running → …        since its devices were given to it
    lost_unit_s  the same                    devices · coefficient · seconds that no checkpoint holds
    saved        the same, told to save      whether it has
    jct_s        → completed                 since it was submitted
    recall_s     → returned                  since the first recall
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from allocator.events import Event
from allocator.loan.loan import Loan
from allocator.loan.states import LoanState
from allocator.model.jobs import JobState, Outcome, Run, RunPhase
from allocator.model.world import World


class What(StrEnum):
    JOB = "job"
    LOAN = "loan"


class JobPhase(StrEnum):
    """Where a job stands, for people."""

    WAITING = "waiting"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    """Its run must leave, or has left something behind."""
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    FAILED = "failed"
    """Given up after too many crashes."""


OVER = frozenset({JobPhase.COMPLETED, JobPhase.CANCELLED, JobPhase.FAILED})


@dataclass(frozen=True, slots=True)
class Move:
    """One change of state. `was` is empty for what is new."""

    what: What
    name: str
    epoch: int
    was: str
    became: str
    at_s: float
    reason: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)

    @property
    def figures_text(self) -> str:
        return json.dumps(dict(self.figures), separators=(",", ":"))


def moves(before: World, event: Event, after: World) -> Iterator[Move]:
    """What the event did, in no order but jobs first."""
    reason = _reason_of(event)
    if before.jobs is not after.jobs or before.runs is not after.runs:
        for name in _changed(before.jobs, after.jobs, before.runs, after.runs, before, after):
            yield from _of_job(before, after, name, event.at_s, reason, str(getattr(event, "detail", "")))
    if before.loans is not after.loans:
        for name in sorted({*before.loans, *after.loans}):
            yield from _of_loan(before.loans.get(name), after.loans.get(name), event.at_s, reason)


def phase_of(world: World, state: JobState) -> JobPhase:
    """Where a job that is not over stands."""
    run = world.runs.get(state.run) if state.run else None
    if run is None:
        return JobPhase.WAITING
    if run.stopping:
        return JobPhase.STOPPING
    return JobPhase.STARTING if run.phase is RunPhase.STARTING else JobPhase.RUNNING


def _reason_of(event: Event) -> str:
    why = getattr(event, "why", None)
    return str(why.reason.value) if why is not None else str(type(event).__struct_config__.tag)


def _changed(jobs: Mapping[str, JobState], jobs_after: Mapping[str, JobState], runs: Mapping[str, Run],
             runs_after: Mapping[str, Run], before: World, after: World) -> list[str]:
    names = {name for name in {*jobs, *jobs_after} if jobs.get(name) is not jobs_after.get(name)}
    for name in {*runs, *runs_after}:
        run, then = runs.get(name), runs_after.get(name)
        if run is not then:
            names.add((run or then).job)  # type: ignore[union-attr]  # one of the two is there
    return sorted(names)


def _of_job(before: World, after: World, name: str, at_s: float, reason: str, detail: str) -> Iterator[Move]:
    old, new = before.jobs.get(name), after.jobs.get(name)
    was = phase_of(before, old) if old else ""
    run = before.runs.get(old.run) if old and old.run else None
    if new is not None:
        became = phase_of(after, new)
    elif run is not None and run.outcome is Outcome.COMPLETED:
        became = JobPhase.COMPLETED
    else:
        became = JobPhase.CANCELLED if old is None or old.cancelled or run is None else JobPhase.FAILED
    if was == became:
        return
    figures: dict[str, Any] = {}
    if new is not None and new.run and was == JobPhase.WAITING and old is not None:
        placed = after.runs[new.run]
        figures = {"wait_s": at_s - old.waiting_since_s, "queue": placed.queue, "pool": placed.pool,
                   "card": placed.card, "devices": list(placed.devices), "gang": len(placed.devices)}
    elif run is not None and (new is None or new.run is None):
        figures = {**_of_run(before, run, at_s), "stopped_for": run.stop_reason}
        reason = run.stop_reason or reason
        detail = detail or run.said
        if run.saved is not None:
            figures["saved"] = run.saved
        if run.saved is False:
            detail = "told to save, it ended without having saved" + (f": {detail}" if detail else "")
    if detail:
        figures["detail"] = detail
    if new is None and old is not None:
        figures["jct_s"] = at_s - old.job.submitted_s
    epoch = run.epoch if run else after.runs[new.run].epoch if new and new.run else 0
    yield Move(What.JOB, name, epoch, was, became, at_s, reason, figures)


def _of_run(world: World, run: Run, at_s: float) -> dict[str, Any]:
    table = world.tables.get(run.coefficients, world.coefficients)
    units = len(run.devices) * table.coefficient(run.card, run.family)
    lost_s = 0.0 if run.outcome is Outcome.COMPLETED else run.safe_age_s(at_s)
    return {"held_s": at_s - run.started_s, "lost_unit_s": units * lost_s, "queue": run.queue, "pool": run.pool,
            "card": run.card, "gang": len(run.devices)}


def _of_loan(old: Loan | None, new: Loan | None, at_s: float, reason: str) -> Iterator[Move]:
    was = old.state.value if old else ""
    if new is not None:
        became = new.state.value
    else:
        became = (LoanState.WITHDRAWN if was == LoanState.OFFERED else LoanState.RETURNED).value
    known = new or old
    recalled_again = (old is not None and new is not None and old.recall_deadline_s != new.recall_deadline_s)
    if known is None or (was == became and not recalled_again):
        return
    figures: dict[str, Any] = {"lender": known.lender, "borrower": known.borrower, "card": known.card,
                               "devices": list(known.devices)}
    if known.recall_deadline_s is not None:
        figures |= {"deadline_s": known.recall_deadline_s, "recall_reason": known.recall_reason}
    if new is None and known.recalled_s is not None:
        figures |= {"recall_s": at_s - known.recalled_s, "was_overdue": known.overdue_s is not None}
    if new is None and known.lent_s is not None:
        figures["away_s"] = at_s - known.lent_s
    yield Move(What.LOAN, known.id, known.epoch, was, became, at_s, reason, figures)
