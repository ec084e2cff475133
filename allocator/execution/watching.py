"""What can be seen of the runs on this machine now: their records, and the process table beside them."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from allocator.execution import cgroups
from allocator.execution.assess import Sight, assess
from allocator.execution.drain import Orders
from allocator.execution.engine import EngineUnreachable
from allocator.execution.processes import (
    Found,
    Identity,
    Mark,
    Marks,
    Process,
    RunIdentity,
    boot_id,
    find,
    lives,
    process_table,
)
from allocator.execution.record import BadRecord, Plan, Progress, RunFolder, Started, run_folders, try_lock
from allocator.execution.values import Holder, Launch, Report, RunState

GONE = Identity(0, 0)
"""Stands for a process of an earlier boot: no process has this id."""


@dataclass(frozen=True, slots=True)
class Look:
    """The process table at one moment."""

    table: dict[int, Process]
    marks: dict[int, Mark]


@dataclass(frozen=True, slots=True)
class Reading:
    """The records of one run at one moment, taken before the look that they are held against."""

    launch: dict[str, Any]
    plan: Plan
    orders: Orders
    progress: Progress
    acks: tuple[dict[str, Any] | None, ...]
    shims: tuple[Identity, ...]
    members: tuple[Identity, ...]
    """Empty until the gang is started."""
    kept: bool
    """Its shim lives."""
    starting: bool
    """Somebody holds the lock of its start."""


class Watch:
    """Reads records and processes; changes nothing."""

    def __init__(self, runs: Path, boot_s: Callable[[], float], unix_s: Callable[[], float]) -> None:
        self._runs = runs
        self._boot_s = boot_s
        self._unix_s = unix_s
        self._marks = Marks()
        self._boot_id = boot_id()

    def look(self) -> Look:
        """Raises OSError where /proc cannot be read."""
        table = process_table()
        return Look(table, self._marks.look(table))

    def read(self, folder: RunFolder) -> Reading | None:
        """The records of a run; `None` for a mere fence or nothing at all. Raises BadRecord.

        The shim is looked at before its progress is read, so that the last word of one that is gone is not missed.
        """
        launch, plan, started, shims = folder.launch(), folder.plan(), folder.started(), folder.shims()
        if launch is None or plan is None:
            return None
        if started is not None and started.boot_id != self._boot_id:    # ids from before the machine was restarted
            started, shims = Started(started.boot_id, (GONE,) * len(started.members)), ()
        kept = bool(shims) and lives(shims[-1])
        orders = folder.standing_orders(plan)
        acks = tuple(map(folder.ack, range(len(plan.argvs)))) if orders.saving else ()
        return Reading(
            launch=launch, plan=plan, orders=orders, progress=folder.progress(), acks=acks, shims=shims, kept=kept,
            members=started.members if started is not None else (), starting=started is None and is_locked(folder))

    def found(self, reading: Reading, look: Look) -> list[Found]:
        """The run's processes, in a look that was taken after the reading. Raises OSError."""
        plan = reading.plan
        group = frozenset[int]() if plan.cgroup is None else cgroups.members(Path(plan.cgroup))
        run = RunIdentity(plan.run_id, plan.nonce, reading.shims, reading.members, group)
        return find(run, look.table, look.marks)

    def report(self, reading: Reading, look: Look) -> Report:
        """The run as it is. Raises OSError."""
        sight = Sight(
            run_id=reading.plan.run_id, orders=reading.orders, progress=reading.progress, members=reading.members,
            found=tuple(self.found(reading, look)), acks=reading.acks,
            acknowledged_by_file=reading.plan.acknowledged_by_file, kept=reading.kept, starting=reading.starting)
        return assess(sight, self._boot_s(), self._unix_s())

    def report_now(self, folder: RunFolder) -> Report:
        """Reads and looks; `absent` where the run is not on record. Raises BadRecord, OSError."""
        record = self.read(folder)
        if record is not None:
            return self.report(record, self.look())
        fence = folder.orders()
        return Report(folder.run_id, RunState.ABSENT, epoch=fence.epoch if fence else None,
                      note="a command came before it; fenced" if fence else "")

    def found_now(self, folder: RunFolder) -> list[Found]:
        """Reads and looks for the run's processes. Raises BadRecord, OSError."""
        record = self.read(folder)
        return [] if record is None else self.found(record, self.look())

    def holders(self) -> dict[str, list[Holder]]:
        """Who holds which device, by `vendor:id`: processes of runs on record and of runs that nobody knows any more,
        and runs about to start. Raises BadRecord, OSError.
        """
        # What is over was seen empty twice by its shim. Marked processes of it, if any, are found all the same.
        readings = [reading for folder in run_folders(self._runs)
                    if not folder.progress().over and (reading := self.read(folder)) is not None]
        look = self.look()
        holders: dict[str, list[Holder]] = {}
        for pid, mark in look.marks.items():
            for device in mark.devices:
                process = look.table[pid]
                holders.setdefault(device, []).append(
                    Holder(mark.run_id, pid, process.command, process.state, "environment"))
        for reading in readings:
            run_id = reading.plan.run_id
            held = [Holder(run_id, one.process.pid, one.process.command, one.process.state, one.how)
                    for one in self.found(reading, look) if one.how != "environment"]
            if not reading.members:
                held.append(Holder(run_id, 0, "", "", "its start is under way or in doubt"))
            if held:
                for borrowed in read_launch(reading.launch).devices:
                    holders.setdefault(str(borrowed), []).extend(held)
        return holders


def is_locked(folder: RunFolder) -> bool:
    """True while somebody starts or commands the run."""
    descriptor = try_lock(folder.path / "lock")
    if descriptor is None:
        return True
    with contextlib.closing(open(descriptor)):
        return False


def read_launch(document: object) -> Launch:
    """A launch from its record. Raises BadRecord."""
    try:
        return msgspec.convert(document, Launch)
    except msgspec.ValidationError as error:
        raise BadRecord(f"launch.json is not what this version writes: {error}") from error


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """Turns what goes wrong with records and /proc into EngineUnreachable: what runs is then unknown."""
    try:
        yield
    except BadRecord as error:
        raise EngineUnreachable(str(error)) from error
    except OSError as error:
        raise EngineUnreachable(f"cannot read what runs here: {error}") from error
