"""The course of one request: one attempt after another, or two in a race, until its client has an answer.

Mostly there is one attempt, and it answers. Where it fails before the client had a byte, `Dispatch.failed` may send
another. Where it is silent for too long, `hedge` makes a second beside it (`router.path.hedging`): whichever begins its
answer first is the client's from then on, and the other's socket is closed in the same call. Where one of two fails,
the other goes on, and no retry is needed.

An answer begins with the first event of a stream, or with the last byte of an answer that is none: what is before it,
as the 2xx head that engines send ahead of the prefill, promises nothing. A final error about the request itself (4xx)
is an answer too.

The health of a backend hears of a 5xx when the course shows whose fault it was (`policies.attempts.to_blame`): with the
answer of another backend, or with the course's end.
"""

import asyncio
import logging
import math
from collections.abc import Callable
from typing import Protocol

from backends.catalog.health import OutcomeKind
from policies.attempts import REQUEST_REFUSED, CourseEnd, Failure, FailureCause, to_blame
from policies.facts import RequestFacts
from policies.policy import Decision
from router.fleet.live import LiveBackend
from router.path.attempt import Answered, Attempt, Tools
from router.request.exchange import Exchange, HedgeEnd, Outcome
from router.request.intake import InferenceRequest
from router.wire.engine_errors import ErrorAnswer
from router.wire.errors import bad_gateway, gateway_timeout

log = logging.getLogger("headrace.dispatch")

OWN_LINES = (
    b"x-request-id: %b\r\nx-headrace-backend: %b\r\nx-headrace-reason: %b\r\n"
    b"x-headrace-overhead-ms: %.2f\r\n"
)


class Dispatch(Tools, Protocol):
    """Who decides where a request goes next."""

    def failed(self, course: "Course", failure: Failure) -> None:
        """The last attempt failed, none is under way, and the client has had no byte."""


