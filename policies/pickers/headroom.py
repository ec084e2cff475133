"""llm-d's predicted-latency rule: by how much the prediction stays below the caller's budgets.

::

    headroom_ttft = ttft budget - waited - predicted ttft          s; a budget not given counts as 0
    headroom_tpot = inter-token budget - predicted tpot            s
    blend         = 0.8 · spread(|headroom_ttft|) + 0.2 · spread(|headroom_tpot|)     each spread over [0, 1]

1. *Tier.* Those with no negative headroom; with probability `explore_share` the others, where there are both.
2. *Score.* In steps of a hundredth, the lowest blend, or the highest with `prefer_most`. A dimension in which all are
   equal has no weight.
3. *None within budget.* The idle where there are any; else those that miss the pace only, else the first token only,
   else both: always the lowest blend, so the smallest miss.
4. Ties are settled by dice.

Scores are relative to the other candidates and have no unit, as in the original.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import ClassVar

from backends.catalog.views import FleetView
from policies.facts import RequestFacts
from policies.pickers.predicted import predicted
from policies.pickers.weighing import lowest
from policies.policy import Priced, Rng
from policies.spec import setting

STEPS = 100
EQUAL_S = 1e-9
FAR_S = 1e9
"""Stands for an infinite prediction, so that differences stay finite."""


@dataclass(frozen=True, slots=True)
class _Room:
    candidate: Priced
    ttft_s: float
    tpot_s: float

    @property
    def kept(self) -> bool:
        return self.ttft_s >= 0.0 and self.tpot_s >= 0.0


@dataclass(frozen=True, slots=True)
class Headroom:
    """The least headroom below the budgets that is not negative, or the most."""

    name: ClassVar[str] = "headroom"
    prefer_most: bool = setting(False, "Take the candidate with the most headroom instead of the least.")
    ttft_weight: float = setting(0.8, "Weight of the first token's headroom.", at_least=0, at_most=1)
    explore_share: float = setting(
        0.01, "Share of requests that go to a candidate predicted over budget.", at_least=0, at_most=1)

    def __call__(
        self, facts: RequestFacts, candidates: Sequence[Priced], fleet: FleetView, now: float, rng: Rng
    ) -> tuple[Priced, str]:
        rooms = [_room(facts, c, now) for c in candidates]
        kept, missed = [room for room in rooms if room.kept], [room for room in rooms if not room.kept]
        explore = bool(kept and missed) and rng.random() < self.explore_share
        if kept and not explore:
            chosen = kept[lowest(self._scores(kept, self.prefer_most), rng)]
            return chosen.candidate, f"headroom ttft={chosen.ttft_s:.2g}s tpot={chosen.tpot_s:.2g}s of {len(kept)}"
        bucket = _mildest(missed)
        chosen = bucket[lowest(self._scores(bucket, prefer_most=False), rng)]
        word = "explore" if explore else "over budget"
        return chosen.candidate, f"{word} ttft={chosen.ttft_s:.2g}s tpot={chosen.tpot_s:.2g}s of {len(bucket)}"

    def _scores(self, rooms: Sequence[_Room], prefer_most: bool) -> list[int]:
        """Lower is better."""
        first, first_range = _spread([abs(room.ttft_s) for room in rooms])
        pace, pace_range = _spread([abs(room.tpot_s) for room in rooms])
        weight = self.ttft_weight
        if (first_range <= EQUAL_S) != (pace_range <= EQUAL_S):
            weight = 0.0 if first_range <= EQUAL_S else 1.0
        blends = [weight * early + (1.0 - weight) * quick for early, quick in zip(first, pace, strict=True)]
        return [-int(STEPS * (blend if prefer_most else 1.0 - blend)) for blend in blends]


def _room(facts: RequestFacts, candidate: Priced, now: float) -> _Room:
    estimate, budget = predicted(facts, candidate, now), facts.budget
    return _Room(candidate, _finite((budget.ttft_s or 0.0) - facts.waited_s - estimate.ttft_s),
                 _finite((budget.inter_token_s or 0.0) - estimate.tpot_s))


def _finite(headroom_s: float) -> float:
    return max(-FAR_S, headroom_s) if isfinite(headroom_s) else -FAR_S


def _spread(values: Sequence[float]) -> tuple[list[float], float]:
    """Each value's place between the lowest and the highest, and how far those are apart; 1/2 where they are equal."""
    low, high = min(values), max(values)
    if high - low <= EQUAL_S:
        return [0.5] * len(values), high - low
    return [(value - low) / (high - low) for value in values], high - low


def _mildest(missed: Sequence[_Room]) -> Sequence[_Room]:
    idle = [room for room in missed if room.candidate.backend.in_flight_requests == 0]
    pace_only = [room for room in missed if room.ttft_s >= 0.0]
    first_only = [room for room in missed if room.tpot_s >= 0.0]
    return idle or pace_only or first_only or missed
