"""The quantile of the demand to come: an expectation, and how far off such expectations were before.

Demand is learned a bin at a time, in requests per second. With `m(h)` the requests that somebody expects in the bin
that is `h` bins ahead::

    q(h) = m(h) + scale(m(h)) · (q-quantile of z(h))        z: how far off forecasts over `h` bins were (`deviations`)

So whatever the expectation misses (noise, trend, a season that is no season) widens its own quantile, and nobody has to
say how good it is. Between two horizons that are judged, the farther one's deviations hold.

What expects is an `Outlook`: `SeasonalNaive` or `EwmaLevel`. One that knows nothing yet says `None`, and the forecast
is then empty: unknown is not zero.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from policies.forecast.deviations import Deviations, scale

JUDGED_HORIZONS = 6


class Step(NamedTuple):
    """A forecast that holds from `in_s` seconds from now until the next step."""

    in_s: float
    per_s: float


class Outlook(Protocol):
    """Expects a demand. Reads no clock: a bin has passed whenever `learn` is called."""

    def learn(self, per_s: float) -> None:
        """The mean demand of the bin that has just passed, in requests per second."""
        ...

    def expected(self, bins_ahead: int) -> float | None:
        """Of the bin so far ahead; 0 is the one under way. `None` where nothing is known."""
        ...

    def export(self) -> dict[str, Any]:
        """What it has learned, as JSON values."""
        ...

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Begin with that, as if nothing had passed since."""
        ...


class Forecaster:
    """An outlook with its deviations, as steps of a quantile up to `horizon_s` ahead."""

    def __init__(self, outlook: Outlook, *, bin_s: float, horizon_s: float, quantile: float = 0.99) -> None:
        if not (bin_s > 0.0 and horizon_s >= 0.0 and 0.0 < quantile < 1.0):
            raise ValueError(f"bin_s {bin_s:g} and horizon_s {horizon_s:g} must be positive, quantile within 0 and 1")
        self.bin_s = bin_s
        self._outlook = outlook
        self._last = max(1, -int(-horizon_s // bin_s))
        self._horizons = judged(self._last)
        self._quantile = quantile
        self._deviations = {horizon: Deviations() for horizon in self._horizons}
        self._pending: dict[int, deque[tuple[int, float]]] = {horizon: deque() for horizon in self._horizons}
        self._bins = 0

    def learn(self, per_s: float) -> None:
        """See `Outlook`."""
        for horizon, pending in self._pending.items():
            if pending and pending[0][0] == self._bins:
                _, expected = pending.popleft()
                self._deviations[horizon].add(expected * self.bin_s, per_s * self.bin_s)
        self._outlook.learn(per_s)
        self._bins += 1
        for horizon, pending in self._pending.items():
            expected_then = self._outlook.expected(horizon)
            if expected_then is not None:
                pending.append((self._bins + horizon, expected_then))

    def steps(self, quantile: Callable[[float], float] | None = None) -> tuple[Step, ...]:
        """The quantile from now on, the first step at 0; empty where nothing is known.

        `quantile`: by seconds from now, where another one than the forecaster's own is wanted there.
        """
        steps: list[Step] = []
        known: dict[tuple[int, float], float] = {}
        for ahead in range(self._last + 1):
            expected = self._outlook.expected(ahead)
            if expected is None:
                return ()
            horizon = self._horizons[bisect_left(self._horizons, ahead)]
            in_s = ahead * self.bin_s
            key = horizon, self._quantile if quantile is None else quantile(in_s)
            if key not in known:
                known[key] = self._deviations[horizon].at(key[1])
            requests = expected * self.bin_s
            steps.append(Step(in_s, max(0.0, requests + scale(requests) * known[key]) / self.bin_s))
        return tuple(steps)

    def export(self) -> dict[str, Any]:
        """What was learned, as JSON values: the outlook's, and the deviations of each horizon."""
        return {"bins": self._bins, "outlook": self._outlook.export(),
                "deviations": {str(horizon): found.export() for horizon, found in self._deviations.items()}}

    def restore(self, saved: Mapping[str, Any], age_s: float) -> None:
        """Begin with what was learned until `age_s` ago.

        Of the bins that were missed, what was expected of them is taken to have come: a season goes on behind them
        where it would be. Nothing of that is a deviation, and a forecast that was open then is not judged. Deviations
        that are missing (a state file of before they were kept as such) are learned anew.
        """
        self._outlook.restore(saved["outlook"])
        self._bins = int(saved["bins"])
        for horizon, deviations in self._deviations.items():
            deviations.restore(saved.get("deviations", {}).get(str(horizon), ()))
            self._pending[horizon].clear()
        for _ in range(min(self._bins, round(age_s / self.bin_s))):
            expected = self._outlook.expected(0)
            if expected is None:
                return
            self._outlook.learn(expected)
            self._bins += 1


def judged(last: int) -> tuple[int, ...]:
    """The horizons, in bins, whose deviations are kept: 0, the last, and some between, each about twice the other."""
    found = {0, last}
    ahead = last
    while len(found) < JUDGED_HORIZONS and ahead > 1:
        ahead //= 2
        found.add(ahead)
    return tuple(sorted(found))


def largest_until(steps: Sequence[Step], horizon_s: float) -> float | None:
    """The most that is forecast from now to then; `None` for an empty forecast."""
    return max((step.per_s for step in steps if step.in_s <= max(0.0, horizon_s)), default=None)
