"""HTTP/1.1 to one backend: a keep-alive pool over `asyncio.Protocol` and httptools, made for relaying.

httpx serves everything that is not the hot path. Here it does not fit: httpcore 1.0.9 loses connection slots when
requests are cancelled (encode/httpcore#1093), and a router cancels whenever a client leaves. This pool has no slots to
lose: a connection is either idle in the pool or owned by exactly one response, and a response that is closed early
closes its socket, which is how every engine learns that nobody listens any more.

Bytes arrive by callback. A body is either read, at one future per wait and never a task, or followed: handed on by
callback as it comes, at no future at all. A reader that falls behind and a follower that says so stop the socket, so a
slow client slows its engine down rather than filling the router's memory.
"""

import asyncio
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

from backends.addresses import Addresses, Resolve, resolve

HIGH_WATER_BYTES = 256 * 1024
MAX_HEAD_BYTES = 64 * 1024
MAX_KEPT_HEADS = 64
HeaderTuple = tuple[tuple[bytes, bytes], ...]


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


class Sink(Protocol):
    """Takes a body as it comes. Called from the socket's callbacks; must not raise."""

    def body(self, data: bytes) -> None: ...
    def end(self) -> None: ...
    def fail(self, error: UpstreamError) -> None: ...


class Connection(asyncio.Protocol):
    """One socket to a backend. Serves one exchange at a time."""

    __slots__ = (
        "_buffered_bytes", "_chunks", "_deadline", "_error", "_head_bytes", "_loop", "_parser", "_reading_paused",
        "_sink", "_timer", "_transport", "_waiter", "_write_waiter", "body_ends_at_eof", "complete", "created_at_s",
        "got_bytes", "head_complete", "headers", "idle_limit_s", "idle_since_s", "keep_alive", "lost", "status",
    )  # fmt: skip

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._write_waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._deadline = 0.0
        self.created_at_s = loop.time()
        self.idle_since_s = 0.0
        self.idle_limit_s: float | None = None
        self.lost = False
        self.begin()

    def begin(self) -> None:
        """Forget the last exchange."""
        self._parser = httptools.HttpResponseParser(self)
        self._chunks: list[bytes] = []
        self._buffered_bytes = 0
        self._head_bytes = 0
        self._error: UpstreamError | None = None
        self._reading_paused = False
        self._sink: Sink | None = None
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.got_bytes = False
        self.head_complete = False
        self.complete = False
        self.keep_alive = False
        self.body_ends_at_eof = False

    # --- asyncio.Protocol -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transports do not inherit from asyncio's

    def data_received(self, data: bytes) -> None:
        if self.complete:  # bytes that nobody asked for: an idle connection must not carry them into the next exchange
            self.abort()
            return
        self.got_bytes = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._fail(UpstreamError(UpstreamFault.PROTOCOL, "the backend switched protocols"))
            return
        except httptools.HttpParserError as error:
            if self.complete:  # what follows the answer is not part of it, and the connection not to be trusted
                self.keep_alive = False
                self.abort()
                self._wake()
            elif self._error is None:
                self._fail(UpstreamError(UpstreamFault.PROTOCOL, str(error)))
            return
        if self._sink is not None:
            self._deliver(self._sink)
            return
        if self._buffered_bytes > HIGH_WATER_BYTES:
            self.pause()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        if self.complete:
            pass
        elif self.head_complete and self.body_ends_at_eof and exc is None:
            self.complete = True
        elif self._error is None:
            fault = UpstreamFault.TRUNCATED if self.got_bytes else UpstreamFault.RESET
            self._error = UpstreamError(fault, str(exc) if exc else "the backend closed the connection")
        self._wake()
        self.resume_writing()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def pause_writing(self) -> None:
        if self._write_waiter is None:
            self._write_waiter = self._loop.create_future()

    def resume_writing(self) -> None:
        waiter, self._write_waiter = self._write_waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # --- httptools --------------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self.complete:
            raise ValueError("a second response to one request")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > MAX_HEAD_BYTES:
            self._fail(UpstreamError(UpstreamFault.PROTOCOL, f"the response head is over {MAX_HEAD_BYTES} bytes"))
            raise ValueError("head too large")
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if self.status < 200:
            return
        self.head_complete = True
        names = {name for name, _ in self.headers}
        self.body_ends_at_eof = b"content-length" not in names and b"transfer-encoding" not in names
        for name, value in self.headers:
            if name == b"keep-alive":
                self.idle_limit_s = _keep_alive_timeout_s(value)
        self.resume_writing()  # an engine may answer (413, 429) before it has read the request

    def on_body(self, body: bytes) -> None:
        self._chunks.append(body)
        self._buffered_bytes += len(body)

    def on_message_complete(self) -> None:
        if self.status < 200:  # 100 Continue and its like: the real head follows
            self.headers = []
            self._head_bytes = 0
            return
        self.complete = True
        # `should_keep_alive` is valid inside this callback only. Unsent request bytes would start the next request.
        unsent = self._transport is not None and self._transport.get_write_buffer_size() > 0
        self.keep_alive = self._parser.should_keep_alive() and not unsent

    # --- the exchange -----------------------------------------------------------------------------------------------

    async def send(self, request: bytes, deadline_s: float) -> None:
        """Write a whole request; returns once the socket has taken it, or as soon as the backend answers."""
        assert self._transport is not None
        if self._error is not None:  # lost since it was made; uvloop refuses to write to such a transport
            raise self._error
        self._transport.write(request)
        if self._write_waiter is not None and not self.got_bytes:
            try:
                async with asyncio.timeout_at(deadline_s):
                    await self._write_waiter
            except TimeoutError:
                raise UpstreamError(UpstreamFault.TIMEOUT, "the backend does not take the request") from None

    async def wait_head(self, deadline_s: float) -> None:
        """Wait for the response head.

        Raises:
            UpstreamError: RESET, TRUNCATED, TIMEOUT (at `deadline_s`, loop time), PROTOCOL or DECLARED_DOWN.
        """
        while not self.head_complete:
            await self._wait(deadline_s)

    async def read(self, deadline_s: float) -> bytes:
        """All body bytes that have come since the last call, at least one; `b""` at the end of the body.

        Raises:
            UpstreamError: as `wait_head`. Bytes that came before a failure are delivered first.
        """
        while not self._chunks:
            if self.complete:
                return b""
            await self._wait(deadline_s)
        chunks = self._chunks
        data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        chunks.clear()
        self._buffered_bytes = 0
        self.resume()
        return data

    def follow(self, sink: Sink, deadline_s: float) -> None:
        """Hand the rest of the body to `sink`: what has come at once, and the rest as it comes.

        `sink.end` or `sink.fail` is its last call; silence until `deadline_s` (see `set_deadline`) is a failure.
        """
        self._sink = sink
        self.set_deadline(deadline_s)
        self.resume()
        self._deliver(sink)

    def unfollow(self) -> None:
        """Call the sink no more."""
        self._sink = None

    def set_deadline(self, deadline_s: float) -> None:
        """Loop time until when silence is borne."""
        self._deadline = deadline_s
        # One timer serves many deadlines: progress moves them on, and the timer looks at the last when it fires.
        if self._timer is None or self._timer.when() > deadline_s:
            if self._timer is not None:
                self._timer.cancel()
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

    def fail_waiting(self, error: UpstreamError) -> None:
        """End the exchange with `error` unless its response has begun."""
        if not self.got_bytes:
            self._fail(error)

    def abort(self) -> None:
        """Close the socket at once; the backend sees its client gone."""
        if self._transport is not None:
            self._transport.abort()

    @property
    def reusable(self) -> bool:
        return self.complete and self.keep_alive and not self.lost and not self._chunks and self._error is None

    async def _wait(self, deadline_s: float) -> None:
        if self._error is not None:
            raise self._error
        self.set_deadline(deadline_s)
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _on_timer(self) -> None:
        self._timer = None
        if self._sink is None and (self._waiter is None or self._waiter.done()):
            return
        if self._loop.time() < self._deadline:
            self._timer = self._loop.call_at(self._deadline, self._on_timer)
            return
        self._fail(UpstreamError(UpstreamFault.TIMEOUT, "the backend is silent"))

    def _fail(self, error: UpstreamError) -> None:
        self._error = error
        self.abort()
        self._wake()

    def _deliver(self, sink: Sink) -> None:
        chunks = self._chunks
        if chunks:
            data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
            chunks.clear()
            self._buffered_bytes = 0
            sink.body(data)
            if self._sink is not sink:
                return
        if self.complete:
            self._sink = None
            sink.end()
        elif self._error is not None:
            self._sink = None
            sink.fail(self._error)

    def _wake(self) -> None:
        if self._sink is not None:
            self._deliver(self._sink)
            return
        waiter = self._waiter
        if waiter is None or waiter.done():
            return
        if self._error is not None and not self._chunks:
            waiter.set_exception(self._error)
        elif self._chunks or self.head_complete or self.complete:
            waiter.set_result(None)


