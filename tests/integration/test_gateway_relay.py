"""What goes through: requests and answers byte for byte, but for the documented edits, however they come and end."""

import asyncio
import gzip
import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.gateway_stack import ALIAS, MODEL, chat, client_of, gateway
from tests.raw_client import CHAT_PATH, at_rest, eventually, raw_client, raw_exchange, request_bytes, sample
from tests.scripted_backend import SSE_HEAD, Received, ScriptedBackend, completion, delta, event

pytestmark = pytest.mark.anyio
DONE = b"data: [DONE]\n\n"
USAGE = {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}
USAGE_CHUNK = {**delta(""), "choices": [], "usage": USAGE}


def renamed(stream: bytes, name: str = MODEL) -> bytes:
    return stream.replace(b'"model": "served"', b'"model": "%s"' % name.encode())


async def test_a_whole_answer_has_the_clients_model_name_and_says_who_answered(tmp_path: Path) -> None:
    async with (
        ScriptedBackend().serving() as backend,
        gateway(tmp_path, [backend]) as process,
        client_of(process) as client,
    ):
        answer = await client.post(CHAT_PATH, json=chat(model=ALIAS), headers={"x-request-id": "mine-1"})
    assert answer.status_code == 200
    assert answer.json() == completion(model=ALIAS)
    assert answer.headers["x-headrace-backend"] == "b0"
    assert answer.headers["x-headrace-reason"] == "only candidate"
    assert float(answer.headers["x-headrace-overhead-ms"]) >= 0
    assert answer.headers["x-request-id"] == "mine-1"
    assert backend.requests[0].json == chat(model="served")


async def test_a_stream_is_relayed_byte_for_byte_but_for_the_model_name(tmp_path: Path) -> None:
    async with (
        ScriptedBackend().serving() as backend,
        gateway(tmp_path, [backend]) as process,
        client_of(process) as client,
    ):
        answer = await client.post(CHAT_PATH, json=chat(stream=True))
    assert answer.content == renamed(event(delta("hel")) + event(delta("lo", finish="stop")) + DONE)
    assert answer.headers["content-type"] == "text/event-stream"
    assert answer.headers["transfer-encoding"] == "chunked"


@pytest.mark.parametrize("asked", [None, False, True])
async def test_usage_is_always_counted_and_shown_to_whom_asked(tmp_path: Path, asked: bool | None) -> None:
    async def script(request: Received) -> None:
        await request.events(delta("hel"), delta("lo", finish="stop"), USAGE_CHUNK)

    async with (
        ScriptedBackend(script).serving() as backend,
        gateway(tmp_path, [backend]) as process,
        client_of(process) as client,
    ):
        options = {} if asked is None else {"stream_options": {"include_usage": asked}}
        answer = await client.post(CHAT_PATH, json=chat(stream=True, **options))
        assert (event(USAGE_CHUNK).replace(b"served", MODEL.encode()) in answer.content) == bool(asked)
        assert answer.content.endswith(DONE)
        assert backend.requests[0].json["stream_options"] == {"include_usage": True}
        await eventually(lambda: at_rest(process))
        assert sample(process, "headrace_tokens_total", kind="generated") == 2
        assert sample(process, "headrace_tokens_total", kind="prompt") == 7


STREAM = event(delta("漢🙂")) + event(delta("", finish="stop", usage=None)) + event(USAGE_CHUNK) + DONE


