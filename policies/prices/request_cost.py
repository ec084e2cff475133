"""The machine time that a request takes, at the backend's hourly price.

::

    cost   = price_per_hour / 3600 · device_s                                        money
    device = drift / 1000 · ( b·(P - h) + a·(P² - h²)/2 + (host + prefill_base) / n  s, prefill
                            + D·(d + (host + decode_base) / n) + e·(P·D + D²/2) )    s, decode

with the backend's coefficients as they have been corrected (`beliefs.correction`, in steps of 9 % so that like
backends cost alike), `P` prompt and `D` expected output tokens, and `h` prompt tokens that are believed to
be in its prefix cache: affinity is a price and not a rule. `n` sequences share the fixed part of each step: a quarter
of the backend's slots, four of them where there are few, the reference batch where they are not known. It is no
function of the batch of the moment, for then a fuller backend would look cheaper, and traffic would pile up on it.

Where a signal is missing: no coefficients → what `footing.coefficients_of` puts in their place, uncorrected; no price →
the request is free.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from backends.catalog.views import BackendView
from policies.estimate import Estimate
from policies.facts import RequestFacts
from policies.prices import machine_time
from policies.spec import setting


@dataclass(frozen=True, slots=True)
class RequestCost:
    """Machine time that the request takes, at the backend's price per hour."""

    name: ClassVar[str] = "request_cost"
    predicts: ClassVar[bool] = False
    reference_batch: int = setting(
        32, "Sequences that share the fixed part of a step on a backend of unknown slots.", at_least=1)

    def __call__(self, facts: RequestFacts, backend: BackendView, estimate: Estimate, now: float) -> float:
        return machine_time.cost(facts, backend, self.reference_batch, now)

    def of_all(self, facts: RequestFacts, views: Sequence[BackendView], now: float) -> list[float]:
        """The same for each of `views`, in one pass."""
        return machine_time.costs(facts, views, self.reference_batch, now)
