"""Who may write. One allocator leads; the others watch its pulse and take over when it stops.

The leader holds a *term*, a number that only grows, and renews it a few times in `ttl_s`. A candidate takes the next
term once it has seen the same pulse for `ttl_s` on its own monotonic clock: no two clocks are ever compared (as in
Kubernetes' client-go). A holder on the same machine whose process is gone is succeeded at once.

The pulse is for being quick. What makes it safe is the fence: every write checks its term in its own transaction, so
a leader that was deposed without noticing writes nothing (Kleppmann, "How to do distributed locking", 2016).
"""

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from sqlalchemy import Connection, Engine, select, update
from sqlalchemy.exc import SQLAlchemyError

from allocator.execution.processes import boot_id
from allocator.store.schema import READS, StoreError, leader, reason_of


class Term(NamedTuple):
    """The right to write, until somebody takes the next one."""

    number: int
    holder: str


class Leader(NamedTuple):
    """The leader's row as it stands."""

    term: int
    holder: str
    """Empty: nobody leads."""
    url: str
    renewals: int


class Deposed(Exception):
    """Somebody else leads now; nothing was written."""


def this_process() -> str:
    """A name for this process that no other has: host, boot, process namespace, id and start time."""
    namespace = os.readlink("/proc/self/ns/pid").strip("pid:[]")
    return f"{socket.gethostname()}/{boot_id()}/{namespace}/{os.getpid()}/{_started(os.getpid())}"


def is_gone(holder: str) -> bool:
    """Whether the process of that name is certainly over. One of another machine or container never is."""
    try:
        _, boot, namespace, pid, started = holder.split("/")
        mine = this_process().split("/")
    except (ValueError, OSError):
        return False
    return [boot, namespace] == mine[1:3] and _started(int(pid)) != started


def _started(pid: int) -> str:
    """Start time in clock ticks since boot; empty where there is no such process, or only its zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


class Candidate:
    """One allocator that would lead. Not for several threads at once."""

    def __init__(self, engine: Engine, url: str, ttl_s: float, *, holder: str | None = None,
                 monotonic_s: Callable[[], float] = time.monotonic) -> None:
        """`url` is where this allocator answers, for followers to point at."""
        self._engine = engine
        self._url = url
        self._ttl_s = ttl_s
        self._holder = holder or this_process()
        self._monotonic_s = monotonic_s
        self._seen: tuple[Leader, float] | None = None

    @property
    def seen_url(self) -> str:
        """Where the leader answers that was last seen; empty before."""
        return self._seen[0].url if self._seen else ""

    def try_to_lead(self) -> Term | None:
        """Looks at the leader's pulse, and takes the next term where it has stopped.

        Raises:
            StoreError: the store does not answer.
        """
        try:
            with self._engine.begin() as connection:
                found = _read(connection)
                now_s = self._monotonic_s()
                if self._seen is None or self._seen[0] != found:
                    self._seen = (found, now_s)
                if found.holder and not is_gone(found.holder) and now_s - self._seen[1] < self._ttl_s:
                    return None
                taken = connection.execute(
                    update(leader)
                    .where(leader.c.term == found.term, leader.c.renewals == found.renewals)
                    .values(term=found.term + 1, holder=self._holder, url=self._url, renewals=0))
                return Term(found.term + 1, self._holder) if taken.rowcount == 1 else None
        except SQLAlchemyError as error:
            raise StoreError(reason_of(error)) from error


def renew(engine: Engine, term: Term) -> None:
    """The leader's pulse. Having returned, it says that nobody else led until it began.

    Raises:
        Deposed: somebody else leads.
        StoreError: the store does not answer; the term may hold or not.
    """
    try:
        with engine.begin() as connection:
            held = connection.execute(
                update(leader).where(leader.c.term == term.number, leader.c.holder == term.holder)
                .values(renewals=leader.c.renewals + 1))
            if held.rowcount != 1:
                raise Deposed(f"term {term.number} is over")
    except SQLAlchemyError as error:
        raise StoreError(reason_of(error)) from error


def resign(engine: Engine, term: Term) -> None:
    """Lets a follower take over without waiting. Raises StoreError."""
    try:
        with engine.begin() as connection:
            connection.execute(
                update(leader).where(leader.c.term == term.number, leader.c.holder == term.holder)
                .values(holder="", url="", renewals=0))
    except SQLAlchemyError as error:
        raise StoreError(reason_of(error)) from error


def current(engine: Engine) -> Leader:
    """Who leads. Raises StoreError."""
    try:
        with engine.connect().execution_options(**{READS: True}) as connection:
            return _read(connection)
    except SQLAlchemyError as error:
        raise StoreError(reason_of(error)) from error


def fence(connection: Connection, term: Term) -> None:
    """To be called first in a transaction that writes: holds the leader's row to its end.

    Raises:
        Deposed: the term is not the one in force.
    """
    found = connection.execute(
        select(leader.c.term, leader.c.holder).where(leader.c.id == 1).with_for_update()).one()
    if (found.term, found.holder) != term:
        raise Deposed(f"term {term.number} is over; {found.holder or 'nobody'} has term {found.term}")


def _read(connection: Connection) -> Leader:
    row = connection.execute(
        select(leader.c.term, leader.c.holder, leader.c.url, leader.c.renewals).where(leader.c.id == 1)).one()
    return Leader(*row)
