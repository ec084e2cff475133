"""When a request is hedged, and to whom: the rule by example."""

from dataclasses import replace
from typing import Any

import pytest

from backends.catalog.health import Health, HealthState
from backends.catalog.sample import LoadSample
from backends.catalog.views import BackendView
from policies.beliefs.tails import PRIOR, quantile
from policies.facts import Budget, RequestFacts
from policies.hedging import (
    SLACK,
    First,
    Hedge,
    HedgeRules,
    Never,
    Wait,
    Withheld,
    awaited_of,
    first_of,
    has_room,
    hedge,
    promised_s,
)
from policies.policy import Priced
from tests.beliefs import a_pool, believing
from tests.policy_fleet import NOW_S, a_backend, a_request

RULES = HedgeRules()
STREAM = a_request(stream=True, budget=Budget(ttft_s=1.0))


def sent(facts: RequestFacts = STREAM, backend: BackendView | None = None, left_s: float = 1.0) -> First:
    first = first_of(RULES, facts, backend or a_backend("a"), left_s, NOW_S)
    assert first is not None
    return first


def priced(backend: BackendView, price: float = 1.0) -> Priced:
    return Priced(backend, price)


def p99_s(backend: BackendView, facts: RequestFacts = STREAM) -> float:
    awaited = awaited_of(facts, backend, NOW_S)
    assert awaited is not None
    return awaited.within_s(0.99)


def asked(elapsed_s: float, *others: Priced, first: First | None = None, facts: RequestFacts = STREAM) -> Any:
    return hedge(facts, first or sent(), elapsed_s, others, NOW_S)


def test_a_stream_is_held_against_its_first_token_and_a_whole_answer_against_its_end() -> None:
    budget = Budget(ttft_s=1.0, inter_token_s=0.1, e2e_s=9.0)
    assert promised_s(a_request(stream=True, budget=budget)) == 1.0
    assert promised_s(a_request(stream=False, budget=budget)) == 9.0
    assert promised_s(a_request(stream=True, budget=Budget(e2e_s=9.0))) is None
    whole = awaited_of(a_request(budget=budget), a_backend("a"), NOW_S)
    token = awaited_of(a_request(stream=True, budget=budget), a_backend("a"), NOW_S)
    assert whole is not None
    assert token is not None
    assert whole.mean_s > token.mean_s


def test_it_is_looked_at_once_it_is_later_than_99_in_100() -> None:
    backend = a_backend("a")
    awaited = awaited_of(STREAM, backend, NOW_S)
    assert awaited is not None
    assert sent().look_after_s == pytest.approx(awaited.mean_s + quantile(PRIOR, 0.99) * awaited.sd_s)
    sooner = first_of(HedgeRules(after=0.9), STREAM, backend, 1.0, NOW_S)
    assert sooner is not None
    assert sooner.look_after_s < sent().look_after_s


def test_one_that_is_sent_where_it_will_be_late_is_looked_at_at_once() -> None:
    slow = a_backend("a", in_flight_requests=40, in_flight_prefill_requests=40, in_flight_prefill_tokens=40_000)
    first = sent(backend=slow)
    assert first.awaited.miss(first.budget_s, 0.0) > 0.5
    assert first.look_after_s == 0.0


def test_no_look_where_the_budget_is_over_before_it_could_be_late() -> None:
    assert first_of(RULES, STREAM, a_backend("a"), sent().late_s * 0.99, NOW_S) is None
    assert first_of(RULES, STREAM, a_backend("a"), 0.0, NOW_S) is None
    assert first_of(RULES, STREAM, a_backend("a"), -1.0, NOW_S) is None


def test_only_the_classes_that_are_named() -> None:
    rules = HedgeRules(classes=frozenset({"chat"}))
    assert first_of(rules, STREAM, a_backend("a"), 1.0, NOW_S) is None
    assert first_of(rules, replace(STREAM, latency_class="chat"), a_backend("a"), 1.0, NOW_S) is not None


def test_it_waits_as_long_as_the_second_can_still_be_in_time() -> None:
    other = a_backend("b")
    due_s = 1.0 - SLACK * p99_s(other)
    assert sent().late_s < due_s
    assert asked(sent().late_s, priced(other)) == Wait(due_s)
    assert asked(due_s, priced(other)) == Hedge(priced(other))
    assert asked(1.0 - p99_s(other), priced(other)) == Hedge(priced(other))
    assert asked(1.001 - p99_s(other), priced(other)) == Never(Withheld.TOO_LATE)


