"""Turns in proportion to operator weight times measured capacity, as smooth as turns can be.

Whose turn it is is remembered by the learner `turns`. Without it the turn comes from the decision counter, as in
`round_robin`, with the same weights: equally fair, a little less even.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from backends.catalog.views import FleetView
from policies.facts import RequestFacts
from policies.learners.peers.turns import Turns
from policies.pickers.capacity import measured_pull
from policies.pickers.round_robin import FULL, GOLDEN
from policies.pickers.weighing import draw
from policies.policy import Priced, Rng


@dataclass(frozen=True, slots=True)
class WeightedRoundRobin:
    """Each candidate in turn, in proportion to its weight and measured capacity."""

    name: ClassVar[str] = "weighted_round_robin"

    def __call__(
        self, facts: RequestFacts, candidates: Sequence[Priced], fleet: FleetView, now: float, rng: Rng
    ) -> tuple[Priced, str]:
        pulls = [measured_pull(c.backend, now) for c in candidates]
        turns = fleet.belief
        if isinstance(turns, Turns):
            due = [turns.due(c.backend, width) for c, width in zip(candidates, pulls, strict=True)]
            chosen = due.index(min(due))
        else:
            chosen = draw(candidates, pulls, (fleet.sequence * GOLDEN) % FULL / FULL)
        return candidates[chosen], f"turn share={pulls[chosen] / sum(pulls):.2f} of {len(candidates)}"
