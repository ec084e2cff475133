"""The least price, where a missed budget has its price too.

What is wanted is the lowest cost of all requests together while at most one in a hundred of each class misses its
budget. Its Lagrangian, one request at a time::

    score_j = price_j + V·( w_k·miss_j + crowding_j + late_j )     money
    late_j  = min(lateness_j, 70) / 70  where miss_j > 0.9, else 0    lateness: predicted time over promised time
    chosen  = the lowest score;  a session stays where it was for up to 5 % more
    V       = 12 × the mean price of a request
    w_k     ← clip(w_k·exp(0.1·(missed - 0.01)), 0.5, 5)       per class k, with each end (`beliefs.classes`)

`w` is the multiplier of the class's constraint, found by dual ascent: a class that keeps its promises too well saves
money, one that breaks them pays more, and others give way to it, for `crowding` counts its misses with its weight. A
fixed bound on each request's own probability was tried first: at equal cost it keeps 0.3 points fewer in budget, since
it pays any price for the last tenth of a percent and none for what is beyond the bound.

A miss that is sure is late as well, and lateness has its price. Where some other place would keep the budget and break
those of others, a request that may not be shed gives way and waits; without the price, any wait is as good as another
and whoever gives way queues up to a hundred budgets on one machine (decision 0018).

Hopeless (every miss > 0.9), the miss is the same everywhere and is left out, so that nobody piles up without end on the
cheapest machine, nor stands in the way of those that can still be in time on the quickest: by lateness alone, Azure's
bursts of code completion lose 4 points of in-budget share in simulation, by price alone half of the requests wait twice
as long.

A request that may be shed is a candidate of its own, one that costs nothing and misses for sure: it is shed where it is
hopeless, and where others would miss as much because of it as it can keep, wherever it went::

    w_k·(1 - miss_j) <= crowding_j     for every j

Its price does not enter: what can be kept at the expense of nobody is served, however dear. `Retry-After` is when the
first backend is predicted to offer an even chance.

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
from typing import ClassVar

from backends.catalog.views import FleetView
from policies.facts import Budget, RequestFacts
from policies.pickers.least_score import LeastScore
from policies.pickers.weighing import pull
from policies.policy import Choice, Priced, Rng
from policies.spec import setting


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
            return LeastScore(self, facts, candidates, fleet, now, rng).choice()
        except Exception:
            # The lowest rung: whatever is wrong with the model, the request is served.
            return _least_inflight(candidates, now)

    def budget_of(self, facts: RequestFacts) -> Budget:
        """The caller's budget, or the patience that stands in for one."""
        budget = facts.budget
        if budget.ttft_s is None and budget.inter_token_s is None and budget.e2e_s is None:
            return Budget(self.patience_ttft_s, self.patience_inter_token_s)
        return budget


def _least_inflight(candidates: Sequence[Priced], now: float) -> Choice:
    loads = [(candidate.backend.in_flight_requests + 1) / pull(candidate.backend, now) for candidate in candidates]
    return Choice(candidates[loads.index(min(loads))], f"model fault: least inflight of {len(candidates)}", candidates)
