"""The local engine: the contract of all engines, and what only this one can be tested for."""

import asyncio
import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from allocator.execution import cgroups
from allocator.execution.devices import Device
from allocator.execution.engine import GangNotStarted
from allocator.execution.local import Clocks, LocalEngine
from allocator.execution.processes import Identity, Process, lives, read_process
from allocator.execution.record import try_lock
from allocator.execution.values import CheckpointContract, Launch, Member, Report, RunState, Verdict
from tests.contracts.execution_engine import (
    DEAF,
    ESCAPE,
    FOREVER,
    ROOT,
    Bench,
    ExecutionEngineContract,
    encode,
    ended,
    in_s,
    released,
    until,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the local engine reads /proc")
KILL_MARGIN_S = 0.4


class LocalBench(Bench):
    """Local engines on one folder."""

    cgroup_parent: Path | None = None

    def engine(self, wall_ahead_s: float = 0.0) -> LocalEngine:
        return LocalEngine(self.folder / "state", kill_margin_s=KILL_MARGIN_S, cgroup_parent=self.cgroup_parent,
                           clocks=Clocks(unix_s=lambda: time.time() + wall_ahead_s))

    def command(self, method: str, *arguments: Any) -> list[str]:
        return ["env", f"PYTHONPATH={ROOT}", sys.executable, "-m", "tests.contracts.local_command",
                str(self.folder / "state"), method, encode(arguments)]

    def make_unreachable(self, run_id: str) -> None:
        (self.run(run_id) / "plan.json").write_text("{")

    def run(self, run_id: str) -> Path:
        return self.folder / "state" / "runs" / run_id

    def shim(self, run_id: str) -> Identity:
        return Identity(*json.loads((self.run(run_id) / "shim.json").read_text())[-1])


def with_environment(pids: set[int]) -> list[int]:
    """Those of the processes that have not cleared theirs."""
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):
            found += [pid] if Path(f"/proc/{pid}/environ").read_bytes() else []
    return found


@contextlib.contextmanager
def innocent_process() -> Iterator[Process]:
    """A process that has nothing to do with any run, and must still be there in the end."""
    with subprocess.Popen([sys.executable, "-c", FOREVER]) as child:
        try:
            process = read_process(child.pid)
            assert process is not None
            yield process
            assert child.poll() is None, "an innocent process was killed"
        finally:
            child.kill()


def sweep(bench: Bench) -> None:
    for pid in bench.pids():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[LocalBench]:
    bench = LocalBench(tmp_path)
    yield bench
    sweep(bench)


class TestLocal(ExecutionEngineContract):
    """The contract."""


@pytest.fixture
async def deaf(bench: LocalBench) -> Launch:
    """A run that ignores its signals, started."""
    ready = bench.path()
    launch = bench.launch(bench.script(DEAF, str(ready)))
    await bench.engine().start(launch)
    await until(ready.exists, "the job to turn deaf")
    return launch


# --- the shim

@pytest.mark.anyio
async def test_a_run_that_lost_its_shim_gets_a_new_one_and_keeps_its_deadline(bench: LocalBench, deaf: Launch) -> None:
    deadline_s = in_s(2.0)
    await bench.engine().request_checkpoint(deaf.run_id, 1, deadline_s)
    first = bench.shim(deaf.run_id)
    os.kill(first.pid, signal.SIGKILL)
    await until(lambda: not lives(first), "the shim to die")
    report = await bench.engine().status(deaf.run_id)
    assert "its shim is gone" in report.note
    (report,) = await bench.engine().adopt()
    second = bench.shim(deaf.run_id)
    assert second != first
    assert lives(second)
    assert (report.state, report.processes) == (RunState.DRAINING, 1)
    await until(lambda: not bench.pids(), "the job to be gone")
    assert time.time() <= deadline_s
    await released(bench.engine(), deaf)
    report = await ended(bench.engine(), deaf.run_id)
    assert report.state is RunState.KILLED
    assert report.members[0].exit_code is None, "nobody was there to see it"


