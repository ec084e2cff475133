"""How a run gets into a shim's hands, where only the order of events matters."""

import asyncio
from pathlib import Path

import pytest

from allocator.execution.record import RunFolder
from allocator.execution.spawn import spawn_shim

pytestmark = pytest.mark.anyio


async def test_a_start_that_is_called_off_as_its_shim_answers_stays_called_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were the cancellation lost, whoever starts runs would go on although it was told to stop."""
    answered = asyncio.Event()

    class Shim:
        async def communicate(self) -> tuple[bytes, None]:
            await answered.wait()
            return b'{"ok": true}', None

    async def shim(*_: object, **__: object) -> Shim:
        return Shim()

    monkeypatch.setattr("asyncio.create_subprocess_exec", shim)
    start = asyncio.create_task(spawn_shim(RunFolder(tmp_path), 0, 60.0))
    for _ in range(5):
        await asyncio.sleep(0)
    answered.set()
    start.cancel()
    await asyncio.wait({start})
    assert start.cancelled()
