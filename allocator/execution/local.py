"""The execution engine `local`: gangs of processes on this machine.

Each run is kept by a shim, a process of its own that outlives the allocator (see `shim`); all that is known of a run is
on disk (see `record`). So this engine has no state that a restart could lose, and two of them on one folder do no harm:
locks order them, epochs fence them.

What a member finds in its environment: a few of the allocator's variables (`plans.PASSED_ON`), those that show it its
devices (`devices`), `RANK`, `WORLD_SIZE`, `HEADRACE_RUN_ID`, `HEADRACE_CHECKPOINT_ACK`, then the launch's own. Its
output goes to `log-<rank>` in the run's folder.

The process table is read in place, without a thread: some milliseconds on a machine with hundreds of processes.
"""

import asyncio
import contextlib
import json
import math
import os
import secrets
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from allocator.execution.devices import Device
from allocator.execution.drain import Orders, deadline_on_the_wall, order_to_go
from allocator.execution.engine import BadLaunch, DevicesBusy, EngineUnreachable, GangNotStarted, StaleEpoch
from allocator.execution.plans import RUN_ID, make_plan
from allocator.execution.processes import is_dying, kill_all, send_signal
from allocator.execution.record import Plan, RunFolder, run_folders, try_lock
from allocator.execution.recovery import take_charge
from allocator.execution.spawn import spawn_shim
from allocator.execution.values import (
    Evidence,
    Launch,
    Receipt,
    Released,
    ReleaseProof,
    Report,
    RunState,
    Verdict,
)
from allocator.execution.watching import Reading, Watch, reading

METHOD = "process table read twice; by environment, descent from the shim, session, control group"
LOCK_POLL_S = 0.002


@dataclass(frozen=True, slots=True)
class Clocks:
    """The wall's clock, which may jump, and one that runs evenly from boot, through suspension too."""

    unix_s: Callable[[], float] = time.time
    boot_s: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME)


