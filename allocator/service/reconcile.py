"""The loop of one leader's term: look → journal → plan → journal → do → look again.

Level-triggered: each round compares the world with what engine and lender report, and no message that was lost makes a
difference for longer than a tick. A round comes at least every `Rules.tick_s`, at once after news, and every `poll_s`
while something is on its way.
"""

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from allocator.events import (
    BackendGone,
    BackendReported,
    ClockRead,
    Event,
    RunReachable,
    SupplyReported,
)
from allocator.execution.engine import EngineUnreachable, ExecutionEngine
from allocator.execution.values import Report
from allocator.model.inventory import Condition
from allocator.model.world import World
from allocator.plan import plan
from allocator.proposals import Proposal, commit
from allocator.service.acting import Acting, noted
from allocator.service.keeper import Keeper, Note
from allocator.service.lender import Lender, Seen
from allocator.service.reports import observed, strangers
from allocator.store.leadership import renew

log = logging.getLogger("headrace.allocator")

WALL_DRIFT_S = 1.0
"""A wall clock that is off by more than this from where it was last read is read again."""
_LAST_NUMBER = re.compile(r"[.-]([0-9]+)\Z")
QUARANTINE_EVERY_S = 2.0
"""How often devices in quarantine are looked at."""


@dataclass(slots=True)
class Reconciler:
    """One term."""

    keeper: Keeper
    engine: ExecutionEngine
    lender: Lender
    acting: Acting
    poll_s: float
    keep_runs: int
    reports: Mapping[str, Report] = field(default_factory=dict)
    _quarantine_due_s: float = 0.0
    _complained: set[str] = field(default_factory=set)

    async def run(self) -> None:
        """Until the term is over. Raises Deposed, StoreError."""
        while True:
            self.keeper.changed.clear()
            await self.round()
            if self.acting.failure is not None:
                raise self.acting.failure
            pause_s = self.keeper.world.config.rules.tick_s
            if self.acting.busy:
                pause_s = min(pause_s, self.poll_s)
            # News comes in bursts: what follows within a few milliseconds shares a round.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self.keeper.changed.wait()
                await asyncio.sleep(min(0.01, self.poll_s))

    async def round(self) -> None:
        """One time around."""
        await self._observe()
        await self.acting.look(self._in_quarantine())
        await self._plan()
        self.acting.begin()

    async def _plan(self) -> None:
        """Proposes beside the loop, which goes on answering; what news has overtaken is planned again at once."""
        now_s = self.keeper.clock.now_s()
        # A world of its own: what a planner remembers with it is not for two threads.
        proposal = await asyncio.to_thread(proposed, self.keeper.world.evolved(), now_s)
        if not proposal.events:
            return
        conflicts: list[tuple[Event, str]] = []

        def committed(world: World) -> Iterable[Event]:
            done = commit(world, proposal)
            conflicts.extend(done.conflicts)
            return done.taken

        await self.keeper.decide(committed)
        for event, reason in conflicts:
            log.info("planned again: %s does not fit any more: %s", type(event).__name__, reason)
        if conflicts:
            self.keeper.changed.set()

    async def _observe(self) -> None:
        clock = self.keeper.clock
        wall_s = clock.clocks.unix_s()
        if abs(self.keeper.world.wall_s(clock.now_s()) - wall_s) > WALL_DRIFT_S:
            await self.keeper.record([ClockRead(at_s=clock.now_s(), wall_s=wall_s)])
        starting = self.acting.starting
        try:
            reports = {report.run_id: report for report in await self.engine.adopt()}
        except EngineUnreachable as problem:
            log.warning("the execution engine %s cannot tell what runs: %s", self.engine.name, problem)
            await self.keeper.decide(lambda world: _unreachable(world, clock.now_s()))
            return
        self.reports = reports
        steps = {run.job: count for run in self.keeper.world.runs.values()
                 if (count := await self.keeper.steps_of(run.job)) is not None}
        await self.keeper.decide(lambda world: self._observed(world, starting, steps))
        await self._clear_away(reports)
        seen = await self.lender.observe(reports)
        if seen is not None:
            outcome = await self.keeper.decide(lambda world: lender_events(world, seen, clock.now_s()))
            self._complain(refusal for _, refusal in outcome.refused)

    def _complain(self, refusals: Iterable[str]) -> None:
        """Once for each fault, until it is gone."""
        faults = set(refusals)
        for fault in sorted(faults - self._complained):
            log.warning("the lender's word is not taken: %s", fault)
        self._complained = faults

    def _observed(self, world: World, starting: set[str], steps: Mapping[str, int]) -> Iterator[Note]:
        under_way = starting | self.acting.starting
        for one in observed(world, self.reports, under_way, self.keeper.clock.now_s(), steps):
            yield noted(one)

    async def _clear_away(self, reports: Mapping[str, Report]) -> None:
        """Ends runs that nobody has placed; drops the oldest records of those that are over."""
        world = self.keeper.world
        ours = {run_id for run_id in reports if self.lender.owns_run(run_id)}
        lost = [report for report in strangers(world, reports, ours) if report.run_id not in self.acting.starting]
        if lost:
            # Had another allocator led since the reports came, these might be its own.
            await asyncio.to_thread(renew, self.keeper.journal.engine, self.keeper.term)
            for report in lost:
                log.warning("run %s holds devices and is nobody's; it is ended", report.run_id)
                await self.engine.kill(report.run_id, report.epoch or 0)
        over = [report for report in reports.values() if report.ended and report.run_id not in world.runs]
        jobs = sorted((report for report in over if report.run_id not in ours), key=_age)
        engines = sorted((report for report in over if report.run_id in ours), key=_age)
        for report in [*jobs[:-self.keep_runs or None], *engines[:-5]]:
            await self.engine.forget(report.run_id)

    def _in_quarantine(self) -> list[str]:
        now_s = time.monotonic()
        if now_s < self._quarantine_due_s:
            return []
        self._quarantine_due_s = now_s + QUARANTINE_EVERY_S
        return [device for device, condition in self.keeper.world.conditions.items()
                if condition is Condition.QUARANTINED]


