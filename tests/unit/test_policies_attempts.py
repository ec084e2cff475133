"""When a failed attempt is followed by another."""

from dataclasses import replace

import pytest

from backends.catalog.health import Health, HealthState, Outcome, OutcomeKind, step_health
from policies.attempts import (
    RETRYABLE,
    SECOND_OPINION,
    AttemptRules,
    CourseEnd,
    Failure,
    FailureCause,
    Retry,
    RetryBudget,
    Stop,
    StopReason,
    backoff_until_s,
    next_attempt,
    poor_witnesses,
    to_blame,
)
from policies.registry import PolicySpec, build_pipeline
from tests.policy_fleet import a_backend, a_request, choose, name_of

RULES = AttemptRules()
FULL = RetryBudget()


def a_failure(cause: FailureCause = FailureCause.CONNECT, backend: str = "a", **given: object) -> Failure:
    return Failure(backend, cause, at_s=5.0, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("cause", list(FailureCause))
def test_only_causes_that_another_backend_may_not_share_are_retried(cause: FailureCause) -> None:
    found = next_attempt(RULES, a_request(), (a_failure(cause),), 5.0, FULL)
    may, elsewhere = cause in RETRYABLE | SECOND_OPINION, cause in SECOND_OPINION
    assert found == (Retry(("a",), cause, elsewhere) if may else Stop(StopReason.NOT_RETRYABLE))


def test_p33_the_request_s_own_mistakes_are_not_retried() -> None:
    final = {FailureCause.CLIENT_ERROR, FailureCause.CLIENT_GONE, FailureCause.SUPERSEDED}
    assert not final & (RETRYABLE | SECOND_OPINION)


def test_p33_a_500_is_asked_of_one_other_and_of_no_third() -> None:
    first, second = a_failure(FailureCause.STATUS_5XX_OTHER), a_failure(FailureCause.STATUS_5XX_OTHER, backend="b")
    busy = a_failure(FailureCause.STATUS_503, backend="b")
    assert isinstance(next_attempt(RULES, a_request(), (first,), 5.0, FULL), Retry)
    assert isinstance(next_attempt(RULES, a_request(), (first, busy), 5.0, FULL), Retry)
    assert next_attempt(RULES, a_request(), (first, second), 5.0, FULL) == Stop(StopReason.NOT_RETRYABLE)


def errors(*said: tuple[str, int]) -> list[Failure]:
    return [a_failure(FailureCause.STATUS_5XX_OTHER, backend=backend, status=status) for backend, status in said]


@pytest.mark.parametrize("said", [[("a", 500)], [("a", 500), ("b", 500)], [("a", 500), ("b", 503), ("c", 500)]])
def test_who_serves_a_request_puts_the_blame_on_those_that_did_not(said: list[tuple[str, int]]) -> None:
    assert to_blame(errors(*said), CourseEnd.SERVED) == errors(*said)


@pytest.mark.parametrize("said", [[("a", 500)], [("a", 500), ("b", 503)], [("a", 500), ("a", 500)]])
def test_without_two_that_agree_each_stands_for_itself(said: list[tuple[str, int]]) -> None:
    assert to_blame(errors(*said), CourseEnd.FAILED) == errors(*said)


@pytest.mark.parametrize("said", [[("a", 500), ("b", 500)], [("a", 502), ("b", 500), ("c", 502)]])
def test_two_that_agree_clear_all(said: list[tuple[str, int]]) -> None:
    assert to_blame(errors(*said), CourseEnd.FAILED) == ()


@pytest.mark.parametrize("end", [CourseEnd.REFUSED, CourseEnd.LEFT])
def test_a_request_refused_or_left_blames_nobody(end: CourseEnd) -> None:
    assert to_blame(errors(("a", 500)), end) == ()


def test_whoever_served_nothing_since_its_last_error_is_a_poor_witness() -> None:
    served = Health(HealthState.HEALTHY, last_success_s=4.0)
    excused = step_health(served, Outcome(OutcomeKind.EXCUSED), 5.0)
    assert excused == replace(served, last_success_s=None)
    views = [a_backend("a", health=served), a_backend("b", health=excused), a_backend("c", health=served)]
    assert poor_witnesses(views, a_request(), ("a",)) == ("b",)
    assert poor_witnesses(views[:2], a_request(), ("a",)) == (), "no better one is left"
    out = a_backend("c", health=Health(HealthState.EJECTED, until_s=99.0, last_success_s=4.0))
    assert poor_witnesses([*views[:2], out], a_request(), ("a",)) == (), "nor in service"
    elsewhere = replace(views[2], spec=replace(views[2].spec, model="another"))
    assert poor_witnesses([*views[:2], elsewhere], a_request(), ("a",)) == ()


def test_operators_may_retry_500() -> None:
    rules = AttemptRules(retryable=RETRYABLE | {FailureCause.STATUS_5XX_OTHER})
    assert isinstance(next_attempt(rules, a_request(), (a_failure(FailureCause.STATUS_5XX_OTHER),), 5.0, FULL), Retry)


def test_p31_each_attempt_goes_to_another_backend() -> None:
    pipeline = build_pipeline(PolicySpec())
    backends = [a_backend("a", price_per_hour=0.1), a_backend("b"), a_backend("c", price_per_hour=9.0)]
    order, failures, facts = [], (), a_request()
    while True:
        name = str(name_of(choose(pipeline, facts, *backends)))
        order.append(name)
        failures = (*failures, a_failure(backend=name))  # type: ignore[assignment]
        step = next_attempt(RULES, facts, failures, 5.0, FULL)
        if isinstance(step, Stop):
            break
        facts = a_request(tried=step.avoid)
    assert order == ["a", "b", "c"]
    assert step.reason is StopReason.MAX_ATTEMPTS


def test_nothing_is_retried_once_the_client_has_a_byte() -> None:
    failures = (a_failure(FailureCause.TRUNCATED, first_byte_sent=True),)
    assert next_attempt(RULES, a_request(), failures, 5.0, FULL) == Stop(StopReason.FIRST_BYTE_SENT)
    assert isinstance(next_attempt(RULES, a_request(), (a_failure(FailureCause.TRUNCATED),), 5.0, FULL), Retry)


def test_the_deadline_ends_it() -> None:
    failures = (a_failure(),)
    assert isinstance(next_attempt(RULES, a_request(), failures, 5.0, FULL, deadline_s=5.1), Retry)
    assert next_attempt(RULES, a_request(), failures, 5.1, FULL, deadline_s=5.1) == Stop(StopReason.DEADLINE)


def test_an_empty_retry_budget_ends_it() -> None:
    found = next_attempt(RULES, a_request(), (a_failure(),), 5.0, RetryBudget(tokens=0.9, floor_per_s=0.0))
    assert found == Stop(StopReason.RETRY_BUDGET_EMPTY)


def test_avoid_keeps_order_and_names_each_once() -> None:
    failures = (a_failure(backend="b"), a_failure(backend="a"))
    assert next_attempt(RULES, a_request(tried=("b",)), failures, 5.0, FULL) == Retry(("b", "a"), FailureCause.CONNECT)


def test_without_a_failure_there_is_nothing_to_follow() -> None:
    with pytest.raises(ValueError, match="failure that it follows"):
        next_attempt(RULES, a_request(), (), 5.0, FULL)


@pytest.mark.parametrize(("cause", "asked_s", "until_s"), [
    (FailureCause.STATUS_429, 4.0, 9.0), (FailureCause.STATUS_503, 0.0, 5.0), (FailureCause.STATUS_429, None, 6.0),
    (FailureCause.STATUS_429, 1e9, 65.0), (FailureCause.STATUS_503, -3.0, 5.0), (FailureCause.CONNECT, 4.0, None),
])
def test_p32_silence_is_kept_as_asked_within_a_minute(
    cause: FailureCause, asked_s: float | None, until_s: float | None
) -> None:
    assert backoff_until_s(a_failure(cause, retry_after_s=asked_s)) == until_s


def test_the_budget_pays_a_fifth_of_requests_and_a_floor() -> None:
    budget = RetryBudget(tokens=0.0, floor_per_s=0.0)
    for _ in range(5):
        budget = budget.deposit()
    paid = budget.withdraw(0.0)
    assert paid is not None
    assert paid.withdraw(100.0) is None
    quiet = RetryBudget(tokens=0.0, floor_per_s=10.0, at_s=0.0)
    assert quiet.available(0.1) == pytest.approx(1.0)
    assert quiet.available(1000.0) == quiet.capacity


def test_a_clock_that_steps_back_credits_nothing() -> None:
    budget = RetryBudget(tokens=1.0, at_s=100.0)
    paid = budget.withdraw(50.0)
    assert paid is not None
    assert paid.available(100.0) == pytest.approx(0.0)
