"""What became of one request: filled in on its way, settled once at its end into metrics and one log line."""

import json
import logging
import math
from dataclasses import dataclass, field
from enum import StrEnum

from policies.policy import Decision
from router.errors import ApiError
from router.intake import Endpoint, InferenceRequest
from router.metrics import Metrics
from router.relay import Ending, Progress

access_log = logging.getLogger("headrace.access")
NO_BACKEND = "none"
UNKNOWN_MODEL = "other"


class Outcome(StrEnum):
    """How a request ended: a closed list, the same in metric and log."""

    OK = "ok"
    REFUSED = "refused"
    """Answered by the gateway itself with a 4xx, nothing was sent to a backend."""
    SHED = "shed"
    CLIENT_ERROR = "client_error"
    """The backend found fault with the request; its answer was relayed."""
    BACKEND_ERROR = "backend_error"
    TRUNCATED = "truncated"
    TIMEOUT = "timeout"
    NO_BACKEND = "no_backend"
    CLIENT_CLOSED = "client_closed"
    INTERNAL_ERROR = "internal_error"


ENDINGS = {
    Ending.COMPLETE: Outcome.OK,
    Ending.ENGINE_ERROR: Outcome.BACKEND_ERROR,
    Ending.TRUNCATED: Outcome.TRUNCATED,
    Ending.TIMEOUT: Outcome.TIMEOUT,
}


@dataclass(slots=True)
class Exchange:
    """One request from its head to the end of its answer. Times are monotonic seconds."""

    endpoint: Endpoint
    request_id: str
    began_at_s: float
    received_at_s: float = 0.0
    """When the last byte of its body had come; 0 before."""
    deadline_s: float = math.inf
    """By when its answer must have ended."""
    model: str = UNKNOWN_MODEL
    latency_class: str = ""
    decision: Decision | None = None
    attempts: int = 0
    status: int = 0
    outcome: Outcome = Outcome.INTERNAL_ERROR
    waited_s: float = 0.0
    """Waiting for backends before the answer began, over all attempts."""
    overhead_s: float | None = None
    """The gateway's own share of the time until the answer began."""
    progress: Progress = field(default_factory=Progress)

    def read(self, request: InferenceRequest) -> None:
        self.model = request.facts.model
        self.latency_class = request.facts.latency_class

    @property
    def backend(self) -> str:
        chosen = self.decision.chosen if self.decision is not None else None
        return NO_BACKEND if chosen is None else chosen.spec.name

    def begin_answer(self, now: float) -> None:
        """The answer's head is about to be written."""
        self.overhead_s = max(0.0, now - self.received_at_s - self.waited_s - self.progress.waited_s)

    def refused(self, error: ApiError) -> None:
        """The gateway answers with an error of its own."""
        self.status = error.status
        if error.status in (502, 504):
            self.outcome = Outcome.TIMEOUT if error.status == 504 else Outcome.BACKEND_ERROR
        elif error.status == 503:
            self.outcome = Outcome.NO_BACKEND
        else:
            self.outcome = Outcome.SHED if error.status == 429 else Outcome.REFUSED

    def client_gone(self) -> None:
        self.status, self.outcome = 499, Outcome.CLIENT_CLOSED

    def cut_off(self) -> None:
        """The process ends before a begun answer did."""
        self.outcome = Outcome.TRUNCATED

    def settle(self, metrics: Metrics, now: float) -> None:
        """Count and log. Called exactly once, however the request ended."""
        backend = self.backend
        metrics.requests.labels(self.endpoint.value, self.model, backend, str(self.status), self.outcome.value).inc()
        if self.received_at_s:
            metrics.request_seconds.labels(self.endpoint.value, backend).observe(now - self.received_at_s)
        if self.overhead_s is not None:
            metrics.overhead_seconds.observe(self.overhead_s)
        self._settle_tokens(metrics, backend)
        if access_log.isEnabledFor(logging.INFO):
            access_log.info("%s", self._line(now))

    def tpot_s(self) -> float | None:
        """Mean time between generated tokens, `None` where fewer than two came apart."""
        progress = self.progress
        first, last = progress.first_token_at_s, progress.last_token_at_s
        if first is None or last is None or progress.generated_tokens < 2 or last <= first:
            return None
        return (last - first) / (progress.generated_tokens - 1)

    def _settle_tokens(self, metrics: Metrics, backend: str) -> None:
        progress = self.progress
        if progress.first_token_at_s is not None:
            metrics.ttft_seconds.labels(backend).observe(progress.first_token_at_s - self.received_at_s)
        tpot_s = self.tpot_s()
        if tpot_s is not None:
            metrics.tpot_seconds.labels(backend).observe(tpot_s)
        usage = progress.usage
        if usage is not None:
            metrics.tokens.labels(backend, "prompt").inc(usage.prompt_tokens or 0)
            metrics.tokens.labels(backend, "generated").inc(usage.completion_tokens or 0)

    def _line(self, now: float) -> str:
        progress, usage = self.progress, self.progress.usage
        first = progress.first_token_at_s
        fields = {
            "request_id": self.request_id,
            "endpoint": self.endpoint.value,
            "model": self.model,
            "class": self.latency_class,
            "status": self.status,
            "outcome": self.outcome.value,
            "backend": self.backend,
            "reason": self.decision.reason if self.decision is not None else None,
            "attempts": self.attempts,
            "overhead_ms": None if self.overhead_s is None else round(self.overhead_s * 1e3, 3),
            "ttft_s": None if first is None else round(first - self.received_at_s, 4),
            "total_s": round(now - (self.received_at_s or self.began_at_s), 4),
            "prompt_tokens": None if usage is None else usage.prompt_tokens,
            "generated_tokens": usage.completion_tokens if usage is not None else progress.generated_tokens,
        }
        return json.dumps(fields)
