"""What will be asked for: yesterday's shape at today's level, and how far off such forecasts were before.

With `shape(t)` the mean of the same minutes on the days before, smoothed, and `level` the last minutes' demand over
that shape::

    forecast(h)    = shape(now + h) · level
    quantile(h, q) = forecast(h) · (q quantile of actual / forecast, over the same h until now)

Without a whole day of history nothing is known, and nothing that is not known is lent on.
"""

from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from allocator.lendable import Demand

DAY_MINUTES = 1440
SMOOTH_MINUTES = 10
LEVEL_MINUTES = 3
JUDGED_MINUTES = 5
"""So often a forecast is noted, to be held against what came."""
ERRORS_KEPT = 7 * DAY_MINUTES // JUDGED_MINUTES
LEAST_ERRORS = 100
UNLEARNT = 1.5
"""Stands for the quantile while there are few errors to learn from."""


class Forecaster(Protocol):
    """Learns a minute at a time."""

    def learn(self, per_s: float) -> None:
        """What was asked for in the minute that has just passed."""
        ...

    def ahead(self, quantile: Callable[[float], float]) -> Sequence[Demand]:
        """What will be asked for from now on, as steps, each at the quantile for its time; empty: nothing is known."""
        ...


class SeasonalNaive:
    """The forecaster of this module's formulas, for horizons in minutes. The first must be 0."""

    def __init__(self, horizons_min: Sequence[int]) -> None:
        self._horizons = tuple(horizons_min)
        self._history: list[float] = []
        self._sums = [0.0]
        self._smooth_sums: list[float] = []
        """By minute: its smoothed demand, and that of the same minute on all days before."""
        self._errors = {horizon: _Errors() for horizon in self._horizons}
        self._pending: dict[int, deque[tuple[int, float]]] = {horizon: deque() for horizon in self._horizons}

    def learn(self, per_s: float) -> None:
        self._history.append(per_s)
        self._sums.append(self._sums[-1] + per_s)
        self._smooth()
        now = len(self._history)
        for horizon, pending in self._pending.items():
            if pending and pending[0][0] < now:
                _, expected = pending.popleft()
                if expected > 0.0:
                    self._errors[horizon].add(per_s / expected)
            if now > DAY_MINUTES + SMOOTH_MINUTES and now % JUDGED_MINUTES == 0:
                pending.append((now + horizon, self._expected(horizon)))

    def ahead(self, quantile: Callable[[float], float]) -> Sequence[Demand]:
        if len(self._history) <= DAY_MINUTES + SMOOTH_MINUTES:
            return ()
        return [Demand(in_s := 60.0 * horizon, self._expected(horizon) * self._errors[horizon].at(quantile(in_s)))
                for horizon in self._horizons]

    def _expected(self, horizon: int) -> float:
        now = len(self._history)
        level = self._mean(now - LEVEL_MINUTES, now)
        before = self._shape(now - 1 - LEVEL_MINUTES // 2)
        return self._shape(now + horizon) * level / before if before > 0.0 else level

    def _shape(self, minute: int) -> float:
        """The smoothed mean of the same minute on all days before."""
        last = minute - DAY_MINUTES
        return self._smooth_sums[last] / (last // DAY_MINUTES + 1) if last >= 0 else 0.0

    def _smooth(self) -> None:
        minute = len(self._history) - 1 - SMOOTH_MINUTES
        if minute >= 0:
            before = self._smooth_sums[minute - DAY_MINUTES] if minute >= DAY_MINUTES else 0.0
            self._smooth_sums.append(before + self._mean(minute - SMOOTH_MINUTES, minute + SMOOTH_MINUTES + 1))

    def _mean(self, first: int, last: int) -> float:
        first = max(0, first)
        return (self._sums[last] - self._sums[first]) / (last - first)


class _Errors:
    """The latest ratios of actual to expected, and quantiles of them."""

    def __init__(self) -> None:
        self._in_time: deque[float] = deque()
        self._in_order: list[float] = []

    def add(self, ratio: float) -> None:
        self._in_time.append(ratio)
        insort(self._in_order, ratio)
        if len(self._in_time) > ERRORS_KEPT:
            self._in_order.remove(self._in_time.popleft())

    def at(self, quantile: float) -> float:
        if len(self._in_order) < LEAST_ERRORS:
            return max(UNLEARNT, self._in_order[-1] if self._in_order else 0.0)
        return self._in_order[min(len(self._in_order) - 1, int(quantile * len(self._in_order)))]
