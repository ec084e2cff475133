"""The mock engine and the load client: compiled once for each version of their source, run as child processes."""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from loadtest.bench.figures import LoadReport
from loadtest.bench.processes import pinned_to
from loadtest.bench.workloads import LoadRun

SOURCES = Path(__file__).resolve().parent / "native"
FLAGS = ("-O2", "-std=gnu11")
COMPILE_LIMIT_S = 120


class NativeError(Exception):
    """The native programs cannot be built or run here; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Natives:
    """The compiled programs."""

    mock: Path
    load: Path


def build(cache: Path | None = None) -> Natives:
    """The programs for the sources as they are, compiled if that has not been done before.

    Args:
        cache: where they are kept; by default the user's cache folder.

    Raises:
        NativeError: no Linux, no C compiler, or it refuses.
    """
    if sys.platform != "linux":
        raise NativeError("the mock engine and load client need epoll: run this on Linux")
    folder = (cache or _user_cache()) / _version()
    natives = Natives(folder / "mock", folder / "load")
    if not (natives.mock.exists() and natives.load.exists()):
        _compile_into(folder)
    return natives


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace" / "bench"


def _version() -> str:
    digest = hashlib.sha256(" ".join((*FLAGS, os.uname().machine)).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:16]


def _compile_into(folder: Path) -> None:
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise NativeError("no C compiler: the mock engine and load client are compiled at first use. "
                          "On Debian: apt-get install gcc libc6-dev; or name one in CC")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            for name in ("mock", "load"):
                built = Path(scratch) / name
                command = [compiler, *FLAGS, "-o", str(built), str(SOURCES / f"{name}.c"), "-lm"]
                done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_LIMIT_S)  # noqa: S603
                if done.returncode:
                    raise NativeError(f"{compiler} cannot compile {name}.c:\n{done.stderr.strip()[-2000:]}")
                built.replace(folder / name)  # whole or not there, also for another run at the same time
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeError(f"cannot build the native programs in {folder}: {error}") from None


@dataclass(frozen=True, slots=True)
class Mock:
    """A running mock engine."""

    pid: int
    ports: tuple[int, ...]


@contextmanager
def running_mock(natives: Natives, ports: int, core: int) -> Iterator[Mock]:
    """The mock engine on so many free ports; it is gone when the context ends or this process does."""
    with pinned_to(core):
        process = subprocess.Popen([natives.mock, str(ports)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # noqa: S603
    with process:
        assert process.stdin
        assert process.stdout
        try:
            line = process.stdout.readline()
            if not line:
                raise NativeError("the mock engine did not start")
            yield Mock(process.pid, tuple(msgspec.json.decode(line)["ports"]))
        finally:
            process.stdin.close()
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()


class _Event(msgspec.Struct):
    event: str


def run_load(
    natives: Natives, run: LoadRun, port: int, key: str, core: int, on_event: Callable[[str, int], bool | None]
) -> LoadReport:
    """One run of the load client, bounded by the run's own length.

    Args:
        on_event: told `begin`, `held` and `end` at their moments, and the client's pid; True at `held` ends the run.

    Raises:
        NativeError: it failed.
    """
    with pinned_to(core):
        client = subprocess.Popen([natives.load, *run.arguments(port, key)],  # noqa: S603
                                  stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with client:
        assert client.stdin
        assert client.stdout
        try:
            for line in client.stdout:
                event = msgspec.json.decode(line, type=_Event).event
                if event == "report":
                    on_event("end", client.pid)
                    return msgspec.json.decode(line, type=LoadReport)
                if on_event(event, client.pid):
                    client.stdin.close()
        finally:
            client.kill()
    raise NativeError(f"the load client ended with code {client.returncode} and without a report")
