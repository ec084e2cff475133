"""The demand of all worker processes together, counted in the memory that they share.

Each process writes in its own row how many requests of a model have ended there, and adds up what it reads in all rows.
So every one of them sees the whole demand and forecasts it, and whoever comes to lead knows what the one before knew.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator

from backends.catalog.spec import BackendSpec
from router.fleet.leases import Books
from router.lending.demand import Tally
from router.workers.peers import Peers
from router.workers.table import MODELS, Header, Row, identity_of

log = logging.getLogger("headrace.workers")


class SharedTally(Tally):
    """Requests that have ended in any process since this one began. What a process counted stays when it is gone."""

    def __init__(self, peers: Peers) -> None:
        super().__init__()
        self._peers = peers
        self._places: dict[str, int] = {}
        # What siblings had counted before this process began is not of its time.
        self._seen = {(row.index, row.header[Header.EPOCH], name): count
                      for row in peers.table if row is not peers.own for name, count in _counts(row)}
        """(row, epoch, identity of a model) → the count that was read there last."""
        self._elsewhere: Counter[str] = Counter()

    def add(self, model: str) -> None:
        super().add(model)
        place = self._places.get(model)
        if place is None:
            place = self._places[model] = 2 * len(self._places) + 1
            if place < 2 * MODELS:
                self._peers.own.models[place] = 0
                self._peers.own.models[place - 1] = identity_of(model)
            else:
                log.error("no place left to share the demand for %s; siblings forecast without it", model)
        if place < 2 * MODELS:
            self._peers.own.models[place] = self.own[model]

    def total(self, model: str) -> int:
        for row in self._peers.table:
            if row is not self._peers.own and row.counts:
                self._elsewhere[model] += self._news(row, model)
        return self.own[model] + self._elsewhere[model]

    def in_flight_elsewhere(self, specs: Iterable[BackendSpec]) -> int:
        identities = {identity_of(*spec.identity) for spec in specs}
        count = 0
        for row in self._peers.table:
            if row is self._peers.own or not row.counts:
                continue
            layout = row.identities()
            for identity in identities & layout.keys():
                count += Books(row.load_cells(layout[identity])).requests
        return count

    def _news(self, row: Row, model: str) -> int:
        name = identity_of(model)
        count = next((count for found, count in _counts(row) if found == name), 0)
        key = (row.index, row.header[Header.EPOCH], name)
        before, self._seen[key] = self._seen.get(key, 0), count
        return max(0, count - before)


def _counts(row: Row) -> Iterator[tuple[int, int]]:
    """(identity of a model, its requests that have ended) of one row."""
    for place in range(0, 2 * MODELS, 2):
        if row.models[place] == 0:
            return
        yield row.models[place], row.models[place + 1]