async def test_p03_p04_p05_tcp_segments_do_not_matter(tmp_path: Path) -> None:
    cuts = [1, 5, 9, 60, STREAM.index("漢".encode()) + 1, STREAM.index("🙂".encode()) + 2, STREAM.index(b"usage") + 9,
            STREAM.index(b"\n\n") + 1, len(STREAM) - 1]  # fmt: skip
    pieces: list[bytes] = []

    async def script(request: Received) -> None:
        await request.write(SSE_HEAD)
        for piece in pieces:
            await request.chunk(piece)
            await asyncio.sleep(0.002)
        await request.write(b"0\r\n\r\n")

    async with (
        ScriptedBackend(script).serving() as backend,
        gateway(tmp_path, [backend]) as process,
        client_of(process) as client,
    ):
        wanted = {"stream_options": {"include_usage": True}}
        for way in [*[[STREAM[:cut], STREAM[cut:]] for cut in cuts], [bytes([byte]) for byte in STREAM], [STREAM]]:
            pieces[:] = way
            answer = await client.post(CHAT_PATH, json=chat(stream=True, **wanted))
            assert answer.content == renamed(STREAM)
        await eventually(lambda: at_rest(process))
        assert sample(process, "headrace_requests_total", outcome="ok") == len(cuts) + 2


async def test_p06_rare_fields_survive(tmp_path: Path) -> None:
    logprobs = {"content": [{"token": "a", "logprob": -1e-7, "bytes": [97], "top_logprobs": []}]}
    last = delta("", finish="stop", service_tier="flex", prompt_token_ids=[1, 2], made_up={"a": [1.0]})
    last["choices"][0] |= {"logprobs": logprobs, "stop_reason": 151645, "delta": {"reasoning_content": "because"}}
    raw = b"id: 7\nevent: message\ndata:  " + json.dumps(last).encode().replace(b"1e-07", b"1E-7") + b"\n\n"

    async def script(request: Received) -> None:
        await request.write(SSE_HEAD)
        await request.chunk(raw + DONE)
        await request.write(b"0\r\n\r\n")

    async with (
        ScriptedBackend(script).serving() as backend,
        gateway(tmp_path, [backend]) as process,
        client_of(process) as client,
    ):
        answer = await client.post(CHAT_PATH, json=chat(stream=True, logprobs=True, top_logprobs=1))
        assert answer.content == renamed(raw + DONE)
        assert backend.requests[0].json["top_logprobs"] == 1


@pytest.mark.parametrize("how", ["closes", "stays_silent", "keeps_pinging"])
async def test_p07_an_error_in_mid_stream_ends_it_and_holds_nobody_else_up(tmp_path: Path, how: str) -> None:
    failed = event({"error": {"message": "slow down", "type": "rate_limit", "code": 429}})

    async def script(request: Received) -> None:
        if request.json.get("user") == "other":
            await request.write(SSE_HEAD)
            for _ in range(30):
                await request.chunk(event(delta("x")))
                await asyncio.sleep(0.02)
            await request.chunk(event(delta("", finish="stop")) + DONE)
            await request.write(b"0\r\n\r\n")
            return
        await request.write(SSE_HEAD)
        for _ in range(10):
            await request.chunk(event(delta("x")))
        await request.chunk(failed)
        while how == "keeps_pinging":
            await asyncio.sleep(0.1)
            await request.chunk(b": ping\n\n")
        if how == "stays_silent":
            await request.until_gone()

    loop = asyncio.get_running_loop()
    async with (
        ScriptedBackend(script).serving() as backend,
        gateway(tmp_path, [backend]) as process,
        client_of(process) as client,
    ):
        other = asyncio.create_task(client.post(CHAT_PATH, json=chat(stream=True, user="other")))
        began = loop.time()
        answer = await client.post(CHAT_PATH, json=chat(stream=True))
        assert loop.time() - began < 3
        assert answer.content.startswith(renamed(event(delta("x")) * 10) + failed)
        assert DONE not in answer.content
        if how != "closes":
            failing = next(request for request in backend.requests if "user" not in request.json)
            await asyncio.wait_for(failing.gone.wait(), 2)
        assert (await other).content.count(b"data: ") == 32
        await eventually(lambda: at_rest(process))
        assert sample(process, "headrace_requests_total", outcome="backend_error") == 1
        assert sample(process, "headrace_attempts_total", outcome="server_error") == 1


