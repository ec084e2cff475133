"""P12: a comment now and then during a long silence, only where it was asked for, and what it costs."""

import asyncio
from pathlib import Path

import pytest

from router.path.relay import HEARTBEAT
from tests.gateway_stack import chat, gateway
from tests.raw_client import at_rest, eventually, raw_client, raw_exchange, request_bytes, sample
from tests.scripted_backend import SSE_HEAD, Received, ScriptedBackend, answer_hello, completion, delta, event

pytestmark = pytest.mark.anyio
EVERY_S = 0.1
BEATING = {"heartbeat_s": EVERY_S}
STREAM = request_bytes(chat(stream=True), headers="connection: close\r\n")


async def long_prefill(request: Received) -> None:
    if not request.json.get("stream"):
        await asyncio.sleep(5 * EVERY_S)
        await request.answer(200, completion())
        return
    await request.write(SSE_HEAD)
    await asyncio.sleep(5.5 * EVERY_S)
    await request.chunk(event(delta("a")))
    await asyncio.sleep(2.5 * EVERY_S)
    await request.chunk(event(delta("b", finish="stop")) + b"data: [DONE]\n\n")
    await asyncio.sleep(3 * EVERY_S)
    await request.write(b"0\r\n\r\n")


def body_of(raw: bytes) -> bytes:
    """The body with its chunks joined; they are small here."""
    assert raw.endswith(b"0\r\n\r\n")
    parts = raw.partition(b"\r\n\r\n")[2].split(b"\r\n")
    return b"".join(parts[1::2])


async def test_p12_by_default_there_is_none(tmp_path: Path) -> None:
    async with ScriptedBackend(long_prefill).serving() as backend, gateway(tmp_path, [backend]) as process:
        assert HEARTBEAT not in await raw_exchange(process, STREAM)


async def test_p12_during_a_long_prefill_and_never_behind_done(tmp_path: Path) -> None:
    async with (
        ScriptedBackend(long_prefill).serving() as backend,
        gateway(tmp_path, [backend], timeouts=BEATING) as process,
    ):
        body = body_of(await raw_exchange(process, STREAM))
        beats = body.count(HEARTBEAT)
        assert 2 <= beats <= 6
        assert body.startswith(HEARTBEAT * beats + b"data: ")  # and none between tokens
        assert body.endswith(b"data: [DONE]\n\n")
        await eventually(lambda: at_rest(process))
        assert sample(process, "headrace_requests_total", outcome="ok") == 1
        assert sample(process, "headrace_time_to_first_token_seconds_sum") > 5 * EVERY_S  # a comment is no token


async def test_p12_never_into_a_whole_answer(tmp_path: Path) -> None:
    async with (
        ScriptedBackend(long_prefill).serving() as backend,
        gateway(tmp_path, [backend], timeouts=BEATING) as process,
    ):
        raw = await raw_exchange(process, request_bytes(chat(), headers="connection: close\r\n"))
        assert HEARTBEAT not in raw
        assert b"transfer-encoding" not in raw


async def test_p12_never_inside_an_event(tmp_path: Path) -> None:
    whole = event(delta("abc", finish="stop"))

    async def dawdles(request: Received) -> None:
        await request.write(SSE_HEAD)
        await request.chunk(whole[:20])
        await asyncio.sleep(3 * EVERY_S)
        await request.chunk(whole[20:] + b"data: [DONE]\n\n")
        await request.write(b"0\r\n\r\n")

    async with ScriptedBackend(dawdles).serving() as backend, gateway(tmp_path, [backend], timeouts=BEATING) as process:
        body = body_of(await raw_exchange(process, STREAM))
    assert body.replace(HEARTBEAT, b"").replace(b"chat-large", b"served") == whole + b"data: [DONE]\n\n"
    assert body.startswith(HEARTBEAT)


async def test_p12_no_heartbeat_before_the_backend_has_taken_the_request(tmp_path: Path) -> None:
    """Its status is not known yet, so another backend may still answer, and so may an error."""

    async def late_503(request: Received) -> None:
        await asyncio.sleep(3 * EVERY_S)
        await request.answer(503, {})

    async with (
        ScriptedBackend(late_503).serving() as one,
        ScriptedBackend().serving() as two,
        gateway(tmp_path, [one, two], timeouts=BEATING) as process,
    ):
        for _ in range(2):
            raw = await raw_exchange(process, STREAM)
            assert raw.startswith(b"HTTP/1.1 200 ")
            assert HEARTBEAT not in raw
        assert len(one.requests) >= 1


async def test_p12_what_it_forfeits_a_failure_behind_it_is_told_and_not_retried(tmp_path: Path) -> None:
    async def dies(request: Received) -> None:
        await request.write(SSE_HEAD)
        await asyncio.sleep(2.5 * EVERY_S)
        request.reset()

    async with (
        ScriptedBackend(dies).serving() as one,
        ScriptedBackend(dies).serving() as two,
        gateway(tmp_path, [one, two], timeouts=BEATING) as process,
    ):
        raw = await raw_exchange(process, STREAM)
        assert raw.startswith(b"HTTP/1.1 200 ")
        assert b'"code":"upstream_truncated"' in raw
        assert not raw.endswith(b"0\r\n\r\n")
        assert len(one.requests) + len(two.requests) == 1
        await eventually(lambda: at_rest(process))


async def test_p12_it_does_not_keep_a_silent_backend_alive(tmp_path: Path) -> None:
    async def silent(request: Received) -> None:
        await request.write(SSE_HEAD)
        await request.until_gone()

    timeouts = {**BEATING, "first_token_s": 5 * EVERY_S}
    async with ScriptedBackend(silent).serving() as backend, gateway(tmp_path, [backend], timeouts=timeouts) as process:
        raw = await raw_exchange(process, STREAM)
        assert b'"code":"upstream_timeout"' in raw
        assert 2 <= raw.count(HEARTBEAT) <= 6
        await asyncio.wait_for(backend.requests[0].gone.wait(), 2)
        await eventually(lambda: at_rest(process))


async def test_p12_a_client_that_leaves_between_beats_takes_the_backend_along(tmp_path: Path) -> None:
    async def silent(request: Received) -> None:
        await request.write(SSE_HEAD)
        await request.until_gone()

    async with ScriptedBackend(silent).serving() as backend, gateway(tmp_path, [backend], timeouts=BEATING) as process:
        async with raw_client(process) as client:
            await client.send(STREAM)
            await client.until(HEARTBEAT)
        await asyncio.wait_for(backend.requests[0].gone.wait(), 1)
        await eventually(lambda: at_rest(process))
        backend.script = answer_hello
        assert HEARTBEAT not in await raw_exchange(process, STREAM)
