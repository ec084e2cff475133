"""The cheapest candidate with less than a fixed number of requests in flight; where all are full, the least loaded.

The price is the pipeline's. Ties are settled by dice in proportion to weights. Least loaded is by requests in flight
per measured capacity. The cap knows neither sizes nor budgets: finding the right one is the operator's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from backends.catalog.views import FleetView
from policies.facts import RequestFacts
from policies.pickers.capacity import measured_pull
from policies.pickers.weighing import lowest, pull
from policies.policy import Priced, Rng
from policies.spec import setting


@dataclass(frozen=True, slots=True)
class Spill:
    """The cheapest candidate that is below its cap of requests in flight, else the least loaded."""

    name: ClassVar[str] = "spill"
    cap: int = setting(4, "Requests in flight at which a backend counts as full.", at_least=1)

    def __call__(
        self, facts: RequestFacts, candidates: Sequence[Priced], fleet: FleetView, now: float, rng: Rng
    ) -> tuple[Priced, str]:
        room = [c for c in candidates if c.backend.in_flight_requests < self.cap]
        if room:
            chosen = room[lowest([c.price for c in room], rng, [pull(c.backend, now) for c in room])]
            return chosen, f"cheapest below cap price={chosen.price:.2g} of {len(room)}"
        pulls = [measured_pull(c.backend, now) for c in candidates]
        loads = [(c.backend.in_flight_requests + 1) / width for c, width in zip(candidates, pulls, strict=True)]
        index = lowest(loads, rng, pulls)
        return candidates[index], f"all full, least load {loads[index]:.2g}s of {len(candidates)}"
