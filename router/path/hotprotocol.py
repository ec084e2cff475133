"""A client's HTTP/1.1 connection: keeps the inference requests to itself, and gives all others to uvicorn's protocol.

An inference request never meets ASGI: the parser's callbacks collect its body and serve it, and the answer is written
straight to the transport. The connection itself tells when the client has gone (`connection_lost`) and when it reads
too slowly (`pause_writing`), so nothing has to watch for either.

One request at a time: where bytes of a further request come before the answer has ended, the connection closes behind
that answer. No OpenAI client pipelines, and a queue of none cannot be overrun.
"""

import asyncio
import contextlib
import logging
from typing import Any, ClassVar

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from router.keys.ring import sole_authorization
from router.path.call import InferenceCall
from router.path.dispatch import Dispatcher
from router.request.intake import Endpoint
from router.wire.errors import ApiError, bad_request, headers_too_large, no_backend, request_timeout
from router.wire.head import WireLimits, refuse_head

log = logging.getLogger("headrace.hotpath")
ENDPOINTS = {endpoint.value.encode("ascii"): endpoint for endpoint in Endpoint}
LINGER_S = 1.0
"""How long a connection that is being closed is still read from. Closing at once would make the kernel answer what is
still on its way with a reset, and the client might lose the answer that it has not read yet (RFC 9112 §9.6)."""

TOLD_SHARE = 1.25
"""Past so many times the connections that are allowed, further ones are closed without a word."""
FRAMING = (b"content-length", b"transfer-encoding")
LINGER_BYTES = 1024 * 1024


