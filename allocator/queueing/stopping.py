"""Who gives next when devices are taken back, with the books of one card as if those who gave before were gone."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from allocator.model.jobs import Run
from allocator.picture import Free, Ledger
from allocator.quota import key_of


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A run that may be stopped, with all that does not depend on for whom."""

    run: Run
    is_not_batch: bool
    priority: int
    lost: float
    """Work that stopping it loses, in units · seconds."""
    amount: float
    """What it counts for in the currency of its pool; `units`: in units."""
    units: float
    all_but_one: float
    """`amount` of all its devices but one, by the coefficients in force."""
    leaves: Free
    """Its devices that somebody else could have."""

    def rank(self) -> tuple[bool, int, float, str]:
        """Who goes first among the runs of one queue: batch, then lower priority, then less lost work."""
        return (self.is_not_batch, self.priority, self.lost, self.run.id)


_Rank = tuple[bool, bool, float, int, float, str, int]


class Stopping:
    """The candidates, next one first, as the books stand after those before.

    Batch goes first, then a run whose queue keeps its guarantee without it, then the queue with the largest share. A
    queue that borrows nothing (any more) gives none, unless it is the one that takes.
    """

    def __init__(self, ledger: Ledger, card: str, own_queue: str, candidates: Iterable[Candidate]) -> None:
        """`candidates`: each queue's in the order of their rank."""
        self._ledger = ledger.copied_for(card)
        self._key = key_of(ledger.pool, card)
        self._book = self._ledger.books[self._key]
        self._own_queue = own_queue
        self._place = list(self._ledger.books).index(self._key)
        self._borrowed: dict[str, list[float]] = {}
        self._by_queue: dict[str, list[Candidate]] = {}
        for candidate in candidates:
            self._by_queue.setdefault(candidate.run.queue, []).append(candidate)

    def admits(self, amount: float) -> bool:
        """Whether the queue that takes may have so much now."""
        return amount <= self._book.available(self._own_queue) + 1e-9

    def stop(self, candidate: Candidate) -> None:
        """It is gone."""
        self._count(candidate, -1.0)

    def back(self, candidate: Candidate) -> None:
        """It is not gone after all."""
        self._count(candidate, 1.0)

    def admits_with(self, candidates: Iterable[Candidate], amount: float) -> bool:
        """Whether the queue that takes may have so much, if these are not gone after all."""
        book = self._book.copied()
        for candidate in candidates:
            book.use(candidate.run.queue, candidate.amount)
        return amount <= book.available(self._own_queue) + 1e-9

    def _count(self, candidate: Candidate, sign: float) -> None:
        queue, units = candidate.run.queue, self._ledger.units
        self._book.use(queue, sign * candidate.amount)
        units[queue, self._key] = units.get((queue, self._key), 0.0) + sign * candidate.units

    def _share(self, queue: str) -> float:
        """`Ledger.share`: of the other keys nothing has changed."""
        ledger = self._ledger
        if queue not in self._borrowed:
            self._borrowed[queue] = [ledger.borrowed_units(queue, key) for key in ledger.books]
        borrowed = self._borrowed[queue]
        borrowed[self._place] = ledger.borrowed_units(queue, self._key)
        return ledger.share_of(queue, sum(borrowed))

    def __iter__(self) -> Iterator[Candidate]:
        """Each is stopped as it comes."""
        by_queue, ranks = self._by_queue, dict[str, _Rank]()
        changed: Iterable[str] = list(by_queue)
        while True:
            for queue in changed:
                if queue in by_queue:
                    if queue == self._own_queue or self._book.borrowed(queue) > 0.0:
                        ranks[queue] = self._rank(queue, by_queue[queue])
                    else:
                        del by_queue[queue]
            if not by_queue:
                return
            queue = min(by_queue, key=ranks.__getitem__) if len(by_queue) > 1 else next(iter(by_queue))
            candidate = by_queue[queue].pop(ranks[queue][-1])
            if not by_queue[queue]:
                del by_queue[queue]
            self.stop(candidate)
            yield candidate
            # It was taken off its queue, and so off those above; nobody else's books have changed.
            changed = self._ledger.tree.path(queue)

    def _rank(self, queue: str, found: list[Candidate]) -> _Rank:
        """Whom the queue would give next, the last being its index: one that can go without taking its queue below the
        guarantee before one that cannot."""
        index, too_large = None, set[float]()
        for place, each in enumerate(found):
            if each.all_but_one in too_large:
                continue
            if self._book.borrowed(queue, -each.all_but_one) > 0.0:
                index = place
                break
            too_large.add(each.all_but_one)
        each = found[index or 0]
        return (each.is_not_batch, index is None, -self._share(queue), each.priority, each.lost, each.run.id,
                index or 0)
