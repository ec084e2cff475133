"""What requests are like in the mean: the moments of prompt and output lengths that machine time depends on.

A request of `P` prompt and `D` output tokens costs time in `P`, `P²`, `D`, `P·D` and `D²` (`forecast.capacity`), so
those five means say all there is to say about a class.
"""

from collections.abc import Mapping
from typing import NamedTuple

from policies.facts import Budget

KEPT_A_BIN = 0.99
"""What a bin ago still counts: e⁻¹ after a hundred."""
LEAST_REQUESTS = 0.01
"""A class of which less is left is forgotten."""


class Moments(NamedTuple):
    """Means over requests, in tokens and tokens squared."""

    prompt: float
    prompt_squared: float
    output: float
    prompt_output: float
    output_squared: float


class ClassMix(NamedTuple):
    """One class of requests: its share of them all, what it was promised, and what it is like."""

    share: float
    budget: Budget
    moments: Moments


class Mix:
    """Learns from the requests of one model: sums by class, which fade as bins pass."""

    def __init__(self) -> None:
        self._sums: dict[str, list[float]] = {}
        """By class: requests, then the sums of `Moments` over them."""

    def learn(self, latency_class: str, prompt_tokens: int, output_tokens: int) -> None:
        """One request that was served."""
        sums = self._sums.get(latency_class)
        if sums is None:
            sums = self._sums[latency_class] = [0.0] * (1 + len(Moments._fields))
        sums[0] += 1.0
        sums[1] += prompt_tokens
        sums[2] += prompt_tokens * prompt_tokens
        sums[3] += output_tokens
        sums[4] += prompt_tokens * output_tokens
        sums[5] += output_tokens * output_tokens

    def fade(self) -> None:
        """A bin has passed."""
        for name, sums in list(self._sums.items()):
            if sums[0] < LEAST_REQUESTS:
                del self._sums[name]
            else:
                sums[:] = [KEPT_A_BIN * total for total in sums]

    def export(self) -> dict[str, list[float]]:
        """The sums by class, as JSON values."""
        return {name: list(sums) for name, sums in self._sums.items()}

    def restore(self, saved: Mapping[str, list[float]]) -> None:
        """Begin with these sums."""
        self._sums = {name: [float(total) for total in sums] for name, sums in saved.items()
                      if len(sums) == 1 + len(Moments._fields)}

    def classes(self, budgets: Mapping[str, Budget]) -> tuple[ClassMix, ...]:
        """Every class with its share; one that `budgets` no longer knows was promised nothing. Empty before any."""
        total = sum(sums[0] for sums in self._sums.values())
        return tuple(
            ClassMix(sums[0] / total, budgets.get(name, Budget()), Moments(*(part / sums[0] for part in sums[1:])))
            for name, sums in self._sums.items())
