"""The fluid reference: what steady traffic would cost if it flowed, and what an hour of each backend is worth to it.

Each backend is run at a *level* `B`, the time per output token that it is kept at, and carries the classes whose own
budget is no tighter. A request of class `k` then takes up, of the machine's time::

    W_kj(B) = ( b·u + q·(P² - (P - u)²)/2  +  D·d + e·(P·D + D²/2) ) / (1 - (host + c)/B)                 seconds

from `B·(1 - busy with prefill) ≥ host + c + d·n + e·K` over `B`: linear in the rates, and infinite where the bare step
takes longer than the level. With `r_kjl` requests a second of class `k` on backends of kind `j` at level `l`, and
`z_jl` of its `N_j` backends at that level::

    min  Σ cost_kj · r_kjl + miss_cost · Σ turned away
    s.t. Σ_jl r_kjl + turned away_k = rate_k,   Σ_k W_kj(B_l) · r_kjl ≤ most_busy · z_jl,   Σ_l z_jl ≤ N_j,  z whole

No bound in the strict sense: queueing is left out, and so is the variety of requests within a class. It is close for
large pools and quick for any: a mixed-integer programme of a few hundred columns. The duals, with the levels held, are
the shadow prices of lending: what one more backend of the kind, or one less, would change an hour.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf

import numpy as np
from scipy import optimize, sparse

from loadtest.sim.bound.instance import BadInstance, BoundBackend, BoundRequest, Floats, accounted_cost, work_at_pace_s
from loadtest.sim.bound.kinds import kinds_of

MOST_BUSY = 0.85
"""Share of its time that a backend may be busy on average: beyond it, queues eat the TTFT budget."""

MISS_COST_RATIO = 25.0
"""Default worth of a request in budget, in mean costs of a request: the exchange rate of the routing policy."""


@dataclass(frozen=True, slots=True)
class ClassFlow:
    """One class as a flow, by the means over its requests."""

    name: str
    rate_per_s: float
    tpot_budget_s: float
    cost: tuple[float, ...]
    """By backend kind, in money."""
    work_s: tuple[Mapping[float, float], ...]
    """By backend kind and level in seconds: machine time of one request; infinite where the bare step is longer."""


@dataclass(frozen=True, slots=True)
class FluidPlan:
    """The cheapest way for the flows to go."""

    cost_per_hour: float
    """Of what is served."""
    turned_away_per_s: Mapping[str, float]
    """By class: what the pool has no room for, or no backend fast enough."""
    levels_s: Mapping[str, float | None]
    """By backend: time per output token that it is kept at; `None` where it is not needed."""
    shares: Mapping[str, Mapping[str, float]]
    """By class and backend: requests a second."""
    shadow_prices: Mapping[str, float]
    """By backend: money an hour that one more of its kind would save, at the levels of this plan."""

    @property
    def is_feasible(self) -> bool:
        return all(rate < 1e-9 for rate in self.turned_away_per_s.values())


def flows_of(
    requests: Sequence[BoundRequest], kinds: Sequence[BoundBackend], seconds: float
) -> tuple[ClassFlow, ...]:
    """The classes of a trace as flows: requests of one class name and TPOT budget together."""
    if seconds <= 0:
        raise BadInstance(f"flows over {seconds} s: rates need time")
    groups: dict[tuple[str, float], list[BoundRequest]] = {}
    for request in requests:
        groups.setdefault((request.class_name, request.tpot_budget_s), []).append(request)
    levels_s = sorted({tpot_s for _, tpot_s in groups})
    return tuple([
        ClassFlow(
            name=name, rate_per_s=len(members) / seconds, tpot_budget_s=tpot_s,
            cost=tuple([sum(accounted_cost(kind, member) for member in members) / len(members) for kind in kinds]),
            work_s=tuple([{level_s: sum(work_at_pace_s(kind, member, level_s) for member in members) / len(members)
                           for level_s in levels_s} for kind in kinds]),
        )
        for (name, tpot_s), members in sorted(groups.items())
    ])


def fluid_plan(
    requests: Sequence[BoundRequest], backends: Sequence[BoundBackend], seconds: float, *,
    most_busy: float = MOST_BUSY, miss_cost: float | None = None,
) -> FluidPlan:
    """The plan for the trace's rates over `seconds`. `miss_cost` is money for each request that is turned away.

    Backends count as wholly there: pass those that are. Raises `BadInstance` for figures that make no sense.
    """
    if not 0 < most_busy <= 1:
        raise BadInstance(f"most_busy is {most_busy}: a share of the time, over 0 and at most 1")
    kinds = kinds_of(backends)
    flows = flows_of(requests, kinds.kinds, seconds)
    if miss_cost is None:
        total_rate = sum(flow.rate_per_s for flow in flows)
        miss_cost = MISS_COST_RATIO * sum(flow.rate_per_s * min(flow.cost) for flow in flows) / total_rate
    programme = _Programme(flows, kinds.copies, most_busy, miss_cost)
    routed, used = programme.best_levels()
    routed, saved = programme.with_levels(used)
    return programme.plan(routed, used, saved, kinds.kind_of)


class _Programme:
    """Columns: a rate for each usable (class, kind, level), one turned away a class, a count for each (kind, level)."""

    def __init__(
        self, flows: Sequence[ClassFlow], copies: Sequence[int], most_busy: float, miss_cost: float
    ) -> None:
        self.flows, self.copies, self.most_busy = flows, copies, most_busy
        self.levels = [(j, level_s) for j, works in enumerate(flows[0].work_s) for level_s, work_s in works.items()
                       if work_s < inf]
        self.routes = [(k, at) for k, at in product(range(len(flows)), range(len(self.levels)))
                       if flows[k].tpot_budget_s >= self.levels[at][1]]
        self._routes_count, self._flows_count = len(self.routes), len(flows)
        costs = np.array([flows[k].cost[self.levels[at][0]] for k, at in self.routes] + [miss_cost] * len(flows))
        # Money for one request is a small number, and the solver's tolerances are absolute.
        self._scale = float(costs.mean()) or 1.0
        self._costs = costs / self._scale

        route, level = self._routes_count, self._routes_count + self._flows_count
        self._demand = sparse.lil_matrix((len(flows), level))
        self._busy = sparse.lil_matrix((len(self.levels), level))
        for column, (k, at) in enumerate(self.routes):
            j, level_s = self.levels[at]
            self._demand[k, column] = 1.0
            self._busy[at, column] = flows[k].work_s[j][level_s]
        for k in range(len(flows)):
            self._demand[k, route + k] = 1.0
        self._rates = np.array([flow.rate_per_s for flow in flows])

    def best_levels(self) -> tuple[Floats, Floats]:
        """Rates and backends at each level, of the mixed-integer programme."""
        flows, levels = self._routes_count + self._flows_count, len(self.levels)
        owned = sparse.lil_matrix((len(self.copies), levels))
        for at, (j, _) in enumerate(self.levels):
            owned[j, at] = 1.0
        matrix = sparse.block_array([
            [self._demand, None],
            [self._busy, -self.most_busy * sparse.eye_array(levels)],
            [sparse.csc_array((len(self.copies), flows)), owned],
        ], format="csc")
        lower = np.concatenate([self._rates, np.full(levels + len(self.copies), -np.inf)])
        upper = np.concatenate([self._rates, np.zeros(levels), self.copies])
        # Ties go to fewer backends: an idle one has no level.
        objective = np.concatenate([self._costs, np.full(levels, 1e-6)])
        result = optimize.milp(
            objective, constraints=optimize.LinearConstraint(matrix, lower, upper),
            integrality=np.concatenate([np.zeros(flows), np.ones(levels)]), bounds=optimize.Bounds(0, np.inf))
        assert result.x is not None, "turning everything away is always possible"
        return result.x[:flows], np.round(result.x[flows:])

    def with_levels(self, used: Floats) -> tuple[Floats, Floats]:
        """Rates at these levels, and what a second of each level's machine time would save."""
        result = optimize.linprog(self._costs, A_ub=self._busy.tocsr(), b_ub=self.most_busy * used,
                                  A_eq=self._demand.tocsr(), b_eq=self._rates, method="highs")
        assert result.x is not None, "turning everything away is always possible"
        return result.x, -result.ineqlin.marginals

    def plan(self, routed: Floats, used: Floats, saved: Floats, kind_of: Mapping[str, int]) -> FluidPlan:
        levels_s, shares, prices = {}, {flow.name: dict[str, float]() for flow in self.flows}, {}
        served_cost = float((self._costs * routed)[:self._routes_count].sum()) * self._scale
        members = [[name for name, kind in kind_of.items() if kind == j] for j in range(len(self.copies))]
        for j, names in enumerate(members):
            mine = [at for at, (kind, _) in enumerate(self.levels) if kind == j]
            is_spare = sum(used[at] for at in mine) < len(names)
            worth = 0.0 if is_spare else max(float(saved[at]) for at in mine if used[at] > 0)
            prices.update(dict.fromkeys(names, worth * self.most_busy * self._scale * 3600))
            placed = [at for at in mine for _ in range(int(used[at]))]
            for name, at in zip(names, placed + [None] * (len(names) - len(placed)), strict=True):
                levels_s[name] = None if at is None else self.levels[at][1]
                for column, (k, level) in enumerate(self.routes):
                    if at == level and routed[column] > 1e-12:
                        shares[self.flows[k].name][name] = (
                            shares[self.flows[k].name].get(name, 0.0) + float(routed[column] / used[at]))
        away = {flow.name: float(max(0.0, routed[self._routes_count + k])) for k, flow in enumerate(self.flows)}
        return FluidPlan(served_cost * 3600, away, levels_s, shares, prices)
