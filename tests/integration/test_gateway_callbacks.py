"""What is peculiar to a path of callbacks: a bug in one, a body that takes turns, a stream that parses nothing."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from router.app import Running
from router.path import attempt, call
from router.path.call import LARGE_BODY_BYTES
from tests.gateway_stack import ALIAS, chat, client_of, gateway
from tests.raw_client import CHAT_PATH, at_rest, eventually, raw_client, request_bytes, sample
from tests.scripted_backend import SSE_HEAD, Received, ScriptedBackend, answer_hello, delta, event

pytestmark = pytest.mark.anyio
LARGE = chat(model=ALIAS, user="x" * (LARGE_BODY_BYTES + 1))


# --- a bug ----------------------------------------------------------------------------------------------------------


def broken(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError


async def settled(process: Running) -> None:
    await eventually(lambda: at_rest(process))
    assert sample(process, "headrace_requests_total") == sample(process, "headrace_requests_total",
                                                                outcome="internal_error")


@pytest.mark.parametrize("where", ["Attempt.on_head", "Attempt.on_body", "Attempt._take_whole", "Attempt.on"])
async def test_a_bug_behind_the_backend_is_a_500_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr(attempt.Attempt, where.rpartition(".")[2], broken)
    async with (
        ScriptedBackend().serving() as backend,
        gateway(tmp_path, [backend]) as process,
        client_of(process) as client,
    ):
        answer = await client.post(CHAT_PATH, json=chat())
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
        await settled(process)
        assert (await client.get("/health")).status_code == 200


async def test_a_bug_while_the_next_backend_is_chosen_is_a_500(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.path.dispatch.next_attempt", broken)

    async def busy(request: Received) -> None:
        await request.answer(503, {})

    async with (
        ScriptedBackend(busy).serving() as backend,
        gateway(tmp_path, [backend]) as process,
        client_of(process) as client,
    ):
        assert (await client.post(CHAT_PATH, json=chat())).status_code == 500
        await settled(process)


async def test_a_bug_in_mid_stream_is_no_clean_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = asyncio.Event()

    async def script(request: Received) -> None:
        await request.write(SSE_HEAD)
        await request.chunk(event(delta("a")))
        await go_on.wait()
        await request.chunk(event(delta("b")))
        await request.until_gone()

    async with (
        ScriptedBackend(script).serving() as backend,
        gateway(tmp_path, [backend]) as process,
        raw_client(process) as client,
    ):
        await client.send(request_bytes(chat(stream=True)))
        await client.until(b"\n\n")
        monkeypatch.setattr("router.path.relay.EventRelay.body", broken)
        go_on.set()
        rest = await client.to_end()
        assert not rest.endswith(b"0\r\n\r\n")
        await asyncio.wait_for(backend.requests[0].gone.wait(), 1)
        await eventually(lambda: at_rest(process))


# --- a large body ---------------------------------------------------------------------------------------------------


async def test_a_large_body_gives_others_a_turn_between_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns: list[str] = []

    def noted(name: str, step: Any) -> Any:
        def run(*args: Any) -> Any:
            turns.append(name)
            asyncio.get_running_loop().call_soon(turns.append, "others")
            return step(*args)

        return run

    for name in ("_read", "_run"):
        monkeypatch.setattr(call.InferenceCall, name, noted(name, getattr(call.InferenceCall, name)))
    async with (
        ScriptedBackend(answer_hello).serving() as backend,
        gateway(tmp_path, [backend]) as process,
        client_of(process) as client,
    ):
        assert (await client.post(CHAT_PATH, json=LARGE)).status_code == 200
        assert turns == ["_read", "others", "_run", "others"]
        turns.clear()
        assert (await client.post(CHAT_PATH, json=chat())).status_code == 200
        assert turns == ["_read", "_run", "others", "others"]
        assert [request.json["user"] for request in backend.requests[:1]] == [LARGE["user"]]


async def test_a_large_body_that_is_none_is_refused(tmp_path: Path) -> None:
    async with ScriptedBackend().serving() as backend, gateway(tmp_path, [backend]) as process:
        async with client_of(process) as client:
            for body in (json.dumps(LARGE)[:-1], json.dumps({**LARGE, "model": "nobody"})):
                answer = await client.post(CHAT_PATH, content=body, headers={"content-type": "application/json"})
                assert answer.status_code in (400, 404)
        assert backend.requests == []
        await eventually(lambda: at_rest(process))


async def test_p01_a_client_that_leaves_between_the_steps_is_not_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[call.InferenceCall] = []
    read = call.InferenceCall._read

    def read_and_leave(self: call.InferenceCall, body: bytes) -> Any:
        calls.append(self)
        asyncio.get_running_loop().call_soon(self._owner.transport.abort)
        return read(self, body)

    monkeypatch.setattr(call.InferenceCall, "_read", read_and_leave)
    # uvloop tells of a lost connection in the turn after the next; so does the step wait for it here
    serve = call.InferenceCall._serve_in_turns

    def later(self: call.InferenceCall, *args: Any) -> None:
        if calls:
            asyncio.get_running_loop().call_later(0.05, serve, self, *args)
        else:
            serve(self, *args)

    monkeypatch.setattr(call.InferenceCall, "_serve_in_turns", later)
    async with ScriptedBackend().serving() as backend, gateway(tmp_path, [backend]) as process:
        async with raw_client(process) as client:
            await client.send(request_bytes(LARGE))
            await client.to_end()
        await asyncio.sleep(0.1)
        assert backend.requests == []
        await eventually(lambda: at_rest(process))
        assert sample(process, "headrace_requests_total", outcome="client_closed") == 1


# --- a stream that is under way -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sent", "kept"), [(b"", True), (b"\r\n\r\n", True), (b"GET / HTTP/1.1\r\n", False)])
async def test_what_comes_during_a_stream_is_no_request(tmp_path: Path, sent: bytes, kept: bool) -> None:
    """Blank lines mean nothing (RFC 9112 §2.2); anything else closes the connection behind the answer."""
    go_on = asyncio.Event()

    async def script(request: Received) -> None:
        await request.write(SSE_HEAD)
        await request.chunk(event(delta("a")))
        await go_on.wait()
        await request.chunk(event(delta("b", finish="stop")) + b"data: [DONE]\n\n")
        await request.write(b"0\r\n\r\n")

    async with (
        ScriptedBackend(script).serving() as backend,
        gateway(tmp_path, [backend]) as process,
        raw_client(process) as client,
    ):
        for number in (1, 2):
            await client.send(request_bytes(chat(stream=True)))
            await client.until(b"\n\n")
            await asyncio.sleep(0.02)  # the stream has settled in
            await client.send(sent)
            await asyncio.sleep(0.02)
            go_on.set()
            assert await client.until(b"0\r\n\r\n")
            go_on.clear()
            assert len(backend.requests) == number
            if not kept:
                assert await client.to_end() == b""
                break
        await eventually(lambda: at_rest(process))


# --- books of time and retries --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_waiting_for_backends_is_no_overhead_of_the_gateway(tmp_path: Path, stream: bool) -> None:
    pause_s = 0.4

    async def slow_503(request: Received) -> None:
        await asyncio.sleep(pause_s)
        await request.answer(503, {})

    async def slow(request: Received) -> None:
        await asyncio.sleep(pause_s)
        if not stream:
            await answer_hello(request)
            return
        await request.write(SSE_HEAD)
        await asyncio.sleep(pause_s)
        await request.chunk(event(delta("a", finish="stop")) + b"data: [DONE]\n\n")
        await request.write(b"0\r\n\r\n")

    async with (
        ScriptedBackend(slow_503).serving() as busy,
        ScriptedBackend(slow).serving() as good,
        gateway(tmp_path, [busy, good]) as process,
        client_of(process) as client,
    ):
        answers = [await client.post(CHAT_PATH, json=chat(stream=stream)) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [200, 200]
        assert busy.requests  # one of the two had two attempts
        for answer in answers:
            assert float(answer.headers["x-headrace-overhead-ms"]) < pause_s * 1e3 / 2


async def test_each_first_attempt_pays_into_the_retry_budget(tmp_path: Path) -> None:
    async with (
        ScriptedBackend().serving() as backend,
        gateway(tmp_path, [backend]) as process,
        client_of(process) as client,
    ):
        dispatcher = process.gateway.dispatcher
        before = dispatcher._retry_budget_for(0.5, 3.0)
        for _ in range(4):
            assert (await client.post(CHAT_PATH, json=chat())).status_code == 200
        after = dispatcher._retry_budget_for(0.25, 4.0)
        assert after.tokens == min(after.capacity, before.tokens + 4 * 0.5)
        assert (after.ratio, after.floor_per_s) == (0.25, 4.0)
        assert dispatcher._retry_budget_for(0.25, 4.0).tokens == after.tokens
