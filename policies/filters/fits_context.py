"""The prompt and the longest answer that the client allows fit the backend's context window.

`prompt_tokens + (max_output_tokens or 1) ≤ context_tokens`. A client that gave no cap accepts an answer cut by the
window, so one token of room is enough. A backend of unknown window fits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from backends.catalog.views import BackendView, FleetView
from policies.facts import RequestFacts
from policies.filters import Rejection, screens


@dataclass(frozen=True, slots=True)
class FitsContext:
    """Keeps the backends whose context window holds prompt and answer."""

    name: ClassVar[str] = "fits_context"

    def __call__(self, facts: RequestFacts, backend: BackendView, fleet: FleetView, now: float) -> str | None:
        window = backend.spec.context_tokens
        if window is None or facts.prompt_tokens + (facts.max_output_tokens or 1) <= window:
            return None
        return Rejection.CONTEXT_TOO_SMALL

    def passing(self, facts: RequestFacts, views: Sequence[BackendView], now: float) -> list[BackendView]:
        return screens.holding(facts.prompt_tokens + (facts.max_output_tokens or 1), views)
