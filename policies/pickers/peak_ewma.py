"""Power of two choices over the peak-sensitive average of the time to first token, times the requests in flight.

::

    cost = ewma_ttft_s · (in_flight_requests + 1)

Two different candidates are drawn, each pair alike, and the lower cost is taken. Where the learner `peak_ewma` is
missing, every average is its default and the requests in flight decide.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from backends.catalog.views import FleetView
from policies.facts import RequestFacts
from policies.learners.peers.peak_ewma import DEFAULT_TTFT_S, PeakEwma
from policies.policy import Priced, Rng


@dataclass(frozen=True, slots=True)
class PeakEwmaOfTwo:
    """The lower of two candidates in average first-token time times requests in flight."""

    name: ClassVar[str] = "peak_ewma"

    def __call__(
        self, facts: RequestFacts, candidates: Sequence[Priced], fleet: FleetView, now: float, rng: Rng
    ) -> tuple[Priced, str]:
        count = len(candidates)
        first = rng.randrange(count)
        second = (first + 1 + rng.randrange(count - 1)) % count if count > 1 else first
        costs = {index: self._cost_s(candidates[index], fleet, now) for index in (first, second)}
        chosen = first if costs[first] <= costs[second] else second
        return candidates[chosen], f"peak ewma cost {costs[chosen]:.2g}s of {count}"

    def _cost_s(self, candidate: Priced, fleet: FleetView, now: float) -> float:
        averages, backend = fleet.belief, candidate.backend
        ttft_s = averages.ttft_s(backend.spec.name, now) if isinstance(averages, PeakEwma) else DEFAULT_TTFT_S
        return ttft_s * (backend.in_flight_requests + 1)
