"""One request on one backend: lease, send, relay, and the books settled whatever happens."""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from time import monotonic, time
from urllib.parse import urlsplit

import msgspec

from backends.catalog.health import OutcomeKind
from backends.upstream import HeaderTuple, UpstreamError, UpstreamFault, UpstreamResponse
from policies.attempts import Failure, FailureCause, backoff_until_s
from router.decision_record import Tried
from router.errors import ERROR_TYPES, bad_gateway, gateway_timeout
from router.exchange import ENDINGS, Exchange, Outcome
from router.fleet import Fleet, LiveBackend
from router.intake import InferenceRequest
from router.leases import Lease
from router.metrics import Metrics
from router.relay import Client, Deadlines, Ending, Headers, Progress, Relay, is_event_stream, relayed_headers
from router.sse import ModelNameEdit, StreamReader

MAX_RESPONSE_BYTES = 256 * 1024 * 1024
MAX_ERROR_BYTES = 1024 * 1024
MAX_MESSAGE_BYTES = 500
MAX_STATUS = 599
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
    502: FailureCause.STATUS_502,
    503: FailureCause.STATUS_503,
    504: FailureCause.STATUS_504,
}
WHOLE_HEADERS = (
    (b"content-type", b"application/json"), (b"accept", b"application/json"), (b"accept-encoding", b"identity"),
    (b"user-agent", b"headrace"),
)  # fmt: skip
STREAM_HEADERS = (
    (b"content-type", b"application/json"), (b"accept", b"text/event-stream"), (b"accept-encoding", b"identity"),
    (b"user-agent", b"headrace"),
)  # fmt: skip
BROKEN_OFF = {
    OutcomeKind.TRUNCATED: FailureCause.TRUNCATED,
    OutcomeKind.TIMEOUT: FailureCause.INTER_TOKEN_TIMEOUT,
    OutcomeKind.CLIENT_GONE: FailureCause.CLIENT_GONE,
    OutcomeKind.CLIENT_ERROR: FailureCause.CLIENT_ERROR,
    OutcomeKind.SERVER_ERROR: FailureCause.STATUS_5XX_OTHER,
}
"""What the record says of an attempt that no other may follow."""
ENDING_KINDS = {
    Ending.COMPLETE: OutcomeKind.SUCCESS,
    Ending.ENGINE_ERROR: OutcomeKind.SERVER_ERROR,
    Ending.TRUNCATED: OutcomeKind.TRUNCATED,
    Ending.TIMEOUT: OutcomeKind.TIMEOUT,
}


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """A backend's own error, kept to be relayed if no other backend does better."""

    status: int
    headers: Headers
    body: bytes


