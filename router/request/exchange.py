"""What became of one request: filled in on its way, settled once at its end into metrics and one decision record."""

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from policies.facts import RequestFacts
from policies.policy import Decision
from router.keys.ring import ParallelLease, Principal
from router.request.generation import Generation
from router.request.intake import Endpoint
from router.wire.answer_members import Usage
from router.wire.errors import ApiError

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


class HedgeEnd(StrEnum):
    """What became of a hedge; also the metric label."""

    WON = "won"
    """It answered first."""
    LOST = "lost"
    """The first attempt did."""
    TOOK_OVER = "took_over"
    """The first attempt failed, and the hedge went on alone: it was the retry."""
    FAILED = "failed"
    """It failed itself, and the first attempt went on alone."""
    LEFT = "left"
    """Nobody wanted the answer any more: the client left, or the gateway stopped."""


class Tried(NamedTuple):
    """One attempt of a request that has ended. Times are monotonic seconds."""

    backend: str | None
    reason: str
    """Why this one."""
    price: float | None
    cause: str | None
    """How it failed, in the words of `policies.attempts.FailureCause`; `None` where it gave the client its answer."""
    began_at_s: float
    ended_at_s: float
    is_hedge: bool = False
    """Made beside another one that was silent."""


@dataclass(slots=True)
class Exchange:
    """One request from its head to the end of its answer. Times are monotonic seconds.

    Nothing of it changes once it has ended, so the decision log reads it later, as it is.
    """

    endpoint: Endpoint
    request_id: str
    generation: Generation
    """The configuration that it began under, and ends under."""
    began_at_s: float
    received_at_s: float = 0.0
    """When the last byte of its body had come; 0 before."""
    deadline_s: float = math.inf
    """By when its answer must have ended."""
    ended_at_s: float = 0.0
    principal: Principal | None = None
    """Whom it is made for; `None` while nobody is known."""
    parallel_lease: ParallelLease | None = None
    admitted: str | None = None
    """The latency class that it counts under among those in flight; `None` where it was not let in."""
    facts: RequestFacts | None = None
    backend: str = NO_BACKEND
    """Chosen by the last decision: that of the answer."""
    reason: str = ""
    price: float | None = None
    decision: Decision | None = None
    """The last one. Once a stream runs, `packed_grounds` (`grounds_record.Grounds.packed`) is what is left of it."""
    packed_grounds: bytes | None = None
    decided_at_s: float = 0.0
    tried: list[Tried] = field(default_factory=list)
    """Attempts that have ended, in the order of their ends."""
    hedge: HedgeEnd | None = None
    """What became of its hedge; `None` where it had none, or still has."""
    status: int = 0
    outcome: Outcome = Outcome.INTERNAL_ERROR
    miss_weight: float | None = None
    """What a miss of its class weighed in the last decision."""
    queued_s: float = 0.0
    """Waiting for a backend to come up."""
    waited_s: float = 0.0
    """Waiting for backends before the answer began, over all attempts."""
    overhead_s: float | None = None
    """The gateway's own share of the time until the answer began."""
    started: bool = False
    """The client has its status line: no other backend can answer any more."""
    first_token_at_s: float | None = None
    last_token_at_s: float | None = None
    generated_tokens: int = 0
    """Counted in the stream; `usage` has the engine's count."""
    usage: Usage | None = None

    def decided(self, decision: Decision, now: float) -> None:
        """Another backend is to answer, or none can."""
        self.decision = decision
        self.decided_at_s = now
        self.reason = decision.reason
        self.price = decision.price
        chosen = decision.chosen
        self.backend = NO_BACKEND if chosen is None else chosen.spec.name

    def begin_answer(self, now: float) -> None:
        """The answer's head is about to be written."""
        self.started = True
        self.overhead_s = max(0.0, now - self.received_at_s - self.waited_s)

    def generated(self, tokens: int, now: float) -> None:
        """The engine has generated."""
        if self.first_token_at_s is None:
            self.first_token_at_s = now
        self.last_token_at_s = now
        self.generated_tokens += tokens

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

    @property
    def model(self) -> str:
        """The fleet's name of the model."""
        return UNKNOWN_MODEL if self.facts is None else self.facts.model

    def tpot_s(self) -> float | None:
        """Mean time between generated tokens, `None` where fewer than two came apart."""
        first, last = self.first_token_at_s, self.last_token_at_s
        if first is None or last is None or self.generated_tokens < 2 or last <= first:
            return None
        return (last - first) / (self.generated_tokens - 1)
