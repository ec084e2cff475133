"""A backend that answered 429 or 503 with `Retry-After` is left alone until then, while another can serve.

Where no other can, the request goes to it all the same: it may have recovered early, and its own refusal tells the
client more than ours would.
"""

from dataclasses import dataclass
from typing import ClassVar

from backends.catalog.views import BackendView, FleetView
from policies.facts import RequestFacts
from policies.filters import Rejection


@dataclass(frozen=True, slots=True)
class BackingOff:
    """Passes over backends that asked for silence, unless nothing else is left."""

    name: ClassVar[str] = "backing_off"

    def __call__(self, facts: RequestFacts, backend: BackendView, fleet: FleetView, now: float) -> str | None:
        return Rejection.BACKING_OFF if now < backend.backoff_until_s else None
