"""The state of a run from its record and from what is found alive, as a pure function."""

import signal
from dataclasses import dataclass
from typing import Any

from allocator.execution.drain import LEFTOVERS, Orders, deadline_on_the_wall
from allocator.execution.processes import Found, Identity
from allocator.execution.record import Progress
from allocator.execution.values import MemberReport, Report, RunState


@dataclass(frozen=True, slots=True)
class Sight:
    """All that a report is made from, read at one time."""

    run_id: str
    orders: Orders
    progress: Progress
    members: tuple[Identity, ...]
    """Empty until the gang is started."""
    found: tuple[Found, ...]
    acks: tuple[dict[str, Any] | None, ...]
    """By rank, as soon as the run was asked to save; empty before."""
    acknowledged_by_file: bool
    kept: bool
    """Its shim lives."""
    starting: bool
    """Somebody holds the lock of its start."""


def assess(sight: Sight, now_boot_s: float, now_unix_s: float) -> Report:
    """The report. A final state is named only when no process is left and nobody is about to say how it ended."""
    orders, progress = sight.orders, sight.progress
    members = _members(sight)
    return Report(
        run_id=sight.run_id,
        state=_state(sight, members),
        epoch=orders.epoch,
        members=members,
        deadline_unix_s=deadline_on_the_wall(orders, now_boot_s, now_unix_s),
        overdue=bool(sight.found) and orders.deadline_boot_s is not None and now_boot_s > orders.deadline_boot_s,
        forced=progress.forced is not None,
        processes=len(sight.found),
        note=_note(sight, members),
    )


def _members(sight: Sight) -> tuple[MemberReport, ...]:
    alive = {one.process.identity for one in sight.found}
    reports = []
    for rank, member in enumerate(sight.members):
        ack = sight.acks[rank] if sight.acks else None
        exit_code = sight.progress.exits.get(str(rank))
        saved = sight.orders.saving and (ack is not None if sight.acknowledged_by_file else exit_code == 0)
        resume_from, step = (ack or {}).get("resume_from"), (ack or {}).get("step")
        reports.append(MemberReport(
            rank, member in alive, exit_code, saved,
            resume_from if isinstance(resume_from, str) else None, step if isinstance(step, int) else None))
    return tuple(reports)


def _state(sight: Sight, members: tuple[MemberReport, ...]) -> RunState:
    orders, progress = sight.orders, sight.progress
    if not sight.members:
        return RunState.NOT_STARTED if progress.over else RunState.STARTING
    if sight.found or (sight.kept and not progress.over):
        if progress.forced is not None or orders.kill:
            return RunState.KILLING
        if orders.signal is not None:
            return RunState.DRAINING
        if not any(member.alive for member in members):
            return RunState.ENDING
        return RunState.RUNNING if all(member.alive for member in members) else RunState.BROKEN
    if orders.saving and all(member.acknowledged for member in members):
        return RunState.CHECKPOINTED
    stopped = orders.signal is not None and not orders.saving
    if all(member.exit_code == 0 for member in members):
        return RunState.STOPPED if stopped else RunState.COMPLETED
    # Force against leftovers alone came when the members had already ended, each in its own way.
    if orders.kill or progress.forced not in (None, LEFTOVERS):
        return RunState.KILLED
    return RunState.STOPPED if stopped else RunState.FAILED


def _note(sight: Sight, members: tuple[MemberReport, ...]) -> str:
    notes = []
    if sight.progress.failure:
        notes.append(sight.progress.failure)
    if sight.progress.forced:
        notes.append(f"SIGKILL sent: {sight.progress.forced}")
    if sight.found:
        gone = [member for member in members if not member.alive]
        notes += [f"member {member.rank} ended with {_code(member)}" for member in gone]
        escaped = len(sight.found) - (len(members) - len(gone))
        if gone and escaped:
            notes.append(f"{escaped} processes beside the members")
    else:
        notes += [f"member {member.rank} ended with {_code(member)}" for member in members
                  if member.exit_code != 0 and not member.acknowledged]
    if not sight.kept and not sight.progress.over and not sight.starting:
        notes.append("its shim is gone")
    return "; ".join(notes)


def _code(member: MemberReport) -> str:
    code = member.exit_code
    if code is None:
        return "an exit code that nobody saw"
    if code < 0 and -code in signal.valid_signals():
        return signal.Signals(-code).name
    return f"exit code {code}"
