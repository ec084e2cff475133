"""The least price, where a missed budget has its price too.

What is wanted is the lowest cost of all requests together while at most one in a hundred of each class misses its
budget. Its Lagrangian, one request at a time::

    score_j = price_j + V·( w_k·miss_j + crowding_j )          money
    chosen  = the lowest score;  a session stays where it was for up to 5 % more
    V       = 12 × the mean price of a request
    w_k     ← clip(w_k·exp(0.1·(missed - 0.01)), 0.5, 5)       per class k, with each end (`beliefs.classes`)

`w` is the multiplier of the class's constraint, found by dual ascent: a class that keeps its promises too well saves
money, one that breaks them pays more, and others give way to it, for `crowding` counts its misses with its weight. A
fixed bound on each request's own probability was tried first: at equal cost it keeps 0.3 points fewer in budget, since
it pays any price for the last tenth of a percent and none for what is beyond the bound.

Hopeless (every miss > 0.9), the miss is the same everywhere and lateness takes its place::

    score_j = price_j + V·( crowding_j + min(lateness_j, 100) / 100 )     lateness: predicted time over promised time

so that nobody piles up without end on the cheapest machine, nor stands in the way of those that can still be in time on
the quickest: by lateness alone, Azure's bursts of code completion lose 4 points of in-budget share in simulation, by
price alone half of the requests wait twice as long. A request that may be shed is, where it would come more than two
budgets late or its class has had no even chance for a quarter of a second; `Retry-After` is when the first backend is
predicted to offer one.

Candidates are weighed in order of price, as far as a lower score is possible at all; those that are not weighed stand
in the decision with their price alone. Of those equal in price six are looked at, evenly spaced from a throw, which
also keeps several routers with one picture from running to the same backend. More dice than that does harm: one taken
of all within 3 % of the lowest score, as TWF does (arXiv 2008.00793), is dearer than the herd (decision 0010).

A backend that never served gets one request: at once where nobody measured it, else where it has an even chance.

A caller without a budget is patient but not endlessly: `patience` stands in for one. Where weighing fails for a reason
that nobody foresaw, the request goes to the fewest in flight per weight: no request fails because of a model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import ClassVar

from backends.catalog.views import BackendView, FleetView
from policies.beliefs.classes import FIRST_SPREAD, ClassBelief
from policies.beliefs.pool import PoolBelief
from policies.chance import weighed, with_p99
from policies.facts import Budget, RequestFacts
from policies.hopeless import lateness, retry_after_s
from policies.pickers.weighing import pull, toss
from policies.policy import Choice, Priced, Rng
from policies.spec import setting

LOOKED_AT = 6
HOPELESS = 0.9
EVEN = 0.5
SATURATED_AFTER_S = 0.25
LATE = 2.0
"""In budgets: what may be shed is, rather than served later than this."""
LATEST = 100.0
"""Budgets of lateness that weigh as much as a whole miss; beyond, later is no worse."""


@dataclass(frozen=True, slots=True)
class ChanceConstrained:
    """The least price, where a missed budget and crowding out others have their price too."""

    name: ClassVar[str] = "chance_constrained"
    weighs: ClassVar[bool] = True
    miss_value: float = setting(
        12.0, "What keeping one budget is worth, in mean prices of a request: more is dearer and safer.", at_least=0)
    stickiness: float = setting(
        1.05, "A session stays where it was for up to this many times the lowest price, misses priced in.", at_least=1)
    patience_ttft_s: float = setting(
        10.0, "Seconds to the first token that a caller without any budget is taken to accept.", at_least=0)
    patience_inter_token_s: float = setting(
        0.25, "Seconds a token that a caller without any budget is taken to accept.", at_least=0)
    first_request: bool = setting(
        True, "Send each backend that never served one request, so that it is known.")
    sample: int = setting(
        64, "Backends that a decision looks at in a larger fleet: so many by dice, of each card type some.", at_least=1)

    def __call__(
        self, facts: RequestFacts, candidates: Sequence[Priced], fleet: FleetView, now: float, rng: Rng
    ) -> Choice:
        try:
            return _Weighing(self, facts, candidates, fleet, now, rng).choice()
        except Exception:
            # The lowest rung: whatever is wrong with the model, the request is served.
            return _least_inflight(candidates, now)

    def budget_of(self, facts: RequestFacts) -> Budget:
        """The caller's budget, or the patience that stands in for one."""
        budget = facts.budget
        if budget.ttft_s is None and budget.inter_token_s is None and budget.e2e_s is None:
            return Budget(self.patience_ttft_s, self.patience_inter_token_s)
        return budget


