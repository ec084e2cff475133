"""AIBrix's rule: the lowest expected latency of a request of the usual size, by lifetime means.

::

    expected = prefill_s per prompt token · usual prompt tokens + decode_s per output token · usual output tokens

Means and usual sizes come from the learner `lifetime_means`; a backend without any counts as 0 and is tried. The sizes
are the pool's, not the request's, and what is in flight plays no part. Without the learner dice decide.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from backends.catalog.views import FleetView
from policies.facts import RequestFacts
from policies.learners.peers.lifetime_means import LifetimeMeans
from policies.pickers.weighing import lowest
from policies.policy import Priced, Rng


@dataclass(frozen=True, slots=True)
class LifetimeLatency:
    """The lowest expected latency by the means of all that a backend ever served."""

    name: ClassVar[str] = "lifetime_latency"

    def __call__(
        self, facts: RequestFacts, candidates: Sequence[Priced], fleet: FleetView, now: float, rng: Rng
    ) -> tuple[Priced, str]:
        means = fleet.belief
        if isinstance(means, LifetimeMeans):
            sizes = means.usual_sizes()
            expected = [means.latency_s(c.backend.spec.name, *sizes) for c in candidates]
        else:
            expected = [0.0] * len(candidates)
        chosen = lowest(expected, rng)
        return candidates[chosen], f"least latency {expected[chosen]:.2g}s of {len(candidates)}"
