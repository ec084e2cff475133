"""A client that reads slowly slows its own backend, fills no memory, and holds the backend no longer than agreed."""

import asyncio
from pathlib import Path

import pytest

from tests.gateway_stack import chat, gateway
from tests.raw_client import at_rest, eventually, raw_client, request_bytes, sample
from tests.scripted_backend import SSE_HEAD, Received, ScriptedBackend, delta, event

pytestmark = pytest.mark.anyio
PIECE = event(delta("x" * 32_000))
TOTAL_BYTES = 48 * 1024 * 1024


class Flood:
    """A backend that writes as fast as it may."""

    def __init__(self) -> None:
        self.sent = 0

    async def __call__(self, request: Received) -> None:
        await request.write(SSE_HEAD)
        while self.sent < TOTAL_BYTES:
            await request.chunk(PIECE)
            self.sent += len(PIECE)
        await request.chunk(event(delta("", finish="stop")) + b"data: [DONE]\n\n")
        await request.write(b"0\r\n\r\n")

    async def stands(self) -> int:
        """What it has sent once it can send no more."""
        before = -1
        while before != self.sent:
            before = self.sent
            await asyncio.sleep(0.2)
        return self.sent


async def test_the_backend_waits_for_a_client_that_does_not_read(tmp_path: Path) -> None:
    flood = Flood()
    async with (
        ScriptedBackend(flood).serving() as backend,
        gateway(tmp_path, [backend], timeouts={"inter_token_s": 0.3}) as process,
        raw_client(process, receive_buffer_bytes=65536) as client,
    ):
        await client.send(request_bytes(chat(stream=True), headers="connection: close\r\n"))
        await client.until(b"\r\n\r\n")
        assert await flood.stands() < TOTAL_BYTES / 2  # kernel buffers, and little of ours
        await asyncio.sleep(0.5)  # longer than the time between tokens: the silence is not the backend's
        raw = await client.to_end(30)
        assert raw.endswith(b"0\r\n\r\n")
        assert raw.count(b"data: {") == raw.count(b'"finish_reason"') >= TOTAL_BYTES // len(PIECE)
        assert b"upstream_" not in raw
        await eventually(lambda: at_rest(process))
        assert sample(process, "headrace_requests_total", outcome="ok") == 1
        assert process.gateway.fleet.backends["b0"].failed_requests == 0


async def test_a_client_that_never_reads_holds_the_backend_no_longer_than_the_total(tmp_path: Path) -> None:
    flood = Flood()
    async with (
        ScriptedBackend(flood).serving() as backend,
        gateway(tmp_path, [backend], timeouts={"total_s": 0.5}) as process,
        raw_client(process, receive_buffer_bytes=65536) as client,
    ):
        await client.send(request_bytes(chat(stream=True)))
        await eventually(lambda: bool(backend.requests))
        await asyncio.wait_for(backend.requests[0].gone.wait(), 5)
        await eventually(lambda: at_rest(process))
        assert sample(process, "headrace_requests_total", outcome="client_closed") == 1
        assert process.gateway.fleet.backends["b0"].failed_requests == 0


async def test_others_are_served_meanwhile(tmp_path: Path) -> None:
    flood = Flood()

    async def script(request: Received) -> None:
        if request.json.get("user") == "slow":
            await flood(request)
        else:
            await request.events(delta("a", finish="stop"))

    async with (
        ScriptedBackend(script).serving() as backend,
        gateway(tmp_path, [backend]) as process,
        raw_client(process, receive_buffer_bytes=65536) as slow,
    ):
        await slow.send(request_bytes(chat(stream=True, user="slow")))
        await flood.stands()
        for _ in range(20):
            async with raw_client(process) as client:
                await client.send(request_bytes(chat(stream=True), headers="connection: close\r\n"))
                assert (await client.to_end()).endswith(b"0\r\n\r\n")
        slow.leave()
        await eventually(lambda: at_rest(process))