@pytest.mark.anyio
async def test_a_command_gives_a_run_without_shim_a_new_one(bench: LocalBench, deaf: Launch) -> None:
    os.kill(bench.shim(deaf.run_id).pid, signal.SIGKILL)
    deadline_s = in_s(1.5)
    assert (await bench.engine().request_checkpoint(deaf.run_id, 1, deadline_s)).verdict is Verdict.ACCEPTED
    await until(lambda: not bench.pids(), "the job to be gone")
    assert time.time() <= deadline_s
    assert not any((bench.run(deaf.run_id) / "shim.log").read_text())


@pytest.mark.anyio
async def test_kill_works_while_the_shim_hangs(bench: LocalBench, deaf: Launch) -> None:
    shim = bench.shim(deaf.run_id)
    os.kill(shim.pid, signal.SIGSTOP)
    try:
        await bench.engine().kill(deaf.run_id, 1)
        await released(bench.engine(), deaf)
        assert bench.pids() == set()
    finally:
        os.kill(shim.pid, signal.SIGCONT)
    assert (await ended(bench.engine(), deaf.run_id)).state is RunState.KILLED
    await until(lambda: not lives(shim), "the shim to leave")


@pytest.mark.anyio
async def test_an_escaped_child_of_a_dead_shim_keeps_its_device(bench: LocalBench) -> None:
    """In the session of the dead shim and with nothing else to know it by: not killed, and not called free."""
    text = ("import os, sys\nif os.fork() == 0:\n"
            "    os.execve(sys.executable, [sys.executable, '-S', '-c', 'import time; time.sleep(600)', argv[1]], {})\n"
            "os.waitpid(-1, 0)")
    launch = bench.launch(bench.script(text))
    await bench.engine().start(launch)
    await until(lambda: len(bench.pids()) == 2 and len(with_environment(bench.pids())) == 1, "the child")
    shim = bench.shim(launch.run_id)
    os.kill(shim.pid, signal.SIGKILL)
    await until(lambda: not lives(shim), "the shim to die")
    (member,) = with_environment(bench.pids())
    os.kill(member, signal.SIGKILL)
    (child,) = await until(lambda: bench.pids() if len(bench.pids()) == 1 else None, "the child to be alone")
    proof = await bench.engine().prove_released(launch.devices)
    assert [(holder.pid, holder.how) for holder in proof.devices[0].holders] == [(child, "session")]
    await bench.engine().kill(launch.run_id, 1)
    assert bench.pids() == {child}
    os.kill(child, signal.SIGKILL)
    await released(bench.engine(), launch)


@pytest.mark.anyio
async def test_a_process_id_that_is_used_again_is_not_taken_for_the_run(bench: LocalBench, deaf: Launch) -> None:
    """The record says that a member and the shim are some innocent process: same id, another start."""
    shim = bench.shim(deaf.run_id)
    with innocent_process() as innocent:
        os.kill(shim.pid, signal.SIGKILL)
        sweep(bench)
        await until(lambda: not bench.pids(), "the job to be gone")
        reused = [innocent.pid, innocent.identity.start_ticks - 1]
        for name, value in (("shim", [reused]), ("started", {"boot_id": _boot_id(), "members": [reused]})):
            (bench.run(deaf.run_id) / f"{name}.json").write_text(json.dumps(value))
        assert (await bench.engine().prove_released(deaf.devices)).released
        report = await bench.engine().status(deaf.run_id)
        assert (report.processes, report.ended) == (0, True)
        await bench.engine().kill(deaf.run_id, 1)
        await bench.engine().adopt()
        await ended(bench.engine(), deaf.run_id)


