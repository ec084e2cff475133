"""How much of a backend's time goes to prompts that arrive while a stream decodes.

::

    share ← share·exp(-Δt / 8 s) + work / 8 s          seconds of prefill per second
    burst ← burst·exp(-Δt / 8 s) + work² / 8 s         seconds² per second: the variance of its sum, per second

`work` is the calibrated prefill time of one dispatched prompt. A stream that decodes for `T` seconds is held up for
`share·T` in the mean, with a variance of `burst·T` (a compound Poisson process), which is why a short answer needs
more slack a token than a long one.
"""

from collections import deque
from math import exp

MEMORY_S = 8.0
RECALLED = 64
"""Prompts whose end is remembered by date; a stream's pace is looked at often enough for that."""


class PrefillArrivals:
    """Moments of the prefill work sent to one backend."""

    __slots__ = ("_at_s", "_burst", "_share")

    def __init__(self) -> None:
        self._share = 0.0
        self._burst = 0.0
        self._at_s = 0.0

    def add(self, work_s: float, now: float) -> None:
        """A prompt was sent there that takes `work_s` to prefill."""
        if not 0.0 <= work_s < 1e6:
            return
        kept = self._kept(now)
        self._share = self._share * kept + work_s / MEMORY_S
        self._burst = self._burst * kept + work_s * work_s / MEMORY_S
        self._at_s = max(self._at_s, now)

    def at(self, now: float) -> tuple[float, float]:
        """`share` and `burst` now."""
        kept = self._kept(now)
        return self._share * kept, self._burst * kept

    def _kept(self, now: float) -> float:
        elapsed_s = now - self._at_s
        return exp(-elapsed_s / MEMORY_S) if elapsed_s > 0.0 else 1.0


class PrefillsDone:
    """The last prompts that one backend has finished, by date."""

    __slots__ = ("_done",)

    def __init__(self) -> None:
        self._done: deque[tuple[float, int]] = deque(maxlen=RECALLED)

    def add(self, tokens: int, now: float) -> None:
        """A prompt of so many computed tokens is through."""
        self._done.append((now, max(0, tokens)))

    def since(self, at_s: float) -> tuple[int, int]:
        """Fewest and most prompt tokens computed since then for prompts that are through: the largest may have been
        under way before."""
        tokens = [count for done_at_s, count in self._done if done_at_s > at_s]
        total = sum(tokens)
        return total - max(tokens, default=0), total
