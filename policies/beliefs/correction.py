"""How far a backend's coefficients are off for good: one factor on the time of its prefill, one on that of its decode.

::

    log f ← clip(log f + gain·part·clip(log(observed / predicted), ±1), ±log 4)

`part` is the share of what was predicted that `f` is a factor of: the prompt's own prefill over its first token, the
whole of a pace. What is later than predicted by more than the factor e counts as late by e: it was a queue or a hiccup.

A calibration made on another day or with another driver is off by a tenth or more, by less than drift takes notice of.
Residuals alone would learn that too, but as if it were chance: they are in standard deviations of the prediction, so a
bias of a third becomes a tail of five of them. Held against the calibration with drift on it, so what drift explains is
none of it.
"""

from math import exp, isfinite, log

PREFILL_GAIN = 0.05
DECODE_GAIN = 0.03
LARGEST_LOG = log(4.0)
PRICE_STEPS_PER_OCTAVE = 8
LEAST_S = 1e-4


class Correction:
    """One factor of one backend."""

    __slots__ = ("_gain", "_log", "factor", "priced")

    def __init__(self, gain: float) -> None:
        self._gain = gain
        self._log = 0.0
        self.factor = 1.0
        self.priced = 1.0
        """The same in steps of 9 %, for prices: backends of one kind that are as good as equal cost the same, so
        that a decision need not look at each of them."""

    def observe(self, observed_s: float, predicted_s: float, part: float) -> None:
        """`part` in [0, 1]. What is not finite is passed over."""
        if not (isfinite(observed_s) and isfinite(predicted_s) and predicted_s > 0.0 and part > 0.0):
            return
        off = log(max(LEAST_S, observed_s) / max(LEAST_S, predicted_s))
        self.set(self._log + self._gain * min(1.0, part) * min(1.0, max(-1.0, off)))

    def set(self, log_factor: float) -> None:
        """Believe this from now on."""
        self._log = min(LARGEST_LOG, max(-LARGEST_LOG, log_factor))
        self.factor = exp(self._log)
        self.priced = 2.0 ** (round(PRICE_STEPS_PER_OCTAVE * self._log / log(2.0)) / PRICE_STEPS_PER_OCTAVE)

    @property
    def log_factor(self) -> float:
        """What a restart keeps."""
        return self._log
