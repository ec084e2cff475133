"""What Headrace must know of an engine to watch it and to relay its streams."""

from collections.abc import Callable
from dataclasses import dataclass

from backends.catalog.sample import LoadSample


@dataclass(frozen=True, slots=True)
class Dialect:
    """One engine's way of speaking. A new engine is one file with one of these and one line in `DIALECTS`."""

    name: str
    """As the fleet file writes it."""
    parse_metrics: Callable[[bytes, float], LoadSample]
    """Metrics page and monotonic time of the scrape → sample. Total: garbage gives a blank sample, never an error."""
    metrics_path: str | None = "/metrics"
    """`None` where the engine has no metrics; the router's own books are then all there is."""
    health_path: str = "/health"
    models_path: str = "/v1/models"
    """Its answer names what is really served behind the address."""
    ends_with_done: bool = True
    """A whole stream ends in `data: [DONE]`, so one without it was cut. Where `False`, its absence proves nothing."""


def no_metrics(text: bytes, now: float) -> LoadSample:
    """The parser of an engine without metrics: everything unknown."""
    return LoadSample(taken_at_s=now)
