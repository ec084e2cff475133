"""A client that is a bare socket: it sends what a test says, reads when it says, and leaves as rudely as it says."""

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator, Callable
from typing import Any
from urllib.parse import urlsplit

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from router.app import Running

CHAT_PATH = "/v1/chat/completions"


def request_bytes(body: bytes | dict[str, Any], *, path: str = CHAT_PATH, headers: str = "") -> bytes:
    """A POST as bytes."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers += f"content-type: application/json\r\ncontent-length: {len(raw)}\r\n"
    head = f"POST {path} HTTP/1.1\r\nhost: h\r\n{headers}"
    return head.encode() + b"\r\n" + raw


class RawClient:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def until(self, mark: bytes) -> bytes:
        """All bytes up to and with `mark`."""
        return await self.reader.readuntil(mark)

    async def to_end(self, timeout_s: float = 10.0) -> bytes:
        """All bytes until the other side closes or resets."""
        parts: list[bytes] = []
        async with asyncio.timeout(timeout_s):
            with contextlib.suppress(ConnectionError):
                while part := await self.reader.read(65536):
                    parts.append(part)
        return b"".join(parts)

    def leave(self, *, reset: bool = False) -> None:
        """Close at once; `reset` sends RST rather than FIN."""
        if reset:
            own = self.writer.get_extra_info("socket")
            own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


@contextlib.asynccontextmanager
async def raw_client(process: Running, *, receive_buffer_bytes: int | None = None) -> AsyncIterator[RawClient]:
    parts = urlsplit(process.url)
    own = socket.socket()
    if receive_buffer_bytes is not None:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
    own.setblocking(False)
    await asyncio.get_running_loop().sock_connect(own, (parts.hostname, parts.port))
    client = RawClient(*await asyncio.open_connection(sock=own, limit=2**16))
    try:
        yield client
    finally:
        client.writer.transport.abort()


async def raw_exchange(process: Running, data: bytes) -> bytes:
    """Send `data`, read to the end; the request should ask for `connection: close` or be one that ends it."""
    async with raw_client(process) as client:
        with contextlib.suppress(ConnectionError):
            await client.send(data)
        return await client.to_end()


async def eventually(holds: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Wait until `holds`.

    Raises:
        TimeoutError: it did not in time.
    """
    async with asyncio.timeout(timeout_s):
        while not holds():  # noqa: ASYNC110 what a test looks at has no event to wait for
            await asyncio.sleep(0.005)


def sample(process: Running, name: str, **labels: str) -> float:
    """The sum of a metric over all its series that have `labels`."""
    return sum(value for _, value in series(process, name, **labels))


def series(process: Running, name: str, **labels: str) -> list[tuple[dict[str, str], float]]:
    """The series of a metric that have `labels`."""
    page = generate_latest(process.gateway.metrics.registry).decode()
    return [
        (found.labels, found.value)
        for family in text_string_to_metric_families(page)
        for found in family.samples
        if found.name == name and labels.items() <= found.labels.items()
    ]


def at_rest(process: Running) -> bool:
    """Nothing is in flight: not in the gateway, not in the books, not on a socket."""
    fleet = process.gateway.fleet
    return process.gateway.dispatcher.in_flight == 0 and all(
        (live.books.requests, live.books.prefill_tokens, live.books.context_tokens, live.pool.active_connections)
        == (0, 0, 0, 0)
        for live in (*fleet.backends.values(), *fleet.retiring)
    )
