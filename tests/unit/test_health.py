"""The health machine, case by case, in virtual time. Cases P30 to P41 are failures that other routers had."""

from collections.abc import Iterable

import pytest

from backends.catalog.health import (
    Health,
    HealthRules,
    HealthState,
    Outcome,
    OutcomeKind,
    Probe,
    hold_last_healthy,
    step_health,
)

RULES = HealthRules()
GOOD, BAD = Probe(ok=True), Probe(ok=False, detail="GET /health answered 503")
LATE, REFUSED = Probe(ok=False, slow=True), Probe(ok=False, detail="connection refused")
SUCCESS, SERVER_ERROR, TIMEOUT, CONNECT_ERROR, RESET = (
    Outcome(kind) for kind in (OutcomeKind.SUCCESS, OutcomeKind.SERVER_ERROR, OutcomeKind.TIMEOUT,
                               OutcomeKind.CONNECT_ERROR, OutcomeKind.RESET)
)


def after(events: Iterable[Probe | Outcome], start: Health | None = None, at_s: float = 0.0,
          rules: HealthRules = RULES) -> Health:
    """The health after events that come at one instant."""
    health = start or Health(HealthState.HEALTHY)
    for event in events:
        health = step_health(health, event, at_s, rules)
    return health


def ejected(at_s: float = 0.0, by: Outcome = SERVER_ERROR) -> Health:
    return after([by] * 5, at_s=at_s)


class Fleet:
    """Backends of one model, stepped as the router steps them: machine first, then the floor."""

    def __init__(self, *names: str, rules: HealthRules = RULES) -> None:
        self.rules = rules
        self.health = {name: Health(HealthState.HEALTHY) for name in names}

    def tell(self, name: str, event: Probe | Outcome, now: float) -> None:
        stepped = step_health(self.health[name], event, now, self.rules)
        self.health[name] = hold_last_healthy(self.health, name, stepped, self.rules)

    def accepting(self, now: float) -> set[str]:
        return {name for name, health in self.health.items() if health.accepts(0, now)}


def test_a_backend_that_was_never_heard_takes_requests() -> None:
    assert Health().accepts(1000, 0.0)
    assert Health().ramp(0.0) == 1.0
    assert after([GOOD], Health()).state is HealthState.HEALTHY
    assert after([SUCCESS], Health()).state is HealthState.HEALTHY


def test_a_backend_that_was_never_heard_is_out_at_its_first_refused_probe_but_not_at_a_late_one() -> None:
    assert after([REFUSED], Health()).state is HealthState.UNHEALTHY
    assert after([LATE] * 2, Health()).state is HealthState.UNKNOWN


@pytest.mark.parametrize("kind", [
    OutcomeKind.CLIENT_ERROR, OutcomeKind.CLIENT_GONE, OutcomeKind.OVERLOADED, OutcomeKind.SUPERSEDED])
def test_P30_client_errors_and_429_leave_health_as_it_is(kind: OutcomeKind) -> None:
    for start in (Health(), Health(HealthState.HEALTHY), ejected(), ejected().at(100.0)):
        assert after([Outcome(kind)] * 200, start, at_s=start.since_s) == start


def test_P30_a_client_error_does_not_break_a_streak_of_failures() -> None:
    mixed: list[Probe | Outcome] = [SERVER_ERROR, Outcome(OutcomeKind.CLIENT_ERROR)] * 5
    assert after(mixed).state is HealthState.EJECTED


@pytest.mark.parametrize("kind", [OutcomeKind.CONNECT_ERROR, OutcomeKind.RESET, OutcomeKind.TIMEOUT])
def test_P31_a_silent_host_is_out_after_3_failures(kind: OutcomeKind) -> None:
    assert after([Outcome(kind)] * 2).state is HealthState.HEALTHY
    assert after([Outcome(kind)] * 3).state is HealthState.EJECTED


@pytest.mark.parametrize("kind", [OutcomeKind.SERVER_ERROR, OutcomeKind.TRUNCATED])
def test_P31_a_failing_host_is_out_after_5_failures_in_a_row(kind: OutcomeKind) -> None:
    failure = Outcome(kind)
    assert after([failure] * 4).state is HealthState.HEALTHY
    assert after([failure] * 4 + [SUCCESS] + [failure] * 4).state is HealthState.HEALTHY
    assert after([failure] * 5).state is HealthState.EJECTED


def test_P31_the_dead_one_of_three_is_out_and_the_others_serve() -> None:
    fleet = Fleet("a", "b", "c")
    for _ in range(3):
        fleet.tell("a", CONNECT_ERROR, 1.0)
    assert fleet.accepting(1.0) == {"b", "c"}


