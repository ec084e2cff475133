"""P24, clients that send or read slowly, or not at all: each has its deadline, and the others do not feel them."""

import asyncio
import contextlib
import gc
import os
import resource
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from router.app import Running
from router.wire.head import WireLimits
from tests.gateway_stack import chat, gateway
from tests.raw_client import CHAT_PATH, RawClient, at_rest, eventually, raw_client, request_bytes, sample
from tests.scripted_backend import SSE_HEAD, Received, ScriptedBackend, answer_hello, delta, event

pytestmark = pytest.mark.anyio

LIMITS = WireLimits(head_s=0.8, body_s=1.2, body_rate_floor=16 * 1024, unread_s=0.6)
LATE_S = 1.0
"""What a deadline may be overrun by, on a busy machine too."""
TICK_S = 0.1
HEAD = f"POST {CHAT_PATH} HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\n".encode()
GOOD = request_bytes(chat(stream=True), headers="connection: close\r\n")
MEGABYTE = 1024 * 1024
PIECE = event(delta("x" * 64_000))


def endless(start: bytes, piece: bytes) -> Callable[[], Iterator[bytes]]:
    def pieces() -> Iterator[bytes]:
        yield start
        while True:
            yield piece

    return pieces


# What a client sends, a piece each tick; which deadline ends it; and whether it has asked for anything.
SLOW_SENDERS: dict[str, tuple[Callable[[], Iterator[bytes]], float, bool]] = {
    "silent": (endless(b"", b""), LIMITS.head_s, False),
    "blank lines": (endless(b"\r\n", b"\r\n"), LIMITS.head_s, False),
    "start line": (endless(b"P", b""), LIMITS.head_s, True),
    "one header without end": (endless(HEAD + b"x: ", b"y"), LIMITS.head_s, True),
    "header upon header": (endless(HEAD, b"x: y\r\n"), LIMITS.head_s, True),
    "head but no body": (endless(HEAD + b"content-length: 1000\r\n\r\n", b""), LIMITS.body_s, True),
    "body by the byte": (endless(HEAD + b"content-length: 1000\r\n\r\n", b" "), LIMITS.body_s, True),
    "chunks of a byte": (endless(HEAD + b"transfer-encoding: chunked\r\n\r\n", b"1\r\n \r\n"), LIMITS.body_s, True),
    "a chunk extension": (endless(HEAD + b"transfer-encoding: chunked\r\n\r\n1;", b"x"), LIMITS.body_s, True),
    "trailers": (endless(HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\n", b"x: y\r\n"), LIMITS.body_s, True),
}


async def dribble(client: RawClient, pieces: Iterator[bytes], tick_s: float) -> None:
    with contextlib.suppress(ConnectionError):
        for piece in pieces:
            await client.send(piece)
            await asyncio.sleep(tick_s)


@contextlib.asynccontextmanager
async def sending(client: RawClient, pieces: Iterator[bytes], tick_s: float = TICK_S) -> AsyncIterator[None]:
    task = asyncio.create_task(dribble(client, pieces, tick_s))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_p24_a_request_that_does_not_come_whole_has_a_deadline(tmp_path: Path) -> None:
    async with ScriptedBackend().serving() as backend, gateway(tmp_path, [backend], wire=LIMITS) as process:

        async def suffer(name: str) -> str | None:
            pieces, deadline_s, asks = SLOW_SENDERS[name]
            began_s = time.monotonic()
            async with raw_client(process) as client, sending(client, pieces()):
                raw = await client.to_end(deadline_s + 10)
            took_s = time.monotonic() - began_s
            right = raw.startswith(b"HTTP/1.1 408 ") and b"connection: close\r\n" in raw if asks else raw == b""
            in_time = deadline_s - 0.05 <= took_s <= deadline_s + LATE_S
            return None if right and in_time else f"{name}: {raw[:100]!r} after {took_s:.2f} s"

        found = await asyncio.gather(*[suffer(name) for name in SLOW_SENDERS])
        assert [what for what in found if what is not None] == []
        assert backend.requests == []
        await eventually(lambda: at_rest(process))
        assert sample(process, "headrace_requests_total", status="408") == 5  # the others had not named a path


async def test_p24_blank_lines_do_not_keep_an_idle_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.app.KEEP_ALIVE_S", 0.5)
    async with (
        ScriptedBackend().serving() as backend,
        gateway(tmp_path, [backend], wire=LIMITS) as process,
        raw_client(process) as client,
    ):
        await client.send(request_bytes(chat()))
        await client.until(b'"total_tokens": 8}}')
        async with sending(client, endless(b"", b"\r\n")()):
            began_s = time.monotonic()
            assert await client.to_end() == b""
            assert time.monotonic() - began_s < 0.5 + LATE_S


async def test_p24_a_steady_sender_above_the_floor_is_served(tmp_path: Path) -> None:
    """Slower than the deadline for small bodies, but at twice the floor."""
    body = chat(user="x" * 80_000)
    whole = request_bytes(body, headers="connection: close\r\n")
    pieces = (whole[start : start + 3200] for start in range(0, len(whole), 3200))
    limits = WireLimits(head_s=0.8, body_s=1.0, body_rate_floor=16 * 1024)
    async with ScriptedBackend().serving() as backend, gateway(tmp_path, [backend], wire=limits) as process:
        began_s = time.monotonic()
        async with raw_client(process) as client, sending(client, pieces):
            assert (await client.to_end()).startswith(b"HTTP/1.1 200 ")
        assert time.monotonic() - began_s > limits.body_s
        assert backend.requests[0].json["user"] == body["user"]


@pytest.mark.parametrize("headers", ["", "connection: close\r\n"])
async def test_p24_a_whole_answer_that_nobody_reads_is_given_up(tmp_path: Path, headers: str) -> None:
    async def big(request: Received) -> None:
        await request.answer(200, b'{"x":"' + b"y" * 12 * MEGABYTE + b'"}')

    async with ScriptedBackend(big).serving() as backend, gateway(tmp_path, [backend], wire=LIMITS) as process:
        connections = process.listeners[0].server_state.connections
        async with raw_client(process, receive_buffer_bytes=4096) as client:
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
            await client.send(request_bytes(chat(), headers=headers))
            await eventually(lambda: sample(process, "headrace_requests_total", outcome="ok") == 1)
            assert len(connections) == 1
            await eventually(lambda: len(connections) == 0, 3 * LIMITS.unread_s + LATE_S)
        assert at_rest(process)


async def test_p24_a_whole_answer_that_is_read_slowly_arrives(tmp_path: Path) -> None:
    async def big(request: Received) -> None:
        await request.answer(200, b'{"x":"' + b"y" * 8 * MEGABYTE + b'"}')

    async with (
        ScriptedBackend(big).serving() as backend,
        gateway(tmp_path, [backend], wire=LIMITS) as process,
        raw_client(process, receive_buffer_bytes=4096) as client,
    ):
        await client.send(request_bytes(chat(), headers="connection: close\r\n"))
        size, began_s = 0, time.monotonic()
        while part := await client.reader.read(2**17):
            size += len(part)
            await asyncio.sleep(0.03)
        assert size > 8 * MEGABYTE
        assert time.monotonic() - began_s > LIMITS.unread_s + 1.0  # longer than it lingers, and than it bears silence


async def test_p24_no_more_connections_than_agreed(tmp_path: Path) -> None:
    limits = WireLimits(max_connections=10, head_s=30)
    async with ScriptedBackend().serving() as backend, gateway(tmp_path, [backend], wire=limits) as process:
        async with contextlib.AsyncExitStack() as held:
            silent = [await held.enter_async_context(raw_client(process)) for _ in range(10)]
            await eventually(lambda: len(process.listeners[0].server_state.connections) == 10)
            for _ in range(3):
                async with raw_client(process) as client:
                    raw = await client.to_end()
                assert raw.startswith(b"HTTP/1.1 503 ")
                assert b"retry-after: 1\r\n" in raw
                assert b"connection: close\r\n" in raw
            silent[0].leave()
            await eventually(lambda: len(process.listeners[0].server_state.connections) == 9)
            async with raw_client(process) as client:
                await client.send(GOOD)
                assert (await client.to_end()).endswith(b"0\r\n\r\n")
        assert len(backend.requests) == 1


def test_connections_leave_files_for_the_backends() -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = WireLimits(max_connections=10**9).within_open_files()
    assert limits.max_connections * 2 <= soft or soft == resource.RLIM_INFINITY
    assert WireLimits(max_connections=3).within_open_files().max_connections == 3


# --- figure H at the size of a test


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def memory_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / MEGABYTE


async def good_traffic(process: Running, requests: int) -> list[float]:
    """Seconds that each of so many streamed requests took, four at a time."""
    took_s: list[float] = []

    async def one_after_another() -> None:
        for _ in range(requests // 4):
            began_s = time.monotonic()
            async with raw_client(process) as client:
                await client.send(GOOD)
                raw = await client.to_end(30)
            took_s.append(time.monotonic() - began_s)
            assert raw.endswith(b"0\r\n\r\n")

    await asyncio.gather(*[one_after_another() for _ in range(4)])
    return sorted(took_s)


async def test_figure_h_slow_and_greedy_peers_do_not_slow_the_good(tmp_path: Path) -> None:
    """200 slow senders of four kinds, and 40 clients that ask for long streams and do not read them."""

    async def script(request: Received) -> None:
        if request.json.get("user") != "greedy":
            await answer_hello(request)
            return
        await request.write(SSE_HEAD)
        for _ in range(20 * MEGABYTE // len(PIECE)):
            await request.chunk(PIECE)

    kinds = ("silent", "header upon header", "body by the byte", "chunks of a byte")
    patient = WireLimits(head_s=20, body_s=20)
    async with (
        ScriptedBackend(script).serving() as backend,
        gateway(tmp_path, [backend], wire=patient, timeouts={"total_s": 60}) as process,
    ):
        await good_traffic(process, 40)
        calm_s = await good_traffic(process, 200)
        files, memory = open_files(), memory_mb()
        async with contextlib.AsyncExitStack() as held:
            for number in range(200):
                client = await held.enter_async_context(raw_client(process))
                await held.enter_async_context(sending(client, SLOW_SENDERS[kinds[number % 4]][0](), tick_s=1.0))
            for _ in range(40):
                client = await held.enter_async_context(raw_client(process, receive_buffer_bytes=4096))
                client.writer.transport.pause_reading()  # type: ignore[attr-defined]
                await client.send(request_bytes(chat(stream=True, user="greedy")))
            await eventually(lambda: sum(b"greedy" in request.body for request in backend.requests) == 40, 10)
            await asyncio.sleep(0.3)
            pressed_s = await good_traffic(process, 200)
            grown_mb = memory_mb() - memory
        await eventually(lambda: at_rest(process), 10)
        assert sample(process, "headrace_requests_total", outcome="ok") == 440
        assert sample(process, "headrace_requests_total", outcome="client_closed") == 40 + 100
        backend.requests.clear()
        gc.collect()
        await eventually(lambda: open_files() <= files + 5)
    calm_p99_s, pressed_p99_s = calm_s[-3], pressed_s[-3]
    print(f"p99 {calm_p99_s * 1e3:.1f} ms calm, {pressed_p99_s * 1e3:.1f} ms pressed; memory +{grown_mb:.0f} MB")
    assert pressed_p99_s < 10 * calm_p99_s + 0.1  # clients, backend and gateway share one loop here
    assert grown_mb < 200
