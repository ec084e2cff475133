"""The contract of an execution engine: what any of them must do, with real processes.

An engine's test module derives a class from `ExecutionEngineContract` and gives it a `bench` fixture. The suite looks
at the engine's word and, beside it, at the machine's own process table: each job carries a token on its command line,
and `pids` finds whatever carries it, children and orphans included.
"""

import asyncio
import contextlib
import itertools
import json
import secrets
import signal
import subprocess
import sys
import textwrap
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from allocator.execution.devices import Device
from allocator.execution.engine import (
    BadLaunch,
    DevicesBusy,
    EngineUnreachable,
    ExecutionEngine,
    ExecutionError,
    GangNotStarted,
    StaleEpoch,
    until_released,
)
from allocator.execution.values import (
    Acknowledgement,
    CheckpointContract,
    Launch,
    Member,
    Released,
    Report,
    RunState,
    Verdict,
)

ROOT = Path(__file__).resolve().parents[2]
LONG_S = 60.0
"""A grace that no test means to wait for."""

FOREVER = "import time\nwhile True: time.sleep(60)"
DEAF = """
import signal
for s in (10, 15): signal.signal(s, signal.SIG_IGN)
open(argv[2], 'w').close()
""" + FOREVER
"""Ignores SIGUSR1 and SIGTERM; touches its second argument once it does."""
SAVES = """
import os, time, signal
signal.pthread_sigmask(signal.SIG_BLOCK, {10})
open(argv[2], 'w').close()
signal.sigwait({10})
def acknowledge():
    path = os.environ['HEADRACE_CHECKPOINT_ACK']
    open(path + '~', 'w').write('{"step": 7, "resume_from": "/seven"}')
    os.rename(path + '~', path)
"""
"""Waits for SIGUSR1; what it does then is for the test to add."""
ESCAPE = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execve(sys.executable, [sys.executable, '-S', '-c', 'import time; time.sleep(600)', argv[1]], {})
    os._exit(0)
os.wait()
"""
"""Leaves a grandchild behind: in a session of its own, with an empty environment, its parent dead."""


class Bench(ABC):
    """What the suite needs of an engine's test module."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.token = secrets.token_hex(8)
        self._numbers = itertools.count()

    @abstractmethod
    def engine(self, wall_ahead_s: float = 0.0) -> ExecutionEngine:
        """The engine as after a restart: a new object on the same records. Its wall clock may be off."""

    @abstractmethod
    def command(self, method: str, *arguments: Any) -> list[str]:
        """A command line that calls one method of the engine in a process of its own; it prints `begin` and `done`."""

    @abstractmethod
    def make_unreachable(self, run_id: str) -> None:
        """Makes the engine unable to tell what became of the run."""

    def spawn(self, method: str, *arguments: Any) -> "subprocess.Popen[bytes]":
        """The same, started."""
        return subprocess.Popen(self.command(method, *arguments), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)

    def devices(self, count: int) -> tuple[Device, ...]:
        """Devices that nobody else has."""
        return tuple(Device("cpu", f"{self.token}-{next(self._numbers)}") for _ in range(count))

    def script(self, text: str, *arguments: str) -> tuple[str, ...]:
        """A Python program; its `argv[1]` is the token, then come the arguments."""
        return (sys.executable, "-S", "-c", "from sys import argv\n" + textwrap.dedent(text), self.token, *arguments)

    def training(self, *options: str) -> Member:
        """The sample training job, in steps of 5 ms."""
        argv = (sys.executable, "-m", "loadtest.training_job", "--json", "--step-ms", "5",
                "--checkpoint", str(self.folder / f"{self.token}-{{rank}}.npz"), *options)
        return Member(argv, env={"PYTHONPATH": str(ROOT)})

    def launch(self, *argvs: Sequence[str], epoch: int = 1, **changes: Any) -> Launch:
        """A run with one device a member."""
        members = tuple(Member(tuple(argv), self.devices(1)) for argv in argvs)
        return replace(Launch(f"run-{next(self._numbers)}", epoch, members), **changes)

    def path(self) -> Path:
        """A file that does not exist yet."""
        return self.folder / f"file-{next(self._numbers)}"

    def pids(self) -> set[int]:
        """Every process with the token on its command line, whatever the engine says."""
        found = set()
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if self.token.encode() in path.read_bytes():
                    found.add(int(path.parent.name))
        return found