class LocalEngine:
    """Runs gangs here. `folder` holds their records and must survive a restart; all engines on it are one."""

    name = "local"

    def __init__(
        self,
        folder: Path,
        *,
        kill_margin_s: float = 0.5,
        start_timeout_s: float = 20.0,
        cgroup_parent: Path | None = None,
        clocks: Clocks = Clocks(),
    ) -> None:
        """`kill_margin_s` is the time between SIGKILL and the deadline: what the driver needs to tear a process down.

        `cgroup_parent` is a control group that is ours to divide (`cgroups.delegated_parent()`), or `None`.
        """
        if not kill_margin_s >= 0:
            raise ValueError(f"kill_margin_s must not be negative, not {kill_margin_s}")
        self._runs = folder.absolute() / "runs"
        self._kill_margin_s = kill_margin_s
        self._start_timeout_s = start_timeout_s
        self._cgroup_parent = cgroup_parent
        self._clocks = clocks
        self._runs.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._watch = Watch(self._runs, clocks.boot_s, clocks.unix_s)

    async def start(self, launch: Launch) -> Report:
        """See the protocol. If we die meanwhile, the shim brings the start to its end, one way or the other."""
        folder = self._folder(launch.run_id)
        plan = make_plan(launch, folder, os.environ, nonce=secrets.token_hex(8), kill_margin_s=self._kill_margin_s)
        with reading():
            folder.path.mkdir(exist_ok=True, mode=0o700)
            async with self._locked(folder.path) as lock:
                if not self._is_on_record(launch, folder):
                    async with self._locked(self._runs.parent):
                        self._refuse_busy(launch)
                        plan = self._with_cgroup(plan)
                        folder.write("plan", plan)
                        folder.write("launch", json.loads(msgspec.json.encode(launch)))
                    await spawn_shim(folder, lock, self._start_timeout_s)
        return await self.status(launch.run_id)

    async def request_checkpoint(self, run_id: str, epoch: int, deadline_unix_s: float) -> Receipt:
        """See the protocol. The shim sends the signal at once or, if we die before it is called, a moment later."""
        return await self._command(run_id, epoch, deadline_unix_s, saving=True)

    async def stop(self, run_id: str, epoch: int, deadline_unix_s: float) -> Receipt:
        """See the protocol."""
        return await self._command(run_id, epoch, deadline_unix_s)

    async def kill(self, run_id: str, epoch: int) -> Receipt:
        """See the protocol. Does not rely on the shim: it may be the one that hangs."""
        receipt = await self._command(run_id, epoch)
        if receipt.verdict in (Verdict.ACCEPTED, Verdict.REPEATED):
            with reading():
                kill_all(self._watch.found_now(self._folder(run_id)))
        return receipt

    async def status(self, run_id: str) -> Report:
        """See the protocol."""
        if not RUN_ID.fullmatch(run_id):
            return Report(run_id, RunState.ABSENT, note="no run can have this id")
        try:
            with reading():
                return self._watch.report_now(self._folder(run_id))
        except EngineUnreachable as error:
            return Report(run_id, RunState.UNKNOWN, note=str(error))

    async def prove_released(self, devices: Sequence[Device]) -> ReleaseProof:
        """See the protocol. Reads the process table twice: a fork in mid-reading can hide from one reading, not two."""
        now_unix_s = self._clocks.unix_s()
        try:
            with reading():
                holders = self._watch.holders()
                if not any(str(device) in holders for device in devices):
                    holders = self._watch.holders()
        except EngineUnreachable as error:
            unknown = tuple(Evidence(device, Released.UNKNOWN) for device in devices)
            return ReleaseProof(unknown, METHOD, now_unix_s, str(error))
        held = [(device, tuple(holders.get(str(device), ()))) for device in devices]
        return ReleaseProof(
            tuple(Evidence(device, Released.HELD if found else Released.RELEASED, found) for device, found in held),
            METHOD, now_unix_s)

    async def adopt(self) -> tuple[Report, ...]:
        """See the protocol. A run whose record cannot be read is reported as `unknown`, and hinders no other."""
        with reading():
            folders = list(run_folders(self._runs))
        readings: dict[str, Reading] = {}
        unknown: dict[str, Report] = {}
        for folder in folders:
            try:
                with reading():
                    await take_charge(folder, self._watch, self._start_timeout_s)
            except EngineUnreachable as error:
                unknown[folder.run_id] = Report(folder.run_id, RunState.UNKNOWN, note=str(error))
        for folder in folders:      # all records, then one look at the processes for all of them
            try:
                with reading():
                    if folder.run_id not in unknown and (record := self._watch.read(folder)) is not None:
                        readings[folder.run_id] = record
            except EngineUnreachable as error:
                unknown[folder.run_id] = Report(folder.run_id, RunState.UNKNOWN, note=str(error))
        with reading():
            look = self._watch.look()
            known = {run_id: self._watch.report(record, look) for run_id, record in readings.items()}
        return tuple(report for _, report in sorted({**known, **unknown}.items()))

    async def forget(self, run_id: str) -> bool:
        """See the protocol."""
        folder = self._folder(run_id)
        with reading():
            if not folder.path.exists():
                return True
            async with self._locked(folder.path):
                report = self._watch.report_now(folder)
                if not report.ended and report.state is not RunState.ABSENT:
                    return False
                for path in folder.path.iterdir():
                    path.unlink()
                folder.path.rmdir()
        return True

    # --- what start needs

    def _is_on_record(self, launch: Launch, folder: RunFolder) -> bool:
        """True where this very launch has been started before. Raises BadLaunch, StaleEpoch, GangNotStarted."""
        document, orders, progress = folder.launch(), folder.orders(), folder.progress()
        if document is None:
            if orders is not None and orders.epoch >= launch.epoch:
                raise StaleEpoch(f"run {launch.run_id}: its start in epoch {launch.epoch} comes after a command of "
                                 f"epoch {orders.epoch}")
            return False
        if document != json.loads(msgspec.json.encode(launch)):
            raise BadLaunch(f"run {launch.run_id} is on record with another launch; a run id is used once")
        if progress.failure is not None:
            raise GangNotStarted(f"run {launch.run_id}: {progress.failure}")
        # Written down but with nobody to start it, ever: the engine died in between. We hold the lock, so it is ours.
        return folder.started() is not None or bool(folder.shims())

    def _refuse_busy(self, launch: Launch) -> None:
        holders = self._watch.holders()
        for device in launch.devices:
            others = [holder for holder in holders.get(str(device), ()) if holder.run_id != launch.run_id]
            if others:
                one = others[0]
                raise DevicesBusy(f"run {launch.run_id}: {device} carries run {one.run_id}"
                                  + (f", process {one.pid} ({one.command})" if one.pid else f": {one.how}"))

    def _with_cgroup(self, plan: Plan) -> Plan:
        if self._cgroup_parent is None:
            return plan
        group = self._cgroup_parent / f"headrace-{plan.run_id}-{plan.nonce}"
        group.mkdir()
        return replace(plan, cgroup=str(group))

    # --- what commands need

    async def _command(
        self, run_id: str, epoch: int, deadline_unix_s: float | None = None, *, saving: bool = False
    ) -> Receipt:
        """Writes an order: to kill where there is no deadline, to save or to stop by then where there is one."""
        if deadline_unix_s is not None and not math.isfinite(deadline_unix_s):
            raise ValueError(f"a deadline is a time, not {deadline_unix_s}")
        folder = self._folder(run_id)
        with reading():
            folder.path.mkdir(exist_ok=True, mode=0o700)
            async with self._locked(folder.path) as lock:
                plan = folder.plan() if folder.launch() is not None else None
                before = folder.orders() or Orders(epoch) if plan is None else folder.standing_orders(plan)
                if epoch < before.epoch:
                    return self._receipt(run_id, Verdict.STALE_EPOCH, before, f"epoch {epoch} is ignored")
                if plan is None:
                    orders = replace(before, epoch=epoch)
                    folder.write("orders", orders)
                    return self._receipt(run_id, Verdict.UNKNOWN_RUN, orders, "a start up to this epoch is refused now")
                if folder.progress().over:
                    return self._receipt(run_id, Verdict.ENDED, before)
                if deadline_unix_s is None:
                    orders = replace(before, epoch=epoch, kill=True)
                else:
                    orders = order_to_go(
                        before, epoch, deadline_unix_s, self._clocks.boot_s() + deadline_unix_s - self._clocks.unix_s(),
                        signum=plan.checkpoint_signal if saving else signal.SIGTERM, saving=saving)
                if orders.saving and not before.saving:     # a job may have written one before anybody asked
                    folder.remove_acks()
                if orders != before:
                    folder.write("orders", orders)
                await self._rouse(folder, lock)
                changed = replace(orders, epoch=before.epoch) != before
                return self._receipt(run_id, Verdict.ACCEPTED if changed else Verdict.REPEATED, orders)

    async def _rouse(self, folder: RunFolder, lock: int) -> None:
        """Has the run's shim look at its orders; gives the run a new shim where it has none."""
        shims = folder.shims()
        # Signals reach a process that is being killed, and it does nothing about them.
        if not shims or not send_signal(shims[-1], signal.SIGHUP) or is_dying(shims[-1].pid):
            await spawn_shim(folder, lock, self._start_timeout_s, adopt=True)

    def _receipt(self, run_id: str, verdict: Verdict, orders: Orders, note: str = "") -> Receipt:
        deadline_unix_s = deadline_on_the_wall(orders, self._clocks.boot_s(), self._clocks.unix_s())
        return Receipt(run_id, verdict, orders.epoch, deadline_unix_s, note)

    def _folder(self, run_id: str) -> RunFolder:
        if not RUN_ID.fullmatch(run_id):
            raise BadLaunch(f"run id {run_id!r}: at most 128 letters, digits, '.', '_' and '-', no sign first")
        return RunFolder(self._runs / run_id)

    @contextlib.asynccontextmanager
    async def _locked(self, folder: Path) -> AsyncIterator[int]:
        """Holds the folder's lock; yields its descriptor. Raises EngineUnreachable where it stays taken."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + self._start_timeout_s
        while (descriptor := try_lock(folder / "lock")) is None:
            if loop.time() >= end_s:
                raise EngineUnreachable(f"{folder}/lock is held by another for {self._start_timeout_s:g} s")
            await asyncio.sleep(LOCK_POLL_S)
        try:
            yield descriptor
        finally:
            os.close(descriptor)