async def broken_off(client: httpx.AsyncClient, **members: Any) -> bytes:
    """The bytes of an answer that ends without its terminator."""
    received: list[bytes] = []

    async def read() -> None:
        async with client.stream("POST", CHAT_PATH, json=chat(stream=True, **members)) as answer:
            async for part in answer.aiter_raw():
                received.append(part)  # noqa: PERF401 what came before the exception counts

    with pytest.raises(httpx.RemoteProtocolError):
        await read()
    return b"".join(received)


@pytest.mark.parametrize("half", [b"", b'data: {"choices": [{"delta": {"con'])
@pytest.mark.parametrize("how", ["clean_end", "close", "reset"])
async def test_p08_p10_a_stream_without_its_finish_is_told_as_truncated(tmp_path: Path, how: str, half: bytes) -> None:
    async def script(request: Received) -> None:
        await request.write(SSE_HEAD)
        for _ in range(5):
            await request.chunk(event(delta("x")))
        if half:
            await request.chunk(half)
        await asyncio.sleep(0.05)
        if how == "clean_end":
            await request.write(b"0\r\n\r\n")
        elif how == "reset":
            request.reset()
        else:
            request.writer.close()

    async with (
        ScriptedBackend(script).serving() as backend,
        gateway(tmp_path, [backend]) as process,
        client_of(process) as client,
    ):
        received = await broken_off(client)
        events = received.split(b"\n\n")
        assert b"\n\n".join(events[:5]) + b"\n\n" == renamed(event(delta("x")) * 5)
        assert json.loads(events[5].removeprefix(b"data: "))["error"]["code"] == "upstream_truncated"
        assert events[6:] == [b""]  # no `[DONE]`, and no half event that a client would choke on
        await eventually(lambda: at_rest(process))
        assert sample(process, "headrace_requests_total", outcome="truncated") == 1
        assert sample(process, "headrace_requests_total", outcome="ok") == 0
        live = process.gateway.fleet.backends["b0"]
        assert (live.failed_requests, live.served_requests) == (1, 0)

        async with openai.AsyncOpenAI(base_url=f"{process.url}/v1", api_key="k", max_retries=0) as sdk:
            stream = await sdk.chat.completions.create(model=MODEL, messages=[], stream=True)
            texts = [(await anext(stream)).choices[0].delta.content for _ in range(5)]
            with pytest.raises(openai.APIError, match="ended in mid answer"):
                await anext(stream)
            assert texts == ["x"] * 5


async def test_p08_a_stream_of_two_choices_needs_both_to_finish(tmp_path: Path) -> None:
    async def script(request: Received) -> None:
        await request.events(delta("a"), delta("", finish="stop"), done=False)

    async with (
        ScriptedBackend(script).serving() as backend,
        gateway(tmp_path, [backend]) as process,
        client_of(process) as client,
    ):
        assert b"upstream_truncated" in await broken_off(client, n=2)
        assert (await client.post(CHAT_PATH, json=chat(stream=True, n=1))).status_code == 200


@pytest.mark.parametrize("reason", ["abort", "error"])
async def test_p08_a_stream_that_the_engine_gave_up_is_no_success(tmp_path: Path, reason: str) -> None:
    async def script(request: Received) -> None:
        await request.events(delta("a"), delta("", finish=reason))

    async with (
        ScriptedBackend(script).serving() as backend,
        gateway(tmp_path, [backend]) as process,
        client_of(process) as client,
    ):
        await broken_off(client)
        await eventually(lambda: sample(process, "headrace_requests_total", outcome="truncated") == 1)


