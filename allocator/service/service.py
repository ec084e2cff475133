"""The service from its start to its end: waits to lead, restores the world, reconciles, and starts over when deposed.

    campaign → restore → take the file over → reconcile ─┐
       ▲                                                 │ Deposed, StoreError
       └─────────────────────────────────────────────────┘
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from sqlalchemy import Engine

from allocator.execution.cgroups import delegated_parent
from allocator.execution.engine import ExecutionEngine
from allocator.execution.local import Clocks, LocalEngine
from allocator.loan.states import LoanState
from allocator.model.world import World, new_world
from allocator.service.acting import Acting
from allocator.service.clock import WorldClock
from allocator.service.config import Declared
from allocator.service.keeper import Keeper, Watcher
from allocator.service.lender import Lender
from allocator.service.managed import ManagedLender
from allocator.service.probing import Probe
from allocator.service.reconcile import Reconciler
from allocator.service.taking_over import Refused, takeover
from allocator.store.history import Move
from allocator.store.journal import Journal
from allocator.store.leadership import Candidate, Deposed, Leader, Term, current, renew, resign
from allocator.store.schema import StoreError, open_database

log = logging.getLogger("headrace.allocator")

CANDIDATE_POLL_S = 0.2
REFUSED_PAUSE_S = 2.0
"""Between two tries with a file that does not fit the world; it may be mended meanwhile."""


class BadFile(Exception):
    """The allocator file cannot be used; each problem is one line."""

    def __init__(self, problems: tuple[str, ...]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


Load = Callable[[], Declared]
"""Reads the allocator file again. Raises BadFile."""


MakeLender = Callable[[ExecutionEngine, Declared], Lender]
"""The lender of a term; it is closed with the term."""


@dataclass(frozen=True, slots=True)
class ReloadResult:
    """What became of one reload."""

    ok: bool
    changed: bool
    config: str | None
    """The version in force after it."""
    problems: tuple[str, ...] = ()


@dataclass(slots=True)
class Service:
    """One allocator process, leading or waiting to."""

    declared: Declared
    load: Load
    database: Engine
    url: str
    watchers: list[Watcher] = field(default_factory=lambda: [say])
    clocks: Clocks = field(default_factory=Clocks)
    make_lender: MakeLender = ManagedLender
    keeper: Keeper | None = None
    """While it leads."""
    reconciler: Reconciler | None = None
    lender: Lender | None = None
    reloads: dict[str, int] = field(default_factory=lambda: {"ok": 0, "refused": 0})
    last_reload: ReloadResult | None = None
    started_s: float = field(default_factory=time.monotonic)
    _reloading: asyncio.Lock = field(default_factory=asyncio.Lock)

    def engine(self) -> LocalEngine:
        """The execution engine that the file asks for; all state of it is on disk."""
        given = self.declared.config.execution
        return LocalEngine(
            self.declared.state, kill_margin_s=given.kill_margin_s, start_timeout_s=given.start_timeout_s,
            cgroup_parent=delegated_parent() if given.cgroups else None, clocks=self.clocks)

    async def run(self) -> None:
        """Until cancelled."""
        candidate = Candidate(self.database, self.url, self.declared.config.store.lease_s)
        said = waits_for = ""
        while True:
            try:
                term = await asyncio.to_thread(candidate.try_to_lead)
                if term is None:
                    if candidate.seen_url not in (waits_for, self.url):    # its own: a term that it could not resign
                        waits_for = candidate.seen_url
                        log.info("waiting: %s leads on this store", waits_for)
                    await asyncio.sleep(min(CANDIDATE_POLL_S, self.declared.config.store.lease_s / 3.0))
                    continue
                said = waits_for = ""
                await self._lead(term)
            except (Deposed, StoreError, Refused) as problem:
                # A task group that has errors raises those and no cancellation, and so does what closes after one.
                if (task := asyncio.current_task()) is not None and task.cancelling():
                    raise asyncio.CancelledError from problem
                if str(problem) != said:
                    log.error("not leading: %s", problem)
                said = str(problem)
                await asyncio.sleep(REFUSED_PAUSE_S if isinstance(problem, Refused) else CANDIDATE_POLL_S)

    async def _lead(self, term: Term) -> None:
        """One term. Raises Deposed, StoreError when it is over, Refused where the file does not fit the world."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._renewing(term))
                await self._begin(term)
                assert self.reconciler is not None
                log.info("leading, term %d, from event %d on", term.number, self.keeper.seq if self.keeper else 0)
                await self.reconciler.run()
        except BaseExceptionGroup as found:
            ours, others = found.split((Deposed, StoreError, Refused))
            if ours is None or others is not None:
                log.exception("a fault of this program ends the term")
                raise
            raise ours.exceptions[0] from None
        finally:
            acting = self.reconciler.acting if self.reconciler else None
            lender = self.lender
            self.keeper = self.reconciler = self.lender = None
            if acting is not None:
                await acting.close()
            if lender is not None:
                await lender.aclose()
            with contextlib.suppress(StoreError):
                await asyncio.shield(asyncio.to_thread(resign, self.database, term))

    async def _renewing(self, term: Term) -> None:
        lease_s = self.declared.config.store.lease_s
        while True:
            await asyncio.sleep(lease_s / 4.0)
            await asyncio.to_thread(renew, self.database, term)

    async def _begin(self, term: Term) -> None:
        declared = self.declared
        journal = Journal(self.database, snapshot_every=declared.config.store.snapshot_every)
        restored = await asyncio.to_thread(
            journal.restore, term, lambda: new_world(declared.declaration, declared.coefficients))
        clock = WorldClock(restored.reading, self.clocks)
        keeper = Keeper(journal, term, clock, restored.world, restored.seq, list(self.watchers))
        engine = self.engine()
        self.lender = self.make_lender(engine, declared)
        self.lender.restore({name: backend.state for name, backend in restored.world.backends.items()})
        probe = Probe(engine, declared.device_of, declared.config.execution.probe,
                      declared.config.execution.probe_timeout_s)
        acting = Acting(keeper, engine, self.lender, probe, declared.device_of)
        self.reconciler = Reconciler(keeper, engine, self.lender, acting, declared.config.execution.poll_s,
                                     declared.config.execution.keep_runs)
        await self._take_over(keeper, engine, declared)
        self.keeper = keeper

    async def _take_over(self, keeper: Keeper, engine: ExecutionEngine, declared: Declared) -> bool:
        """Brings the world to the file. Raises Refused, Deposed, StoreError."""
        new = [node for node in declared.nodes if node.name not in keeper.world.nodes]
        proven = []
        for node in new:
            proof = await engine.prove_released([declared.device_of[device] for device in node.device_ids])
            if proof.released:
                proven.append(node.name)
        faults: list[Refused] = []

        def make(world: World) -> list[object]:
            try:
                return list(takeover(world, declared.declaration, declared.nodes, declared.coefficients,
                                     keeper.clock.now_s(), proven))
            except Refused as problem:
                faults.append(problem)
                return []

        outcome = await keeper.decide(make)  # type: ignore[arg-type]
        if faults:
            raise faults[0]
        return bool(outcome.taken)

    async def reload(self, *, dry_run: bool = False) -> ReloadResult:
        """Reads the file again and takes it over, whole or not at all. What needs a restart is said in the log."""
        async with self._reloading:
            result = await self._reload(dry_run)
            if not dry_run:
                self.last_reload = result
                self.reloads["ok" if result.ok else "refused"] += 1
                for problem in result.problems:
                    log.error("the file is not taken over: %s", problem)
            return result

    async def _reload(self, dry_run: bool) -> ReloadResult:
        keeper, reconciler = self.keeper, self.reconciler
        version = keeper.world.config.version if keeper else None
        try:
            declared = await asyncio.to_thread(self.load)
            if keeper is None or reconciler is None:
                if not dry_run:
                    self.declared = declared
                return ReloadResult(True, declared.config != self.declared.config, version)
            if dry_run:
                events = takeover(keeper.world, declared.declaration, declared.nodes, declared.coefficients,
                                  keeper.clock.now_s())
                return ReloadResult(True, bool(events), version)
            changed = await self._take_over(keeper, reconciler.engine, declared)
        except BadFile as problem:
            return ReloadResult(False, False, version, problem.problems)
        except Refused as problem:
            return ReloadResult(False, False, version, tuple(str(problem).splitlines()))
        self._adopt(declared)
        return ReloadResult(True, changed, keeper.world.config.version)

    def _adopt(self, declared: Declared) -> None:
        before, self.declared = self.declared, declared
        if self.reconciler is not None and self.lender is not None:
            self.reconciler.acting.device_of = declared.device_of
            self.reconciler.acting.probe = Probe(self.reconciler.engine, declared.device_of,
                                                 declared.config.execution.probe,
                                                 declared.config.execution.probe_timeout_s)
            self.reconciler.poll_s = declared.config.execution.poll_s
            self.reconciler.keep_runs = declared.config.execution.keep_runs
            self.lender.redeclare(declared)
        for name in ("listen", "state", "store", "router"):
            if getattr(before.config, name) != getattr(declared.config, name):
                log.warning("the setting %s takes a restart to change", name)

    async def leader(self) -> Leader:
        """Who leads, by the store. Raises StoreError."""
        return await asyncio.to_thread(current, self.database)


def open_store(declared: Declared) -> Engine:
    """The database of a file.

    Raises:
        StoreError: see `open_database`; or the variable with its address is not set, or the folder `state` cannot be.
    """
    try:
        declared.state.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as problem:
        raise StoreError(f"state: the folder {declared.state} cannot be made: {problem.strerror}; name one that may be "
                         "written") from problem
    try:
        url = declared.store_url(os.environ)
    except KeyError as missing:
        raise StoreError(f"store.url_env: environment variable {missing.args[0]} is not set") from None
    return open_database(url)


def say(move: Move) -> None:
    """One line of the log for each change of state."""
    figures = move.figures
    level = logging.WARNING if figures.get("saved") is False else logging.INFO
    if move.became in (LoanState.OVERDUE, LoanState.LOST):
        level = logging.ERROR
    log.log(level, "%s %s, epoch %d: %s → %s (%s)%s", move.what.value, move.name, move.epoch, move.was or "new",
            move.became, move.reason, f": {figures['detail']}" if figures.get("detail") else "")
