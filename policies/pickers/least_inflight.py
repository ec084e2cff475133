"""The fewest requests in flight per weight: the lowest `(in_flight_requests + 1) / weight`.

The one that is added is the request at hand, so that among idle backends the heavier one comes first. Ties are
settled by dice in proportion to weights. In flight are this router's own requests; they are always known.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from backends.catalog.views import FleetView
from policies.facts import RequestFacts
from policies.pickers.weighing import pull, toss
from policies.policy import Priced, Rng


@dataclass(frozen=True, slots=True)
class LeastInflight:
    """The fewest requests in flight per weight."""

    name: ClassVar[str] = "least_inflight"

    def __call__(
        self, facts: RequestFacts, candidates: Sequence[Priced], fleet: FleetView, now: float, rng: Rng
    ) -> tuple[Priced, str]:
        pulls = [pull(c.backend, now) for c in candidates]
        loads = [(c.backend.in_flight_requests + 1) / width for c, width in zip(candidates, pulls, strict=True)]
        least = min(loads)
        ties = [index for index, load in enumerate(loads) if load == least]
        chosen = candidates[toss(ties, [pulls[index] for index in ties], rng)]
        return chosen, f"least inflight {chosen.backend.in_flight_requests} of {len(candidates)}"
