"""A backend that answered 429 or 503 is left alone for a while.

Where it named the time (`Retry-After`), nobody is sent there before, whatever else is left: asking sooner is what the
limit is there to stop. Where it named none, the silence is the router's own idea and gives way to a request that no
other backend can take.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from backends.catalog.views import BackendView, FleetView
from policies.facts import RequestFacts
from policies.filters import Rejection, screens


@dataclass(frozen=True, slots=True)
class BackingOff:
    """Passes over backends that were overloaded a moment ago; for as long as they asked, without exception."""

    name: ClassVar[str] = "backing_off"

    def __call__(self, facts: RequestFacts, backend: BackendView, fleet: FleetView, now: float) -> str | None:
        if now < backend.silence_asked_until_s:
            return Rejection.SILENCE_ASKED
        return Rejection.BACKING_OFF if now < backend.backoff_until_s else None

    def passing(self, facts: RequestFacts, views: Sequence[BackendView], now: float) -> list[BackendView]:
        return screens.not_resting(views, now)
