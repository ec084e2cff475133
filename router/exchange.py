"""What became of one request: filled in on its way, settled once at its end into metrics and one decision record."""

import math
from dataclasses import dataclass, field
from enum import StrEnum

from policies.facts import RequestFacts
from policies.policy import Decision
from router.decision_record import SettledRequest, Tried
from router.errors import ApiError
from router.generation import Generation
from router.intake import Endpoint, InferenceRequest
from router.keys import ParallelLease, Principal
from router.metrics import Metrics
from router.relay import Ending, Progress

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
    generation: Generation
    """The configuration that it began under, and ends under."""
    began_at_s: float
    received_at_s: float = 0.0
    """When the last byte of its body had come; 0 before."""
    deadline_s: float = math.inf
    """By when its answer must have ended."""
    principal: Principal | None = None
    """Whom it is made for; `None` while nobody is known."""
    parallel_lease: ParallelLease | None = None
    facts: RequestFacts | None = None
    decision: Decision | None = None
    """The last one: its backend is that of the answer."""
    decided_at_s: float = 0.0
    tried: list[Tried] = field(default_factory=list)
    """Attempts that have ended."""
    status: int = 0
    outcome: Outcome = Outcome.INTERNAL_ERROR
    waited_s: float = 0.0
    """Waiting for backends before the answer began, over all attempts."""
    overhead_s: float | None = None
    """The gateway's own share of the time until the answer began."""
    progress: Progress = field(default_factory=Progress)

    def read(self, request: InferenceRequest) -> None:
        """Its body made sense."""
        self.facts = request.facts

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
        """Count. Called exactly once, however the request ended."""
        backend = self.backend
        endpoint = self.endpoint.value
        model = UNKNOWN_MODEL if self.facts is None else self.facts.model
        metrics.requests.inc((endpoint, model, backend, str(self.status), self.outcome.value))
        if self.received_at_s:
            metrics.request_seconds.observe((endpoint, backend), now - self.received_at_s)
        if self.overhead_s is not None:
            metrics.overhead_seconds.observe((), self.overhead_s)
        self._settle_tokens(metrics, backend)

    def settled(self, now: float) -> SettledRequest:
        """All that the decision log needs: references to what no longer changes."""
        progress, facts, principal = self.progress, self.facts, self.principal
        usage = progress.usage
        return SettledRequest(
            request_id=self.request_id,
            endpoint=self.endpoint.value,
            model=UNKNOWN_MODEL if facts is None else facts.model,
            latency_class="" if facts is None else facts.latency_class,
            tenant="" if principal is None else principal.tenant,
            key_id="" if principal is None else principal.key_id,
            config_hash=self.generation.config_hash,
            status=self.status,
            outcome=self.outcome.value,
            began_at_s=self.began_at_s,
            received_at_s=self.received_at_s,
            ended_at_s=now,
            waited_s=self.waited_s,
            overhead_s=self.overhead_s,
            first_token_at_s=progress.first_token_at_s,
            last_token_at_s=progress.last_token_at_s,
            prompt_tokens=None if usage is None else usage.prompt_tokens,
            generated_tokens=progress.generated_tokens if usage is None else usage.completion_tokens,
            facts=facts,
            decision=self.decision,
            decided_at_s=self.decided_at_s,
            tried=tuple(self.tried),
        )

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
            metrics.ttft_seconds.observe((backend,), progress.first_token_at_s - self.received_at_s)
        tpot_s = self.tpot_s()
        if tpot_s is not None:
            metrics.tpot_seconds.observe((backend,), tpot_s)
        usage = progress.usage
        if usage is not None:
            metrics.tokens.inc((backend, "prompt"), usage.prompt_tokens or 0)
            metrics.tokens.inc((backend, "generated"), usage.completion_tokens or 0)
