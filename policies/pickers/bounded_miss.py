"""The lowest price among those that are safe enough; where none is, the lowest price with misses priced in.

::

    safe    = { j : miss_j <= alpha  and  crowding_j <= 0.05 }       alpha: the class's own, about 1 %
    chosen  = the lowest price of them;  a session stays where it was, if that is safe, for up to 5 % more
    else      the lowest  price_j + V·(miss_j + crowding_j)          V = 25 × the mean price of a request
    shed    : none is safe, the one chosen misses with 90 % or more, and the request may be shed

`alpha` is learned by `learners.miss_bounds`; without that learner it stays at 1 %. What may not be shed and is hopeless
everywhere goes to the cheapest place and piles up there.

Candidates are weighed in order of price, no further than to the first that is safe; those that are not weighed stand
in the decision with their price alone. Of those equal in price the least likely to miss is taken, ties by dice in
proportion to weights. A caller without a budget misses nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from backends.catalog.views import FleetView
from policies.beliefs.classes import TARGET
from policies.beliefs.lengths import FIRST_SPREAD
from policies.chance import weighed, with_p99
from policies.facts import RequestFacts
from policies.hopeless import shed
from policies.learners.miss_bounds import MissBounds
from policies.pickers.weighing import lowest, mean_price, pull
from policies.policy import Choice, Priced, Rng
from policies.spec import setting

HOPELESS = 0.9


@dataclass(frozen=True, slots=True)
class BoundedMiss:
    """The lowest price among those whose chance of a miss is within a bound that adapts, else with misses priced in."""

    name: ClassVar[str] = "bounded_miss"
    weighs: ClassVar[bool] = True
    crowding_limit: float = setting(
        0.05, "Expected misses among requests already there that one more may cause.", at_least=0)
    miss_value: float = setting(
        25.0, "What keeping one budget is worth where no backend is safe, in mean prices of a request.", at_least=0)
    stickiness: float = setting(
        1.05, "A session stays where it was for up to this many times the lowest price.", at_least=1)

    def __call__(
        self, facts: RequestFacts, candidates: Sequence[Priced], fleet: FleetView, now: float, rng: Rng
    ) -> Choice:
        return _Choosing(self, facts, candidates, fleet, now, rng).choice()


class _Choosing:
    """One choice under way. Candidates are replaced by what they weigh, in place."""

    __slots__ = ("alpha", "candidates", "facts", "last", "mean_price", "now", "rng", "rules", "spread")

    def __init__(self, rules: BoundedMiss, facts: RequestFacts, candidates: Sequence[Priced], fleet: FleetView,
                 now: float, rng: Rng) -> None:
        self.rules, self.facts, self.now, self.rng = rules, facts, now, rng
        self.candidates = list(candidates)
        self.alpha, self.spread, self.last = TARGET, FIRST_SPREAD, None
        self.mean_price: float | None = None
        bounds = fleet.belief
        if isinstance(bounds, MissBounds):
            self.alpha, self.last = bounds.alpha(facts), bounds.last_backend(facts)
            self.mean_price = bounds.mean_price(facts.model)
            if (lengths := bounds.lengths_of(facts)) is not None:
                self.spread = lengths.spread

    def choice(self) -> Choice:
        cheapest = self._cheapest_safe()
        if cheapest is not None:
            place, why = self._kept(cheapest)
            return self._chosen(place, why)
        scores = [self._score(place) for place in range(len(self.candidates))]
        place = lowest(scores, self.rng, [pull(each.backend, self.now) for each in self.candidates])
        if self.facts.sheddable and self._miss(place) >= HOPELESS:
            return self._shed()
        return self._chosen(place, "none safe")

    def _weigh(self, place: int) -> Priced:
        candidate = self.candidates[place]
        if candidate.miss is None:
            candidate = self.candidates[place] = weighed(
                self.facts, candidate, self.facts.budget, self.spread, self.now)
        return candidate

    def _miss(self, place: int) -> float:
        miss = self._weigh(place).miss
        return 1.0 if miss is None else miss

    def _is_safe(self, place: int) -> bool:
        return self._miss(place) <= self.alpha and self.candidates[place].crowding <= self.rules.crowding_limit

    def _score(self, place: int) -> float:
        miss, found = self._miss(place), self.candidates[place]
        return found.price + self.rules.miss_value * self._mean_price() * (miss + found.crowding)

    def _mean_price(self) -> float:
        if self.mean_price is None:
            self.mean_price = mean_price(self.candidates)
        return self.mean_price

    def _cheapest_safe(self) -> int | None:
        order = sorted(range(len(self.candidates)), key=lambda place: self.candidates[place].price)
        start = 0
        while start < len(order):
            price, end = self.candidates[order[start]].price, start + 1
            while end < len(order) and self.candidates[order[end]].price == price:
                end += 1
            safe = [place for place in order[start:end] if self._is_safe(place)]
            if safe:
                risks = [self._miss(place) + self.candidates[place].crowding for place in safe]
                return safe[lowest(risks, self.rng, [pull(self.candidates[place].backend, self.now) for place in safe])]
            start = end
        return None

    def _kept(self, cheapest: int) -> tuple[int, str]:
        """Where the session was, if that is safe and costs little more."""
        limit = self.rules.stickiness * self.candidates[cheapest].price
        for place, candidate in enumerate(self.candidates):
            if candidate.backend.spec.name == self.last:
                if place != cheapest and candidate.price <= limit and self._is_safe(place):
                    return place, "session stays"
                break
        return cheapest, "cheapest safe"

    def _chosen(self, place: int, why: str) -> Choice:
        found = self._weigh(place)
        if found.estimate is not None:
            found = self.candidates[place] = found._replace(
                estimate=with_p99(self.facts, found.backend, found.estimate, self.spread))
        reason = f"{why} p={found.miss:.2g} alpha={self.alpha:.2g} price={found.price:.2g} of {len(self.candidates)}"
        return Choice(found, reason, self.candidates)

    def _shed(self) -> Choice:
        miss = min([self._miss(place) for place in range(len(self.candidates))])
        return shed(self.facts, self.facts.budget, self.candidates, miss)
