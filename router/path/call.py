"""One inference request on one client connection: collects its body, runs it, writes its answer."""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Protocol

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from router.path.course import Course
from router.path.dispatch import Dispatcher
from router.path.relay import Pausable
from router.request.exchange import Exchange
from router.request.intake import Endpoint, InferenceRequest, request_id_of
from router.wire.errors import ApiError, body_too_large, no_backend

log = logging.getLogger("headrace.hotpath")
LARGE_BODY_BYTES = 1024 * 1024
STALL_GRACE_S = 1.0
"""Past its deadline an answer ends by itself, unless the client does not take it."""

STOPPING_EVENT = b"data: " + ApiError(503, "gateway_stopping", "The gateway stopped in mid answer.").body() + b"\n\n"


class Owner(Protocol):
    """The connection, as a call sees it."""

    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport

    @property
    def standing_headers(self) -> bytes:
        """Header lines that every answer carries, `date` above all."""

    def answered(self, call: "InferenceCall") -> None:
        """The last byte of the answer is written."""

    def settle_in(self) -> None:
        """It will be a while until the next request."""

    def served(self, call: "InferenceCall") -> None:
        """Nothing more is done for the request: its backend has ended as well."""


class InferenceCall:
    """A request from its head to the end of its answer. Also the `relay.Client` that the answer is written to."""

    __slots__ = (
        "_body", "_chunked", "_course", "_dispatcher", "_head", "_over", "_owner", "_paused", "_source",
        "_stall_timer", "body_bytes", "ended", "exchange", "headers", "keep_alive", "refusal", "started",
    )  # fmt: skip

    def __init__(
        self,
        owner: Owner,
        dispatcher: Dispatcher,
        endpoint: Endpoint,
        headers: dict[bytes, bytes],
        authorization: bytes | None,
        *,
        keep_alive: bool,
        chunked: bool,
    ) -> None:
        self._owner = owner
        self._dispatcher = dispatcher
        self._chunked = chunked
        self._body: list[bytes] = []
        self._head: bytes | None = None
        self._course: Course | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._source: Pausable | None = None
        self._paused = self._over = False
        self.body_bytes = 0
        self.headers = headers
        """Of the request; let go of with its body, once it is read."""
        self.keep_alive = keep_alive
        self.started = False
        self.ended = False
        """The client has its answer, or is gone."""
        self.refusal: ApiError | None = None
        """Why it is not served. Told as soon as the body has come, or at once where that may take long."""
        self.exchange: Exchange = dispatcher.begin(endpoint, request_id_of(headers))
        self._admit(authorization)

    # --- the request ------------------------------------------------------------------------------------------------

    def receive(self, data: bytes) -> None:
        """A piece of the body. Nothing is kept of one that is refused."""
        self.body_bytes += len(data)
        if self.refusal is not None:
            return
        if self.body_bytes > self._dispatcher.max_body_bytes:
            self._body.clear()
            self.refusal = body_too_large(self._dispatcher.max_body_bytes)
            return
        self._body.append(data)

    def received(self) -> None:
        """The body is whole: serve it."""
        if self.refusal is not None:
            self.refuse(self.refusal)
            return
        if self.body_bytes > LARGE_BODY_BYTES:
            self.exchange.received_at_s = self._dispatcher.clock()
            self._wait_a_turn(self._serve_in_turns)
            return
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body = []
        try:
            self._run(self._read(body))
        except ApiError as error:
            self.refuse(error)
        except Exception as error:
            self.crashed(error)

    def _serve_in_turns(self, body: bytes = b"", request: InferenceRequest | None = None) -> None:
        """The same for a body that takes tens of milliseconds: no two such steps share a turn of the loop, so that
        others get theirs in between. (A thread would not help: the parser keeps the interpreter to itself.)"""
        if self._over:
            return
        try:
            if request is not None:
                self._run(request)
            elif body:
                self._wait_a_turn(partial(self._serve_in_turns, b"", self._read(body)))
            else:
                body, self._body = b"".join(self._body), []
                self._wait_a_turn(partial(self._serve_in_turns, body))
        except ApiError as error:
            self.refuse(error)
        except Exception as error:
            self.crashed(error)

    def _wait_a_turn(self, go_on: Callable[[], None]) -> None:
        self._dispatcher.fleet.turns.wait(self._owner.loop, go_on)

    def _read(self, body: bytes) -> InferenceRequest:
        headers, self.headers = self.headers, {}
        return self._dispatcher.read(self.exchange, headers, body)

    def _run(self, request: InferenceRequest) -> None:
        self._course = self._dispatcher.run(self.exchange, request, self)

    def client_gone(self) -> None:
        """The connection is lost."""
        if self.ended:
            return
        self.ended = True
        self._leave_backend()
        self.exchange.client_gone()
        self.over()

    def cancel(self, msg: str | None = None) -> None:
        """The drain time is over: end what is still under way, in the loop's next turn."""
        self._owner.loop.call_soon(self._cut_off)

    def _admit(self, authorization: bytes | None) -> None:
        try:
            self._dispatcher.admit(self.exchange, self.headers, authorization)
            declared = self.headers.get(b"content-length", b"0")
            if int(declared) > self._dispatcher.max_body_bytes:
                raise body_too_large(self._dispatcher.max_body_bytes)
        except ApiError as error:
            self.refusal = error

    def _cut_off(self) -> None:
        if self._over:
            return
        self._leave_backend()
        if self.ended:  # the client has all of it, only the backend's end was still to come
            self.over()
        elif self.started:
            self.exchange.cut_off()
            if self._chunked:  # a stream of events; whole answers come with their length
                self.write(STOPPING_EVENT)
            self.abort()
            self.over()
        else:
            self.refuse(no_backend("The gateway is stopping. Try again shortly.", 1.0))

    def _leave_backend(self) -> None:
        if self._course is not None:
            self._course.cancel()

    # --- attempt.Answered -------------------------------------------------------------------------------------------

    def settle_in(self) -> None:
        """The answer is a stream, and under way: hold no more than it needs."""
        if not self.ended:
            self._owner.settle_in()

    def refuse(self, error: ApiError) -> None:
        """Answer with an error and be done."""
        self.exchange.refused(error)
        self._answer(error)
        self.over()

    def over(self) -> None:
        """All that there was to do for the request is done."""
        if self._over:
            return
        self._over = True
        self._course = None
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None
        self._dispatcher.end(self.exchange)
        self._owner.served(self)

    def crashed(self, error: Exception) -> None:
        """Serving it has failed by the gateway's own fault."""
        exchange = self.exchange
        log.error("request %s failed in the gateway", exchange.request_id, exc_info=error)
        exchange.status = exchange.status or 500
        self._leave_backend()
        if self.started:
            self.abort()
        else:
            self._answer(ApiError(500, "internal_error", "The gateway failed."))
        self.over()

    # --- the answer: relay.Client -----------------------------------------------------------------------------------

    def start(self, status: int, lines: bytes, *, sized: bool) -> None:
        """Take the head; it is written with the first piece of the body."""
        self.started = True
        if sized:
            self._chunked = False
            framing = b""
        elif self._chunked:
            framing = b"transfer-encoding: chunked\r\n"
        else:  # HTTP/1.0 knows no chunks: the end of the connection ends the body
            self.keep_alive = False
            framing = b""
        end = b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n"
        self._head = b"".join((STATUS_LINE[status], self._owner.standing_headers, lines, framing, end))

    def write(self, data: bytes) -> None:
        """A piece of the body, not empty."""
        if self.ended:
            return
        head, self._head = self._head, None
        if self._chunked:
            piece = b"%x\r\n%b\r\n" % (len(data), data)
            self._owner.transport.write(piece if head is None else head + piece)
        else:
            self._owner.transport.write(data if head is None else head + data)

    def finish(self, data: bytes = b"") -> None:
        """The last piece; the connection is free for the next request."""
        if self.ended:
            return
        self.ended = True
        head, self._head = self._head or b"", None
        if self._chunked:
            data = b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data) if data else b"0\r\n\r\n"
        if head or data:
            self._owner.transport.write(head + data)
        self._owner.answered(self)

    def abort(self) -> None:
        """End the body without its terminator: what was written goes out, then the connection closes."""
        if self.ended:
            return
        self.ended = True
        if self._head is not None:
            self._owner.transport.write(self._head)
        self.keep_alive = False
        self._owner.answered(self)

    def _answer(self, error: ApiError) -> None:
        body = error.body()
        headers = [*error.response_headers(), (b"content-length", b"%d" % len(body)),
                   (b"x-request-id", self.exchange.request_id.encode("ascii"))]  # fmt: skip
        if (b"connection", b"close") in headers:
            headers.remove((b"connection", b"close"))
            self.keep_alive = False
        self.start(error.status, b"".join([b"%b: %b\r\n" % header for header in headers]), sized=True)
        self.finish(body)

    # --- backpressure -----------------------------------------------------------------------------------------------

    def feed_from(self, source: Pausable | None) -> None:
        """Say what is to wait while the client does not read."""
        self._source = source
        if source is not None and self._paused:
            source.pause()

    def pause(self) -> None:
        """The client's socket is full."""
        self._paused = True
        if self._source is not None:
            self._source.pause()
        if self._stall_timer is None:
            self._stall_timer = self._owner.loop.call_at(self.exchange.deadline_s + STALL_GRACE_S, self._stalled)

    def resume(self) -> None:
        """The client reads again."""
        self._paused = False
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None
        if self._source is not None:
            self._source.resume()

    def _stalled(self) -> None:
        # Past its deadline the answer has ended by itself, unless the client does not take it.
        self._owner.transport.abort()
