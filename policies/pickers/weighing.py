"""Operator weights and mean prices as pickers use them, and dice that follow weights."""

from collections.abc import Sequence
from math import inf
from typing import TypeVar

from backends.catalog.views import BackendView
from policies.policy import Priced, Rng

T = TypeVar("T")

# Past these a weight means "never" or "always" already; within them sums and quotients of weights stay finite.
WEIGHT_RANGE = (1e-9, 1e9)


def pull(backend: BackendView, now: float) -> float:
    """The backend's weight, lowered while it starts slowly: what its share is proportional to."""
    weight = backend.spec.weight * backend.health.ramp(now)
    low, high = WEIGHT_RANGE
    if low <= weight <= high:
        return weight
    return high if weight > high else low


def mean_price(candidates: Sequence[Priced]) -> float:
    """Of those whose price is finite, in money a request; 0 where there is none."""
    finite = [candidate.price for candidate in candidates if candidate.price < inf]
    return sum(finite) / len(finite) if finite else 0.0


def draw(items: Sequence[T], pulls: Sequence[float], share: float) -> int:
    """The index that the point `share` in [0, 1) falls on when the items lie in a row, each as wide as its pull."""
    point = share * sum(pulls)
    for index, width in enumerate(pulls):
        point -= width
        if point < 0.0:
            return index
    return len(items) - 1   # rounding put the point on the far end


def toss(items: Sequence[T], pulls: Sequence[float], rng: Rng) -> T:
    """One of the items, by dice, with chances as the pulls; a single item takes no dice."""
    return items[0] if len(items) == 1 else items[draw(items, pulls, rng.random())]


def lowest(values: Sequence[float], rng: Rng, pulls: Sequence[float] | None = None) -> int:
    """The index of the lowest value, ties by dice: in proportion to `pulls` where given, else alike.

    What is not a number counts as infinite.
    """
    known = [value if value == value else inf for value in values]
    least = min(known)
    ties = [index for index, value in enumerate(known) if value == least]
    if len(ties) == 1:
        return ties[0]
    return ties[rng.randrange(len(ties))] if pulls is None else toss(ties, [pulls[index] for index in ties], rng)


def some_of(items: Sequence[T], count: int, rng: Rng) -> Sequence[T]:
    """So many different items by dice, in no order; all of them where there are no more."""
    if count >= len(items):
        return items
    pool = list(items)
    for index in range(count):
        other = index + rng.randrange(len(pool) - index)
        pool[index], pool[other] = pool[other], pool[index]
    return pool[:count]
