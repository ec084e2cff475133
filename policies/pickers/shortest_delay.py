"""Shortest expected delay: the lowest predicted time to the last token, ties by dice in proportion to weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from backends.catalog.views import FleetView
from policies.facts import RequestFacts
from policies.pickers.predicted import predicted
from policies.pickers.weighing import lowest, pull
from policies.policy import Priced, Rng


@dataclass(frozen=True, slots=True)
class ShortestDelay:
    """The lowest predicted time to the last token."""

    name: ClassVar[str] = "shortest_delay"

    def __call__(
        self, facts: RequestFacts, candidates: Sequence[Priced], fleet: FleetView, now: float, rng: Rng
    ) -> tuple[Priced, str]:
        delays = [predicted(facts, c, now).e2e_s for c in candidates]
        chosen = lowest(delays, rng, [pull(c.backend, now) for c in candidates])
        return candidates[chosen], f"shortest delay {delays[chosen]:.2g}s of {len(candidates)}"
