"""The bound itself, computed from prices alone: it holds whatever the solver did, also if it stopped halfway.

Put any price `λ ≥ 0`, money a second, on the machine time of each backend and slot, and let each request pay for the
cheapest way it could be served::

    r_i = min over backends j of  cost_ij + prefill_ij · min λ_jt + decode_ij · min λ_jt     t in the slots it may use

A schedule with `G` requests in budget costs at least what these pay, less what the machine time is worth (weak duality:
Lagrange's relaxation of the capacities, with the best multiplier of the goal in closed form)::

    cost ≥ (the G smallest r_i, added)  -  Σ λ_jt · capacity_jt
    good ≤ Σ_i max(0, 1 - r'_i)  +  Σ λ_jt · capacity_jt              r'_i as r_i, without the costs

The linear programme of `lp` serves only to find good prices. They are worth having for themselves: `λ_jt` is what a
second more of that backend would save.
"""

from math import floor, inf

import numpy as np

from loadtest.sim.bound.instance import Floats
from loadtest.sim.bound.slots import SlotTable
from loadtest.sim.bound.work import Ints

ROUNDING = 1e-12
"""Relative error granted to each sum. Doubles have 1e-16 a term, added pairwise."""


def least_cost(slots: SlotTable, prices: Floats, good_requests: float) -> float:
    """No schedule with so many requests in budget costs less. Infinite where so many cannot be served at all."""
    pays = _pays(slots, prices, slots.work.cost)
    order = np.argsort(pays, kind="stable")
    counts, pays = slots.work.count[order], pays[order]
    before = np.concatenate(([0], np.cumsum(counts)[:-1]))
    taken = np.clip(good_requests - before, 0.0, counts)
    if taken.sum() < good_requests or np.isinf(pays[taken > 0]).any():
        return inf
    paid = float((taken[taken > 0] * pays[taken > 0]).sum())
    worth = float((prices * slots.capacity_s).sum())
    return max(0.0, paid - worth - ROUNDING * (paid + worth))


def most_good(slots: SlotTable, prices: Floats) -> float:
    """No schedule has more requests in budget."""
    pays = _pays(slots, prices, np.zeros_like(slots.work.cost))
    gained = float((slots.work.count * np.maximum(0.0, 1.0 - pays)).sum())
    worth = float((prices * slots.capacity_s).sum())
    return min(float(slots.work.servable()), (gained + worth) * (1 + ROUNDING))


def _pays(slots: SlotTable, prices: Floats, cost: Floats) -> Floats:
    """`r_i`, shape (requests,); infinite where no backend can serve it."""
    if prices.shape != slots.capacity_s.shape or not (prices >= 0).all():
        raise ValueError(f"prices have shape (backends, slots) {slots.capacity_s.shape} and are at least 0")
    work = slots.work
    pays = np.full(len(work.count), np.inf)
    for at, row in enumerate(prices):
        cheapest = _RangeMinimum(row)
        here = (cost[:, at] + work.prefill_s[:, at] * cheapest.over(slots.prefill_from, slots.prefill_until)
                + work.decode_s[:, at] * cheapest.over(slots.decode_from[:, at], slots.decode_until))
        pays = np.minimum(pays, np.where(work.can_serve[:, at], here, np.inf))
    return pays


class _RangeMinimum:
    """Minima of a row over many windows at once: level `k` holds those of all windows of `2^k` entries."""

    def __init__(self, row: Floats) -> None:
        self._levels = [row]
        width = 1
        while 2 * width <= len(row):
            last = self._levels[-1]
            self._levels.append(np.minimum(last[:-width], last[width:]))
            width *= 2

    def over(self, first: Ints, last: Ints) -> Floats:
        """Least entry of each window, both ends included. A window is covered by two of a power of two's width."""
        level = np.floor(np.log2(last - first + 1)).astype(np.int64)
        result = np.empty(len(first))
        for at in range(floor(level.max()) + 1 if len(level) else 0):
            chosen = level == at
            entries = self._levels[at]
            result[chosen] = np.minimum(entries[first[chosen]], entries[last[chosen] - (1 << at) + 1])
        return result
