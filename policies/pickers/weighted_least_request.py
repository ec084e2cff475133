"""The fewest requests in flight per weight, the weight being the operator's times the measured capacity.

The lowest `(in_flight_requests + 1) / (weight · capacity)`: seconds of work, were all requests the reference one. Ties
are settled by dice in proportion to those weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from backends.catalog.views import FleetView
from policies.facts import RequestFacts
from policies.pickers.capacity import measured_pull
from policies.pickers.weighing import lowest
from policies.policy import Priced, Rng


@dataclass(frozen=True, slots=True)
class WeightedLeastRequest:
    """The fewest requests in flight per weight and measured capacity."""

    name: ClassVar[str] = "weighted_least_request"

    def __call__(
        self, facts: RequestFacts, candidates: Sequence[Priced], fleet: FleetView, now: float, rng: Rng
    ) -> tuple[Priced, str]:
        pulls = [measured_pull(c.backend, now) for c in candidates]
        loads = [(c.backend.in_flight_requests + 1) / width for c, width in zip(candidates, pulls, strict=True)]
        chosen = lowest(loads, rng, pulls)
        return candidates[chosen], f"least load {loads[chosen]:.2g}s of {len(candidates)}"
