"""Each phase of a request has its time; what is told, and to whose account it goes, depends on the phase."""

import asyncio
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gateway_stack import chat, client_of, gateway
from tests.raw_client import CHAT_PATH, at_rest, eventually, raw_client, request_bytes, sample
from tests.scripted_backend import SSE_HEAD, Received, ScriptedBackend, delta, event

pytestmark = pytest.mark.anyio
ONCE = {"max_attempts": 1}


@pytest.fixture
def unconnectable() -> Iterator[str]:
    """The URL of a listener whose queue is full: connecting to it neither succeeds nor fails."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        waiting = []
        for _ in range(4):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
            waiting.append(filler)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        for filler in waiting:
            filler.close()


async def silent(request: Received) -> None:
    await request.until_gone()


async def test_connecting(tmp_path: Path, unconnectable: str) -> None:
    rare = {"interval_s": 300, "timeout_s": 20}
    async with (
        gateway(tmp_path, [{"url": unconnectable}], timeouts={"connect_s": 0.2}, retries=ONCE, poll=rare) as process,
        client_of(process) as client,
    ):
        began = asyncio.get_running_loop().time()
        answer = await client.post(CHAT_PATH, json=chat())
        assert asyncio.get_running_loop().time() - began < 3
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "upstream_error")
        assert sample(process, "headrace_attempts_total", outcome="connect_error") == 1
        assert at_rest(process)


@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 200 OK\r\n", SSE_HEAD, SSE_HEAD + b"8\r\n: ping\n\n\r\n"])
async def test_the_first_token(tmp_path: Path, sent: bytes) -> None:
    async def script(request: Received) -> None:
        await request.write(sent)
        await request.until_gone()

    async with (
        ScriptedBackend(script).serving() as backend,
        gateway(tmp_path, [backend], timeouts={"first_token_s": 0.2}, retries=ONCE) as process,
        client_of(process) as client,
    ):
        answer = await client.post(CHAT_PATH, json=chat(stream=True))
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "upstream_timeout")
        assert "first token" in answer.json()["error"]["message"]
        assert "ping" not in answer.text
        await asyncio.wait_for(backend.requests[0].gone.wait(), 2)
        assert sample(process, "headrace_attempts_total", outcome="timeout") == 1
        assert sample(process, "headrace_requests_total", outcome="timeout", status="504") == 1
        assert at_rest(process)


@pytest.mark.parametrize("ping", [False, True])
async def test_between_tokens_comments_are_no_progress(tmp_path: Path, ping: bool) -> None:
    async def script(request: Received) -> None:
        await request.write(SSE_HEAD)
        for _ in range(3):
            await request.chunk(event(delta("a")))
        while ping and not request.gone.is_set():
            await request.chunk(b": ping\n\n")
            await asyncio.sleep(0.05)
        await request.until_gone()

    async with (
        ScriptedBackend(script).serving() as backend,
        gateway(tmp_path, [backend], timeouts={"inter_token_s": 0.3}) as process,
        raw_client(process) as client,
    ):
        await client.send(request_bytes(chat(stream=True)))
        raw = await client.to_end()
        assert raw.startswith(b"HTTP/1.1 200")
        assert b'"code":"upstream_timeout"' in raw
        assert not raw.endswith(b"0\r\n\r\n")  # no client takes it for whole
        await asyncio.wait_for(backend.requests[0].gone.wait(), 2)
        await eventually(lambda: at_rest(process))
        assert sample(process, "headrace_requests_total", outcome="timeout", status="200") == 1
        assert process.gateway.fleet.backends["b0"].failed_requests == 1


async def test_a_stream_of_events_without_text_is_progress(tmp_path: Path) -> None:
    empty = delta("", token_ids=[1])

    async def script(request: Received) -> None:
        await request.write(SSE_HEAD)
        for _ in range(12):
            await request.chunk(event(empty))
            await asyncio.sleep(0.05)
        await request.chunk(event(delta("", finish="stop")) + b"data: [DONE]\n\n")
        await request.write(b"0\r\n\r\n")

    timeouts = {"first_token_s": 0.3, "inter_token_s": 0.4}  # the stream takes longer than either
    async with (
        ScriptedBackend(script).serving() as backend,
        gateway(tmp_path, [backend], timeouts=timeouts) as process,
        client_of(process) as client,
    ):
        answer = await client.post(CHAT_PATH, json=chat(stream=True))
        assert answer.content.count(b"data: {") == 13
        assert answer.content.endswith(b"[DONE]\n\n")
        assert sample(process, "headrace_requests_total", outcome="ok") == 1


@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{"])
async def test_the_total_of_a_whole_answer(tmp_path: Path, sent: bytes) -> None:
    async def script(request: Received) -> None:
        await request.write(sent)
        await request.until_gone()

    timeouts = {"first_token_s": 0.1, "inter_token_s": 0.1, "total_s": 0.5}
    async with (
        ScriptedBackend(script).serving() as backend,
        gateway(tmp_path, [backend], timeouts=timeouts) as process,
        client_of(process) as client,
    ):
        began = asyncio.get_running_loop().time()
        answer = await client.post(CHAT_PATH, json=chat())
        assert asyncio.get_running_loop().time() - began > 0.4  # one answer has no first token to be late with
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "upstream_timeout")
        await asyncio.wait_for(backend.requests[0].gone.wait(), 2)
        assert at_rest(process)


async def test_the_total_of_a_stream(tmp_path: Path) -> None:
    async def script(request: Received) -> None:
        await request.write(SSE_HEAD)
        while not request.gone.is_set():
            await request.chunk(event(delta("a")))
            await asyncio.sleep(0.02)

    async with (
        ScriptedBackend(script).serving() as backend,
        gateway(tmp_path, [backend], timeouts={"total_s": 0.5}) as process,
        raw_client(process) as client,
    ):
        await client.send(request_bytes(chat(stream=True)))
        raw = await client.to_end()
        assert b'"code":"upstream_timeout"' in raw
        assert not raw.endswith(b"0\r\n\r\n")
        await asyncio.wait_for(backend.requests[0].gone.wait(), 2)
        await eventually(lambda: at_rest(process))


async def test_a_slow_error_body_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    async def script(request: Received) -> None:
        await request.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 100\r\n\r\n{")
        await request.until_gone()

    async with (
        ScriptedBackend(script).serving() as backend,
        gateway(tmp_path, [backend], timeouts={"inter_token_s": 0.2}, retries=ONCE) as process,
        client_of(process) as client,
    ):
        answer = await client.post(CHAT_PATH, json=chat(stream=True))
        assert answer.status_code in (502, 504)
        assert at_rest(process)


async def test_the_overhead_leaves_out_what_the_backend_took(tmp_path: Path) -> None:
    async def script(request: Received) -> None:
        await asyncio.sleep(0.2)
        if request.json.get("stream"):
            await request.write(SSE_HEAD)
            await asyncio.sleep(0.2)
            await request.chunk(b": ping\n\n")
            await asyncio.sleep(0.2)
            await request.chunk(event(delta("a", finish="stop")) + b"data: [DONE]\n\n")
            await request.write(b"0\r\n\r\n")
        else:
            raw: Any = json.dumps({"model": "served"}).encode()
            await request.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(raw))
            await asyncio.sleep(0.2)
            await request.write(raw)

    async with (
        ScriptedBackend(script).serving() as backend,
        gateway(tmp_path, [backend]) as process,
        client_of(process) as client,
    ):
        for stream in (False, True):
            answer = await client.post(CHAT_PATH, json=chat(stream=stream))
            assert float(answer.headers["x-headrace-overhead-ms"]) < 100
