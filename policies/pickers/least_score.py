"""The least score of one request's candidates, weighed no further than a lower one is possible.

The formula and its reasons are those of `pickers.chance_constrained`, the part with the settings. Apart from it, since
this is what a decision spends its time on and can be compiled (`compiled`).
"""

from collections.abc import Sequence
from math import inf
from typing import Protocol

from backends.catalog.views import BackendView, FleetView
from policies.beliefs.lengths import FIRST_SPREAD
from policies.beliefs.pool import PoolBelief
from policies.chance import weighed, with_p99
from policies.facts import Budget, RequestFacts
from policies.hopeless import lateness, shed
from policies.pickers.weighing import mean_price, pull, toss
from policies.policy import Choice, Priced, Rng

LOOKED_AT = 6
HOPELESS = 0.9
EVEN = 0.5
LATEST = 70.0
"""Budgets of lateness that weigh as much as a whole miss; beyond, later is no worse."""


class Rules(Protocol):
    """The settings; see the part."""

    @property
    def miss_value(self) -> float: ...
    @property
    def stickiness(self) -> float: ...
    @property
    def first_request(self) -> bool: ...
    def budget_of(self, facts: RequestFacts) -> Budget: ...


class LeastScore:
    """One choice under way. Candidates are replaced by what they weigh, in place."""

    __slots__ = ("budget", "candidates", "facts", "fleet", "now", "pool", "rng", "rules", "spread", "value",
                 "weight")  # fmt: skip

    def __init__(self, rules: Rules, facts: RequestFacts, candidates: Sequence[Priced], fleet: FleetView,
                 now: float, rng: Rng) -> None:
        self.rules, self.facts, self.fleet, self.now, self.rng = rules, facts, fleet, now, rng
        self.candidates = list(candidates)
        self.budget = rules.budget_of(facts)
        pool = fleet.belief
        self.pool: PoolBelief | None = pool if type(pool) is PoolBelief else None
        self.weight, self.spread = 1.0, FIRST_SPREAD
        if self.pool is not None:
            kind = self.pool.class_of(facts)
            lengths = self.pool.lengths_of(facts) if kind is None else kind.lengths
            self.weight = 1.0 if kind is None else kind.weight
            self.spread = FIRST_SPREAD if lengths is None else lengths.spread
        self.value = rules.miss_value * self._mean_price()

    def choice(self) -> Choice:
        if self.rules.first_request and (cold := self._cold()) is not None:
            return self._chosen(cold, "explore never served")
        prices = [candidate[1] for candidate in self.candidates]
        order = sorted(range(len(prices)), key=prices.__getitem__)
        best = self._lowest_score(order, prices)
        if self._miss(best) > HOPELESS and min([self._miss(place) for place in order]) > HOPELESS:
            return self._hopeless()
        places: Sequence[int] = order
        if self.facts.sheddable and self._loses(best):
            places = self._worth()
            if not places:
                return self._shed()
            best = min(places, key=self._score)
        if self._miss(best) > HOPELESS:
            why = "gives way"
        else:
            why = "cheapest" if prices[best] == prices[order[0]] else "safer"
        if self.facts.session_key is not None and self.pool is not None:
            best, why = self._kept(best, why, places)
        found = self.candidates[best]
        return self._chosen(best, f"{why} p={found.miss:.2g} price={found.price:.2g} of {len(order)}")

    def _weigh(self, place: int, best: float = inf) -> Priced:
        """The candidate, weighed; with no crowding where its miss alone makes its score more than `best`."""
        candidate = self.candidates[place]
        if candidate.miss is None:
            price_of_miss = self.value * self.weight
            beyond = (best - candidate.price) / price_of_miss if price_of_miss > 0.0 else inf
            candidate = self.candidates[place] = weighed(
                self.facts, candidate, self.budget, self.spread, self.now, beyond)
        return candidate

    def _miss(self, place: int) -> float:
        miss = self._weigh(place).miss
        return 1.0 if miss is None else miss

    def _score(self, place: int, best: float = inf) -> float:
        found = self.candidates[place]
        if found[5] is None:
            found = self._weigh(place, best)
        _, price, _, _, _, miss, crowding = found
        score = price + self.value * (self.weight * miss + crowding)  # type: ignore[operator]
        if miss > HOPELESS:  # type: ignore[operator]
            score += self.value * self._late(lateness(self.facts, self.budget, found.estimate))
        return score if score == score else inf

    def _late(self, budgets: float) -> float:
        """What so much lateness weighs, in misses."""
        return min(budgets, LATEST) / LATEST

    def _lowest_score(self, order: Sequence[int], prices: Sequence[float]) -> int:
        """The place of the lowest score; `order` has the places by price."""
        scores: list[tuple[float, int]] = []
        best, start, count = inf, 0, len(order)
        while start < count and (prices[order[start]] < best or start == 0):
            price, end = prices[order[start]], start + 1
            while end < count and prices[order[end]] == price:
                end += 1
            # Of equals a few, evenly spaced from a throw: all others are as likely to be as good.
            equals = end - start
            turn, stride = (self.rng.randrange(equals), max(1, equals // LOOKED_AT)) if equals > 1 else (0, 1)
            for step in range(min(equals, LOOKED_AT)):
                place = order[start + (turn + step * stride) % equals]
                score = self._score(place, best)
                scores.append((score, place))
                if score < best:
                    best = score
            start = end
        return self._of_equals([place for score, place in scores if score == best] or [order[0]])

    def _kept(self, best: int, why: str, places: Sequence[int]) -> tuple[int, str]:
        """Where the session was, if that is one of the places and costs little more."""
        assert self.pool is not None
        last = self.pool.sessions.get(self.facts.session_key or "")
        place = next((place for place in places if self.candidates[place].backend.spec.name == last), best)
        limit = self.rules.stickiness * self._score(best)
        if place == best or self._score(place) > limit:
            return best, why
        # Anew, for a miss that had ruled it out from being the best left its crowding out.
        self.candidates[place] = weighed(self.facts, self.candidates[place], self.budget, self.spread, self.now)
        return (place, "session stays") if self._score(place) <= limit else (best, why)

    def _loses(self, place: int) -> bool:
        """Whether others would miss as much because of it there as it can keep."""
        found = self._weigh(place)
        return self.weight * (1.0 - found.miss) <= found.crowding  # type: ignore[operator]

    def _worth(self) -> list[int]:
        """The places where more budgets would be kept with the request than without."""
        self._weigh_all()
        return [place for place in range(len(self.candidates)) if not self._loses(place)]

    def _weigh_all(self) -> None:
        """Anew, for a miss that had ruled one out rules out nobody now."""
        self.candidates = [
            weighed(self.facts, candidate, self.budget, self.spread, self.now) for candidate in self.candidates]

    def _hopeless(self) -> Choice:
        facts = self.facts
        self._weigh_all()
        if facts.sheddable:
            return self._shed()
        candidates = self.candidates
        late = [lateness(facts, self.budget, candidate.estimate) for candidate in candidates]
        scores = [(c.price + self.value * (c.crowding + self._late(each)), each)
                  for c, each in zip(candidates, late, strict=True)]
        least = min(scores)
        best = self._of_equals([place for place, score in enumerate(scores) if score == least])
        return self._chosen(
            best, f"late {late[best]:.2g} budgets price={candidates[best].price:.2g} of {len(candidates)}")

    def _shed(self) -> Choice:
        miss = min([self._miss(place) for place in range(len(self.candidates))])
        return shed(self.facts, self.budget, self.candidates, miss)

    def _of_equals(self, places: Sequence[int]) -> int:
        """One of them by dice, as the operator's weights are; the first candidate where there are none."""
        if len(places) > 1:
            return toss(places, [pull(self.candidates[place].backend, self.now) for place in places], self.rng)
        return places[0] if places else 0

    def _cold(self) -> int | None:
        """A backend that never served, never failed and is not being tried now; the cheapest of them."""
        cold = [place for place, candidate in enumerate(self.candidates)
                if candidate[0].served_requests == 0 and _never_tried(candidate[0])]
        if not cold:
            return None
        worth = [(self.candidates[place].price, place) for place in cold
                 if self.candidates[place].backend.spec.coefficients is None or self._miss(place) <= EVEN]
        return min(worth)[1] if worth else None

    def _mean_price(self) -> float:
        known = None if self.pool is None else self.pool.mean_price.get(self.facts.model)
        return mean_price(self.candidates) if known is None else known

    def _chosen(self, place: int, reason: str) -> Choice:
        found = self._weigh(place)
        if found.estimate is not None:
            estimate = with_p99(self.facts, found.backend, found.estimate, self.spread)
            found = self.candidates[place] = Priced(
                found.backend, found.price, found.terms, found.late_s, estimate, found.miss, found.crowding)
        return Choice(found, reason, self.candidates)


def _never_tried(backend: BackendView) -> bool:
    return backend.in_flight_requests == 0 and backend.last_outcome_at_s is None
