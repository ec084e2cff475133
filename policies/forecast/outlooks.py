"""Two ways to expect a demand: yesterday's shape at today's level, and the level alone.

`SeasonalNaive`, with `shape(t)` the mean of the same bins, and their neighbours, of the seasons before::

    expected(t) = shape(t) · level + surplus
    level       = (came + 20) / (said + 20)                         requests of the last bins; what their shape says
    surplus     = max(0, came - said·level - 3·sqrt(said·level + 1)) / last bins

The level is today's, the posterior mean of a Poisson rate under a Gamma prior of mean 1 and weight 20: few requests say
little of it, hundreds settle it. Where the seasons before had nothing, or next to nothing, no level explains that many
come now: what is more than chance stands beside the shape, as demand that has no season yet. Nothing is known before a
whole season has passed.

`EwmaLevel` knows soon and foresees no rise: its errors say how much demand has risen over each horizon before, so its
quantile is wide where traffic is a wave.
"""

from collections.abc import Mapping
from itertools import accumulate, pairwise
from math import sqrt
from typing import Any

SEASONS_KEPT = 7
LEVEL_BINS = 10
LEVEL_PRIOR = 20.0
"""In requests: the weight of the belief that today is like the seasons before."""
CHANCE = 3.0
"""Standard deviations of a count that are nothing new."""
SMOOTH_BINS = 3
"""On either side."""
EWMA_BINS = 10.0
FIRST_BINS = 10
"""So many bins make a level."""


class SeasonalNaive:
    """Expects what the same bins of the last seasons had. `season_bins`: 1,440 for days of minutes."""

    def __init__(self, season_bins: int, bin_s: float) -> None:
        if season_bins < 2 or not bin_s > 0.0:
            raise ValueError(f"a season has at least 2 bins, not {season_bins}, each longer than {bin_s:g} s")
        self._season = season_bins
        self._bin_s = bin_s
        self._smooth = min(SMOOTH_BINS, season_bins // 8)
        self._level = min(LEVEL_BINS, max(1, season_bins // 8))
        self._sums = [0.0]
        """Demand added up: the sum over bins a..b-1 is `sums[b] - sums[a]`."""
        self._today: tuple[float, float] | None = None
        """Level and surplus, the latter per second; the same for all that is asked between two bins."""

    def learn(self, per_s: float) -> None:
        """See `Outlook`."""
        self._today = None
        self._sums.append(self._sums[-1] + per_s)
        if len(self._sums) > (SEASONS_KEPT + 1) * self._season:
            kept = self._sums[self._season:]
            self._sums = list(accumulate((after - before for before, after in pairwise(kept)), initial=0.0))

    def expected(self, bins_ahead: int) -> float | None:
        """See `Outlook`."""
        now = len(self._sums) - 1
        if now < self._season + self._level:
            return None
        if self._today is None:
            self._today = self._seen_of_today(now)
        level, surplus_per_s = self._today
        return self._shape(now + bins_ahead) * level + surplus_per_s

    def export(self) -> dict[str, Any]:
        """See `Outlook`: the demand of every bin that is kept."""
        return {"per_s": [after - before for before, after in pairwise(self._sums)]}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """See `Outlook`."""
        self._today = None
        self._sums = [float(total) for total in accumulate(saved["per_s"], initial=0.0)]

    def _seen_of_today(self, now: int) -> tuple[float, float]:
        last_s = self._level * self._bin_s
        came = self._mean(now - self._level, now) * last_s
        said = sum(self._shape(now - back) for back in range(1, self._level + 1)) * self._bin_s
        level = (came + LEVEL_PRIOR) / (said + LEVEL_PRIOR)
        explained = said * level
        return level, max(0.0, came - explained - CHANCE * sqrt(explained + 1.0)) / last_s

    def _shape(self, at: int) -> float:
        now = len(self._sums) - 1
        means = [self._mean(max(0, same - self._smooth), min(now, same + self._smooth + 1))
                 for same in range(at - self._season, -1, -self._season) if same < now]
        return sum(means) / len(means) if means else 0.0

    def _mean(self, first: int, end: int) -> float:
        return (self._sums[end] - self._sums[first]) / (end - first)


class EwmaLevel:
    """Expects that demand stays what it has been lately."""

    def __init__(self, bins: float = EWMA_BINS) -> None:
        self._weight = 1.0 / bins
        self._level = 0.0
        self._seen = 0

    def learn(self, per_s: float) -> None:
        """See `Outlook`."""
        self._seen += 1
        # The plain mean at first, so that the start value does not linger.
        self._level += max(self._weight, 1.0 / self._seen) * (per_s - self._level)

    def expected(self, bins_ahead: int) -> float | None:
        """See `Outlook`."""
        return self._level if self._seen >= FIRST_BINS else None

    def export(self) -> dict[str, Any]:
        """See `Outlook`."""
        return {"level": self._level, "seen": self._seen}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """See `Outlook`."""
        self._level, self._seen = float(saved["level"]), int(saved["seen"])