class Course:
    """The attempts of one request, and what they leave to each other."""

    __slots__ = (
        "_accused", "_attempt", "_rival", "_rival_decided", "_waiting_since_s", "client", "dispatch", "error_answer",
        "exchange", "facts", "failures", "leave_queue", "look", "request", "welcome_again_at_s",
    )  # fmt: skip

    def __init__(self, dispatch: Dispatch, exchange: Exchange, request: InferenceRequest, client: Answered) -> None:
        self.dispatch = dispatch
        self.exchange = exchange
        self.request = request
        self.client = client
        self.facts: RequestFacts = request.facts
        """Of the next attempt."""
        self.failures: tuple[Failure, ...] = ()
        self.error_answer: ErrorAnswer | None = None
        """The last that a backend gave."""
        self.welcome_again_at_s = math.inf
        """When the first of the backends that asked for silence takes requests again."""
        self.leave_queue: Callable[[], None] | None = None
        """Set while it waits for a backend to come up; nothing is booked before one has."""
        self.look: asyncio.TimerHandle | None = None
        """Set while a hedge may still become due."""
        self._accused: list[tuple[LiveBackend, Failure]] = []
        """Backends that answered with a 5xx, of which their health has not been told yet."""
        self._attempt: Attempt | None = None
        self._rival: Attempt | None = None
        """The hedge, while both are under way."""
        self._rival_decided: tuple[Decision, float] | None = None
        """What it was made on, and when: the exchange has that of the attempt which is to answer."""
        self._waiting_since_s = 0.0
        """Since when backends have been asked without a pause; 0 where none is being waited for."""

    def send(self, live: LiveBackend) -> None:
        """Try the backend of the exchange's last decision. Its end comes to `failed` or `over`, never before this
        returns."""
        if not self._waiting_since_s:
            self._waiting_since_s = self.dispatch.clock()
        exchange = self.exchange
        assert exchange.decision is not None, "an attempt follows a decision"
        self._attempt = attempt = Attempt(self)
        attempt.on(live, exchange.decision, self.facts)

    def hedge(self, live: LiveBackend, decision: Decision, facts: RequestFacts, now: float) -> None:
        """Try a second backend beside the first, which is silent."""
        self._rival_decided = decision, now
        self._rival = rival = Attempt(self, is_hedge=True)
        rival.on(live, decision, facts)

    def cancel(self) -> None:
        """Nobody wants the answer any more, and that is no fault of a backend."""
        leave_queue, self.leave_queue = self.leave_queue, None
        if leave_queue is not None:
            leave_queue()
        self._stop_looking()
        attempt, rival = self._attempt, self._rival
        self._attempt = self._rival = None
        if rival is not None:
            self._hedge_ended(HedgeEnd.LEFT)
            rival.cancel()
        if attempt is not None:
            self._count_wait()
            attempt.cancel()
        self._judge(CourseEnd.LEFT)

    # --- what its attempts tell -------------------------------------------------------------------------------------

    def start(self, attempt: Attempt, status: int, lines: bytes, *, sized: bool) -> None:
        """The attempt's answer begins: the client gets its status line, and no other attempt can answer any more."""
        self._stop_looking()
        if self._rival is not None:
            self._win(attempt)
        self._start(status, lines, sized=sized)

    def answer(self, attempt: Attempt, answer: ErrorAnswer) -> None:
        """The attempt's answer is an error of the backend's, and final."""
        self._judge(CourseEnd.REFUSED if answer.status in REQUEST_REFUSED else CourseEnd.FAILED)
        self.start(attempt, answer.status, answer.lines(), sized=True)
        self.client.finish(answer.body)
        self.over()

    def accuse(self, live: LiveBackend, failure: Failure) -> None:
        """An attempt ended in a 5xx: whose fault that is, shows later."""
        self._accused.append((live, failure))

    def served(self) -> None:
        """One of its backends can serve it."""
        self._judge(CourseEnd.SERVED)

    def failed(self, attempt: Attempt, failure: Failure) -> None:
        """The attempt has failed before the client had a byte."""
        self._stop_looking()
        self.failures = (*self.failures, failure)
        rival, self._rival = self._rival, None
        if rival is None:
            self._attempt = None
            self._count_wait()
            self.dispatch.failed(self, failure)
        elif attempt is rival:
            self._hedge_ended(HedgeEnd.FAILED)
        else:
            self._attempt = rival
            self._hedge_ended(HedgeEnd.TOOK_OVER)

    def over(self) -> None:
        """The client has its answer, or as much of one as there will be."""
        self._attempt = None
        self._judge(CourseEnd.FAILED)
        self.client.over()

    def crashed(self, error: Exception) -> None:
        """One of its attempts has failed by the gateway's own fault."""
        self.cancel()
        self.client.crashed(error)

    # --- ends -------------------------------------------------------------------------------------------------------

    def give_up(self, failure: Failure, end: CourseEnd = CourseEnd.FAILED) -> None:
        """Tell the client of the last failure: in the backend's own words where it had any."""
        self._judge(end)
        answer, exchange, client = self.error_answer, self.exchange, self.client
        if answer is None:
            if failure.cause in (FailureCause.FIRST_TOKEN_TIMEOUT, FailureCause.HEAD_TIMEOUT):
                client.refuse(gateway_timeout("first token" if self.facts.stream else "answer"))
            else:
                client.refuse(bad_gateway("The backends that were tried could not be reached or broke off."))
            return
        exchange.outcome = Outcome.SHED if answer.status == 429 else Outcome.BACKEND_ERROR
        if self.welcome_again_at_s < math.inf:
            answer = answer.retry_in(self.welcome_again_at_s - self.dispatch.clock())
        self._start(answer.status, answer.lines(), sized=True)
        client.finish(answer.body)
        client.over()

    def lighten(self) -> None:
        """Its stream is under way and may be for minutes: keep of the request only what is still needed."""
        self.request = self.request.without_body()
        self.client.settle_in()

    def _judge(self, end: CourseEnd) -> None:
        """Tell the health of each backend that answered with a 5xx whether that was its fault. Each is told once."""
        if not self._accused:
            return
        accused, self._accused = self._accused, []
        blamed = to_blame([failure for _, failure in accused], end)
        if not blamed:
            said = ", ".join(f"{failure.backend} {failure.status}" for _, failure in accused)
            log.info("%s: no backend is blamed for %s", self.exchange.request_id, said)
        for live, failure in accused:
            kind = OutcomeKind.SERVER_ERROR if failure in blamed else OutcomeKind.EXCUSED
            self.dispatch.fleet.on_outcome(live, kind)

    def _win(self, winner: Attempt) -> None:
        """The other attempt of two is called back."""
        rival, first = self._rival, self._attempt
        assert rival is not None
        assert first is not None
        self._attempt, self._rival = winner, None
        if winner is rival:
            self._hedge_ended(HedgeEnd.WON)
            first.supersede()
        else:
            self._hedge_ended(HedgeEnd.LOST)
            rival.supersede()

    def _hedge_ended(self, how: HedgeEnd) -> None:
        """It has the client now, or none any more."""
        decided, self._rival_decided = self._rival_decided, None
        if decided is not None and how in (HedgeEnd.WON, HedgeEnd.TOOK_OVER):
            self.exchange.decided(*decided)
        self.exchange.hedge = how
        self.dispatch.metrics.hedges.inc((how,))

    def _stop_looking(self) -> None:
        look, self.look = self.look, None
        if look is not None:
            look.cancel()

    def _start(self, status: int, lines: bytes, *, sized: bool) -> None:
        """Write the head, with lines of the gateway's own; from here on the answer counts as begun."""
        exchange = self.exchange
        self._count_wait()
        exchange.begin_answer(self.dispatch.clock())
        exchange.status = status
        own_lines = OWN_LINES % (
            exchange.request_id.encode("ascii"), exchange.backend.encode("ascii"),
            exchange.reason.encode("ascii", "replace"), (exchange.overhead_s or 0.0) * 1e3,
        )  # fmt: skip
        self.client.start(status, lines + own_lines, sized=sized)

    def _count_wait(self) -> None:
        """Add to `waited_s` what has passed since backends were asked, once."""
        exchange = self.exchange
        if not exchange.started and self._waiting_since_s:
            exchange.waited_s += self.dispatch.clock() - self._waiting_since_s
        self._waiting_since_s = 0.0
