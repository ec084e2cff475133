"""How many replicas of a card an inference pool may lend, and how many it can do without a little longer.

With demand as requests per second, of which one replica carries `capacity_per_replica` within the P99 budget::

    needed(t)  = ceil(q99[demand(t)] / capacity_per_replica)
    lendable   = min over [now, now + promised minimum + drain] of (healthy - needed(t) - headroom), at least 0
    spare      = min over [now, now + grace + reload]           of (healthy - needed(t) - headroom)

`lendable` looks as far as a loan is meant to last: offers keep within it. `spare` looks as far as it takes to get a
replica back: once fewer can be spared than are away, the difference is recalled. As the first window holds the second,
lendable ≤ spare wherever spare is not negative, and an offer is never recalled by the very forecast that it was made
on. Between the two, loans stay as they are: that gap, and `Rules.surplus_hold_s` for which a surplus must have held,
are the hysteresis.

An unknown forecast or capacity lends nothing and recalls nothing: unknown is not zero demand.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, isfinite

from allocator.model.inventory import Supply


@dataclass(frozen=True, slots=True)
class Demand:
    """A forecast at one time from now: the 0.99 quantile of the demand, in requests per second."""

    in_s: float
    q99_per_s: float


def needed_replicas(q99_per_s: float, capacity_per_replica_per_s: float) -> int:
    """Whole replicas for a demand. A hair over a whole number is rounding and no further replica."""
    return max(0, ceil(q99_per_s / capacity_per_replica_per_s - 1e-9))


def supply_of(pool: str, card: str, healthy: int, forecast: Sequence[Demand], capacity_per_replica_per_s: float | None,
              headroom: int, *, loan_horizon_s: float, recall_lead_s: float) -> Supply | None:
    """The figures of one pool and card; `None` where they are not known.

    `healthy` counts replicas, lent ones included. The forecast is taken as steps: a figure holds until the next one, so
    one at or before each window's beginning is needed.
    """
    if capacity_per_replica_per_s is None or not capacity_per_replica_per_s > 0.0 or not forecast:
        return None
    steps = sorted(forecast, key=lambda demand: demand.in_s)
    if steps[0].in_s > 0.0 or not all(isfinite(step.q99_per_s) and step.q99_per_s >= 0.0 for step in steps):
        return None

    def least_over(horizon_s: float) -> int:
        first = max(index for index, step in enumerate(steps) if step.in_s <= 0.0)
        within = [step for step in steps[first:] if step.in_s <= horizon_s]
        return min(healthy - headroom - needed_replicas(step.q99_per_s, capacity_per_replica_per_s)
                   for step in within)

    lendable = max(0, min(least_over(max(loan_horizon_s, recall_lead_s)), healthy))
    return Supply(pool, card, lendable=lendable, spare=least_over(recall_lead_s))