class Attempt:
    """Attempts of one request, one at a time."""

    def __init__(
        self,
        fleet: Fleet,
        metrics: Metrics,
        exchange: Exchange,
        request: InferenceRequest,
        client: Client,
        *,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._fleet = fleet
        self._metrics = metrics
        self._timeouts = request.timeouts
        self._exchange = exchange
        self._request = request
        self._client = client
        self._clock = clock
        self._error_answer: ErrorAnswer | None = None
        self._welcome_again_at_s = math.inf
        """When the first of the backends that asked for silence takes requests again."""
        self.deadline_s = exchange.deadline_s

    async def on(self, live: LiveBackend) -> Failure | None:
        """Try one backend; `None` where the client has its answer, or as much of one as there will be."""
        exchange, request = self._exchange, self._request
        exchange.progress = Progress()
        began_at_s = self._clock()
        # What leaving without a verdict means: the client went, and that is nobody's fault.
        kind = OutcomeKind.CLIENT_GONE
        failure: Failure | None = None
        with live.lease(request.facts.prompt_tokens) as lease:
            try:
                async with await self._send(live) as response:
                    failure, kind = await self._take(live, response, lease)
            except UpstreamError as error:
                cause, kind = FAULTS[error.fault]
                failure = Failure(live.spec.name, cause, self._clock())
                log.info("%s failed on %s: %s", exchange.request_id, live.spec.name, error)
            finally:
                exchange.waited_s += exchange.progress.waited_s
                exchange.progress.waited_s = 0.0
                self._fleet.on_outcome(live, kind)
                self._metrics.attempts.inc((live.spec.name, kind.value))
                self._note_tried(failure, kind, began_at_s)
        if failure is not None:
            silent_until_s = backoff_until_s(failure)
            if silent_until_s is not None:
                live.rest_until(silent_until_s, asked=failure.retry_after_s is not None)
        elif kind is OutcomeKind.SUCCESS:
            self._learn(live)
        return failure

    def give_up(self, failure: Failure) -> None:
        """Tell the client of the last failure: in the backend's own words where it had any.

        Raises:
            ApiError: 502 or 504 where it had none.
        """
        answer = self._error_answer
        if answer is None:
            if failure.cause in (FailureCause.FIRST_TOKEN_TIMEOUT, FailureCause.HEAD_TIMEOUT):
                raise gateway_timeout("first token" if self._request.facts.stream else "answer")
            raise bad_gateway("The backends that were tried could not be reached or broke off.")
        self._exchange.outcome = Outcome.SHED if answer.status == 429 else Outcome.BACKEND_ERROR
        if self._welcome_again_at_s < math.inf:
            wait_s = max(0, math.ceil(self._welcome_again_at_s - self._clock()))
            headers = [(name, value) for name, value in answer.headers if name != b"retry-after"]
            answer = ErrorAnswer(answer.status, [*headers, (b"retry-after", b"%d" % wait_s)], answer.body)
        self._answer(answer)

    # --- one attempt ------------------------------------------------------------------------------------------------

    async def _send(self, live: LiveBackend) -> UpstreamResponse:
        timeouts, request = self._timeouts, self._request
        now = self._clock()
        head_s = timeouts.first_token_s if request.facts.stream else timeouts.total_s
        standing: HeaderTuple = STREAM_HEADERS if request.facts.stream else WHOLE_HEADERS
        if live.spec.api_key is not None:
            standing = (*standing, (b"authorization", b"Bearer " + live.spec.api_key.encode("ascii")))
        body = request.body_for(live.spec.served_model_name)
        started = self._clock()
        try:
            return await live.pool.post(
                request.endpoint.value.encode("ascii"),
                standing,
                ((b"x-request-id", request.request_id.encode("ascii")),),
                body,
                connect_timeout_s=timeouts.connect_s,
                head_deadline_s=min(now + head_s, self.deadline_s),
            )
        finally:
            self._exchange.waited_s += self._clock() - started

    async def _take(
        self, live: LiveBackend, response: UpstreamResponse, lease: Lease
    ) -> tuple[Failure | None, OutcomeKind]:
        exchange, status = self._exchange, response.status
        if not 200 <= status < 300:
            return await self._take_error(live, response)
        exchange.status = status
        edit = self._edit_for(live)
        timeouts, now = self._timeouts, self._clock()
        relay = Relay(
            response=response,
            client=self._client,
            lease=lease,
            deadlines=Deadlines(
                first_token_s=min(now + timeouts.first_token_s, self.deadline_s),
                total_s=self.deadline_s,
                inter_token_s=timeouts.inter_token_s,
            ),
            progress=exchange.progress,
            clock=self._clock,
            own_headers=self._own_headers,
            heartbeat_s=timeouts.heartbeat_s,
        )
        if is_event_stream(response):
            request = self._request
            ending = await relay.events(
                StreamReader(edit, hide_usage=not request.usage_asked, choices=request.choices)
            )
        else:
            ending = await relay.whole(edit, MAX_RESPONSE_BYTES)
        exchange.outcome = ENDINGS[ending]
        return None, ENDING_KINDS[ending]

    async def _take_error(
        self, live: LiveBackend, response: UpstreamResponse
    ) -> tuple[Failure | None, OutcomeKind]:
        body = await response.read_all(self._clock() + self._timeouts.inter_token_s, MAX_ERROR_BYTES)
        answer = self._error_answer_of(live, response, body)
        self._error_answer = answer
        status = response.status
        if answer is None or status in STATUSES or status >= 500:
            cause = STATUSES.get(status, FailureCause.STATUS_5XX_OTHER)
            kind = OutcomeKind.SERVER_ERROR
            if status == 429:
                kind = OutcomeKind.OVERLOADED
            elif status in (401, 501):  # an answer about the request or its key, not about the backend's health
                kind = OutcomeKind.CLIENT_ERROR
            failure = Failure(live.spec.name, cause, self._clock(), _retry_after_s(response))
            if failure.retry_after_s is not None:
                self._welcome_again_at_s = min(self._welcome_again_at_s, failure.at_s + failure.retry_after_s)
            return failure, kind
        self._exchange.outcome = Outcome.CLIENT_ERROR
        self._answer(answer)
        return None, OutcomeKind.CLIENT_ERROR

    def _error_answer_of(self, live: LiveBackend, response: UpstreamResponse, body: bytes) -> ErrorAnswer | None:
        status = response.status
        if status == 401 or not 400 <= status <= MAX_STATUS:
            return None  # our key, a redirect that is not followed, no status at all: not the client's business
        headers = relayed_headers(response)
        if response.header(b"content-encoding") is not None:
            return ErrorAnswer(status, headers, body)
        for secret in _secrets_of(live):
            body = body.replace(secret, b"[backend]")
        body = self._edit_for(live).apply_to_error(body)
        headers = [(name, value) for name, value in headers if name != b"content-type"]
        headers.append((b"content-type", b"application/json"))
        return ErrorAnswer(status, headers, in_openai_shape(status, body))

    def _answer(self, answer: ErrorAnswer) -> None:
        self._exchange.status = answer.status
        length = (b"content-length", b"%d" % len(answer.body))
        self._client.start(answer.status, [*answer.headers, length, *self._own_headers()])
        self._client.finish(answer.body)

    def _edit_for(self, live: LiveBackend) -> ModelNameEdit:
        return ModelNameEdit(live.spec.served_model_name, self._request.client_model)

    def _own_headers(self) -> Headers:
        exchange = self._exchange
        exchange.begin_answer(self._clock())
        decision = exchange.decision
        headers = [(b"x-request-id", exchange.request_id.encode("ascii"))]
        if decision is not None and decision.chosen is not None:
            headers.append((b"x-headrace-backend", decision.chosen.spec.name.encode("ascii")))
            headers.append((b"x-headrace-reason", decision.reason.encode("ascii", "replace")))
        headers.append((b"x-headrace-overhead-ms", b"%.2f" % ((exchange.overhead_s or 0.0) * 1e3)))
        return headers

    def _note_tried(self, failure: Failure | None, kind: OutcomeKind, began_at_s: float) -> None:
        exchange = self._exchange
        if exchange.decision is None:
            return
        cause = BROKEN_OFF.get(kind) if failure is None else failure.cause
        ended_at_s = self._clock()
        exchange.tried.append(Tried(exchange.decision, None if cause is None else cause.value, began_at_s, ended_at_s))

    def _learn(self, live: LiveBackend) -> None:
        exchange, request = self._exchange, self._request
        progress, usage = exchange.progress, exchange.progress.usage
        if progress.first_token_at_s is not None:
            live.observe_ttft(progress.first_token_at_s - exchange.received_at_s)
        if usage is not None and usage.prompt_tokens:
            self._fleet.observe_prompt(request.facts.model, request.prompt_bytes, usage.prompt_tokens)
        decision = exchange.decision
        if decision is not None and decision.chosen is not None:
            live.observe_pace(request.facts, decision.chosen, exchange.tpot_s(), progress.generated_tokens)


def _retry_after_s(response: UpstreamResponse) -> float | None:
    """Seconds by `Retry-After`, which is a number or a date (RFC 9110 §10.2.3)."""
    value = response.header(b"retry-after")
    if value is None:
        return None
    text = value.decode("latin-1").strip()
    try:
        return max(0.0, float(text)) if text.isdigit() else max(0.0, parsedate_to_datetime(text).timestamp() - time())
    except (ValueError, OverflowError, TypeError, IndexError):  # the parser's ways to say that it is no date
        return None


def in_openai_shape(status: int, body: bytes) -> bytes:
    """A backend's error as OpenAI's SDKs read it: unchanged where it has the shape, else its message in the shape.

    A page that is no JSON speaks to the client about a 4xx, which is the client's to mend; on a 5xx it is the inside
    of an engine (a traceback, a proxy's page with its host), and is not shown.
    """
    message = f"The backend answered {status}."
    try:
        document = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        if status < 500:
            message = body[:MAX_MESSAGE_BYTES].decode("utf-8", "replace").strip() or message
    else:
        error = bytes(document.get("error", b""))
        if error.startswith(b"{"):
            return body
        for raw in (error, *(bytes(document.get(name, b"")) for name in ("message", "detail"))):
            if raw and raw != b"null":
                try:
                    message = str(msgspec.json.decode(raw))[:MAX_MESSAGE_BYTES]
                except RecursionError:
                    continue
                break
    error_type = ERROR_TYPES.get(status, "upstream_error" if status >= 500 else "invalid_request_error")
    return msgspec.json.encode(
        {"error": {"message": message, "type": error_type, "param": None, "code": f"upstream_{status}"}}
    )


def _secrets_of(live: LiveBackend) -> list[bytes]:
    """What an engine may quote in an error and no client should learn: the gateway's key there, and the address."""
    secrets = [urlsplit(live.spec.url).netloc]
    if live.spec.api_key:
        secrets.append(live.spec.api_key)
    return [secret.encode() for secret in secrets]