def test_P34_half_open_admits_one_trial_at_a_time() -> None:
    health = ejected()
    assert not health.accepts(0, 4.9)
    assert health.accepts(0, 5.0)
    assert not health.accepts(1, 5.0)
    three = after([SERVER_ERROR] * 5, rules=HealthRules(trial_requests=3))
    assert three.accepts(2, 5.0)
    assert not three.accepts(3, 5.0)


def test_P34_a_failed_trial_doubles_the_ejection_up_to_the_maximum() -> None:
    health, now, lasted = ejected(), 0.0, []
    for _ in range(7):
        lasted.append(health.until_s - now)
        now = health.until_s
        health = step_health(health, SERVER_ERROR, now, RULES)
        assert health.state is HealthState.EJECTED
    assert lasted == [5, 10, 20, 40, 60, 60, 60]


def test_P34_good_trials_lead_to_a_slow_start_that_ends_healthy() -> None:
    health = after([SUCCESS], ejected(), at_s=5.0)
    assert health.state is HealthState.HALF_OPEN
    health = after([SUCCESS], health, at_s=6.0)
    assert health.state is HealthState.SLOW_START
    assert [health.ramp(6.0 + passed_s) for passed_s in (0.0, 0.5, 5.0, 9.9, 10.0, 60.0)] == pytest.approx(
        [0.1, 0.1, 0.5, 0.99, 1.0, 1.0])
    assert health.at(16.0).state is HealthState.HEALTHY
    assert health.accepts(50, 6.0)


def test_P34_no_trial_request_goes_to_a_backend_whose_probes_still_find_it_hung() -> None:
    health = after([LATE] * 3, ejected(by=TIMEOUT), at_s=1.0)
    assert health.state is HealthState.EJECTED
    assert not health.accepts(0, 5.0)
    assert health.at(5.0).state is HealthState.UNHEALTHY
    back = after([GOOD] * 2, health, at_s=9.0)
    assert back.state is HealthState.HALF_OPEN


def test_P36a_a_frozen_scheduler_with_a_good_health_page_is_ejected_and_stays_out() -> None:
    events: list[Probe | Outcome] = [GOOD, TIMEOUT, GOOD, TIMEOUT, GOOD, TIMEOUT, GOOD, GOOD, GOOD]
    health = after(events)
    assert health.state is HealthState.EJECTED
    assert not health.accepts(0, 4.0)


def test_P36b_late_probes_of_a_backend_that_answers_its_requests_keep_it_in() -> None:
    health = Health(HealthState.HEALTHY)
    for second in range(300):
        if second % 5 == 0:
            health = step_health(health, SUCCESS, float(second), RULES)
        health = step_health(health, LATE, float(second), RULES)
        assert health.state is HealthState.HEALTHY


def test_P36b_late_probes_take_a_backend_out_once_its_requests_fail_too() -> None:
    health = after([SUCCESS, RESET, LATE, LATE, LATE])
    assert health.state is HealthState.UNHEALTHY


def test_P36b_late_probes_take_a_backend_out_when_it_serves_nothing() -> None:
    assert after([LATE] * 3).state is HealthState.UNHEALTHY


def test_P36c_probes_that_alternate_change_the_state_at_most_once_a_minute() -> None:
    for bad in (BAD, LATE, REFUSED):
        health, changes = Health(), 0
        for second in range(600):
            state = health.at(second).state
            health = step_health(health, bad if second % 2 else GOOD, float(second), RULES)
            changes += health.state is not state
        assert changes <= 10


def test_P37_four_saturated_backends_that_miss_probes_keep_half_of_them_in() -> None:
    fleet = Fleet("a", "b", "c", "d")
    for second in range(60):
        for name in fleet.health:
            fleet.tell(name, LATE, float(second))
        assert len(fleet.accepting(float(second))) >= 2
    held = [health for health in fleet.health.values() if health.held]
    assert len(held) == 2
    assert all(health.ramp(60.0) == RULES.slow_start_floor for health in held)
    assert all("held in service though probes are late" in health.describe() for health in held)


def test_P37_requests_that_time_out_under_overload_keep_half_of_them_in() -> None:
    fleet = Fleet("a", "b", "c", "d")
    for second in range(20):
        for name in fleet.health:
            fleet.tell(name, TIMEOUT, second / 10)
    assert len(fleet.accepting(2.0)) == 2


def test_P37_a_held_backend_is_as_good_as_any_after_one_success() -> None:
    fleet = Fleet("only")
    for _ in range(9):
        fleet.tell("only", LATE, 0.0)
    assert fleet.health["only"].held
    fleet.tell("only", SUCCESS, 1.0)
    assert not fleet.health["only"].held
    assert fleet.health["only"].ramp(1.0) == 1.0
    assert fleet.health["only"].describe() == "healthy"


