"""One inference request on one client connection: collects its body, runs it, writes its answer."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from router.dispatch import Dispatcher
from router.errors import ApiError, body_too_large, no_backend
from router.exchange import Exchange
from router.intake import Endpoint, request_id_of
from router.relay import Pausable

log = logging.getLogger("headrace.hotpath")
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


class InferenceCall:
    """A request from its head to the end of its answer. Also the `relay.Client` that the answer is written to."""

    __slots__ = (
        "_body", "_chunked", "_dispatcher", "_gone", "_head", "_owner", "_paused", "_source", "_stall_timer", "_task",
        "body_bytes", "ended", "exchange", "headers", "keep_alive", "refusal", "started",
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
        self._task: asyncio.Task[None] | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._source: Pausable | None = None
        self._paused = False
        self._gone = False
        self.body_bytes = 0
        self.headers = headers
        self.keep_alive = keep_alive
        self.started = False
        self.ended = False
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
        self._task = self._owner.loop.create_task(self._serve())

    def refuse(self, error: ApiError) -> None:
        """Answer with an error and be done."""
        self.exchange.refused(error)
        self._answer(error)
        self._dispatcher.end(self.exchange)

    def client_gone(self) -> None:
        """The connection is lost."""
        if self.ended:
            return
        self.ended = self._gone = True
        if self._task is not None:
            self._task.cancel()
        else:  # its body had not come whole
            self.exchange.client_gone()
            self._dispatcher.end(self.exchange)

    @property
    def task(self) -> asyncio.Task[None] | None:
        return self._task

    def _admit(self, authorization: bytes | None) -> None:
        try:
            self._dispatcher.admit(self.exchange, authorization)
            declared = self.headers.get(b"content-length", b"0")
            if int(declared) > self._dispatcher.max_body_bytes:
                raise body_too_large(self._dispatcher.max_body_bytes)
        except ApiError as error:
            self.refusal = error

    async def _serve(self) -> None:
        exchange, dispatcher = self.exchange, self._dispatcher
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body = []
        try:
            request = dispatcher.read(exchange, self.headers, body)
            await dispatcher.run(exchange, request, self)
        except ApiError as error:
            exchange.refused(error)
            self._answer(error)
        except asyncio.CancelledError:
            self._cut_off()
        except Exception:
            log.exception("request %s failed in the gateway", exchange.request_id)
            exchange.status = exchange.status or 500
            if self.started:
                self.abort()
            else:
                self._answer(ApiError(500, "internal_error", "The gateway failed."))
        finally:
            if self._stall_timer is not None:
                self._stall_timer.cancel()
            dispatcher.end(exchange)

    def _cut_off(self) -> None:
        """Cancelled: by the client's leaving, or by the end of the drain time."""
        if self._gone:
            self.exchange.client_gone()
        elif self.ended:
            return
        elif self.started:
            self.exchange.cut_off()
            if self._chunked:  # a stream of events; whole answers come with their length
                self.write(STOPPING_EVENT)
            self.abort()
        else:
            error = no_backend("The gateway is stopping. Try again shortly.", 1.0)
            self.exchange.refused(error)
            self._answer(error)

    # --- the answer: relay.Client -----------------------------------------------------------------------------------

    def start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Take the head; it is written with the first piece of the body."""
        self.started = True
        parts = [STATUS_LINE[status], self._owner.standing_headers]
        sized = False
        for name, value in headers:
            if name == b"connection":
                self.keep_alive = False  # the only thing an answer says there
                continue
            sized = sized or name == b"content-length"
            parts += (name, b": ", value, b"\r\n")
        if sized:
            self._chunked = False
        elif self._chunked:
            parts.append(b"transfer-encoding: chunked\r\n")
        else:  # HTTP/1.0 knows no chunks: the end of the connection ends the body
            self.keep_alive = False
        parts.append(b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n")
        self._head = b"".join(parts)

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
        request_id = self.exchange.request_id.encode("ascii")
        length = (b"content-length", b"%d" % len(body))
        self.start(error.status, [*error.response_headers(), length, (b"x-request-id", request_id)])
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
