"""The supervisor, with real child processes: small Python programs."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.embedded.supervisor import (
    BackoffRules,
    ChildSpec,
    ChildState,
    ChildStatus,
    Supervisor,
    SupervisorError,
    describe_exit,
    next_backoff,
)

pytestmark = pytest.mark.real_time

QUICK = BackoffRules(first_s=0.05, factor=2.0, cap_s=0.2, stable_s=60.0)
SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"ok")
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
FOREVER = "import time\nwhile True: time.sleep(60)"


def script(text: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-c", textwrap.dedent(text), *arguments)


def child(tmp_path: Path, text: str, name: str = "one") -> ChildSpec:
    return ChildSpec(name, script(text), tmp_path / f"{name}.log")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def runs(pid: int) -> bool:
    """True while the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def until(condition: Callable[[], bool], limit_s: float = 20.0) -> None:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, "waited in vain"
        await asyncio.sleep(0.02)


def pid_of(supervisor: Supervisor, index: int = 0) -> int:
    pid = supervisor.status()[index].pid
    assert pid is not None
    return pid


# --- next_backoff

rules_of_any_kind = st.builds(
    lambda first_s, factor, more_s, stable_s: BackoffRules(first_s, factor, first_s + more_s, stable_s),
    st.floats(0.01, 5), st.floats(1, 4), st.floats(0, 60), st.floats(0.1, 100),
)


@given(rules=rules_of_any_kind, runs_s=st.lists(st.floats(0, 200), max_size=30))
def test_backoff_stays_between_first_and_cap_and_starts_anew_after_a_stable_run(
    rules: BackoffRules, runs_s: list[float]
) -> None:
    wait_s: float | None = None
    for ran_s in runs_s:
        before_s, wait_s = wait_s, next_backoff(wait_s, ran_s, rules)
        assert rules.first_s <= wait_s <= rules.cap_s
        if before_s is None or ran_s >= rules.stable_s:
            assert wait_s == rules.first_s
        else:
            assert wait_s >= before_s


def test_backoff_doubles_to_the_cap() -> None:
    rules = BackoffRules(first_s=1, factor=2, cap_s=5, stable_s=10)
    waits: list[float | None] = [None]
    for _ in range(4):
        waits.append(next_backoff(waits[-1], 0.1, rules))
    assert waits[1:] == [1, 2, 4, 5]


# --- life

def test_a_child_is_ready_when_its_url_answers_and_is_ended_on_close(tmp_path: Path) -> None:
    async def scenario() -> None:
        port = free_port()
        spec = ChildSpec("web", script(SERVER, str(port)), tmp_path / "web.log", f"http://127.0.0.1:{port}/")
        seen: list[ChildState] = []
        async with Supervisor([spec], on_change=lambda status: seen.append(status.state)) as supervisor:
            await supervisor.wait_ready()
            pid = pid_of(supervisor)
            assert runs(pid)
        assert not runs(pid)
        assert seen == [ChildState.STARTING, ChildState.READY, ChildState.STOPPED]
        assert supervisor.status()[0].pid is None
        await supervisor.aclose()       # a second time does nothing

    asyncio.run(scenario())


def test_a_killed_child_comes_back_on_the_same_port(tmp_path: Path) -> None:
    async def scenario() -> None:
        port = free_port()
        spec = ChildSpec("web", script(SERVER, str(port)), tmp_path / "web.log", f"http://127.0.0.1:{port}/")
        async with Supervisor([spec], backoff=QUICK) as supervisor:
            await supervisor.wait_ready()
            first = pid_of(supervisor)
            os.kill(first, signal.SIGKILL)
            await until(lambda: supervisor.status()[0].restarts == 1)
            await until(lambda: supervisor.status()[0].state is ChildState.READY)
            assert supervisor.status()[0].last_exit == -signal.SIGKILL
            assert pid_of(supervisor) != first
            await supervisor.wait_ready()       # a death after readiness is no failed start
        assert (tmp_path / "web.log").read_text().count("--- ") == 2     # appended, not begun anew

    asyncio.run(scenario())


