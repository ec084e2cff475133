"""How a test that wants the cores to itself, and does not say so, is found out."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.real_time import Watch, clocks_of

MODULE = '''
from time import perf_counter

def test_a() -> None:
    began = {read}()

async def test_b() -> None:
    await asyncio.sleep(0)

def helper() -> None:
    {elsewhere}
'''


@pytest.mark.parametrize("read", ["perf_counter", "time.monotonic", "time.process_time", "thread_time_ns"])
def test_a_clock_is_found_in_the_test_that_reads_it(read: str) -> None:
    assert clocks_of(MODULE.format(read=read, elsewhere="pass")) == {"test_a": read.removeprefix("time.")}


@pytest.mark.parametrize(("elsewhere", "clock"), [
    ("time.sleep" + "(0.1)", "sleep"), ("x = monotonic" + "()", "monotonic")])
def test_a_clock_in_a_helper_is_everybodys(elsewhere: str, clock: str) -> None:
    assert clocks_of(MODULE.format(read="len", elsewhere=elsewhere)) == {"": clock}


def test_what_looks_like_a_clock_and_is_none() -> None:
    text = MODULE.format(read="len", elsewhere="Candidate(monotonic_s=lambda: 0.0); asyncio.sleep(0)")
    assert clocks_of(text) == {}


@pytest.mark.real_time
def test_a_port_and_a_process_are_heard_of_while_the_watch_is_on() -> None:
    watch = Watch()
    with socket.socket() as server:
        watch.begin()
        server.bind(("127.0.0.1", 0))
        subprocess.run([sys.executable, "-S", "-c", ""], check=True)
        watch.end()
        server.listen()
        with socket.create_connection(server.getsockname()):
            pass
    assert [heard.partition(" ")[0] for heard in watch.heard] == ["socket.bind", "subprocess.Popen"]
    watch.begin()
    assert watch.heard == []
    watch.end()


BINDS = "import socket\ndef test_it():\n    with socket.socket() as one: one.bind(('127.0.0.1', 0))\n"
STARTS = ("import pytest, subprocess\n@pytest.fixture(scope='module')\ndef done(): subprocess.run(['true'])\n"
          "def test_it(done): pass\n")
READS = "import time\ndef test_it(): time.monotonic" + "()\n"


def run(folder: Path, **texts: str) -> tuple[int, str]:
    """Exit code and output of a run over test files in a folder of tests of its own; named `unit_a` for `unit/`."""
    checks = folder / "checks"
    for name, text in texts.items():
        file = checks / name.partition("_")[0] / f"test_{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (checks / "conftest.py").write_text(
        "from pathlib import Path\nfrom tests.real_time import RealTime\n"
        "def pytest_configure(config): config.pluginmanager.register(RealTime(Path(__file__).parent))\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml"),
         "--rootdir", str(folder), str(checks)],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.real_time
def test_a_run_with_unmarked_ones_fails_and_says_which(tmp_path: Path) -> None:
    code, printed = run(tmp_path / "used", unit_a=BINDS, property_b=STARTS)
    assert code == 1
    assert "2 failed" in printed
    assert "to be marked real_time, or to do without: socket.bind ('127.0.0.1', 0)" in printed
    assert "to be marked real_time, or to do without: subprocess.Popen true" in printed
    code, printed = run(tmp_path / "read", unit_c=READS)
    assert code == 4
    assert "to be marked real_time, or to do without a clock:\ntest_unit_c.py::test_it: monotonic" in printed


@pytest.mark.real_time
def test_with_the_mark_and_where_all_have_it_they_pass(tmp_path: Path) -> None:
    mark = "import pytest\npytestmark = pytest.mark.real_time\n"
    code, printed = run(tmp_path, unit_a=mark + BINDS, unit_b=mark + STARTS, unit_c=mark + READS,
                        integration_a=BINDS, e2e_b=STARTS, e2e_c=READS)
    assert (code, "6 passed" in printed) == (0, True), printed
