"""Keeps the world: the one place where it changes, and only by what is already in the journal.

    consider every event → write those that change something, in one transaction → take the new world

One at a time, under a lock; so a plan that was made on a world is written on that same world. Where a write is in
doubt, the keeper is of no use any more: the service starts again from what the journal says.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from allocator.apply import consider
from allocator.events import Event
from allocator.model.world import World
from allocator.service.clock import WorldClock
from allocator.service.job_request import JobRequest, Saved, read_attached
from allocator.store.history import Move, moves
from allocator.store.journal import Entry, Journal
from allocator.store.leadership import Term


class Note(NamedTuple):
    """An event to be recorded, with a text of the service's own beside it."""

    event: Event
    attached: str | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of events that were to be recorded."""

    taken: tuple[Event, ...]
    refused: tuple[tuple[Event, str], ...]


Watcher = Callable[[Move], None]


@dataclass(slots=True)
class Keeper:
    """The world in one leader's term. `world` may be read at any time; it is a value."""

    journal: Journal
    term: Term
    clock: WorldClock
    world: World
    seq: int
    watchers: list[Watcher] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set with each write; whoever waits for news clears it."""
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _steps: dict[str, int | None] = field(default_factory=dict)

    async def record(self, notes: Iterable[Note | Event]) -> Outcome:
        """Writes those of these events that change the world, and takes them over.

        Raises Deposed, StoreError: the world is not to be used any more.
        """
        given = list(notes)
        return await self.decide(lambda _: given)

    async def decide(self, make: Callable[[World], Iterable[Note | Event]]) -> Outcome:
        """The same for events that `make` draws from the world as it is when their turn has come."""
        # A caller that is cancelled must not leave the world behind the journal.
        return await asyncio.shield(self._decide(make))

    async def _decide(self, make: Callable[[World], Iterable[Note | Event]]) -> Outcome:
        async with self._lock:
            world = self.world
            entries: list[Entry] = []
            refused: list[tuple[Event, str]] = []
            for given in make(world):
                note = given if isinstance(given, Note) else Note(given)
                after = consider(world, note.event)
                if isinstance(after, str):
                    refused.append((note.event, after))
                    continue
                entries.append(Entry(note.event, tuple(moves(world, note.event, after)), note.attached))
                world = after
            if entries:
                self.seq = await asyncio.to_thread(
                    self.journal.append, self.term, self.seq, entries, self.clock.reading(), world)
                self.world = world
                self.changed.set()
                for move in (move for entry in entries for move in entry.moves):
                    for watcher in self.watchers:
                        watcher(move)
            return Outcome(tuple(entry.event for entry in entries), tuple(refused))

    async def request_of(self, job: str) -> tuple[JobRequest | None, Saved | None]:
        """What was asked for under this name, and the last checkpoint that it acknowledged."""
        return read_attached(await asyncio.to_thread(self.journal.attached, job))


    async def steps_of(self, job: str) -> int | None:
        """How many steps the job has in all, where its request says so."""
        if job not in self._steps:
            request, _ = await self.request_of(job)
            self._steps = {name: steps for name, steps in self._steps.items() if name in self.world.jobs}
            self._steps[job] = request.steps if request else None
        return self._steps[job]
