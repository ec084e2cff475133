"""What a backend's first tokens took lately, by how many requests it had in flight when they were asked for.

Prequal's replicas keep this themselves and report the median at their present load; here the router keeps it for them.
"""

from collections import deque
from statistics import median

from policies.attempts import FailureCause
from policies.learners.peers.remembering import Remembering
from policies.learning import End, Sent

SAMPLES = 64
RECENT_S = 60.0
"""Older samples say nothing, so that a backend nobody chooses becomes unknown again, and is tried."""


class TtftByLoad(Remembering):
    """The last first-token times by backend, each with the load it was taken under."""

    name = "ttft_by_load"

    def __init__(self) -> None:
        self._samples: dict[str, deque[tuple[float, int, float]]] = {}

    def ttft_s(self, backend: str, in_flight_requests: int, now: float) -> float | None:
        """The median of the recent samples at the load nearest to this one; `None` without any."""
        nearest, times = None, []
        for at_s, load, ttft_s in self._samples.get(backend, ()):
            if now - at_s > RECENT_S:
                continue
            distance = abs(load - in_flight_requests)
            if nearest is None or distance < nearest:
                nearest, times = distance, [ttft_s]
            elif distance == nearest:
                times.append(ttft_s)
        return median(times) if times else None

    def first_token(self, sent: Sent, now: float) -> None:
        super().first_token(sent, now)
        self._observe(sent, now)

    def ended(self, sent: Sent, end: End, now: float) -> None:
        if sent.first_token_at_s is None and end.failure not in (None, FailureCause.CLIENT_GONE):
            self._observe(sent, now)

    def forget(self, backend: str) -> None:
        self._samples.pop(backend, None)

    def _observe(self, sent: Sent, now: float) -> None:
        load = sent.priced.backend.in_flight_requests if sent.priced is not None else 0
        samples = self._samples.setdefault(sent.backend, deque(maxlen=SAMPLES))
        samples.append((now, load, now - sent.sent_at_s))
