"""What a backend did lately, without a model: shares of first tokens and paces over a limit, by size of the prompt.

The rung below prediction. Where the latency model of a backend is wrong beyond repair (no coefficients that fit, a
drift out of range, residuals that no histogram holds), decisions ask these counts instead: of the requests with a
prompt of this size, how many waited longer than the caller would? They know nothing of the load of the moment, so they
are the last resort and not the first.

Prompts fall into powers of two, times into 96 bins of a quarter octave, from 0.1 ms to 28 minutes. Samples are
forgotten at 0.99 each, so about a hundred stand for a size.
"""

from math import log2

BINS = 96
BINS_PER_OCTAVE = 4
SIZES = 20
KEPT = 0.99
LARGEST_GRAIN = 1e9
SHORTEST_S = 1e-4
UNKNOWN_WEIGHT = 4.0
UNKNOWN_SHARE = 0.5
"""Where little was seen, half of it counts as over: somebody has to find out, but not everybody."""


class Waits:
    """How long something took, by size of the prompt."""

    __slots__ = ("_counts", "_grains")

    def __init__(self) -> None:
        self._counts: list[list[float] | None] = [None] * SIZES
        # The newest sample's weight grows instead of all others' shrinking.
        self._grains = [1.0] * SIZES

    def observe(self, prompt_tokens: int, took_s: float) -> None:
        """Learn one."""
        size = _size(prompt_tokens)
        counts = self._counts[size]
        if counts is None:
            counts = self._counts[size] = [0.0] * BINS
        grain = self._grains[size] = self._grains[size] / KEPT
        if grain > LARGEST_GRAIN:
            counts[:] = [count / grain for count in counts]
            grain = self._grains[size] = 1.0
        counts[_bin(took_s)] += grain

    def share_over(self, prompt_tokens: int, limit_s: float) -> float:
        """Share of those with such a prompt that took longer; never rises with the limit."""
        size = _size(prompt_tokens)
        counts = self._counts[size]
        if counts is None:
            return UNKNOWN_SHARE if limit_s > 0.0 else 1.0
        if not limit_s > 0.0:
            return 1.0
        over, unknown = sum(counts[_bin(limit_s):]), UNKNOWN_WEIGHT * self._grains[size]
        return (over + unknown * UNKNOWN_SHARE) / (sum(counts) + unknown)


def _size(prompt_tokens: int) -> int:
    return min(SIZES - 1, max(0, int(prompt_tokens).bit_length()))


def _bin(took_s: float) -> int:
    if not took_s > SHORTEST_S:
        return 0
    return min(BINS - 1, int(BINS_PER_OCTAVE * log2(took_s / SHORTEST_S))) if took_s < 1e12 else BINS - 1
