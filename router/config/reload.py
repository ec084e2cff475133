"""Taking over an edited fleet file while requests run.

One way in for every trigger: read the file, parse strictly, build everything, prove it if there is a proof, and only
then `apply`, which swaps one reference. Whatever fails before or in that step leaves the old fleet running, and is kept
to be shown. A file with the same content is a no-op. Triggers are serialised; those that come while one waits share it.

The file is watched through its folder, since editors replace a file by renaming another over it and Kubernetes swaps
the link `..data` beside it; a slow comparison of the content repairs whatever the watch misses. The watch compares with
what it saw last, not with what runs: a rolled-back file stays rolled back until it is edited.
"""

import asyncio
import hashlib
import logging
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from watchfiles import Change, awatch

from backends.catalog.spec import BackendSpec
from router.config.diff import NO_CHANGE, FleetDiff, diff_fleets, restart_owed
from router.config.fleet_file import ConfigError, LoadedFleet, Problem, keys_file_of, load_fleet_bytes
from settings.source import read_source

log = logging.getLogger("headrace.reload")

Apply = Callable[[LoadedFleet], None]
"""Swaps the running fleet for a built one, by one assignment, on the loop. Where it raises, nothing has changed."""
Prove = Callable[[LoadedFleet], Awaitable[Sequence[Problem]]]
"""A last look at a built fleet before it is applied, such as whether any backend can be reached."""


@dataclass(frozen=True, slots=True)
class ReloadResult:
    """What became of one reload."""

    ok: bool
    trigger: str
    """`sighup`, `file`, `poll`, `admin`, `rollback`, …"""
    at_s: float
    """Wall time, in Unix seconds."""
    config_hash: str | None
    """What runs after this reload."""
    candidate_hash: str | None
    """What the file holds; `None` where it could not be read as a fleet."""
    changed: bool
    """The running fleet is another than before (in a dry run: would be)."""
    is_dry_run: bool = False
    problems: tuple[Problem, ...] = ()
    warnings: tuple[Problem, ...] = ()
    diff: FleetDiff = NO_CHANGE
    took_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ReloadStatus:
    """The state of the configuration, for `/admin/config` and the metrics."""

    path: str
    config_hash: str | None
    """What runs."""
    running_since_s: float | None
    """Wall time of the last swap."""
    previous_hash: str | None
    """What `rollback` would bring back."""
    needs_restart: tuple[str, ...]
    """Settings of what runs that wait for a restart: the process goes on with those that it started with."""
    is_stale: bool
    """The last reload failed: the file holds something else than what runs."""
    last_result: ReloadResult | None
    last_good: ReloadResult | None
    last_error: ReloadResult | None
    """The most recent failure, kept after it is repaired."""
    succeeded: int
    failed: int


@dataclass(frozen=True, slots=True)
class _Read:
    """One reading of the file: its content's fingerprint, and the fleet or what is wrong."""

    fingerprint: str
    loaded: LoadedFleet | None
    problems: tuple[Problem, ...] = ()