def test_a_crash_loop_backs_off(tmp_path: Path) -> None:
    async def scenario() -> None:
        seen: list[ChildStatus] = []
        async with Supervisor([child(tmp_path, "raise SystemExit(7)")], backoff=QUICK,
                              on_change=seen.append) as supervisor:
            await until(lambda: supervisor.status()[0].restarts >= 4)
        backoffs = sorted({status.backoff_s for status in seen if status.backoff_s is not None})
        assert backoffs == [0.05, 0.1, 0.2]
        deaths = [status for status in seen if status.state is ChildState.BACKOFF]
        assert {status.last_exit for status in deaths} == {7}
        assert len(deaths) == len({status.restarts for status in deaths})     # each death is told once

    asyncio.run(scenario())


def test_wait_ready_tells_of_a_failed_start_with_the_end_of_the_log(tmp_path: Path) -> None:
    async def scenario() -> None:
        specs = [child(tmp_path, FOREVER, "good"), child(tmp_path, "raise SystemExit('no such weights')", "bad")]
        specs[1] = ChildSpec("bad", specs[1].argv, specs[1].log_path, "http://127.0.0.1:9/")
        async with Supervisor(specs) as supervisor:
            with pytest.raises(SupervisorError, match=r"(?s)bad exited with 1 before it was ready.*no such weights"):
                await supervisor.wait_ready()

    asyncio.run(scenario())


def test_wait_ready_names_a_child_that_never_answers(tmp_path: Path) -> None:
    async def scenario() -> None:
        spec = ChildSpec("deaf", script(FOREVER), tmp_path / "deaf.log", f"http://127.0.0.1:{free_port()}/health")
        async with Supervisor([spec], ready_timeout_s=0.3) as supervisor:
            with pytest.raises(SupervisorError, match=r"deaf did not answer .*/health in 0\.3 s"):
                await supervisor.wait_ready()

    asyncio.run(scenario())


def test_a_command_that_does_not_exist_is_told(tmp_path: Path) -> None:
    async def scenario() -> None:
        spec = ChildSpec("ghost", ("/no/such/program",), tmp_path / "ghost.log", "http://127.0.0.1:9/")
        async with Supervisor([spec]) as supervisor:
            with pytest.raises(SupervisorError, match=r"(?s)ghost exited with 127.*/no/such/program: No such file"):
                await supervisor.wait_ready()

    asyncio.run(scenario())


def test_a_log_that_cannot_be_written_is_a_failed_start(tmp_path: Path) -> None:
    async def scenario() -> None:
        (tmp_path / "file").touch()
        spec = ChildSpec("one", script(FOREVER), tmp_path / "file" / "one.log")
        async with Supervisor([spec]) as supervisor:
            with pytest.raises(SupervisorError, match="one could not be started"):
                await supervisor.wait_ready()

    asyncio.run(scenario())


def test_a_child_that_ignores_sigterm_or_is_stopped_is_killed(tmp_path: Path) -> None:
    async def scenario() -> None:
        ignore = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('set', flush=True)\n"
        deaf = child(tmp_path, ignore + FOREVER)
        frozen = child(tmp_path, FOREVER, "frozen")
        async with Supervisor([deaf, frozen], stop_grace_s=0.2) as supervisor:
            await supervisor.wait_ready()
            await until(lambda: "set" in deaf.log_path.read_text().splitlines())
            pids = pid_of(supervisor, 0), pid_of(supervisor, 1)
            os.kill(pids[1], signal.SIGSTOP)
        assert not any(map(runs, pids))

    asyncio.run(scenario())


def test_closing_during_backoff_and_during_start_does_not_hang(tmp_path: Path) -> None:
    async def scenario() -> None:
        slow = BackoffRules(first_s=60.0)
        unready = ChildSpec("unready", script(FOREVER), tmp_path / "u.log", f"http://127.0.0.1:{free_port()}/")
        async with Supervisor([child(tmp_path, "raise SystemExit(1)"), unready], backoff=slow) as supervisor:
            await until(lambda: supervisor.status()[0].state is ChildState.BACKOFF)
            pid = pid_of(supervisor, 1)
        assert not runs(pid)

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_names_must_differ(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="names"):
        Supervisor([child(tmp_path, FOREVER), child(tmp_path, FOREVER)])


