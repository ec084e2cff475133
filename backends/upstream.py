"""HTTP/1.1 to one backend: a keep-alive pool over `asyncio.Protocol` and httptools, made for relaying.

httpx serves everything that is not the hot path. Here it does not fit: httpcore 1.0.9 loses connection slots when
requests are cancelled (encode/httpcore#1093), and a router cancels whenever a client leaves. This pool has no slots to
lose: a connection is either idle in the pool or owned by exactly one response, and a response that is closed early
closes its socket, which is how every engine learns that nobody listens any more.

Everything happens in the socket's callbacks: an `UpstreamCall` is told of its head, its body piece by piece and its end
as they come, without a task or a future. Only a connection that has to be made first takes a task. A call that says so
stops the socket, so a slow client slows its engine down rather than filling the router's memory.
"""

import asyncio
import math
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import cast
from urllib.parse import urlsplit

import httptools

from backends.addresses import Addresses, Resolve, resolve
from backends.turns import BIG_READ_BYTES, Turns

MAX_HEAD_BYTES = 64 * 1024
Headers = list[tuple[bytes, bytes]]


class UpstreamFault(StrEnum):
    """What went wrong between the router and a backend, as far as HTTP can tell."""

    CONNECT = "connect"
    CONNECT_TIMEOUT = "connect_timeout"
    RESET = "reset"
    """The connection ended before the first response byte."""
    TRUNCATED = "truncated"
    """The connection ended inside the response."""
    TIMEOUT = "timeout"
    """The reader's deadline passed in silence."""
    PROTOCOL = "protocol"
    """The backend does not speak HTTP/1.1."""
    DECLARED_DOWN = "declared_down"
    """Health checks gave the backend up while the request waited for its first byte."""


class UpstreamError(Exception):
    """An exchange failed. `detail` is for logs; it never goes to a client, for it may name hosts."""

    def __init__(self, fault: UpstreamFault, detail: str) -> None:
        super().__init__(f"{fault}: {detail}")
        self.fault = fault
        self.detail = detail


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """How long connections live. Idle time stays below the 5 s after which uvicorn and llama.cpp close their side."""

    max_idle_connections: int = 64
    idle_expiry_s: float = 4.0
    max_age_s: float = 300.0
    """Also the bound on how long a changed DNS record stays unnoticed."""


class UpstreamCall:
    """One request to a backend, from the choice of a connection to the answer's end; a class for the asker to extend.

    The hooks (`on_…`) are called from the socket's callbacks. After `on_end`, `on_failure`, `on_crash` or `leave`, none
    is called any more and the call may post again.
    """

    __slots__ = (
        "_connect_timeout_s", "_connection", "_dialing", "_head_deadline_s", "_pool", "_unanswered", "header",
        "headers", "status",
    )  # fmt: skip

    def __init__(self) -> None:
        self._connection: Connection | None = None
        self._dialing: asyncio.Task[None] | None = None
        self._unanswered: bytes | None = None
        """Kept until the answer begins: it may have to be written once more."""
        self.status = 0
        """Of the answer; 0 before its head has come."""
        self.headers: Headers = []
        """Of the answer, names in lower case."""
        self.header: dict[bytes, bytes] = {}
        """The same by name: of several that share one, the first."""

    # --- hooks ------------------------------------------------------------------------------------------------------

    def on_head(self) -> None:
        """`status` and `headers` have come."""
        raise NotImplementedError

    def on_body(self, data: bytes) -> None:
        """A piece of the body, never empty."""
        raise NotImplementedError

    def on_end(self) -> None:
        """The answer is whole, and the connection back in its pool."""
        raise NotImplementedError

    def on_failure(self, error: UpstreamError) -> None:
        """The exchange broke off; what had come of the body before was handed on first."""
        raise NotImplementedError

    def on_crash(self, error: Exception) -> None:
        """One of the other hooks raised. Nothing is sent or received any more."""
        raise NotImplementedError

    # --- what the caller does ---------------------------------------------------------------------------------------

    def post(
        self, pool: "UpstreamPool", request: bytes, *, connect_timeout_s: float, head_deadline_s: float
    ) -> None:
        """Send a whole request (see `UpstreamPool.head`). Redirects are not followed. Calls no hook before it returns.

        A kept-alive connection that the backend closed in the moment of its reuse is replaced once by a fresh one:
        no response byte came, so nothing can have been answered twice.

        Args:
            head_deadline_s: loop time by which the answer's head must have come.
        """
        self.status = 0
        self._pool = pool
        self._unanswered = request
        self._connect_timeout_s = connect_timeout_s
        self._head_deadline_s = head_deadline_s
        connection = pool.take_idle()
        if connection is None:
            self._dialing = asyncio.get_running_loop().create_task(self._dial())
            return
        self._connection = connection
        connection.send(self, request, head_deadline_s)

    def leave(self) -> None:
        """Be done with the backend, in whatever state. An answer that is not whole ends with its socket, which is how
        every engine learns that nobody listens any more. Safe to call twice."""
        self._unanswered = None
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.leave()
        dialing, self._dialing = self._dialing, None
        if dialing is not None:
            dialing.cancel()

    def set_deadline(self, deadline_s: float) -> None:
        """Loop time until when silence of the backend is borne; past it the call fails with TIMEOUT."""
        if self._connection is not None:
            self._connection.set_deadline(deadline_s)

    def pause(self) -> None:
        """Read no more from the socket for now."""
        if self._connection is not None:
            self._connection.pause()

    def resume(self) -> None:
        """Read on."""
        if self._connection is not None:
            self._connection.resume()

    async def _dial(self) -> None:
        try:
            connection = await self._pool.connect(self._connect_timeout_s)
        except UpstreamError as error:
            self._dialing = None
            self._tell_failure(error)
            return
        self._dialing = None
        self._connection = connection
        assert self._unanswered is not None
        request, self._unanswered = self._unanswered, None  # a fresh connection that breaks off is not tried again
        connection.send(self, request, self._head_deadline_s)

    def _broke_off(self, error: UpstreamError) -> None:
        """The connection has failed this call."""
        self._connection = None
        if error.fault is UpstreamFault.RESET and self._unanswered is not None:
            self._dialing = asyncio.get_running_loop().create_task(self._dial())
        else:
            self._tell_failure(error)

    def _tell_failure(self, error: UpstreamError) -> None:
        self._unanswered = None
        try:
            self.on_failure(error)
        except Exception as crash:
            self.on_crash(crash)