@pytest.mark.anyio
async def test_a_record_from_before_the_machine_was_restarted_names_nobody(bench: LocalBench, deaf: Launch) -> None:
    shim, started = bench.shim(deaf.run_id), bench.run(deaf.run_id) / "started.json"
    os.kill(shim.pid, signal.SIGKILL)
    sweep(bench)
    await until(lambda: not bench.pids() and not lives(shim), "the job to be gone")
    with innocent_process() as innocent:
        started.write_text(json.dumps({"boot_id": "another", "members": [list(innocent.identity)]}))
        assert (await bench.engine().prove_released(deaf.devices)).released
        await bench.engine().kill(deaf.run_id, 1)
        report = await ended(bench.engine(), deaf.run_id)
        assert report.state is RunState.KILLED


@pytest.mark.anyio
async def test_processes_of_a_run_without_record_still_hold_their_devices(bench: LocalBench, deaf: Launch) -> None:
    """F5: a node comes back with an old process alive. Its environment says which devices it was given."""
    stranger = LocalEngine(bench.folder / "another state")
    assert (await stranger.status(deaf.run_id)).state is RunState.ABSENT
    proof = await stranger.prove_released((*deaf.devices, *bench.devices(1)))
    assert [evidence.verdict for evidence in proof.devices] == ["held", "released"]
    assert [(holder.run_id, holder.pid) for holder in proof.devices[0].holders] == [
        (deaf.run_id, *bench.pids())]
    await bench.engine().kill(deaf.run_id, 1)
    await released(stranger, deaf)


# --- what a member gets

