"""Whether everybody can have what is cheapest: then no programme need be solved, the cheapest is the bound.

Once each request's backend is chosen, the linear programme falls apart into one question a backend: can these pieces
of work, each with a window of slots, be done in its time? Earliest deadline first answers it exactly, as pieces may be
cut at will and one backend's time is one resource (Liu and Layland 1973; Horn 1974).
"""

from heapq import heappop, heappush
from math import ceil, inf

import numpy as np

from loadtest.sim.bound.instance import Floats
from loadtest.sim.bound.slots import SlotTable
from loadtest.sim.bound.work import Ints

SLACK_S = 1e-9
"""Work that rounding may leave over."""


def cheapest_fits(slots: SlotTable, good_requests: float) -> bool:
    """Whether the `good_requests` that cost least can each be served where it costs least."""
    work = slots.work
    cost = np.where(work.can_serve, work.cost, np.inf)
    where = cost.argmin(axis=1)
    least = cost[np.arange(len(where)), where]
    order = np.argsort(least, kind="stable")
    before = np.cumsum(work.count[order]) - work.count[order]
    taken = order[before < good_requests]
    if not len(taken) or least[taken[-1]] == inf or before[-1] + work.count[order[-1]] < ceil(good_requests):
        return False
    return all(_backend_fits(slots, at, taken[where[taken] == at]) for at in range(cost.shape[1]))


def _backend_fits(slots: SlotTable, at: int, rows: Ints) -> bool:
    work, count = slots.work, slots.work.count[rows]
    first = np.concatenate([slots.prefill_from[rows], slots.decode_from[rows, at]])
    last = np.concatenate([slots.prefill_until[rows], slots.decode_until[rows]])
    needed_s = np.concatenate([count * work.prefill_s[rows, at], count * work.decode_s[rows, at]])
    return _earliest_deadline_first(first, last, needed_s, slots.capacity_s[at])


def _earliest_deadline_first(first: Ints, last: Ints, needed_s: Floats, capacity_s: Floats) -> bool:
    """Whether pieces of work fit in slots of that capacity, each within its own first and last slot."""
    arriving = iter(sorted(zip(first.tolist(), last.tolist(), needed_s.tolist(), strict=True)))
    upcoming = next(arriving, None)
    due: list[tuple[int, float]] = []
    for slot, free_s in enumerate(capacity_s.tolist()):
        while upcoming is not None and upcoming[0] <= slot:
            heappush(due, upcoming[1:])
            upcoming = next(arriving, None)
        while due and free_s > 0:
            until, piece_s = heappop(due)
            done_s = min(piece_s, free_s)
            free_s -= done_s
            if piece_s - done_s > SLACK_S:
                heappush(due, (until, piece_s - done_s))
        if due and due[0][0] <= slot:
            return False
    return upcoming is None and not due