def proposed(world: World, now_s: float) -> Proposal:
    """What is to be done next, by the world as it was when that was asked."""
    planned = plan(world, now_s)
    for event, refusal in planned.refused:
        log.error("the planner proposed %s, refused: %s", type(event).__name__, refusal)
    return Proposal("allocator", world.version, planned.events)


def lender_events(world: World, seen: Seen, now_s: float) -> Iterator[Event]:
    """What a lender says that the world does not know yet; supplies also where they would go stale."""
    names = {backend.name for backend in seen.backends}
    for backend in seen.backends:
        if world.backends.get(backend.name) != backend:
            yield BackendReported(at_s=now_s, backend=backend)
    for name in world.backends:
        if name not in names and name not in world.loans:
            yield BackendGone(at_s=now_s, backend=name)
    for supply in seen.supplies:
        known = world.supplies.get((supply.pool, supply.card))
        if (known is None or (known.lendable, known.spare) != (supply.lendable, supply.spare)
                or now_s - known.at_s > world.config.rules.supply_fresh_s / 2.0):
            yield SupplyReported(at_s=now_s, supply=supply)


def _unreachable(world: World, now_s: float) -> Iterator[Event]:
    for run in world.runs.values():
        if not run.unreachable:
            yield RunReachable(at_s=now_s, run=run.id, epoch=run.epoch, reachable=False)


def _age(report: Report) -> tuple[int, str]:
    """Run names end with a number that grows, behind a dot or, of a replica's engine, a dash."""
    number = _LAST_NUMBER.search(report.run_id)
    return (int(number[1]) if number else 0, report.run_id)
