"""Power of two choices: two different candidates by dice, the one with less in flight per weight of them.

Both are drawn in proportion to weights. On equal load the first drawn wins, so that an idle fleet shares by weight.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from backends.catalog.views import FleetView
from policies.facts import RequestFacts
from policies.pickers.weighing import draw, pull
from policies.policy import Priced, Rng


@dataclass(frozen=True, slots=True)
class PowerOfTwoChoices:
    """The less loaded of two candidates drawn by weight."""

    name: ClassVar[str] = "p2c"

    def __call__(
        self, facts: RequestFacts, candidates: Sequence[Priced], fleet: FleetView, now: float, rng: Rng
    ) -> tuple[Priced, str]:
        pulls = [pull(c.backend, now) for c in candidates]
        first = draw(candidates, pulls, rng.random())
        others = [index for index in range(len(candidates)) if index != first]
        if not others:
            return candidates[first], "only candidate"
        second = others[draw(others, [pulls[index] for index in others], rng.random())]
        loads = [candidates[index].backend.in_flight_requests / pulls[index] for index in (first, second)]
        chosen = candidates[first if loads[0] <= loads[1] else second]
        return chosen, f"p2c inflight {chosen.backend.in_flight_requests} of {len(candidates)}"
