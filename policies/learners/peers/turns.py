"""Whose turn it is in a weighted rotation, as a virtual time per backend.

A backend of weight `w` that had `c` turns is due again at `(c + 1/2) / w`; the earliest is next. Halves make the
rotation smooth: the heavy backends' turns lie in the middle of their stretches and not at the ends (the method of
Webster and Sainte-Lague for seats in a parliament, where due times of `(c + 1) / w` are D'Hondt's).

A backend that was away is due at once and no earlier: it gets one turn, not all those it missed.
"""

from math import inf

from backends.catalog.views import BackendView
from policies.facts import RequestFacts
from policies.learners.peers.remembering import Remembering
from policies.learning import Sent
from policies.pickers.capacity import measured_pull
from policies.policy import Priced


class Turns(Remembering):
    """Counts turns by backend, in units of their weights."""

    name = "turns"

    def __init__(self) -> None:
        self._had: dict[str, float] = {}
        self._time: dict[str, float] = {}
        """By model: the turns of one must not make the backends of another look away."""

    def due(self, backend: BackendView, weight: float) -> float:
        """Virtual time of the backend's next turn."""
        half = 0.5 / weight
        had, time = self._had.get(backend.spec.name), self._time.get(backend.spec.model, -inf)
        if had is not None and had + half >= time:
            return had + half
        return max(time, half)

    def sent(self, facts: RequestFacts, priced: Priced, now: float) -> Sent:
        backend, weight = priced.backend, measured_pull(priced.backend, now)
        due = self._time[backend.spec.model] = self.due(backend, weight)
        self._had[backend.spec.name] = due + 0.5 / weight
        return super().sent(facts, priced, now)

    def forget(self, backend: str) -> None:
        self._had.pop(backend, None)
