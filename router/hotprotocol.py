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
"""How long a connection that is being refused is still read from. Closing at once would make the kernel send a reset,
and the client might lose the answer that says why (RFC 9112 §9.6)."""

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
        self._head_bytes = 0
        self._message_began_at_s = 0.0
        self._received_bytes = 0
        self._receive_timer: asyncio.TimerHandle | None = None

    # --- asyncio.Protocol -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
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
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except Exception as error:
            self._on_parse_error(error)
            return
        self._received_bytes += len(data)
        if self._in_message and self._receive_timer is None and not self._deaf:
            # Most requests come whole; only one that does not needs to be watched.
            self._message_began_at_s = self.loop.time()
            self._receive_timer = self.loop.call_later(self.limits.head_s, self._check_receiving)
        call = self._call
        if call is not None and call.refusal is not None and self._in_message and not self._deaf:
            self._refuse(call.refusal)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._receive_timer is not None:
            self._receive_timer.cancel()
            self._receive_timer = None
        call, self._call = self._call, None
        super().connection_lost(exc)
        if call is not None:
            call.client_gone()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._call is not None:
            self._call.pause()

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
        if self._call is not None or (self.cycle is not None and not self.cycle.response_complete):
            self._deafen()
            raise PipelinedError
        self._in_message = True
        self._head_complete = False
        self._head_bytes = 0
        self._received_bytes = 0
        self.url = b""
        self.expect_100_continue = False
        self.headers = []

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
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
        if self.expect_100_continue and self._call.refusal is None:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        if self._call is not None:
            self._call.receive(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
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
        if self._in_message:  # refused before its body had come whole
            self._deafen()
            self.loop.call_later(LINGER_S, self.transport.close)
        elif not call.keep_alive or self._deaf:
            self.server_state.total_requests += 1
            self.transport.close()
        else:
            self.on_response_complete()

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
        if isinstance(error, httptools.HttpParserError):
            self.send_400_response("Invalid HTTP request received.")
        elif isinstance(error, httptools.HttpParserUpgrade):
            self.send_400_response("This server upgrades to nothing.")
        else:
            raise error

    def _refuse(self, error: ApiError) -> None:
        """Answer a message that is not read on, and close behind the answer."""
        call = self._call
        if call is not None:
            call.keep_alive = False
            call.refuse(error)
            return
        self._deafen()
        body = error.body()
        head = [STATUS_LINE[error.status], self.standing_headers]
        headers = [*error.response_headers(), (b"content-length", b"%d" % len(body)), (b"connection", b"close")]
        head += [b"%b: %b\r\n" % header for header in dict(headers).items()]
        self.transport.write(b"".join(head) + b"\r\n" + body)
        self.loop.call_later(LINGER_S, self.transport.close)

    def _deafen(self) -> None:
        self._deaf = True
        if self._call is not None:
            self._call.keep_alive = False
        elif self.cycle is not None:
            self.cycle.keep_alive = False
        if self._receive_timer is not None:
            self._receive_timer.cancel()
            self._receive_timer = None

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
        elif self._received_bytes == 0:  # a connection that never asked anything
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
    attributes = {"dispatcher": dispatcher, "limits": limits or WireLimits()}
    return type("GatewayProtocol", (HotProtocol,), attributes)


class RefusedError(Exception):
    """Raised in a parser callback: the message is not read on."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.message)
        self.error = error


class PipelinedError(Exception):
    """Raised in a parser callback: a further message began before the answer had ended."""
