"""Admission, whatever comes and goes: bounds hold, floors are honoured, and no room is kept that nobody reserved."""

import math
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from policies.admission import (
    AdmissionRules,
    Admitted,
    ClassRules,
    Queued,
    Refusal,
    Refused,
    Waiting,
    admit,
    enter_queue,
    leaving_order,
)
from policies.facts import Budget, RequestFacts

NAMES = ("a", "b", "c", "d")


@st.composite
def admission_rules(draw: st.DrawFn) -> AdmissionRules:
    parts = draw(st.lists(st.integers(0, 10), min_size=len(NAMES) + 1, max_size=len(NAMES) + 1))
    whole = sum(parts) or 1
    classes = {name: ClassRules(part / whole, draw(st.none() | st.integers(0, 4)))
               for name, part in zip(NAMES, parts, strict=False)}
    return AdmissionRules(draw(st.integers(1, 50)), draw(st.integers(0, 6)), classes)


comings_and_goings = st.lists(st.tuples(st.booleans(), st.sampled_from((*NAMES, "unheard-of"))), max_size=200)


@given(admission_rules(), comings_and_goings)
def test_bounds_hold_floors_are_honoured_and_no_other_room_is_kept(
    rules: AdmissionRules, steps: list[tuple[bool, str]]
) -> None:
    in_flight: Counter[str] = Counter()
    for comes, name in steps:
        if not comes:
            in_flight[name] -= in_flight[name] > 0
            continue
        free = rules.max_in_flight - in_flight.total()
        kept = {other: max(0, floor - in_flight[other]) for other, floor in rules.floors.items()}
        assert free >= sum(kept.values())  # what is reserved is there, however one came here
        match admit(rules, in_flight, name):
            case Admitted(within_floor):
                assert within_floor == (in_flight[name] < rules.floors.get(name, 0))
                in_flight[name] += 1
                assert in_flight.total() <= rules.max_in_flight
            case Refused(reason):
                assert kept.get(name, 0) == 0
                assert free == sum(kept.values())  # work-conserving: all that is free is reserved, and for others
                assert reason is (Refusal.RESERVED if free else Refusal.FULL)


@given(admission_rules(), comings_and_goings, st.sampled_from(NAMES))
def test_no_class_is_starved_of_what_it_has_reserved(
    rules: AdmissionRules, steps: list[tuple[bool, str]], name: str
) -> None:
    in_flight: Counter[str] = Counter()
    for _, other in steps:  # the others take all they can
        if other != name and isinstance(admit(rules, in_flight, other), Admitted):
            in_flight[other] += 1
    for _ in range(rules.floors.get(name, 0)):
        assert isinstance(admit(rules, in_flight, name), Admitted)
        in_flight[name] += 1


@given(admission_rules(), comings_and_goings, st.sampled_from(NAMES), st.floats(0.01, 100))
def test_retry_after_grows_with_what_must_end_first(
    rules: AdmissionRules, steps: list[tuple[bool, str]], name: str, ended_per_s: float
) -> None:
    in_flight = Counter(other for _, other in steps)
    answer = admit(rules, in_flight, name, ended_per_s)
    if isinstance(answer, Refused):
        in_flight["unheard-of"] += 1
        more = admit(rules, in_flight, name, ended_per_s)
        assert isinstance(more, Refused)
        assert 1.0 <= answer.retry_after_s <= more.retry_after_s <= 60.0


requests = st.builds(
    RequestFacts, st.just("m"), st.just(100), latency_class=st.sampled_from(NAMES), priority=st.integers(-2, 2),
    sheddable=st.booleans(), waited_s=st.floats(0, 2),
    budget=st.builds(Budget, ttft_s=st.none() | st.floats(0.01, 10), e2e_s=st.none() | st.floats(0.01, 10)),
)  # fmt: skip


@given(admission_rules(), st.lists(st.tuples(requests, st.floats(0, 0.5), st.none() | st.floats(0, 5)), max_size=30))
def test_the_queue_is_bounded_and_holds_the_most_important(
    rules: AdmissionRules, arrivals: list[tuple[RequestFacts, float, float | None]]
) -> None:
    now, queue = 0.0, list[Waiting]()
    for key, (facts, gap_s, back_in_s) in enumerate(arrivals):
        now += gap_s
        answer = enter_queue(rules, queue, key, facts, now, back_in_s)
        if isinstance(answer, Queued):
            if answer.instead_of is not None:
                assert len(queue) == rules.max_waiting
                queue.remove(answer.instead_of)
                assert answer.instead_of.priority <= min((w.priority for w in queue), default=math.inf)
                assert answer.instead_of.priority <= facts.priority
            queue.append(answer.waiting)
            waits_s = answer.waiting.leave_by_s - now
            assert waits_s > 0.0
            assert facts.budget.ttft_s is None or waits_s + facts.waited_s <= 0.4 * facts.budget.ttft_s + 1e-9
            assert answer.waiting.leave_by_s <= answer.waiting.deadline_s
        elif answer.reason is Refusal.QUEUE_FULL and len(queue) == rules.max_waiting:
            own = rules.classes[facts.latency_class].max_waiting
            turned_away_by_class = own is not None and sum(w.latency_class == facts.latency_class for w in queue) >= own
            assert turned_away_by_class or facts.priority <= min((w.priority for w in queue), default=math.inf)
        assert len(queue) <= rules.max_waiting
        for name, of_class in rules.classes.items():
            assert of_class.max_waiting is None or sum(w.latency_class == name for w in queue) <= of_class.max_waiting
    in_order = sorted(queue, key=leaving_order)
    assert [w.priority for w in in_order] == sorted((w.priority for w in queue), reverse=True)
