"""How much slower than calibrated a backend is right now: one factor on the whole latency model.

::

    log s ← (1 - w)·log s + w·clip(log s, observed / most, observed / least)        w = 1 - exp(-span / 1 s)
    applied: 0 within ±0.2, log s beyond ±0.3, a straight line between

`least` and `most` are what the calibration says of the observed gap with as little and as much prefill in it as there
can have been. A gap that the present belief explains moves nothing; the clip is in logarithms.

The deadband leaves small bias to the residual histograms: in simulation a mis-specified model loses 0.6 points of
in-budget share without it, and a silent slowdown by 2.5 loses a whole point where nothing follows it at all.

A belief fades: without news for more than 3 s, `s = 1 + (s - 1)·exp(-(idle - 3 s)/15 s)`, so that a backend that was
slow becomes attractive again by itself and is tried.
"""

from math import exp, expm1, isfinite, log

MEMORY_S = 1.0
LARGEST_LOG_RATIO = 3.0
IGNORED_LOG = 0.2
APPLIED_LOG = 0.3
FADES_AFTER_S = 3.0
FADE_S = 15.0


class Drift:
    """Follows one backend."""

    __slots__ = ("_at_s", "applied", "log_ratio")

    def __init__(self) -> None:
        self.log_ratio = 0.0
        self.applied = 1.0
        """The factor that predictions are multiplied with, before it fades."""
        self._at_s: float | None = None

    def observe(self, observed_s: float, least_s: float, most_s: float, span_s: float, now: float) -> None:
        """A pace was observed over `span_s`. Spans of streams side by side count once."""
        if not (observed_s > 0.0 and 0.0 < least_s <= most_s and isfinite(observed_s) and isfinite(most_s)):
            return
        if self._at_s is not None:
            span_s = min(span_s, max(0.0, now - self._at_s))
        self._at_s = now
        if not span_s > 0.0:
            return
        took = log(observed_s)
        low, high = took - log(most_s), took - log(least_s)
        seen = min(high, max(low, self.log_ratio))
        seen = min(LARGEST_LOG_RATIO, max(-LARGEST_LOG_RATIO, seen))
        self.log_ratio += -expm1(-span_s / MEMORY_S) * (seen - self.log_ratio)
        self.applied = _applied(self.log_ratio)

    def set(self, log_ratio: float) -> None:
        """Believe this from now on."""
        self.log_ratio = min(LARGEST_LOG_RATIO, max(-LARGEST_LOG_RATIO, log_ratio))
        self.applied = _applied(self.log_ratio)


def faded(applied: float, idle_s: float) -> float:
    """What is left of a factor after `idle_s` without news."""
    if idle_s <= FADES_AFTER_S:
        return applied
    return 1.0 + (applied - 1.0) * exp((FADES_AFTER_S - idle_s) / FADE_S)


def _applied(log_ratio: float) -> float:
    size = abs(log_ratio)
    if size <= IGNORED_LOG:
        return 1.0
    if size < APPLIED_LOG:
        share = (size - IGNORED_LOG) / (APPLIED_LOG - IGNORED_LOG)
        return exp(log_ratio * share)
    return exp(log_ratio)
