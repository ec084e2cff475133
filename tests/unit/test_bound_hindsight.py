"""Replays and the local search over assignments."""

from dataclasses import replace

import pytest

from loadtest.sim.bound.clairvoyant import Clairvoyant
from loadtest.sim.bound.hindsight import AWAY, HindsightPoint, paced_assignment, search
from loadtest.sim.bound.instance import BadInstance, SpeedSpan, accounted_cost
from loadtest.sim.bound.replay import StepDice, replay, takes
from tests.bound_instances import FAST, SLOW, crippled, request, trace

LAME = (crippled(FAST, 3.0), crippled(SLOW, 2.0))


def test_an_idle_card_keeps_the_budget_that_its_coefficients_say() -> None:
    given = request(prompt=1000, output=11, ttft_s=0.056 + 1e-9, tpot_s=0.0)
    decode_s = sum(8.0 + 0.06 + 1e-4 * (1000 + k) for k in range(1, 11)) / 1000
    enough = replace(given, tpot_budget_s=decode_s / 10 + 1e-9)
    short = replace(given, tpot_budget_s=decode_s / 10 - 1e-6)
    assert replay(FAST, [(0, enough)]) == {0}
    assert replay(FAST, [(0, short)]) == set()
    assert replay(FAST, [(0, replace(enough, ttft_budget_s=0.0559))]) == set()


def test_death_takes_what_is_open_and_a_closed_card_takes_nothing() -> None:
    requests = list(enumerate([request(0.0), request(1.0), request(3.0), request(5.0)]))
    assert replay(FAST, requests) == {0, 1, 2, 3}
    dying = replace(FAST, spans=(SpeedSpan(1.1, 4.0, 0.0),))
    assert replay(dying, requests) == {0, 3}
    lent = replace(FAST, closed=((0.5, 2.0),))
    assert [takes(lent, given) for _, given in requests] == [True, False, True, True]
    assert replay(lent, requests) == {0, 2, 3}
    assert not takes(FAST, request(prompt=100_000))


def test_slowness_and_noise_reach_the_steps() -> None:
    requests = list(enumerate([request(0.0, ttft_s=0.3, tpot_s=0.012)]))
    assert replay(FAST, requests) == {0}
    assert replay(replace(FAST, spans=(SpeedSpan(0.0, 9.0, 0.3),)), requests) == set()
    assert replay(FAST, requests, StepDice(hiccup_share=1.0)) == set()
    many = list(enumerate(trace(2, 10.0, 30.0)))
    dice = StepDice(0.3, 0.02, seed=5)
    assert replay(FAST, many, dice) == replay(FAST, many, dice) != replay(FAST, many, replace(dice, seed=6))


def test_the_search_improves_repeats_itself_and_stays_above_the_bound() -> None:
    requests = trace(1, 6.0, 60.0)
    start = paced_assignment(requests, LAME)
    heard: list[HindsightPoint] = []
    first = search(requests, LAME, start, evaluations=1)
    found = search(requests, LAME, start, evaluations=60, progress=heard.append)
    assert found.value > first.value
    assert found.good_requests > first.good_requests
    assert found.evaluations <= 61
    assert [point.value for point in heard] == sorted({point.value for point in heard})
    assert search(requests, LAME, start, evaluations=60) == found
    assert search(requests, LAME, start, evaluations=60, seed=1) != found
    bounds = Clairvoyant(requests, LAME)
    assert found.good_requests <= bounds.most_good()
    assert bounds.least_cost(found.good_requests) <= found.cost

    # What it says of its assignment is what a replay of that assignment shows.
    again = [set(replay(spec, [(i, given) for i, given in enumerate(requests) if found.assignment[i] == at]))
             for at, spec in enumerate(LAME)]
    assert sum(map(len, again)) == found.good_requests
    assert found.cost == pytest.approx(sum(
        accounted_cost(LAME[at], given) for at, given in zip(found.assignment, requests, strict=True) if at != AWAY))


def test_what_cannot_be_in_time_is_turned_away() -> None:
    hopeless = request(0.0, prompt=3000, output=500, tpot_s=0.001)
    found = search([hopeless, request(1.0)], [FAST], [0, 0], evaluations=60)
    assert found.assignment == (AWAY, 0)
    assert found.good_requests == 1


def test_the_warm_up_takes_part_and_does_not_count() -> None:
    requests = trace(3, 4.0, 40.0)
    start = paced_assignment(requests, LAME)
    whole = search(requests, LAME, start, evaluations=1)
    counted = search(requests, LAME, start, evaluations=1, counted_from_s=20.0)
    assert counted.value == whole.value
    assert 0 < counted.cost < whole.cost
    assert counted.good_requests <= sum(given.arrival_s >= 20.0 for given in requests) < len(requests)


def test_a_fair_start_spreads_over_backends_that_can_keep_the_pace() -> None:
    requests = trace(5, 8.0, 60.0)
    start = paced_assignment(requests, (FAST, SLOW))
    assert {0, 1} <= set(start)
    assert paced_assignment([request(tpot_s=0.015)], (FAST, SLOW)) == [0]
    assert paced_assignment([request(tpot_s=0.001)], (FAST, SLOW)) == [AWAY]


def test_a_start_that_does_not_fit() -> None:
    for start in ([0], [0, 2], [0, -2]):
        with pytest.raises(BadInstance, match="names a backend"):
            search([request(0.0), request(1.0)], LAME, start)
