"""Requests that wait while no backend is up, and their leaving: served, told 503 in time, or gone with their client.

Who may wait, for how long, and who goes first is `policies.admission`'s to say. This room keeps the queue, and looks at
it at each change of a backend's health and every `LOOK_EVERY_S`.
Waiting costs nothing but memory: no backend's books know of it, and no attempt is counted.
"""

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from policies.admission import AdmissionRules, Refusal, Refused, Waiting, enter_queue, leaving_order
from policies.facts import RequestFacts

LOOK_EVERY_S = 0.05
"""Time alone ends ejections and patience, and a backend on trial takes one request after the other."""


class Timer(Protocol):
    """Something that will run."""

    def cancel(self) -> None: ...


class Waiter(Protocol):
    """A request that waits."""

    def offer(self) -> bool:
        """Try to send it now; returns whether it was, so that it waits no longer."""

    def turn_away(self, reason: Refusal) -> None:
        """It has waited as long as it may, or gives way to a more important one."""


class WaitingRoom:
    """The queue of one process.

    Args:
        clock: monotonic seconds.
        call_later: runs a function after so many seconds, as `loop.call_later`.
    """

    def __init__(self, clock: Callable[[], float], call_later: Callable[[float, Callable[[], None]], Timer]) -> None:
        self._clock = clock
        self._call_later = call_later
        self._waiting: dict[int, tuple[Waiting, Waiter]] = {}
        self._keys = itertools.count()
        self._timer: Timer | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def by_class(self) -> Counter[str]:
        """How many wait of each class."""
        return Counter([waiting.latency_class for waiting, _ in list(self._waiting.values())])

    def enter(
        self, rules: AdmissionRules, waiter: Waiter, facts: RequestFacts, back_in_s: float | None
    ) -> int | Refused:
        """Let one wait, perhaps in another's place; its key, or why it may not.

        `back_in_s` is when the first backend may be back: `None` where nobody can tell, infinite where none will.
        """
        now, key = self._clock(), next(self._keys)
        answer = enter_queue(rules, [waiting for waiting, _ in self._waiting.values()], key, facts, now, back_in_s)
        if isinstance(answer, Refused):
            return answer
        if answer.instead_of is not None:
            _, least = self._waiting.pop(answer.instead_of.key)
            least.turn_away(Refusal.QUEUE_FULL)
        self._waiting[key] = (answer.waiting, waiter)
        if self._timer is None:
            self._look_in(LOOK_EVERY_S)
        return key

    def leave(self, key: int) -> None:
        """Its client is gone, or the process ends."""
        self._waiting.pop(key, None)
        if not self._waiting:
            self._stop()

    def wake(self) -> None:
        """A backend may be up: in the loop's next turn each is offered what is there, the most important first."""
        if self._waiting:
            self._look_in(0.0)

    def close(self) -> None:
        """Nobody waits here any more; who does is turned away."""
        self._stop()
        waiting, self._waiting = self._waiting, {}
        for _, waiter in waiting.values():
            waiter.turn_away(Refusal.NO_WAITING)

    def _look(self) -> None:
        self._timer = None
        now = self._clock()
        for waiting, waiter in sorted(self._waiting.values(), key=lambda entry: leaving_order(entry[0])):
            if waiting.key not in self._waiting:
                continue  # it left because of what became of one before it
            if waiter.offer():
                self._waiting.pop(waiting.key, None)
            elif waiting.leave_by_s <= now:
                self._waiting.pop(waiting.key, None)
                waiter.turn_away(Refusal.NO_WAITING)
        if self._waiting and self._timer is None:
            self._look_in(LOOK_EVERY_S)

    def _look_in(self, wait_s: float) -> None:
        self._stop()
        self._timer = self._call_later(wait_s, self._look)

    def _stop(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
