"""How far off forecasts were, in standard deviations, and quantiles of that.

A count of requests is off by chance and by error. By chance (Poisson) the variance is the mean; an error is a share of
the mean, whatever that is. So of `m` expected requests in a bin::

    scale(m) = sqrt(m + 1 + (0.2·m)²)
    z        = (n - m) / scale(m)           of each forecast whose bin has passed with `n` requests
    q(m)     = m + scale(m) · (q-quantile of z)

What a trough teaches holds at the crest: at three requests a bin, where two more are nothing, as at three thousand,
where half as many more are much. Ratios alone do not carry over: the luck of a quiet night, three requests for one,
would triple the crest.

While there are few, the quantile is that of a normal distribution whose variance is learned with a prior of 1 (the
posterior mean's inverse-gamma form), or the worst that was seen.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from math import sqrt
from statistics import NormalDist

RELATIVE_ERROR = 0.2
"""A standard deviation of the expectation, as a share of it: of large bins 99 in 100 are below 1.47 times that."""
KEPT = 2_016
"""A week of bins of five minutes."""
ENOUGH = 100
"""From so many on the quantile is that of what was seen."""
PRIOR_WEIGHT = 20.0
"""In deviations: until as many were seen, most of the variance is assumed."""
_NORMAL = NormalDist()


def scale(expected: float) -> float:
    """A standard deviation of a bin in which so many requests are expected."""
    return sqrt(expected + 1.0 + (RELATIVE_ERROR * expected) ** 2)


class Deviations:
    """The latest deviations of one horizon."""

    def __init__(self) -> None:
        self._in_time: deque[float] = deque()
        self._in_order: list[float] = []

    def add(self, expected: float, actual: float) -> None:
        """A bin has passed; both in requests."""
        z = (actual - expected) / scale(expected)
        self._in_time.append(z)
        insort(self._in_order, z)
        if len(self._in_time) > KEPT:
            del self._in_order[bisect_left(self._in_order, self._in_time.popleft())]

    def at(self, quantile: float) -> float:
        """In standard deviations."""
        count = len(self._in_order)
        if count >= ENOUGH:
            return self._in_order[min(count - 1, int(quantile * count))]
        spread = sqrt((PRIOR_WEIGHT + sum(z * z for z in self._in_order)) / (PRIOR_WEIGHT + count))
        assumed = _NORMAL.inv_cdf(quantile) * spread
        return max(assumed, self._in_order[-1]) if count and quantile > 0.5 else assumed

    def export(self) -> list[float]:
        """As JSON values, oldest first."""
        return list(self._in_time)

    def restore(self, saved: Sequence[float]) -> None:
        """Begin with these."""
        self._in_time = deque(float(z) for z in saved)
        self._in_order = sorted(self._in_time)