class HotProtocol(asyncio.Protocol):
    """One client connection. uvicorn makes its instances, counts them, and tells them to shut down."""

    __slots__ = (
        "_asked", "_body_bytes", "_call", "_config", "_deaf", "_expects_continue", "_head_bytes", "_head_complete",
        "_headers", "_idle_since_s", "_ignored_bytes", "_in_message", "_linger_timer", "_message_began_at_s", "_parser",
        "_plain", "_received_bytes", "_server_state", "_telling_framing", "_timer", "_timer_at_s", "_unread_timer",
        "_url", "loop", "transport",
    )  # fmt: skip
    dispatcher: ClassVar[Dispatcher]
    limits: ClassVar[WireLimits] = WireLimits()
    standing: ClassVar[tuple[list[tuple[bytes, bytes]], bytes]] = ([], b"")
    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.loop = _loop or asyncio.get_running_loop()
        self._config = config
        self._server_state = server_state
        self._plain: PlainRequests | None = None
        """Made with the first request that is not an inference request."""
        self._parser: httptools.HttpRequestParser | None = None
        """Made when there is something to parse: a thousand open streams need none."""
        self._call: InferenceCall | None = None
        self._deaf = False
        """Nothing that comes in is looked at any more; the connection closes with the answer under way."""
        self._asked = False
        """A request has begun to come."""
        self._in_message = self._head_complete = self._telling_framing = self._expects_continue = False
        self._ignored_bytes = self._head_bytes = self._received_bytes = self._body_bytes = 0
        self._message_began_at_s = self._idle_since_s = 0.0
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._timer: asyncio.TimerHandle | None = None
        """Looks after a message that comes slowly, and an idle connection. Armed for the earliest moment at which there
        may be something to do; it then sees for itself, so that a request need not move it."""
        self._timer_at_s = 0.0
        self._linger_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None

    # --- asyncio.Protocol -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        connections = self._server_state.connections
        connections.add(self)  # type: ignore[arg-type]  # uvicorn names its own classes
        if len(connections) > self.limits.max_connections:
            if len(connections) > self.limits.max_connections * TOLD_SHARE:
                transport.abort()  # to tell takes a moment, and the file that the next one needs
            else:
                self._refuse(no_backend("The gateway has as many connections as it may. Try again shortly.", 1.0))
            return
        self._message_began_at_s = self._idle_since_s = self.loop.time()
        self._look_at(self._idle_since_s + self.limits.head_s)

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            self._ignored_bytes += len(data)
            if self._ignored_bytes > LINGER_BYTES:
                self.transport.abort()
            return
        parser = self._parser
        if parser is None:
            if self._call is not None:
                if data.strip(b"\r\n"):  # blank lines are no request
                    self._deafen()
                return
            parser = self._parser = _request_parser(self)
        try:
            parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            if not self._parse_behind(data, offer):
                return
        except Exception as error:
            self._on_parse_error(error)
            return
        if self._in_message:  # most requests come whole; only one that does not needs watching
            self._received_bytes += len(data)
            if not self._deaf:
                self._watch_message()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._timer, self._linger_timer, self._unread_timer):
            if timer is not None:
                timer.cancel()
        self._timer = self._linger_timer = self._unread_timer = None
        self._server_state.connections.discard(self)
        call, self._call = self._call, None
        plain, self._plain = self._plain, None
        self._parser = None  # it holds the connection by its callbacks
        if plain is not None:
            plain.connection_lost(exc)
        elif exc is None:
            self.transport.close()
        if call is not None:
            call.client_gone()

    def pause_writing(self) -> None:
        if self._call is not None:
            self._call.pause()
            return
        if self._plain is not None:
            self._plain.pause_writing()
        self._watch_unread()

    def resume_writing(self) -> None:
        if self._plain is not None:
            self._plain.resume_writing()
        if self._call is not None:
            self._call.resume()

    def shutdown(self) -> None:
        """The server stops: end now where nothing is under way, else with the answer."""
        if self._call is not None:
            self._call.keep_alive = False
        elif self._plain is not None:
            self._plain.shutdown()
        else:
            self.transport.close()

    # --- httptools --------------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._telling_framing:
            return
        if self._deaf or self._busy:
            self._deafen()
            raise PipelinedError
        if self._asked:  # the first one's time began with the connection
            self._message_began_at_s = self.loop.time()
        self._asked = self._in_message = True
        self._head_complete = self._expects_continue = False
        self._head_bytes = self._received_bytes = self._body_bytes = 0
        self._url = b""
        self._headers = []

    def on_url(self, url: bytes) -> None:
        self._head_bytes += len(url)
        if self._head_bytes > self.limits.max_head_bytes:
            raise self._head_too_large()
        if not self._telling_framing:
            self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > self.limits.max_head_bytes or len(self._headers) >= self.limits.max_headers:
            raise self._head_too_large()
        if self._head_complete:  # trailers are counted, and mean nothing here
            return
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self._expects_continue = True
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self._telling_framing:
            self._telling_framing = False
            return
        parser, given = self._parser, self._headers
        assert parser is not None
        http_version = parser.get_http_version()
        error = refuse_head(http_version, self._url, given)
        if error is not None:
            raise RefusedError(error)
        self._head_complete = True
        endpoint = ENDPOINTS.get(self._url) or ENDPOINTS.get(self._url.partition(b"?")[0])
        if endpoint is None or parser.get_method() != b"POST":
            self._hand_up()
            return
        chunked = http_version != "1.0"
        headers = dict(given)
        self._call = InferenceCall(
            self,
            self.dispatcher,
            endpoint,
            headers,
            headers.get(b"authorization") if len(headers) == len(given) else sole_authorization(given),
            keep_alive=chunked and parser.should_keep_alive(),
            chunked=chunked,
        )
        if self._expects_continue and self._call.refusal is None and chunked:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self._call is not None:
            self._call.receive(body)
        elif self._plain is not None:
            self._plain.on_body(body)

    def on_message_complete(self) -> None:
        if self._upgrade_offered() and any(name in FRAMING for name, _ in self._headers):
            return  # its body follows
        self._in_message = False
        self._headers = []
        call = self._call
        if call is not None:
            # Where the server looks for what it has to wait for at its end.
            self._server_state.tasks.add(call)  # type: ignore[arg-type]
            call.received()
        elif self._plain is not None:
            self._plain.on_message_complete()

    # --- call.Owner -------------------------------------------------------------------------------------------------

    @property
    def standing_headers(self) -> bytes:
        """The server's own header lines, `date` above all; uvicorn makes a new list of them each second."""
        cls, headers = type(self), self._server_state.default_headers
        if cls.standing[0] is not headers:
            cls.standing = (headers, b"".join([b"%b: %b\r\n" % header for header in headers]))
        return cls.standing[1]

    def answered(self, call: InferenceCall) -> None:
        if self._call is not call:
            return
        self._call = None
        self._server_state.total_requests += 1
        if self.transport.get_write_buffer_size():
            self._watch_unread()
        if self._in_message or not call.keep_alive or self._deaf:  # in a message: refused before it had come whole
            self._close_behind()
        else:
            self.idle()

    def settle_in(self) -> None:
        """A stream is on its way. Until its end nothing is parsed, and the connection's own time does not run."""
        self._parser = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def served(self, call: InferenceCall) -> None:
        self._server_state.tasks.discard(call)

    def idle(self) -> None:
        """An answer has ended, and the connection waits for its next request."""
        self._idle_since_s = self.loop.time()
        self._look_at(self._idle_since_s + self._config.timeout_keep_alive)

    # --- refusing ---------------------------------------------------------------------------------------------------

    def send_400_response(self, msg: str) -> None:
        self._refuse(bad_request(msg, code="invalid_http"))

    def _on_parse_error(self, error: Exception) -> None:
        cause: BaseException | None = error
        while cause is not None:  # httptools wraps what a callback raises
            if isinstance(cause, RefusedError):
                self._refuse(cause.error)
                return
            if isinstance(cause, PipelinedError):
                return
            cause = cause.__cause__ or cause.__context__
        if not isinstance(error, httptools.HttpParserError):
            raise error
        self.send_400_response("Invalid HTTP request received.")

    def _refuse(self, error: ApiError) -> None:
        """Answer a message that is not read on, and close behind the answer. No message is answered twice."""
        call, cycle = self._call, None if self._plain is None else self._plain.cycle
        if call is not None:
            self._deafen()
            if self._in_message:  # else it is being served, and what is wrong came behind it
                call.refuse(error)
            return
        if cycle is not None and not cycle.response_complete:
            if cycle.response_started:
                self._deafen()
                return
            cycle.disconnected = True
            cycle.message_event.set()
        elif self._in_message and self._head_complete:  # a cold path, answered before its body had come
            self._close_behind()
            return
        body = error.body()
        head = [STATUS_LINE[error.status], self.standing_headers]
        headers = [*error.response_headers(), (b"content-length", b"%d" % len(body)), (b"connection", b"close")]
        head += [b"%b: %b\r\n" % header for header in dict(headers).items()]
        self.transport.write(b"".join(head) + b"\r\n" + body)
        self._close_behind()

    # --- closing ----------------------------------------------------------------------------------------------------

    def _close_behind(self) -> None:
        """Say that nothing more comes, and close when the client does, or a moment later."""
        self._deafen()
        if self.transport.is_closing() or self._linger_timer is not None:
            return
        if self.transport.can_write_eof():
            with contextlib.suppress(OSError):  # it was reset in this very moment: `connection_lost` is on its way
                self.transport.write_eof()
        self._linger_timer = self.loop.call_later(LINGER_S, self._end_lingering)

    def _end_lingering(self) -> None:
        if self.transport.get_write_buffer_size():
            self._watch_unread()
        self.transport.close()  # once the rest has gone out

    def _watch_unread(self) -> None:
        """Bytes wait for a client that does not take them, and nothing else watches over them."""
        if self._unread_timer is None:
            size = self.transport.get_write_buffer_size()
            self._unread_timer = self.loop.call_later(self.limits.unread_s, self._check_unread, size)

    def _check_unread(self, before_bytes: int) -> None:
        self._unread_timer = None
        size = self.transport.get_write_buffer_size()
        if size >= before_bytes and self._call is None:
            self.transport.abort()
        elif size:
            self._watch_unread()

    def _deafen(self) -> None:
        self._deaf = True
        if self._call is not None:
            self._call.keep_alive = False
        elif self._plain is not None and self._plain.cycle is not None:
            self._plain.cycle.keep_alive = False

    def _upgrade_offered(self) -> bool:
        return self._parser is not None and self._parser.should_upgrade()

    @property
    def _busy(self) -> bool:
        """A request is being answered."""
        return self._call is not None or (self._plain is not None and self._plain.busy)

    # --- receiving --------------------------------------------------------------------------------------------------

    def _parse_behind(self, data: bytes, offer: BaseException) -> bool:
        """Go on behind a head that offered to switch protocols; false where what follows is refused.

        An offer may be ignored (RFC 9110 §7.8); Java's and curl's clients make it with each request over TCP. The
        parser stopped there, and took the body for ours: a new one is told how the body is framed, and nothing else of
        that head.
        """
        try:
            while True:
                data = data[offer.args[0] :]
                parser = self._parser = _request_parser(self)
                if self._in_message:
                    self._telling_framing = True
                    framing = [b"%b: %b\r\n" % header for header in self._headers if header[0] in FRAMING]
                    parser.feed_data(b"POST / HTTP/1.1\r\n" + b"".join(framing) + b"\r\n")
                try:
                    if data:
                        parser.feed_data(data)
                    return True
                except httptools.HttpParserUpgrade as another:
                    offer = another
        except Exception as error:
            self._on_parse_error(error)
            return False

    def _watch_message(self) -> None:
        """A message has not come whole with the last read: hold it to its bounds of size and time."""
        error = self._call.refusal if self._call is not None else None
        if error is None:
            error = self.limits.refuse_growth(
                head_complete=self._head_complete, received_bytes=self._received_bytes, body_bytes=self._body_bytes
            )
        if error is not None:
            self._refuse(error)
        else:
            self._look_at(self._receive_deadline_s)

    @property
    def _receive_deadline_s(self) -> float:
        return self.limits.receive_deadline_s(
            self._message_began_at_s, head_complete=self._head_complete, received_bytes=self._received_bytes
        )

    def _look_at(self, when_s: float) -> None:
        """See to it that `_look` runs by then."""
        if self._timer is None or when_s < self._timer_at_s:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_at_s = when_s
            self._timer = self.loop.call_at(when_s, self._look)

    def _look(self) -> None:
        """Time has passed: whether something should have come by now."""
        self._timer = None
        if self._deaf or self.transport.is_closing():
            return
        if self._in_message:
            deadline_s = self._receive_deadline_s
        elif self._busy:
            return  # the answer's end looks again
        else:
            waits_s = self._config.timeout_keep_alive if self._asked else self.limits.head_s
            deadline_s = self._idle_since_s + waits_s
        if self.loop.time() < deadline_s:
            self._look_at(deadline_s)
        elif self._in_message:
            self._refuse(request_timeout())
        elif self.transport.get_write_buffer_size():  # what the client has not read by now it will not read
            self.transport.abort()
        else:
            self.transport.close()

    def _head_too_large(self) -> "RefusedError":
        return RefusedError(headers_too_large(self.limits.max_head_bytes, self.limits.max_headers))

    def _hand_up(self) -> None:
        """Give the head to uvicorn's own handling, as if it had seen it all along."""
        plain = self._plain
        if plain is None:
            plain = self._plain = PlainRequests(self, self._config, self._server_state)
            plain.connection_made(self.transport)
        assert self._parser is not None
        plain.parser = self._parser
        plain.on_message_begin()
        plain.url, plain.expect_100_continue = self._url, self._expects_continue
        plain.headers.extend(self._headers)
        plain.on_headers_complete()


