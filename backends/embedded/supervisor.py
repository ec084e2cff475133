"""Keeps child processes running: starts, waits until ready, restarts on death with backoff, ends them all. One that is
paused is ended and stays down until it is resumed.

No child outlives the supervisor's process, not even when that is killed with SIGKILL (see `tether`). Children run in
sessions of their own, so that Ctrl-C in a terminal reaches the supervisor alone and it decides the order of the end.
"""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from backends.embedded import tether

READY_POLL_S = 0.05
EXIT_NOT_STARTED = 126


class SupervisorError(Exception):
    """A child could not be brought up; the text says which, how it ended and where its log is."""


@dataclass(frozen=True, slots=True)
class BackoffRules:
    """How long to wait before a dead child is started again, in seconds."""

    first_s: float = 0.25
    factor: float = 2.0
    cap_s: float = 15.0
    stable_s: float = 20.0
    """A child that ran this long has recovered: its next death counts as the first."""


def next_backoff(previous_s: float | None, ran_s: float, rules: BackoffRules) -> float:
    """Seconds to wait before the next start, after a child that ran `ran_s`.

    `previous_s` is the wait before that run, `None` where it was the first start.
    """
    if previous_s is None or ran_s >= rules.stable_s:
        return min(rules.first_s, rules.cap_s)
    return min(max(previous_s, rules.first_s) * rules.factor, rules.cap_s)


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """One process to keep running. Every restart runs the same command, hence on the same port."""

    name: str
    argv: tuple[str, ...]
    log_path: Path
    """Standard output and error are appended here."""
    ready_url: str | None = None
    """Answers 200 when the child is ready; `None`: ready as soon as it runs."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Set beside the supervisor's own environment."""


class ChildState(StrEnum):
    """Where a child is in its life."""

    STARTING = "starting"
    READY = "ready"
    BACKOFF = "backoff"
    PAUSED = "paused"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class ChildStatus:
    """What is known of a child now. `pid` is `None` while no process runs."""

    name: str
    state: ChildState = ChildState.STARTING
    pid: int | None = None
    restarts: int = 0
    last_exit: int | None = None
    """Exit code of the last process, negative for a signal, `None` before the first end."""
    backoff_s: float | None = None
    """The wait before the current start, `None` on the first."""
    error: str | None = None
    """Why the last run failed, where its exit code alone does not say."""


class _Held:
    """Whether a child is paused, and a bell that rings when that changes or all is to end."""

    def __init__(self) -> None:
        self.is_paused = False
        self._bell = asyncio.Event()

    def pause(self) -> None:
        self.is_paused = True
        self.wake()

    def resume(self) -> None:
        self.is_paused = False
        self.wake()

    def wake(self) -> None:
        bell, self._bell = self._bell, asyncio.Event()
        bell.set()

    async def woken(self) -> None:
        await self._bell.wait()

    async def until_resumed(self, stopping: asyncio.Event) -> None:
        while self.is_paused and not stopping.is_set():
            await self.woken()


