"""The wait before the engine turns to this request, at an exchange rate.

::

    cost = price_per_s · drain_s          money = money/s · s

`drain_s` is the estimate's: prompts ahead, the rest of the step under way, a free slot, room in the KV cache. It
spreads load before the budget does: of two equal backends the emptier one is cheaper.

Where a signal is missing: see `policies.estimate`; this router's own books are always known.
"""

from dataclasses import dataclass
from typing import ClassVar

from backends.catalog.views import BackendView
from policies.estimate import Estimate
from policies.facts import RequestFacts
from policies.spec import setting


@dataclass(frozen=True, slots=True)
class DrainTime:
    """Seconds until the engine turns to the request, at a price per second."""

    name: ClassVar[str] = "drain_time"
    price_per_s: float = setting(
        0.0005, "What one second of queueing is worth, in the fleet's currency. One second at 0.0005 weighs as much as "
        "a second of a machine at 1.80 an hour.", at_least=0)

    def __call__(self, facts: RequestFacts, backend: BackendView, estimate: Estimate, now: float) -> float:
        return self.price_per_s * estimate.drain_s
