"""The fake engine through a real socket: vLLM's manners, faults, and what the engine sees of its clients."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from loadtest.fake_engine.cards import UnknownCard
from loadtest.fake_engine.faults import BadFault, Fault, parse_fault
from loadtest.fake_engine.server import FakeEngineOptions, build_app, serve_fake_engine

FAST: dict[str, Any] = {"card": "h100x1-fp8", "served_model_name": "m", "time_scale": 50.0}
ROOT = Path(__file__).resolve().parents[2]


@asynccontextmanager
async def engine(**options: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        serve_fake_engine(**{**FAST, **options}) as url,
        httpx.AsyncClient(base_url=url, timeout=20, trust_env=False) as client,
    ):
        yield client


def chat(content: str = "hello", **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": content}], **more}


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def numbered(count: int) -> str:
    return "".join(f" t{number}" for number in range(count))


def faults(*lines: str) -> tuple[Fault, ...]:
    return tuple(parse_fault(line) for line in lines)


async def ledger(client: httpx.AsyncClient) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = (await client.get("/fake/requests")).json()["requests"]
    return rows


async def gauge(client: httpx.AsyncClient, name: str) -> float:
    page = (await client.get("/metrics")).text
    return next(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith(f"vllm:{name}{{"))


async def until(condition: Callable[[], Awaitable[bool]], within_s: float = 10.0) -> None:
    deadline = time.monotonic() + within_s
    while not await condition():
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(0.01)


# --- answers


def test_streamed_chat_is_vllms_to_the_event() -> None:
    async def scenario() -> None:
        async with engine() as client:
            body = chat("x" * 41, max_tokens=5, stream=True, stream_options={"include_usage": True}, unknown_field=[1])
            reply = await client.post("/v1/chat/completions", json=body, headers={"x-request-id": "abc"})
            assert reply.status_code == 200
            assert reply.headers["content-type"].startswith("text/event-stream")
            role, *tokens, usage, done = events(reply.text)
            assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
            assert "".join(token["choices"][0]["delta"]["content"] for token in tokens) == numbered(5)
            assert [token["choices"][0]["finish_reason"] for token in tokens] == [None] * 4 + ["length"]
            assert usage["choices"] == []
            assert usage["usage"] == {"prompt_tokens": 11, "completion_tokens": 5, "total_tokens": 16}
            assert done == "[DONE]"
            assert {(event["id"], event["model"], event["object"]) for event in (role, *tokens, usage)} == {
                ("chatcmpl-abc", "m", "chat.completion.chunk")
            }

    asyncio.run(scenario())


def test_whole_answers_and_text_completions() -> None:
    async def scenario() -> None:
        async with engine() as client:
            whole = (await client.post("/v1/chat/completions", json=chat(max_completion_tokens=7))).json()
            assert whole["choices"][0]["message"] == {"role": "assistant", "content": numbered(7)}
            assert whole["choices"][0]["finish_reason"] == "length"
            assert whole["usage"] == {"prompt_tokens": 2, "completion_tokens": 7, "total_tokens": 9}
            body = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 2}
            text = (await client.post("/v1/completions", json=body)).json()
            assert (text["choices"][0]["text"], text["usage"]["prompt_tokens"]) == (numbered(2), 3)
            streamed = await client.post(
                "/v1/completions", json={"model": "m", "prompt": "a", "max_tokens": 2, "stream": True}
            )
            assert [event["choices"][0]["text"] for event in events(streamed.text)[:-1]] == [" t0", " t1"]

    asyncio.run(scenario())


def test_without_a_cap_the_length_is_drawn_from_the_seed() -> None:
    async def lengths(seed: int) -> list[int]:
        async with engine(seed=seed, time_scale=1000) as client:
            answers = [(await client.post("/v1/chat/completions", json=chat())).json() for _ in range(6)]
            assert {answer["choices"][0]["finish_reason"] for answer in answers} == {"stop"}
            return [answer["usage"]["completion_tokens"] for answer in answers]

    async def scenario() -> None:
        first = await lengths(1)
        assert first == await lengths(1)
        assert first != await lengths(2)
        assert len(set(first)) > 1

    asyncio.run(scenario())


def test_embeddings_and_the_official_client() -> None:
    async def scenario() -> None:
        async with (
            serve_fake_engine(**FAST, api_key="sesame") as url,
            AsyncOpenAI(base_url=f"{url}/v1", api_key="sesame", max_retries=0) as client,
        ):
            # The client asks for base64 unless told otherwise, and decodes it.
            vectors = (await client.embeddings.create(model="m", input=["one", "two", "one"])).data
            assert [len(vector.embedding) for vector in vectors] == [16, 16, 16]
            assert vectors[0].embedding == vectors[2].embedding != vectors[1].embedding
            floats = await client.embeddings.create(model="m", input="one", encoding_format="float")
            assert floats.data[0].embedding == pytest.approx(vectors[0].embedding, abs=1e-6)
            assert [model.id for model in (await client.models.list()).data] == ["m"]
            stream = await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "hi"}], max_tokens=20, stream=True
            )
            pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
            assert "".join(pieces) == numbered(20)

    asyncio.run(scenario())


def test_many_at_once_with_preemptions_lose_no_token() -> None:
    async def scenario() -> None:
        async with engine(kv_capacity_tokens=600, slots=16, time_scale=200) as client:
            async def ask(tokens: int) -> None:
                reply = await client.post("/v1/chat/completions", json=chat(max_tokens=tokens, stream=True))
                deltas = [event["choices"][0]["delta"]["content"] for event in events(reply.text)[:-1]]
                assert "".join(deltas) == numbered(tokens)

            await asyncio.gather(*(ask(60 + 7 * number) for number in range(20)))
            assert await gauge(client, "num_preemptions_total") > 0
            assert await gauge(client, "kv_cache_usage_perc") == 0
            assert await gauge(client, "generation_tokens_total") == sum(60 + 7 * number for number in range(20))

    asyncio.run(scenario())


def test_the_prefix_cache_spares_prompts_seen_before() -> None:
    async def scenario() -> None:
        async with engine(prefix_cache=True) as client:
            for _ in range(2):
                await client.post("/v1/chat/completions", json=chat("word " * 400, max_tokens=1))
            # 2000 bytes are 500 tokens, 31 full blocks of 16.
            assert await gauge(client, "prefix_cache_hits_total") == 496

    asyncio.run(scenario())


# --- refusals


@pytest.mark.parametrize(("path", "body", "status", "kind", "says"), [
    ("/v1/chat/completions", b"{", 400, "BadRequestError", "JSON decode error"),
    ("/v1/chat/completions", b"[]", 400, "BadRequestError", "JSON object"),
    ("/v1/chat/completions", b'{"model":"m"}', 400, "BadRequestError", "messages"),
    ("/v1/chat/completions", b'{"model":"m","messages":[3]}', 400, "BadRequestError", "role"),
    ("/v1/completions", b'{"model":"m"}', 400, "BadRequestError", "prompt"),
    ("/v1/completions", b'{"model":"m","prompt":"a","max_tokens":0}', 400, "BadRequestError", "at least 1"),
    ("/v1/completions", b'{"model":"m","prompt":"a","n":2}', 400, "BadRequestError", "`n`"),
    ("/v1/completions", b'{"model":"m","prompt":"\\ud800"}', 400, "BadRequestError", "JSON decode error"),
    ("/v1/completions", b'{"model":"m","prompt":"a","max_tokens":5000}', 400, "BadRequestError", "context length"),
    ("/v1/embeddings", b'{"model":"m","input":[]}', 400, "BadRequestError", "input"),
    ("/v1/completions", b'{"model":"other","prompt":"a"}', 404, "NotFoundError", "`other` does not exist"),
    ("/v1/nothing", b"{}", 404, "NotFoundError", "Not Found"),
])
def test_refusals_have_vllms_shape(path: str, body: bytes, status: int, kind: str, says: str) -> None:
    async def scenario() -> None:
        async with engine(context_tokens=4096) as client:
            reply = await client.post(path, content=body)
            error = reply.json()["error"]
            assert (reply.status_code, error["code"], error["type"]) == (status, status, kind)
            assert says in error["message"]
            assert await ledger(client) == []

    asyncio.run(scenario())


def test_key_and_method() -> None:
    async def scenario() -> None:
        async with engine(api_key="sesame") as client:
            for headers in ({}, {"authorization": "Bearer wrong"}):
                assert (await client.post("/v1/chat/completions", json=chat(), headers=headers)).status_code == 401
                assert (await client.get("/v1/models", headers=headers)).status_code == 401
            key = {"authorization": "Bearer sesame"}
            models = (await client.get("/v1/models", headers=key)).json()["data"]
            assert (models[0]["id"], models[0]["max_model_len"]) == ("m", 32_768)
            assert (await client.get("/v1/chat/completions", headers=key)).status_code == 405
            assert (await client.get("/health")).status_code == 200
            assert "version" in (await client.get("/version")).json()

    asyncio.run(scenario())


# --- clients that leave


def test_a_client_that_leaves_a_stream_frees_the_engine() -> None:
    async def scenario() -> None:
        async with engine(time_scale=5) as client:
            endless = chat(max_tokens=20_000, stream=True)
            async with client.stream("POST", "/v1/chat/completions", json=endless) as reply:
                lines = reply.aiter_lines()
                while " t9" not in await anext(lines):
                    pass
                assert await gauge(client, "num_requests_running") == 1
                assert (await client.get("/load")).json() == {"server_load": 1}
            await until(lambda: _is_cancelled(client))
            [row] = await ledger(client)
            assert 10 <= row["tokens_emitted"] < 20_000
            assert row["finished_at_s"] is None
            assert await gauge(client, "num_requests_running") == 0
            assert await gauge(client, "kv_cache_usage_perc") == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_before_the_first_byte_frees_the_engine(stream: bool) -> None:
    async def scenario() -> None:
        async with engine(time_scale=1, slots=1, max_num_batched_tokens=16) as client:
            first = asyncio.create_task(client.post("/v1/chat/completions", json=chat(max_tokens=20_000)))
            await until(lambda: _running(client, 1))
            second = asyncio.create_task(client.post("/v1/chat/completions", json=chat(max_tokens=9, stream=stream)))
            await until(lambda: _waiting(client, 1))
            second.cancel()
            await until(lambda: _waiting(client, 0))
            assert await gauge(client, "num_requests_running") == 1
            first.cancel()
            await until(lambda: _running(client, 0))
            assert [row["cancelled_at_s"] is not None for row in await ledger(client)] == [True, True]
            assert (await ledger(client))[1]["tokens_emitted"] == 0
            await asyncio.gather(first, second, return_exceptions=True)

    asyncio.run(scenario())


async def _is_cancelled(client: httpx.AsyncClient) -> bool:
    return (await ledger(client))[0]["cancelled_at_s"] is not None


async def _running(client: httpx.AsyncClient, count: int) -> bool:
    return await gauge(client, "num_requests_running") == count


async def _waiting(client: httpx.AsyncClient, count: int) -> bool:
    return await gauge(client, "num_requests_waiting") == count


# --- faults


def test_errors_come_with_retry_after_and_by_probability() -> None:
    async def scenario() -> None:
        async with engine(faults=faults("error 503:2")) as client:
            reply = await client.post("/v1/chat/completions", json=chat(max_tokens=1))
            assert (reply.status_code, reply.headers["retry-after"]) == (503, "2")
            assert reply.json()["error"]["type"] == "ServiceUnavailableError"
            await client.post("/fake/faults", json={"faults": ["error 500 p 0.5"]})
            replies = [await client.post("/v1/chat/completions", json=chat(max_tokens=1)) for _ in range(60)]
            failed = sum(reply.status_code == 500 for reply in replies)
            assert 10 < failed < 50
            changed = await client.post("/fake/faults", json={"faults": []})
            assert changed.json()["faults"] == []
            assert (await client.post("/v1/chat/completions", json=chat(max_tokens=1))).status_code == 200

    asyncio.run(scenario())


def test_a_hang_never_answers_and_lets_go_of_a_client_that_leaves() -> None:
    async def scenario() -> None:
        async with engine(faults=faults("hang")) as client:
            with pytest.raises(httpx.ReadTimeout):
                await client.post("/v1/chat/completions", json=chat(max_tokens=1), timeout=0.3)
            await until(lambda: _idle(client))

    asyncio.run(scenario())


async def _idle(client: httpx.AsyncClient) -> bool:
    return bool((await client.get("/load")).json() == {"server_load": 0})


async def _read_stream(client: httpx.AsyncClient, body: dict[str, Any], into: list[str]) -> None:
    async with client.stream("POST", "/v1/chat/completions", json=body) as reply:
        async for piece in reply.aiter_text():
            into.append(piece)  # noqa: PERF401  what came before the break must stay


def test_cut_streams_break_off_or_end_early() -> None:
    async def scenario() -> None:
        async with engine(faults=faults("cut 3")) as client:
            pieces: list[str] = []
            with pytest.raises(httpx.RemoteProtocolError):
                await _read_stream(client, chat(max_tokens=50, stream=True), pieces)
            deltas = [event["choices"][0]["delta"]["content"] for event in events("".join(pieces))]
            assert "".join(deltas) == numbered(3)
            with pytest.raises(httpx.RemoteProtocolError):
                await client.post("/v1/chat/completions", json=chat(max_tokens=50))
            await client.post("/fake/faults", json={"faults": ["cut 3 clean"]})
            clean = await client.post("/v1/chat/completions", json=chat(max_tokens=50, stream=True))
            assert clean.status_code == 200
            assert "[DONE]" not in clean.text
            assert len(events(clean.text)) == 1 + 3
            rows = await ledger(client)
            assert [row["cancelled_at_s"] is not None for row in rows] == [True, False, True]

    asyncio.run(scenario())


def test_metrics_freeze_and_lie() -> None:
    async def scenario() -> None:
        async with engine(time_scale=1) as client:
            busy = asyncio.create_task(client.post("/v1/chat/completions", json=chat(max_tokens=20_000)))
            await until(lambda: _running(client, 1))
            await client.post("/fake/faults", json={"faults": ["lie-metrics"]})
            assert await gauge(client, "num_requests_running") == 0
            await client.post("/fake/faults", json={"faults": ["freeze-metrics"]})
            frozen = (await client.get("/metrics")).text
            busy.cancel()
            await asyncio.gather(busy, return_exceptions=True)
            await until(lambda: _is_cancelled(client))
            assert (await client.get("/metrics")).text == frozen
            await client.post("/fake/faults", json={"faults": []})
            assert await gauge(client, "num_requests_running") == 0

    asyncio.run(scenario())


def test_a_slow_card_takes_that_much_longer() -> None:
    async def scenario() -> None:
        # 100 tokens of 4.8 ms each: long against the timers of a busy machine.
        async with engine(time_scale=1, noise_sigma=0) as client:
            async def seconds() -> float:
                await client.post("/v1/chat/completions", json=chat(max_tokens=100))
                row = (await ledger(client))[-1]
                return float(row["finished_at_s"] - row["first_token_at_s"])

            normal = await seconds()
            await client.post("/fake/faults", json={"faults": ["slow x4"]})
            assert 2 < await seconds() / normal < 6

    asyncio.run(scenario())


def test_slow_health_and_bad_schedules() -> None:
    async def scenario() -> None:
        async with engine(faults=faults("slow-health 5")) as client:
            with pytest.raises(httpx.ReadTimeout):
                await client.get("/health", timeout=0.2)
            for body, says in (
                ({"faults": ["explode"]}, "no fault 'explode'"),
                ({"faults": "hang"}, "list"),
                ({"faults": ["die"]}, "cannot die"),
            ):
                reply = await client.post("/fake/faults", json=body)
                assert reply.status_code == 400
                assert says in reply.json()["error"]["message"]
            assert (await client.get("/fake/faults")).json()["faults"] == ["slow-health 5"]

    asyncio.run(scenario())


def test_what_makes_no_engine_is_refused_when_the_app_is_built() -> None:
    with pytest.raises(BadFault, match="cannot die"):
        build_app(FakeEngineOptions(faults=faults("die from 1")))
    with pytest.raises(ValueError, match="max_num_seqs"):
        build_app(FakeEngineOptions(slots=0))
    with pytest.raises(UnknownCard, match="abacus"):
        build_app(FakeEngineOptions(card="abacus"))


# --- pace


def test_the_pace_is_the_cards() -> None:
    async def scenario() -> None:
        # h100x1-fp8 alone: about 4.75 ms a token; ten times faster here, so 1000 tokens take 0.475 s and never less.
        async with engine(time_scale=10, noise_sigma=0) as client:
            await client.post("/v1/chat/completions", json=chat(max_tokens=1001))
            [row] = await ledger(client)
            ideal_s = sum(4.7423435 + 0.0120378 + 4.6634752e-05 * (3 + number) for number in range(1000)) / 10_000
            took_s = row["finished_at_s"] - row["first_token_at_s"]
            assert 0.97 * ideal_s < took_s < 3 * ideal_s

    asyncio.run(scenario())


# --- as a process


@contextmanager
def process(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "loadtest.fake_engine", "--card", "h100x1-fp8", *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            hello = json.loads(child.stdout.readline())
            assert hello["pid"] == child.pid
            yield child, hello["url"]
        finally:
            child.kill()


def test_the_command_line_says_where_it_listens_and_stops_on_a_signal() -> None:
    with process("--served-model-name", "m", "--time-scale", "50", "--slots", "4", "--context", "100") as (child, url):
        assert httpx.get(f"{url}/v1/models", trust_env=False).json()["data"][0]["max_model_len"] == 100
        answer = httpx.post(f"{url}/v1/chat/completions", json=chat(max_tokens=3), trust_env=False).json()
        assert answer["choices"][0]["message"]["content"] == numbered(3)
        child.send_signal(signal.SIGTERM)
        assert child.wait(10) == -signal.SIGTERM


def test_a_signal_amid_a_stream_ends_it_cleanly_but_says_abort() -> None:
    arguments = ("--served-model-name", "m", "--time-scale", "5")
    body = chat(max_tokens=20_000, stream=True, stream_options={"include_usage": True})
    with process(*arguments) as (child, url), httpx.Client(trust_env=False, timeout=20) as client:
        with client.stream("POST", f"{url}/v1/chat/completions", json=body) as reply:
            text = ""
            for piece in reply.iter_text():
                text += piece
                if " t9" in piece:
                    child.send_signal(signal.SIGTERM)
        *tokens, last, usage, done = events(text)
        count = len(tokens) - 1
        assert "".join(token["choices"][0]["delta"]["content"] for token in tokens) == numbered(count)
        assert last["choices"][0]["finish_reason"] == "abort"
        assert usage["usage"]["completion_tokens"] == count < 20_000
        assert done == "[DONE]"
        assert child.wait(10) == -signal.SIGTERM


def test_the_fault_die_ends_the_process(tmp_path: Path) -> None:
    schedule = tmp_path / "faults.yaml"
    schedule.write_text("- slow x2 to 5\n- {kind: die, from_s: 0.3}\n")
    with process("--faults-file", str(schedule)) as (child, _):
        assert child.wait(10) == 70


@pytest.mark.parametrize(("arguments", "says"), [
    (["--card", "abacus"], "no card 'abacus'"),
    (["--fault", "explode"], "no fault 'explode'"),
    (["--time-scale", "0"], "time_scale"),
])
def test_bad_options_end_in_one_line(arguments: list[str], says: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "loadtest.fake_engine", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=30, check=False,
    )
    assert done.returncode == 2
    assert says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_the_engine_dies_with_its_parent() -> None:
    parent_code = (
        "import os, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-m', 'loadtest.fake_engine', '--die-with-parent'])\n"
        "child.wait()\n"
    )
    with subprocess.Popen([sys.executable, "-c", parent_code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        engine_pid = json.loads(parent.stdout.readline())["pid"]
        parent.kill()
        # The engine held the other end of the pipe: it ends when the engine does.
        assert parent.stdout.read() == ""
    deadline = time.monotonic() + 10
    while _alive(engine_pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_parent_that_is_gone_already_counts_as_dead() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    done = subprocess.run(
        [sys.executable, "-m", "loadtest.fake_engine", "--die-with-parent", str(gone.pid)],
        cwd=ROOT, capture_output=True, timeout=30, check=False,
    )
    assert done.returncode == 1


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z" and os.path.exists(f"/proc/{pid}")

