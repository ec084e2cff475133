"""The protocol that every execution engine keeps: local processes, Ray Jobs, Slurm, Kubernetes.

Four rules hold for all of them; `tests/contracts/execution_engine.py` is the suite that holds an engine to them.

* **The caller names the run.** It journals the name before it calls, so each call can be repeated after a crash.
* **Epochs fence.** An engine remembers the highest epoch of each run. A command with a lower one changes nothing and
  says so (Kleppmann, "How to do distributed locking", 2016).
* **A deadline is never lengthened.** Of several, the earliest holds, also over the engine's own restart and over jumps
  of the wall clock.
* **Released is proven, not believed.** And what cannot be told is `unknown`, which is neither held nor released.
"""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from allocator.execution.devices import Device
from allocator.execution.values import Launch, Receipt, ReleaseProof, Report


class ExecutionError(Exception):
    """An engine could not do what it was asked to; nothing of it was done."""


class BadLaunch(ExecutionError):
    """The launch makes no sense, or its run id is taken by another. Mend it; a repetition fails again."""


class DevicesBusy(ExecutionError):
    """A device of the launch still carries a process, or belongs to a run that is not over. The text says which."""


class GangNotStarted(ExecutionError):
    """A member could not be started. Those that could are gone again."""


class StaleEpoch(ExecutionError):
    """The start comes too late: a command of the same or a later epoch has closed the door."""


class EngineUnreachable(ExecutionError):
    """The engine does not answer or cannot read its own records. What it runs is unknown, not gone."""


class ExecutionEngine(Protocol):
    """Starts gangs, watches them, and gets their devices back."""

    @property
    def name(self) -> str:
        """A short word for journals and metrics: `local`, `ray`, `slurm`."""

    async def start(self, launch: Launch) -> Report:
        """Starts all members or none, and returns when all run. Repeating a start that succeeded only reports.

        Raises BadLaunch, DevicesBusy, GangNotStarted, StaleEpoch, EngineUnreachable.
        """

    async def status(self, run_id: str) -> Report:
        """The run as it is. Never raises for what it finds: `absent` and `unknown` are states."""

    async def request_checkpoint(self, run_id: str, epoch: int, deadline_unix_s: float) -> Receipt:
        """Asks the run to save and go; from now on it is gone by the deadline, saved or not. Returns at once.

        Raises EngineUnreachable.
        """

    async def stop(self, run_id: str, epoch: int, deadline_unix_s: float) -> Receipt:
        """Asks the run to go without saving (SIGTERM); gone by the deadline. Returns at once.

        Raises EngineUnreachable.
        """

    async def kill(self, run_id: str, epoch: int) -> Receipt:
        """Ends the run by force, now. Raises EngineUnreachable."""

    async def prove_released(self, devices: Sequence[Device]) -> ReleaseProof:
        """Looks whether any process of any run, known or not, is left on these devices. Never raises: see `unknown`."""

    async def adopt(self) -> tuple[Report, ...]:
        """Every run on record. Takes charge again of those that lost their keeper. To be called at each tick.

        Raises EngineUnreachable.
        """

    async def forget(self, run_id: str) -> bool:
        """Drops the record of a run that is over, its fence included; False where it is not over.

        Raises EngineUnreachable.
        """


async def until_released(
    engine: ExecutionEngine, devices: Sequence[Device], *, timeout_s: float, every_s: float = 0.01
) -> ReleaseProof:
    """Looks again and again until the devices are proven free or the time is over; returns the last proof."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + timeout_s
    while True:
        proof = await engine.prove_released(devices)
        if proof.released or loop.time() >= end_s:
            return proof
        await asyncio.sleep(every_s)
