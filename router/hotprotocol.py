"""uvicorn's HTTP/1.1 protocol, which keeps the inference requests to itself and hands everything else up to Starlette.

An inference request never meets ASGI: the parser's callbacks collect its body, one task serves it, and the answer is
written straight to the transport. The connection itself tells when the client has gone (`connection_lost`) and when it
reads too slowly (`pause_writing`), so nothing has to watch for either.

One request at a time: where bytes of a further request come before the answer has ended, the connection closes behind
that answer. No OpenAI client pipelines, and a queue of none cannot be overrun.
"""

import asyncio
import logging
from typing import Any, ClassVar

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from router.call import InferenceCall
from router.dispatch import Dispatcher
from router.errors import ApiError, bad_request, headers_too_large, no_backend, request_timeout
from router.intake import Endpoint
from router.keys import sole_authorization
from router.wire import WireLimits, refuse_head

log = logging.getLogger("headrace.hotpath")
ENDPOINTS = {endpoint.value.encode("ascii"): endpoint for endpoint in Endpoint}
LINGER_S = 1.0
"""How long a connection that is being closed is still read from. Closing at once would make the kernel answer what is
still on its way with a reset, and the client might lose the answer that it has not read yet (RFC 9112 §9.6)."""

TOLD_SHARE = 1.25
"""Past so many times the connections that are allowed, further ones are closed without a word."""
FRAMING = (b"content-length", b"transfer-encoding")
LINGER_BYTES = 1024 * 1024


