"""The certified bound: against brute force, against another solver, and where it must move and where it must not."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import inf

import numpy as np
import pytest
from scipy.optimize import linprog

from loadtest.sim.bound.certificate import least_cost, most_good
from loadtest.sim.bound.clairvoyant import Clairvoyant, bound_for
from loadtest.sim.bound.fits import cheapest_fits
from loadtest.sim.bound.instance import BadInstance, BoundBackend, BoundRequest, SpeedSpan
from loadtest.sim.bound.lp import SolverGaveUp, solve_least_cost, solve_most_good
from loadtest.sim.bound.slots import SlotTable, alike, merged, slot_table
from loadtest.sim.bound.work import StepNoise, work_table
from tests.bound_instances import FAST, POOL, SLOW, crippled, request, trace

CROWDED = (crippled(FAST, 8.0), replace(crippled(SLOW, 3.0), spans=(SpeedSpan(0.0, 6.0, 0.5),)))
"""Two cards so lame that thirty requests a minute fill them."""


def crowd(seed: int, number: int) -> list[BoundRequest]:
    requests = trace(seed, 6.0, 60.0)[:number]
    return [replace(each, ttft_budget_s=2 * each.ttft_budget_s, tpot_budget_s=0.2) for each in requests]


def slots_of(requests: Sequence[BoundRequest], pool: Sequence[BoundBackend], slot_s: float = 1.0) -> SlotTable:
    return slot_table(work_table(requests, pool), pool, slot_s)


def written_out(slots: SlotTable, good_requests: float | None) -> float | None:
    """The programme of the module `lp` with every column and row of its text, by scipy; `None` where impossible."""
    work = slots.work
    pairs = [(i, j) for i in range(len(work.count)) for j in range(work.cost.shape[1]) if work.can_serve[i, j]]
    columns = [("share", i, j, -1) for i, j in pairs]
    for i, j in pairs:
        columns += [("early", i, j, t) for t in range(slots.prefill_from[i], slots.prefill_until[i] + 1)]
        columns += [("later", i, j, t) for t in range(slots.decode_from[i, j], slots.decode_until[i] + 1)]
    equal, at_most, limits = [], [], []
    for (i, j), part in product(pairs, ("early", "later")):
        equal.append([1.0 if column[:3] == (part, i, j) else -1.0 if column[:3] == ("share", i, j) else 0.0
                      for column in columns])
    for i, number in enumerate(work.count):
        at_most.append([1.0 if kind == "share" and a == i else 0.0 for kind, a, _, _ in columns])
        limits.append(float(number))
    for j, capacities in enumerate(slots.capacity_s):
        for t, capacity_s in enumerate(capacities):
            at_most.append([(work.prefill_s if kind == "early" else work.decode_s)[a, b]
                            if (b, c) == (j, t) and kind != "share" else 0.0 for kind, a, b, c in columns])
            limits.append(float(capacity_s))
    is_share = np.array([kind == "share" for kind, *_ in columns], dtype=float)
    cost = np.array([work.cost[a, b] if kind == "share" else 0.0 for kind, a, b, _ in columns])
    if good_requests is not None:
        at_most.append(list(-is_share))
        limits.append(-good_requests)
    scale = cost.mean() if good_requests is not None else 1.0
    result = linprog(-is_share if good_requests is None else cost / scale, A_ub=np.array(at_most), b_ub=limits,
                     A_eq=np.array(equal), b_eq=np.zeros(len(equal)), method="highs")
    return None if result.x is None else float(abs(result.fun) * scale)


def by_brute_force(slots: SlotTable, good_requests: int) -> float:
    """The cheapest assignment of which each backend's share fits, all of them tried."""
    work = slots.work
    options = [[-1, *np.nonzero(row)[0].tolist()] for row in work.can_serve]
    best = inf
    for assignment in product(*options):
        served = [(i, j) for i, j in enumerate(assignment) if j >= 0]
        cost = sum(work.cost[i, j] for i, j in served)
        if len(served) < good_requests or cost >= best:
            continue
        chosen = np.array([i for i, _ in served])
        only = np.zeros_like(work.can_serve)
        for i, j in served:
            only[i, j] = True
        table = replace(work, can_serve=only).rows(np.isin(np.arange(len(work.count)), chosen))
        part = replace(slots, work=table, prefill_from=slots.prefill_from[chosen],
                       prefill_until=slots.prefill_until[chosen], decode_from=slots.decode_from[chosen],
                       decode_until=slots.decode_until[chosen])
        if cheapest_fits(part, len(served)):
            best = cost
    return best


