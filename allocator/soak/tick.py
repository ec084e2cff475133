"""`python -m allocator.soak.tick`: what one tick of the planner costs on a full cluster, in ms of processor time.

Four clusters, all of whose devices are busy, with as many waiting jobs as are asked for:

    backfill   the waiting jobs' queue has no guarantee: a reservation each card, and a look at everybody behind it
    reclaim    all that runs is borrowed from the queue that waits: victims are searched for job after job
    fragments  the same, but every node also has a run that nobody may stop, so no gang can be placed on what is freed
    lending    the same as backfill, with replicas of an inference pool to be had
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from random import Random

from allocator.apply import replay
from allocator.events import (
    BackendReported,
    ClockRead,
    Event,
    JobSubmitted,
    NodeReported,
    RunPlaced,
    RunStarted,
    SupplyReported,
)
from allocator.model.inventory import Backend, Node, Supply
from allocator.model.jobs import Checkpoint, Job, Kind, Level, Run
from allocator.model.pools import Config, Pool, PoolKind, Queue, Quota, Rules
from allocator.model.world import World, new_world
from allocator.plan import plan
from allocator.queueing.bench import why
from allocator.reasons import Reason
from allocator.units.load import shipped

CARDS = ("v100", "p100", "k80")
FAMILIES = ("LM (batch size 10)", "ResNet-50 (batch size 128)", "Transformer", "Recommendation", "unmeasured")
CASES = ("backfill", "reclaim", "fragments", "lending")
RECLAIMING = ("reclaim", "fragments")
DEVICES_A_NODE = 8
LATER_S = 3600.0
"""The waiting jobs come so long after the running ones: those are old enough to be stopped."""


def busy_world(case: str, nodes: int, waiting: int, seed: int = 0) -> tuple[World, float]:
    """A full cluster with a queue before it, and the time at which to plan. The same for the same arguments."""
    rng = Random(seed)
    world = replay(new_world(_config(case, nodes), shipped()), _cluster(case, nodes))
    world = _filled(world, case, rng)
    queued = [_waiting(rng, f"w{index}", case) for index in range(waiting)]
    return replay(world, (JobSubmitted(at_s=LATER_S, job=job) for job in queued)), LATER_S + 1.0


def _filled(world: World, case: str, rng: Random) -> World:
    """The world with a run on every device."""
    for node in world.nodes.values():
        free, epoch = list(node.device_ids) if node.pool == "training" else [], world.epoch
        while free:
            owned = case == "fragments" and len(free) == DEVICES_A_NODE
            gang = 1 if owned else min(len(free), rng.choice((1, 1, 2, 4)))
            epoch += 1
            job = _job(rng, f"r-{free[0]}", "owners" if owned else "guests", gang, (node.card,))
            run = Run(f"{job.id}.{epoch}", job.id, epoch, job.queue, "training", job.kind, job.family, node.card,
                      tuple(free[:gang]), gang, job.checkpoint, 0.0, rng.uniform(LATER_S, 1e5), world.active,
                      world.config.version)
            del free[:gang]
            placed = RunPlaced(at_s=0.0, run=run, why=why(world, Reason.PLACED))
            world = replay(world, (JobSubmitted(at_s=0.0, job=job), placed,
                                   RunStarted(at_s=1.0, run=run.id, epoch=epoch)))
    return world


def tick_ms(world: World, now_s: float) -> float:
    """Processor time of one plan that remembers nothing of the world from before."""
    fresh = world.evolved(version=world.version)
    fresh.memo.clear()
    started_s = time.process_time()
    plan(fresh, now_s)
    return (time.process_time() - started_s) * 1000.0


def _config(case: str, nodes: int) -> Config:
    each = float(nodes * DEVICES_A_NODE)
    pools = (Pool("training", PoolKind.TRAINING, {"pool": "training"}),
             Pool("inference", PoolKind.INFERENCE, {"pool": "inference"}))
    promised = {card: Quota(each) for card in CARDS} if case in RECLAIMING else {}
    queues = (Queue("owners", "training", promised), Queue("guests", "training"))
    return Config("tick", pools, queues, Rules(surplus_hold_s=0.0, supply_fresh_s=1e9))


def _cluster(case: str, nodes: int) -> Iterator[Event]:
    yield ClockRead(at_s=0.0, wall_s=1e6)
    for index in range(nodes):
        card = CARDS[index % len(CARDS)]
        yield NodeReported(at_s=0.0, node=_node(f"n{index}", card, index, "training"), evidence="new")
    if case != "lending":
        return
    for index in range(nodes // 4):
        node = _node(f"i{index}", CARDS[index % len(CARDS)], index, "inference")
        yield NodeReported(at_s=0.0, node=node, evidence="new")
        for first in range(0, DEVICES_A_NODE, 2):
            backend = Backend(f"{node.name}-b{first}", "inference", node.card, node.device_ids[first:first + 2])
            yield BackendReported(at_s=0.0, backend=backend)
    for card in CARDS:
        yield SupplyReported(at_s=LATER_S, supply=Supply("inference", card, nodes // 4, nodes // 4))


def _node(name: str, card: str, index: int, pool: str) -> Node:
    return Node(name, card, DEVICES_A_NODE, 32.0, 4, f"l{index // 8}", f"p{index // 32}", "s", {"pool": pool})


def _waiting(rng: Random, name: str, case: str) -> Job:
    """Each one a little unlike the others, so that what was found out for one helps little with the next."""
    if case == "fragments":
        job = _job(rng, name, "owners", DEVICES_A_NODE, tuple(rng.sample(CARDS, rng.randint(1, 3))))
        return replace(job, widest=Level.NODE, priority=rng.randrange(20))
    queue = "owners" if case == "reclaim" else "guests"
    return _job(rng, name, queue, rng.choice((1, 1, 2, 4, 8, 16)), tuple(rng.sample(CARDS, rng.randint(1, 3))))


def _job(rng: Random, name: str, queue: str, gang: int, cards: tuple[str, ...]) -> Job:
    kind = Kind.TRAINING if rng.random() < 0.8 else Kind.BATCH
    return Job(name, queue, rng.choice(FAMILIES), cards, gang, gang, kind, work_unit_s=rng.uniform(1e3, 1e5) * gang,
               checkpoint=Checkpoint(600.0, 20.0, 60.0))


def main(arguments: list[str] | None = None) -> int:
    """Measures each case; one JSON row on standard output."""
    parser = argparse.ArgumentParser(prog="python -m allocator.soak.tick", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--nodes", type=int, default=64, help="with 8 devices each (default: %(default)s)")
    parser.add_argument("--waiting", type=int, default=200, help="jobs (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=5, help="worlds a case (default: %(default)s)")
    options = parser.parse_args(arguments)
    row: dict[str, object] = {"scenario": "allocator_tick", "nodes": options.nodes, "waiting": options.waiting}
    for case in CASES:
        taken = []
        for seed in range(options.seeds):
            world, now_s = busy_world(case, options.nodes, options.waiting, seed)
            taken.append(min(tick_ms(world, now_s) for _ in range(3)))
        row[case] = {"median_ms": round(statistics.median(taken), 1), "worst_ms": round(max(taken), 1)}
    print(json.dumps(row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
