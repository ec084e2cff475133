"""Judges devices: idle by the process table, sound by a command of the operator's."""

import asyncio
import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from allocator.execution.devices import Device
from allocator.execution.engine import ExecutionEngine, until_released
from allocator.execution.values import Released

IDLE_WITHIN_S = 5.0
"""How long a device on its way home may still look busy before that counts against it."""


class Finding(NamedTuple):
    good: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Probe:
    """`command` gets the devices' names as arguments, and exits with 0 where all of them are sound."""

    engine: ExecutionEngine
    device_of: Mapping[str, Device]
    command: tuple[str, ...] | None = None
    timeout_s: float = 30.0

    async def hand_back(self, devices: Iterable[str]) -> Finding:
        """Idle and sound: fit to go home."""
        names = tuple(devices)
        proof = await until_released(self.engine, [self.device_of[name] for name in names], timeout_s=IDLE_WITHIN_S,
                                     every_s=0.1)
        if not proof.released:
            busy = [name for name, evidence in zip(names, proof.devices, strict=True)
                    if evidence.verdict is not Released.RELEASED]
            return Finding(False, f"not proven idle: {', '.join(busy)}")
        return await self.judge(names)

    async def judge(self, devices: Iterable[str]) -> Finding:
        """Sound, by the operator's command; without one, all are."""
        if self.command is None:
            return Finding(True, "idle; no probe is configured")
        try:
            child = await asyncio.create_subprocess_exec(
                *self.command, *devices, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT)
        except OSError as problem:
            return Finding(False, f"the probe {self.command[0]} cannot run: {problem.strerror}")
        try:
            async with asyncio.timeout(self.timeout_s):
                output, _ = await child.communicate()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()
            return Finding(False, f"the probe took longer than {self.timeout_s:g} s")
        lines = output.decode(errors="replace").strip().splitlines()
        return Finding(child.returncode == 0, f"probe exit {child.returncode}: {lines[-1][:200] if lines else ''}")
