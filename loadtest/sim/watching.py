"""When a silent slowdown is noticed: the time from its start until the gateway's own prediction has moved.

At each decision the prediction for the slowed card, per output token, is held against what the same books predict
without anything learned. The slowdown is noticed once that ratio has risen, from where it stood before, by the square
root of the factor: half of the way, as ratios go.
"""

from dataclasses import replace
from math import sqrt

from loadtest.sim.flight import Flight
from loadtest.sim.gateway import Gateway
from loadtest.sim.pools import Pool
from loadtest.sim.workload import EventKind, Workload
from policies.estimate import predict

LOOK_BEFORE_S = 10.0


class Watch:
    """Looks at one slowdown: the first of the workload that makes a card slower."""

    def __init__(self, workload: Workload, pool: Pool) -> None:
        slowed = [event for event in workload.events if event.kind is EventKind.SLOW and event.factor > 1.0]
        self.event = slowed[0] if slowed else None
        self.detected_after_s: float | None = None
        self._ratio_before = 1.0
        self._card = 0
        if self.event is not None:
            families = [backend.family for backend in pool.backends]
            self._card = families.index(self.event.family) if self.event.family in families else -1
        self._over = self.event is None or self._card < 0

    def decided(self, flight: Flight, gateway: Gateway, now: float) -> None:
        """A decision has just been taken."""
        event = self.event
        if self._over or event is None or now < event.at_s - LOOK_BEFORE_S:
            return
        link = gateway.links[self._card]
        view = link.view(now, gateway.learner.belief(link.name, now))
        neutral_s = predict(flight.facts, replace(view, drift=1.0, belief=None), now).tpot_s
        ratio = predict(flight.facts, view, now).tpot_s / neutral_s
        if now < event.at_s:
            self._ratio_before = ratio
        elif ratio >= self._ratio_before * sqrt(event.factor):
            self.detected_after_s = now - event.at_s
            self._over = True