@pytest.mark.parametrize("how", ["clean_end", "half_done", "reset", "silent"])
async def test_p09_a_finished_stream_without_done_is_whole(tmp_path: Path, how: str) -> None:
    async def script(request: Received) -> None:
        await request.write(SSE_HEAD)
        await request.chunk(event(delta("a")) + event(delta("", finish="stop")))
        if how == "half_done":
            await request.chunk(b"data: [DONE]")
        await asyncio.sleep(0.02)
        if how == "reset":
            request.reset()
        elif how == "silent":
            await request.until_gone()
        else:
            await request.write(b"0\r\n\r\n")

    async with (
        ScriptedBackend(script).serving() as backend,
        gateway(tmp_path, [backend], timeouts={"inter_token_s": 0.3}) as process,
        client_of(process) as client,
    ):
        answer = await client.post(CHAT_PATH, json=chat(stream=True))
        assert answer.content.startswith(renamed(event(delta("a")) + event(delta("", finish="stop"))))
        assert b"error" not in answer.content
        await eventually(lambda: sample(process, "headrace_requests_total", outcome="ok") == 1)
        assert process.gateway.fleet.backends["b0"].failed_requests == 0


async def test_done_is_the_end_for_the_client_though_the_backend_dawdles(tmp_path: Path) -> None:
    async def script(request: Received) -> None:
        await request.events(delta("a", finish="stop"), end=False)
        await request.until_gone()

    async with ScriptedBackend(script).serving() as backend, gateway(tmp_path, [backend]) as process:
        async with raw_client(process) as client:
            await client.send(request_bytes(chat(stream=True)))
            whole = await asyncio.wait_for(client.until(b"0\r\n\r\n"), 5)  # not after the 15 s of a silent stream
            assert whole.count(b"data: [DONE]") == 1
            client.leave()
        await eventually(lambda: at_rest(process))
        assert sample(process, "headrace_requests_total", outcome="ok") == 1
        assert process.gateway.fleet.backends["b0"].served_requests == 1


@pytest.mark.parametrize("reset", [False, True])
async def test_p10_half_a_json_body_is_never_taken_for_an_answer(tmp_path: Path, reset: bool) -> None:
    async def script(request: Received) -> None:
        await request.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n")
        for part in (b'{"id":', b'"c1",', b'"choices":'):
            await request.chunk(part)
        await asyncio.sleep(0.02)
        if reset:
            request.reset()
        request.writer.close()

    async with (
        ScriptedBackend(script).serving() as backend,
        gateway(tmp_path, [backend], retries={"max_attempts": 1}) as process,
        client_of(process) as client,
    ):
        answer = await client.post(CHAT_PATH, json=chat())
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "upstream_error")
        assert sample(process, "headrace_attempts_total", outcome="truncated") == 1


async def test_p13_control_blocks_break_no_client_and_are_relayed(tmp_path: Path) -> None:
    blocks = [b": ping\n\n", b"retry: 1000\n\n", b"id: 5\n\n", b":\n\n", b"event: message\n\n"]

    async def script(request: Received) -> None:
        await request.write(SSE_HEAD)
        for block in blocks:
            await request.chunk(block)
        await request.chunk(event(delta("a")))
        for block in blocks:
            await request.chunk(block)
        await request.chunk(event(delta("b", finish="stop")) + b": ping\n\n" + DONE)
        await request.write(b"0\r\n\r\n")

    async with (
        ScriptedBackend(script).serving() as backend,
        gateway(tmp_path, [backend]) as process,
        client_of(process) as client,
        openai.AsyncOpenAI(base_url=f"{process.url}/v1", api_key="k", max_retries=0) as sdk,
    ):
        answer = await client.post(CHAT_PATH, json=chat(stream=True))
        assert answer.content == renamed(
            b"".join(blocks) + event(delta("a")) + b"".join(blocks) + event(delta("b", finish="stop"))
            + b": ping\n\n" + DONE
        )  # fmt: skip
        live = process.gateway.fleet.backends["b0"]
        assert live.served_requests == 1
        # openai-python reads `retry:` and `id:` alone as an empty event and fails on it by itself; comments it skips.
        blocks[:] = [b": ping\n\n", b":\n\n"]
        stream = await sdk.chat.completions.create(model=MODEL, messages=[], stream=True)
        assert [chunk.choices[0].delta.content async for chunk in stream] == ["a", "b"]


