"""What holds for the health machine after any events, at any times."""

from hypothesis import given
from hypothesis import strategies as st

from backends.catalog.health import (
    IN_SERVICE,
    Health,
    HealthRules,
    HealthState,
    Outcome,
    OutcomeKind,
    Probe,
    hold_last_healthy,
    step_health,
)

EVENTS = st.one_of(
    st.builds(Probe, ok=st.booleans(), slow=st.booleans(), detail=st.text(max_size=5)),
    st.builds(Outcome, st.sampled_from(OutcomeKind)),
)
NEUTRAL = st.sampled_from((
    OutcomeKind.OVERLOADED, OutcomeKind.CLIENT_ERROR, OutcomeKind.CLIENT_GONE, OutcomeKind.SUPERSEDED,
)).map(Outcome)
PASSED_S = st.floats(0, 100)
HISTORIES = st.lists(st.tuples(PASSED_S, EVENTS), max_size=60)
RULES = st.builds(
    HealthRules,
    failures_to_eject=st.integers(1, 6), silent_failures_to_eject=st.integers(1, 4),
    failure_ratio_to_eject=st.none() | st.floats(0.1, 1), failure_ratio_min_requests=st.integers(1, 20),
    failure_window_s=st.floats(0, 60), probe_failures_to_unhealthy=st.integers(1, 4),
    probe_successes_to_healthy=st.integers(1, 4), traffic_vouches_s=st.floats(0, 30),
    base_ejection_s=st.floats(0, 10), max_ejection_s=st.floats(0, 100), forgive_after_s=st.floats(0, 200),
    trial_requests=st.integers(1, 3), trial_successes=st.integers(1, 3), slow_start_s=st.floats(0, 30),
    slow_start_floor=st.floats(0, 1), min_healthy_share=st.floats(0, 1),
)


def live(history: list[tuple[float, Probe | Outcome]], rules: HealthRules) -> tuple[Health, float]:
    health, now = Health(rules=rules), 0.0
    for passed_s, event in history:
        now += passed_s
        health = step_health(health, event, now, rules)
    return health, now


@given(HISTORIES, RULES, PASSED_S, st.integers(0, 5))
def test_any_history_leaves_a_health_that_answers(history: list[tuple[float, Probe | Outcome]], rules: HealthRules,
                                                 later_s: float, in_flight: int) -> None:
    health, now = live(history, rules)
    now += later_s
    assert 0 < health.ramp(now) <= 1
    assert health.describe()
    state = health.at(now).state
    if state in IN_SERVICE:
        assert health.accepts(in_flight, now)
    elif state is HealthState.HALF_OPEN:
        assert health.accepts(in_flight, now) == (in_flight < rules.trial_requests)
    else:
        assert not health.accepts(in_flight, now)


@given(HISTORIES, RULES, st.floats(-1e3, 1e3))
def test_a_clock_that_jumps_breaks_nothing(history: list[tuple[float, Probe | Outcome]], rules: HealthRules,
                                           jump_s: float) -> None:
    health, now = live(history, rules)
    for event in (Probe(ok=True), Outcome(OutcomeKind.RESET), Outcome(OutcomeKind.SUCCESS), Probe(ok=False)):
        health = step_health(health, event, now + jump_s, rules)
        assert 0 < health.ramp(now) <= 1


@given(HISTORIES, RULES, PASSED_S, PASSED_S)
def test_time_in_two_strides_is_time_in_one(history: list[tuple[float, Probe | Outcome]], rules: HealthRules,
                                            first_s: float, second_s: float) -> None:
    health, now = live(history, rules)
    assert health.at(now + first_s).at(now + first_s + second_s) == health.at(now + first_s + second_s)


@given(HISTORIES, RULES, PASSED_S)
def test_an_ejection_is_over_by_its_maximum(history: list[tuple[float, Probe | Outcome]], rules: HealthRules,
                                            later_s: float) -> None:
    health, now = live(history, rules)
    if health.state is HealthState.EJECTED:
        assert health.until_s <= now + rules.max_ejection_s
        assert health.at(now + rules.max_ejection_s + later_s).state is not HealthState.EJECTED


@given(HISTORIES, RULES, st.lists(NEUTRAL, max_size=20))
def test_P30_neutral_outcomes_never_move_health(history: list[tuple[float, Probe | Outcome]], rules: HealthRules,
                                                neutral: list[Outcome]) -> None:
    health, now = live(history, rules)
    after = health
    for event in neutral:
        after = step_health(after, event, now, rules)
    assert after in (health, health.at(now))


@given(HISTORIES, RULES)
def test_no_outcome_takes_out_a_backend_that_only_succeeds(history: list[tuple[float, Probe | Outcome]],
                                                          rules: HealthRules) -> None:
    succeeding = [(passed_s, Outcome(OutcomeKind.SUCCESS)) for passed_s, _ in history]
    health, _ = live(list(succeeding), rules)
    assert health.in_service


@given(HISTORIES, RULES)
def test_good_news_always_brings_a_backend_back(history: list[tuple[float, Probe | Outcome]],
                                               rules: HealthRules) -> None:
    health, now = live(history, rules)
    now += rules.max_ejection_s + 1.0
    for event in (Probe(ok=True), Outcome(OutcomeKind.SUCCESS)):
        for _ in range(4):
            health = step_health(health, event, now, rules)
    assert health.in_service


@given(st.lists(st.tuples(st.integers(0, 3), PASSED_S, EVENTS), max_size=120), RULES)
def test_P37_only_refusals_and_failed_probes_empty_a_fleet(steps: list[tuple[int, float, Probe | Outcome]],
                                                          rules: HealthRules) -> None:
    fleet = {name: Health(HealthState.HEALTHY) for name in "abcd"}
    now, needed = 0.0, 0.0
    for index, passed_s, event in steps:
        if isinstance(event, Probe) and not event.ok and not event.slow:
            continue
        if event == Outcome(OutcomeKind.CONNECT_ERROR):
            continue
        now += passed_s
        name = "abcd"[index]
        left_before = sum(health.in_service for health in fleet.values())
        after = hold_last_healthy(fleet, name, step_health(fleet[name], event, now, rules), rules)
        fleet[name] = after
        left = sum(health.in_service for health in fleet.values())
        assert left >= 1
        if isinstance(event, Probe) or event.kind is OutcomeKind.TIMEOUT:
            needed = min(float(left_before), rules.min_healthy_share * len(fleet))
            assert left >= needed
