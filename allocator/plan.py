"""`plan(world, now_s)`: what is to be done next, as events that have not happened yet.

Each stage looks at the world as the stages before it leave it, so no two of them count on the same device:

1. `deadlines`    kills, alarms, write-offs
2. `recall_slack` the lender runs short: replicas are called back
3. `withdraw`     offers that came to nothing, or that the lender can no longer afford
4. `claims`       claims that cannot come true
5. `withdraw_unwanted`
6. `stops`        notice to every run that must leave: broken, cancelled, recalled, out of its window
7. `passing`      the waiting jobs: starts, backfill, reclaims, offers
8. `give_back`    idle loans go home, but for those on which a waiting gang has its reservation
9. `moves`        nodes change pools

Rounds go on until one adds nothing: the result is a fixed point, and planning again without news does nothing (P57).
Total, deterministic, without clock or dice.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from allocator import lending, timing
from allocator.apply import consider
from allocator.events import Event
from allocator.model.jobs import Kind
from allocator.model.world import World
from allocator.queueing.passing import Passed, pass_over
from allocator.queueing.reclaiming import reclaim

MOST_ROUNDS = 8
"""A stop against a rule that undoes another; the property tests never see more than a few."""

ALL_KINDS = frozenset(Kind)
MAKE_ROOM = (reclaim, lending.offer)


class Plan(NamedTuple):
    """What to do, and the world once it is decided (not yet done)."""

    events: tuple[Event, ...]
    world: World
    refused: tuple[tuple[Event, str], ...]
    """What a stage proposed and the world did not take: a fault of the planner, left out and to be counted."""


def plan(world: World, now_s: float, *, kinds: frozenset[Kind] = ALL_KINDS, housekeeping: bool = True) -> Plan:
    """The decisions of one tick.

    `kinds`: jobs that this planner places. `housekeeping`: whether it also does all that is not about waiting jobs;
    of several planners one does.
    """
    reserved: set[str] = set()

    def passing(world: World, now_s: float) -> Iterable[Event]:
        passed = pass_over(world, now_s, kinds, MAKE_ROOM)
        reserved.clear()
        reserved.update(device for reservation in passed.reservations for device in reservation.devices)
        return passed.events

    def give_back(world: World, now_s: float) -> Iterable[Event]:
        return lending.give_back(world, now_s, reserved)

    stages: tuple[Callable[[World, float], Iterable[Event]], ...] = (passing,)
    if housekeeping:
        stages = (timing.deadlines, lending.recall_slack, lending.withdraw, timing.claims, lending.withdraw_unwanted,
                  timing.stops, passing, give_back, timing.moves)
    events: list[Event] = []
    refused: list[tuple[Event, str]] = []
    for _ in range(MOST_ROUNDS):
        before = len(events)
        for stage in stages:
            for event in tuple(stage(world, now_s)):
                after = consider(world, event)
                if isinstance(after, World):
                    world = after
                    events.append(event)
                else:
                    refused.append((event, after))
        if len(events) == before:
            break
    return Plan(tuple(events), world, tuple(refused))


def survey(world: World, now_s: float) -> Passed:
    """What a pass over the waiting jobs finds, for those who ask why; nothing comes of it."""
    return pass_over(world, now_s, ALL_KINDS, MAKE_ROOM)