class HotProtocol(HttpToolsProtocol):
    """One client connection."""

    dispatcher: ClassVar[Dispatcher]
    limits: ClassVar[WireLimits] = WireLimits()
    standing: ClassVar[tuple[list[tuple[bytes, bytes]], bytes]] = ([], b"")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._call: InferenceCall | None = None
        self._deaf = False
        """Nothing that comes in is looked at any more; the connection closes with the answer under way."""
        self._ignored_bytes = 0
        self._in_message = False
        self._head_complete = False
        self._telling_framing = False
        self._head_bytes = 0
        self._message_began_at_s = 0.0
        self._received_bytes = 0
        self._body_bytes = 0
        self._receive_timer: asyncio.TimerHandle | None = None
        self._linger_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None

    # --- asyncio.Protocol -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            if len(self.connections) > self.limits.max_connections * TOLD_SHARE:
                transport.abort()  # to tell takes a moment, and the file that the next one needs
            else:
                self._refuse(no_backend("The gateway has as many connections as it may. Try again shortly.", 1.0))
            return
        self._message_began_at_s = self.loop.time()
        self._receive_timer = self.loop.call_later(self.limits.head_s, self._check_receiving)

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            self._ignored_bytes += len(data)
            if self._ignored_bytes > LINGER_BYTES:
                self.transport.abort()
            return
        try:
            self._feed(data)
        except Exception as error:
            self._on_parse_error(error)
            return
        self._received_bytes += len(data)
        if self._in_message and not self._deaf:  # most requests come whole; only one that does not needs watching
            self._watch_message()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._receive_timer, self._linger_timer, self._unread_timer):
            if timer is not None:
                timer.cancel()
        self._receive_timer = self._linger_timer = self._unread_timer = None
        call, self._call = self._call, None
        super().connection_lost(exc)
        if call is not None:
            call.client_gone()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._call is not None:
            self._call.pause()
        else:
            self._watch_unread()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._call is not None:
            self._call.resume()

    def shutdown(self) -> None:
        """The server stops: end now where nothing is under way, else with the answer."""
        if self._call is not None:
            self._call.keep_alive = False
        else:
            super().shutdown()

    # --- httptools --------------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._telling_framing:
            return
        if self._deaf or self._call is not None or (self.cycle is not None and not self.cycle.response_complete):
            self._deafen()
            raise PipelinedError
        self._unset_keepalive_if_required()  # and not sooner: a blank line is no request
        self._in_message = True
        self._head_complete = False
        self._head_bytes = 0
        self._received_bytes = 0
        self._body_bytes = 0
        self.url = b""
        self.expect_100_continue = False
        self.headers = []

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        if not self._telling_framing:
            self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value))
        if not self._head_complete:  # trailers are counted, and mean nothing here
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._telling_framing:
            self._telling_framing = False
            return
        http_version = self.parser.get_http_version()
        error = refuse_head(http_version, self.url, self.headers)
        if error is not None:
            raise RefusedError(error)
        self._head_complete = True
        endpoint = ENDPOINTS.get(self.url.partition(b"?")[0])
        if endpoint is None or self.parser.get_method() != b"POST":
            self._hand_up()
            return
        self._call = InferenceCall(
            self,
            self.dispatcher,
            endpoint,
            dict(self.headers),
            sole_authorization(self.headers),
            keep_alive=http_version != "1.0" and self.parser.should_keep_alive(),
            chunked=http_version != "1.0",
        )
        if self.expect_100_continue and self._call.refusal is None and http_version != "1.0":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self._call is not None:
            self._call.receive(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade() and any(name in FRAMING for name, _ in self.headers):
            return  # its body follows
        self._in_message = False
        if self._receive_timer is not None:
            self._receive_timer.cancel()
            self._receive_timer = None
        call = self._call
        if call is None:
            super().on_message_complete()
            return
        call.received()
        if call.task is not None:
            # Where the server looks for what it has to wait for at its end.
            self.tasks.add(call.task)
            call.task.add_done_callback(self.tasks.discard)

    # --- call.Owner -------------------------------------------------------------------------------------------------

    @property
    def standing_headers(self) -> bytes:
        """The server's own header lines, `date` above all; uvicorn makes a new list of them each second."""
        cls, headers = type(self), self.server_state.default_headers
        if cls.standing[0] is not headers:
            cls.standing = (headers, b"".join([b"%b: %b\r\n" % header for header in headers]))
        return cls.standing[1]

    def answered(self, call: InferenceCall) -> None:
        if self._call is not call:
            return
        self._call = None
        if self.transport.get_write_buffer_size():
            self._watch_unread()
        if self._in_message or not call.keep_alive or self._deaf:  # in a message: refused before it had come whole
            self.server_state.total_requests += 1
            self._close_behind()
        else:
            self.on_response_complete()

    def timeout_keep_alive_handler(self) -> None:
        """The client has been idle for long. What it has not read by now it will not read."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

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
        call, cycle = self._call, self.cycle
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
        elif self.cycle is not None:
            self.cycle.keep_alive = False
        if self._receive_timer is not None:
            self._receive_timer.cancel()
            self._receive_timer = None

    # --- receiving --------------------------------------------------------------------------------------------------

    def _feed(self, data: bytes) -> None:
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                # An offer may be ignored (RFC 9110 §7.8); Java's and curl's clients make it with each request over TCP.
                data = data[offer.args[0] :]
                self._parse_on()

    def _parse_on(self) -> None:
        """Go on behind a head that offered to switch protocols: the parser stopped there, and took the body for ours.

        A new parser is told how the body is framed, and nothing else of that head.
        """
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        if self._in_message:
            self._telling_framing = True
            framing = [b"%b: %b\r\n" % header for header in self.headers if header[0] in FRAMING]
            self.parser.feed_data(b"POST / HTTP/1.1\r\n" + b"".join(framing) + b"\r\n")

    def _watch_message(self) -> None:
        """A message has not come whole with the last read: hold it to its bounds of size and time."""
        error = self._call.refusal if self._call is not None else None
        if error is None:
            error = self.limits.refuse_growth(
                head_complete=self._head_complete, received_bytes=self._received_bytes, body_bytes=self._body_bytes
            )
        if error is not None:
            self._refuse(error)
        elif self._receive_timer is None:
            self._message_began_at_s = self.loop.time()
            self._receive_timer = self.loop.call_later(self.limits.head_s, self._check_receiving)

    def _count_head(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > self.limits.max_head_bytes or len(self.headers) >= self.limits.max_headers:
            raise RefusedError(headers_too_large(self.limits.max_head_bytes, self.limits.max_headers))

    def _check_receiving(self) -> None:
        """A message takes long to come: look whether it still comes."""
        self._receive_timer = None
        if self._deaf or self.transport.is_closing():
            return
        deadline_s = self.limits.receive_deadline_s(
            self._message_began_at_s, head_complete=self._head_complete, received_bytes=self._received_bytes
        )
        if self.loop.time() < deadline_s:
            self._receive_timer = self.loop.call_at(deadline_s, self._check_receiving)
        elif self._in_message:
            self._refuse(request_timeout())
        else:  # a connection that has asked nothing yet
            self.transport.close()

    def _hand_up(self) -> None:
        """Give the head to uvicorn's own handling, as if it had seen it all along."""
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.expect_100_continue = url, expects
        self.headers.extend(headers)
        super().on_headers_complete()


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
