"""One request on one backend: lease, send, relay, and the books settled whatever happens.

All of it runs in callbacks, of the client's connection at its beginning and of the backend's afterwards. However an
attempt ends (an answer, a failure, the client's leaving, another's answer, a crash), `_settle` settles its books, and
once; only whose fault a 5xx is, the course says later. What comes before and after it is its request's `course`.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

import msgspec

from backends.catalog.health import OutcomeKind
from backends.upstream import UpstreamCall, UpstreamError, UpstreamFault
from policies.attempts import Failure, FailureCause, backoff_until_s
from policies.facts import RequestFacts
from policies.policy import Decision
from router.fleet.feedback import Faults, Feedback
from router.fleet.leases import Lease
from router.fleet.live import Fleet, LiveBackend
from router.path.relay import Client, Ending, EventRelay
from router.record.grounds import grounds_of
from router.record.metrics import Metrics
from router.request.exchange import Exchange, Outcome, Tried
from router.request.intake import InferenceRequest
from router.request.prompt_ratios import PromptRatios
from router.wire.answer_members import read_whole_answer
from router.wire.engine_errors import ErrorAnswer, error_answer, retry_after_s
from router.wire.errors import ApiError
from router.wire.relayed_headers import RELAYED_HEADERS
from router.wire.sse import ModelNameEdit, StreamReader

MAX_RESPONSE_BYTES = 256 * 1024 * 1024
MAX_ERROR_BYTES = 1024 * 1024
log = logging.getLogger("headrace.dispatch")

FAULTS = {
    UpstreamFault.CONNECT: (FailureCause.CONNECT, OutcomeKind.CONNECT_ERROR),
    UpstreamFault.CONNECT_TIMEOUT: (FailureCause.CONNECT, OutcomeKind.CONNECT_ERROR),
    UpstreamFault.RESET: (FailureCause.RESET_BEFORE_BYTE, OutcomeKind.RESET),
    UpstreamFault.PROTOCOL: (FailureCause.RESET_BEFORE_BYTE, OutcomeKind.SERVER_ERROR),
    UpstreamFault.TRUNCATED: (FailureCause.TRUNCATED, OutcomeKind.TRUNCATED),
    UpstreamFault.TIMEOUT: (FailureCause.FIRST_TOKEN_TIMEOUT, OutcomeKind.TIMEOUT),
    UpstreamFault.DECLARED_DOWN: (FailureCause.RESET_BEFORE_BYTE, OutcomeKind.TIMEOUT),
}
STATUSES = {
    401: FailureCause.STATUS_502,  # the backend refuses the gateway's own key: nothing that the client can mend
    429: FailureCause.STATUS_429,
    501: FailureCause.CLIENT_ERROR,
    502: FailureCause.STATUS_502,
    503: FailureCause.STATUS_503,
    504: FailureCause.STATUS_504,
}
BROKEN_OFF = {
    OutcomeKind.TRUNCATED: FailureCause.TRUNCATED,
    OutcomeKind.TIMEOUT: FailureCause.INTER_TOKEN_TIMEOUT,
    OutcomeKind.CLIENT_GONE: FailureCause.CLIENT_GONE,
    OutcomeKind.SUPERSEDED: FailureCause.SUPERSEDED,
    OutcomeKind.CLIENT_ERROR: FailureCause.CLIENT_ERROR,
    OutcomeKind.SERVER_ERROR: FailureCause.STATUS_5XX_OTHER,
}
"""What the record says of an attempt that no other may follow."""
ENDINGS = {
    Ending.COMPLETE: (Outcome.OK, OutcomeKind.SUCCESS),
    Ending.ENGINE_ERROR: (Outcome.BACKEND_ERROR, OutcomeKind.SERVER_ERROR),
    Ending.TRUNCATED: (Outcome.TRUNCATED, OutcomeKind.TRUNCATED),
    Ending.TIMEOUT: (Outcome.TIMEOUT, OutcomeKind.TIMEOUT),
}


class Answered(Client, Protocol):
    """The client, as whoever serves its request to the end sees it."""

    def settle_in(self) -> None:
        """The answer is a stream, and under way: hold no more than it needs."""

    def refuse(self, error: ApiError) -> None:
        """Answer with an error of the gateway's own, and be done."""

    def over(self) -> None:
        """All that there was to do for the request is done."""

    def crashed(self, error: Exception) -> None:
        """Serving it has failed by the gateway's own fault."""


