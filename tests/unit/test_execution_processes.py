"""Which processes belong to a run, on tables made by hand and, for what only the kernel can show, on real ones."""

import os
import signal
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allocator.execution.processes import (
    DEVICES_VARIABLE,
    RUN_VARIABLE,
    Identity,
    Mark,
    Marks,
    Process,
    RunIdentity,
    find,
    is_dying,
    kill_all,
    lives,
    parse_stat,
    process_table,
    read_mark,
    read_process,
    send_signal,
)
from tests.processes import until

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"), pytest.mark.real_time]
SHIM = Identity(100, 1000)
MINE = Mark("run", "nonce", frozenset({"nvidia:0"}))


def process(pid: int, parent_pid: int = 1, *, start: int = 2000, session: int = 0) -> Process:
    return Process(Identity(pid, start), parent_pid, session or pid, "S", "job")


def found_in(*processes: Process, marks: dict[int, Mark] | None = None, **run: object) -> dict[int, str]:
    identity = RunIdentity("run", "nonce", **{"shims": (SHIM,), **run})     # type: ignore[arg-type]
    table = {one.pid: one for one in processes}
    return {one.process.pid: one.how for one in find(identity, table, marks or {})}


def test_the_shim_itself_is_not_part_of_the_run_but_all_that_descends_from_it_is() -> None:
    assert found_in(process(100, start=1000), process(101, 100), process(102, 101), process(103, 1)) == {
        101: "descent", 102: "descent"}


def test_the_environment_tells_and_another_run_s_does_not() -> None:
    marks = {101: MINE, 102: MINE._replace(nonce="another"), 103: MINE._replace(run_id="another")}
    assert found_in(*map(process, marks), marks=marks) == {101: "environment"}


def test_a_child_with_a_cleared_environment_is_found_through_its_parent() -> None:
    assert found_in(process(101), process(102, 101), marks={101: MINE}) == {101: "environment", 102: "descent"}


def test_an_id_that_is_used_again_is_not_the_process_that_had_it() -> None:
    assert found_in(process(100, start=5000), process(101, 100), members=(Identity(105, 1),), shims=(SHIM,)) == {}
    assert found_in(process(105, start=5000), members=(Identity(105, 4999),)) == {}
    assert found_in(process(105, start=5000), members=(Identity(105, 5000),)) == {105: "descent"}


def test_a_session_is_a_suspicion_only_after_the_death_of_its_shim() -> None:
    orphan = process(102, session=100)
    assert found_in(orphan) == {102: "session"}
    assert found_in(orphan, process(100, start=9999)) == {}, "the session is another's now"
    assert found_in(process(102, start=999, session=100)) == {}, "older than the shim"


def test_a_control_group_tells() -> None:
    assert found_in(process(102), in_cgroup=frozenset({102, 999})) == {102: "cgroup"}


def test_nobody_is_killed_on_suspicion() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as child:
        own = read_process(child.pid)
        assert own is not None
        run = RunIdentity("run", "nonce", shims=(Identity(own.session_id, own.identity.start_ticks),))
        table = {own.pid: own}
        suspects = find(run, table, {})
        assert [one.how for one in suspects] == ["session"]
        assert kill_all(suspects) == 0
        assert kill_all([one._replace(how="descent") for one in suspects]) == 1
        assert child.wait(timeout=10) == -signal.SIGKILL


stat_lines = st.tuples(st.integers(1, 1 << 22), st.text(st.characters(codec="ascii"), min_size=1, max_size=15),
                       st.sampled_from("RSDTZX"), st.integers(1, 3))


@given(stat_lines)
def test_any_command_name_parses_and_a_zombie_with_threads_is_alive(line: tuple[int, str, str, int]) -> None:
    pid, command, state, threads = line
    fields = [state, 7, 8, 9, *range(13), threads, 0, 4242, 0]
    text = f"{pid} ({command}) ".encode() + " ".join(map(str, fields)).encode()
    if state in "ZX" and threads == 1:
        assert parse_stat(text) is None
    else:
        assert parse_stat(text) == Process(Identity(pid, 4242), 7, 9, state, command)


def test_a_process_whose_first_thread_has_ended_still_counts() -> None:
    """The kernel calls it a zombie, and its other threads may still hold the device."""
    text = ("import ctypes, threading, time\n"
            "threading.Thread(target=time.sleep, args=(60,)).start()\n"
            "ctypes.CDLL(None).syscall(60, 0)")         # exit(2), of this thread alone
    if os.uname().machine != "x86_64":
        pytest.skip("the number of the system call is x86_64's")
    with subprocess.Popen([sys.executable, "-S", "-c", text]) as child:
        zombie = until(lambda: (one := read_process(child.pid)) and one.state == "Z" and one, "the first thread to end")
        assert isinstance(zombie, Process)
        assert lives(zombie.identity)
        child.kill()
    assert not lives(zombie.identity)


def test_marks_are_read_and_outlive_a_process_that_writes_over_its_environment() -> None:
    env = {RUN_VARIABLE: "a/run/nonce", DEVICES_VARIABLE: "nvidia:0,nvidia:1"}
    with subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"], env=env) as child:
        mark = until(lambda: read_mark(child.pid), "the mark")
        assert mark == Mark("a/run", "nonce", frozenset({"nvidia:0", "nvidia:1"}))
        marks, table = Marks(), process_table()
        assert marks.look(table)[child.pid] == mark
        child.kill()
        until(lambda: read_mark(child.pid) is None, "the environment to go")
        assert marks.look(table)[child.pid] == mark, "remembered by identity"
    assert child.pid not in marks.look(process_table())
    assert read_mark(os.getpid()) is None


def test_a_signal_reaches_this_very_process_or_none() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as child:
        one = read_process(child.pid)
        assert one is not None
        assert not send_signal(one.identity._replace(start_ticks=one.identity.start_ticks + 1), signal.SIGKILL)
        time.sleep(0)
        assert child.poll() is None
        assert send_signal(one.identity, signal.SIGKILL)
        assert child.wait(timeout=10) == -signal.SIGKILL
        assert not send_signal(one.identity, signal.SIGKILL)


def test_a_killed_process_is_known_to_be_dying_from_the_kill_on() -> None:
    assert not is_dying(os.getpid())
    for _ in range(20):
        with subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"]) as sleeping:
            assert not is_dying(sleeping.pid)
            sleeping.kill()
            assert is_dying(sleeping.pid), "signals still reach it, and nothing of it acts on them"
            sleeping.wait()
            assert is_dying(sleeping.pid)


def test_the_table_holds_this_process_and_no_kernel_thread() -> None:
    table = process_table()
    assert table[os.getpid()].parent_pid == os.getppid()
    assert all(2 not in (one.pid, one.parent_pid) for one in table.values())