@pytest.mark.parametrize("seed", range(6))
def test_no_more_than_the_cheapest_of_all_assignments(seed: int) -> None:
    requests = crowd(seed, 7)
    slots = slots_of(requests, CROWDED)
    for good in (1, 4, 6, 7):
        truth = by_brute_force(slots, good)
        bound = Clairvoyant(requests, CROWDED, slot_s=1.0).least_cost(good)
        assert bound <= truth * (1 + 1e-9)
        if truth < inf:
            # Whole requests cannot be split over two backends; this is all that the programme leaves out here.
            assert bound >= 0.6 * truth


@pytest.mark.parametrize("seed", range(4))
def test_equal_to_the_programme_written_out(seed: int) -> None:
    requests = crowd(seed, 12)
    slots = slots_of(requests, CROWDED)
    assert not cheapest_fits(slots, 12), "an instance without congestion tests nothing"
    most = written_out(slots, None)
    assert most is not None
    assert most_good(slots, solve_most_good(slots).prices) == pytest.approx(most, rel=2e-3)
    for good in (5.0, 0.9 * most, most - 1e-6):
        solution = solve_least_cost(slots, good)
        assert solution.value == pytest.approx(written_out(slots, good), rel=1e-6)
        assert least_cost(slots, solution.prices, good) == pytest.approx(solution.value, rel=1e-6)
        assert least_cost(slots, solution.prices, good) <= solution.value * (1 + 1e-9)
    with pytest.raises(SolverGaveUp, match="Infeasible"):
        solve_least_cost(slots, most + 0.05)


def test_the_solver_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """Standard output belongs to `--json`. Some releases of highspy greet as soon as a solver is made."""
    solve_least_cost(slots_of(crowd(1, 12), CROWDED), 5.0)
    assert capfd.readouterr() == ("", "")


def test_any_prices_give_a_bound() -> None:
    slots = slots_of(crowd(1, 12), CROWDED)
    most = written_out(slots, None)
    assert most is not None
    good = 0.9 * most
    truth = written_out(slots, good)
    assert truth is not None
    rng = np.random.default_rng(5)
    best = 0.0
    for spread in (0.0, 1e-6, 1e-5, 1e-4, 1e-3):
        prices = rng.exponential(1.0, slots.capacity_s.shape) * spread
        best = max(best, least_cost(slots, prices, good))
        assert least_cost(slots, prices, good) <= truth
        assert most_good(slots, prices * 1e3) >= most * (1 - 1e-9)
    assert best > 0
    with pytest.raises(ValueError, match="at least 0"):
        least_cost(slots, np.full_like(slots.capacity_s, -1e-9), good)


def test_where_all_that_is_cheapest_fits_the_bound_is_its_cost() -> None:
    requests = trace(1, 0.5, 60.0)
    table = work_table(requests, POOL)
    assert table.can_serve.any(axis=1).all()
    cheapest = np.sort(np.where(table.can_serve, table.cost, np.inf).min(axis=1))
    bound = bound_for(requests, POOL, 10)
    assert bound.least_cost == pytest.approx(cheapest[:10].sum())
    assert bound.most_good == len(requests) == bound.servable
    assert set(bound.shadow_prices.values()) == {0.0}


def test_cost_grows_with_the_goal_and_ever_faster() -> None:
    bounds = Clairvoyant(crowd(2, 60), CROWDED, slot_s=1.0)
    most = bounds.most_good()
    goals = np.linspace(0, most - 0.5, 8)
    costs = [bounds.least_cost(float(goal)) for goal in goals]
    steps = np.diff(costs)
    assert costs[0] == 0
    assert (steps > 0).all()
    assert (np.diff(steps) > -1e-9 * costs[-1]).all()
    assert bounds.least_cost(most + 1) == inf


def test_less_of_a_backend_never_helps() -> None:
    requests = crowd(3, 60)
    whole = Clairvoyant(requests, CROWDED)
    lent = Clairvoyant(requests, [replace(CROWDED[0], spans=(SpeedSpan(0.0, 8.0, 0.0),)), CROWDED[1]])
    without = Clairvoyant(requests, CROWDED[1:])
    assert whole.most_good() >= lent.most_good() > without.most_good()
    goal = 0.98 * lent.most_good()
    assert whole.least_cost(goal) < lent.least_cost(goal)