class Supervisor:
    """Runs children until closed. Use as an async context manager, from the main thread.

    `on_change` is called in the loop with each new status: to log, to show, to write a state file.
    """

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        *,
        backoff: BackoffRules = BackoffRules(),
        ready_timeout_s: float = 60.0,
        stop_grace_s: float = 3.0,
        on_change: Callable[[ChildStatus], None] | None = None,
    ) -> None:
        if len({spec.name for spec in specs}) != len(specs):
            raise ValueError("names of children must differ")
        self._specs = {spec.name: spec for spec in specs}
        self._backoff = backoff
        self._ready_timeout_s = ready_timeout_s
        self._stop_grace_s = stop_grace_s
        self._on_change = on_change
        self._status = {name: ChildStatus(name) for name in self._specs}
        self._was_ready: set[str] = set()
        self._changed = asyncio.Condition()
        self._stopping = asyncio.Event()
        self._held = {name: _Held() for name in self._specs}
        self._tasks: list[asyncio.Task[None]] = []
        self._client: httpx.AsyncClient | None = None

    @property
    def specs(self) -> tuple[ChildSpec, ...]:
        """What runs, in the order given."""
        return tuple(self._specs.values())

    def status(self) -> tuple[ChildStatus, ...]:
        """Every child as it is now, in the order given."""
        return tuple(self._status.values())

    async def __aenter__(self) -> Self:
        # A probe must reach the child itself, whatever proxy the environment names.
        self._client = httpx.AsyncClient(timeout=1.0, trust_env=False)
        self._tasks = [asyncio.create_task(self._keep(spec), name=f"keep {spec.name}") for spec in self.specs]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def pause(self, name: str) -> None:
        """Ends a child as `aclose` does, and keeps it down; returns at once. Its state is PAUSED when it is gone."""
        self._held[name].pause()

    def resume(self, name: str) -> None:
        """Starts a paused child again, as if for the first time."""
        self._held[name].resume()

    async def aclose(self) -> None:
        """Ends all children: SIGTERM, a grace time, SIGKILL. Safe to call twice."""
        self._stopping.set()
        for held in self._held.values():
            held.wake()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._client is not None:
            await self._client.aclose()

    async def wait_ready(self) -> None:
        """Returns when every child is ready.

        Raises SupervisorError as soon as one has ended before it was ever ready: what fails on its first start
        (no such file, a port that is taken) seldom heals by itself.
        """
        async with self._changed:
            while True:
                for status in self.status():
                    ended = status.last_exit is not None or status.state is ChildState.STOPPED
                    if ended and status.name not in self._was_ready:
                        raise SupervisorError(self._obituary(status))
                if all(status.state is ChildState.READY for status in self.status()):
                    return
                await self._changed.wait()

    def _obituary(self, status: ChildStatus) -> str:
        log_path = self._specs[status.name].log_path
        how = status.error or f"{describe_exit(status.last_exit or 0)} before it was ready"
        return f"{status.name} {how}; the end of {log_path}:\n{tail(log_path)}"

    async def _set(self, status: ChildStatus) -> None:
        if status != self._status[status.name]:
            self._status[status.name] = status
            if status.state is ChildState.READY:
                self._was_ready.add(status.name)
            async with self._changed:
                self._changed.notify_all()
            if self._on_change is not None:
                self._on_change(status)

    async def _keep(self, spec: ChildSpec) -> None:
        """The life of one child: run, and run again after each death, until the supervisor stops."""
        try:
            held = self._held[spec.name]
            while not self._stopping.is_set():
                if held.is_paused:
                    await self._set(replace(self._status[spec.name], state=ChildState.PAUSED, pid=None, backoff_s=None,
                                            error=None))
                    await held.until_resumed(self._stopping)
                    continue
                started_at_s = time.monotonic()
                exit_code, error = await self._run_once(spec)
                before = self._status[spec.name]
                if self._stopping.is_set():
                    await self._set(replace(before, state=ChildState.STOPPED, pid=None, last_exit=exit_code))
                    return
                if held.is_paused:
                    continue
                wait_s = next_backoff(before.backoff_s, time.monotonic() - started_at_s, self._backoff)
                await self._set(replace(before, state=ChildState.BACKOFF, pid=None, last_exit=exit_code, error=error))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await self._ending(spec.name)
                if not self._stopping.is_set():
                    after = self._status[spec.name]
                    await self._set(replace(after, state=ChildState.STARTING, restarts=after.restarts + 1,
                                            backoff_s=wait_s))
        finally:
            await self._set(replace(self._status[spec.name], state=ChildState.STOPPED, pid=None))

    async def _run_once(self, spec: ChildSpec) -> tuple[int, str | None]:
        """Starts the process and says when it is ready; once it is gone, returns its exit code and what went wrong."""
        try:
            process = await self._spawn(spec)
        except OSError as error:        # no log folder, no disk, no memory: as good as a death, and retried like one
            return EXIT_NOT_STARTED, f"could not be started: {error}"
        ended = asyncio.create_task(process.wait())
        try:
            await self._set(replace(self._status[spec.name], state=ChildState.STARTING, pid=process.pid))
            ready = await self._until(ended, self._ready(spec))
            if ready:
                await self._set(replace(self._status[spec.name], state=ChildState.READY, error=None))
                await self._until(ended, self._ending(spec.name))
            timed_out = not (ready or ended.done() or self._is_ending(spec.name))
            exit_code = await self._end(process, ended)
        finally:
            if not ended.done():        # only where this task was cancelled: leave nothing behind
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await ended
        return exit_code, f"did not answer {spec.ready_url} in {self._ready_timeout_s:g} s" if timed_out else None

    def _is_ending(self, name: str) -> bool:
        return self._stopping.is_set() or self._held[name].is_paused

    async def _ending(self, name: str) -> bool:
        """Waits until this child is to end, with all the others or alone."""
        held = self._held[name]
        while not self._is_ending(name):
            await held.woken()
        return True

    async def _spawn(self, spec: ChildSpec) -> asyncio.subprocess.Process:
        spec.log_path.parent.mkdir(parents=True, exist_ok=True)
        with spec.log_path.open("ab") as log:
            log.write(f"--- {time.strftime('%Y-%m-%dT%H:%M:%S%z')} start: {' '.join(spec.argv)}\n".encode())
            log.flush()
            return await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", tether.__file__, str(os.getpid()), *spec.argv,
                stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
                env={**os.environ, **spec.env}, start_new_session=True,
            )

    async def _ready(self, spec: ChildSpec) -> bool:
        """Waits until the child answers; False where the time for it is over or the supervisor stops."""
        deadline_s = time.monotonic() + self._ready_timeout_s
        while not self._is_ending(spec.name) and time.monotonic() < deadline_s:
            if await self._is_ready(spec):
                return True
            await asyncio.sleep(READY_POLL_S)
        return False

    async def _is_ready(self, spec: ChildSpec) -> bool:
        if spec.ready_url is None:
            return True
        assert self._client is not None
        try:
            return (await self._client.get(spec.ready_url)).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    async def _end(self, process: asyncio.subprocess.Process, ended: "asyncio.Task[int]") -> int:
        """Ends a process that may still run; returns its exit code."""
        for signum, grace_s in ((signal.SIGTERM, self._stop_grace_s), (signal.SIGKILL, None)):
            if ended.done():
                break
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signum)
            await asyncio.wait((ended,), timeout=grace_s)
        return await ended

    @staticmethod
    async def _until(ended: "asyncio.Task[int]", other: Coroutine[None, None, bool]) -> bool:
        """Waits for `other`, at most until the process has ended; returns its answer, or False where the end came."""
        task = asyncio.create_task(other)
        try:
            await asyncio.wait((ended, task), return_when=asyncio.FIRST_COMPLETED)
            return not ended.done() and task.done() and task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def describe_exit(code: int) -> str:
    """An exit code in words: "exited with 3", "was ended by SIGKILL"."""
    if code >= 0:
        return f"exited with {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def tail(path: Path, lines: int = 8, limit_bytes: int = 8192) -> str:
    """The last lines of a text file, indented; a note where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - limit_bytes))
            text = file.read().decode(errors="replace")
    except OSError as error:
        return f"    (no log: {error.strerror})"
    return "\n".join(f"    {line}" for line in text.splitlines()[-lines:])
