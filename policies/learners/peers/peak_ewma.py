"""The peak-sensitive moving average of each backend's time to first token.

::

    ewma ← ttft                              where ttft > ewma      a peak counts in full, at once
    ewma ← ewma·e^(-Δt/τ) + ttft·(1 - e^(-Δt/τ))   otherwise        and is forgotten with time

With nothing to see it sinks towards 0 at the same rate, so a slow backend is tried again. An attempt that fails before
its first token counts with the time it took: a failure is no fast answer.
"""

from math import exp

from policies.learners.peers.remembering import Remembering
from policies.learning import End, Sent

DECAY_S = 10.0
"""Time constant; Finagle's default."""
DEFAULT_TTFT_S = 1.0
"""Where nothing was measured yet, from the first time somebody asks; tower's example is one second."""


class PeakEwma(Remembering):
    """Moving averages by backend."""

    name = "peak_ewma"

    def __init__(self) -> None:
        self._known: dict[str, tuple[float, float]] = {}

    def ttft_s(self, backend: str, now: float) -> float:
        """The average as it stands now."""
        known = self._known.get(backend)
        if known is None:
            return DEFAULT_TTFT_S
        ewma_s, at_s = known
        return ewma_s * exp(-max(0.0, now - at_s) / DECAY_S)

    def first_token(self, sent: Sent, now: float) -> None:
        super().first_token(sent, now)
        self._observe(sent.backend, now - sent.sent_at_s, now)

    def ended(self, sent: Sent, end: End, now: float) -> None:
        if sent.first_token_at_s is None:
            self._observe(sent.backend, now - sent.sent_at_s, now)

    def forget(self, backend: str) -> None:
        self._known.pop(backend, None)

    def _observe(self, backend: str, ttft_s: float, now: float) -> None:
        known = self._known.get(backend)
        if known is not None and ttft_s <= known[0]:
            ewma_s, at_s = known
            kept = exp(-max(0.0, now - at_s) / DECAY_S)
            ttft_s = ewma_s * kept + ttft_s * (1.0 - kept)
        self._known[backend] = (ttft_s, now)