async def test_p14_a_large_event_passes_whole_beside_other_streams(tmp_path: Path) -> None:
    big = event(delta("x" * (4 * 1024 * 1024)))
    gaps: list[float] = []

    async def script(request: Received) -> None:
        await request.write(SSE_HEAD)
        if request.json.get("user") == "big":
            for start in range(0, len(big), 4096):
                await request.chunk(big[start : start + 4096])
        else:
            for _ in range(50):
                await request.chunk(event(delta("y")))
                await asyncio.sleep(0.01)
        await request.chunk(event(delta("", finish="stop")) + DONE)
        await request.write(b"0\r\n\r\n")

    async with (
        ScriptedBackend(script).serving() as backend,
        gateway(tmp_path, [backend]) as process,
        client_of(process) as client,
    ):

        async def other() -> int:
            count, last = 0, asyncio.get_running_loop().time()
            async with client.stream("POST", CHAT_PATH, json=chat(stream=True)) as answer:
                async for line in answer.aiter_lines():
                    now = asyncio.get_running_loop().time()
                    gaps.append(now - last)
                    last = now
                    count += line.startswith("data: {")
            return count

        others = [asyncio.create_task(other()) for _ in range(5)]
        answer = await client.post(CHAT_PATH, json=chat(stream=True, user="big"))
        assert answer.content == renamed(big + event(delta("", finish="stop")) + DONE)
        assert await asyncio.gather(*others) == [51] * 5
    assert sorted(gaps)[int(len(gaps) * 0.99)] < 0.5  # quadratic work would hold them for many seconds


async def test_p15_no_backends_name_shows_also_after_failover(tmp_path: Path) -> None:
    path = "/models/qwen-bf16.gguf"

    async def own_name(request: Received) -> None:
        assert request.json["model"] == "qwen-bf16"
        if request.json.get("stream"):
            await request.events(delta("a", model=path), delta("b", model=path, finish="stop"))
        else:
            await request.answer(200, completion(model=path))

    async def plain(request: Received) -> None:
        assert request.json["model"] == "qwen-awq"
        if request.json.get("stream"):
            await request.events(delta("a", model="qwen-awq"), delta("b", model="qwen-awq", finish="stop"))
        else:
            await request.answer(200, completion(model="qwen-awq"))

    async def down(request: Received) -> None:
        request.reset()

    async with (
        ScriptedBackend(plain, served_model_name="qwen-awq").serving() as awq,
        ScriptedBackend(own_name, served_model_name="qwen-bf16").serving() as bf16,
        gateway(tmp_path, [awq, bf16], health={"silent_failures_to_eject": 100, "failures_to_eject": 100}) as process,
        client_of(process) as client,
    ):
        for scripts in ((plain, own_name), (down, own_name), (plain, down)):
            awq.script, bf16.script = scripts
            for name in (MODEL, ALIAS):
                for stream in (False, True):
                    for _ in range(2):
                        answer = await client.post(CHAT_PATH, json=chat(model=name, stream=stream))
                        assert answer.status_code == 200
                        assert "qwen" not in answer.text
                        assert answer.text.count(f'"model": "{name}"') == (2 if stream else 1)


@pytest.mark.parametrize("encoding", ["gzip", "br"])
async def test_p17_an_encoded_body_keeps_its_encoding_and_its_length(tmp_path: Path, encoding: str) -> None:
    packed = gzip.compress(json.dumps(completion()).encode() * 50)

    async def script(request: Received) -> None:
        assert request.headers["accept-encoding"] == "identity"
        kind = "text/event-stream" if request.json.get("stream") else "application/json"
        status = 400 if request.json.get("user") == "bad" else 200
        await request.answer(status, packed, content_encoding=encoding, content_type=kind)

    async with (
        ScriptedBackend(script).serving() as backend,
        gateway(tmp_path, [backend]) as process,
        client_of(process) as client,
    ):
        for accept in ("gzip, br", "identity"):
            for members in ({}, {"user": "bad"}, {"stream": True}):
                headers = {"accept-encoding": accept}
                request = client.build_request("POST", CHAT_PATH, json=chat(**members), headers=headers)
                answer = await client.send(request, stream=True)
                raw = b"".join([part async for part in answer.aiter_raw()])
                assert raw == packed
                assert answer.headers["content-encoding"] == encoding
                assert answer.headers["content-length"] == str(len(packed))