class Connection(asyncio.Protocol):
    """One socket to a backend. Serves one call at a time."""

    __slots__ = (
        "_body", "_call", "_deadline", "_head_bytes", "_header", "_headers", "_loop", "_parser", "_pool",
        "_reading_paused", "_timer", "_timer_at_s", "_transport", "body_ends_at_eof", "complete", "created_at_s",
        "got_bytes", "head_complete", "idle_limit_s", "idle_since_s", "keep_alive", "lost", "status",
    )  # fmt: skip

    def __init__(self, loop: asyncio.AbstractEventLoop, pool: "UpstreamPool") -> None:
        self._loop = loop
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_s = math.inf
        self._deadline = math.inf
        self._reading_paused = False
        self._call: UpstreamCall | None = None
        self._body: list[bytes] = []
        self._head_bytes = 0
        self._headers: Headers = []
        self._header: dict[bytes, bytes] = {}
        self.status = 0
        self.created_at_s = loop.time()
        self.idle_since_s = 0.0
        self.idle_limit_s: float | None = None
        self.lost = False
        """It is closed, or about to be."""
        self.got_bytes = self.head_complete = self.complete = self.keep_alive = self.body_ends_at_eof = False

    # --- asyncio.Protocol -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transports do not inherit from asyncio's

    def data_received(self, data: bytes) -> None:
        call = self._call
        if call is None:  # bytes that nobody asked for: an idle connection must not carry them into the next exchange
            self.abort()
            return
        self.got_bytes = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._fail(UpstreamError(UpstreamFault.PROTOCOL, "the backend switched protocols"))
            return
        except httptools.HttpParserError as error:
            self.keep_alive = False  # what follows an answer is not part of it, and the connection not to be trusted
            self._deliver(call)
            if self._call is call:
                self._fail(UpstreamError(UpstreamFault.PROTOCOL, str(error.__context__ or error)))
            return
        self._deliver(call)
        if len(data) >= BIG_READ_BYTES:
            self._wait_a_turn()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self._parser = None  # type: ignore[assignment]  # it holds the connection by its callbacks
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        call = self._call
        if call is None:
            return
        if self.head_complete and self.body_ends_at_eof and exc is None:
            self.complete = True
            self._deliver(call)
            return
        fault = UpstreamFault.TRUNCATED if self.got_bytes else UpstreamFault.RESET
        self._fail(UpstreamError(fault, str(exc) if exc else "the backend closed the connection"))

    # --- httptools --------------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self.complete:
            raise ValueError("a second response to one request")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > MAX_HEAD_BYTES:
            raise ValueError(f"the response head is over {MAX_HEAD_BYTES} bytes")
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if self.status < 200:
            return
        self.head_complete = True
        headers = self._header = dict(reversed(self._headers))
        self.body_ends_at_eof = b"content-length" not in headers and b"transfer-encoding" not in headers
        if b"keep-alive" in headers:
            self.idle_limit_s = _keep_alive_timeout_s(headers[b"keep-alive"])

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        if self.status < 200:  # 100 Continue and its like: the real head follows
            self._headers = []
            self._head_bytes = 0
            return
        self.complete = True
        # `should_keep_alive` is valid inside this callback only. Unsent request bytes would start the next request.
        unsent = self._transport is not None and self._transport.get_write_buffer_size() > 0
        self.keep_alive = self._parser.should_keep_alive() and not unsent

    # --- the exchange -----------------------------------------------------------------------------------------------

    def send(self, call: UpstreamCall, request: bytes, deadline_s: float) -> None:
        """Write a request whose answer, or failure, goes to `call`. Silence until `deadline_s` is one.

        Nobody waits for the socket to take the request: a backend that does not is silent as well.
        """
        assert self._transport is not None
        self._call = call
        self._head_bytes = self.status = 0
        self.got_bytes = self.head_complete = self.complete = False
        if self.lost:  # since it was made; uvloop refuses to write to such a transport
            self.fail_soon(UpstreamError(UpstreamFault.RESET, "lost before it was used"))
            return
        self._transport.write(request)
        self.set_deadline(deadline_s)

    def leave(self) -> None:
        """The call goes without waiting for its end."""
        self._call = None
        self._pool.forget(self)
        self.abort()

    def fail_soon(self, error: UpstreamError) -> bool:
        """End an exchange that has no byte of its answer yet, in the loop's next turn; false where there is none."""
        if self._call is None or self.got_bytes:
            return False
        self._loop.call_soon(self._fail_waiting, self._call, error)
        return True

    def set_deadline(self, deadline_s: float) -> None:
        """Loop time until when silence is borne."""
        self._deadline = deadline_s
        # One timer serves many deadlines: progress moves them on, and the timer looks at the last when it fires.
        if self._timer is None or deadline_s < self._timer_at_s:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_at_s = deadline_s
            self._timer = self._loop.call_at(deadline_s, self._on_timer)

    def pause(self) -> None:
        """Read no more from the socket for now."""
        if not self._reading_paused and self._transport is not None and not self._transport.is_closing():
            self._reading_paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        if self._reading_paused and self._transport is not None:
            self._reading_paused = False
            if not self._transport.is_closing():
                self._transport.resume_reading()

    def _wait_a_turn(self) -> None:
        transport = self._transport
        if not self._reading_paused and transport is not None and not transport.is_closing():
            transport.pause_reading()
            self._pool.turns.wait(self._loop, self._take_turn)

    def _take_turn(self) -> None:
        transport = self._transport
        if not self._reading_paused and transport is not None and not transport.is_closing():
            transport.resume_reading()

    def abort(self) -> None:
        """Close the socket at once; the backend sees its client gone."""
        self.lost = True
        if self._transport is not None:
            self._transport.abort()

    def now_s(self) -> float:
        """Loop time."""
        return self._loop.time()

    @property
    def reusable(self) -> bool:
        return self.complete and self.keep_alive and not self.lost

    def _on_timer(self) -> None:
        self._timer = None
        if self._call is None:
            return
        if self._loop.time() < self._deadline:
            self.set_deadline(self._deadline)
            return
        unsent = self._transport is not None and self._transport.get_write_buffer_size() > 0
        what = "the backend does not take the request" if unsent else "the backend is silent"
        self._fail(UpstreamError(UpstreamFault.TIMEOUT, what))

    def _deliver(self, call: UpstreamCall) -> None:
        """Hand on what the parser has found. The call may leave at each step."""
        try:
            if self.head_complete:
                if call.status == 0:
                    call.status, call.headers, call.header = self.status, self._headers, self._header
                    self._headers, self._header = [], {}
                    call._unanswered = None
                    call.on_head()
                    if self._call is not call:
                        return
                body = self._body
                if body:
                    data = body[0] if len(body) == 1 else b"".join(body)
                    body.clear()
                    call.on_body(data)
                    if self._call is not call:
                        return
            if self.complete:
                self._call = call._connection = None
                self.resume()
                self._pool.take_back(self)
                call.on_end()
        except Exception as crash:
            call.leave()
            call.on_crash(crash)

    def _fail_waiting(self, call: UpstreamCall, error: UpstreamError) -> None:
        if self._call is call and not self.got_bytes:
            self._fail(error)

    def _fail(self, error: UpstreamError) -> None:
        call = self._call
        if call is None:
            self.abort()
            return
        self.leave()
        call._broke_off(error)


