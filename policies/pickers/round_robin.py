"""Turns, in proportion to weights, without state.

The n-th decision falls on the point `frac(n · φ)`, φ the golden ratio, of a row in which each candidate is as wide as
its weight. Those points fill the row more evenly than any dice (a Kronecker sequence of the lowest discrepancy), so
shares follow the weights to within a request or two over any stretch.

A plain `n mod candidates` would be simpler and wrong: the counter is shared by all models and by retries, and two
models asked in turn would then each see only every second backend. Any regular subsequence of `n · φ` is even again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from backends.catalog.views import FleetView
from policies.facts import RequestFacts
from policies.pickers.weighing import draw, pull
from policies.policy import Priced, Rng

# 2⁶⁴/φ: whole numbers keep the sequence exact however long the router runs.
GOLDEN = 0x9E3779B97F4A7C15
FULL = 1 << 64


@dataclass(frozen=True, slots=True)
class RoundRobin:
    """Each candidate in turn, in proportion to its weight."""

    name: ClassVar[str] = "round_robin"

    def __call__(
        self, facts: RequestFacts, candidates: Sequence[Priced], fleet: FleetView, now: float, rng: Rng
    ) -> tuple[Priced, str]:
        share = (fleet.sequence * GOLDEN) % FULL / FULL
        pulls = [pull(c.backend, now) for c in candidates]
        return candidates[draw(candidates, pulls, share)], f"turn {fleet.sequence} of {len(candidates)}"
