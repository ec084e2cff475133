"""The fault proxy does what its faults say, and nothing else."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import pytest

from loadtest.fault_proxy import NO_FAULTS, Accept, FaultProxy, Faults
from tests.raw_client import eventually

pytestmark = pytest.mark.anyio
ANSWER = bytes(range(256)) * 8


class Server:
    """Answers each connection's first line with `ANSWER` and ends; notes what it was told and that it was left."""

    def __init__(self) -> None:
        self.told = b""
        self.left = asyncio.Event()
        self.stays = False

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            self.told += await reader.readline()
            writer.write(ANSWER)
            await writer.drain()
            while self.stays and (more := await reader.read(100)):
                self.told += more
        self.left.set()
        writer.close()


@contextlib.asynccontextmanager
async def proxied(faults: Faults = NO_FAULTS) -> AsyncIterator[tuple[Server, FaultProxy]]:
    server = Server()
    async with await asyncio.start_server(server.connection, "127.0.0.1", 0) as listener:
        host, port = listener.sockets[0].getsockname()
        async with FaultProxy(f"http://{host}:{port}", faults).serving() as proxy:
            yield server, proxy


async def ask(proxy: FaultProxy, timeout_s: float = 5.0) -> tuple[list[bytes], str]:
    """The segments that came, and how the connection ended: `end`, `reset` or `silence`."""
    host, port = proxy.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    segments: list[bytes] = []
    try:
        async with asyncio.timeout(timeout_s):
            writer.write(b"hello\n")
            while segment := await reader.read(65536):
                segments.append(segment)
    except ConnectionError:
        return segments, "reset"
    except TimeoutError:
        return segments, "silence"
    finally:
        writer.transport.abort()
    return segments, "end"


async def test_without_faults_it_passes_everything_on() -> None:
    async with proxied() as (server, proxy):
        segments, how = await ask(proxy)
        assert (b"".join(segments), how, server.told) == (ANSWER, "end", b"hello\n")
        assert proxy.accepted == 1


@pytest.mark.parametrize(
    ("faults", "size", "how"),
    [
        (Faults(accept=Accept.CLOSE), 0, ("end", "reset")),
        (Faults(accept=Accept.RESET), 0, ("reset",)),
        (Faults(accept=Accept.IGNORE), 0, ("silence",)),
        (Faults(reset_after=0), 0, ("reset",)),
        (Faults(reset_after=100, piece_bytes=10), None, ("reset",)),
        (Faults(close_after=100), 100, ("end",)),
        (Faults(close_after=0), 0, ("end",)),
        (Faults(half_close_after=100), 100, ("end",)),
        (Faults(black_hole_after=100), 100, ("silence",)),
        (Faults(black_hole_after=0), 0, ("silence",)),
    ],
)
async def test_it_ends_an_answer(faults: Faults, size: int | None, how: tuple[str, ...]) -> None:
    async with proxied(faults) as (server, proxy):
        segments, ended = await ask(proxy, 0.3)
        assert ended in how
        got = b"".join(segments)
        assert ANSWER.startswith(got)
        assert len(got) == size if size is not None else len(got) <= 100  # a reset may overtake what was sent
        assert server.told == (b"hello\n" if faults.accept is Accept.SERVE else b"")
        proxy.faults = NO_FAULTS
        assert b"".join((await ask(proxy))[0]) == ANSWER


async def test_a_half_close_still_passes_on_what_the_client_says() -> None:
    async with proxied(Faults(half_close_after=10)) as (server, proxy):
        server.stays = True
        host, port = proxy.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"hello\n")
        assert await reader.read() == ANSWER[:10]
        writer.write(b"still here")
        await eventually(lambda: b"still here" in server.told)
        assert not server.left.is_set()
        writer.close()
        await asyncio.wait_for(server.left.wait(), 2)


async def test_it_cuts_where_it_is_told() -> None:
    async with proxied(Faults(split_at=(1, 7, 1000))) as (_, proxy):
        segments, _ = await ask(proxy)
        assert [len(segment) for segment in segments][:2] == [1, 6]
        assert b"".join(segments) == ANSWER
        proxy.faults = Faults(piece_bytes=512)
        segments, _ = await ask(proxy)
        assert b"".join(segments) == ANSWER
        assert max(map(len, segments)) <= 1024  # two may be read at once
        assert len(segments) >= 2


async def test_it_is_late_and_slow() -> None:
    async with proxied(Faults(latency_s=0.2)) as (_, proxy):
        began_s = time.monotonic()
        assert b"".join((await ask(proxy))[0]) == ANSWER
        assert time.monotonic() - began_s >= 0.2
        proxy.faults = Faults(bytes_per_s=len(ANSWER) * 4)
        began_s = time.monotonic()
        assert b"".join((await ask(proxy))[0]) == ANSWER
        assert 0.2 <= time.monotonic() - began_s < 2


async def test_it_leaves_the_server_when_its_client_goes() -> None:
    async with proxied() as (server, proxy):
        server.stays = True
        host, port = proxy.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"hello\n")
        await reader.read(10)
        assert proxy.open_connections == 1
        writer.transport.abort()
        await asyncio.wait_for(server.left.wait(), 2)
        assert proxy.open_connections == 0
