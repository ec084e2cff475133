"""Who is let in, who may wait, and who has to go."""

import math

import pytest

from policies.admission import (
    UNPROMISED_WAIT_S,
    WAIT_SHARE,
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
    overdue,
    wait_s,
)
from policies.facts import Budget, RequestFacts

RULES = AdmissionRules(
    max_in_flight=10, max_waiting=2,
    classes={"chat": ClassRules(0.3), "bulk": ClassRules(0.1), "batch": ClassRules(0.0, 0), "rag": ClassRules(0.0, 1)},
)  # fmt: skip


def facts(
    latency_class: str = "chat", priority: int = 0, *, ttft_s: float | None = 1.0, sheddable: bool = False,
    waited_s: float = 0.0, e2e_s: float | None = None,
) -> RequestFacts:  # fmt: skip
    return RequestFacts("m", 100, latency_class=latency_class, priority=priority, sheddable=sheddable,
                        waited_s=waited_s, budget=Budget(ttft_s=ttft_s, e2e_s=e2e_s))


@pytest.mark.parametrize(("in_flight", "latency_class", "expected"), [
    ({}, "chat", Admitted(within_floor=True)),
    ({}, "batch", Admitted(within_floor=False)),
    ({"batch": 5}, "batch", Admitted(within_floor=False)),          # 5 free, 4 kept
    ({"batch": 6}, "batch", Refused(Refusal.RESERVED, 1.0)),        # 4 free, all kept
    ({"batch": 6}, "chat", Admitted(within_floor=True)),
    ({"batch": 6, "chat": 3}, "bulk", Admitted(within_floor=True)),
    ({"batch": 6, "chat": 3}, "chat", Refused(Refusal.RESERVED, 1.0)),
    ({"batch": 6, "chat": 3, "bulk": 1}, "bulk", Refused(Refusal.FULL, 1.0)),
    ({"chat": 8}, "chat", Admitted(within_floor=False)),            # beyond its floor, in what nobody reserved
    ({"chat": 9}, "chat", Refused(Refusal.RESERVED, 1.0)),          # the last is kept for bulk
    ({"gone": 9}, "gone", Refused(Refusal.RESERVED, 1.0)),          # a class that a reload has removed
    ({"batch": 11}, "chat", Refused(Refusal.FULL, 1.0)),            # a reload has lowered the limit
])  # fmt: skip
def test_floors_are_kept_and_the_rest_is_open(
    in_flight: dict[str, int], latency_class: str, expected: Admitted | Refused
) -> None:
    assert admit(RULES, in_flight, latency_class) == expected


def test_floors_are_whole_requests_in_spite_of_binary_fractions() -> None:
    for share in range(1, 101):
        assert AdmissionRules(100, 0, {"c": ClassRules(share / 100)}).floors == {"c": share}
    assert AdmissionRules(10, 0, {"tiny": ClassRules(0.05)}).floors == {}


def test_retry_after_is_when_enough_have_ended() -> None:
    full = {"batch": 6, "chat": 3, "bulk": 1}
    assert admit(RULES, full, "batch", ended_per_s=0.5) == Refused(Refusal.FULL, 2.0)
    assert admit(RULES, {"batch": 10}, "batch", ended_per_s=0.5) == Refused(Refusal.FULL, 10.0)  # 4 are kept
    assert admit(RULES, {"batch": 10}, "chat", ended_per_s=0.5) == Refused(Refusal.FULL, 2.0)  # the next is for it
    assert admit(RULES, full, "chat", ended_per_s=1e-9) == Refused(Refusal.FULL, 60.0)
    assert admit(RULES, full, "chat", ended_per_s=1e9) == Refused(Refusal.FULL, 1.0)


def test_a_request_waits_for_a_part_of_its_budget_and_only_where_that_may_help() -> None:
    assert wait_s(facts(), None) == pytest.approx(0.4)
    assert wait_s(facts(waited_s=0.3), None) == pytest.approx(0.1)
    assert wait_s(facts(waited_s=9.0), None) == 0.0
    assert wait_s(facts(ttft_s=None), None) == UNPROMISED_WAIT_S
    assert wait_s(facts(ttft_s=None, e2e_s=2.0), None) == pytest.approx(0.8)
    assert wait_s(facts(), 0.39) == pytest.approx(0.4)
    assert wait_s(facts(), 0.41) == 0.0  # nobody will be back by then


def queued(outcome: Queued | Refused) -> Queued:
    assert isinstance(outcome, Queued)
    return outcome


def test_a_full_queue_turns_away_the_least_important() -> None:
    first = queued(enter_queue(RULES, [], 1, facts("bulk", 0), 100.0, None)).waiting
    assert (first.leave_by_s, first.deadline_s) == (100.0 + WAIT_SHARE, 101.0)
    second = queued(enter_queue(RULES, [first], 2, facts("chat", 5), 100.0, None)).waiting
    queue = [first, second]
    assert enter_queue(RULES, queue, 3, facts("bulk", -1), 100.1, 0.2) == Refused(Refusal.QUEUE_FULL, 1.0)
    assert queued(enter_queue(RULES, queue, 3, facts("bulk", 1), 100.1, None)).instead_of is first
    # Of equals the one with the latest deadline goes, and the sheddable before any other.
    assert isinstance(enter_queue(RULES, queue, 3, facts("bulk", 0), 100.1, None), Refused)
    assert queued(enter_queue(RULES, queue, 3, facts("bulk", 0, ttft_s=0.5), 100.1, None)).instead_of is first
    assert isinstance(enter_queue(RULES, queue, 3, facts("bulk", 0, ttft_s=0.5, sheddable=True), 100.1, None), Refused)


def test_a_class_may_have_a_bound_of_its_own() -> None:
    assert enter_queue(RULES, [], 1, facts("batch"), 0.0, 5.0) == Refused(Refusal.NO_WAITING, 5.0)
    assert enter_queue(RULES, [], 1, facts("batch"), 0.0, None) == Refused(Refusal.QUEUE_FULL, 1.0)
    waiting = queued(enter_queue(RULES, [], 1, facts("rag"), 0.0, None)).waiting
    assert enter_queue(RULES, [waiting], 2, facts("rag", 9), 0.0, None) == Refused(Refusal.QUEUE_FULL, 1.0)
    assert queued(enter_queue(RULES, [waiting], 2, facts("new-class"), 0.0, None)).instead_of is None


def test_backends_are_offered_by_priority_then_deadline_then_arrival() -> None:
    def one(key: int, priority: int, deadline_s: float, arrived_at_s: float) -> Waiting:
        return Waiting(key, "c", priority, False, arrived_at_s, arrived_at_s + 1, deadline_s)

    last, first = one(1, 0, math.inf, 0), one(2, 9, math.inf, 3)
    early, late, later = one(3, 0, 5, 2), one(4, 0, 6, 1), one(5, 0, 6, 2)
    assert sorted([later, last, late, first, early], key=leaving_order) == [first, early, late, later, last]
    assert overdue([last, first], 1.0) == [last]
    assert overdue([last, first], 0.99) == []