def test_shadow_prices_say_what_more_time_would_save() -> None:
    """The finite difference: 1 % more of a backend in all of its slots."""
    requests = crowd(4, 60)
    pool = tuple([replace(spec, spans=()) for spec in CROWDED])
    exact = Clairvoyant(requests, pool, slot_s=1.0)
    goal = 0.9 * exact.most_good()
    bound = exact.bound(goal)
    last_s = max(each.arrival_s for each in requests)
    assert max(bound.shadow_prices.values()) > 0
    for spec in pool:
        faster = [replace(each, spans=(SpeedSpan(0.0, 1000.0, 1.001),)) if each is spec else each for each in pool]
        saved = bound.least_cost - Clairvoyant(requests, faster, slot_s=1.0).least_cost(goal)
        # A faster backend also does more in time, so the saving may be more than that of the same machine for longer.
        assert saved >= 0.5 * bound.shadow_prices[spec.name] * 0.001 * last_s / 3600 - 1e-12


@pytest.mark.parametrize("slot_s", [0.5, 2.0])
def test_slots_and_merging_only_loosen(slot_s: float) -> None:
    requests = crowd(5, 90)
    fine, coarse = Clairvoyant(requests, CROWDED, slot_s=slot_s), Clairvoyant(requests, CROWDED, slot_s=4 * slot_s)
    goal = 0.9 * fine.most_good()
    assert coarse.least_cost(goal) <= fine.least_cost(goal) * (1 + 1e-6)
    assert coarse.most_good() >= fine.most_good() - 1e-6

    table = work_table(requests, CROWDED)
    small = slot_table(merged(table, alike(requests, slot_s, 1.0)), CROWDED, slot_s)
    assert len(small.work.count) < len(requests)
    solution = solve_least_cost(small, goal)
    assert solution.value <= fine.least_cost(goal) * (1 + 1e-6)
    # Its prices, laid on each request, prove more than the merged programme itself.
    by_merging = Clairvoyant(requests, CROWDED, slot_s=slot_s, merge_beyond=0).least_cost(goal)
    assert solution.value * (1 - 1e-6) <= by_merging <= fine.least_cost(goal) * (1 + 1e-6)


def test_noise_loosens_and_the_warm_up_does_not_count() -> None:
    requests = crowd(6, 60)
    still = Clairvoyant(requests, CROWDED)
    goal = 0.8 * still.most_good()
    assert Clairvoyant(requests, CROWDED, noise=StepNoise(0.06)).least_cost(goal) <= still.least_cost(goal)
    counted = Clairvoyant(requests, CROWDED, counted_from_s=4.0)
    later = [each for each in requests if each.arrival_s >= 4.0]
    assert counted.slots.work.requests == len(later)
    # Who came before takes no room in the bound, yet may be a small batch mate.
    assert counted.most_good() >= Clairvoyant(later, CROWDED).most_good() - 1e-6
    with pytest.raises(BadInstance, match="nothing to count"):
        Clairvoyant(requests, CROWDED, counted_from_s=1000.0)


def test_twins_are_one_column() -> None:
    requests = crowd(7, 60)
    twins = [replace(spec, name=f"{spec.name}-{copy}") for spec in CROWDED for copy in range(2)]
    bounds = Clairvoyant(requests, twins, slot_s=1.0)
    assert bounds.slots.capacity_s.shape[0] == 2
    apart = slots_of(requests, twins)
    goal = 0.9 * bounds.most_good()
    assert bounds.least_cost(goal) == pytest.approx(solve_least_cost(apart, goal).value, rel=1e-6)
    assert set(bounds.bound(goal).shadow_prices) == {spec.name for spec in twins}
    with pytest.raises(BadInstance, match="repeat"):
        Clairvoyant(requests, [FAST, FAST])


def test_a_goal_that_nobody_can_reach_costs_more_than_anything() -> None:
    hopeless = [request(prompt=20_000, ttft_s=0.1), request(1.0)]
    bound = bound_for(hopeless, POOL, 2)
    assert (bound.servable, bound.most_good, bound.least_cost) == (1, 1.0, inf)
    assert bound.cost_over_bound(1.0) is None
    reached = bound_for(hopeless, POOL, 1)
    assert reached.cost_over_bound(2 * reached.least_cost) == pytest.approx(2.0)
    assert reached.goodput_over_bound(1) == 1.0