class PlainRequests(HttpToolsProtocol):
    """uvicorn's handling of the other requests of one connection, whose bytes and time belong to its `HotProtocol`."""

    def __init__(self, connection: HotProtocol, config: uvicorn.Config, server_state: ServerState) -> None:
        super().__init__(config, server_state, {}, connection.loop)
        self._connection = connection
        self.connections = set()  # the connection is counted once

    @property
    def busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if not self.transport.is_closing():
            self.flow.resume_reading()
            self._connection.idle()


def _request_parser(protocol: HotProtocol) -> httptools.HttpRequestParser:
    parser = httptools.HttpRequestParser(protocol)
    # What may follow a request that closes the connection is not answered, and no reason not to answer that request.
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser


def protocol_for(dispatcher: Dispatcher, limits: WireLimits | None = None) -> type[HotProtocol]:
    """The protocol of one gateway's clients: uvicorn makes its instances, and knows nothing of what they serve."""
    attributes = {"dispatcher": dispatcher, "limits": (limits or WireLimits()).within_open_files()}
    return type("GatewayProtocol", (HotProtocol,), attributes)


class RefusedError(Exception):
    """Raised in a parser callback: the message is not read on."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.message)
        self.error = error


class PipelinedError(Exception):
    """Raised in a parser callback: a further message began before the answer had ended."""