class Tools(Protocol):
    """What every attempt of the process works with."""

    fleet: Fleet
    metrics: Metrics
    prompt_ratios: PromptRatios
    faults: Faults
    clock: Callable[[], float]


class Owner(Protocol):
    """The course of the request, as an attempt sees it."""

    exchange: Exchange
    request: InferenceRequest
    error_answer: ErrorAnswer | None
    """The last that a backend gave."""
    welcome_again_at_s: float
    """When the first of the backends that asked for silence takes requests again."""

    @property
    def client(self) -> Answered: ...
    @property
    def dispatch(self) -> Tools: ...

    def start(self, attempt: "Attempt", status: int, lines: bytes, *, sized: bool) -> None:
        """The attempt's answer begins: no other attempt can answer any more."""

    def answer(self, attempt: "Attempt", answer: ErrorAnswer) -> None:
        """The attempt's answer is an error of the backend's, and final."""

    def failed(self, attempt: "Attempt", failure: Failure) -> None:
        """The attempt has failed before the client had a byte."""

    def accuse(self, live: LiveBackend, failure: Failure) -> None:
        """The attempt ended in a 5xx. Its backend's health has not been told: whose fault that is, shows later."""

    def served(self) -> None:
        """The attempt's backend can serve the request."""

    def lighten(self) -> None:
        """The answer is a stream, and under way."""

    def over(self) -> None:
        """The client has its answer, or as much of one as there will be."""

    def crashed(self, error: Exception) -> None:
        """The attempt has failed by the gateway's own fault."""


