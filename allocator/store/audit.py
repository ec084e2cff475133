"""A journal held against the invariants, event by event: what an allocator has written, nobody has to believe.

Every prefix gives the world of its moment again, and each must keep I1 to I15. While nobody leads, nobody can raise an
alarm: what a new term finds late is late until it has planned, and is no fault (I6).
"""

from collections.abc import Iterator
from typing import NamedTuple

from allocator.apply import consider
from allocator.invariants import step_violations, violations
from allocator.store.journal import Journal


class Fault(NamedTuple):
    """What is wrong with the journal at one event."""

    seq: int
    event: str
    detail: str

    def __str__(self) -> str:
        return f"event {self.seq}, {self.event}: {self.detail}"


def faults(journal: Journal) -> Iterator[Fault]:
    """Everything that is wrong, in order; nothing for a sound journal. Raises StoreError: it cannot be read."""
    world, term, is_catching_up = journal.world_at(0), 0, False
    for written in journal.events():
        name = type(written.event).__name__
        after = consider(world, written.event)
        if isinstance(after, str):
            yield Fault(written.seq, name, f"is written, but changes nothing: {after}")
            continue
        for found in step_violations(world, written.event, after):
            yield Fault(written.seq, name, f"{found.rule} {found.detail}")
        standing = violations(after)
        is_catching_up = bool(standing) and (is_catching_up or written.term != term)
        for found in standing:
            if found.rule != "I6" or not is_catching_up:
                yield Fault(written.seq, name, f"{found.rule} {found.detail}")
        world, term = after, written.term
