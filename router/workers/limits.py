"""Limits that hold over all worker processes together: requests held, and requests of one API key.

A process counts itself first and looks at the others then. So of two that race for the last place at least one sees the
other: the limit may be passed by as many requests as there are other processes only if a store took longer to become
visible than the look that follows it. Both may see each other, and then both refuse.
"""

import logging
from collections.abc import Iterable, Mapping

from router.fleet.leases import InFlight
from router.keys.ring import Parallel, ParallelLease, Principal, too_many
from router.workers.peers import Peers
from router.workers.table import CLASSES, KEYS, Header, Row, identity_of

log = logging.getLogger("headrace.workers")


class SharedInFlight(InFlight):
    """Client requests held, written to the own row and summed over all. A class has its place in a row for good."""

    __slots__ = ("_names", "_peers", "_places")

    def __init__(self, peers: Peers) -> None:
        super().__init__()
        self._peers = peers
        self._places: dict[str, int] = {}
        self._names: dict[int, str] = {}

    def enter(self) -> None:
        self.own += 1
        self._peers.own.header[Header.IN_FLIGHT] = self.own

    def leave(self) -> None:
        self.own -= 1
        self._peers.own.header[Header.IN_FLIGHT] = self.own

    def admit(self, latency_class: str) -> None:
        super().admit(latency_class)
        self._publish(latency_class)

    def give_back(self, latency_class: str) -> None:
        super().give_back(latency_class)
        self._publish(latency_class)

    def by_class(self) -> Mapping[str, int]:
        """A class that only siblings have met goes by the number that stands for it: it counts, and has no floor."""
        counts: dict[str, int] = dict(self.admitted)
        for row in self._peers.others:
            for place in range(Header.CLASSES, Header.CLASSES + 2 * CLASSES, 2):
                name, count = row.header[place], row.header[place + 1]
                if name == 0:
                    break
                if count:
                    known = self._names.get(name) or str(name)
                    counts[known] = counts.get(known, 0) + count
        return counts

    def know(self, latency_classes: Iterable[str]) -> None:
        """These are the classes of the configuration."""
        for name in latency_classes:
            self._names[identity_of(name)] = name

    def _publish(self, latency_class: str) -> None:
        header, place = self._peers.own.header, self._places.get(latency_class)
        if place is None:
            place = Header.CLASSES + 2 * len(self._places)
            if place >= Header.CLASSES + 2 * CLASSES:
                log.error("no place left to share the count of class %s; each worker counts it alone", latency_class)
                return
            self._places[latency_class] = place
            header[place + 1] = 0
            header[place] = identity_of(latency_class)
        header[place + 1] = self.admitted[latency_class]


class SharedParallel(Parallel):
    """Requests in flight of each key that has a limit, over all processes. A key has its place in a row for good."""

    __slots__ = ("_names", "_peers", "_places", "_their_places")

    def __init__(self, peers: Peers) -> None:
        super().__init__()
        self._peers = peers
        self._names: dict[str, int] = {}
        self._places: dict[str, int] = {}
        self._their_places: dict[tuple[int, int, int], int] = {}

    def lease(self, principal: Principal) -> ParallelLease:
        return SharedParallelLease(self, principal)

    def elsewhere(self, key_id: str) -> int:
        """Requests of this key that siblings hold."""
        count = 0
        name = self._name(key_id)
        for row in self._peers.others:
            cell = self._their_place(row, name)
            if cell is not None:
                count += row.keys[cell]
        return count

    def publish(self, key_id: str) -> None:
        """Write this process's own count of a key."""
        place = self._places.get(key_id)
        if place is None:
            keys, name = self._peers.own.keys, self._name(key_id)
            found = _place(keys, name, or_free=True)
            if found is None:
                log.error("no place left to share the count of key %s; its limit holds in each worker alone", key_id)
                return
            place = self._places[key_id] = found
            keys[place - 1] = name
        self._peers.own.keys[place] = self.of(key_id)

    def _name(self, key_id: str) -> int:
        name = self._names.get(key_id)
        if name is None:
            name = self._names[key_id] = identity_of(key_id)
        return name

    def _their_place(self, row: Row, name: int) -> int | None:
        key = (row.index, row.header[Header.EPOCH], name)
        place = self._their_places.get(key)
        if place is None:
            place = _place(row.keys, name, or_free=False)
            if place is not None:
                if len(self._their_places) > 4 * KEYS:  # places in rows of processes that are gone
                    self._their_places.clear()
                self._their_places[key] = place
        return place


class SharedParallelLease(ParallelLease):
    """A place among all requests of a key, whichever process holds them."""

    __slots__ = ("_shared",)

    def __init__(self, shared: SharedParallel, principal: Principal) -> None:
        super().__init__(shared._in_flight, principal)
        self._shared = shared

    def take(self) -> None:
        super().take()
        principal = self._principal
        self._shared.publish(principal.key_id)
        # Counted first and looked at then: of two processes that race for the last place, one at least sees the other.
        total = self._shared.of(principal.key_id) + self._shared.elsewhere(principal.key_id)
        if principal.max_parallel is not None and total > principal.max_parallel:
            self.release()
            raise too_many(total - 1, principal.max_parallel)

    def release(self) -> None:
        held = self._taken
        super().release()
        if held:
            self._shared.publish(self._principal.key_id)


def _place(keys: memoryview, name: int, *, or_free: bool) -> int | None:
    """Index of the count that belongs to a name: open addressing with linear probing, nothing is ever removed."""
    for step in range(KEYS):
        cell = (name + step) % KEYS * 2
        if keys[cell] == name or (or_free and keys[cell] == 0):
            return cell + 1
        if keys[cell] == 0:
            return None
    return None