async def until(look: Callable[[], Awaitable[Any] | Any], what: str, limit_s: float = 20.0) -> Any:
    """Polls until the answer is true, and returns it."""
    end_s = time.monotonic() + limit_s
    while True:
        answer = look()
        if isinstance(answer, Awaitable):
            answer = await answer
        if answer:
            return answer
        assert time.monotonic() < end_s, f"waited {limit_s:g} s in vain for {what}"
        await asyncio.sleep(0.01)


async def ended(engine: ExecutionEngine, run_id: str, limit_s: float = 20.0) -> Report:
    """The run's last report."""
    async def look() -> Report | None:
        report = await engine.status(run_id)
        return report if report.ended else None

    report = await until(look, f"the end of {run_id}", limit_s)
    assert isinstance(report, Report)
    return report


async def released(engine: ExecutionEngine, launch: Launch, limit_s: float = 20.0) -> None:
    """Waits until the engine has proof for every device of the launch."""
    proof = await until_released(engine, launch.devices, timeout_s=limit_s)
    assert proof.released, proof


def in_s(seconds: float) -> float:
    """A deadline."""
    return time.time() + seconds


@pytest.mark.anyio
class ExecutionEngineContract:
    """Derive from it; see the head of this module."""

    # --- start: all or none, once, on free devices

    async def test_a_gang_runs_with_its_rank_and_its_devices(self, bench: Bench) -> None:
        says = ("import os; names = 'RANK', 'WORLD_SIZE', 'HEADRACE_RUN_ID'\n"
                "with open(argv[2], 'w') as file: print(*(os.environ[name] for name in names), file=file)")
        files = [bench.path(), bench.path()]
        launch = bench.launch(*(bench.script(says, str(file)) for file in files))
        engine = bench.engine()
        await engine.start(launch)
        report = await ended(engine, launch.run_id)
        assert report.state is RunState.COMPLETED
        assert [member.exit_code for member in report.members] == [0, 0]
        assert [file.read_text().split() for file in files] == [[str(rank), "2", launch.run_id] for rank in (0, 1)]
        await released(engine, launch)

    async def test_a_member_that_cannot_be_started_keeps_all_from_running(self, bench: Bench) -> None:
        broken = bench.path()
        broken.write_bytes(b"\x7fELF, but not really")
        broken.chmod(0o755)
        engine = bench.engine()
        for argv, error in (((str(bench.path()),), BadLaunch), ((str(broken),), GangNotStarted)):
            launch = bench.launch(bench.script(FOREVER), bench.script(FOREVER), argv)
            with pytest.raises(error, match="member 2"):
                await engine.start(launch)
            assert (await engine.status(launch.run_id)).state in (RunState.NOT_STARTED, RunState.ABSENT)
            assert bench.pids() == set()
            await released(engine, launch)

    async def test_the_same_start_again_starts_nothing_and_another_launch_is_refused(self, bench: Bench) -> None:
        launch = bench.launch(bench.script(FOREVER), bench.script(FOREVER))
        await bench.engine().start(launch)
        pids = bench.pids()
        assert len(pids) == 2
        assert (await bench.engine().start(launch)).state is RunState.RUNNING
        assert bench.pids() == pids
        with pytest.raises(BadLaunch, match="another launch"):
            await bench.engine().start(replace(launch, members=launch.members[:1]))
        await bench.engine().kill(launch.run_id, 1)

    async def test_a_device_that_carries_a_run_is_refused_and_the_text_says_by_whom(self, bench: Bench) -> None:
        engine, first = bench.engine(), bench.launch(bench.script(FOREVER))
        await engine.start(first)
        second = bench.launch(bench.script(FOREVER))
        both = replace(second, members=(replace(second.members[0], devices=second.devices + first.devices),))
        with pytest.raises(DevicesBusy, match=first.run_id):
            await engine.start(both)
        assert (await engine.status(second.run_id)).state is RunState.ABSENT
        assert len(bench.pids()) == 1
        await engine.kill(first.run_id, 1)
        await released(engine, first)
        await engine.start(both)
        await engine.kill(second.run_id, 1)
        await released(engine, both)

    async def test_two_starts_at_once_get_a_device_one_of_them(self, bench: Bench) -> None:
        one = bench.launch(bench.script(FOREVER))
        other = replace(bench.launch(bench.script(FOREVER)), members=one.members)
        answers = await asyncio.gather(bench.engine().start(one), bench.engine().start(other), return_exceptions=True)
        assert sorted(type(answer).__name__ for answer in answers) == ["DevicesBusy", "Report"]
        assert len(bench.pids()) == 1
        for launch in (one, other):
            await bench.engine().kill(launch.run_id, 1)

    async def test_a_dead_member_makes_a_broken_gang_that_still_holds_its_devices(self, bench: Bench) -> None:
        engine = bench.engine()
        launch = bench.launch(bench.script(FOREVER), bench.script("raise SystemExit(3)"))
        await engine.start(launch)

        async def is_broken() -> Report | None:
            report = await engine.status(launch.run_id)
            seen = report.state is RunState.BROKEN and report.members[1].exit_code is not None
            return report if seen else None

        report = await until(is_broken, "the gang to be reported broken")
        assert [(member.alive, member.exit_code) for member in report.members] == [(True, None), (False, 3)]
        assert "member 1 ended with exit code 3" in report.note
        assert not (await engine.prove_released(launch.devices)).released
        await engine.kill(launch.run_id, 1)
        await released(engine, launch)

    # --- recall

    async def test_a_run_that_saves_is_off_its_devices_long_before_the_deadline(self, bench: Bench) -> None:
        engine = bench.engine()
        member = bench.training("--steps", "100000", "--save-every", "5")
        launch = Launch("recalled", 1, tuple(replace(member, devices=bench.devices(1)) for _ in range(2)))
        await engine.start(launch)
        files = [bench.folder / f"{bench.token}-{rank}.npz" for rank in (0, 1)]
        await until(lambda: all(file.exists() for file in files), "both members to train")
        receipt = await engine.request_checkpoint("recalled", 1, in_s(LONG_S))
        assert receipt.verdict is Verdict.ACCEPTED
        await released(engine, launch, limit_s=LONG_S / 2)
        report = await ended(engine, "recalled")
        assert report.state is RunState.CHECKPOINTED
        assert not report.forced
        assert [member.resume_from for member in report.members] == [str(file) for file in files]
        assert bench.pids() == set()

    async def test_a_recalled_run_resumes_to_the_curve_that_it_would_have_had(self, bench: Bench) -> None:
        engine, file = bench.engine(), bench.folder / f"{bench.token}-0.npz"
        digests = []
        for interrupted in (False, True):
            run_id = f"curve-{interrupted}"
            file.unlink(missing_ok=True)
            await engine.start(Launch(run_id, 1, (bench.training("--steps", "60", "--save-every", "7"),)))
            if interrupted:
                await until(file.exists, "the job to train")
                await engine.request_checkpoint(run_id, 1, in_s(LONG_S))
                report = await ended(engine, run_id)
                assert report.state is RunState.CHECKPOINTED
                assert report.members[0].step is not None
                assert 0 < report.members[0].step < 60
                again = Launch("curve-resumed", 2, (bench.training("--steps", "60", "--resume"),))
                await engine.start(again)
                run_id = again.run_id
            assert (await ended(engine, run_id)).state is RunState.COMPLETED
            digests.append(file.read_bytes())
        assert digests[0] == digests[1]

    async def test_what_ignores_its_signal_is_gone_by_the_deadline_and_not_before_its_grace(self, bench: Bench) -> None:
        engine, ready = bench.engine(), bench.path()
        launch = bench.launch(bench.script(DEAF, str(ready)))
        await engine.start(launch)
        await until(ready.exists, "the job to turn deaf")
        asked_s, deadline_s = time.time(), in_s(2.0)
        await engine.request_checkpoint(launch.run_id, 1, deadline_s)
        assert (await engine.status(launch.run_id)).state is RunState.DRAINING
        await until(lambda: not bench.pids(), "the job to be gone")
        gone_s = time.time()
        assert gone_s <= deadline_s
        assert gone_s - asked_s > 0.5 * (deadline_s - asked_s)
        await released(engine, launch)
        report = await ended(engine, launch.run_id)
        assert report.state is RunState.KILLED
        assert report.forced
        assert "deadline" in report.note

    async def test_an_acknowledgement_frees_nothing_while_a_child_survives(self, bench: Bench) -> None:
        """F3: the member saves and exits; what it leaves has left its session and cleared its environment."""
        engine, ready = bench.engine(), bench.path()
        launch = bench.launch(bench.script(ESCAPE + SAVES + "acknowledge()", str(ready)),
                              checkpoint=CheckpointContract(linger_s=0.5))
        await engine.start(launch)
        await until(ready.exists, "the job to be ready")
        await engine.request_checkpoint(launch.run_id, 1, in_s(LONG_S))
        await until(lambda: len(bench.pids()) == 1, "the member to be gone and its child to be left")
        proof = await engine.prove_released(launch.devices)
        assert proof.released is (not bench.pids())
        assert proof.devices[0].verdict is Released.HELD
        # The member has no command line any more, and may yet be on its way out.
        assert bench.pids() <= {holder.pid for holder in proof.devices[0].holders}
        await released(engine, launch, limit_s=LONG_S / 2)
        assert bench.pids() == set()
        report = await ended(engine, launch.run_id)
        assert (report.state, report.forced, report.members[0].step) == (RunState.CHECKPOINTED, True, 7)

    async def test_a_member_that_acknowledges_and_stays_does_not_keep_its_devices_till_the_deadline(
        self, bench: Bench
    ) -> None:
        engine, ready = bench.engine(), bench.path()
        launch = bench.launch(bench.script(SAVES + "acknowledge()\n" + FOREVER, str(ready)),
                              checkpoint=CheckpointContract(linger_s=0.2))
        await engine.start(launch)
        await until(ready.exists, "the job to be ready")
        await engine.request_checkpoint(launch.run_id, 1, in_s(LONG_S))
        await released(engine, launch, limit_s=LONG_S / 2)
        assert (await ended(engine, launch.run_id)).state is RunState.CHECKPOINTED

    async def test_a_checkpoint_longer_than_the_grace_is_lost_and_the_one_before_is_whole(self, bench: Bench) -> None:
        """F4."""
        engine, file = bench.engine(), bench.folder / f"{bench.token}-0.npz"
        launch = Launch("slow", 1, (replace(
            bench.training("--steps", "100000", "--save-every", "10", "--checkpoint-s", str(LONG_S)),
            devices=bench.devices(1)),))
        await engine.start(launch)
        await until(file.exists, "a first checkpoint")
        deadline_s = in_s(1.0)
        await engine.request_checkpoint("slow", 1, deadline_s)
        await released(engine, launch)
        report = await ended(engine, "slow")
        assert report.state is RunState.KILLED
        assert not report.members[0].acknowledged
        await engine.start(Launch("slow-again", 2, (bench.training("--steps", "1", "--resume"),)))
        assert (await ended(engine, "slow-again")).state is RunState.COMPLETED

    async def test_a_checkpoint_that_fails_is_no_checkpoint(self, bench: Bench) -> None:
        """F4, the other half; and a job that knows nothing of the signal dies of it."""
        file = bench.folder / f"{bench.token}-0.npz"
        fails = bench.training("--steps", "100000", "--save-every", "5", "--fail-checkpoint")
        knows_nothing = Member(bench.script("open(argv[2], 'w')\n" + FOREVER, str(file)))
        for member, note in ((fails, "exit code 1"), (knows_nothing, "SIGUSR1")):
            file.unlink(missing_ok=True)
            engine, launch = bench.engine(), bench.launch()
            launch = replace(launch, members=(replace(member, devices=bench.devices(1)),))
            await engine.start(launch)
            await until(file.exists, "the job to run")
            await engine.request_checkpoint(launch.run_id, 1, in_s(LONG_S))
            report = await ended(engine, launch.run_id)
            assert report.state is RunState.FAILED
            assert not report.members[0].acknowledged
            assert note in report.note
            await released(engine, launch)

    async def test_a_job_may_acknowledge_by_its_exit(self, bench: Bench) -> None:
        engine, ready = bench.engine(), bench.path()
        launch = bench.launch(bench.script(SAVES, str(ready)),
                              checkpoint=CheckpointContract(acknowledgement=Acknowledgement.EXIT))
        await engine.start(launch)
        await until(ready.exists, "the job to be ready")
        await engine.request_checkpoint(launch.run_id, 1, in_s(LONG_S))
        assert (await ended(engine, launch.run_id)).state is RunState.CHECKPOINTED

    async def test_a_run_that_ends_by_itself_meanwhile_is_completed(self, bench: Bench) -> None:
        """F8: the recall comes in the same moment as the end."""
        engine, ready = bench.engine(), bench.path()
        launch = bench.launch(bench.script("import signal; signal.signal(10, signal.SIG_IGN); open(argv[2], 'w')\n"
                                           "import time; time.sleep(0.3)", str(ready)))
        await engine.start(launch)
        await until(ready.exists, "the job to be ready")
        await engine.request_checkpoint(launch.run_id, 1, in_s(LONG_S))
        assert (await ended(engine, launch.run_id)).state is RunState.COMPLETED
        assert (await engine.request_checkpoint(launch.run_id, 1, in_s(1.0))).verdict is Verdict.ENDED

    # --- deadlines and epochs

    async def test_of_two_recalls_the_earlier_deadline_holds(self, bench: Bench) -> None:
        """F7."""
        engine, ready = bench.engine(), bench.path()
        launch = bench.launch(bench.script(DEAF, str(ready)))
        await engine.start(launch)
        await until(ready.exists, "the job to turn deaf")
        first_s, later_s, sooner_s = in_s(LONG_S), in_s(2 * LONG_S), in_s(1.0)
        assert (await engine.request_checkpoint(launch.run_id, 1, first_s)).deadline_unix_s == pytest.approx(first_s)
        later = await engine.request_checkpoint(launch.run_id, 1, later_s)
        assert later.verdict is Verdict.REPEATED
        assert later.deadline_unix_s == pytest.approx(first_s)
        sooner = await bench.engine().request_checkpoint(launch.run_id, 1, sooner_s)
        assert sooner.verdict is Verdict.ACCEPTED
        assert sooner.deadline_unix_s == pytest.approx(sooner_s)
        await until(lambda: not bench.pids(), "the job to be gone")
        assert time.time() <= sooner_s

    async def test_an_older_epoch_is_ignored_and_told_so(self, bench: Bench) -> None:
        engine, launch = bench.engine(), bench.launch(bench.script(FOREVER), epoch=5)
        await engine.start(launch)
        for receipt in (await engine.request_checkpoint(launch.run_id, 4, in_s(0.1)),
                        await engine.stop(launch.run_id, 4, in_s(0.1)),
                        await engine.kill(launch.run_id, 4)):
            assert (receipt.verdict, receipt.epoch) == (Verdict.STALE_EPOCH, 5)
        report = await engine.status(launch.run_id)
        assert (report.state, report.epoch, report.deadline_unix_s) == (RunState.RUNNING, 5, None)
        receipt = await engine.request_checkpoint(launch.run_id, 6, in_s(LONG_S))
        assert (receipt.verdict, receipt.epoch) == (Verdict.ACCEPTED, 6)
        assert (await bench.engine().kill(launch.run_id, 5)).verdict is Verdict.STALE_EPOCH
        await engine.kill(launch.run_id, 6)
        await released(engine, launch)

    async def test_a_command_that_comes_before_its_run_closes_the_door_to_it(self, bench: Bench) -> None:
        engine, launch = bench.engine(), bench.launch(bench.script(FOREVER), epoch=3)
        receipt = await engine.stop(launch.run_id, 3, in_s(1.0))
        assert receipt.verdict is Verdict.UNKNOWN_RUN
        assert (await engine.status(launch.run_id)).state is RunState.ABSENT
        with pytest.raises(StaleEpoch):
            await bench.engine().start(launch)
        assert bench.pids() == set()
        await bench.engine().start(replace(launch, epoch=4))
        await engine.kill(launch.run_id, 4)
        await released(engine, launch)

    @pytest.mark.parametrize("jump_s", [3600.0, -3600.0])
    async def test_a_jump_of_the_wall_clock_moves_no_deadline(self, bench: Bench, jump_s: float) -> None:
        """F6: the clock jumps after the recall; the engine is restarted, and told again what it was told before."""
        ready = bench.path()
        launch = bench.launch(bench.script(DEAF, str(ready)))
        await bench.engine().start(launch)
        await until(ready.exists, "the job to turn deaf")
        asked_s, deadline_s = time.time(), in_s(2.0)
        await bench.engine().request_checkpoint(launch.run_id, 1, deadline_s)
        jumped = bench.engine(wall_ahead_s=jump_s)
        (report,) = await jumped.adopt()
        assert report.deadline_unix_s == pytest.approx(deadline_s + jump_s, abs=0.2)
        again = await jumped.request_checkpoint(launch.run_id, 1, deadline_s)
        assert again.verdict is Verdict.REPEATED
        assert again.deadline_unix_s == pytest.approx(deadline_s + jump_s, abs=0.2)
        await until(lambda: not bench.pids(), "the job to be gone")
        gone_s = time.time()
        assert gone_s <= deadline_s
        assert gone_s - asked_s > 0.5 * (deadline_s - asked_s)

    async def test_a_deadline_in_the_past_ends_the_run_now(self, bench: Bench) -> None:
        engine, ready = bench.engine(), bench.path()
        launch = bench.launch(bench.script(DEAF, str(ready)))
        await engine.start(launch)
        await until(ready.exists, "the job to turn deaf")
        await engine.request_checkpoint(launch.run_id, 1, in_s(-5.0))
        await released(engine, launch)
        with pytest.raises(ValueError, match="deadline"):
            await engine.request_checkpoint(launch.run_id, 1, float("nan"))

    # --- stop, kill, the end

    async def test_stop_ends_without_saving(self, bench: Bench) -> None:
        engine, launch = bench.engine(), bench.launch(bench.script(FOREVER))
        await engine.start(launch)
        assert (await engine.stop(launch.run_id, 1, in_s(LONG_S))).verdict is Verdict.ACCEPTED
        report = await ended(engine, launch.run_id)
        assert (report.state, report.forced) == (RunState.STOPPED, False)
        await released(engine, launch)

    async def test_kill_ends_now_and_takes_along_what_escaped(self, bench: Bench) -> None:
        engine, ready = bench.engine(), bench.path()
        launch = bench.launch(bench.script(ESCAPE + DEAF, str(ready)))
        await engine.start(launch)
        await until(ready.exists, "the job to turn deaf")
        assert len(bench.pids()) == 2
        assert (await engine.kill(launch.run_id, 1)).verdict is Verdict.ACCEPTED
        await released(engine, launch)
        assert bench.pids() == set()
        assert (await ended(engine, launch.run_id)).state is RunState.KILLED
        assert (await engine.kill(launch.run_id, 1)).verdict is Verdict.ENDED

    async def test_what_a_finished_run_leaves_behind_goes_after_it(self, bench: Bench) -> None:
        engine = bench.engine()
        launch = bench.launch(bench.script(ESCAPE), checkpoint=CheckpointContract(linger_s=0.3))
        await engine.start(launch)
        await released(engine, launch)
        assert bench.pids() == set()
        report = await ended(engine, launch.run_id)
        assert (report.state, report.forced) == (RunState.COMPLETED, True)

    async def test_a_run_is_on_record_until_it_is_forgotten(self, bench: Bench) -> None:
        engine, launch = bench.engine(), bench.launch(bench.script(FOREVER))
        assert (await engine.status(launch.run_id)).state is RunState.ABSENT
        await engine.start(launch)
        assert not await engine.forget(launch.run_id)
        await engine.kill(launch.run_id, 1)
        await ended(engine, launch.run_id)
        assert [report.run_id for report in await bench.engine().adopt()] == [launch.run_id]
        assert await engine.forget(launch.run_id)
        assert await engine.forget(launch.run_id)
        assert await bench.engine().adopt() == ()

    # --- the allocator dies, the engine does not answer

    async def test_a_restarted_engine_finds_its_runs_and_disturbs_none(self, bench: Bench) -> None:
        launches = [bench.launch(bench.script(FOREVER), bench.script(FOREVER)) for _ in range(2)]
        for launch in launches:
            await bench.engine().start(launch)
        pids = bench.pids()
        for _ in range(2):
            reports = await bench.engine().adopt()
            assert [(report.run_id, report.state, report.processes) for report in reports] == [
                (launch.run_id, RunState.RUNNING, 2) for launch in launches]
        assert bench.pids() == pids
        for launch in launches:
            await bench.engine().kill(launch.run_id, 1)
            await released(bench.engine(), launch)

    async def test_the_deadline_holds_when_the_allocator_is_killed_and_stays_away(self, bench: Bench) -> None:
        """F1: nobody who gave the order is there when it falls due."""
        ready = bench.path()
        launch = bench.launch(bench.script(DEAF, str(ready)))
        with bench.spawn("start", launch) as starter:
            assert starter.stdout is not None
            assert [starter.stdout.readline() for _ in range(2)] == [b"begin\n", b"done\n"]
            starter.kill()
        await until(ready.exists, "the job to turn deaf")
        deadline_s = in_s(3.0)
        with bench.spawn("request_checkpoint", launch.run_id, 1, deadline_s) as recaller:
            assert recaller.stdout is not None
            assert [recaller.stdout.readline() for _ in range(2)] == [b"begin\n", b"done\n"]
            recaller.kill()
        assert len(bench.pids()) == 1
        await until(lambda: not bench.pids(), "the job to be gone")
        assert time.time() <= deadline_s
        (report,) = await bench.engine().adopt()
        assert report.state in (RunState.KILLED, RunState.KILLING)
        assert (await ended(bench.engine(), launch.run_id)).state is RunState.KILLED

    async def test_an_allocator_killed_at_any_time_in_a_start_leaves_all_or_none(self, bench: Bench) -> None:
        """F1, F15: afterwards the run is whole or nothing, the same start completes it, and it is there once."""
        outcomes = set()
        for hundredth in range(6):
            launch = bench.launch(bench.script(FOREVER), bench.script(FOREVER))
            with bench.spawn("start", launch) as starter:
                assert starter.stdout is not None
                assert starter.stdout.readline() == b"begin\n"
                await asyncio.sleep(0.015 * hundredth)
                starter.send_signal(signal.SIGKILL)
            engine = bench.engine()

            async def settled(engine: ExecutionEngine = engine, launch: Launch = launch) -> Report | None:
                await engine.adopt()
                report = await engine.status(launch.run_id)
                return report if report.state is not RunState.STARTING else None

            report = await until(settled, "the start to be decided")
            assert report.state in (RunState.RUNNING, RunState.ABSENT, RunState.NOT_STARTED), report
            assert len(bench.pids()) == (2 if report.state is RunState.RUNNING else 0)
            outcomes.add(report.state)
            if report.state is not RunState.NOT_STARTED:
                assert (await engine.start(launch)).state is RunState.RUNNING
                assert len(bench.pids()) == 2
            await engine.kill(launch.run_id, 1)
            await released(engine, launch)
        assert len(outcomes) > 1, "all kills came before the start, or all after it"

    async def test_what_cannot_be_told_is_neither_running_nor_gone(self, bench: Bench) -> None:
        """F14."""
        engine, launch = bench.engine(), bench.launch(bench.script(FOREVER))
        await engine.start(launch)
        pids = bench.pids()
        bench.make_unreachable(launch.run_id)
        report = await engine.status(launch.run_id)
        assert report.state is RunState.UNKNOWN
        assert not report.ended
        assert report.note
        for devices in (launch.devices, bench.devices(1)):
            proof = await engine.prove_released(devices)
            assert not proof.released
            assert [evidence.verdict for evidence in proof.devices] == [Released.UNKNOWN]
        with pytest.raises(EngineUnreachable):
            await engine.request_checkpoint(launch.run_id, 1, in_s(1.0))
        with pytest.raises(ExecutionError):
            await engine.start(bench.launch(bench.script(FOREVER)))
        assert [report.state for report in await engine.adopt()] == [RunState.UNKNOWN]
        assert bench.pids() == pids

    @pytest.mark.parametrize("run_id", ["", "../away", ".hidden", "a/b", "x" * 200, "a\n"])
    async def test_a_run_id_that_is_no_name_is_refused(self, bench: Bench, run_id: str) -> None:
        engine = bench.engine()
        with pytest.raises(BadLaunch, match="run id"):
            await engine.start(replace(bench.launch(bench.script(FOREVER)), run_id=run_id))
        assert (await engine.status(run_id)).state is RunState.ABSENT


def encode(arguments: Sequence[Any]) -> str:
    """Arguments of `Bench.command` for a command line."""
    return json.dumps([["launch", msgspec.to_builtins(one)] if isinstance(one, Launch) else ["plain", one]
                       for one in arguments])


def decode(text: str) -> list[Any]:
    """The arguments again."""
    return [msgspec.convert(value, Launch) if kind == "launch" else value for kind, value in json.loads(text)]
