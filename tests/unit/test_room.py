"""How soon there is room: the rate at which requests end, and when a backend is expected back."""

from math import inf

import pytest

from backends.catalog.health import HealthRules, OutcomeKind, Probe
from backends.catalog.spec import BackendSpec
from router.fleet.leases import Rate
from router.fleet.live import LATELY_UP_S, Fleet


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_rate_is_of_the_last_second_or_longer_and_unknown_before() -> None:
    clock = Clock()
    rate = Rate(clock)
    for _ in range(30):
        rate.count()
    assert rate.per_s is None
    clock.now_s += 2.0
    assert rate.per_s == 15.0
    for _ in range(5):
        rate.count()
    clock.now_s += 0.5
    assert rate.per_s == 15.0
    clock.now_s += 0.5
    assert rate.per_s == 5.0


@pytest.fixture(name="clock")
def a_clock() -> Clock:
    return Clock()


@pytest.fixture(name="fleet")
def a_fleet(clock: Clock) -> Fleet:
    fleet = Fleet(clock=clock)
    fleet.apply([BackendSpec(name, f"http://127.0.0.1/{name}", "openai", model, model, "card")
                 for name, model in (("a", "m"), ("b", "m"), ("c", "other"))],
                HealthRules(base_ejection_s=4.0, silent_failures_to_eject=1), "c0ffee")
    return fleet


def probes(fleet: Fleet, name: str, *, good: int = 0, bad: int = 0) -> None:
    for ok in (True,) * good + (False,) * bad:
        fleet.on_probe(name, Probe(ok))


def test_a_backend_that_was_never_up_is_not_expected_and_others_models_do_not_count(fleet: Fleet, clock: Clock) -> None:
    assert fleet.expected_back_s("m", clock()) is None, "nobody has looked yet"
    for name in ("a", "b"):
        probes(fleet, name, bad=3)
    probes(fleet, "c", good=2)
    assert fleet.expected_back_s("m", clock()) == inf
    assert fleet.expected_back_s("other", clock()) is None
    assert fleet.expected_back_s("unknown", clock()) == inf


def test_one_that_was_up_lately_may_come_back_at_any_time(fleet: Fleet, clock: Clock) -> None:
    probes(fleet, "a", good=2, bad=3)
    probes(fleet, "b", bad=3)
    assert fleet.expected_back_s("m", clock()) is None
    clock.now_s += LATELY_UP_S
    assert fleet.expected_back_s("m", clock()) == inf


def test_an_ejection_says_when_it_ends_unless_the_backend_drains(fleet: Fleet, clock: Clock) -> None:
    probes(fleet, "b", bad=3)
    live = fleet.backends["a"]
    probes(fleet, "a", good=2)
    fleet.on_outcome(live, OutcomeKind.CONNECT_ERROR)
    assert fleet.expected_back_s("m", clock()) == pytest.approx(4.0)
    clock.now_s += 1.5
    assert fleet.expected_back_s("m", clock()) == pytest.approx(2.5)
    live.drained_by_hand = True
    assert fleet.expected_back_s("m", clock()) == inf


def test_every_change_of_state_is_told(fleet: Fleet) -> None:
    told: list[int] = []
    fleet.on_change = lambda: told.append(1)
    probes(fleet, "a", good=2)
    assert len(told) == 1
    probes(fleet, "a", bad=3)
    assert len(told) == 2
