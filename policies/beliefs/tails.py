"""How far reality strays from prediction: the survival function of standardised residuals, learned online.

::

    z        = (observed - predicted) / predicted standard deviation
    pool(z)  = (H + 40·prior) / (n + 40)              all backends together
    own(z)   = (H + 30·pool) / (n + 30)               one backend, shrunk to the pool
    prior(z) = 0.98·Q(z) + 0.02·Q(z/4)                Q the standard normal's survival

`H` counts residuals in bins and forgets: each sample weighs 0.998 of the next, so that `n` is never above 500. What a
decision reads is a table of 101 points with straight lines between them, made anew every 20 samples; no exponential and
no error function is met on the hot path. A backend without residuals of its own reads the pool's table itself.

Method: histogram filters with shrinkage (empirical Bayes). That the tail is learned rather than assumed is what a P99
promise rests on: with hits and misses by the mean alone, in-budget share falls by 7 to 10 points in simulation.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from math import erfc, isfinite, sqrt
from operator import neg

LOWEST_Z = -5.0
HIGHEST_Z = 15.0
BINS = 100
BINS_PER_Z = BINS / (HIGHEST_Z - LOWEST_Z)
KEPT = 0.998
"""What a sample's weight falls to with each further one."""
REFRESH_SAMPLES = 20
PARENT_WEIGHT = 30.0
PRIOR_WEIGHT = 40.0
LARGEST_GRAIN = 1e9
FAR_Z = 3.0

Table = list[float]
"""Survival at `LOWEST_Z + i / BINS_PER_Z`, for i from 0 to `BINS`; never rises."""


def _prior(z: float) -> float:
    return 0.49 * erfc(z / sqrt(2)) + 0.01 * erfc(z / (4 * sqrt(2)))


PRIOR: Table = [_prior(LOWEST_Z + index / BINS_PER_Z) for index in range(BINS + 1)]


def survival(table: Sequence[float], z: float) -> float:
    """P(residual > z), in [0, 1]; never rises with z. What is not a number counts as certain."""
    x = (z - LOWEST_Z) * BINS_PER_Z
    if x < BINS:
        if x < 0.0:
            return 1.0
        index = int(x)
        left = table[index]
        return left + (x - index) * (table[index + 1] - left)
    if x != x:
        return 1.0
    # Past the table a residual twice as large is a quarter as likely: heavier than normal, and it ends.
    return table[BINS] * (HIGHEST_Z / z) ** 2


def quantile(table: Sequence[float], share: float) -> float:
    """The z that `share` of residuals stay below."""
    over = 1.0 - share
    index = bisect_left(table, -over, lo=1, key=neg)   # the first that is not above
    if index > BINS:
        return HIGHEST_Z
    before, here = table[index - 1], table[index]
    part = (before - over) / (before - here) if before > here and before > over else 0.0
    return LOWEST_Z + (index - 1 + part) / BINS_PER_Z


PRIOR_P99_Z = quantile(PRIOR, 0.99)


class Tail:
    """The residuals of one kind on one backend, or with no parent, of the whole pool."""

    __slots__ = ("_counts", "_grain", "_p99_z", "_parent", "_stale", "_total", "far_share", "table")

    def __init__(self, parent: "Tail | None" = None) -> None:
        self._parent = parent
        self._counts = [0.0] * BINS
        self._total = 0.0
        # The newest sample's weight grows instead of all others' shrinking.
        self._grain = 1.0
        self._stale = 0
        self._p99_z = PRIOR_P99_Z
        self.table: Table = list(PRIOR) if parent is None else parent.table
        """Read-only for whoever did not make it; a backend's is the pool's own until it has samples."""
        self.far_share = 0.0
        """Share of its own residuals beyond `FAR_Z`, without shrinking."""

    @property
    def samples(self) -> float:
        """Residuals remembered, old ones for less."""
        return self._total / self._grain

    @property
    def p99_z(self) -> float:
        """What 99 of 100 residuals are expected to stay below."""
        return self._p99_z if self._parent is None or self._total > 0.0 else self._parent.p99_z

    def observe(self, z: float) -> None:
        """Learn one residual; what is not a number is passed over."""
        if z != z:
            return
        index = int((z - LOWEST_Z) * BINS_PER_Z) if LOWEST_Z < z < HIGHEST_Z else 0 if z <= LOWEST_Z else BINS - 1
        self._grain /= KEPT
        self._counts[index] += self._grain
        self._total += self._grain
        if self._parent is not None:
            self._parent.observe(z)
        self._stale += 1
        if self._stale >= REFRESH_SAMPLES:
            self.refresh()

    def refresh(self) -> None:
        """Make the table anew."""
        self._stale = 0
        if self._grain > LARGEST_GRAIN:
            self._counts = [count / self._grain for count in self._counts]
            self._total, self._grain = self._total / self._grain, 1.0
        if self._total > 0.0:
            self.far_share = sum(self._counts[int((FAR_Z - LOWEST_Z) * BINS_PER_Z):]) / self._total
        towards, weight = (PRIOR, PRIOR_WEIGHT) if self._parent is None else (self._parent.table, PARENT_WEIGHT)
        weight *= self._grain
        whole = self._total + weight
        above = [0.0, *accumulate(reversed(self._counts))]
        above.reverse()
        made = [(beyond + weight * prior) / whole for beyond, prior in zip(above, towards, strict=True)]
        if self._parent is None:
            self.table[:] = made   # in place: backends without samples read it
        else:
            self.table = made
        self._p99_z = quantile(made, 0.99)

    def export(self) -> list[float]:
        """The counts, weighed as of now."""
        return [round(count / self._grain, 4) for count in self._counts]

    def restore(self, counts: object, kept: float) -> None:
        """Take over exported counts at `kept` of their weight; anything else is passed over."""
        if not isinstance(counts, list) or len(counts) != BINS:
            return
        if not all(isinstance(count, int | float) and isfinite(count) and 0 <= count < 1e6 for count in counts):
            return
        self._counts = [count * kept for count in counts]
        self._total, self._grain = sum(self._counts), 1.0
        self.refresh()
