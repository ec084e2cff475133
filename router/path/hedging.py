"""Requests that may be hedged, from the sending of the first attempt on: looks when it is time, and sends a second.

What is decided is `policies.hedging`'s. Here are the timer, one for a request that may be hedged and none for others;
the fresh picture of the fleet when it fires, for one request in a hundred or so; and the hedges' own budget. Nothing
of it runs where hedging is off.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol

from policies.admission import Refused, admit
from policies.facts import RequestFacts
from policies.hedging import (
    BUDGET_CAPACITY,
    First,
    Hedge,
    HedgeBudget,
    Wait,
    Withheld,
    first_of,
    hedge,
    promised_s,
)
from policies.policy import Decision, Priced
from router.fleet.live import Fleet
from router.path.course import Course
from router.record.metrics import Metrics
from router.request.exchange import Exchange


class Desk(Protocol):
    """Who decides where requests go."""

    fleet: Fleet
    metrics: Metrics
    clock: Callable[[], float]

    def by_class(self) -> Mapping[str, int]:
        """Requests in flight."""

    def considered(self, exchange: Exchange, facts: RequestFacts, now: float) -> Decision:
        """What a decision on the request would be now. Nothing is booked by it."""


class Hedging:
    """One a process. Its budget outlives reloads; its bounds follow the configuration of each request."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._requests = 0
        """Since the budget was last looked at."""
        self._budget = HedgeBudget(0.0, 0.0, BUDGET_CAPACITY, tokens=1.0, at_s=desk.clock())

    def watch(self, course: Course, decision: Decision, now: float) -> None:
        """The request has been sent where `decision` says: see that it is looked at in time, if it may be hedged."""
        exchange = course.exchange
        rules, chosen, facts = exchange.generation.hedging, decision.chosen, course.facts
        self._requests += 1
        promised = promised_s(facts)
        if rules is None or chosen is None or promised is None:
            return
        first = first_of(rules, facts, chosen, exchange.received_at_s + promised - now, now)
        if first is not None:
            self._look_in(first.look_after_s, course, first, now)

    def _look_in(self, wait_s: float, course: Course, first: First, sent_at_s: float) -> None:
        course.look = asyncio.get_running_loop().call_later(wait_s, self._look, course, first, sent_at_s)

    def _look(self, course: Course, first: First, sent_at_s: float) -> None:
        """The first attempt has been silent for long: whatever ends the silence stops this timer."""
        course.look = None
        try:
            self._act(course, first, sent_at_s)
        except Exception as error:
            course.crashed(error)

    def _act(self, course: Course, first: First, sent_at_s: float) -> None:
        desk, exchange, now = self._desk, course.exchange, self._desk.clock()
        facts = replace(course.facts, tried=(*course.facts.tried, first.backend), waited_s=now - exchange.received_at_s)
        decision = desk.considered(exchange, facts, now)
        found = hedge(facts, first, now - sent_at_s, decision.candidates, now)
        if isinstance(found, Wait):
            self._look_in(sent_at_s + found.until_s - now, course, first, sent_at_s)
            return
        why = self._objection(exchange, decision, now) if isinstance(found, Hedge) else found.why
        if why is not None:
            desk.metrics.hedges_withheld.inc((why,))
        elif isinstance(found, Hedge):
            second = found.second
            live = desk.fleet.backends[second.backend.spec.name]
            course.hedge(live, _hedging(decision, second, first.backend), facts, now)

    def _objection(self, exchange: Exchange, decision: Decision, now: float) -> Withheld | None:
        """What stands against a hedge that would be in time; `None`: nothing, and it is paid for."""
        if decision.chosen is None:  # the policy sheds what it has no room for
            return Withheld.OVERLOADED
        admitted = exchange.admitted
        if admitted is not None and isinstance(
            admit(exchange.generation.admission, self._desk.by_class(), admitted), Refused
        ):
            return Withheld.OVERLOADED
        return None if self._pay(exchange, now) else Withheld.BUDGET_EMPTY

    def _pay(self, exchange: Exchange, now: float) -> bool:
        """Take one hedge from the budget, after the requests since the last look have paid in."""
        bounds, budget, count = exchange.generation.config.hedging, self._budget, self._requests
        self._requests = 0
        tokens = min(budget.capacity, budget.tokens + count * bounds.budget_ratio)
        filled = replace(budget, ratio=bounds.budget_ratio, floor_per_s=bounds.budget_floor_per_s, tokens=tokens)
        paid = filled.withdraw(now)
        self._budget = filled if paid is None else paid
        return paid is not None


def _hedging(decision: Decision, second: Priced, first: str) -> Decision:
    """The decision with the hedge's own choice and words."""
    price = None if decision.price is None else second.price
    return replace(decision, chosen=second.backend, price=price, reason=f"hedge of {first}")