class UpstreamResponse:
    """A response whose head has come. Use as an async context manager: leaving it early closes the socket."""

    __slots__ = ("_connection", "_pool", "headers", "status")

    def __init__(self, pool: "UpstreamPool", connection: Connection) -> None:
        self._pool = pool
        self._connection = connection
        self.status = connection.status
        self.headers = connection.headers

    def header(self, name: bytes) -> bytes | None:
        """The first value of a header, by its lower-case name."""
        return next((value for key, value in self.headers if key == name), None)

    async def read(self, deadline_s: float) -> bytes:
        """See `Connection.read`."""
        return await self._connection.read(deadline_s)

    def follow(self, sink: Sink, deadline_s: float) -> None:
        """See `Connection.follow`."""
        self._connection.follow(sink, deadline_s)

    def set_deadline(self, deadline_s: float) -> None:
        """See `Connection.set_deadline`."""
        self._connection.set_deadline(deadline_s)

    def pause(self) -> None:
        """See `Connection.pause`."""
        self._connection.pause()

    def resume(self) -> None:
        """See `Connection.resume`."""
        self._connection.resume()

    async def read_all(self, deadline_s: float, max_bytes: int) -> bytes:
        """The whole body.

        Raises:
            UpstreamError: as `read`; PROTOCOL where the body is over `max_bytes`.
        """
        parts: list[bytes] = []
        size = 0
        while part := await self._connection.read(deadline_s):
            parts.append(part)
            size += len(part)
            if size > max_bytes:
                raise UpstreamError(UpstreamFault.PROTOCOL, f"the response body is over {max_bytes} bytes")
        return b"".join(parts)

    def close(self) -> None:
        """Give the connection back if the response is whole, else close it. Safe to call twice."""
        self._pool.release(self._connection)

    async def __aenter__(self) -> "UpstreamResponse":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


