"""Puts a run into the hands of a shim."""

import asyncio
import json
import os
import sys
from pathlib import Path

from allocator.execution.engine import EngineUnreachable, GangNotStarted
from allocator.execution.plans import PASSED_ON
from allocator.execution.record import RunFolder

ROOT = Path(__file__).resolve().parents[2]


async def spawn_shim(folder: RunFolder, lock: int, timeout_s: float, *, adopt: bool = False) -> None:
    """Returns when the run is in a shim's hands: started by it or, with `adopt`, taken over.

    The shim inherits the lock, so that the run stays locked until that is through even if we die.

    Raises:
        GangNotStarted: a member could not be started; that is on record, and nothing is left of the others.
        EngineUnreachable: the shim does not answer. What becomes of the start is open.
        OSError: the shim itself could not be started.
    """
    options = ("--adopt",) if adopt else ()
    with (folder.path / "shim.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-S", "-P", "-m", "allocator.execution.shim", str(folder.path), str(lock), *options,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=log, pass_fds=(lock,), cwd="/",
            env={**{name: os.environ[name] for name in PASSED_ON if name in os.environ}, "PYTHONPATH": str(ROOT)})
    try:
        # Not `wait_for`: up to Python 3.11 it loses a cancellation that comes as the answer does.
        async with asyncio.timeout(timeout_s):
            answer, _ = await process.communicate()
    except TimeoutError as error:
        raise EngineUnreachable(f"run {folder.run_id}: its shim did not answer in {timeout_s:g} s; "
                                "what becomes of the run is open") from error
    if not answer:
        raise EngineUnreachable(f"run {folder.run_id}: its shim ended without a word; see {folder.path}/shim.log")
    spoken = json.loads(answer)
    if not spoken["ok"]:
        raise GangNotStarted(f"run {folder.run_id}: {spoken['why']}")
