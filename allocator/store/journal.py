"""The journal: written before anything is done about what it says, read back after a crash.

A batch of events is one transaction: all of it is there, or none. Only events that change the world are written; an
event that the world refuses leaves no trace. `restore` takes the latest snapshot that it can read and applies what came
after it; `world_at` does the same for any earlier moment.
"""

import json
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Engine, delete, desc, func, insert, select
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from allocator.apply import apply
from allocator.clock import Reading
from allocator.events import BadEvent, Event, from_json, to_json
from allocator.model.world import World
from allocator.store import schema
from allocator.store.history import Move, What
from allocator.store.leadership import Deposed, Term, fence
from allocator.store.schema import READS, StoreError, reason_of
from allocator.store.snapshot import BadSnapshot, from_bytes, to_bytes

SNAPSHOT_EVERY = 500
KEEP_SNAPSHOTS = 3
"""Beside the first, which every replay from the beginning needs."""
FAULT_VARIABLE = "HEADRACE_FAULT_KILL_AT_WRITE"
"""For tests: `7:before` ends the process by SIGKILL before its seventh write, `7:after` right after it. With the name
of an event, such as `LoanRecalled:after`: at the first write that has one."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One event to be written, with what it did, and a text of the service's own beside it."""

    event: Event
    moves: tuple[Move, ...] = ()
    attached: str | None = None


@dataclass(frozen=True, slots=True)
class Written:
    """One event as it stands in the journal."""

    seq: int
    term: int
    wall_s: float
    event: Event
    attached: str | None


@dataclass(frozen=True, slots=True)
class Restored:
    """What a restart begins with."""

    world: World
    seq: int
    reading: Reading | None
    """The clocks at the last write; `None` in a journal without events."""


@dataclass(frozen=True, slots=True)
class PastMove:
    """One row of the history."""

    seq: int
    name: str
    epoch: int
    was: str
    became: str
    at_s: float
    wall_s: float
    reason: str
    figures: Mapping[str, Any]


