"""Every error in OpenAI's shape, with the status that says whose it is, as raw HTTP and as OpenAI's client sees it."""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from router.app import Running
from router.keys.ring import KeyRing, environment_rows
from tests.gateway_stack import MODEL, chat, client_of, gateway
from tests.raw_client import CHAT_PATH, at_rest, eventually, raw_client, raw_exchange, request_bytes
from tests.scripted_backend import Received, ScriptedBackend, answer_hello

pytestmark = pytest.mark.anyio


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """The error object, its shape checked."""
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    document = answer.json()
    assert set(document) == {"error"}
    error = document["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    return dict(error)


def answering(status: int, body: Any, **headers: str) -> Callable[[Received], Awaitable[None]]:
    async def script(request: Received) -> None:
        await request.answer(status, body, **headers)

    return script


def http_error(raw: bytes) -> tuple[int, dict[str, Any]]:
    head, _, body = raw.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head.lower()
    return int(head.split(b" ", 2)[1]), json.loads(body)["error"]


async def test_p19_what_the_gateway_refuses_itself(tmp_path: Path) -> None:
    json_type = {"content-type": "application/json"}
    cases: list[tuple[str, str, dict[str, Any], int, str]] = [
        ("POST", CHAT_PATH, {"content": b"{", "headers": json_type}, 400, "invalid_json"),
        ("POST", CHAT_PATH, {"content": b"", "headers": json_type}, 400, "invalid_json"),
        ("POST", CHAT_PATH, {"json": {"messages": []}}, 400, "invalid_request"),
        ("POST", CHAT_PATH, {"json": chat(model="nobody")}, 404, "model_not_found"),
        ("POST", CHAT_PATH, {"content": b"x", "headers": {"content-type": "a/b"}}, 415, "unsupported_media_type"),
        ("POST", CHAT_PATH, {"content": b"x" * 5000, "headers": json_type}, 413, "request_too_large"),
        ("POST", CHAT_PATH, {"json": chat(), "headers": {"x-headrace-class": "gold"}}, 400, "unknown_latency_class"),
        ("GET", "/v1/nothing", {}, 404, "unknown_url"),
        ("POST", "/v1/nothing", {"json": {}}, 404, "unknown_url"),
        ("GET", "/v1/models/nobody", {}, 404, "model_not_found"),
        ("POST", "/v1/models", {"json": {}}, 405, "method_not_allowed"),
        ("DELETE", "/health", {}, 405, "method_not_allowed"),
        *[(verb, CHAT_PATH, {}, 405, "method_not_allowed") for verb in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS")],
    ]
    async with (
        ScriptedBackend().serving() as backend,
        gateway(tmp_path, [backend], limits={"max_body_bytes": 4096}) as process,
        client_of(process) as client,
    ):
        for method, path, options, status, code in cases:
            answer = await client.request(method, path, **options)
            assert (answer.status_code, error_of(answer)["code"]) == (status, code), (method, path)
            if status == 405:
                allowed = {"POST"} if path == CHAT_PATH else {"GET", "HEAD"}
                assert set(answer.headers["allow"].split(", ")) == allowed
        assert backend.requests == []
        assert at_rest(process)


async def test_p16_sizes_at_the_limit_by_length_and_chunked(tmp_path: Path) -> None:
    limit = 300_000
    frame = json.dumps(chat()).replace("hi", "%s")

    async def pieces(body: bytes) -> Any:
        for start in range(0, len(body), 50_000):
            yield body[start : start + 50_000]

    async with (
        ScriptedBackend().serving() as backend,
        gateway(tmp_path, [backend], limits={"max_body_bytes": limit}) as process,
        client_of(process) as client,
    ):
        for size in (200, 6 * 1024, 64 * 1024 - 1, 64 * 1024, 64 * 1024 + 1, 128 * 1024, limit - 1, limit, limit + 1):
            body = (frame % ("x" * (size - len(frame) + 2))).encode()
            assert len(body) == size
            for content in (body, pieces(body)):
                answer = await client.post(CHAT_PATH, content=content, headers={"content-type": "application/json"})
                if size > limit:
                    assert (answer.status_code, error_of(answer)["code"]) == (413, "request_too_large")
                    assert answer.headers["connection"] == "close"
                else:
                    assert answer.status_code == 200
                    assert backend.requests[-1].body == body.replace(MODEL.encode(), b"served")
        assert len(backend.requests) == 16


async def test_p16_a_body_without_end_is_refused_at_the_limit(tmp_path: Path) -> None:
    limits = {"max_body_bytes": 65536}
    async with ScriptedBackend().serving() as backend, gateway(tmp_path, [backend], limits=limits) as process:
        async with raw_client(process) as client:
            await client.send(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\n"
                b"transfer-encoding: chunked\r\n\r\n"
            )
            answer = asyncio.create_task(client.to_end())
            sent = 0
            while not answer.done() and sent < 64 * 1024 * 1024:
                try:
                    await client.send(b"8000\r\n" + b"x" * 0x8000 + b"\r\n")
                except ConnectionError:
                    break
                sent += 0x8000
            assert http_error(await answer)[0] == 413
        assert sent < 32 * 1024 * 1024
        await eventually(lambda: at_rest(process))


@pytest.mark.parametrize(
    "raw",
    [
        b"nonsense\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nbad header\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\ncontent-length: x\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\ncontent-length: -5\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\ncontent-length: " + b"9" * 5000 + b"\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{}",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n{}",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    ],
)
async def test_p19_bad_http_is_a_400_in_the_same_shape(tmp_path: Path, raw: bytes) -> None:
    async with ScriptedBackend().serving() as backend, gateway(tmp_path, [backend]) as process:
        status, error = http_error(await raw_exchange(process, raw))
        assert (status, error["type"]) == (400, "invalid_request_error")
        assert backend.requests == []
        await eventually(lambda: at_rest(process))


async def test_two_requests_in_one_write_are_both_answered_or_the_connection_ends(tmp_path: Path) -> None:
    async with ScriptedBackend().serving() as backend, gateway(tmp_path, [backend]) as process:
        raw = await raw_exchange(
            process, request_bytes(chat()) + request_bytes(chat(), headers="connection: close\r\n")
        )
        assert raw.count(b"HTTP/1.1 200 OK") == len(backend.requests)
        assert 1 <= len(backend.requests) <= 2
        await eventually(lambda: at_rest(process))


UNCHANGED = {"error": {"message": "bad", "type": "invalid_request_error", "param": "n", "code": None, "extra": [1.0]}}


@pytest.mark.parametrize("status", [400, 403, 404, 409, 413, 422])
@pytest.mark.parametrize("stream", [False, True])
async def test_p33_a_backends_4xx_is_relayed_once_and_unchanged(tmp_path: Path, status: int, stream: bool) -> None:
    async with (
        ScriptedBackend(answering(status, UNCHANGED)).serving() as first,
        ScriptedBackend(answering(status, UNCHANGED)).serving() as second,
        gateway(tmp_path, [first, second]) as process,
        client_of(process) as client,
    ):
        for _ in range(5):
            answer = await client.post(CHAT_PATH, json=chat(stream=stream))
            assert (answer.status_code, answer.json()) == (status, UNCHANGED)
        assert len(first.requests) + len(second.requests) == 5
        assert all(live.failed_requests == 0 for live in process.gateway.fleet.backends.values())


BACKEND_ANSWERS = {
    # status and body of the backend → status for the client, and a word of its message
    "html_500": (500, b"<html>Traceback: /opt/engine.py at http://10.0.0.9:8000</html>", 500, "answered 500"),
    "html_503": (503, b"<html>nginx at 10.0.0.9</html>", 503, "answered 503"),
    "empty_500": (500, b"", 500, "answered 500"),
    "text_400": (400, b"max_tokens is too large", 400, "max_tokens is too large"),
    "detail_422": (422, {"detail": [{"loc": ["body", "n"], "msg": "not an int"}]}, 422, "not an int"),
    "vllm_old_400": (400, {"object": "error", "message": "too long", "type": "x", "code": 400}, 400, "too long"),
    "tgi_424": (424, {"error": "overloaded", "error_type": "overloaded"}, 424, "overloaded"),
    "list_400": (400, b"[1]", 400, "[1]"),
    "not_utf8_400": (400, b"\xff\xfe", 400, "\ufffd"),
    "openai_500": (500, {"error": {"message": "cuda", "type": "x", "param": None, "code": 1}}, 500, "cuda"),
    "no_501": (501, {"error": {"message": "not built", "type": "x", "param": None, "code": 1}}, 501, "not built"),
    "own_key_401": (401, {"error": {"message": "Incorrect API key: sk-canary"}}, 502, "could not be reached"),
    "redirect_302": (302, b"", 502, "could not be reached"),
    "no_status_999": (999, b"?", 502, "could not be reached"),
}


async def test_p19_a_backends_error_is_put_into_shape(tmp_path: Path) -> None:
    async with (
        ScriptedBackend().serving() as backend,
        gateway(tmp_path, [backend], health={"failures_to_eject": 1000, "failure_ratio_to_eject": None},
                retries={"max_attempts": 1}) as process,
        client_of(process) as client,
    ):  # fmt: skip
        for name, (status, body, relayed, word) in BACKEND_ANSWERS.items():
            for stream in (False, True):
                backend.script = answering(status, body, location="http://127.0.0.1:22/")
                answer = await client.post(CHAT_PATH, json=chat(stream=stream))
                assert answer.status_code == relayed, name
                assert word in error_of(answer)["message"].replace("[backend]", ""), name
                assert "location" not in answer.headers
                for inside in ("10.0.0.9", "Traceback", "sk-canary"):
                    assert inside not in answer.text, name
        assert at_rest(process)


async def test_p15_an_error_speaks_of_the_model_by_the_clients_name(tmp_path: Path) -> None:
    message = "The model `served` does not exist; 'served' or \"served\"."
    error = {"message": message, "type": "x", "param": None, "code": 1}
    async with (
        ScriptedBackend(answering(404, {"error": error, "model": "served"})).serving() as backend,
        gateway(tmp_path, [backend]) as process,
        client_of(process) as client,
    ):
        answer = await client.post(CHAT_PATH, json=chat(model="chat"))
        assert answer.json()["error"]["message"] == "The model `chat` does not exist; 'chat' or \"chat\"."
        assert answer.json()["model"] == "chat"


async def test_p11_a_stream_is_answered_200_only_after_the_backend_was(tmp_path: Path) -> None:
    async with (
        ScriptedBackend().serving() as backend,
        gateway(tmp_path, [backend], retries={"max_attempts": 1}) as process,
        client_of(process) as client,
    ):
        for status in (400, 404, 422, 429, 503):
            live = process.gateway.fleet.backends["b0"]
            live.backoff_until_s = live.silence_asked_until_s = 0.0  # by the answer before
            backend.script = answering(status, UNCHANGED, retry_after="7")
            answer = await client.post(CHAT_PATH, json=chat(stream=True))
            assert (answer.status_code, answer.json()) == (status, UNCHANGED)
            assert answer.headers["retry-after"] == "7"


async def test_no_backend_is_a_503_that_says_when_to_come_back(tmp_path: Path) -> None:
    async with (
        ScriptedBackend().serving() as backend,
        gateway(tmp_path, [backend]) as process,
        client_of(process) as client,
    ):
        process.gateway.fleet.backends["b0"].drained_by_hand = True
        answer = await client.post(CHAT_PATH, json=chat())
        assert (answer.status_code, error_of(answer)["code"]) == (503, "no_backend_available")
        assert int(answer.headers["retry-after"]) >= 1
        assert backend.requests == []


async def test_a_full_gateway_is_a_429_before_the_body_is_read(tmp_path: Path) -> None:
    release = asyncio.Event()

    async def hold(request: Received) -> None:
        await release.wait()
        await answer_hello(request)

    async with (
        ScriptedBackend(hold).serving() as backend,
        gateway(tmp_path, [backend], limits={"max_in_flight": 1}) as process,
        client_of(process) as client,
    ):
        held = asyncio.create_task(client.post(CHAT_PATH, json=chat()))
        await eventually(lambda: len(backend.requests) == 1)
        async with raw_client(process) as raw:
            await raw.send(request_bytes(b"")[:-2].replace(b"content-length: 0", b"content-length: 1000") + b"\r\n")
            head = (await raw.until(b"\r\n\r\n")).lower()
        assert head.startswith(b"http/1.1 429 ")
        assert b"retry-after: 1\r\n" in head
        release.set()
        assert (await held).status_code == 200
        assert (await client.post(CHAT_PATH, json=chat())).status_code == 200
        await eventually(lambda: at_rest(process))


async def test_a_prompt_that_fits_nowhere_is_a_400_with_the_figures(tmp_path: Path) -> None:
    windows = (100, 300)
    async with (
        ScriptedBackend().serving() as backend,
        gateway(tmp_path, [
            {"url": backend.url, "served_model_name": "served", "context_tokens": window} for window in windows
        ]) as process,
        client_of(process) as client,
    ):  # fmt: skip
        answer = await client.post(CHAT_PATH, json=chat(max_tokens=1000))
        assert (answer.status_code, error_of(answer)["code"]) == (400, "context_length_exceeded")
        message = error_of(answer)["message"]
        found = re.search(r"about (\d+) tokens of prompt .* up to 1000; .* 'chat-large' is 300 tokens", message)
        assert found, message
        assert 0 < int(found[1]) < 100
        long = await client.post(CHAT_PATH, json={**chat(), "messages": [{"role": "user", "content": "word " * 2000}]})
        assert "and room for an answer; the longest context" in error_of(long)["message"]
        assert not backend.requests


def with_keys(process: Running, *keys: bytes) -> None:
    dispatcher = process.gateway.dispatcher
    rows = environment_rows({f"KEY_{number}": key for number, key in enumerate(keys)})
    dispatcher.generation = replace(dispatcher.generation, keys=KeyRing.of(*rows))


async def test_p19_a_wrong_key_is_a_401_before_the_body_is_read(tmp_path: Path) -> None:
    async with (
        ScriptedBackend().serving() as backend,
        gateway(tmp_path, [backend]) as process,
        client_of(process) as client,
    ):
        with_keys(process, b"sk-one", b"sk-two")
        for given in (None, "", "Bearer", "Bearer sk-on", "Bearer sk-onee", "Basic sk-one", "sk-one", "Bearer sk-\xe9"):
            headers = {} if given is None else {"authorization": given.encode("latin-1")}
            for method, path in (("POST", CHAT_PATH), ("GET", "/v1/models"), ("GET", "/v1/models/chat")):
                answer = await client.request(method, path, json=chat(), headers=headers)  # type: ignore[arg-type]
                assert (answer.status_code, error_of(answer)["code"]) == (401, "invalid_api_key")
                assert answer.headers["www-authenticate"] == "Bearer"
        for given in ("Bearer sk-one", "bearer sk-two", "Bearer  sk-two"):
            assert (await client.post(CHAT_PATH, json=chat(), headers={"authorization": given})).status_code == 200
        assert (await client.get("/health")).status_code == 200
        assert len(backend.requests) == 3


async def test_p19_openais_client_raises_what_each_status_means(tmp_path: Path) -> None:
    expected: dict[int, type[openai.APIStatusError]] = {
        400: openai.BadRequestError, 403: openai.PermissionDeniedError, 404: openai.NotFoundError,
        409: openai.ConflictError, 422: openai.UnprocessableEntityError, 429: openai.RateLimitError,
        500: openai.InternalServerError, 503: openai.InternalServerError,
    }  # fmt: skip
    async with (
        ScriptedBackend().serving() as backend,
        gateway(tmp_path, [backend], retries={"max_attempts": 1}) as process,
        openai.AsyncOpenAI(base_url=f"{process.url}/v1", api_key="k", max_retries=0) as sdk,
    ):
        for status, kind in expected.items():
            backend.script = answering(status, UNCHANGED)
            for stream in (False, True):
                with pytest.raises(kind) as caught:
                    await sdk.chat.completions.create(model=MODEL, messages=[], stream=stream)
                assert caught.value.status_code == status
                assert isinstance(caught.value.body, dict)
                assert caught.value.body["message"] == "bad"
        with_keys(process, b"other")
        with pytest.raises(openai.AuthenticationError, match="API key is missing or unknown"):
            await sdk.chat.completions.create(model=MODEL, messages=[])


async def test_an_unknown_path_of_either_listener_leads_to_one_that_is_there(tmp_path: Path) -> None:
    nobody = {"url": "http://127.0.0.1:9"}
    async with gateway(tmp_path, [nobody]) as process, httpx.AsyncClient() as client:
        for address, path in ((process.url, "/v1/models"), (process.admin_url, "/admin/fleet")):
            message = (await client.get(f"{address}/nothing")).json()["error"]["message"]
            assert path.rpartition("/")[0] in message
            assert (await client.get(f"{address}{path}")).status_code == 200
