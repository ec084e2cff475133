"""Who is let in, and who may wait: room with reserved floors, and a short queue for when no backend is up.

Room. Of `max_in_flight` requests, `floor_k = ⌊reserved_share_k · max_in_flight⌋` are kept for class k:

    a request of class k is admitted   iff   free > Σ over the other classes of (floor - in flight)⁺
                                       or    free > 0 and k has fewer in flight than floor_k

So a class below its floor never finds the room taken by others, whatever their priority, and all that nobody has
reserved is open to everybody. A floor is kept free rather than lent: a stream runs for seconds to minutes, and what was
lent would not be back by the time its owner calls. (Kubernetes' API Priority and Fairness lends seats of requests that
take milliseconds.)

Queue. Holding requests back while backends are up is neutral to harmful (in simulation: earliest deadline first, late
binding, selective push), so they wait only where no backend takes any, as while the only one restarts:

    at most  0.4 · ttft_s  (2 s where none is promised),  less what is spent;   not at all where no backend is expected
    back by then;   in order of priority, then of deadline

A full queue turns away the lowest priority first, in it the sheddable, in those the latest deadline.

Nothing here knows a backend, a clock or a socket. The shell counts, keeps the queue, and wakes.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from policies.facts import RequestFacts

WAIT_SHARE = 0.4
"""Of the first token's budget: the rest is for the prefill."""
UNPROMISED_WAIT_S = 2.0
RETRY_AFTER_RANGE_S = (1.0, 60.0)


class Refusal(StrEnum):
    """Why a request is turned away before a backend is chosen; also the metric label."""

    FULL = "full"
    """As many are in flight as may be."""
    RESERVED = "reserved"
    """What is free is kept for other classes."""
    NO_WAITING = "no_waiting"
    """No backend is up, and none is expected within the time that the request can spare."""
    QUEUE_FULL = "queue_full"
    """No backend is up, and as many wait as may."""


@dataclass(frozen=True, slots=True)
class ClassRules:
    """One latency class, as admission sees it."""

    reserved_share: float = 0.0
    """Share of `max_in_flight` that is kept free of other classes."""
    max_waiting: int | None = None
    """Its requests that may wait at once; `None`: as many as may wait at all."""


NO_RULES = ClassRules()


@dataclass(frozen=True, slots=True)
class AdmissionRules:
    """The bounds. The shares of all classes sum to 1 at most."""

    max_in_flight: int
    max_waiting: int
    classes: Mapping[str, ClassRules] = field(default_factory=dict)
    floors: Mapping[str, int] = field(init=False)
    """Requests kept free for each class that has reserved any."""

    def __post_init__(self) -> None:
        # A share of 0.07 of 100 is 7, though its product is 7.000000000000001 or 6.99….
        floors = {name: math.floor(rules.reserved_share * self.max_in_flight + 1e-9)
                  for name, rules in self.classes.items()}
        object.__setattr__(self, "floors", {name: floor for name, floor in floors.items() if floor})


class Admitted(NamedTuple):
    """Let in: count it."""

    within_floor: bool
    """It takes room that its own class has reserved."""


class Refused(NamedTuple):
    """Turned away. `retry_after_s` is when there may be room."""

    reason: Refusal
    retry_after_s: float


def admit(
    rules: AdmissionRules, in_flight: Mapping[str, int], latency_class: str, ended_per_s: float | None = None
) -> Admitted | Refused:
    """Whether one more request of a class may be in flight beside those that are.

    The class stands in the head of a request, so that this can be asked before its body takes memory.

    Args:
        in_flight: requests by class, this one not among them; classes without any may be left out.
        ended_per_s: how many end in a second of late, for an honest `retry_after_s`; `None` where nobody knows.
    """
    free = rules.max_in_flight - sum(in_flight.values())
    within_floor = in_flight.get(latency_class, 0) < rules.floors.get(latency_class, 0)
    kept = 0
    if not within_floor:
        for name, floor in rules.floors.items():
            kept += max(0, floor - in_flight.get(name, 0))
    if free > kept:
        return Admitted(within_floor)
    ends_needed = kept + 1 - free
    wait_s = ends_needed / ended_per_s if ended_per_s else 0.0
    return Refused(Refusal.RESERVED if free > 0 else Refusal.FULL, _within(RETRY_AFTER_RANGE_S, wait_s))


