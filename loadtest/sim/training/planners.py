"""Planners to stand beside the allocator's: as plain as people write them, on the same world and the same events."""

from collections.abc import Sequence
from random import Random

from allocator.apply import apply
from allocator.events import Event, RunPlaced
from allocator.model.jobs import JobState, Run
from allocator.model.world import World
from allocator.picture import picture_of
from allocator.placement.topology import place, without
from allocator.plan import Plan
from allocator.queueing.bench import why
from allocator.reasons import Reason
from loadtest.sim.training.machines import Planner


def first_come(seed: int) -> Planner:
    """Strictly in order of arrival, each on a card type that the dice choose among those with room; none overtakes."""
    rng = Random(seed)

    def plan(world: World, now_s: float) -> Plan:
        events: list[Event] = []
        free = {card: devices for (_, card), devices in picture_of(world, now_s).free.items()}
        for state in in_order_of_arrival(world):
            job = state.job
            found = [(card, devices) for card in job.cards
                     if (devices := place(world.nodes, free.get(card, {}), job.gang_min, job.widest)) is not None]
            if not found:
                break
            card, devices = rng.choice(found)
            free[card] = without(free[card], devices)
            events.append(_placed(world, state, card, devices, now_s))
            world = apply(world, events[-1])
        return Plan(tuple(events), world, ())

    return plan


def in_order_of_arrival(world: World) -> Sequence[JobState]:
    """The waiting jobs, oldest first."""
    waiting = [state for state in world.jobs.values() if state.run is None]
    return sorted(waiting, key=lambda state: (state.job.submitted_s, state.job.id))


def _placed(world: World, state: JobState, card: str, devices: tuple[str, ...], now_s: float) -> RunPlaced:
    job, epoch = state.job, world.epoch + 1
    pool = world.nodes[devices[0].rpartition(":")[0]].pool
    run = Run(
        id=f"{job.id}.{epoch}", job=job.id, epoch=epoch, queue=job.queue, pool=pool or "", kind=job.kind,
        family=job.family, card=card, devices=devices, gang_min=job.gang_min, checkpoint=job.checkpoint,
        started_s=now_s, ends_s=now_s, coefficients=world.active, config=world.config.version,
        base_unit_s=state.done_unit_s)
    return RunPlaced(at_s=now_s, run=run, why=why(world, Reason.PLACED))
