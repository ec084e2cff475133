"""Who can never start stands in nobody's way: a pass over random worlds, with such jobs and without them."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from allocator.apply import replay
from allocator.events import JobCancelled, JobSubmitted, SupplyReported
from allocator.model.inventory import Supply
from allocator.model.world import World
from allocator.plan import plan, survey
from allocator.reasons import Pending
from allocator.soak.outside import CARDS, random_job, random_world, replies

SET_ASIDE = frozenset({
    Pending.QUEUE_UNKNOWN, Pending.NO_JOBS_HERE, Pending.CARD_UNKNOWN, Pending.CARD_CANNOT, Pending.MEMORY,
    Pending.NO_SUCH_CARD, Pending.GANG_TOO_LARGE, Pending.NOT_HEALTHY, Pending.QUOTA_LIMIT, Pending.WINDOW_CLOSED})


def a_busy_world(seed: int) -> tuple[World, float]:
    """A cluster drawn by dice with jobs that run, and others that have just come."""
    rng = Random(seed)
    first, filling = random_world(rng)
    world, now_s = replay(first, filling), 0.0
    for is_planned in (True, True, True, False):
        for card in CARDS:
            count = rng.randint(0, 4)
            world = replay(world, [SupplyReported(at_s=now_s, supply=Supply("inference", card, count, count))])
        world = replay(world, [JobSubmitted(at_s=now_s + index / 10, job=random_job(rng, f"j{now_s:g}.{index}"))
                               for index in range(rng.randint(1, 8))])
        now_s += 1.0
        if is_planned:
            world = replay(world, plan(world, now_s).events)
            for _ in range(2):
                world = replay(world, replies(world, now_s, rng))
            now_s += rng.choice((1.0, 30.0, 100.0))
    return world, now_s


@settings(max_examples=150, deadline=None)
@given(st.integers(min_value=0))
def test_P58_a_pass_decides_the_same_without_those_that_are_set_aside(seed: int) -> None:
    """So whoever stands behind none but them is placed in the same tick as if it stood first."""
    world, now_s = a_busy_world(seed)
    passed = survey(world, now_s)
    aside = [job for job, verdict in passed.verdicts.items() if verdict.code in SET_ASIDE]
    others = replay(world, [JobCancelled(at_s=now_s, job=job) for job in aside])
    assert others.jobs.keys() == world.jobs.keys() - set(aside)
    assert survey(others, now_s).events == passed.events
    assert survey(others, now_s).reservations == passed.reservations
