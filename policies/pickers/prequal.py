"""Prequal's rule: hot replicas by requests in flight (RIF), cold ones by latency.

1. *Pool.* `pool_size` candidates by dice, all where there are no more.
2. *Hot* is who has more in flight than the `rif_quantile` of the pool has.
3. Among the cold, the lowest median time to first token at the present load.

Medians come from the learner `ttft_by_load`; a candidate without one counts as 0 and is tried. Without the learner the
fewest in flight wins. Ties are settled by dice. The original's third rule, fewest in flight where all are hot, has no
case here: its quantile is of probes gone by, this one of the pool itself, whose least loaded is never above it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from backends.catalog.views import FleetView
from policies.facts import RequestFacts
from policies.learners.peers.ttft_by_load import TtftByLoad
from policies.pickers.weighing import lowest, some_of
from policies.policy import Priced, Rng
from policies.spec import setting


@dataclass(frozen=True, slots=True)
class Prequal:
    """The fastest candidate among those that are not hot, by the quantile of requests in flight."""

    name: ClassVar[str] = "prequal"
    rif_quantile: float = setting(
        0.84, "Quantile of requests in flight above which a candidate is hot.", at_least=0, at_most=1)
    pool_size: int = setting(16, "Candidates that are looked at for one decision.", at_least=1)

    def __call__(
        self, facts: RequestFacts, candidates: Sequence[Priced], fleet: FleetView, now: float, rng: Rng
    ) -> tuple[Priced, str]:
        pool = some_of(candidates, self.pool_size, rng)
        flying = [c.backend.in_flight_requests for c in pool]
        threshold = sorted(flying)[int(self.rif_quantile * (len(flying) - 1))]
        cold = [c for c, rif in zip(pool, flying, strict=True) if rif <= threshold]
        times = fleet.belief
        if not isinstance(times, TtftByLoad):
            chosen = pool[lowest(flying, rng)]
            return chosen, f"prequal rif {chosen.backend.in_flight_requests} of {len(pool)}"
        latencies = [times.ttft_s(c.backend.spec.name, c.backend.in_flight_requests, now) or 0.0 for c in cold]
        index = lowest(latencies, rng)
        return cold[index], f"prequal cold {latencies[index]:.2g}s, {len(cold)} cold of {len(pool)}"
