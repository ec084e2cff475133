"""The cheapest backend whose probability of missing the caller's budget is small enough.

::

    qualified = { j : miss_j ≤ alpha  and  crowding_j ≤ 0.05 }         alpha: the class's own, about 1 %
    chosen    = cheapest of them;  a session stays where it was for up to 5 % more money
    else        lowest  price + V·(miss + crowding)                     V = 25 × the mean price of a request
    hopeless    (every miss > 0.9): lowest predicted lateness           max(ttft / Bt, last token / its deadline)

`V` is what one request within its budget is worth. Once all are hopeless money must not pile everyone up on the
cheapest machine: lateness orders them then. A request that may be shed is, where it is hopeless everywhere and its
class has had no even chance for a second; `Retry-After` is when the first backend is predicted to have one.

Candidates are weighed in order of price, and no further than to the first that qualifies; those that are not weighed
stand in the decision with their price alone. Among equals in price (within 3 % where several routers share the fleet)
up to three that qualify are looked at, and the least likely to miss is taken, by dice among several routers: those of
one picture would all run to the same backend (Goren, Vargaftik and Moses, "Distributed dispatching in the parallel
server model", DISC 2020).

A backend that never served gets one request: at once where nobody measured it, else where it has an even chance.

A caller without a budget is patient but not endlessly: `patience` stands in for one. Where weighing fails for a reason
that nobody foresaw, the request goes to the fewest in flight per weight: no request fails because of a model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf
from operator import itemgetter
from typing import ClassVar

from backends.catalog.views import FleetView
from policies.beliefs.classes import FIRST_SPREAD, TARGET, ClassBelief
from policies.beliefs.pool import PoolBelief
from policies.chance import weighed, with_p99
from policies.facts import Budget, RequestFacts
from policies.pickers.weighing import pull, toss
from policies.policy import Choice, Priced, Rng
from policies.spec import setting

NEAR_EQUAL = 1.03
LOOKED_AT = 3
HOPELESS = 0.9
SURELY_LATE = 0.95
EVEN = 0.5
SATURATED_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 60.0

price_then_place = itemgetter(0, 1)


@dataclass(frozen=True, slots=True)
class ChanceConstrained:
    """The cheapest backend whose probability of missing the budget is small enough, and that crowds out nobody."""

    name: ClassVar[str] = "chance_constrained"
    weighs: ClassVar[bool] = True
    crowding_limit: float = setting(
        0.05, "Expected misses among requests already there that one more may cause.", at_least=0)
    value_ratio: float = setting(
        25.0, "What a request within its budget is worth, in mean prices of a request.", at_least=0)
    stickiness: float = setting(
        1.05, "A session stays where it was for up to this many times the cheapest price.", at_least=1)
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

    __slots__ = ("alpha", "budget", "candidates", "facts", "fleet", "kind", "now", "pool", "rng", "rules", "spread")

    def __init__(self, rules: ChanceConstrained, facts: RequestFacts, candidates: Sequence[Priced], fleet: FleetView,
                 now: float, rng: Rng) -> None:
        self.rules, self.facts, self.fleet, self.now, self.rng = rules, facts, fleet, now, rng
        self.candidates = list(candidates)
        self.budget = rules.budget_of(facts)
        pool = fleet.belief
        self.pool: PoolBelief | None = pool if type(pool) is PoolBelief else None
        self.kind: ClassBelief | None = None if self.pool is None else self.pool.class_of(facts)
        self.alpha = TARGET if self.kind is None else self.kind.alpha
        self.spread = FIRST_SPREAD if self.kind is None else self.kind.spread

    def choice(self) -> Choice:
        if self.rules.first_request and (cold := self._cold()) is not None:
            return self._chosen(cold, "explore never served")
        order = sorted([(candidate.price, place) for place, candidate in enumerate(self.candidates)])
        best = self._cheapest(order)
        if best is not None:
            best, why = self._kept(best)
            found = self.candidates[best]
            return self._chosen(best, f"{why} p={found.miss:.2g} price={found.price:.2g} of {len(order)}")
        # All are weighed by now, for none qualified.
        if min([self._miss(place) for _, place in order]) > HOPELESS:
            return self._hopeless()
        worth = self.rules.value_ratio * self._mean_price()
        best = self._lowest([c.price + worth * (c.miss + c.crowding) for c in self.candidates])  # type: ignore[operator]
        found = self.candidates[best]
        return self._chosen(best, f"best chance p={found.miss:.2g} crowding={found.crowding:.2g} of {len(order)}")

    def _weigh(self, place: int) -> Priced:
        candidate = self.candidates[place]
        if candidate.miss is None:
            candidate = self.candidates[place] = weighed(self.facts, candidate, self.budget, self.spread, self.now)
        return candidate

    def _miss(self, place: int) -> float:
        miss = self._weigh(place).miss
        return 1.0 if miss is None else miss

    def _qualifies(self, place: int) -> bool:
        found = self._weigh(place)
        return found.miss <= self.alpha and found.crowding <= self.rules.crowding_limit  # type: ignore[operator]

    def _cheapest(self, order: Sequence[tuple[float, int]]) -> int | None:
        """The place of the cheapest that qualifies; of equals in price the least likely to miss of a few."""
        several = self.fleet.routers > 1
        ratio = NEAR_EQUAL if several else 1.0
        start = 0
        while start < len(order):
            limit, end = order[start][0] * ratio, start + 1
            while end < len(order) and order[end][0] <= limit:
                end += 1
            if end - start == 1:
                if self._qualifies(order[start][1]):
                    return order[start][1]
            else:
                turn = self.rng.randrange(end - start)
                found: list[int] = []
                for step in range(start, end):
                    place = order[start + (step - start + turn) % (end - start)][1]
                    if self._qualifies(place):
                        found.append(place)
                        if len(found) == LOOKED_AT:
                            break
                if found:
                    return self._of_equals(found, several)
            start = end
        return None

    def _of_equals(self, places: list[int], several: bool) -> int:
        views = [self.candidates[place] for place in places]
        risks = [c.miss + c.crowding for c in views]  # type: ignore[operator]
        if several:
            room = [max(1e-6, self.alpha + self.rules.crowding_limit - risk) for risk in risks]
            return toss(places, [width * pull(c.backend, self.now) for width, c in zip(room, views, strict=True)],
                        self.rng)
        ends = [(risk, c.estimate.e2e_s if c.estimate else inf) for risk, c in zip(risks, views, strict=True)]
        least = min(ends)
        ties = [place for place, end in zip(places, ends, strict=True) if end == least]
        return toss(ties, [pull(self.candidates[place].backend, self.now) for place in ties], self.rng)

    def _kept(self, best: int) -> tuple[int, str]:
        """Where the session was, if that qualifies and costs little more."""
        session = self.facts.session_key
        if session is None or self.pool is None:
            return best, "cheapest"
        last = self.pool.sessions.get(session)
        limit = self.rules.stickiness * self.candidates[best].price
        for place, candidate in enumerate(self.candidates):
            if candidate.backend.spec.name == last:
                if place != best and candidate.price <= limit and self._qualifies(place):
                    return place, "session stays"
                break
        return best, "cheapest"

    def _hopeless(self) -> Choice:
        facts, kind = self.facts, self.kind
        surely = min([c.miss + c.crowding for c in self.candidates]) > 1.0  # type: ignore[operator]
        if facts.sheddable and surely and kind is not None and kind.hopeless_since_s is not None:
            least = min([self._miss(place) for place in range(len(self.candidates))])
            if least > SURELY_LATE and self.now - kind.hopeless_since_s >= SATURATED_AFTER_S:
                return Choice(None, f"shed p={least:.2g} of {len(self.candidates)}", self.candidates,
                              self._retry_after_s())
        lateness = [self._lateness(c) for c in self.candidates]
        best = self._lowest(lateness)
        return self._chosen(best, f"least late {lateness[best]:.2g} budgets of {len(self.candidates)}")

    def _lateness(self, candidate: Priced) -> float:
        """Predicted time over promised time, of the first token or the last, whichever is worse."""
        budget, estimate, waited_s = self.budget, candidate.estimate, self.facts.waited_s
        if estimate is None:
            return inf
        gaps = max(0, self.facts.expected_output_tokens - 1)
        late = 0.0
        if budget.ttft_s is not None:
            late = (waited_s + estimate.ttft_s) / max(1e-3, budget.ttft_s)
        if budget.inter_token_s is not None:
            from_s, took_s = (0.0, estimate.tpot_s * gaps) if budget.ttft_s is None else (
                budget.ttft_s, waited_s + estimate.e2e_s)
            late = max(late, took_s / max(1e-3, from_s + gaps * budget.inter_token_s))
        if budget.e2e_s is not None:
            late = max(late, (waited_s + estimate.e2e_s) / max(1e-3, budget.e2e_s))
        return late if late == late else inf

    def _retry_after_s(self) -> float:
        """Until one backend has an even chance: what is in the way there has drained by then."""
        budget, facts = self.budget, self.facts
        soonest_s = MAX_RETRY_AFTER_S
        for candidate in self.candidates:
            estimate, over_s = candidate.estimate, 0.0
            if estimate is None:
                continue
            if budget.ttft_s is not None:
                over_s = estimate.ttft_s - budget.ttft_s
            if budget.e2e_s is not None:
                over_s = max(over_s, estimate.e2e_s - budget.e2e_s)
            if budget.inter_token_s is not None and estimate.tpot_s > budget.inter_token_s:
                # As many streams have to end as make the pace too slow; half of an answer is left of each in the mean.
                share = 1.0 - budget.inter_token_s / estimate.tpot_s
                over_s = max(over_s, share * 0.5 * facts.expected_output_tokens * estimate.tpot_s)
            soonest_s = min(soonest_s, over_s)
        return float(ceil(max(1.0, soonest_s)))

    def _cold(self) -> int | None:
        """A backend that never served, never failed and is not being tried now; the cheapest of them."""
        cold = [place for place, (view, *_) in enumerate(self.candidates)
                if view.served_requests == 0 and view.in_flight_requests == 0 and view.last_outcome_at_s is None]
        if not cold:
            return None
        worth = [place for place in cold
                 if self.candidates[place].backend.spec.coefficients is None or self._miss(place) <= EVEN]
        if not worth:
            return None
        prices = [self.candidates[place].price for place in worth]
        return worth[prices.index(min(prices))]

    def _mean_price(self) -> float:
        known = None if self.pool is None else self.pool.mean_price.get(self.facts.model)
        if known is not None:
            return known
        finite = [c.price for c in self.candidates if c.price < inf]
        return sum(finite) / len(finite) if finite else 0.0

    def _lowest(self, scores: Sequence[float]) -> int:
        """The place of the lowest score; equals by dice, as the weights are."""
        least = min(scores)
        places = [place for place, score in enumerate(scores) if score == least] or [0]
        return toss(places, [pull(self.candidates[place].backend, self.now) for place in places], self.rng)

    def _chosen(self, place: int, reason: str) -> Choice:
        found = self._weigh(place)
        if found.estimate is not None:
            estimate = with_p99(self.facts, found.backend, found.estimate, self.spread)
            found = self.candidates[place] = Priced(*found[:4], estimate, found.miss, found.crowding)
        return Choice(found, reason, self.candidates)


def _least_inflight(candidates: Sequence[Priced], now: float) -> Choice:
    loads = [(candidate.backend.in_flight_requests + 1) / pull(candidate.backend, now) for candidate in candidates]
    return Choice(candidates[loads.index(min(loads))], f"model fault: least inflight of {len(candidates)}", candidates)
