"""What an execution engine reports, as events: pure, and the same for every engine.

A report says how a run stands; the world says how it stood. Where they differ, something has happened.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from allocator.events import CheckpointAcknowledged, Event, RunBroke, RunExited, RunReachable, RunStarted
from allocator.execution.values import Evidence, ReleaseProof, Report, RunState
from allocator.model.jobs import Outcome, Run, RunPhase
from allocator.model.world import World
from allocator.service.job_request import Saved

_UP = frozenset({RunState.RUNNING, RunState.DRAINING, RunState.KILLING, RunState.BROKEN, RunState.ENDING})
_OUTCOME = {RunState.COMPLETED: Outcome.COMPLETED, RunState.CHECKPOINTED: Outcome.STOPPED,
            RunState.STOPPED: Outcome.STOPPED, RunState.KILLED: Outcome.STOPPED, RunState.FAILED: Outcome.FAILED}


class Observed(NamedTuple):
    """An event, and the checkpoint that it tells of."""

    event: Event
    saved: Saved | None = None


def observed(world: World, reports: Mapping[str, Report], starting: Iterable[str], now_s: float,
             steps: Mapping[str, int]) -> Iterator[Observed]:
    """What has happened to the runs of this world.

    `starting`: runs whose start is under way, of which an engine may know nothing yet. `steps`: job → steps in all.
    """
    under_way = set(starting)
    for run in world.runs.values():
        report = reports.get(run.id)
        if report is None:
            # Lost records: nobody knows how it ended, and whether it has is for the process table to say.
            if run.phase is RunPhase.RUNNING and run.id not in under_way:
                yield Observed(RunBroke(at_s=now_s, run=run.id, epoch=run.epoch,
                                        detail="the execution engine has no record of it"))
            continue
        yield from of_run(world, run, report, now_s, steps.get(run.job))


def of_run(world: World, run: Run, report: Report, now_s: float, steps: int | None) -> Iterator[Observed]:
    """What has happened to one run."""
    if report.state is RunState.UNKNOWN:
        if not run.unreachable:
            yield Observed(RunReachable(at_s=now_s, run=run.id, epoch=run.epoch, reachable=False))
        return
    if run.unreachable:
        yield Observed(RunReachable(at_s=now_s, run=run.id, epoch=run.epoch, reachable=True))
    if report.state in _UP and run.phase is RunPhase.STARTING:
        yield Observed(RunStarted(at_s=now_s, run=run.id, epoch=run.epoch))
    if report.state is RunState.BROKEN and run.phase in (RunPhase.STARTING, RunPhase.RUNNING):
        yield Observed(RunBroke(at_s=now_s, run=run.id, epoch=run.epoch, detail=report.note))
    saved = _saved(report)
    if saved is not None and not run.acknowledged:
        yield Observed(CheckpointAcknowledged(at_s=now_s, run=run.id, epoch=run.epoch,
                                              done_unit_s=_done_unit_s(world, run, saved, now_s, steps)), saved)
    if report.state is RunState.NOT_STARTED and run.phase is RunPhase.STARTING:
        yield Observed(RunBroke(at_s=now_s, run=run.id, epoch=run.epoch, detail=report.note))
    outcome = _OUTCOME.get(report.state)
    if outcome is not None and run.phase is not RunPhase.EXITED:
        if outcome is Outcome.FAILED and run.stop_by_s is not None:
            outcome = Outcome.STOPPED       # whoever is told to stop may well exit with an error
        yield Observed(RunExited(at_s=now_s, run=run.id, epoch=run.epoch, outcome=outcome, detail=report.note))


def is_last_word(report: Report, run: Run, now_s: float) -> bool:
    """Whether nothing more is to be heard of a run whose devices are idle; at its deadline, nobody waits for it."""
    silent = report.ended or report.state in (RunState.ABSENT, RunState.UNKNOWN)
    return silent or (run.stop_by_s is not None and now_s >= run.stop_by_s)


def _saved(report: Report) -> Saved | None:
    """Where all members have acknowledged: the first one's checkpoint stands for the gang's."""
    if not report.members or not all(member.acknowledged for member in report.members):
        return None
    first = report.members[0]
    steps = [member.step for member in report.members if member.step is not None]
    return Saved(first.resume_from or "", min(steps) if steps else None)


def _done_unit_s(world: World, run: Run, saved: Saved, now_s: float, steps: int | None) -> float:
    """Work that is safe: by the job's own count of steps where it gives one, else by the time that it ran."""
    state = world.jobs[run.job]
    total = state.job.work_unit_s
    if total is not None and steps and saved.step is not None:
        return total * min(1.0, max(0.0, saved.step / steps))
    table = world.tables.get(run.coefficients, world.coefficients)
    restart_s = run.checkpoint.restart_s if run.checkpoint and run.base_unit_s else 0.0
    ran_s = max(0.0, now_s - run.started_s - restart_s)
    done = run.base_unit_s + ran_s * table.speed(run.card, run.family, len(run.devices))
    return done if total is None else min(done, total)


def strangers(world: World, reports: Mapping[str, Report], ours: Iterable[str]) -> list[Report]:
    """Runs that hold devices though the world has given them to nobody: left over from a node that was lost."""
    known = set(ours)
    return [report for report in reports.values()
            if report.run_id not in world.runs and report.run_id not in known
            and not report.ended and report.state not in (RunState.ABSENT, RunState.UNKNOWN)]


def evidence_of(proof: ReleaseProof, devices: Iterable[str], found: Evidence | None = None) -> str:
    """A proof in words, for the journal. `found`: of one device, which may carry its own replica's engine."""
    runs = sorted({holder.run_id for holder in found.holders}) if found else []
    what = f"nothing but {', '.join(runs)}" if runs else "no process"
    return f"{', '.join(devices)}: {what} at {proof.observed_unix_s:.3f}; {proof.method}"