@pytest.mark.parametrize(("code", "words"), [(3, "exited with 3"), (-9, "was ended by SIGKILL"), (-120, "signal 120")])
def test_exit_codes_in_words(code: int, words: str) -> None:
    assert words in describe_exit(code)


# --- nothing outlives the parent

PARENT = """
import asyncio, sys
from pathlib import Path
from backends.embedded.supervisor import ChildSpec, Supervisor
async def main():
    argv = (sys.executable, "-c", "import time\\nwhile True: time.sleep(60)")
    specs = [ChildSpec(name, argv, Path(sys.argv[1]) / f"{name}.log") for name in ("one", "two", "three")]
    async with Supervisor(specs) as supervisor:
        await supervisor.wait_ready()
        print(*(status.pid for status in supervisor.status()), flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""


def all_gone(pids: Iterable[int], limit_s: float = 10.0) -> bool:
    deadline_s = time.monotonic() + limit_s
    pids = list(pids)
    while any(map(runs, pids)):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_child_outlives_its_parent(tmp_path: Path, root: Path, signum: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path)], cwd=root, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        try:
            assert len(pids) == 3
            assert all(map(runs, pids))
            parent.send_signal(signum)
            parent.wait(20)
            assert all_gone(pids)
        finally:
            for pid in (parent.pid, *pids):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def test_a_child_whose_parent_is_gone_already_does_not_start(root: Path) -> None:
    tether = root / "backends" / "embedded" / "tether.py"
    result = subprocess.run(
        [sys.executable, "-I", "-S", str(tether), "999999999", sys.executable, "-c", "print('started')"],
        capture_output=True, timeout=20, check=False,
    )
    assert (result.returncode, result.stdout) == (70, b"")


# --- pausing


@pytest.mark.anyio
async def test_a_paused_child_ends_stays_down_and_comes_back_as_if_new(tmp_path: Path) -> None:
    async with Supervisor([child(tmp_path, FOREVER), child(tmp_path, FOREVER, "two")], backoff=QUICK) as supervisor:
        await supervisor.wait_ready()
        first, other = pid_of(supervisor), pid_of(supervisor, 1)
        supervisor.pause("one")
        supervisor.pause("one")
        await until(lambda: supervisor.status()[0].state is ChildState.PAUSED)
        assert not runs(first)
        assert supervisor.status()[0].pid is None
        await asyncio.sleep(4 * QUICK.cap_s)
        assert supervisor.status()[0].state is ChildState.PAUSED, "it came back by itself"
        supervisor.resume("one")
        await until(lambda: supervisor.status()[0].state is ChildState.READY)
        assert pid_of(supervisor) != first
        assert supervisor.status()[0].restarts == 0, "a pause is no death"
        assert pid_of(supervisor, 1) == other
        supervisor.pause("two")
        await until(lambda: supervisor.status()[1].state is ChildState.PAUSED)
        left = pid_of(supervisor)
    assert not runs(left)
    assert [status.state for status in supervisor.status()] == [ChildState.STOPPED] * 2


@pytest.mark.anyio
async def test_a_child_that_is_paused_between_two_deaths_is_not_started_again(tmp_path: Path) -> None:
    marks = tmp_path / "starts"
    dying = child(tmp_path, f"open({str(marks)!r}, 'a').write('x')")
    async with Supervisor([dying], backoff=BackoffRules(first_s=0.5, cap_s=0.5)) as supervisor:
        await until(lambda: supervisor.status()[0].state is ChildState.BACKOFF)
        supervisor.pause("one")
        await until(lambda: supervisor.status()[0].state is ChildState.PAUSED)
        started = marks.read_text()
        await asyncio.sleep(0.8)
        assert marks.read_text() == started