class _Weighing:
    """One choice under way. Candidates are replaced by what they weigh, in place."""

    __slots__ = ("budget", "candidates", "facts", "fleet", "kind", "now", "pool", "rng", "rules", "spread", "value",
                 "weight")  # fmt: skip

    def __init__(self, rules: ChanceConstrained, facts: RequestFacts, candidates: Sequence[Priced], fleet: FleetView,
                 now: float, rng: Rng) -> None:
        self.rules, self.facts, self.fleet, self.now, self.rng = rules, facts, fleet, now, rng
        self.candidates = list(candidates)
        self.budget = rules.budget_of(facts)
        pool = fleet.belief
        self.pool: PoolBelief | None = pool if type(pool) is PoolBelief else None
        self.kind: ClassBelief | None = None if self.pool is None else self.pool.class_of(facts)
        self.weight, self.spread = (1.0, FIRST_SPREAD) if self.kind is None else (self.kind.weight, self.kind.spread)
        self.value = rules.miss_value * self._mean_price()

    def choice(self) -> Choice:
        candidates = self.candidates
        if self.rules.first_request and (cold := self._cold()) is not None:
            return self._chosen(cold, "explore never served")
        prices = [candidate[1] for candidate in candidates]
        order = sorted(range(len(prices)), key=prices.__getitem__)
        best = self._lowest_score(order, prices)
        if self._miss(best) > HOPELESS and min([self._miss(place) for place in order]) > HOPELESS:
            return self._hopeless()
        why = "cheapest" if prices[best] == prices[order[0]] else "safer"
        if self.facts.session_key is not None and self.pool is not None:
            best, why = self._kept(best, why)
        found = candidates[best]
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
        found = self._weigh(place, best)
        score = found.price + self.value * (self.weight * found.miss + found.crowding)  # type: ignore[operator]
        return score if score == score else inf

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

    def _kept(self, best: int, why: str) -> tuple[int, str]:
        """Where the session was, if that costs little more."""
        assert self.pool is not None
        last = self.pool.sessions.get(self.facts.session_key or "")
        for place, candidate in enumerate(self.candidates):
            if candidate.backend.spec.name == last:
                if place != best and self._score(place) <= self.rules.stickiness * self._score(best):
                    return place, "session stays"
                break
        return best, why

    def _hopeless(self) -> Choice:
        facts = self.facts
        # Anew, for a miss that had ruled one out rules out nobody now.
        candidates = self.candidates = [
            weighed(facts, candidate, self.budget, self.spread, self.now) for candidate in self.candidates]
        late = [lateness(facts, self.budget, candidate.estimate) for candidate in candidates]
        scores = [(c.price + self.value * (c.crowding + min(each, LATEST) / LATEST), each)
                  for c, each in zip(candidates, late, strict=True)]
        least = min(scores)
        best = self._of_equals([place for place, score in enumerate(scores) if score == least])
        if facts.sheddable and (late[best] > LATE or self._saturated()):
            miss = min([self._miss(place) for place in range(len(candidates))])
            return Choice(None, f"shed p={miss:.2g} late {late[best]:.2g} budgets of {len(candidates)}", candidates,
                          retry_after_s(facts, self.budget, candidates))
        return self._chosen(
            best, f"late {late[best]:.2g} budgets price={candidates[best].price:.2g} of {len(candidates)}")

    def _saturated(self) -> bool:
        """The class has had no even chance anywhere for a while."""
        since_s = None if self.kind is None else self.kind.hopeless_since_s
        return since_s is not None and self.now - since_s >= SATURATED_AFTER_S

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
        if known is not None:
            return known
        finite = [candidate.price for candidate in self.candidates if candidate.price < inf]
        return sum(finite) / len(finite) if finite else 0.0

    def _chosen(self, place: int, reason: str) -> Choice:
        found = self._weigh(place)
        if found.estimate is not None:
            estimate = with_p99(self.facts, found.backend, found.estimate, self.spread)
            found = self.candidates[place] = Priced(
                found.backend, found.price, found.terms, found.late_s, estimate, found.miss, found.crowding)
        return Choice(found, reason, self.candidates)


def _never_tried(backend: BackendView) -> bool:
    return backend.in_flight_requests == 0 and backend.last_outcome_at_s is None


def _least_inflight(candidates: Sequence[Priced], now: float) -> Choice:
    loads = [(candidate.backend.in_flight_requests + 1) / pull(candidate.backend, now) for candidate in candidates]
    return Choice(candidates[loads.index(min(loads))], f"model fault: least inflight of {len(candidates)}", candidates)
