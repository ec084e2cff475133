"""What befalls cards in the simulated world: death, slowness, loans; and who notices."""

from collections import Counter

import pytest

from backends.catalog.health import HealthState
from loadtest.sim.flight import Fate
from loadtest.sim.measures import measure
from loadtest.sim.run import Job, lay_out, run_world
from loadtest.sim.workload import EventKind
from loadtest.sim.world import World

A100 = 1


def ran(scenario: str, policy: str = "headrace", seconds: float = 120.0, rate_per_s: float = 5.0) -> World:
    return run_world(Job(scenario, "site", policy, 2, rate_per_s, seconds))


def test_a_death_costs_only_streams_that_had_begun() -> None:
    world = ran("dies", "round_robin")
    died_s = 0.4 * 120.0
    lost = [outcome for outcome in world.outcomes if outcome.fate is Fate.LOST]
    retried = [outcome for outcome in world.outcomes if outcome.attempts > 1 and outcome.fate is Fate.SERVED]
    assert lost
    assert retried
    for outcome in lost:
        assert outcome.first_token_at_s is not None
        assert outcome.first_token_at_s <= died_s
        assert outcome.end_s == pytest.approx(died_s, abs=0.01)
        assert outcome.cost > 0, "what a lost stream had taken is paid for"
    assert all(outcome.backend != A100 or outcome.end_s > 0.65 * 120.0 for outcome in retried)


def test_a_dead_backend_is_avoided_and_comes_back_to_work() -> None:
    world = ran("dies", "round_robin")
    on_it = [outcome.end_s for outcome in world.outcomes
             if outcome.backend == A100 and outcome.fate is Fate.SERVED]
    assert not [end_s for end_s in on_it if 0.4 * 120 < end_s < 0.65 * 120]
    assert [end_s for end_s in on_it if end_s > 0.65 * 120]
    assert world.gateways[0].links[A100].health.state is HealthState.HEALTHY


def test_a_lent_card_gets_nothing_until_it_is_recalled() -> None:
    world = ran("card-lent", "round_robin")
    lent_s, back_s = 0.2 * 120, 0.55 * 120 + 0.05 * 120
    served = [outcome for outcome in world.outcomes if outcome.fate is Fate.SERVED]
    assert len(served) == len(world.outcomes), "a loan loses nothing"
    for card in (2, 3):
        sent = [outcome.request.arrival_s for outcome in served if outcome.backend == card]
        assert not [at_s for at_s in sent if lent_s < at_s < back_s]
        assert [at_s for at_s in sent if at_s < lent_s]
        assert [at_s for at_s in sent if at_s > back_s]


def test_a_silent_slowdown_is_noticed_and_left() -> None:
    world = ran("degrades-silently", seconds=200.0)
    from_s, to_s = 0.4 * 200, 0.7 * 200
    assert world.watch.detected_after_s is not None
    assert 0.0 <= world.watch.detected_after_s <= 5.0
    found = measure(world)
    assert found.detection_s == world.watch.detected_after_s

    def share(low_s: float, high_s: float) -> float:
        counts = Counter(outcome.backend for outcome in world.outcomes if low_s <= outcome.request.arrival_s < high_s)
        return counts[A100] / counts.total()

    assert share(from_s + 10, to_s) < 0.7 * share(30.0, from_s)
    assert world.gateways[0].links[A100].health.state is HealthState.HEALTHY, "its health checks stay green"


def test_a_slowdown_slows_the_engine_by_its_factor() -> None:
    world = ran("degrades-silently", "round_robin", seconds=200.0, rate_per_s=1.0)
    gaps: dict[bool, list[float]] = {False: [], True: []}
    for outcome in world.outcomes:
        request = outcome.request
        if outcome.backend == A100 and request.output_tokens > 20:
            assert outcome.first_token_at_s is not None
            slow = outcome.first_token_at_s >= 80.0 and outcome.end_s < 140.0
            if slow or outcome.end_s < 80.0:
                gaps[slow].append((outcome.end_s - outcome.first_token_at_s) / (request.output_tokens - 1))
    assert min(gaps[True]) / min(gaps[False]) == pytest.approx(2.5, rel=0.2)


def test_gateways_do_not_see_each_other_at_once() -> None:
    world = ran("several-gateways", "least_inflight", seconds=60.0)
    assert len(world.gateways) == 4
    decisions = [gateway.decisions for gateway in world.gateways]
    assert min(decisions) > 0
    assert sum(decisions) == len(lay_out(Job("several-gateways", "site", "least_inflight", 2, 5.0, 60.0)).requests)
    assert {link.peers for gateway in world.gateways for link in gateway.links} != {(0, 0, 0, 0)}


def test_events_are_shares_of_the_length() -> None:
    for seconds in (100.0, 400.0):
        events = lay_out(Job("dies", "site", "p2c", 1, 5.0, seconds)).events
        assert [(event.kind, event.at_s / seconds) for event in events] == [
            (EventKind.DIE, 0.4), (EventKind.RETURN, 0.65)]
