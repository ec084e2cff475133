"""Predicted times of jobs that say nothing about their length."""

from hypothesis import given
from hypothesis import strategies as st

from allocator.estimate import duration_s
from allocator.model.jobs import JobState
from allocator.model.world import World, new_world
from allocator.units.load import shipped
from tests.allocator_worlds import a_config, a_job

CARDS = ("v100", "p100", "k80")


def a_world() -> World:
    return new_world(a_config(default_estimate_s=3600.0), shipped())


@given(st.sampled_from(sorted(shipped().speeds)))
def test_without_an_estimate_cards_still_differ_as_they_were_measured(family: str) -> None:
    world, table = a_world(), shipped()
    state = JobState(a_job("j", family=family, cards=CARDS, work_unit_s=None))
    times_s = {card: duration_s(world, state, card, 1) for card in CARDS}
    speeds = {card: table.speed(card, family, 1) for card in CARDS}
    fastest = max(CARDS, key=lambda card: speeds[card])
    assert times_s[fastest] == 3600.0
    for card in CARDS:
        assert abs(times_s[card] * speeds[card] - times_s[fastest] * speeds[fastest]) < 1e-6 * times_s[card]


def test_only_the_cards_that_a_job_allows_are_its_measure() -> None:
    state = JobState(a_job("j", family="CycleGAN", cards=("k80",), work_unit_s=None))
    assert duration_s(a_world(), state, "k80", 1) == 3600.0
