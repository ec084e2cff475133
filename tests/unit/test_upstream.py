"""The pool against raw sockets: every way an engine may answer, fall silent, break off or be left."""

import asyncio
import contextlib
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

from backends.upstream import MAX_HEAD_BYTES, PoolLimits, UpstreamError, UpstreamFault, UpstreamPool
from tests.upstream_client import AwaitedCall
from tests.upstream_client import post as send

pytestmark = [pytest.mark.anyio, pytest.mark.real_time]
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


@pytest.fixture(params=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """The process runs on uvloop, whose transports differ from asyncio's in their corners."""
    return "asyncio", {"use_uvloop": request.param == "uvloop"}


@dataclass
class Peer:
    """One connection as the engine sees it."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    number: int
    """Counts connections from 0."""

    async def request(self) -> bytes:
        """The next request, head and body."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        return head + await self.reader.readexactly(length)

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def until_gone(self) -> None:
        """Until the pool has closed its side."""
        with contextlib.suppress(ConnectionError):
            while await self.reader.read(65536):
                pass


Script = Callable[[Peer], Awaitable[None]]


@dataclass
class Engine:
    """A raw server: `script` plays on each connection, which closes when it returns."""

    url: str = ""
    connections: int = 0
    open: set[asyncio.Task[None]] = field(default_factory=set)

    async def all_gone(self) -> None:
        """Every connection is over on this side too."""
        async with asyncio.timeout(10):
            await asyncio.gather(*self.open)


@contextlib.asynccontextmanager
async def engine(script: Script) -> AsyncIterator[Engine]:
    state = Engine()

    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        state.open.add(task)
        peer = Peer(reader, writer, state.connections)
        state.connections += 1
        try:
            await script(peer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        except RuntimeError:  # how uvloop says that the transport is closed
            if not writer.is_closing():
                raise
        finally:
            writer.close()
            state.open.discard(task)

    server = await asyncio.start_server(play, "127.0.0.1", 0, backlog=512)
    host, port = server.sockets[0].getsockname()[:2]
    state.url = f"http://{host}:{port}"
    try:
        yield state
    finally:
        server.close()
        for task in list(state.open):
            task.cancel()
        await asyncio.gather(*state.open, return_exceptions=True)


async def post(pool: UpstreamPool, body: bytes = b"{}", **options: Any) -> tuple[int, bytes]:
    """One exchange to its end."""
    call = send(pool, body, lines=b"x-a: b\r\n", **options)
    await call.whole()
    return call.status, call.body


async def fault_of(pool: UpstreamPool, **options: Any) -> UpstreamFault:
    with pytest.raises(UpstreamError) as caught:
        await post(pool, **options)
    assert pool.active_connections == 0
    return caught.value.fault


async def forever(answer: bytes, peer: Peer) -> None:
    while True:
        await peer.request()
        await peer.send(answer)


def always(answer: bytes) -> Script:
    return lambda peer: forever(answer, peer)


# --- answers --------------------------------------------------------------------------------------------------------


async def test_a_request_is_written_as_http_and_its_connection_serves_the_next() -> None:
    seen: list[bytes] = []

    async def script(peer: Peer) -> None:
        while True:
            seen.append(await peer.request())
            await peer.send(OK)

    async with engine(script) as server:
        pool = UpstreamPool(server.url + "/prefix/")
        assert [await post(pool, b"body") for _ in range(3)] == [(200, b"ok")] * 3
        host = server.url.removeprefix("http://").encode()
    expected = (
        b"POST /prefix/v1/chat/completions HTTP/1.1\r\nhost: " + host + b"\r\nx-a: b\r\ncontent-length: 4\r\n\r\nbody"
    )
    assert seen == [expected] * 3
    assert server.connections == 1
    assert (pool.active_connections, pool.idle_connections) == (0, 1)


CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
ANSWERS = {
    "length": (OK, b"ok", True),
    "chunked": (CHUNKED + b"1\r\no\r\n1;ext=1\r\nk\r\n0\r\n\r\n", b"ok", True),
    "trailers": (CHUNKED + b"2\r\nok\r\n0\r\nx-late: 1\r\n\r\n", b"ok", True),
    "no_body": (b"HTTP/1.1 204 No Content\r\n\r\n", b"", True),
    "continue": (b"HTTP/1.1 100 Continue\r\n\r\n" + OK, b"ok", True),
    "many_interim": (b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n" * 3 + OK, b"ok", True),
    "close": (b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok", b"ok", False),
    "http_1_0": (b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok", b"ok", False),
    "no_time_left": (b"HTTP/1.1 200 OK\r\nkeep-alive: timeout=0\r\ncontent-length: 2\r\n\r\nok", b"ok", False),
}


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("dribble", [False, True])
async def test_every_framing_is_read_and_reused_where_http_allows(name: str, dribble: bool) -> None:
    answer, body, reusable = ANSWERS[name]

    async def script(peer: Peer) -> None:
        while True:
            await peer.request()
            for start in range(0, len(answer), 1 if dribble else len(answer)):
                await peer.send(answer[start : start + 1] if dribble else answer)
                await asyncio.sleep(0)

    async with engine(script) as server:
        pool = UpstreamPool(server.url)
        for _ in range(2):
            status, data = await post(pool)
            assert (status, data) == (204 if name == "no_body" else 200, body)
            await asyncio.sleep(0.002)
    assert server.connections == (1 if reusable else 2)


async def test_a_body_without_length_ends_with_the_connection() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\n\r\nsome")
        await asyncio.sleep(0.01)
        await peer.send(b" more")

    async with engine(script) as server:
        pool = UpstreamPool(server.url)
        assert await post(pool) == (200, b"some more")
        assert await post(pool) == (200, b"some more")
    assert server.connections == 2
    assert pool.idle_connections == 0


async def test_an_answer_before_the_request_is_read_is_taken_and_the_rest_is_not_sent_to_the_next() -> None:
    async def script(peer: Peer) -> None:
        await peer.reader.readuntil(b"\r\n\r\n")
        await peer.send(b"HTTP/1.1 413 Too Large\r\ncontent-length: 3\r\n\r\nbig")
        await asyncio.sleep(0.05)

    async with engine(script) as server:
        pool = UpstreamPool(server.url)
        assert await post(pool, b"x" * (32 * 1024 * 1024)) == (413, b"big")
        assert (pool.active_connections, pool.idle_connections) == (0, 0)


async def test_what_follows_an_answer_is_neither_part_of_it_nor_of_the_next() -> None:
    smuggled = b"HTTP/1.1 500 Smuggled\r\ncontent-length: 4\r\n\r\nevil"

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send((OK if peer.number else b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n") + smuggled)
        await peer.until_gone()

    async with engine(script) as server:
        pool = UpstreamPool(server.url)
        assert await post(pool) == (200, b"")
        assert await post(pool) == (200, b"ok")
        assert await post(pool) == (200, b"ok")
        assert server.connections == 3


async def test_bytes_on_an_idle_connection_end_it() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(OK)
        await asyncio.sleep(0.01)
        with contextlib.suppress(ConnectionError):
            await peer.send(b"HTTP/1.1 408 Timeout\r\ncontent-length: 0\r\n\r\n")
        await peer.until_gone()

    async with engine(script) as server:
        pool = UpstreamPool(server.url)
        assert await post(pool) == (200, b"ok")
        await asyncio.sleep(0.05)
        assert await post(pool) == (200, b"ok")
        assert server.connections == 2


# --- reuse ----------------------------------------------------------------------------------------------------------


async def test_a_connection_that_was_closed_while_idle_is_replaced_unseen() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(OK)

    async with engine(script) as server:
        pool = UpstreamPool(server.url)
        for _ in range(5):
            assert await post(pool) == (200, b"ok")
            await asyncio.sleep(0.01)
        assert server.connections == 5


async def test_a_connection_that_closes_in_the_moment_of_reuse_is_replaced_once() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(OK)
        await peer.request()  # read, and then left without a byte: what a race with keep-alive looks like
        peer.writer.transport.abort()

    async with engine(script) as server:
        pool = UpstreamPool(server.url)
        for _ in range(4):
            assert await post(pool) == (200, b"ok")
        assert server.connections == 4


async def test_an_idle_connection_that_is_closing_is_not_written_to() -> None:
    async with engine(always(OK)) as server:
        pool = UpstreamPool(server.url)
        await post(pool)
        pool._idle[0].abort()  # as on unsolicited bytes; `connection_lost` follows in the loop's next turn
        assert await post(pool) == (200, b"ok")
        assert server.connections == 2


async def test_a_fresh_connection_that_closes_is_not_tried_again() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()

    async with engine(script) as server:
        assert await fault_of(UpstreamPool(server.url)) is UpstreamFault.RESET
        assert server.connections == 1


async def test_idle_connections_expire_by_time_by_age_and_by_number() -> None:
    async with engine(always(OK)) as server:
        for limits in (PoolLimits(idle_expiry_s=0.0), PoolLimits(max_age_s=0.0), PoolLimits(max_idle_connections=0)):
            before = server.connections
            pool = UpstreamPool(server.url, limits)
            for _ in range(3):
                await post(pool)
                await asyncio.sleep(0.005)
            assert server.connections == before + 3
            pool.close()
        pool = UpstreamPool(server.url, PoolLimits(max_idle_connections=2))
        await asyncio.gather(*[post(pool) for _ in range(6)])
        assert pool.idle_connections == 2


async def test_closing_ends_idle_connections_at_once_and_busy_ones_with_their_answer() -> None:
    release = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        if peer.number == 1:
            await release.wait()
        await peer.send(OK)
        await peer.until_gone()

    async with engine(script) as server:
        pool = UpstreamPool(server.url)
        await post(pool)
        idle = pool._idle.pop()  # keep it from being taken, so that the second exchange opens its own
        busy = asyncio.create_task(post(pool))
        await asyncio.sleep(0.02)
        pool._idle.append(idle)
        pool.close()
        assert pool.idle_connections == 0
        release.set()
        assert await busy == (200, b"ok")
        assert (pool.active_connections, pool.idle_connections) == (0, 0)
        await server.all_gone()


async def test_a_connection_that_is_lost_before_it_is_used_is_a_reset() -> None:
    async def script(peer: Peer) -> None:
        peer.writer.transport.abort()

    async with engine(script) as server:
        pool = UpstreamPool(server.url)
        connection = await pool.connect(5.0)
        await asyncio.sleep(0.05)
        call = AwaitedCall()
        call._connection = connection
        connection.send(call, b"POST / HTTP/1.1\r\n\r\n", asyncio.get_running_loop().time() + 1)
        with pytest.raises(UpstreamError) as caught:
            await call.whole()
        assert caught.value.fault is UpstreamFault.RESET
        assert pool.active_connections == 0


# --- faults ---------------------------------------------------------------------------------------------------------


async def test_nobody_there() -> None:
    async with engine(always(OK)) as server:
        url = server.url
    assert await fault_of(UpstreamPool(url)) is UpstreamFault.CONNECT
    assert await fault_of(UpstreamPool("http://a..b:1")) is UpstreamFault.CONNECT


@pytest.mark.parametrize("scheme", ["https"])
async def test_tls_to_a_plain_server_is_a_failure_to_connect(scheme: str) -> None:
    async def script(peer: Peer) -> None:
        await peer.reader.read(100)
        await peer.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    async with engine(script) as server:
        pool = UpstreamPool(server.url.replace("http", scheme))
        assert await fault_of(pool) is UpstreamFault.CONNECT


BROKEN = {
    "nothing": (b"", UpstreamFault.RESET),
    "half_a_status_line": (b"HTTP/1.1 2", UpstreamFault.TRUNCATED),
    "half_a_head": (b"HTTP/1.1 200 OK\r\ncontent-", UpstreamFault.TRUNCATED),
    "interim_only": (b"HTTP/1.1 100 Continue\r\n\r\n", UpstreamFault.TRUNCATED),
    "no_body": (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n", UpstreamFault.TRUNCATED),
    "half_a_body": (OK[:-1], UpstreamFault.TRUNCATED),
    "half_a_chunk": (CHUNKED + b"5\r\nab", UpstreamFault.TRUNCATED),
    "between_chunks": (CHUNKED + b"2\r\nab\r\n", UpstreamFault.TRUNCATED),
    "no_last_line": (CHUNKED + b"2\r\nab\r\n0\r\n", UpstreamFault.TRUNCATED),
    "garbage": (b"SSH-2.0-OpenSSH_9.6\r\n", UpstreamFault.PROTOCOL),
    "http2": (b"\x00\x00\x12\x04\x00\x00\x00\x00\x00", UpstreamFault.PROTOCOL),
    "bad_chunk": (CHUNKED + b"zz\r\n", UpstreamFault.PROTOCOL),
    "bad_length": (b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n", UpstreamFault.PROTOCOL),
    "two_lengths": (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\nok", UpstreamFault.PROTOCOL),
    "upgrade": (b"HTTP/1.1 101 Switching\r\nupgrade: x\r\nconnection: upgrade\r\n\r\nabc", UpstreamFault.PROTOCOL),
    "large_header": (b"HTTP/1.1 200 OK\r\nx: " + b"a" * (MAX_HEAD_BYTES + 1) + b"\r\n\r\n", UpstreamFault.PROTOCOL),
    "many_headers": (
        b"HTTP/1.1 200 OK\r\n" + b"".join(b"x-%d: 1\r\n" % n for n in range(20_000)) + b"\r\n", UpstreamFault.PROTOCOL,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("reset", [False, True])
async def test_each_way_to_break_off_has_its_fault(name: str, reset: bool) -> None:
    sent, fault = BROKEN[name]

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(sent)
        await asyncio.sleep(0.02)  # a reset overtakes bytes that are still on their way
        if reset:
            peer.writer.transport.abort()

    async with engine(script) as server:
        assert await fault_of(UpstreamPool(server.url)) is fault


async def test_p10_a_reset_in_a_body_without_length_is_no_end() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\n\r\nsome")
        await asyncio.sleep(0.02)
        sock = peer.writer.get_extra_info("socket")
        import socket
        import struct

        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close sends RST
        peer.writer.transport.abort()

    async with engine(script) as server:
        assert await fault_of(UpstreamPool(server.url)) is UpstreamFault.TRUNCATED


SILENT = {
    "at_once": b"",
    "in_the_head": b"HTTP/1.1 200 OK\r\ncont",
    "after_interim": b"HTTP/1.1 100 Continue\r\n\r\n",
    "after_the_head": b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n",
    "in_the_body": OK[:-1],
    "before_the_last_chunk": CHUNKED + b"2\r\nab\r\n",
}


@pytest.mark.parametrize("name", SILENT)
async def test_silence_is_a_timeout_in_each_phase_and_closes_the_socket(name: str) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(SILENT[name])
        await peer.until_gone()

    async with engine(script) as server:
        assert await fault_of(UpstreamPool(server.url), head_s=0.1, read_s=0.1) is UpstreamFault.TIMEOUT
        await server.all_gone()


async def test_a_backend_that_does_not_take_the_request_is_a_timeout() -> None:
    async def script(peer: Peer) -> None:
        peer.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.sleep(5)

    async with engine(script) as server:
        pool = UpstreamPool(server.url)
        assert await fault_of(pool, body=b"x" * (64 * 1024 * 1024), head_s=0.2) is UpstreamFault.TIMEOUT


async def test_progress_moves_the_deadline() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(CHUNKED)
        for _ in range(10):
            await asyncio.sleep(0.05)
            await peer.send(b"1\r\nx\r\n")
        await peer.send(b"0\r\n\r\n")

    async with engine(script) as server:
        pool = UpstreamPool(server.url)
        assert await post(pool, read_s=0.3) == (200, b"x" * 10)  # in all it takes longer than this


async def test_a_backend_that_is_given_up_frees_who_waits_for_it_and_no_one_else() -> None:
    arrived: asyncio.Queue[int] = asyncio.Queue()
    go_on = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        if peer.number == 0:
            await peer.send(CHUNKED + b"1\r\na\r\n")
            await go_on.wait()
            await peer.send(b"1\r\nb\r\n0\r\n\r\n")
        arrived.put_nowait(peer.number)
        await peer.until_gone()

    async with engine(script) as server:
        pool = UpstreamPool(server.url)
        begun = send(pool)
        await begun.began.wait()
        waiting = [asyncio.create_task(post(pool)) for _ in range(3)]
        for _ in waiting:
            await arrived.get()
        assert pool.fail_waiting("down") == 3
        go_on.set()
        for task in waiting:
            with pytest.raises(UpstreamError) as caught:
                await task
            assert caught.value.fault is UpstreamFault.DECLARED_DOWN
        assert await begun.whole() == b"ab"


async def test_a_body_over_the_callers_limit_is_refused() -> None:
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n" + b"x" * 1_000_000
    async with engine(always(answer)) as server:
        pool = UpstreamPool(server.url)
        call = AwaitedCall()
        call.max_bytes = 999_999
        with pytest.raises(UpstreamError) as caught:
            await send(pool, call=call).whole()
        assert caught.value.fault is UpstreamFault.PROTOCOL
        assert pool.active_connections == 0


# --- leaving and waiting --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["sending", "head", "first_byte", "mid_body", "before_last_chunk"])
async def test_p01_a_cancelled_exchange_closes_its_socket_in_each_phase(phase: str) -> None:
    reached, gone = asyncio.Event(), asyncio.Event()
    sent = {"sending": None, "head": b"", "first_byte": CHUNKED, "mid_body": CHUNKED + b"5\r\nab",
            "before_last_chunk": CHUNKED + b"2\r\nab\r\n"}  # fmt: skip

    async def script(peer: Peer) -> None:
        data = sent[phase]
        if data is None:
            await peer.reader.readexactly(1)
            peer.writer.transport.pause_reading()  # type: ignore[attr-defined]
            reached.set()
            await asyncio.sleep(0.1)
            peer.writer.transport.resume_reading()  # type: ignore[attr-defined]
        else:
            await peer.request()
            await peer.send(data)
            reached.set()
        await peer.until_gone()
        gone.set()

    async with engine(script) as server:
        pool = UpstreamPool(server.url)
        body = b"x" * (64 * 1024 * 1024 if phase == "sending" else 10)
        task = asyncio.create_task(post(pool, body))
        await reached.wait()
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (pool.active_connections, pool.idle_connections) == (0, 0)
        async with asyncio.timeout(1):
            await gone.wait()


async def test_p27_two_thousand_cancels_in_any_phase_leak_nothing() -> None:
    rng = random.Random(27)

    async def script(peer: Peer) -> None:
        while True:
            await peer.request()
            for part in (CHUNKED, b"2\r\nok\r\n", b"0\r\n\r\n"):
                if rng.random() < 0.7:
                    await asyncio.sleep(rng.uniform(0, 0.003))
                await peer.send(part)

    async with engine(script) as server:
        pool = UpstreamPool(server.url, PoolLimits(max_idle_connections=10))
        ends = {"done": 0, "cancelled": 0}

        async def worker() -> None:
            for _ in range(100):
                task = asyncio.create_task(post(pool))
                if rng.random() < 0.8:
                    await asyncio.sleep(rng.uniform(0, 0.008))
                    task.cancel()
                try:
                    assert await task == (200, b"ok")
                    ends["done"] += 1
                except asyncio.CancelledError:
                    ends["cancelled"] += 1

        await asyncio.gather(*[worker() for _ in range(20)])
        assert sum(ends.values()) == 2000
        assert min(ends.values()) > 50, ends  # both ways of ending were tried
        assert pool.active_connections == 0
        assert pool.idle_connections <= 10
        assert await asyncio.gather(*[post(pool) for _ in range(20)]) == [(200, b"ok")] * 20
        pool.close()
        await server.all_gone()


async def test_a_call_that_pauses_stops_the_backend() -> None:
    sent = 0

    async def script(peer: Peer) -> None:
        nonlocal sent
        await peer.request()
        await peer.send(CHUNKED)
        piece = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
        for _ in range(1024):  # 64 MiB
            await peer.send(piece)
            sent += 0x10000
        await peer.send(b"0\r\n\r\n")

    class Slow(AwaitedCall):
        received = 0

        def on_body(self, data: bytes) -> None:
            self.received += len(data)
            if self.pieces == 0:
                self.pause()
            self.pieces += 1

    async with engine(script) as server:
        pool = UpstreamPool(server.url)
        call = Slow()
        send(pool, call=call, head_s=60)
        before = -1
        while before != sent or not sent:  # until it has come to a stand
            before = sent
            await asyncio.sleep(0.2)
        assert sent < 32 * 1024 * 1024
        assert call.received < 1024 * 1024
        call.resume()
        await call.whole()
        assert call.received == sent == 64 * 1024 * 1024
        assert pool.idle_connections == 1


async def test_a_connection_whose_answer_ends_while_it_is_paused_reads_again_for_the_next() -> None:
    class Paused(AwaitedCall):
        def on_body(self, data: bytes) -> None:
            super().on_body(data)
            self.pause()

    async with engine(always(OK)) as server:
        pool = UpstreamPool(server.url)
        for _ in range(3):
            assert await send(pool, call=Paused()).whole() == b"ok"
        assert server.connections == 1


# --- hooks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hook", ["on_head", "on_body", "on_end", "on_failure"])
async def test_a_hook_that_raises_ends_its_call_alone(hook: str) -> None:
    class Crashing(AwaitedCall):
        """Raises in one of its hooks."""

    def crash(*_: object) -> None:
        raise ZeroDivisionError(hook)

    setattr(Crashing, hook, crash)

    async def script(peer: Peer) -> None:
        while True:
            await peer.request()
            await peer.send(OK if hook != "on_failure" or peer.number else b"nonsense\r\n\r\n")

    async with engine(script) as server:
        pool = UpstreamPool(server.url)
        call = send(pool, call=Crashing())
        with pytest.raises(ZeroDivisionError, match=hook):
            await call.whole()
        assert pool.active_connections == 0
        assert await post(pool) == (200, b"ok")


@pytest.mark.parametrize("hook", ["on_head", "on_body", "on_end"])
async def test_a_call_may_leave_in_each_hook_and_hears_no_more(hook: str) -> None:
    heard: list[str] = []

    class Leaving(AwaitedCall):
        """Leaves in one of its hooks."""

    def listen(name: str) -> Callable[..., None]:
        def told(self: AwaitedCall, *_: object) -> None:
            heard.append(name)
            if name == hook:
                self.leave()

        return told

    names = ["on_head", "on_body", "on_end", "on_failure", "on_crash"]
    for name in names:
        setattr(Leaving, name, listen(name))
    async with engine(always(OK)) as server:
        pool = UpstreamPool(server.url)
        send(pool, call=Leaving())
        async with asyncio.timeout(5):
            while hook not in heard:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)
        assert heard == names[: names.index(hook) + 1]
        assert pool.active_connections == 0
        assert pool.idle_connections == (1 if hook == "on_end" else 0)


# --- many big answers -----------------------------------------------------------------------------------------------


async def test_big_answers_take_turns_and_leave_the_rest_of_each_turn_to_others() -> None:
    """Read as they come, sixteen full sockets would be emptied within one turn of the loop."""
    answer_bytes, number, most_a_read = 4_000_000, 16, 2**18
    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % answer_bytes
    with socket.create_server(("127.0.0.1", 0), backlog=number) as listener, ThreadPoolExecutor(number) as threads:

        def answer() -> None:
            with listener.accept()[0] as peer:
                peer.recv(65536)
                peer.sendall(head + bytes(answer_bytes))

        served = [threads.submit(answer) for _ in range(number)]
        loop, taken = asyncio.get_running_loop(), [0]

        def next_turn() -> None:
            taken.append(0)
            ticking[0] = loop.call_soon(next_turn)

        ticking = [loop.call_soon(next_turn)]

        class Counting(AwaitedCall):
            def on_body(self, data: bytes) -> None:
                taken[-1] += len(data)
                super().on_body(data)

        pool = UpstreamPool("http://{}:{}".format(*listener.getsockname()))
        calls = [send(pool, b"{}", call=Counting()) for _ in range(number)]
        await asyncio.gather(*[call.whole() for call in calls])
        ticking[0].cancel()
        pool.close()
        await asyncio.sleep(0.05)  # sockets are closed in the loop's next turns
        assert [len(call.body) for call in calls] == [answer_bytes] * number
        assert all(done.exception() is None for done in served)
        busy = [count for count in taken if count]
        assert max(busy) <= number * most_a_read, "each socket is read once before any is read twice"
        assert sorted(busy)[len(busy) * 9 // 10] <= 3 * most_a_read, "then they take turns"
