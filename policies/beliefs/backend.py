"""All that is believed of one backend."""

from backends.catalog.spec import Coefficients
from policies.beliefs.arrivals import PrefillArrivals, PrefillsDone
from policies.beliefs.caches import PrefixCache
from policies.beliefs.classes import ClassBelief
from policies.beliefs.correction import DECODE_GAIN, PREFILL_GAIN, Correction
from policies.beliefs.drift import Drift
from policies.beliefs.observed import Waits
from policies.beliefs.tails import Tail
from policies.beliefs.waiting import WaitingPrompts

PLAUSIBLE_DRIFT = (0.4, 3.0)
LOST_AFTER_S = 10.0
LOST_MIN_SAMPLES = 30.0


class PoolTails:
    """The residuals of all backends together: what a backend's own are shrunk to."""

    __slots__ = ("end", "pace", "ttft")

    def __init__(self) -> None:
        self.ttft = Tail()
        self.pace = Tail()
        self.end = Tail()


class Streams:
    """The requests of one class on one backend: those that decode, and those that wait before the next one."""

    __slots__ = ("count", "slack_s")

    def __init__(self) -> None:
        self.count = 0
        self.slack_s = 0.0
        """Seconds of their TTFT budgets that they did not need, or are predicted not to, summed: theirs to spend on
        later tokens."""


class BackendBelief:
    """Read by decisions through `BackendView.belief`, changed by its learner only, which counts `version` up."""

    __slots__ = ("arrivals", "cache", "cached_ahead_tokens", "decode", "drift", "end", "heard_at_s",
                 "implausible_since_s", "open_requests", "pace", "paces", "prefill", "prefills_done", "stand_in",
                 "streams", "ttft", "version", "waiting", "waits")  # fmt: skip

    def __init__(self, pool: PoolTails) -> None:
        self.version = 0
        self.ttft = Tail(pool.ttft)
        self.pace = Tail(pool.pace)
        self.end = Tail(pool.end)
        self.drift = Drift()
        self.prefill = Correction(PREFILL_GAIN)
        self.decode = Correction(DECODE_GAIN)
        self.arrivals = PrefillArrivals()
        self.cache = PrefixCache()
        self.streams: dict[ClassBelief, Streams] = {}
        self.open_requests = 0
        self.heard_at_s: float | None = None
        """The last sign of life, or when the first request went out after a pause; `None` before any."""
        self.cached_ahead_tokens = 0
        """Of the prompts that wait there for their first token, the part believed to be in the cache."""
        self.prefills_done = PrefillsDone()
        self.waiting = WaitingPrompts()
        self.waits = Waits()
        self.paces = Waits()
        self.implausible_since_s: float | None = None
        self.stand_in: Coefficients | None = None
        """For a backend without coefficients of its own: what the others of its model suggest."""

    def idle_s(self, now: float) -> float:
        """Seconds without a sign of life while nothing is open there; 0 while something is."""
        if self.open_requests or self.heard_at_s is None:
            return 0.0
        return max(0.0, now - self.heard_at_s)

    def silence_s(self, now: float) -> float:
        """Seconds without a sign of life while something is open there."""
        if not self.open_requests or self.heard_at_s is None:
            return 0.0
        return max(0.0, now - self.heard_at_s)

    def lost(self, now: float) -> bool:
        """The latency model does not fit this backend at all: its drift has been out of range for 10 s, or half of
        its first tokens come later than three standard deviations."""
        since_s = self.implausible_since_s
        if since_s is not None and now - since_s >= LOST_AFTER_S:
            return True
        return self.ttft.far_share > 0.5 and self.ttft.samples >= LOST_MIN_SAMPLES

    def heard(self, now: float) -> None:
        """A sign of life."""
        self.heard_at_s = now
        low, high = PLAUSIBLE_DRIFT
        if low <= self.drift.applied <= high:
            self.implausible_since_s = None
        elif self.implausible_since_s is None:
            self.implausible_since_s = now