class Waiting(NamedTuple):
    """One request that waits for a backend. Times are monotonic seconds."""

    key: int
    """The shell's own."""
    latency_class: str
    priority: int
    sheddable: bool
    arrived_at_s: float
    leave_by_s: float
    """When it gives up waiting."""
    deadline_s: float
    """When its first token is due; infinite where none is promised."""


class Queued(NamedTuple):
    """It may wait: put `waiting` in the queue."""

    waiting: Waiting
    instead_of: Waiting | None = None
    """Who has to go for it, and is refused with `QUEUE_FULL`."""


def wait_s(facts: RequestFacts, back_in_s: float | None) -> float:
    """How long a request may wait for a backend; 0: not at all.

    `back_in_s` is when the first may be back, `None` where nobody can tell: then waiting is worth a try.
    """
    budget = facts.budget
    share_s = UNPROMISED_WAIT_S if budget.ttft_s is None else WAIT_SHARE * budget.ttft_s
    if budget.e2e_s is not None:
        share_s = min(share_s, WAIT_SHARE * budget.e2e_s)
    left_s = max(0.0, share_s - facts.waited_s)
    return left_s if back_in_s is None or back_in_s <= left_s else 0.0


def enter_queue(
    rules: AdmissionRules, queue: Sequence[Waiting], key: int, facts: RequestFacts, now: float, back_in_s: float | None
) -> Queued | Refused:
    """Whether a request that no backend takes may wait, and in whose place.

    `queue` are those that wait now, in any order, and `now` is monotonic time.
    """
    may_wait_s = wait_s(facts, back_in_s)
    retry_after_s = _within(RETRY_AFTER_RANGE_S, back_in_s or 0.0)
    if may_wait_s <= 0.0:
        return Refused(Refusal.NO_WAITING, retry_after_s)
    of_class = rules.classes.get(facts.latency_class, NO_RULES).max_waiting
    if of_class is not None and sum(other.latency_class == facts.latency_class for other in queue) >= of_class:
        return Refused(Refusal.QUEUE_FULL, retry_after_s)
    ttft_s = facts.budget.ttft_s
    waiting = Waiting(
        key, facts.latency_class, facts.priority, facts.sheddable, now, now + may_wait_s,
        math.inf if ttft_s is None else now - facts.waited_s + ttft_s,
    )  # fmt: skip
    if len(queue) < rules.max_waiting:
        return Queued(waiting)
    least = max((*queue, waiting), key=_turned_away_first)
    return Refused(Refusal.QUEUE_FULL, retry_after_s) if least is waiting else Queued(waiting, least)


def leaving_order(waiting: Waiting) -> tuple[int, float, float, int]:
    """Sort key: who is offered a backend first. Larger priority, then earlier deadline, then earlier arrival."""
    return -waiting.priority, waiting.deadline_s, waiting.arrived_at_s, waiting.key


def overdue(queue: Iterable[Waiting], now: float) -> list[Waiting]:
    """Those that have waited as long as they may: they are told that no backend is available."""
    return [waiting for waiting in queue if waiting.leave_by_s <= now]


def _turned_away_first(waiting: Waiting) -> tuple[int, bool, float, float, int]:
    return -waiting.priority, waiting.sheddable, waiting.deadline_s, waiting.arrived_at_s, waiting.key


def _within(bounds_s: tuple[float, float], given_s: float) -> float:
    low_s, high_s = bounds_s
    return min(high_s, max(low_s, given_s))
