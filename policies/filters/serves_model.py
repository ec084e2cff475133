"""A backend serves one model; requests for another pass it by."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from backends.catalog.views import BackendView, FleetView
from policies.facts import RequestFacts
from policies.filters import Rejection, screens


@dataclass(frozen=True, slots=True)
class ServesModel:
    """Keeps the backends that serve the request's model."""

    name: ClassVar[str] = "serves_model"

    def __call__(self, facts: RequestFacts, backend: BackendView, fleet: FleetView, now: float) -> str | None:
        return None if backend.spec.model == facts.model else Rejection.OTHER_MODEL

    def passing(self, facts: RequestFacts, views: Sequence[BackendView], now: float) -> list[BackendView]:
        return screens.serving(facts.model, views)
