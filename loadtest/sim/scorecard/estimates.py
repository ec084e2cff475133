"""Means over seeds and how well they are known. Pure.

Policies meet the same arrivals under a seed, so two of them are compared seed by seed: what makes a seed hard for both
falls out of the difference.
"""

from collections.abc import Callable, Sequence
from math import exp, fsum, lgamma, log, log1p, sqrt
from statistics import mean, stdev
from typing import NamedTuple

from loadtest.sim.measures import Tally


class Estimate(NamedTuple):
    """A mean, and its standard error where there are two values at least."""

    mean: float
    se: float | None

    def text(self, factor: float = 1.0, digits: int = 2, unit: str = "", *, sign: bool = False) -> str:
        """`99.42 ± 0.07 %`."""
        number = f"{round(factor * self.mean, digits) + 0.0:{'+' if sign else ''}.{digits}f}"  # + 0.0: no -0.00
        spread = "" if self.se is None else f" ± {factor * self.se:.{digits}f}"
        return f"{number}{spread}{unit}"


def estimate(values: Sequence[float]) -> Estimate | None:
    """Mean and standard error of the mean; `None` of nothing."""
    if not values:
        return None
    return Estimate(mean(values), stdev(values) / sqrt(len(values)) if len(values) > 1 else None)


def jackknife(seeds: int, figure: Callable[[Sequence[int]], float | None]) -> Estimate | None:
    """A figure that is no mean over seeds, from the seeds' places; its error from leaving each of them out in turn
    (Quenouille and Tukey: `se² = (n-1)/n · Σ (figure without i - their mean)²`). `None` where it is not known.
    """
    whole = figure(range(seeds))
    if whole is None:
        return None
    without = [figure([place for place in range(seeds) if place != left]) for left in range(seeds)] if seeds > 1 else []
    known = [value for value in without if value is not None]
    if len(known) < 2:
        return Estimate(whole, None)
    middle = mean(known)
    return Estimate(whole, sqrt((len(known) - 1) / len(known) * sum((value - middle) ** 2 for value in known)))


def off_target(tally: Tally, target: float, within: float, doubt: float = 0.023) -> bool:
    """Whether a share lies more than `within` from the target, and not by chance.

    Not by chance: were the true share at the edge of what is allowed, one as far off or farther would come up in fewer
    than `doubt` of such samples (an exact binomial test; of many, two standard errors). So two of thirty above the edge
    are not held against anybody, nor do ten of ten pass for certainty.
    """
    share, missed = tally.share, tally.of - tally.within
    if share is None or abs(share - target) <= within:
        return False
    if share < target:
        return 1.0 - _at_most(missed - 1, tally.of, 1.0 - (target - within)) < doubt
    return target + within < 1.0 and _at_most(missed, tally.of, 1.0 - (target + within)) < doubt


def _at_most(events: int, of: int, chance: float) -> float:
    """Probability of so many events or fewer, each with that chance: the binomial distribution's."""
    log_odds = log(chance) - log1p(-chance)
    return min(1.0, fsum(exp(lgamma(of + 1) - lgamma(k + 1) - lgamma(of - k + 1) + k * log_odds + of * log1p(-chance))
                         for k in range(events + 1)))
