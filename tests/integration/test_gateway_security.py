"""What must not happen: another host contacted, a secret shown, a path passed on, a redirect given or followed."""

import asyncio
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gateway_stack import MODEL, chat, client_of, gateway
from tests.raw_client import CHAT_PATH, at_rest, eventually, raw_exchange, request_bytes
from tests.scripted_backend import Received, ScriptedBackend, answer_hello, completion

pytestmark = pytest.mark.anyio

_contacted: list[Any] | None = None


def _audit(name: str, arguments: tuple[Any, ...]) -> None:
    if _contacted is not None and name in ("socket.connect", "socket.getaddrinfo", "open", "subprocess.Popen"):
        _contacted.append((name, arguments))


sys.addaudithook(_audit)  # hooks cannot be taken off again; this one sleeps unless a test listens


@pytest.fixture
def contacted() -> Iterator[list[Any]]:
    """Every connection, name lookup, file and process that the interpreter has asked for."""
    global _contacted
    _contacted = []
    yield _contacted
    _contacted = None


FOREIGN = "169.254.169.254"
BAIT: list[dict[str, Any]] = [
    {"api_base": f"http://{FOREIGN}/", "base_url": f"http://{FOREIGN}/", "api_key": "k"},
    {"extra_headers": {"x-api-base": f"http://{FOREIGN}"}, "custom_llm_provider": "openai", "api_type": "azure"},
    {"messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": url}}
        for url in (f"http://{FOREIGN}/latest/meta-data", "file:///etc/passwd", "http://slow.invalid/x.png")
    ]}]},
]  # fmt: skip


async def test_p29_p52_nothing_in_a_request_names_where_the_gateway_connects(
    tmp_path: Path, contacted: list[Any]
) -> None:
    async with (
        ScriptedBackend().serving() as backend,
        gateway(tmp_path, [backend], poll={"interval_s": 300, "timeout_s": 1}) as process,
        client_of(process) as client,
    ):
        own = {int(url.rpartition(":")[2]) for url in (backend.url, process.url)}
        contacted.clear()
        for bait in BAIT:
            headers = {"x-api-base": f"http://{FOREIGN}", "host": FOREIGN, "x-forwarded-host": FOREIGN}
            answer = await client.post(f"{CHAT_PATH}?api_base=http://{FOREIGN}", json=chat(**bait), headers=headers)
            assert answer.status_code == 200
            assert backend.requests[-1].json == chat(**{**bait, "model": "served"})
            assert backend.requests[-1].path == CHAT_PATH
            assert FOREIGN not in json.dumps(backend.requests[-1].headers)
        places = [arguments[1] for name, arguments in contacted if name == "socket.connect"]
        assert places
        assert {(place[0], place[1] in own) for place in places} == {("127.0.0.1", True)}
        assert [entry for entry in contacted if entry[0] == "open" and "passwd" in str(entry)] == []
        assert [entry for entry in contacted if FOREIGN in str(entry) or "invalid" in str(entry)] == []


def with_key(backend: ScriptedBackend) -> dict[str, str]:
    return {"url": backend.url, "served_model_name": "served", "api_key_env": "ENGINE_KEY"}


async def test_p52_credentials_of_the_client_stay_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE_KEY", "sk-engine")
    headers = {"authorization": "Bearer sk-client", "cookie": "a=sk-client", "x-api-key": "sk-client",
               "api-key": "sk-client", "openai-organization": "org", "proxy-authorization": "Basic sk-client",
               "x-forwarded-for": "1.2.3.4"}  # fmt: skip
    async with (
        ScriptedBackend().serving() as keyed,
        ScriptedBackend().serving() as plain,
        gateway(tmp_path, [with_key(keyed), plain]) as process,
        client_of(process) as client,
    ):
        for _ in range(10):
            await client.post(CHAT_PATH, json=chat(), headers=headers)
        for backend, key in ((keyed, "Bearer sk-engine"), (plain, None)):
            assert len(backend.requests) == 5
            for request in backend.requests:
                assert request.headers.get("authorization") == key
                assert set(request.headers) & set(headers) <= {"authorization"}
                assert "sk-client" not in str(request.headers)


async def test_p53_the_model_is_part_of_no_url_and_redirects_lead_nowhere(
    tmp_path: Path, contacted: list[Any]
) -> None:
    async def redirect(request: Received) -> None:
        await request.answer(302, b"", location=f"http://{FOREIGN}:22/")

    async with (
        ScriptedBackend().serving() as backend,
        gateway(tmp_path, [backend], poll={"interval_s": 300, "timeout_s": 1}) as process,
        client_of(process) as client,
    ):
        for name in ("x#", "a/../../admin", "@evil", "?a=b", "\r\nx: y", "http://evil/"):
            assert (await client.post(CHAT_PATH, json=chat(model=name))).status_code == 404
        assert backend.requests == []
        backend.script = redirect
        contacted.clear()
        for stream in (False, True):
            answer = await client.post(CHAT_PATH, json=chat(stream=stream))
            assert (answer.status_code, answer.json()["error"]["code"]) == (502, "upstream_error")
            assert "location" not in answer.headers
        assert {request.path for request in backend.requests} == {CHAT_PATH}
        assert FOREIGN not in str([entry for entry in contacted if entry[0] == "socket.connect"])