async def test_p18_framing_is_made_anew_and_hop_by_hop_headers_stop_here(tmp_path: Path) -> None:
    hop = {"te": "trailers", "x-named": "1", "keep-alive": "timeout=5", "proxy-authorization": "Basic x",
           "proxy-connection": "keep-alive", "trailer": "x-late"}  # fmt: skip

    async def script(request: Received) -> None:
        raw = json.dumps(completion()).encode()
        await request.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: x-inner\r\nx-inner: secret\r\n"
            b"keep-alive: timeout=9\r\nproxy-authenticate: Basic\r\nserver: engine/1\r\nset-cookie: a=b\r\n"
            b"openai-processing-ms: 12\r\ntransfer-encoding: chunked\r\ntrailer: x-late\r\n\r\n"
        )
        await request.chunk(raw)
        await request.write(b"0\r\nx-late: 1\r\n\r\n")

    async def body() -> Any:
        raw = json.dumps(chat(model=ALIAS)).encode()
        for start in range(0, len(raw), 7):
            yield raw[start : start + 7]

    async with (
        ScriptedBackend(script, served_model_name="a-much-longer-name-than-the-clients").serving() as longer,
        ScriptedBackend(script, served_model_name="s").serving() as shorter,
        gateway(tmp_path, [longer, shorter]) as process,
        client_of(process) as client,
    ):
        for _ in range(4):
            headers = {"content-type": "application/json", "connection": "x-named, keep-alive", **hop}
            answer = await client.post(CHAT_PATH, content=body(), headers=headers)
            assert answer.status_code == 200
            given = set(answer.headers)
            assert given & {"x-inner", "keep-alive", "proxy-authenticate", "server", "set-cookie", "trailer"} == set()
            assert answer.headers["openai-processing-ms"] == "12"
            assert answer.headers["content-length"] == str(len(answer.content))
        for backend in (longer, shorter):
            assert len(backend.requests) == 2
            for request in backend.requests:
                assert set(request.headers) & {*hop, "transfer-encoding", "connection"} == set()
                assert request.headers["content-length"] == str(len(request.body))
                assert request.json == chat(model=backend.served_model_name)


async def test_p20_the_body_arrives_as_it_was_written(tmp_path: Path) -> None:
    body = rb""" {"n" :2,"temperature":1e-7,"seed":9223372036854775807,"top_p":1.00,"x\u00e9":"\/\u00e9",
        "messages":[{"role":"user","content":"\ud83d\ude42"}], "model": "chat" } """
    async with ScriptedBackend().serving() as backend, gateway(tmp_path, [backend]) as process:
        raw = await raw_exchange(process, request_bytes(body, headers="connection: close\r\n"))
        assert raw.startswith(b"HTTP/1.1 200")
        assert backend.requests[0].body == body.replace(b'"chat"', b'"served"')


async def test_completions_and_embeddings_go_the_same_way(tmp_path: Path) -> None:
    async def script(request: Received) -> None:
        await request.answer(200, {"object": "list", "model": "served", "data": [{"embedding": [0.1, 1.0]}]})

    async with (
        ScriptedBackend(script).serving() as backend,
        gateway(tmp_path, [backend]) as process,
        client_of(process) as client,
    ):
        for path, member in (("/v1/completions", "prompt"), ("/v1/embeddings", "input")):
            answer = await client.post(path, json={"model": ALIAS, member: ["a", [1, 2]]})
            assert answer.json()["model"] == ALIAS
            assert backend.requests[-1].path == path
            assert backend.requests[-1].json == {"model": "served", member: ["a", [1, 2]]}