class Journal:
    """One journal in one database. Its methods block; they may be called from any thread, appends from one at a time.

    All raise StoreError where the database does not answer.
    """

    def __init__(self, engine: Engine, *, snapshot_every: int = SNAPSHOT_EVERY) -> None:
        self.engine = engine
        self._snapshot_every = snapshot_every
        self._kill_at = _fault(os.environ.get(FAULT_VARIABLE, ""))
        self.writes = 0
        """Batches that this object has written."""

    def restore(self, term: Term, first: Callable[[], World]) -> Restored:
        """The world as the journal has it. A new journal begins with `first()`, which it keeps.

        Raises:
            Deposed: the term is over.
            StoreError: also where the journal cannot be read by this version of the program.
        """
        try:
            with self.engine.begin() as connection:
                fence(connection, term)
                if connection.execute(select(func.count()).select_from(schema.snapshots)).scalar_one() == 0:
                    connection.execute(insert(schema.snapshots).values(seq=0, world=to_bytes(first())))
        except SQLAlchemyError as error:
            raise StoreError(reason_of(error)) from error
        world, seq = self._replayed(None)
        return Restored(world, seq, self._last_reading())

    def append(self, term: Term, after_seq: int, entries: Sequence[Entry], reading: Reading, world: World) -> int:
        """Writes events that follow `after_seq`; returns the last one's number. `world` is the one after them.

        Raises:
            Deposed: the term is over, or somebody has written meanwhile. Nothing was written.
            StoreError: what became of the write is unknown; `restore` tells.
        """
        self._maybe_die("before", entries)
        last = after_seq + len(entries)
        try:
            with self.engine.begin() as connection:
                fence(connection, term)
                connection.execute(insert(schema.journal), [
                    _row(after_seq + number, term, entry, reading) for number, entry in enumerate(entries, 1)])
                rows = [_move_row(after_seq + number, move, reading) for number, entry in enumerate(entries, 1)
                        for move in entry.moves]
                if rows:
                    connection.execute(insert(schema.moves), rows)
                if last // self._snapshot_every > after_seq // self._snapshot_every:
                    connection.execute(insert(schema.snapshots).values(seq=last, world=to_bytes(world)))
                    kept = connection.execute(select(schema.snapshots.c.seq).order_by(
                        desc(schema.snapshots.c.seq)).limit(KEEP_SNAPSHOTS)).scalars().all()
                    connection.execute(delete(schema.snapshots).where(
                        schema.snapshots.c.seq > 0, schema.snapshots.c.seq.not_in(kept)))
        except IntegrityError as error:
            raise Deposed(f"event {after_seq + 1} is in the journal already") from error
        except SQLAlchemyError as error:
            raise StoreError(reason_of(error)) from error
        self.writes += 1
        self._maybe_die("after", entries)
        return last

    def events(self, after_seq: int = 0, limit: int | None = None) -> list[Written]:
        """Events in their order."""
        table = schema.journal
        query = select(table.c.seq, table.c.term, table.c.wall_s, table.c.event, table.c.attached).where(
            table.c.seq > after_seq).order_by(table.c.seq)
        return [Written(seq, term, wall_s, _decoded(seq, text), attached)
                for seq, term, wall_s, text, attached in self._rows(query if limit is None else query.limit(limit))]

    def world_at(self, seq: int) -> World:
        """The world after event `seq`: the same value that it was then."""
        return self._replayed(seq)[0]

    def attached(self, subject: str) -> list[tuple[str, str]]:
        """(kind of event, text) beside the events about one job or loan, in their order."""
        table = schema.journal
        return [(kind, text) for kind, text in self._rows(
            select(table.c.kind, table.c.attached)
            .where(table.c.subject == subject, table.c.attached.is_not(None)).order_by(table.c.seq))]

    def history(self, what: What, *, name: str | None = None, since_s: float | None = None,
                limit: int = 1000) -> list[PastMove]:
        """The latest moves, the oldest of them first."""
        table = schema.moves
        query = select(table.c.seq, table.c.name, table.c.epoch, table.c.was, table.c.became, table.c.at_s,
                       table.c.wall_s, table.c.reason, table.c.figures).where(table.c.what == what.value)
        if name is not None:
            query = query.where(table.c.name == name)
        if since_s is not None:
            query = query.where(table.c.at_s >= since_s)
        rows = self._rows(query.order_by(desc(table.c.id)).limit(limit))
        return [PastMove(**{**row._mapping, "figures": json.loads(row.figures)}) for row in reversed(rows)]

    def _replayed(self, until: int | None) -> tuple[World, int]:
        table = schema.snapshots
        query = select(table.c.seq, table.c.world).order_by(desc(table.c.seq))
        fault: BadSnapshot | None = None
        for seq, data in self._rows(query if until is None else query.where(table.c.seq <= until)):
            try:
                world = from_bytes(data)
            except BadSnapshot as error:
                fault = error
                continue
            written = self.events(seq, None if until is None else until - seq)
            for one in written:
                world = apply(world, one.event)
            return world, written[-1].seq if written else seq
        if fault is None:
            raise StoreError("the journal is empty: no allocator has led on this store yet")
        raise StoreError(f"no snapshot of this journal can be read: {fault}; use the version of Headrace that wrote it")

    def _last_reading(self) -> Reading | None:
        table = schema.journal
        rows = self._rows(select(table.c.at_s, table.c.wall_s, table.c.boot_s, table.c.boot_id)
                          .order_by(desc(table.c.seq)).limit(1))
        return Reading(*rows[0]) if rows else None

    def _rows(self, query: Any) -> list[Any]:
        try:
            with self.engine.connect().execution_options(**{READS: True}) as connection:
                return list(connection.execute(query).all())
        except SQLAlchemyError as error:
            raise StoreError(reason_of(error)) from error

    def _maybe_die(self, moment: str, entries: Sequence[Entry]) -> None:
        number = self.writes + (moment == "before")
        names = {str(number), *(type(entry.event).__name__ for entry in entries)}
        if self._kill_at is not None and self._kill_at[0] in names and self._kill_at[1] == moment:
            os.kill(os.getpid(), signal.SIGKILL)


def subject_of(event: Event) -> str:
    """The job or loan that an event is about; for one about a run, its job. Empty for the others."""
    for name in ("job", "loan"):
        found = getattr(event, name, None)
        if found is not None:
            return str(getattr(found, "id", found))
    claim = getattr(event, "claim", None)
    if claim is not None:
        return str(claim.job)
    run = getattr(event, "run", None)
    # A run is named after its job, with the epoch behind the last dot.
    return "" if run is None else str(run.job if hasattr(run, "job") else run.rpartition(".")[0])


def _row(seq: int, term: Term, entry: Entry, reading: Reading) -> dict[str, Any]:
    event = entry.event
    return {"seq": seq, "term": term.number, "at_s": reading.world_s, "wall_s": reading.wall_s,
            "boot_s": reading.boot_s, "boot_id": reading.boot_id, "kind": str(type(event).__struct_config__.tag),
            "subject": subject_of(event), "event": to_json(event).decode(), "attached": entry.attached}


def _move_row(seq: int, move: Move, reading: Reading) -> dict[str, Any]:
    return {"seq": seq, "what": move.what.value, "name": move.name, "epoch": move.epoch, "was": str(move.was),
            "became": str(move.became), "at_s": move.at_s, "wall_s": reading.wall_s, "reason": move.reason,
            "figures": move.figures_text}


def _decoded(seq: int, text: str) -> Event:
    try:
        return from_json(text)
    except BadEvent as problem:
        raise StoreError(f"event {seq} of the journal cannot be read: {problem}; use the version of Headrace that "
                         "wrote it") from problem


def _fault(text: str) -> tuple[str, str] | None:
    what, _, moment = text.partition(":")
    return (what, moment or "after") if what else None