CANARY = "canary-5e5e5e5e"


async def test_p54_secrets_and_addresses_show_nowhere(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("ENGINE_KEY", CANARY)
    caplog.set_level(logging.DEBUG)

    async def traceback(request: Received) -> None:
        page = f"Traceback: key={request.headers['authorization']} at http://{request.headers['host']}/x"
        await request.answer(500, page.encode(), content_type="text/plain")

    async def echoes(request: Received) -> None:
        message = f"{request.headers['authorization']} at {request.headers['host']}"
        await request.answer(403, {"error": {"message": message}})

    async def echoes_401(request: Received) -> None:
        await request.answer(401, {"error": {"message": request.headers["authorization"]}})

    async def resets(request: Received) -> None:
        request.reset()

    pages: list[str] = []
    async with (
        ScriptedBackend().serving() as backend,
        gateway(tmp_path, [with_key(backend)], retries={"max_attempts": 1}) as process,
        client_of(process) as client,
    ):
        address = backend.url.removeprefix("http://")
        for script in (answer_hello, traceback, echoes, echoes_401, resets):
            backend.script = script
            for stream in (False, True):
                answer = await client.post(CHAT_PATH, json=chat(stream=stream))
                pages.append(f"{answer.headers} {answer.text}")
        assert len(backend.requests) >= 10  # a reset on a kept connection is tried once more on a fresh one
        for method, path in (("GET", "/v1/models"), ("GET", "/health"), ("GET", "/readiness"), ("GET", "/metrics"),
                             ("GET", "/nothing"), ("POST", "/v1/models"), ("GET", CHAT_PATH)):  # fmt: skip
            answer = await client.request(method, path)
            pages.append(f"{answer.headers} {answer.text}")
        for live in process.gateway.fleet.backends.values():
            live.drained_by_hand = True
        pages.append((await client.post(CHAT_PATH, json=chat())).text)
        for page in pages:
            assert CANARY not in page
            assert address not in page
        for path in ("/admin/fleet", "/admin/config", "/metrics"):  # operators see addresses, but never a key
            assert CANARY not in (await client.get(f"{process.admin_url}{path}")).text
        assert CANARY not in repr(process.gateway.dispatcher.generation)
        assert CANARY not in repr(process.gateway.fleet.view())
    out, err = capfd.readouterr()
    for record in caplog.records:
        assert CANARY not in record.getMessage()
        assert CANARY not in str(record.exc_info)
    assert CANARY not in out + err


ENGINE_PATHS = (
    "/reset_prefix_cache", "/sleep", "/wake_up", "/flush_cache", "/abort_request", "/server_info", "/get_server_info",
    "/docs", "/openapi.json", "/redoc", "/invocations", "/tokenize", "/v1/load_lora_adapter", "/slots", "/props",
    "/pause", "/admin/fleet", "/admin/config", "/admin/reload", "/admin/backends/b0/drain", "/v1/audio/speech",
    "/generate",
)  # fmt: skip


async def test_p55_engines_other_paths_are_not_reachable(tmp_path: Path) -> None:
    async with (
        ScriptedBackend().serving() as backend,
        gateway(tmp_path, [backend]) as process,
        client_of(process) as client,
    ):
        for path in ENGINE_PATHS:
            for method in ("GET", "POST"):
                answer = await client.request(method, path)
                assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_url"), (method, path)
        assert backend.requests == []
        assert not process.gateway.fleet.backends["b0"].drained_by_hand


async def test_p25_odd_spellings_of_a_path_are_served_or_404_and_never_redirected(tmp_path: Path) -> None:
    async with ScriptedBackend().serving() as backend, gateway(tmp_path, [backend]) as process:
        spellings = (
            f"{CHAT_PATH}/", f"/{CHAT_PATH}", f"{CHAT_PATH}%2f", "/v1//chat/completions", "/V1/Chat/Completions",
            "/v1/%2e%2e/v1/chat/completions", "/v1/../v1/chat/completions", "/v1/chat%00/completions", "/v1/models/",
            "//v1/models", "/v1//models", "/V1/Models", "/health/", "/metrics/", "/v1/chat/completions;x",
            "http://h/v1/chat/completions/",
        )  # fmt: skip
        for path in spellings:
            raw = await raw_exchange(process, request_bytes(chat(), path=path, headers="connection: close\r\n"))
            status = int(raw.split(b" ", 2)[1])
            assert status in (200, 400, 404, 405), path
            assert b"\r\nlocation:" not in raw.lower()
            assert status == 200 or b'{"error":{' in raw
        await eventually(lambda: at_rest(process))


async def test_p26_head_and_options(tmp_path: Path) -> None:
    async with (
        ScriptedBackend().serving() as backend,
        gateway(tmp_path, [backend]) as process,
        client_of(process) as client,
    ):
        for path in ("/health", "/liveness", "/readiness", "/v1/models", f"/v1/models/{MODEL}", "/metrics"):
            head = await client.head(path)
            assert (head.status_code, head.content) == ((await client.get(path)).status_code, b"")
        preflight = {"origin": "https://a.example", "access-control-request-method": "POST"}
        for headers in ({}, preflight):
            answer = await client.options(CHAT_PATH, headers=headers)
            assert answer.status_code in (200, 204, 405)
            assert answer.status_code != 405 or answer.headers["allow"]
        assert (await client.head(CHAT_PATH)).headers["allow"] == "POST"
        assert backend.requests == []


async def test_p21_p56_logs_are_lines_of_json_whatever_was_sent(
    tmp_path: Path
) -> None:
    bad_ids = ["a%0ab", "\x1b[31mred", "x" * 10_240, "a b", "ünï"]
    log = {"path": "decisions.jsonl"}
    async with ScriptedBackend().serving() as backend, gateway(tmp_path, [backend], decision_log=log) as process:
        for given in bad_ids:
            data = request_bytes(chat(), headers=f"x-request-id: {given}\r\nconnection: close\r\n".replace("ü", "\xfc"))
            raw = await raw_exchange(process, data)
            assert given.encode() not in raw
        for model in ("a\x1b[31m", "a\nb", "\u2028", "a" * 5000):
            await raw_exchange(process, request_bytes(chat(model=model), headers="connection: close\r\n"))
        body = rb'{"model":"\ud83d","messages":[]}'
        raw = await raw_exchange(process, request_bytes(body, headers="connection: close\r\n"))
        assert raw[9:12] in (b"400", b"404")
        await eventually(lambda: at_rest(process))
    lines = (tmp_path / "decisions.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == len(bad_ids) + 5 - 1  # a head with a raw escape is no HTTP, and no request
    for line in lines:
        assert line.isascii()
        assert line.isprintable()
        assert set(json.loads(line)) >= {"request_id", "outcome", "status", "backend"}
        assert len(line) < 2000


async def test_an_answer_of_one_client_never_reaches_another(tmp_path: Path) -> None:
    """Requests over few connections, many of them left in mid answer: each answer is that of its own question."""

    async def script(request: Received) -> None:
        word = request.json["user"]
        await asyncio.sleep(0.001 * (hash(word) % 5))
        await request.answer(200, completion(word))

    async with (
        ScriptedBackend(script).serving() as backend,
        gateway(tmp_path, [backend]) as process,
        client_of(process) as client,
    ):

        async def ask(number: int) -> None:
            task = asyncio.create_task(client.post(CHAT_PATH, json=chat(user=f"word-{number}")))
            if number % 3 == 0:
                await asyncio.sleep(0.001 * (number % 7))
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                return
            answer = await task
            assert answer.json()["choices"][0]["message"]["content"] == f"word-{number}"

        for start in range(0, 300, 20):
            await asyncio.gather(*[ask(number) for number in range(start, start + 20)])
        await eventually(lambda: at_rest(process))


async def test_p26_no_origin_is_let_in_and_a_preflight_opens_nothing(tmp_path: Path) -> None:
    """Browsers of other origins are not served: no configuration opens this, so no preflight gets a yes."""
    async with (
        ScriptedBackend().serving() as backend,
        gateway(tmp_path, [backend]) as process,
        client_of(process) as client,
    ):
        preflight = {"origin": "https://a.example", "access-control-request-method": "POST",
                     "access-control-request-headers": "authorization"}  # fmt: skip
        routes = {CHAT_PATH: "POST", "/v1/completions": "POST", "/v1/embeddings": "POST", "/v1/models": "GET, HEAD"}
        for path, allowed in routes.items():
            answer = await client.options(path, headers=preflight)
            assert answer.status_code == 405
            assert sorted(answer.headers["allow"].split(", ")) == sorted(allowed.split(", "))
            assert answer.json()["error"]["code"] == "method_not_allowed"
            assert [name for name in answer.headers if name.startswith("access-control-")] == []
        served = await client.post(CHAT_PATH, json=chat(), headers={"origin": "https://a.example"})
        assert served.status_code == 200
        assert [name for name in served.headers if name.startswith("access-control-")] == []
        assert len(backend.requests) == 1