class UpstreamPool:
    """Connections to one backend."""

    def __init__(self, url: str, limits: PoolLimits | None = None, *, ask: Resolve = resolve) -> None:
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
        self._heads: dict[tuple[bytes, HeaderTuple], bytes] = {}
        self._idle: list[Connection] = []
        self._active: set[Connection] = set()
        self.closed = False

    @property
    def active_connections(self) -> int:
        return len(self._active)

    @property
    def idle_connections(self) -> int:
        return len(self._idle)

    async def post(
        self,
        path: bytes,
        standing_headers: HeaderTuple,
        headers: HeaderTuple,
        body: bytes,
        *,
        connect_timeout_s: float,
        head_deadline_s: float,
    ) -> UpstreamResponse:
        """POST and wait for the response head. Redirects are not followed.

        `standing_headers` are the same for many requests; the head with them is made once and kept.

        A kept-alive connection that the backend closed in the moment of its reuse is replaced once by a fresh one:
        no response byte came, so nothing can have been answered twice.

        Raises:
            UpstreamError: CONNECT, CONNECT_TIMEOUT, or as `Connection.wait_head`.
        """
        request = b"%b%bcontent-length: %d\r\n\r\n%b" % (
            self.head(path, standing_headers),
            b"".join([b"%b: %b\r\n" % header for header in headers]),
            len(body),
            body,
        )
        connection = self._take_idle()
        if connection is not None:
            try:
                return await self._exchange(connection, request, head_deadline_s)
            except UpstreamError as error:
                if error.fault is not UpstreamFault.RESET:
                    raise
        connection = await self._connect(connect_timeout_s)
        return await self._exchange(connection, request, head_deadline_s)

    def head(self, path: bytes, standing_headers: HeaderTuple) -> bytes:
        """Request line, host and standing headers."""
        key = (path, standing_headers)
        head = self._heads.get(key)
        if head is None:
            if len(self._heads) >= MAX_KEPT_HEADS:
                self._heads.clear()
            lines = [b"%b: %b\r\n" % header for header in ((b"host", self._authority), *standing_headers)]
            head = b"POST %b%b HTTP/1.1\r\n%b" % (self._path_prefix, path, b"".join(lines))
            self._heads[key] = head
        return head

    def release(self, connection: Connection) -> None:
        """Take a connection back from its response."""
        if connection not in self._active:
            return
        self._active.discard(connection)
        connection.unfollow()
        if self.closed or not connection.reusable or len(self._idle) >= self._limits.max_idle_connections:
            connection.abort()
            return
        connection.idle_since_s = asyncio.get_running_loop().time()
        self._idle.append(connection)

    def fail_waiting(self, detail: str) -> int:
        """End every exchange that has no response byte yet with DECLARED_DOWN, so that it can go elsewhere."""
        waiting = [connection for connection in self._active if not connection.got_bytes]
        for connection in waiting:
            connection.fail_waiting(UpstreamError(UpstreamFault.DECLARED_DOWN, detail))
        return len(waiting)

    def close(self) -> None:
        """Close idle connections now and each active one when its response ends."""
        self.closed = True
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.abort()

    async def _exchange(self, connection: Connection, request: bytes, head_deadline_s: float) -> UpstreamResponse:
        self._active.add(connection)
        try:
            await connection.send(request, head_deadline_s)
            await connection.wait_head(head_deadline_s)
        except BaseException:  # cancellation above all: the engine must see its client go in this phase too
            self._active.discard(connection)
            connection.abort()
            raise
        return UpstreamResponse(self, connection)

    def _take_idle(self) -> Connection | None:
        now = asyncio.get_running_loop().time()
        while self._idle:
            connection = self._idle.pop()  # the youngest: the oldest may expire in peace
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
            connection.begin()
            return connection
        return None

    async def _connect(self, timeout_s: float) -> Connection:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._connect_any(await self._addresses.find(timeout_s))
        except TimeoutError:
            raise UpstreamError(UpstreamFault.CONNECT_TIMEOUT, f"no connection within {timeout_s} s") from None
        except (OSError, UnicodeError) as error:  # refused, unreachable, no such name, TLS failure; no name at all
            raise UpstreamError(UpstreamFault.CONNECT, str(error)) from None

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
            lambda: Connection(loop), address, self._port, ssl=self._tls, server_hostname=name
        )
        return connection


def _keep_alive_timeout_s(value: bytes) -> float | None:
    for part in value.split(b","):
        name, _, number = part.strip().partition(b"=")
        if name.lower() == b"timeout" and number.strip().isdigit():
            return float(number)
    return None
