"""A backend serves one model; requests for another pass it by."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from backends.catalog.views import BackendView, FleetView
from policies.facts import RequestFacts
from policies.filters import Rejection


@dataclass(frozen=True, slots=True)
class ServesModel:
    """Keeps the backends that serve the request's model."""

    name: ClassVar[str] = "serves_model"

    def __call__(self, facts: RequestFacts, backend: BackendView, fleet: FleetView, now: float) -> str | None:
        return None if backend.spec.model == facts.model else Rejection.OTHER_MODEL

    def passing(self, facts: RequestFacts, views: Sequence[BackendView], now: float) -> list[BackendView]:
        model = facts.model
        return [view for view in views if view.spec.model == model]