def test_a_tight_budget_is_hedged_when_the_first_is_late_and_not_before() -> None:
    facts, other = replace(STREAM, budget=Budget(ttft_s=0.24)), a_backend("b", drift=0.5)
    first = sent(facts, left_s=0.24)
    assert 0.24 - SLACK * p99_s(other, facts) < first.late_s < 0.24 - p99_s(other, facts)
    assert asked(0.01, priced(other), first=first, facts=facts) == Wait(first.late_s)
    assert asked(first.late_s, priced(other), first=first, facts=facts) == Hedge(priced(other))


def test_where_the_first_will_likely_miss_nobody_waits_for_it_to_be_late() -> None:
    slow = a_backend("a", in_flight_requests=40, in_flight_prefill_requests=40, in_flight_prefill_tokens=40_000)
    facts, other = replace(STREAM, budget=Budget(ttft_s=0.3)), a_backend("b")
    first, due_s = sent(facts, slow, left_s=0.3), 0.3 - SLACK * p99_s(other, facts)
    assert 0.0 < due_s < first.late_s
    assert asked(0.0, priced(other), first=first, facts=facts) == Wait(due_s)
    assert asked(due_s, priced(other), first=first, facts=facts) == Hedge(priced(other))


def test_the_cheapest_that_is_in_time() -> None:
    cheap, dear, late = a_backend("b"), a_backend("c"), a_backend("d", drift=20.0)
    candidates = [priced(dear, 3.0), priced(late, 1.0), priced(a_backend("a"), 0.5), priced(cheap, 2.0)]
    assert asked(0.8, *candidates) == Hedge(priced(cheap, 2.0))
    quick = a_backend("e", drift=0.9)
    assert asked(0.82, priced(cheap), priced(quick)) == Hedge(priced(quick))  # of equal price the quicker


def test_never_to_the_backend_that_is_silent() -> None:
    assert asked(0.8, priced(a_backend("a"))) == Never(Withheld.NO_OTHER)
    assert asked(0.8) == Never(Withheld.NO_OTHER)


FULL: dict[str, Any] = {"slots": 4, "in_flight_requests": 4, "in_flight_decode_requests": 4}


def test_never_to_one_without_room() -> None:
    queueing = LoadSample(taken_at_s=NOW_S, running_requests=4, waiting_requests=1)
    assert has_room(a_backend("b", slots=5, in_flight_requests=4), NOW_S)
    assert not has_room(a_backend("b", **FULL), NOW_S)
    assert not has_room(a_backend("b", sample=queueing), NOW_S)
    assert has_room(a_backend("b", sample=replace(queueing, taken_at_s=NOW_S - 60.0)), NOW_S)
    assert not has_room(a_backend("b", health=Health(HealthState.HALF_OPEN)), NOW_S)
    dear = a_backend("c")
    assert asked(0.8, priced(a_backend("b", sample=queueing), 1.0), priced(dear, 9.0)) == Hedge(priced(dear, 9.0))
    assert asked(0.5, priced(a_backend("b", sample=queueing))).why in (Withheld.OVERLOADED, Withheld.TOO_LATE)


def test_nobody_hedges_on_predictions_that_do_not_fit() -> None:
    pool = a_pool()
    lost = believing(a_backend("a"), pool)
    for _ in range(60):
        lost.belief.ttft.observe(14.0)
    lost.belief.ttft.refresh()
    assert lost.belief.lost(NOW_S)
    assert first_of(RULES, STREAM, lost, 1.0, NOW_S) is None
    assert asked(0.8, priced(replace(lost, spec=a_backend("b").spec))) == Never(Withheld.TOO_LATE)


def test_a_tail_that_is_known_to_be_long_is_waited_for() -> None:
    """Where one in fifty stalls as a rule, that is no longer later than nearly all."""
    pool = a_pool()
    known = believing(a_backend("a"), pool)
    for turn in range(400):
        known.belief.ttft.observe(10.0 if turn % 50 == 0 else 0.0)
    known.belief.ttft.refresh()
    first = first_of(RULES, STREAM, known, 5.0, NOW_S)
    assert first is not None
    assert first.late_s > sent().late_s
