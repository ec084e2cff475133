"""The lowest price among the candidates that keep the budget, with a small, bounded share of exploration.

1. *First request.* A backend that never served anything and has nothing in flight gets one request, so that a cold
   fleet is measured at once. It gets no second one until the first has ended.
2. *Exploration.* With probability `explore_share` the request goes to the idle backend whose last outcome is the
   oldest, where that is older than `stale_after_s`: what is believed of it may no longer hold.
3. *Choice.* The lowest price among those predicted within budget. Where none is, the one predicted least late, and
   the lowest price among equals: once late, money must not pile everyone up on the cheapest machine.
4. Equal prices are settled by dice, in proportion to the operator's weights.

Exploration looks at budgets no more than it must: a backend that is believed too slow is believed so until tried.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from backends.catalog.views import FleetView
from policies.facts import RequestFacts
from policies.pickers.weighing import pull, toss
from policies.policy import Priced, Rng
from policies.spec import setting


@dataclass(frozen=True, slots=True)
class Cheapest:
    """The lowest price within budget, else the least late; explores stale and cold backends a little."""

    name: ClassVar[str] = "cheapest"
    explore_share: float = setting(
        0.01, "Largest share of requests that go to a backend with stale news. A P99 promise lets 1 % miss.",
        at_least=0, at_most=1)
    stale_after_s: float = setting(
        30.0, "Seconds without an outcome after which a backend's news is stale.", at_least=0)
    first_request: bool = setting(
        True, "Send each backend that never served one request before its price is believed.")

    def __call__(
        self, facts: RequestFacts, candidates: Sequence[Priced], fleet: FleetView, now: float, rng: Rng
    ) -> tuple[Priced, str]:
        if self.first_request:
            cold = [c for c in candidates if _is_cold(c)]
            if cold:
                return _lowest(cold, now, rng), "explore never served"
        if self.explore_share > 0.0:
            stalest, age_s = self._stalest(candidates, now)
            if stalest is not None and rng.random() < self.explore_share:
                return stalest, f"explore stale {age_s:.0f}s"

        within = [c for c in candidates if c.late_s <= 0.0]
        if within:
            best = _lowest(within, now, rng)
            return best, f"cheapest price={best.price:.2g} of {len(within)}"
        least_s = min([c.late_s for c in candidates])
        best = _lowest([c for c in candidates if c.late_s == least_s], now, rng)
        return best, f"least late {least_s:.2g}s of {len(candidates)}"

    def _stalest(self, candidates: Sequence[Priced], now: float) -> tuple[Priced | None, float]:
        stalest, stalest_age_s = None, self.stale_after_s
        for candidate in candidates:
            backend = candidate.backend
            # One request under way is news enough on its way.
            if backend.in_flight_requests == 0 and backend.last_outcome_at_s is not None:
                age_s = now - backend.last_outcome_at_s
                if age_s > stalest_age_s:
                    stalest, stalest_age_s = candidate, age_s
        return stalest, stalest_age_s


def _is_cold(candidate: Priced) -> bool:
    """Never served, never failed, and not being tried now. One that failed its first request is health's business."""
    backend = candidate.backend
    return (backend.served_requests == 0 and backend.in_flight_requests == 0
            and backend.last_outcome_at_s is None)


def _lowest(candidates: Sequence[Priced], now: float, rng: Rng) -> Priced:
    price = min([c.price for c in candidates])
    lowest = [c for c in candidates if c.price == price]
    return lowest[0] if len(lowest) == 1 else toss(lowest, [pull(c.backend, now) for c in lowest], rng)