@pytest.mark.anyio
async def test_a_member_gets_no_secret_of_the_allocator(bench: LocalBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLOCATOR_DATABASE_URL", "postgresql://secret")
    file = bench.path()
    text = "import json, os, signal; json.dump([dict(os.environ), sorted(os.listdir('/proc/self/fd')), " \
           "[int(s) for s in signal.pthread_sigmask(signal.SIG_BLOCK, ())], os.getcwd()], open(argv[2], 'w'))"
    devices = tuple(Device("nvidia", f"GPU-{bench.token}-{index}") for index in range(2))
    launch = Launch("env", 1, (Member(bench.script(text, str(file)), devices, {"LR": "0.1", "PATH": "/usr/bin:/bin"}),),
                    folder=str(bench.folder))
    await bench.engine().start(launch)
    assert (await ended(bench.engine(), "env")).state is RunState.COMPLETED
    environ, descriptors, blocked, folder = json.loads(file.read_text())
    assert "ALLOCATOR_DATABASE_URL" not in environ
    assert environ["CUDA_VISIBLE_DEVICES"] == f"{devices[0].id},{devices[1].id}"
    assert (environ["LR"], environ["PATH"]) == ("0.1", "/usr/bin:/bin")
    assert descriptors == ["0", "1", "2", "3"], "the last is the listing itself"
    assert blocked == []
    assert folder == str(bench.folder)


@pytest.mark.anyio
async def test_output_is_kept_with_the_run_and_readable_by_nobody_else(bench: LocalBench) -> None:
    launch = bench.launch(bench.script("import sys; print('out'); print('err', file=sys.stderr)"))
    await bench.engine().start(launch)
    await ended(bench.engine(), launch.run_id)
    folder = bench.run(launch.run_id)
    assert sorted((folder / "log-0").read_text().split()) == ["err", "out"]
    assert {path.name for path in folder.iterdir() if path.stat().st_mode & 0o077} <= {"shim.log"}
    assert folder.stat().st_mode & 0o077 == 0


@pytest.mark.anyio
async def test_an_acknowledgement_written_before_anybody_asked_does_not_count(bench: LocalBench) -> None:
    ready = bench.path()
    launch = bench.launch(bench.script("import os; open(os.environ['HEADRACE_CHECKPOINT_ACK'], 'w').close()\n" + DEAF,
                                       str(ready)), checkpoint=CheckpointContract(linger_s=0.0))
    await bench.engine().start(launch)
    await until(ready.exists, "the job to turn deaf")
    await bench.engine().request_checkpoint(launch.run_id, 1, in_s(1.0))
    report = await ended(bench.engine(), launch.run_id)
    assert (report.state, report.members[0].acknowledged) == (RunState.KILLED, False)


# --- the engine is killed at every single write

CRASH = """
import os, signal, sys
from allocator.execution import record
written, plain = 0, record.write_atomically
def dying(path, data):
    global written
    written += 1
    if written == {write} and not {after}: os.kill(os.getpid(), signal.SIGKILL)
    plain(path, data)
    if written == {write}: os.kill(os.getpid(), signal.SIGKILL)
record.write_atomically = dying
from tests.contracts.local_command import main
main()
"""


def crashing(bench: LocalBench, write: int, after: bool, method: str, *arguments: Any) -> int:
    """Calls the engine in a process that SIGKILLs itself before or after its n-th write; returns its exit code."""
    command = bench.command(method, *arguments)
    command = [*command[:3], "-c", CRASH.format(write=write, after=after), *command[5:]]
    return subprocess.run(command, stdout=subprocess.DEVNULL, timeout=30, check=False).returncode


@pytest.mark.anyio
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("write", [1, 2])
async def test_killed_at_any_write_of_a_start(bench: LocalBench, write: int, after: bool) -> None:
    """F1: plan, launch. Nothing runs, nothing is held, and the same start does it."""
    launch = bench.launch(bench.script(FOREVER), bench.script(FOREVER))
    assert crashing(bench, write, after, "start", launch) == -signal.SIGKILL
    engine = bench.engine()
    proof = await engine.prove_released(launch.devices)
    assert proof.released is not (write == 2 and after), "a launch on record holds its devices until it is decided"
    assert await engine.adopt() == ()
    assert (await engine.prove_released(launch.devices)).released
    assert bench.pids() == set()
    assert (await engine.start(launch)).state is RunState.RUNNING
    assert len(bench.pids()) == 2
    await engine.kill(launch.run_id, 1)
    await released(engine, launch)


@pytest.mark.anyio
@pytest.mark.parametrize("after", [False, True])
async def test_killed_at_the_write_of_a_recall(bench: LocalBench, deaf: Launch, after: bool) -> None:
    """F1: before the order is on disk it was never given; once it is, it is carried out with nobody there to call."""
    deadline_s = in_s(2.5)
    assert crashing(bench, 1, after, "request_checkpoint", deaf.run_id, 1, deadline_s) == -signal.SIGKILL
    if not after:
        assert (await bench.engine().status(deaf.run_id)).state is RunState.RUNNING
        await bench.engine().request_checkpoint(deaf.run_id, 1, deadline_s)
    await until(lambda: not bench.pids(), "the job to be gone")
    assert time.time() <= deadline_s
    await released(bench.engine(), deaf)


@pytest.mark.anyio
@pytest.mark.parametrize("delay_s", [0.0, 0.03, 0.06, 0.09])
async def test_a_shim_killed_in_a_start_leaves_all_or_none(bench: LocalBench, delay_s: float) -> None:
    launch = bench.launch(bench.script(FOREVER), bench.script(FOREVER))
    with bench.spawn("start", launch) as starter:
        shim_file = bench.run(launch.run_id) / "shim.json"
        await until(shim_file.exists, "the shim")
        await asyncio.sleep(delay_s)
        os.kill(bench.shim(launch.run_id).pid, signal.SIGKILL)
        starter.kill()
    await bench.engine().adopt()

    async def settled() -> Report | None:
        await bench.engine().adopt()
        report = await bench.engine().status(launch.run_id)
        return report if report.state is not RunState.STARTING else None

    report = await until(settled, "the start to be decided")
    assert report.state in (RunState.NOT_STARTED, RunState.RUNNING)
    assert len(bench.pids()) == (2 if report.state is RunState.RUNNING else 0)
    await bench.engine().kill(launch.run_id, 1)
    await released(bench.engine(), launch)


@pytest.mark.anyio
async def test_nobody_passes_the_gate_before_all_are_in_place(bench: LocalBench) -> None:
    """The last member has no place to write its output to; none of the others may have run for an instant."""
    files = [bench.path() for _ in range(8)]
    launch = bench.launch(*(("touch", str(file)) for file in files), bench.script(FOREVER))
    (bench.run(launch.run_id) / "log-8").mkdir(parents=True)
    with pytest.raises(GangNotStarted, match=r"member 8: .*log-8: Is a directory"):
        await bench.engine().start(launch)
    assert [file for file in files if file.exists()] == []
    assert (await bench.engine().status(launch.run_id)).state is RunState.NOT_STARTED
    await released(bench.engine(), launch)
    with pytest.raises(GangNotStarted, match="log-8"):
        await bench.engine().start(launch)


@pytest.mark.anyio
async def test_starts_choose_their_devices_one_after_another(bench: LocalBench) -> None:
    launch, engine = bench.launch(bench.script(FOREVER)), bench.engine()
    lock = try_lock(bench.folder / "state" / "lock")
    assert lock is not None
    start = asyncio.create_task(engine.start(launch))
    done, _ = await asyncio.wait([start], timeout=0.3)
    assert not done
    assert (await engine.status(launch.run_id)).state is RunState.ABSENT
    os.close(lock)
    assert (await start).state is RunState.RUNNING
    await engine.kill(launch.run_id, 1)
    await released(engine, launch)


# --- control groups

@pytest.fixture
def cgroup_bench(tmp_path: Path) -> Iterator[LocalBench]:
    mount = cgroups.mount_point()
    parent = mount / f"headrace-test-{secrets.token_hex(4)}" if mount is not None else Path("/nonexistent/none")
    try:
        parent.mkdir()
    except OSError as error:
        pytest.skip(f"no control group of version 2 that we may divide: {error}")
    bench = LocalBench(tmp_path)
    bench.cgroup_parent = parent
    yield bench
    sweep(bench)
    deadline_s = time.monotonic() + 10
    while not cgroups.remove(parent) and time.monotonic() < deadline_s:
        time.sleep(0.05)


@pytest.mark.anyio
async def test_nothing_escapes_a_control_group(cgroup_bench: LocalBench) -> None:
    """Out of its session, without environment, its parent and the shim dead: only the group still knows it."""
    launch = cgroup_bench.launch(cgroup_bench.script(ESCAPE + FOREVER))
    await cgroup_bench.engine().start(launch)
    await until(lambda: len(cgroup_bench.pids()) == 2 and len(with_environment(cgroup_bench.pids())) == 1, "the escape")
    shim = cgroup_bench.shim(launch.run_id)
    os.kill(shim.pid, signal.SIGKILL)
    await until(lambda: not lives(shim), "the shim to die")
    (member,) = with_environment(cgroup_bench.pids())
    os.kill(member, signal.SIGKILL)
    (child,) = await until(lambda: cgroup_bench.pids() if len(cgroup_bench.pids()) == 1 else None, "one to be left")
    proof = await cgroup_bench.engine().prove_released(launch.devices)
    assert [(holder.pid, holder.how) for holder in proof.devices[0].holders] == [(child, "cgroup")]
    await cgroup_bench.engine().kill(launch.run_id, 1)
    await released(cgroup_bench.engine(), launch)
    assert cgroup_bench.pids() == set()
    assert cgroup_bench.cgroup_parent is not None
    parent = cgroup_bench.cgroup_parent
    await until(lambda: not [path for path in parent.iterdir() if path.is_dir()], "the run's group to be removed")


@pytest.mark.anyio
async def test_a_group_that_cannot_be_entered_starts_nobody(cgroup_bench: LocalBench) -> None:
    launch = cgroup_bench.launch(cgroup_bench.script(FOREVER))
    assert cgroup_bench.cgroup_parent is not None
    cgroup_bench.cgroup_parent /= "missing"
    with pytest.raises(Exception, match="missing"):
        await cgroup_bench.engine().start(launch)
    cgroup_bench.cgroup_parent = cgroup_bench.cgroup_parent.parent
    assert cgroup_bench.pids() == set()
    await released(cgroup_bench.engine(), launch)


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def test_the_margin_is_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="kill_margin_s"):
        LocalEngine(tmp_path, kill_margin_s=float("nan"))
