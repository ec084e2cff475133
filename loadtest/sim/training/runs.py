"""Gavel's jobs under one policy: from an empty cluster until the last counted job is done."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from statistics import mean

from allocator.apply import apply
from allocator.events import NodeReported
from allocator.model.inventory import Node
from allocator.model.jobs import Checkpoint, Job
from allocator.model.pools import Config, Pool, PoolKind, Queue, Rules
from allocator.model.world import World, new_world
from allocator.plan import plan
from allocator.units.load import shipped
from loadtest.sim.training.attempts import Stretch
from loadtest.sim.training.gavel import (
    CARDS,
    CARDS_EACH,
    COUNTED,
    DEVICES_A_NODE,
    PRICE_PER_HOUR,
    GavelJob,
    draw_jobs,
)
from loadtest.sim.training.machines import Machines, Planner
from loadtest.sim.training.planners import first_come
from loadtest.sim.training.rounds import replay_fifo_perf
from loadtest.sim.training.rows import Figures, Outcome, cumulated, quantile

LATEST = 3_000
"""Jobs drawn at most: runs end long before the last of them."""
ROUGHLY = 0.7
"""Sigma of the log of a rough estimate over the truth: two of three are within a factor of two."""
RULES = Rules()


@dataclass(frozen=True, slots=True)
class Policy:
    """One way to place jobs, and what it is told about them."""

    name: str
    shows: str
    planner: Callable[[int], Planner]
    """By seed."""
    rules: Rules = RULES
    estimate: Callable[[GavelJob, Random], float | None] = lambda job, rng: job.work_unit_s


def _shipped(seed: int) -> Planner:
    return plan


POLICIES = {policy.name: policy for policy in (
    Policy("fifo", "in order of arrival, each on a card type with room, by dice; it stays there", first_come),
    Policy("fifo_fastest", "in order of arrival, each at once on the fastest card type with room; it stays there",
           _shipped, Rules(patience=1e9)),
    Policy("headrace", "the shipped allocator, told how long each job takes; a job stays on its card type", _shipped),
    Policy("headrace_rough", "the same with rough estimates, two of three within a factor of two", _shipped,
           estimate=lambda job, rng: job.work_unit_s * rng.lognormvariate(0.0, ROUGHLY)),
    Policy("headrace_untold", "the same without any estimate, as Gavel's policies have none", _shipped,
           estimate=lambda job, rng: None),
)}


def run_policy(name: str, seed: int, jobs_per_hour: float) -> Outcome:
    """One policy on one seed."""
    policy = POLICIES[name]
    jobs = draw_jobs(seed, LATEST, jobs_per_hour)
    machines = Machines(_cluster(policy.rules), policy.planner(seed))
    rng = Random(seed)
    for number, job in enumerate(jobs):
        asked = Job(
            id=f"j{number:05d}", queue="research", family=job.family, cards=CARDS, gang_min=job.gang, gang_max=job.gang,
            work_unit_s=policy.estimate(job, rng), checkpoint=Checkpoint(every_s=None))
        machines.submit(asked, job.arrival_s, job.work_unit_s)
    counted = [machines.stories[f"j{number:05d}"] for number in COUNTED]
    machines.run(until=lambda: all(story.ended_s is not None for story in counted))
    moved = [story for story in counted if len(set(story.cards)) > 1]
    assert not moved, "a job is pinned to one card type"
    jct_s = [story.ended_s - story.submitted_s for story in counted if story.ended_s is not None]
    waits_s = [story.waited_s for story in counted]
    from_s, to_s = jobs[COUNTED[0]].arrival_s, jobs[COUNTED[-1]].arrival_s
    units = _units_between(machines, from_s, to_s)
    figures = Figures(
        queue_wait_mean_s=mean(waits_s), queue_wait_p95_s=quantile(waits_s, 0.95), gang16_wait_mean_s=None,
        jct_mean_s=mean(jct_s), jct_p95_s=quantile(jct_s, 0.95),
        utilisation=units / (capacity_units() * (to_s - from_s)),
        unit_cost=sum(PRICE_PER_HOUR.values()) * CARDS_EACH * (to_s - from_s) / units)
    return Outcome(figures, {"jct": cumulated(jct_s)})


def gavel_replayed_jct_s(seed: int) -> float:
    """Mean completion time by Gavel's own `fifo_perf`, in its rounds."""
    return mean(replay_fifo_perf(draw_jobs(seed, LATEST), shipped()).values())


def soonest_jct_s(seed: int, jobs_per_hour: float) -> float:
    """Mean completion time if each counted job had its fastest card at once: no policy can be below."""
    table, jobs = shipped(), draw_jobs(seed, COUNTED[-1] + 1, jobs_per_hour)
    return mean(jobs[number].work_unit_s / max(table.speed(card, jobs[number].family, 1) for card in CARDS)
                for number in COUNTED)


def capacity_units() -> float:
    """Units a second that the whole cluster is worth, by the cards' scalars."""
    return sum(CARDS_EACH * shipped().scalar(card) for card in CARDS)


def _units_between(machines: Machines, from_s: float, to_s: float) -> float:
    return sum(overlap_s(stretch, from_s, to_s) * stretch.units_per_s for stretch in machines.stretches_until_now())


def overlap_s(stretch: Stretch, from_s: float, to_s: float) -> float:
    """Seconds of a stretch within a window."""
    return max(0.0, min(stretch.to_s, to_s) - max(stretch.from_s, from_s))


def _cluster(rules: Rules) -> World:
    config = Config("gavel", (Pool("training", PoolKind.TRAINING, {"pool": "training"}),),
                    (Queue("research", "training"),), rules)
    world = new_world(config, shipped())
    for card in CARDS:
        for index in range(CARDS_EACH // DEVICES_A_NODE):
            node = Node(f"{card}-{index}", card, DEVICES_A_NODE, labels={"pool": "training"})
            world = apply(world, NodeReported(at_s=0.0, node=node, evidence="new"))
    return world
