"""The fluid reference: against all levels tried one by one, and what its shadow prices promise."""

from dataclasses import replace
from itertools import product
from math import inf

import numpy as np
import pytest
from scipy.optimize import linprog

from loadtest.sim.bound.fluid import MOST_BUSY, FluidPlan, flows_of, fluid_plan
from loadtest.sim.bound.instance import BadInstance, BoundRequest
from tests.bound_instances import FAST, POOL, SLOW, crippled, request, trace

SECONDS = 60.0
LAME = (crippled(FAST, 2.0), SLOW)


def cheapest_of_all_levels(requests: list[BoundRequest]) -> float:
    """Money a second of the best choice of one level for each of the two backends, of a load that they can carry."""
    flows = flows_of(requests, LAME, SECONDS)
    best = inf
    for levels in product(sorted({flow.tpot_budget_s for flow in flows}), repeat=2):
        usable = [(k, j) for k, flow in enumerate(flows) for j in range(2)
                  if flow.tpot_budget_s >= levels[j] and flow.work_s[j][levels[j]] < inf]
        cost = [flows[k].cost[j] * 1e6 for k, j in usable]
        busy = np.array([[flows[k].work_s[j][levels[j]] if at == j else 0.0 for k, j in usable] for at in range(2)])
        demand = np.array([[1.0 if at == k else 0.0 for k, _ in usable] for at in range(len(flows))])
        found = linprog(cost, A_ub=busy, b_ub=[MOST_BUSY] * 2, A_eq=demand, b_eq=[flow.rate_per_s for flow in flows])
        if found.x is not None:
            best = min(best, found.fun / 1e6)
    return best


@pytest.mark.parametrize("rate_per_s", [1.0, 3.0, 4.5])
def test_as_cheap_as_the_best_of_all_levels(rate_per_s: float) -> None:
    requests = trace(11, rate_per_s, SECONDS)
    plan = fluid_plan(requests, LAME, SECONDS)
    assert plan.is_feasible
    assert plan.cost_per_hour == pytest.approx(3600 * cheapest_of_all_levels(requests), rel=1e-4)
    for name, shares in plan.shares.items():
        mine = sum(each.class_name == name for each in requests)
        assert sum(shares.values()) == pytest.approx(mine / SECONDS)


def test_a_class_that_no_backend_is_fast_enough_for_is_turned_away() -> None:
    requests = [request(0.0, tpot_s=0.004, class_name="instant"), request(1.0)]
    plan = fluid_plan(requests, POOL, SECONDS)
    assert plan.turned_away_per_s["instant"] == pytest.approx(1 / SECONDS)
    assert plan.turned_away_per_s["chat"] == pytest.approx(0.0)
    assert not plan.is_feasible


def spent_per_hour(plan: FluidPlan, miss_cost: float) -> float:
    return plan.cost_per_hour + 3600 * miss_cost * sum(plan.turned_away_per_s.values())


@pytest.mark.parametrize(("rate_per_s", "is_scarce"), [(0.2, False), (2.0, True), (30.0, True)])
def test_a_shadow_price_is_what_a_little_more_of_the_backend_saves(rate_per_s: float, is_scarce: bool) -> None:
    """The programme with 1 % less of the machines' time, which is worth 1 % of all shadow prices at least."""
    requests = trace(12, rate_per_s, SECONDS)
    whole = fluid_plan(requests, LAME, SECONDS, miss_cost=0.01)
    less = fluid_plan(requests, LAME, SECONDS, miss_cost=0.01, most_busy=0.99 * MOST_BUSY)
    lost = spent_per_hour(less, 0.01) - spent_per_hour(whole, 0.01)
    assert lost >= 0
    if less.levels_s == whole.levels_s:
        assert lost >= 0.01 * sum(whole.shadow_prices.values()) * (1 - 1e-3) - 1e-6
    assert (max(whole.shadow_prices.values()) > 0) == is_scarce


def test_a_spare_backend_is_worth_nothing_and_can_be_lent() -> None:
    requests = trace(13, 1.0, SECONDS)
    pool = [*POOL, replace(FAST, name="spare")]
    plan = fluid_plan(requests, pool, SECONDS)
    assert plan.shadow_prices == {"fast": 0.0, "slow": 0.0, "spare": 0.0}
    assert fluid_plan(requests, pool[:2], SECONDS).is_feasible
    assert None in plan.levels_s.values()


def test_a_thousand_backends_are_a_handful_of_kinds() -> None:
    requests = [replace(each, arrival_s=each.arrival_s / 500) for each in trace(14, 4.0, SECONDS)]
    pool = [replace(spec, name=f"{spec.name}-{copy}") for spec in LAME for copy in range(500)]
    plan = fluid_plan(requests, pool, SECONDS / 500)
    few = fluid_plan(requests, LAME, SECONDS)
    # A kind of which there are many can be kept at several levels, so it goes a little cheaper.
    assert 0.85 <= plan.cost_per_hour / (500 * few.cost_per_hour) <= 1 + 1e-4
    assert len(plan.levels_s) == 1000


def test_figures_that_make_no_sense() -> None:
    with pytest.raises(BadInstance, match="most_busy"):
        fluid_plan(trace(1, 1.0, 60.0), POOL, 60.0, most_busy=1.2)
    with pytest.raises(BadInstance, match="rates need time"):
        fluid_plan(trace(1, 1.0, 60.0), POOL, 0.0)
    with pytest.raises(BadInstance, match="at least one backend"):
        fluid_plan(trace(1, 1.0, 60.0), [], 60.0)
