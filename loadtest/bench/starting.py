"""Finds the targets' programs, and starts one for the time of a visit."""

import http.client
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from loadtest.bench.processes import running
from loadtest.bench.targets.target import MODEL, Site, Target
from loadtest.stack import free_ports, tail

ASIDE = ("/usr/local/sbin", "/usr/sbin", "/sbin")
"""Where proxies are installed that an ordinary user's path does not name."""
VERSION_LIMIT_S = 60


class TargetError(Exception):
    """A target that is there does not start or does not answer."""


@dataclass(frozen=True, slots=True)
class Program:
    """An installed target."""

    target: Target
    command: tuple[str, ...]
    version: str


def find(target: Target, folders: Sequence[Path]) -> Program | None:
    """The target's program: in `folders`, beside our own interpreter, or on the path; `None` where it is absent."""
    if target.by_interpreter is not None:
        form = target.form()
        command = (sys.executable, *target.by_interpreter)
        return None if form is None else Program(target, command, f"{_own_version(target.distribution)} {form}")
    on_path = os.environ.get("PATH", "").split(os.pathsep)
    places = [*map(str, folders), str(Path(sys.executable).parent), *on_path, *ASIDE]
    path = shutil.which(target.program, path=os.pathsep.join(places))
    return None if path is None else Program(target, (path,), _version(target, Path(path)))


def _own_version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "source"


def _version(target: Target, path: Path) -> str:
    command = [str(path), *target.version_arguments]
    if target.distribution and (interpreter := _interpreter(path)):
        ask = "import importlib.metadata as m, sys; print(m.version(sys.argv[1]))"
        command = [interpreter, "-c", ask, target.distribution]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=VERSION_LIMIT_S)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return version_in(done.stdout + done.stderr) or "unknown"


def version_in(text: str) -> str | None:
    """The first version number of a program's answer: `nginx version: nginx/1.22.1` → `1.22.1`."""
    found = re.search(r"(?<![\w.])v?(\d+\.\d+(?:\.\d+)*)", text.replace("/", " "))
    return found[1] if found else None


def _interpreter(script: Path) -> str | None:
    """The Python that a console script names in its first line."""
    with script.open("rb") as file:
        first = file.readline(200)
    return first[2:].strip().decode() if first.startswith(b"#!/") and b"python" in first else None


@dataclass(frozen=True, slots=True)
class Started:
    """A target that answers."""

    pid: int
    port: int


@contextmanager
def started(program: Program, folder: Path, engine_ports: Sequence[int], key: str, core: int) -> Iterator[Started]:
    """The target on a core of its own, from its first right answer to the end of the context.

    Raises:
        TargetError: it ends, or gives no right answer within its `start_limit_s`; with the tail of its log.
    """
    folder.mkdir(parents=True, exist_ok=True)
    port, side_port = free_ports(2)
    launch = program.target.launch(Site(str(folder), port, side_port, tuple(engine_ports), key))
    for name, text in launch.files.items():
        (folder / name).write_text(text, encoding="utf-8")
    log = folder / "log"
    with running((*program.command, *launch.command), log, core, launch.environment) as process:
        deadline_s = time.monotonic() + program.target.start_limit_s
        said = "nothing"
        while (said := answer_of(port, key)) != "right":
            if process.poll() is not None:
                raise TargetError(f"{program.target.name} ended with code {process.returncode}:\n{tail(log)}")
            if time.monotonic() > deadline_s:
                raise TargetError(f"{program.target.name} gave no answer in {program.target.start_limit_s:g} s "
                                  f"(last: {said}):\n{tail(log)}")
            time.sleep(0.1)
        yield Started(process.pid, port)


def answer_of(port: int, key: str) -> str:
    """`right` where a chat is answered as the mock answers it; else what came instead."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        body = json.dumps({"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": "ready?"}]})
        connection.request("POST", "/v1/chat/completions", body,
                           {"content-type": "application/json", "authorization": f"Bearer {key}"})
        response = connection.getresponse()
        text = response.read()
        if response.status == 200 and b"headrace" in text:
            return "right"
        return f"status {response.status}: {text[:200].decode('utf-8', 'replace')}"
    except (OSError, http.client.HTTPException) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        connection.close()
