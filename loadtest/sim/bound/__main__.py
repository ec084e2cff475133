"""``python -m loadtest.sim.bound SCENARIO``: one trace, one policy, the bound, and what hindsight makes of both.

Prints a JSON object a seed on standard output: the policy's figures, the certified bound at its number of requests in
budget and at 99 %, the shadow prices of the fluid reference, and the point that local search reaches from the policy's
own assignment.
"""

import argparse
import json
import sys
from math import isfinite
from time import perf_counter

from loadtest.sim.bound.clairvoyant import Bound
from loadtest.sim.bound.fluid import fluid_plan
from loadtest.sim.bound.hindsight import AWAY, HindsightPoint, search
from loadtest.sim.bound.ratios import Trace
from loadtest.sim.bound.simulated import SimulatedInstance, instance_of
from loadtest.sim.flight import Fate, Outcome
from loadtest.sim.pools import find_pool
from loadtest.sim.run import parse_seeds, run_world
from loadtest.sim.scenarios import SECONDS, find_scenarios


def main() -> None:
    """Reads the command line, prints."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.sim.bound", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("scenario")
    parser.add_argument("--pool", default="site")
    parser.add_argument("--policy", default="headrace")
    parser.add_argument("--seeds", default="1")
    parser.add_argument("--rate", type=float, help="requests a second instead of the usual")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--evaluations", type=int, default=0, help="rounds of the hindsight search")
    options = parser.parse_args()
    (scenario,) = find_scenarios(options.scenario)
    rate_per_s = options.rate or scenario.rate_per_s * find_pool(options.pool).scale
    for seed in parse_seeds(options.seeds):
        trace = Trace(scenario.name, options.pool, seed, rate_per_s, options.seconds)
        print(json.dumps(compare(trace, options.policy, options.evaluations)), flush=True)


def compare(trace: Trace, policy: str, evaluations: int) -> dict[str, object]:
    """All of the module's figures for one run; `evaluations` of 0 leaves hindsight out."""
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
            seed=trace.seed, dice=instance.dice, counted_from_s=instance.counted_from_s, progress=_say)
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


def _say(point: HindsightPoint) -> None:
    print(f"\rround {point.evaluations}: {point.good_requests} in budget, cost {point.cost:.4f}", end="",
          file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