def test_P37_a_held_backend_goes_as_soon_as_another_is_back() -> None:
    fleet = Fleet("a", "b")
    for _ in range(3):
        fleet.tell("a", REFUSED, 0.0)
    for _ in range(6):
        fleet.tell("b", SERVER_ERROR, 0.0)
    assert fleet.accepting(0.0) == {"b"}
    for _ in range(2):
        fleet.tell("a", GOOD, 1.0)
    fleet.tell("b", SERVER_ERROR, 1.5)
    assert fleet.accepting(1.5) == {"a"}


def test_the_last_backend_stays_though_its_requests_fail() -> None:
    fleet = Fleet("a", "b", "c")
    for name in ("a", "b", "c"):
        for _ in range(10):
            fleet.tell(name, SERVER_ERROR, 0.0)
    assert fleet.accepting(0.0) == {"c"}


def test_the_last_backend_goes_when_it_refuses_connections() -> None:
    for event in (CONNECT_ERROR, REFUSED):
        fleet = Fleet("only")
        for _ in range(3):
            fleet.tell("only", event, 0.0)
        assert fleet.accepting(0.0) == set()


def test_the_floor_leaves_a_backend_alone_that_was_out_already() -> None:
    fleet = Fleet("a", "b")
    fleet.health["b"] = ejected().at(5.0)
    assert fleet.accepting(5.0) == {"a", "b"}
    fleet.tell("b", SERVER_ERROR, 5.0)
    assert fleet.accepting(5.0) == {"a"}


def test_one_healthy_backend_is_enough_for_the_others_to_go_on_errors() -> None:
    fleet = Fleet("a", "b", "c", "d")
    for name in ("a", "b", "c"):
        for _ in range(5):
            fleet.tell(name, SERVER_ERROR, 0.0)
    assert fleet.accepting(0.0) == {"d"}


def test_failed_probes_take_a_backend_out_and_two_good_ones_bring_it_back_slowly() -> None:
    assert after([BAD] * 2).state is HealthState.HEALTHY
    out = after([BAD] * 3)
    assert out.state is HealthState.UNHEALTHY
    assert out.describe() == "unhealthy: probes fail (GET /health answered 503)"
    assert not out.accepts(0, 1e9)
    assert after([GOOD], out).state is HealthState.UNHEALTHY
    back = after([GOOD] * 2, out, at_s=10.0)
    assert back.state is HealthState.SLOW_START
    assert back.describe() == "slow start, was out: probes fail (GET /health answered 503)"
    assert back.ramp(15.0) == pytest.approx(0.5)


def test_a_restarted_engine_is_tried_at_its_first_good_probe_but_only_the_first_time() -> None:
    out = ejected(by=CONNECT_ERROR)
    assert after([GOOD], out, at_s=1.0).accepts(0, 1.0)
    again = after([CONNECT_ERROR], after([GOOD], out, at_s=1.0), at_s=1.1)
    assert again.ejections == 2
    assert not after([GOOD], again, at_s=2.0).accepts(0, 2.0)


def test_stragglers_of_an_ejected_backend_do_not_lengthen_its_ejection() -> None:
    out = ejected()
    assert after([RESET] * 50, out, at_s=2.0).until_s == out.until_s


def test_a_backend_that_fails_every_other_request_is_ejected_by_ratio() -> None:
    health, now = Health(HealthState.HEALTHY), 0.0
    for turn in range(60):
        health = step_health(health, SUCCESS if turn % 2 else SERVER_ERROR, now, RULES)
        now += 0.1
        if health.state is HealthState.EJECTED:
            break
    assert health.state is HealthState.EJECTED
    assert turn >= RULES.failure_ratio_min_requests - 1
    off = HealthRules(failure_ratio_to_eject=None)
    assert after([SERVER_ERROR, SUCCESS] * 500, rules=off).state is HealthState.HEALTHY


def test_a_ratio_below_the_threshold_does_not_eject() -> None:
    assert after([SERVER_ERROR, SUCCESS, SUCCESS] * 200).state is HealthState.HEALTHY


def test_old_failures_leave_the_window() -> None:
    sparse = HealthRules(failures_to_eject=1000)
    health = after([SERVER_ERROR] * 19, rules=sparse)
    assert after([SERVER_ERROR], health, at_s=300.0, rules=sparse).state is HealthState.HEALTHY
    assert after([SERVER_ERROR], health, at_s=0.0, rules=sparse).state is HealthState.EJECTED


def test_a_long_good_time_forgives_earlier_ejections() -> None:
    health = after([SUCCESS] * 2, ejected(), at_s=5.0)
    assert health.at(16.0).ejections == 1
    assert health.at(15.0 + RULES.forgive_after_s).ejections == 0


def test_rules_may_change_between_steps() -> None:
    strict = HealthRules(failures_to_eject=1, trial_requests=2)
    health = after([SERVER_ERROR], rules=strict)
    assert health.state is HealthState.EJECTED
    assert health.accepts(1, 5.0)
