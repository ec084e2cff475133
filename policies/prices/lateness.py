"""The predicted miss of the caller's budget, at an exchange rate.

::

    cost = price_per_late_s · late_s      money = money/s · s

`late_s` is the worst of first token, pace and end (`policies.estimate.lateness_s`). For pipelines that would trade a
small miss against money; the `cheapest` picker already puts every backend within budget before any that is not.

Where a signal is missing: no budget → never late.
"""

from dataclasses import dataclass
from typing import ClassVar

from backends.catalog.views import BackendView
from policies.estimate import Estimate, lateness_s
from policies.facts import RequestFacts
from policies.spec import setting


@dataclass(frozen=True, slots=True)
class Lateness:
    """Predicted seconds over the caller's budget, at a price per second."""

    name: ClassVar[str] = "lateness"
    price_per_late_s: float = setting(
        0.01, "What one predicted second over the budget is worth, in the fleet's currency.", at_least=0)
    tail_ratio: float = setting(
        2.0, "The tail that the budget speaks of, as a multiple of the predicted mean.", at_least=1)

    def __call__(self, facts: RequestFacts, backend: BackendView, estimate: Estimate, now: float) -> float:
        return self.price_per_late_s * lateness_s(facts, estimate, self.tail_ratio)