class UpstreamPool:
    """Connections to one backend."""

    def __init__(
        self, url: str, limits: PoolLimits | None = None, *, turns: Turns | None = None, ask: Resolve = resolve
    ) -> None:
        self.turns = turns or Turns()
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise ValueError(f"not an http(s) URL: {url!r}")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host = parts.hostname
        self._port = parts.port or (443 if self._tls else 80)
        self._addresses = Addresses(self._host, self._port, ask)
        self._path_prefix = parts.path.rstrip("/").encode("ascii")
        host = f"[{self._host}]" if ":" in self._host else self._host
        self._authority = (host if parts.port is None else f"{host}:{parts.port}").encode("ascii")
        self._limits = limits or PoolLimits()
        self._idle: list[Connection] = []
        self._active: set[Connection] = set()
        self.closed = False

    @property
    def active_connections(self) -> int:
        return len(self._active)

    @property
    def idle_connections(self) -> int:
        return len(self._idle)

    def head(self, path: bytes, headers: Headers) -> bytes:
        """Request line, host and these headers. A request is this, more header lines, an empty line, and a body."""
        lines = [b"%b: %b\r\n" % header for header in ((b"host", self._authority), *headers)]
        return b"POST %b%b HTTP/1.1\r\n%b" % (self._path_prefix, path, b"".join(lines))

    def take_idle(self) -> Connection | None:
        """An idle connection that may be used again, if there is one; it is busy from now on."""
        idle = self._idle
        while idle:
            connection = idle.pop()  # the youngest: the oldest may expire in peace
            now = connection.now_s()
            limit_s = self._limits.idle_expiry_s
            if connection.idle_limit_s is not None:
                limit_s = min(limit_s, max(0.0, connection.idle_limit_s - 1.0))
            if (
                connection.lost
                or now - connection.idle_since_s > limit_s
                or now - connection.created_at_s > self._limits.max_age_s
            ):
                connection.abort()
                continue
            self._active.add(connection)
            return connection
        return None

    async def connect(self, timeout_s: float) -> Connection:
        """A new connection, busy from now on.

        Raises:
            UpstreamError: CONNECT or CONNECT_TIMEOUT.
        """
        try:
            async with asyncio.timeout(timeout_s):
                connection = await self._connect_any(await self._addresses.find(timeout_s))
        except TimeoutError:
            raise UpstreamError(UpstreamFault.CONNECT_TIMEOUT, f"no connection within {timeout_s} s") from None
        except (OSError, UnicodeError) as error:  # refused, unreachable, no such name, TLS failure; no name at all
            raise UpstreamError(UpstreamFault.CONNECT, str(error)) from None
        self._active.add(connection)
        return connection

    def take_back(self, connection: Connection) -> None:
        """A connection whose answer is whole: keep it for the next request, or close it."""
        self._active.discard(connection)
        if self.closed or not connection.reusable or len(self._idle) >= self._limits.max_idle_connections:
            connection.abort()
            return
        connection.idle_since_s = connection.now_s()
        self._idle.append(connection)

    def forget(self, connection: Connection) -> None:
        """A connection that is about to be closed."""
        self._active.discard(connection)

    def fail_waiting(self, detail: str) -> int:
        """End every exchange that has no response byte yet with DECLARED_DOWN, so that it can go elsewhere.

        They end in the loop's next turn: whoever says this may be in the middle of something.
        """
        return sum([
            connection.fail_soon(UpstreamError(UpstreamFault.DECLARED_DOWN, detail)) for connection in self._active
        ])

    def close(self) -> None:
        """Close idle connections now and each active one when its response ends."""
        self.closed = True
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.abort()

    async def _connect_any(self, addresses: Sequence[str]) -> Connection:
        """To the first address that takes a connection.

        Raises:
            OSError: what the last one said.
        """
        loop = asyncio.get_running_loop()
        name = self._host if self._tls else None
        for address in addresses[:-1]:
            try:
                return await self._connect_to(loop, address, name)
            except OSError:
                continue
        return await self._connect_to(loop, addresses[-1], name)

    async def _connect_to(self, loop: asyncio.AbstractEventLoop, address: str, name: str | None) -> Connection:
        _, connection = await loop.create_connection(
            lambda: Connection(loop, self), address, self._port, ssl=self._tls, server_hostname=name
        )
        return connection


def _keep_alive_timeout_s(value: bytes) -> float | None:
    for part in value.split(b","):
        name, _, number = part.strip().partition(b"=")
        if name.lower() == b"timeout" and number.strip().isdigit():
            return float(number)
    return None
