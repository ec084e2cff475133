"""How little the requests of a trace could have cost, and how many of them could have been in budget, at all.

``bound_for(requests, backends, good)`` answers for one number of requests in budget; keep the `Clairvoyant` to ask for
several, as a table of policies over one trace does: prices found for one number serve its neighbours as well.

Two figures of a policy stand against it: `cost_over_bound`, its cost over the least that *its own* number of requests
in budget could have cost, and `goodput_over_bound`. Both compare with a router that knows the future and an engine that
batches as it pleases, so even the best policy does not reach 1; `hindsight` says how near one can come.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from time import perf_counter
from types import MappingProxyType

import numpy as np

from loadtest.sim.bound.certificate import least_cost, most_good
from loadtest.sim.bound.fits import cheapest_fits
from loadtest.sim.bound.instance import BadInstance, BoundBackend, BoundRequest, Floats
from loadtest.sim.bound.kinds import kinds_of
from loadtest.sim.bound.lp import LpSolution, SolverGaveUp, solve_least_cost, solve_most_good
from loadtest.sim.bound.slots import SlotTable, alike, merged, slot_table
from loadtest.sim.bound.work import QUIET, StepNoise, work_table

SLOT_S = 5.0
MERGE_BEYOND_REQUESTS = 4000
"""Longer traces are priced with alike requests merged; the bound is then computed for each request all the same."""

NEAR_SHARE = 0.01
"""Prices found for a number of requests in budget serve others within this share of the trace."""


@dataclass(frozen=True, slots=True)
class Bound:
    """What no policy can beat on this trace."""

    requests: int
    servable: int
    """Requests that some backend could serve in budget if it had nothing else to do."""
    good_requests: float
    least_cost: float
    """Of so many in budget; infinite where so many cannot be."""
    most_good: float
    """Requests in budget."""
    solver_cost: float | None
    """The least cost as the solver saw it, which its prices did not quite prove; `None` where it found none."""
    shadow_prices: Mapping[str, float]
    """By backend: what one more hour of it would save, at the mean over the trace, in money."""
    took_s: float

    def cost_over_bound(self, cost: float) -> float | None:
        """What a policy paid for `good_requests` in budget over the least; `None` where the bound says nothing."""
        return cost / self.least_cost if 0 < self.least_cost < inf else None

    def goodput_over_bound(self, good: float) -> float | None:
        return good / self.most_good if self.most_good > 0 else None


class Clairvoyant:
    """The bounds of one trace on one pool; solves when asked, remembers the prices it found."""

    def __init__(
        self, requests: Sequence[BoundRequest], backends: Sequence[BoundBackend], *, counted_from_s: float = 0.0,
        slot_s: float = SLOT_S, noise: StepNoise = QUIET, merge_beyond: int = MERGE_BEYOND_REQUESTS,
    ) -> None:
        """Requests that arrive before `counted_from_s` are in nobody's figures, and in the way of nobody here.

        Raises:
            BadInstance: a trace, pool or slot that no bound can be stated for.
        """
        pool = kinds_of(backends)
        kinds, copies, self._kind_of = pool.kinds, pool.copies, pool.kind_of
        table = work_table(requests, kinds, noise)
        counted = table.arrival_s >= counted_from_s
        if not counted.any():
            raise BadInstance(f"no request arrives from {counted_from_s} s on: there is nothing to count")
        table = table.rows(counted)
        self._slots = slot_table(table, kinds, slot_s, noise, copies)
        self._priced_on = self._slots
        if table.requests > merge_beyond:
            groups = alike([request for request in requests if request.arrival_s >= counted_from_s], slot_s)
            self._priced_on = slot_table(merged(table, groups), kinds, slot_s, noise, copies)
        self._arrivals_s = (counted_from_s, float(table.arrival_s.max()))
        self._by_good: dict[float, LpSolution | None] = {}
        self._most_good: float | None = None
        self._took_s = 0.0

    @property
    def slots(self) -> SlotTable:
        """The instance as the programme sees it, one row a request."""
        return self._slots

    def most_good(self) -> float:
        """Requests that can be in budget, at most."""
        if self._most_good is None:
            began_s = perf_counter()
            free = np.zeros_like(self._slots.capacity_s)
            self._most_good = most_good(self._slots, free)
            if not cheapest_fits(self._slots, self._most_good):
                with suppress(SolverGaveUp):  # As many as can be served alone is a bound, too.
                    prices = solve_most_good(self._priced_on).prices
                    self._most_good = min(self._most_good, most_good(self._slots, prices))
            self._took_s += perf_counter() - began_s
        return self._most_good

    def least_cost(self, good_requests: float) -> float:
        """Money that so many in budget cost, at least; infinite where so many cannot be."""
        if good_requests > self.most_good():
            return inf
        self._price(good_requests)
        began_s = perf_counter()
        known = [solution.prices for solution in self._by_good.values() if solution is not None]
        best = max(least_cost(self._slots, prices, good_requests)
                   for prices in [np.zeros_like(self._slots.capacity_s), *known])
        self._took_s += perf_counter() - began_s
        return best

    def bound(self, good_requests: float) -> Bound:
        """All of it, for so many in budget."""
        cost = self.least_cost(good_requests)
        solution = self._nearest(good_requests)
        return Bound(
            requests=self._slots.work.requests,
            servable=self._slots.work.servable(),
            good_requests=good_requests,
            least_cost=cost,
            most_good=self.most_good(),
            solver_cost=solved.value if (solved := self._by_good.get(good_requests)) else None,
            shadow_prices=self._shadow_prices(solution.prices if solution else None),
            took_s=self._took_s,
        )

    def _price(self, good_requests: float) -> None:
        """Solve, unless prices for about as many are known."""
        reach = NEAR_SHARE * self._slots.work.requests
        if any(abs(good_requests - known) <= reach for known in self._by_good):
            return
        began_s = perf_counter()
        try:
            self._by_good[good_requests] = self._prices_for(good_requests)
        except SolverGaveUp:
            self._by_good[good_requests] = None
        self._took_s += perf_counter() - began_s

    def _prices_for(self, good_requests: float) -> LpSolution:
        if cheapest_fits(self._slots, good_requests):
            free = np.zeros_like(self._slots.capacity_s)
            return LpSolution(least_cost(self._slots, free, good_requests), free)
        return solve_least_cost(self._priced_on, good_requests)

    def _nearest(self, good_requests: float) -> LpSolution | None:
        solved = {good: solution for good, solution in self._by_good.items() if solution is not None}
        return solved[min(solved, key=lambda good: abs(good - good_requests))] if solved else None

    def _shadow_prices(self, prices: Floats | None) -> Mapping[str, float]:
        """Of each backend, from money a second and slot to money an hour over the time in which requests arrive."""
        if prices is None:
            return MappingProxyType({})
        first, last = (int(at_s / self._slots.slot_s) for at_s in self._arrivals_s)
        hourly = prices[:, first:last + 1].mean(axis=1) * 3600
        return MappingProxyType({name: float(hourly[kind]) for name, kind in self._kind_of.items()})


def bound_for(
    trace: Sequence[BoundRequest], pool: Sequence[BoundBackend], good_requests: float, *, slot_s: float = SLOT_S,
    noise: StepNoise = QUIET,
) -> Bound:
    """The bound for a policy that had so many requests of the trace in budget."""
    return Clairvoyant(trace, pool, slot_s=slot_s, noise=noise).bound(good_requests)