class Attempt(UpstreamCall):
    """One attempt."""

    __slots__ = (
        "_began_at_s", "_body", "_body_bytes", "_body_limit", "_expected_tpot_s", "_feedback", "_is_hedge", "_lease",
        "_live", "_owner", "_price", "_reason", "_relay", "_settled", "_tools", "exchange", "facts",
    )  # fmt: skip

    def __init__(self, owner: Owner, *, is_hedge: bool = False) -> None:
        super().__init__()
        self._owner = owner
        self._tools = owner.dispatch
        self._is_hedge = is_hedge
        self._relay: EventRelay | None = None
        self._settled = True
        self._expected_tpot_s: float | None = None
        """Set once a stream has begun, where no learner believes anything of its pace."""
        self.exchange = owner.exchange

    def on(self, live: LiveBackend, decision: Decision, facts: RequestFacts) -> None:
        """Send the request there, as `decision` says. What comes of it the owner is told, never before this returns."""
        tools, exchange, request = self._tools, self.exchange, self._owner.request
        now = tools.clock()
        self._live = live
        self.facts = facts
        self._began_at_s = now
        self._reason, self._price = decision.reason, decision.price
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._lease: Lease = live.lease(facts.prompt_tokens)
        self._lease.take()
        self._settled = False
        self._feedback = Feedback(tools.fleet.learner, live, tools.faults, choices=request.choices)
        self._feedback.begin(facts, decision, exchange.generation.pipeline.margin, now)
        stream, timeouts = facts.stream, request.timeouts
        body = request.body_for(live.spec.served_model_name)
        self.post(
            live.pool,
            b"%bx-request-id: %b\r\ncontent-length: %d\r\n\r\n%b"
            % (live.head(request.endpoint, stream), exchange.request_id.encode("ascii"), len(body), body),
            connect_timeout_s=timeouts.connect_s,
            head_deadline_s=min(now + timeouts.first_token_s, exchange.deadline_s) if stream else exchange.deadline_s,
        )

    def cancel(self) -> None:
        """Nobody wants the answer any more, and that is no fault of the backend."""
        self._release()
        self._settle(None, OutcomeKind.CLIENT_GONE)

    def supersede(self) -> None:
        """Another attempt answers the request: this one's work was for nothing, and no fault of the backend."""
        self._release()
        self._settle(None, OutcomeKind.SUPERSEDED)
        self._tools.metrics.hedge_wasted_seconds.inc((self._live.spec.name,), self._tools.clock() - self._began_at_s)

    # --- UpstreamCall -----------------------------------------------------------------------------------------------

    def on_head(self) -> None:
        owner, clock = self._owner, self._tools.clock
        request = owner.request
        if not 200 <= self.status < 300:
            self._body_limit = MAX_ERROR_BYTES
            self.set_deadline(clock() + request.timeouts.inter_token_s)
            return
        if self._is_event_stream():
            reader = StreamReader(self._edit(), hide_usage=not request.usage_asked, choices=request.choices)
            self._relay = EventRelay(
                self, owner.client, self.exchange, self._lease, self._feedback, reader, request.timeouts, clock
            )
        else:
            self._body_limit = MAX_RESPONSE_BYTES
            if self.facts.stream:
                self.set_deadline(self.exchange.deadline_s)

    def on_body(self, data: bytes) -> None:
        if self._relay is not None:
            self._relay.body(data)
            return
        self._body.append(data)
        self._body_bytes += len(data)
        if self._body_bytes > self._body_limit:
            what = f"the response body is over {self._body_limit} bytes"
            self.failed(UpstreamError(UpstreamFault.PROTOCOL, what))

    def on_end(self) -> None:
        if self._relay is not None:
            self._relay.end()
            return
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body = []
        if 200 <= self.status < 300:
            self._take_whole(body)
        else:
            self._take_error(body)

    def on_failure(self, error: UpstreamError) -> None:
        if self._relay is not None:
            self._relay.fail(error)
        else:
            self.failed(error)

    def on_crash(self, error: Exception) -> None:
        self.cancel()
        self._owner.crashed(error)

    # --- relay.Source -----------------------------------------------------------------------------------------------

    def start_answer(self) -> None:
        """The first event of a stream is there: the client gets its status line."""
        self._owner.start(self, self.status, self._relayed_lines(), sized=False)
        if self._relay is not None and self._relay.is_good:
            self._owner.served()
        # What the answer's start does not need comes after it.
        asyncio.get_running_loop().call_soon(self._lighten)

    def failed(self, error: UpstreamError) -> None:
        """The backend failed before the client had a byte."""
        self._release()
        name = self._live.spec.name
        cause, kind = FAULTS[error.fault]
        log.info("%s failed on %s: %s", self.exchange.request_id, name, error)
        self._fail(Failure(name, cause, self._tools.clock()), kind)

    def ended(self, ending: Ending) -> None:
        """The client has its answer, or as much of one as there will be."""
        self._release()
        self.exchange.outcome, kind = ENDINGS[ending]
        self._settle(None, kind)
        if kind is OutcomeKind.SUCCESS:
            self._owner.served()
            self._learn()
        self._owner.over()

    # --- answers ----------------------------------------------------------------------------------------------------

    def _take_whole(self, body: bytes) -> None:
        exchange = self.exchange
        if b"content-encoding" not in self.header:
            edit = self._edit()
            try:
                answer = read_whole_answer(body)
            except (msgspec.DecodeError, RecursionError):  # not ours to judge
                edit.meet(body)
            else:
                edit.meet_name(bytes(answer.model))
                exchange.usage = answer.usage
                if answer.usage is not None:
                    exchange.generated_tokens = answer.usage.completion_tokens or 0
            body = edit.apply(body)
        exchange.last_token_at_s = self._tools.clock()
        lines = b"%bcontent-length: %d\r\n" % (self._relayed_lines(), len(body))
        self._owner.start(self, self.status, lines, sized=True)
        self._owner.client.finish(body)
        self.ended(Ending.COMPLETE)

    def _take_error(self, body: bytes) -> None:
        status, name, now, owner = self.status, self._live.spec.name, self._tools.clock(), self._owner
        owner.error_answer = answer = error_answer(status, self.headers, body, self._live.spec, self._edit())
        if answer is not None and status not in STATUSES and status < 500:
            self.exchange.outcome = Outcome.CLIENT_ERROR
            self._settle(None, OutcomeKind.CLIENT_ERROR)
            owner.answer(self, answer)
            return
        kind = OutcomeKind.SERVER_ERROR
        if status == 429:
            kind = OutcomeKind.OVERLOADED
        elif status in (401, 501):  # an answer about the request or its key, not about the backend's health
            kind = OutcomeKind.CLIENT_ERROR
        wait_s = retry_after_s(self.header.get(b"retry-after"))
        if wait_s is not None:
            owner.welcome_again_at_s = min(owner.welcome_again_at_s, now + wait_s)
        cause = STATUSES.get(status, FailureCause.STATUS_5XX_OTHER)
        self._fail(Failure(name, cause, now, wait_s, status=status), kind)

    def _relayed_lines(self) -> bytes:
        return b"".join([b"%b: %b\r\n" % header for header in self.headers if header[0] in RELAYED_HEADERS])

    def _is_event_stream(self) -> bool:
        """Whether the body is server-sent events in the clear."""
        content_type = self.header.get(b"content-type", b"")
        if content_type == b"application/json":
            return False
        media_type = content_type.partition(b";")[0].strip().lower()
        return media_type == b"text/event-stream" and b"content-encoding" not in self.header

    def _edit(self) -> ModelNameEdit:
        return ModelNameEdit(self._live.spec.served_model_name, self._owner.request.client_model)

    # --- books ------------------------------------------------------------------------------------------------------

    def _release(self) -> None:
        """Be done with the backend, whole answer or not."""
        self.leave()
        relay, self._relay = self._relay, None
        if relay is not None:
            relay.close()

    def _fail(self, failure: Failure, kind: OutcomeKind) -> None:
        self._settle(failure, kind)
        silent_until_s = backoff_until_s(failure)
        if silent_until_s is not None:
            self._live.rest_until(silent_until_s, asked=failure.retry_after_s is not None)
        self._owner.failed(self, failure)

    def _settle(self, failure: Failure | None, kind: OutcomeKind) -> None:
        """Give the lease back and write down what became of the attempt."""
        if self._settled:
            return
        self._settled = True
        exchange, live, tools = self.exchange, self._live, self._tools
        self._lease.settle()
        if failure is not None and failure.status is not None and kind is OutcomeKind.SERVER_ERROR:
            self._owner.accuse(live, failure)
        else:
            tools.fleet.on_outcome(live, kind)
        tools.metrics.attempts.inc((live.spec.name, kind))
        cause, now = BROKEN_OFF.get(kind) if failure is None else failure.cause, tools.clock()
        feedback = self._feedback
        if kind is OutcomeKind.SUPERSEDED:  # for the learner as if its client had gone: how late it was nobody knows
            feedback.end(FailureCause.CLIENT_GONE, 0, None, now)
        else:
            feedback.end(cause, exchange.generated_tokens, exchange.usage, now)
        tools.metrics.ended(live.spec.name, self.facts.latency_class, feedback.prediction, cause, now)
        exchange.tried.append(
            Tried(live.spec.name, self._reason, self._price, cause, self._began_at_s, now, self._is_hedge)
        )

    def _lighten(self) -> None:
        """A stream may run for minutes: keep of its request and decision only what is still needed."""
        exchange = self.exchange
        decision = exchange.decision
        if self._settled or decision is None or decision.chosen is None:
            return
        if decision.chosen.belief is None:
            self._expected_tpot_s = self._live.expected_pace_s(self.facts, decision.chosen)
        exchange.packed_grounds = grounds_of(decision, self.facts, exchange.decided_at_s).packed()
        exchange.decision = None
        self.headers, self.header = [], {}
        self._owner.lighten()

    def _learn(self) -> None:
        exchange, live, request = self.exchange, self._live, self._owner.request
        usage = exchange.usage
        if exchange.first_token_at_s is not None:
            live.observe_ttft(exchange.first_token_at_s - self._began_at_s)
        if usage is not None and usage.prompt_tokens:
            facts = self.facts
            self._tools.prompt_ratios.observe(facts.model, facts.tenant, request.prompt_size, usage.prompt_tokens)
        tpot_s = exchange.tpot_s()
        if tpot_s is None:
            return
        expected_s, decision = self._expected_tpot_s, exchange.decision
        if decision is not None and decision.chosen is not None and decision.chosen.belief is None:
            expected_s = live.expected_pace_s(self.facts, decision.chosen)
        if expected_s is not None:
            live.observe_pace(expected_s, tpot_s, exchange.generated_tokens)
