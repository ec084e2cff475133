"""Runs of `headrace sim` against their bounds: the same money, the same requests, and no policy below."""

import json
from dataclasses import replace
from math import inf

import pytest

from loadtest.sim.bound.clairvoyant import Clairvoyant
from loadtest.sim.bound.comparison import compare
from loadtest.sim.bound.instance import BadInstance, SpeedSpan, accounted_cost
from loadtest.sim.bound.ratios import Trace, good_requests, with_bounds
from loadtest.sim.bound.simulated import instance_of
from loadtest.sim.flight import Fate
from loadtest.sim.measures import measure
from loadtest.sim.pools import find_pool
from loadtest.sim.rows import Row
from loadtest.sim.run import Job, lay_out, run_world
from loadtest.sim.workload import EventKind, FleetEvent, SimRequest, TrafficClass, Workload
from loadtest.traffic import Lengths
from policies.facts import Budget

SECONDS = 75.0


@pytest.mark.parametrize("pool_name", ["site", "fitted-list"])
def test_the_accounted_cost_is_the_simulators(pool_name: str) -> None:
    pool = find_pool(pool_name)
    workload = lay_out(Job("burst", pool_name, "p2c", 1, 6.0, SECONDS))
    instance = instance_of(pool, workload)
    for given in instance.requests[:20]:
        for mine, theirs in zip(instance.backends, pool.backends, strict=True):
            assert accounted_cost(mine, given) == pytest.approx(
                theirs.cost(given.prompt_tokens, 0, given.output_tokens))
            cached = replace(given, uncached_tokens=max(1, given.prompt_tokens // 3))
            assert accounted_cost(mine, cached) == pytest.approx(
                theirs.cost(given.prompt_tokens, given.prompt_tokens - cached.uncached_tokens, given.output_tokens))


@pytest.mark.parametrize(("scenario", "rate_per_s"), [
    ("burst", 6.0), ("burst", 14.0), ("dies", 5.0), ("degrades-silently", 8.0), ("coefficient-drift", 8.0),
    ("card-lent", 6.0), ("misspecified", 6.0), ("long-context", 4.0), ("prefix-heavy", 2.0),
])
def test_no_policy_is_below_the_bound(scenario: str, rate_per_s: float) -> None:
    for policy in ("headrace", "round_robin"):
        job = Job(scenario, "site", policy, 3, rate_per_s, SECONDS)
        world = run_world(job)
        instance = instance_of(world.pool, world.workload)
        counted = [outcome for outcome in world.outcomes if outcome.request.arrival_s >= instance.counted_from_s]
        good = [outcome for outcome in counted if outcome.in_budget]
        bounds = instance.clairvoyant()
        assert bounds.slots.work.requests == len(counted) > 0
        assert 0 < len(good) <= bounds.most_good()
        assert bounds.least_cost(len(good)) <= sum(outcome.cost for outcome in good)
        # Each that was in budget is one that the bound, too, holds to be possible there.
        numbers = {id(request): at for at, request in enumerate(
            [each for each in world.workload.requests if each.arrival_s >= instance.counted_from_s])}
        for outcome in good:
            assert outcome.fate is Fate.SERVED
            assert outcome.backend is not None
            assert bounds.slots.work.can_serve[numbers[id(outcome.request)], outcome.backend]


def test_rows_get_their_ratios_as_means_over_seeds() -> None:
    def row(policy: str) -> Row:
        runs = [measure(run_world(Job("steady", "site", policy, seed, 7.0, SECONDS))) for seed in (1, 2)]
        return Row("steady", policy, "site", 7.0, SECONDS, (1, 2), tuple(runs))

    done: list[str] = []
    rows = [row("headrace"), row("round_robin")]
    compared = with_bounds(rows, advance=done.append)
    assert done == ["bound of steady, seed 1", "bound of steady, seed 2"]
    for before, after in zip(rows, compared, strict=True):
        assert replace(after, cost_over_bound=None, goodput_over_bound=None) == before
        pool = find_pool("site")
        ratios = []
        for seed, run in zip(before.seeds, before.runs, strict=True):
            instance = instance_of(pool, lay_out(Job("steady", "site", "any", seed, 7.0, SECONDS)))
            good = good_requests(run)
            assert run.cost_per_1k_in_budget is not None
            least = instance.clairvoyant().least_cost(good)
            ratios.append(run.cost_per_1k_in_budget * good / 1000 / least)
        assert after.cost_over_bound is not None
        assert after.goodput_over_bound is not None
        assert after.cost_over_bound == pytest.approx(sum(ratios) / 2, rel=1e-3)
        assert after.cost_over_bound > 1.0
        assert after.goodput_over_bound <= 1.0


def workload_of(budget: Budget, *events: FleetEvent) -> Workload:
    sizes = Lengths(100.0, 0.5, 1000)
    return Workload((SimRequest(40.0, "only", 100, 11),), {"only": TrafficClass("only", budget, sizes, sizes)}, 60.0,
                    tuple(events))


@pytest.mark.parametrize(("budget", "ttft_s", "end_s"), [
    (Budget(ttft_s=1.0, inter_token_s=0.1), 1.0, 2.0),
    (Budget(ttft_s=1.0, inter_token_s=0.1, e2e_s=1.5), 1.0, 1.5),
    (Budget(ttft_s=1.0, e2e_s=0.5), 0.5, 0.5),
    (Budget(e2e_s=3.0), 3.0, 3.0),
])
def test_budgets_of_any_shape_become_token_deadlines(budget: Budget, ttft_s: float, end_s: float) -> None:
    (given,) = instance_of(find_pool("site"), workload_of(budget)).requests
    assert given.ttft_budget_s == pytest.approx(ttft_s)
    assert given.deadline_s - given.arrival_s == pytest.approx(end_s)


@pytest.mark.parametrize("budget", [Budget(), Budget(ttft_s=1.0)])
def test_a_class_that_promises_too_little_has_no_bound(budget: Budget) -> None:
    with pytest.raises(BadInstance, match="class 'only' promises"):
        instance_of(find_pool("site"), workload_of(budget))


def test_events_become_speeds_and_closings() -> None:
    events = [
        FleetEvent(10.0, EventKind.SLOW, "a100", 2.0), FleetEvent(20.0, EventKind.DIE, "a100"),
        FleetEvent(30.0, EventKind.RETURN, "a100"), FleetEvent(40.0, EventKind.SLOW, "a100", 1.0),
        FleetEvent(5.0, EventKind.DRAIN, "l40s"), FleetEvent(15.0, EventKind.RECALL, "l40s"),
        FleetEvent(50.0, EventKind.DRAIN, "l40s"),
    ]
    instance = instance_of(find_pool("site"), workload_of(Budget(e2e_s=3.0), *events))
    h100, a100, l40s, _ = instance.backends
    slowed, dead, back = a100.spans
    # An iteration that has begun goes on at its pace, and may be as long as a full batch and a full chunk make it.
    assert 10.0 < slowed.from_s < 10.5
    assert (slowed.until_s, slowed.speed) == (20.0, 0.5)
    assert dead == SpeedSpan(20.0, 30.0, 0.0)
    assert back == SpeedSpan(30.0, 40.0, 0.5)
    assert l40s.closed == ((5.0, 15.0), (50.0, inf))
    assert (h100.spans, h100.closed) == ((), ())


def test_cloned_pools_are_bounded_as_quickly_as_their_cards() -> None:
    pool = find_pool("site:200")
    instance = instance_of(pool, lay_out(Job("burst", "site:200", "p2c", 1, 300.0, 40.0)))
    bounds: Clairvoyant = instance.clairvoyant()
    assert bounds.slots.work.cost.shape[1] == 4
    assert bounds.least_cost(1000) > 0


def test_a_run_is_compared_with_the_bound_and_with_hindsight() -> None:
    found = compare(Trace("burst", "site", 2, 9.0, 50.0), "round_robin", evaluations=8)
    assert isinstance(found["good"], int)
    assert isinstance(found["cost_over_bound"], float)
    hindsight = found["hindsight"]
    assert isinstance(hindsight, dict)
    # From the policy's own assignment, late requests cost nothing once they are turned away.
    assert hindsight["good"] >= 0.9 * found["good"]
    assert hindsight["cost_over_bound"] >= 1.0
    assert hindsight["evaluations"] <= 9
    assert json.loads(json.dumps(found)) == found
