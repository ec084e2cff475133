"""After a crash: gives runs that lost their shim a new one, and settles starts that were cut short."""

import asyncio
import os

from allocator.execution.processes import kill_all
from allocator.execution.record import Progress, RunFolder, try_lock
from allocator.execution.spawn import spawn_shim
from allocator.execution.watching import Watch

KILL_ROUND_S = 0.002


async def take_charge(folder: RunFolder, watch: Watch, timeout_s: float) -> None:
    """Leaves a run in the hands of a shim, over, or as if it had never been asked for; nothing to do for most.

    Raises BadRecord, OSError, EngineUnreachable.
    """
    record = watch.read(folder)
    if record is None or record.progress.over or record.kept:
        return
    lock = try_lock(folder.path / "lock")
    if lock is None:        # somebody is at it just now
        return
    try:
        record = watch.read(folder)     # anew: it may have been settled before we had the lock
        if record is None or record.progress.over or record.kept:
            return
        if record.members:
            await spawn_shim(folder, lock, timeout_s, adopt=True)
        elif record.shims:
            await _undo_start(folder, watch)
        else:
            # Nothing was ever forked. Without the launch it is as if we had never been asked, and may be again.
            (folder.path / "launch.json").unlink()
    finally:
        os.close(lock)


async def _undo_start(folder: RunFolder, watch: Watch) -> None:
    """A shim was killed in the middle of a start: all or none, so none."""
    while found := watch.found_now(folder):
        kill_all(found)
        await asyncio.sleep(KILL_ROUND_S)
    folder.write("progress", Progress(failure="its shim was killed while it started the gang", over=True))
