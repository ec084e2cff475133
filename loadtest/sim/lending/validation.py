"""`headrace sim lending validate`: the stand-in for requests beside the simulation of each of them, for some minutes.

Three pools, as they are with much, some and nothing lent, each for three minutes of Poisson arrivals at a load of its
own; the shipped routing policy serves them request by request (`loadtest.sim.world`). The share of requests out of
budget is held against `serving.miss_share`.
"""

import json as jsonlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from loadtest.sim.classes import STANDARD, by_name, draw_sizes, shares
from loadtest.sim.lending.serving import miss_share, pool_capacity_per_s, replica_of
from loadtest.sim.measures import measure
from loadtest.sim.pools import Pool
from loadtest.sim.run import policy_spec
from loadtest.sim.spread import progress
from loadtest.sim.workload import SimRequest, Workload
from loadtest.sim.world import World
from policies.registry import build_learner, build_pipeline

SECONDS = 210.0
"""Half a minute is not counted."""
POLICY = "headrace"
POOLS = ({"h100": 2, "a100": 8}, {"h100": 4, "a100": 16}, {"h100": 8, "a100": 32})
LOADS = (0.4, 0.7, 0.85)
WITHIN = 0.01
"""Share of requests that the stand-in may be off by at any of these; and the budget allows as many to miss."""


@dataclass(frozen=True, slots=True)
class Point:
    """One pool at one load."""

    replicas: int
    load: float
    requests: int
    simulated: float
    """Share of requests out of budget, request by request."""
    stand_in: float

    @property
    def off_by(self) -> float:
        return self.stand_in - self.simulated


@dataclass(frozen=True, slots=True)
class Comparison:
    """All points."""

    points: tuple[Point, ...]

    def agrees(self) -> bool:
        """Whether the stand-in is near enough everywhere."""
        return all(abs(point.off_by) <= WITHIN for point in self.points)


def compare(pools: Sequence[dict[str, int]] = POOLS, loads: Sequence[float] = LOADS, seed: int = 11,
            seconds: float = SECONDS) -> Comparison:
    """Simulates all of them; a minute or two."""
    with progress(len(pools) * len(loads), "validate") as advance:
        points = []
        for serving in pools:
            for load in loads:
                points.append(_point(serving, load, seed, seconds))
                advance(f"{sum(serving.values())} replicas at {load:g}")
    return Comparison(tuple(points))


def _point(serving: dict[str, int], load: float, seed: int, seconds: float) -> Point:
    backends = tuple(replace(replica_of(card), name=f"{card}-{index}")
                     for card, count in serving.items() for index in range(count))
    requests = _requests(load * pool_capacity_per_s(serving), seconds, Random(seed))
    spec = policy_spec(POLICY)
    world = World(Pool("lending", backends), Workload(requests, by_name(STANDARD), seconds), [build_pipeline(spec)],
                  [build_learner(spec)], seed).run()
    measured = measure(world)
    return Point(len(backends), load, measured.requests, 1.0 - measured.in_budget, miss_share(load, len(backends)))


def _requests(per_s: float, seconds: float, rng: Random) -> tuple[SimRequest, ...]:
    requests = []
    at_s = rng.expovariate(per_s)
    while at_s < seconds:
        (each,) = rng.choices(STANDARD, shares(STANDARD))
        requests.append(SimRequest(at_s, each.name, *draw_sizes(each, rng)))
        at_s += rng.expovariate(per_s)
    return tuple(requests)


def show(found: Comparison, *, json: bool) -> None:
    """The answer on standard output."""
    if json:
        print(jsonlib.dumps({"agrees": found.agrees(), "within": WITHIN, "points": [
            {"replicas": point.replicas, "load": point.load, "requests": point.requests,
             "simulated": round(point.simulated, 6), "stand_in": round(point.stand_in, 6)}
            for point in found.points]}))
        return
    for point in found.points:
        print(f"{point.replicas:>3} replicas at {point.load:.2f}: {100 * point.simulated:.2f} % out of budget request "
              f"by request ({point.requests}), stand-in {100 * point.stand_in:.2f} %, off by "
              f"{100 * point.off_by:+.2f}")
    print(f"within {100 * WITHIN:g} points everywhere: {'yes' if found.agrees() else 'NO'}")
