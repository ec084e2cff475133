"""A client that leaves, in each phase and each way: the backend is left too, the books are even, nobody is blamed."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from backends.catalog.health import HealthState
from router.app import Running
from tests.gateway_stack import chat, client_of, gateway
from tests.integration.test_gateway_timeouts import unconnectable
from tests.raw_client import CHAT_PATH, at_rest, eventually, raw_client, request_bytes, sample
from tests.scripted_backend import SSE_HEAD, Received, ScriptedBackend, answer_hello, delta, event

pytestmark = pytest.mark.anyio
__all__ = ["unconnectable"]
JSON_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n"

# What the backend has written by the time the client leaves.
PHASES: dict[str, tuple[bool, bytes]] = {
    "stream_waiting_for_the_head": (True, b""),
    "stream_before_the_first_token": (True, SSE_HEAD),
    "stream_after_a_comment": (True, SSE_HEAD + b"8\r\n: ping\n\n\r\n"),
    "stream_in_mid": (True, SSE_HEAD + b"%x\r\n%s\r\n" % (len(event(delta("a"))), event(delta("a")))),
    "stream_before_done": (
        True,
        SSE_HEAD + b"%x\r\n%s\r\n" % (len(event(delta("a", finish="stop"))), event(delta("a", finish="stop"))),
    ),
    "stream_error_body": (True, b"HTTP/1.1 500 Oops\r\ncontent-length: 100\r\n\r\n{"),
    "whole_waiting_for_the_head": (False, b""),
    "whole_before_the_body": (False, JSON_HEAD),
    "whole_in_mid": (False, JSON_HEAD + b"{"),
}


def blameless(process: Running, name: str = "b0") -> bool:
    live = process.gateway.fleet.backends[name]
    return (
        (live.failed_requests, live.served_requests) == (0, 0)
        and live.health.state in (HealthState.UNKNOWN, HealthState.HEALTHY)
        and live.ttft_ewma_s is None
        and live.drift == 1.0
        and live.backoff_until_s == 0.0
    )


WATCHED: dict[str, Any] = {
    "hedging": {"enabled": True},
    "latency_classes": [{"name": "default", "ttft_s": 60.0, "e2e_s": 60.0}],
}
"""Each request has a timer at the end of which it might be hedged."""


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(
    ("reset", "sections"), [(False, {}), (True, {}), (True, WATCHED)], ids=["close", "reset", "hedging"]
)
async def test_p01_p02_the_backend_is_left_when_the_client_leaves(
    tmp_path: Path, phase: str, reset: bool, sections: dict[str, Any]
) -> None:
    stream, written = PHASES[phase]
    reached = asyncio.Event()

    async def script(request: Received) -> None:
        await request.write(written)
        reached.set()
        await request.until_gone()

    async with ScriptedBackend(script).serving() as backend, gateway(tmp_path, [backend], **sections) as process:
        for number in (1, 2, 3):  # three would take a backend out, were they its failures
            reached.clear()
            async with raw_client(process) as client:
                await client.send(request_bytes(chat(stream=stream)))
                await reached.wait()
                if b"data:" in written:
                    await client.until(b"data:")
                else:
                    await asyncio.sleep(0.02)
                client.leave(reset=reset)
            await asyncio.wait_for(backend.requests[-1].gone.wait(), 1)
            await eventually(lambda: at_rest(process), 1)
            assert sample(process, "headrace_requests_total", outcome="client_closed", status="499") == number
            assert sample(process, "headrace_attempts_total", outcome="client_gone") == number
        assert sample(process, "headrace_requests_total") == 3
        assert sample(process, "headrace_retries_total") == 0
        assert blameless(process)


async def test_a_client_that_closes_its_sending_side_counts_as_gone(tmp_path: Path) -> None:
    """As with nginx by default: by TCP alone it may as well have closed altogether."""
    reached = asyncio.Event()

    async def script(request: Received) -> None:
        reached.set()
        await request.until_gone()

    async with (
        ScriptedBackend(script).serving() as backend,
        gateway(tmp_path, [backend]) as process,
        raw_client(process) as client,
    ):
        await client.send(request_bytes(chat()))
        await reached.wait()
        client.writer.write_eof()
        assert await client.to_end() == b""
        await asyncio.wait_for(backend.requests[-1].gone.wait(), 1)
        await eventually(lambda: at_rest(process), 1)
        assert sample(process, "headrace_requests_total", outcome="client_closed", status="499") == 1
        assert blameless(process)


async def left(process: Running, data: bytes, ready: Callable[[], bool]) -> None:
    async with raw_client(process) as client:
        sending = asyncio.create_task(client.send(data))
        await eventually(ready)
        await asyncio.sleep(0.02)
        client.leave(reset=True)
        await asyncio.gather(sending, return_exceptions=True)
    await eventually(lambda: at_rest(process), 1)
    assert sample(process, "headrace_requests_total", outcome="client_closed") == 1
    assert blameless(process)


async def test_p01_while_connecting(tmp_path: Path, unconnectable: str) -> None:
    rare = {"interval_s": 300, "timeout_s": 20}  # the probe hangs as well, and its verdict would come in between
    async with gateway(tmp_path, [{"url": unconnectable}], timeouts={"connect_s": 20}, poll=rare) as process:
        books = process.gateway.fleet.backends["b0"].books
        await left(process, request_bytes(chat()), lambda: books.requests == 1)


async def test_p01_while_the_request_is_sent(tmp_path: Path) -> None:
    connected, gone = asyncio.Event(), asyncio.Event()

    async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not (await reader.readuntil(b"\r\n")).startswith(b"POST"):
            writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}")
            writer.close()
            return
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        connected.set()
        await asyncio.sleep(0.3)
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        try:
            while await reader.read(2**20):
                pass
        except ConnectionError:
            pass
        gone.set()
        writer.close()

    async with await asyncio.start_server(deaf, "127.0.0.1", 0, limit=2**16) as server:
        host, port = server.sockets[0].getsockname()
        async with gateway(tmp_path, [{"url": f"http://{host}:{port}"}]) as process:
            await left(process, request_bytes(chat(user="x" * 15_000_000)), connected.is_set)
            await asyncio.wait_for(gone.wait(), 2)


async def test_p01_while_its_own_body_comes(tmp_path: Path) -> None:
    async with ScriptedBackend().serving() as backend, gateway(tmp_path, [backend]) as process:
        whole = request_bytes(chat(user="x" * 1000))
        await left(process, whole[:-10], lambda: process.gateway.dispatcher.in_flight == 1)
        assert backend.requests == []


async def test_p01_between_attempts_the_next_is_not_made(tmp_path: Path) -> None:
    async def slow_503(request: Received) -> None:
        await request.write(b"HTTP/1.1 503 Busy\r\ncontent-length: 2\r\n\r\n{")
        await request.until_gone()

    async with (
        ScriptedBackend(slow_503).serving() as one,
        ScriptedBackend(slow_503).serving() as two,
        gateway(tmp_path, [one, two]) as process,
    ):
        await left(process, request_bytes(chat()), lambda: bool(one.requests or two.requests))
        assert len(one.requests) + len(two.requests) == 1


async def test_p02_a_client_that_left_costs_no_latency_statistics_and_the_next_is_served(tmp_path: Path) -> None:
    async def hang(request: Received) -> None:
        await request.until_gone()

    async with (
        ScriptedBackend(hang).serving() as backend,
        gateway(tmp_path, [backend]) as process,
        client_of(process) as client,
    ):
        async def leaver() -> None:
            async with raw_client(process) as raw:
                await raw.send(request_bytes(chat(stream=True)))
                await asyncio.sleep(0.05)
                raw.leave()

        await asyncio.gather(*[leaver() for _ in range(40)])
        await eventually(lambda: at_rest(process))
        assert sample(process, "headrace_requests_total", outcome="client_closed") == 40
        assert sample(process, "headrace_time_to_first_token_seconds_count") == 0
        assert blameless(process)
        backend.script = answer_hello
        assert (await client.post(CHAT_PATH, json=chat(stream=True))).status_code == 200


async def test_a_stop_ends_open_requests_and_says_so(tmp_path: Path) -> None:
    async def script(request: Received) -> None:
        if request.json.get("stream"):
            await request.write(SSE_HEAD)
            await request.chunk(event(delta("a")))
        await request.until_gone()

    async with ScriptedBackend(script).serving() as backend:
        async with (
            gateway(tmp_path, [backend], drain_s=1.0) as process,
            raw_client(process) as begun,
            raw_client(process) as waiting,
        ):
            await begun.send(request_bytes(chat(stream=True)))
            await begun.until(b"data:")
            await waiting.send(request_bytes(chat()))
            await eventually(lambda: len(backend.requests) == 2)
            for listener in process.listeners:
                listener.should_exit = True
            cut, refused = await asyncio.gather(begun.to_end(), waiting.to_end())
        assert not cut.endswith(b"0\r\n\r\n")
        assert refused.startswith(b"HTTP/1.1 503 ")
        assert b'"code":"no_backend_available"' in refused
        for request in backend.requests:
            await asyncio.wait_for(request.gone.wait(), 2)
        assert at_rest(process)
        assert sample(process, "headrace_requests_total", outcome="client_closed") == 0
        assert sample(process, "headrace_requests_total", outcome="truncated") == 1
        assert sample(process, "headrace_requests_total", outcome="no_backend") == 1
