"""In service: neither draining nor taken out by its health; half-open backends take their trial requests only."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from backends.catalog.views import BackendView, FleetView
from policies.facts import RequestFacts
from policies.filters import Rejection, screens


@dataclass(frozen=True, slots=True)
class Alive:
    """Keeps the backends that take new requests: not draining, and accepted by their health."""

    name: ClassVar[str] = "alive"

    def __call__(self, facts: RequestFacts, backend: BackendView, fleet: FleetView, now: float) -> str | None:
        if backend.draining or backend.spec.weight <= 0:
            return Rejection.DRAINING
        return None if backend.health.accepts(backend.in_flight_requests, now) else Rejection.UNHEALTHY

    def passing(self, facts: RequestFacts, views: Sequence[BackendView], now: float) -> list[BackendView]:
        return screens.taking_requests(views, now)