class Reloader:
    """Keeps the running fleet in step with its file.

    `running` is the fleet that the process started with; without it, the first reload applies the file. `prove` may
    refuse a fleet that is valid and yet unusable. `on_result` is told of every reload and rollback, for metrics.
    Belongs to one event loop.
    """

    def __init__(
        self,
        path: Path,
        apply: Apply,
        environ: Mapping[str, str],
        on_result: Callable[[ReloadResult], None] | None = None,
        *,
        running: LoadedFleet | None = None,
        prove: Prove | None = None,
        poll_s: float = 5.0,
        settle_s: float = 0.1,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.path = path
        self._apply = apply
        self._environ = environ
        self._on_result = on_result
        self._prove = prove
        self._poll_s = poll_s
        self._settle_s = settle_s
        self._wall_clock = wall_clock
        self._running = self._started = running
        self._previous: LoadedFleet | None = None
        self._running_since_s = wall_clock() if running else None
        self._seen: str | None = None
        self._last: ReloadResult | None = None
        self._last_good: ReloadResult | None = None
        self._last_error: ReloadResult | None = None
        self._succeeded = 0
        self._failed = 0
        self._turn = asyncio.Lock()
        self._waiting: asyncio.Task[ReloadResult] | None = None
        self._tasks: set[asyncio.Task[ReloadResult]] = set()

    @property
    def running(self) -> LoadedFleet | None:
        """The fleet that runs."""
        return self._running

    @property
    def needs_restart(self) -> tuple[str, ...]:
        """Settings of what runs that wait for a restart."""
        if self._running is None or self._started is None:
            return ()
        return restart_owed(self._started.config, self._running.config)

    def status(self) -> ReloadStatus:
        """Where things stand."""
        return ReloadStatus(
            path=str(self.path),
            config_hash=_hash_of(self._running),
            running_since_s=self._running_since_s,
            previous_hash=_hash_of(self._previous),
            needs_restart=self.needs_restart,
            is_stale=self._last is not None and not self._last.ok,
            last_result=self._last,
            last_good=self._last_good,
            last_error=self._last_error,
            succeeded=self._succeeded,
            failed=self._failed,
        )

    async def reload(self, trigger: str) -> ReloadResult:
        """Take the file over, if it is good and differs from what runs. Never raises for what the file holds."""
        if self._waiting is None:
            self._waiting = self._start(self._reload(trigger))
        # Shielded: whoever asked may leave, the others who share this reload may not lose it.
        return await asyncio.shield(self._waiting)

    def overlook(self) -> None:
        """Take the file as read, whatever it holds: the next reload waits for an edit."""
        self._seen = self._fingerprint()

    async def _reload(self, trigger: str) -> ReloadResult:
        async with self._turn:
            self._waiting = None  # from here on the file is being read; a later trigger needs a reading of its own
            started = time.monotonic()
            read = await asyncio.to_thread(self._read)
            self._seen = read.fingerprint
            return self._settle(await self._take_over(read, trigger), started)

    async def dry_run(self) -> ReloadResult:
        """What a reload would do now. Changes nothing, and is not counted."""
        started = time.monotonic()
        read = await asyncio.to_thread(self._read)
        result = await self._proven(read, "dry_run")
        return replace(result, is_dry_run=True, took_s=time.monotonic() - started)

    async def rollback(self) -> ReloadResult:
        """Bring back the fleet that ran before. The file is left as it is, and is read again once it is edited."""
        async with self._turn:
            started = time.monotonic()
            if self._previous is None:
                problem = Problem(str(self.path), None, None, "", "there is no earlier fleet to roll back to")
                return self._settle(self._result("rollback", problems=(problem,)), started)
            return self._settle(self._swap(self._previous, "rollback"), started)

    def _read(self) -> _Read:
        """Reads and builds; runs in a thread, since a large file takes a second or two to parse."""
        try:
            raw = read_source(self.path)
        except ConfigError as error:
            return _Read(str(error), None, error.problems)
        fingerprint = self._fingerprint_of(raw)
        try:
            return _Read(fingerprint, load_fleet_bytes(raw, str(self.path), self._environ))
        except ConfigError as error:
            return _Read(fingerprint, None, error.problems)
        except Exception as error:  # a bug of ours or of a plugin must not end the watch
            log.exception("reading %s failed", self.path)
            return _Read(fingerprint, None, (self._crash("could not be built", error, ()),))

    async def _take_over(self, read: _Read, trigger: str) -> ReloadResult:
        result = await self._proven(read, trigger)
        if not (result.ok and result.changed) or read.loaded is None:
            return result
        return self._swap(read.loaded, trigger)

    async def _proven(self, read: _Read, trigger: str) -> ReloadResult:
        """The result up to, and without, the swap."""
        loaded = read.loaded
        if loaded is None:
            return self._result(trigger, problems=read.problems)
        changed = _is_other(loaded, self._running)
        problems: tuple[Problem, ...] = ()
        if changed and self._prove is not None:
            try:
                problems = tuple(await self._prove(loaded))
            except Exception as error:
                log.exception("proving the fleet of %s failed", self.path)
                problems = (self._crash("could not be proven", error, loaded.specs),)
        return self._result(trigger, loaded, changed=changed and not problems, problems=problems)

    def _swap(self, loaded: LoadedFleet, trigger: str) -> ReloadResult:
        """The one step that changes anything. Runs on the loop without a pause, so nobody sees it half done."""
        result = self._result(trigger, loaded, changed=_is_other(loaded, self._running))
        try:
            self._apply(loaded)
        except Exception as error:
            log.exception("applying the fleet of %s failed", self.path)
            problem = self._crash("could not be applied", error, loaded.specs)
            return replace(result, ok=False, changed=False, problems=(problem,))
        self._previous, self._running = self._running, loaded
        self._started = self._started or loaded
        self._running_since_s = self._wall_clock()
        return replace(result, config_hash=loaded.config_hash)

    def _result(
        self, trigger: str, loaded: LoadedFleet | None = None, *, changed: bool = False,
        problems: tuple[Problem, ...] = (),
    ) -> ReloadResult:
        return ReloadResult(
            ok=not problems,
            trigger=trigger,
            at_s=self._wall_clock(),
            config_hash=_hash_of(self._running),
            candidate_hash=_hash_of(loaded),
            changed=changed,
            problems=problems,
            warnings=loaded.warnings if loaded else (),
            diff=self._diff(loaded),
        )

    def _diff(self, loaded: LoadedFleet | None) -> FleetDiff:
        if loaded is None:
            return NO_CHANGE
        running, started = self._running, self._started
        return diff_fleets(running.config if running else None, loaded.config, started.config if started else None)

    def _settle(self, result: ReloadResult, started: float) -> ReloadResult:
        """Book, log and pass on a result."""
        result = replace(result, took_s=time.monotonic() - started)
        self._last = result
        if result.ok:
            self._last_good = result
            self._succeeded += 1
            if not result.changed:
                log.info("%s: still runs %s", result.trigger, result.config_hash)
            else:
                log.info("%s: now runs %s: %s", result.trigger, result.config_hash, result.diff.in_short() or "keys")
                for warning in result.warnings:
                    log.warning("%s runs with a warning: %s", result.config_hash, warning)
                if result.diff.needs_restart:
                    log.warning("%s: a restart is needed for %s; until then the old values hold", result.config_hash,
                                ", ".join(result.diff.needs_restart))
        else:
            self._last_error = result
            self._failed += 1
            for problem in result.problems:
                log.error("%s refused, %s still runs: %s", result.trigger, result.config_hash, problem)
        if self._on_result is not None:
            try:
                self._on_result(result)
            except Exception:
                log.exception("reporting a reload failed")
        return result

    def _crash(self, what: str, error: Exception, specs: Sequence[BackendSpec]) -> Problem:
        message = f"{what}: {type(error).__name__}: {error}"
        for spec in specs:
            if spec.api_key:
                message = message.replace(spec.api_key, "[secret]")
        return Problem(str(self.path), None, None, "", message)

    def _start(self, reload: Awaitable[ReloadResult]) -> asyncio.Task[ReloadResult]:
        task = asyncio.ensure_future(reload)
        self._tasks.add(task)  # the loop itself holds tasks weakly
        task.add_done_callback(self._tasks.discard)
        return task

    # Triggers

    def install_sighup(self, loop: asyncio.AbstractEventLoop) -> Callable[[], object]:
        """Reload on SIGHUP; returns what takes the handler off again."""
        def on_sighup() -> None:
            self._start(self.reload("sighup"))

        loop.add_signal_handler(signal.SIGHUP, on_sighup)
        return partial(loop.remove_signal_handler, signal.SIGHUP)

    async def watch(self) -> None:
        """Reload whenever the file's content changes; runs until cancelled."""
        if self._seen is None:
            self._seen = await asyncio.to_thread(self._fingerprint)
            if self._running is not None:
                # The file may have been edited since the process read it, before this watch began.
                await self.reload("file")
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch_folder())
            group.create_task(self._watch_content())

    async def _watch_folder(self) -> None:
        while True:
            folders = {self.path.parent, _resolved(self.path).parent}
            if (keys_file := self._keys_file()) is not None and keys_file.parent.is_dir():
                folders.add(keys_file.parent)
            try:
                async for _ in awatch(*folders, watch_filter=self._concerns_us, debounce=400, step=50, recursive=False):
                    await self._reload_if_edited("file")
                    if _resolved(self.path).parent not in folders:
                        break  # the link leads elsewhere now: watch there
            except (OSError, RuntimeError) as error:
                # No such folder, or no inotify watches left: the slow comparison carries on alone meanwhile.
                log.warning("cannot watch %s (%s); comparing its content each %g s", self.path, error, self._poll_s)
                await asyncio.sleep(self._poll_s)

    def _concerns_us(self, _change: Change, changed: str) -> bool:
        names = {self.path.name, _resolved(self.path).name, "..data"}
        keys_file = self._keys_file()
        if keys_file is not None:
            names |= {keys_file.name, _resolved(keys_file).name}
        return Path(changed).name in names

    async def _watch_content(self) -> None:
        while True:
            await asyncio.sleep(self._poll_s)
            await self._reload_if_edited("poll")

    async def _reload_if_edited(self, trigger: str) -> None:
        found = await self._settled_fingerprint()
        if found != self._seen:
            await self.reload(trigger)

    async def _settled_fingerprint(self) -> str:
        """The content's fingerprint once it has stopped changing: a file cut off between two lines is valid YAML."""
        found = await asyncio.to_thread(self._fingerprint)
        for _ in range(20):
            if found == self._seen:
                return found
            await asyncio.sleep(self._settle_s)
            before, found = found, await asyncio.to_thread(self._fingerprint)
            if found == before:
                break
        return found

    def _fingerprint(self) -> str:
        try:
            return self._fingerprint_of(read_source(self.path))
        except ConfigError as error:
            return str(error)

    def _fingerprint_of(self, fleet_file: bytes) -> str:
        """Names what a reload would read: the fleet file, and the keys file that the running one names."""
        digest = hashlib.sha256(fleet_file)
        keys_file = self._keys_file()
        if keys_file is not None:
            try:
                digest.update(read_source(keys_file))
            except ConfigError as error:
                digest.update(str(error).encode())
        return digest.hexdigest()

    def _keys_file(self) -> Path | None:
        return None if self._running is None else keys_file_of(self._running.config, self.path)


def _is_other(loaded: LoadedFleet, running: LoadedFleet | None) -> bool:
    """Keys are no part of the configuration's hash, which may be shown anywhere."""
    return (
        running is None
        or loaded.config_hash != running.config_hash
        or loaded.keys.fingerprint != running.keys.fingerprint
    )


def _hash_of(loaded: LoadedFleet | None) -> str | None:
    return loaded.config_hash if loaded else None


def _resolved(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError):  # a loop of links
        return path.absolute()
