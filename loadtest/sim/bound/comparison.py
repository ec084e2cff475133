"""One policy's run against the bound of its trace, the fluid reference, and what hindsight would have made of it."""

from collections.abc import Callable
from math import isfinite
from time import perf_counter

from loadtest.sim.bound.clairvoyant import Bound
from loadtest.sim.bound.fluid import fluid_plan
from loadtest.sim.bound.hindsight import AWAY, HindsightPoint, search
from loadtest.sim.bound.ratios import Trace
from loadtest.sim.bound.simulated import SimulatedInstance, instance_of
from loadtest.sim.flight import Fate, Outcome
from loadtest.sim.pools import find_pool
from loadtest.sim.run import run_world


def compare(trace: Trace, policy: str, evaluations: int,
            progress: Callable[[HindsightPoint], None] | None = None) -> dict[str, object]:
    """All figures of one run; `evaluations` of 0 leaves hindsight out, `progress` hears what it finds on its way."""
    world = run_world(trace.job(policy))
    pool, workload = find_pool(trace.pool), world.workload
    instance = instance_of(pool, workload, trace.seed)
    counted = [outcome for outcome in world.outcomes if outcome.request.arrival_s >= workload.warm_up_s]
    good = sum(outcome.in_budget for outcome in counted)
    cost = sum(outcome.cost for outcome in counted)
    clairvoyant = instance.clairvoyant()
    own, most = clairvoyant.bound(good), clairvoyant.bound(0.99 * len(counted))
    fluid = fluid_plan(instance.requests, instance.backends, workload.seconds)
    result: dict[str, object] = {
        "scenario": trace.scenario, "pool": trace.pool, "policy": policy, "seed": trace.seed,
        "requests": len(counted), "good": good, "cost_per_1k": 1000 * cost / max(1, good),
        "cost_over_bound": own.cost_over_bound(cost), "goodput_over_bound": own.goodput_over_bound(good),
        "bound_per_1k": _per_1k(own), "bound_per_1k_at_99": _per_1k(most), "most_good": own.most_good,
        "bound_took_s": most.took_s,
        "fluid_cost_per_1k": 1000 * fluid.cost_per_hour / 3600 * workload.seconds / len(instance.requests),
        "fluid_shadow_prices_per_hour": dict(fluid.shadow_prices),
    }
    if evaluations:
        began_s = perf_counter()
        point = search(
            instance.requests, instance.backends, _assignment(instance, world.outcomes), evaluations=evaluations,
            seed=trace.seed, dice=instance.dice, counted_from_s=instance.counted_from_s, progress=progress)
        found = clairvoyant.bound(point.good_requests)
        result["hindsight"] = {
            "good": point.good_requests, "cost_per_1k": 1000 * point.cost / max(1, point.good_requests),
            "cost_over_bound": found.cost_over_bound(point.cost), "evaluations": point.evaluations,
            "took_s": perf_counter() - began_s,
        }
    return result


def _per_1k(bound: Bound) -> float | None:
    """Least cost of a thousand in budget; `None` where so many cannot be."""
    return 1000 * bound.least_cost / max(1.0, bound.good_requests) if isfinite(bound.least_cost) else None


def _assignment(instance: SimulatedInstance, outcomes: list[Outcome]) -> list[int]:
    """Where each request of the trace went, by the policy; shed and lost ones nowhere."""
    served = {id(outcome.request): outcome.backend for outcome in outcomes if outcome.fate is Fate.SERVED}
    in_order = sorted((outcome.request for outcome in outcomes), key=lambda request: request.arrival_s)
    assert len(in_order) == len(instance.requests)
    places = [served.get(id(request)) for request in in_order]
    return [AWAY if place is None else place for place in places]
