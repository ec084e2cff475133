"""The lists that the standard filters let pass, each in one look at all backends.

A decision asks these of every backend there is, so they stand apart from the filters, which say why: this much of them
can be compiled (`compiled`).
"""

from collections.abc import Sequence

from backends.catalog.health import HealthState
from backends.catalog.views import BackendView

HEALTHY = HealthState.HEALTHY


def serving(model: str, views: Sequence[BackendView]) -> list[BackendView]:
    """Those that serve the model."""
    return [view for view in views if view.spec.model == model]


def taking_requests(views: Sequence[BackendView], now: float) -> list[BackendView]:
    """Those in service: neither draining nor taken out by their health."""
    return [view for view in views if not view.draining and not view.spec.weight <= 0 and (
        view.health.state is HEALTHY or view.health.accepts(view.in_flight_requests, now))]


def holding(tokens: int, views: Sequence[BackendView]) -> list[BackendView]:
    """Those whose window holds so many tokens, or is not known."""
    return [view for view in views if (window := view.spec.context_tokens) is None or tokens <= window]


def not_resting(views: Sequence[BackendView], now: float) -> list[BackendView]:
    """Those that have not asked for silence."""
    return [view for view in views if not (now < view.backoff_until_s or now < view.silence_asked_until_s)]
