"""The engines of replicas: which runs are theirs."""

from pathlib import Path

import pytest

from allocator.execution.local import LocalEngine
from allocator.execution.values import Report, RunState
from allocator.service.replicas import ReplicaEngines
from headrace.allocator.file import load_allocator
from tests.allocator_processes import AllocatorProcess, document

pytestmark = [pytest.mark.anyio, pytest.mark.real_time]    # a free port is asked for


async def test_a_job_is_never_taken_for_an_engine_whatever_it_is_called(tmp_path: Path) -> None:
    """Taken for the engine of chat-0, it would keep that from being started, and break the count of its starts."""
    declared = load_allocator(AllocatorProcess(tmp_path, document(tmp_path)).file)
    engines = ReplicaEngines(LocalEngine(tmp_path / "state"), declared)
    jobs = [f"serve-chat-0{rest}" for rest in ("-x.5", "-1.6", ".7", "-.8")]
    await engines.look({run: Report(run, RunState.RUNNING) for run in jobs})
    assert not engines.is_running("chat-0")
    assert not any(map(engines.owns_run, jobs))
    await engines.look({run: Report(run, RunState.RUNNING) for run in [*jobs, "serve-chat-0-7"]})
    assert engines.is_running("chat-0")
    assert not engines.is_running("chat-1")
    assert engines.owns_run("serve-chat-0-7")
