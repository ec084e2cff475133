"""Real llama.cpp servers under the supervisor, and `headrace up` as its user runs it."""

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from backends.embedded import trio
from backends.embedded.model_files import ModelFile, prepare
from backends.embedded.supervisor import ChildState, Supervisor
from headrace.up.run import engine_ports

GRAVITY = [{"role": "user", "content": "Explain gravity in one sentence."}]
NAMES = tuple(engine.name for engine in trio.TRIO)


@pytest.fixture(scope="session")
def model_files() -> Mapping[str, ModelFile]:
    """The real weights, from the user's cache folder; fetched on the first run ever."""
    pytest.importorskip("xllamacpp", reason="needs the `engines` extra")
    return prepare(os.environ)


@contextlib.asynccontextmanager
async def running(
    files: Mapping[str, ModelFile], tmp_path: Path, root: Path, names: tuple[str, ...] = NAMES
) -> AsyncIterator[tuple[Supervisor, dict[str, httpx.AsyncClient]]]:
    """These engines, ready, with a client for each."""
    ports = engine_ports(names)
    children = [
        trio.child_spec(engine, files[engine.precision], ports[engine.name], tmp_path / f"{engine.name}.log", str(root))
        for engine in trio.TRIO if engine.name in names
    ]
    async with contextlib.AsyncExitStack() as stack:
        supervisor = await stack.enter_async_context(Supervisor(children))
        await supervisor.wait_ready()
        clients = {
            name: await stack.enter_async_context(
                httpx.AsyncClient(base_url=trio.url(port), timeout=60, trust_env=False)
            )
            for name, port in ports.items()
        }
        yield supervisor, clients


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def all_gone(pids: list[int], limit_s: float = 10.0) -> bool:
    deadline_s = time.monotonic() + limit_s
    while any(map(runs, pids)) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return not any(map(runs, pids))


@pytest.mark.real_engine
def test_three_real_engines_answer_and_are_what_their_specs_say(
    model_files: Mapping[str, ModelFile], tmp_path: Path, root: Path
) -> None:
    async def scenario() -> None:
        async with running(model_files, tmp_path, root) as (_, clients):
            sizes = {}
            for engine in trio.TRIO:
                client = clients[engine.name]
                model = (await client.get("/v1/models")).json()["data"][0]
                assert model["id"] == engine.served_model_name
                assert model["meta"]["n_ctx"] == engine.context_tokens
                sizes[engine.precision] = model["meta"]["size"]
                slots = (await client.get("/slots")).json()
                assert [slot["n_ctx"] for slot in slots] == [engine.context_tokens] * engine.slots
                assert b"llamacpp:requests_processing 0" in (await client.get("/metrics")).content
                answer = (await client.post("/v1/chat/completions", json={
                    "model": "any", "messages": GRAVITY, "max_tokens": 32, "temperature": 0})).json()
                text = answer["choices"][0]["message"]["content"].lower()
                assert "gravity" in text
                assert "force" in text
            assert sizes["q4_1"] < sizes["q8_0"] < sizes["f16"]
            vectors = [
                (await client.post("/v1/embeddings", json={"input": "water"})).json()["data"][0]["embedding"]
                for client in clients.values()
            ]
            assert {len(vector) for vector in vectors} == {576}

    asyncio.run(scenario())


@pytest.mark.real_engine
def test_an_engine_that_is_killed_comes_back_on_its_port(
    model_files: Mapping[str, ModelFile], tmp_path: Path, root: Path
) -> None:
    async def scenario() -> None:
        async with running(model_files, tmp_path, root, ("llama-q4",)) as (supervisor, clients):
            pid = supervisor.status()[0].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            deadline_s = time.monotonic() + 20
            while supervisor.status()[0].state is not ChildState.READY or supervisor.status()[0].pid == pid:
                assert time.monotonic() < deadline_s
                await asyncio.sleep(0.05)
            assert (await clients["llama-q4"].get("/health")).json() == {"status": "ok"}
            assert supervisor.status()[0].restarts == 1

    asyncio.run(scenario())


async def _exhaust(pieces: AsyncIterator[bytes]) -> None:
    async for _ in pieces:
        pass


@pytest.mark.real_engine
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_an_engine_with_an_open_stream_ends_at_once_and_cuts_it(
    model_files: Mapping[str, ModelFile], tmp_path: Path, root: Path, signum: signal.Signals
) -> None:
    async def scenario() -> None:
        async with running(model_files, tmp_path, root, ("llama-q4",)) as (supervisor, clients):
            pid = supervisor.status()[0].pid
            assert pid is not None
            body = {"prompt": "Once upon a time", "max_tokens": 3000, "ignore_eos": True, "stream": True}
            async with clients["llama-q4"].stream("POST", "/v1/completions", json=body) as response:
                pieces = response.aiter_bytes()
                await anext(pieces)
                os.kill(pid, signum)
                with pytest.raises(httpx.RemoteProtocolError):
                    await _exhaust(pieces)
            assert await asyncio.to_thread(all_gone, [pid], 5.0)

    asyncio.run(scenario())


@pytest.mark.real_engine
def test_a_port_that_is_taken_is_a_clear_end(model_files: Mapping[str, ModelFile], root: Path) -> None:
    import socket

    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        result = subprocess.run(
            [sys.executable, "-m", "backends.embedded.llama_server", "--model", str(model_files["q4_1"].path),
             "--alias", "x", "--port", str(port)],
            cwd=root, capture_output=True, timeout=60, check=False, text=True,
        )
    assert result.returncode == 3
    (only_line,) = result.stderr.splitlines()
    assert f"127.0.0.1:{port}" in only_line
    assert "in use" in only_line
    assert result.stdout == ""


@pytest.mark.real_engine
def test_a_real_engine_is_measured(model_files: Mapping[str, ModelFile], tmp_path: Path, root: Path) -> None:
    from backends.embedded import calibrate

    engine = next(engine for engine in trio.TRIO if engine.name == "llama-q4")

    async def scenario() -> calibrate.Samples:
        async with running(model_files, tmp_path, root, (engine.name,)) as (_, clients):
            url = str(clients[engine.name].base_url)
            return await calibrate.measure(url, engine.served_model_name, engine.slots, rng=random.Random(3))

    samples = asyncio.run(scenario())
    # A third of the prompt words make more than one token; none is taken from cache.
    assert all(sample.prompt_tokens >= words for sample, words in zip(samples.prefill, calibrate.PROMPT_WORDS * 3,
                                                                      strict=False))
    assert {sample.streams for sample in samples.decode} == {1, engine.slots}
    found = calibrate.fit(samples, version="v", source="s")
    # Prompts are read faster than text is written, on whatever machine: the one property that routing leans on.
    longest = max(samples.prefill, key=lambda sample: sample.prompt_tokens)
    one_step_ms = found.decode_base_ms + found.decode_ms_per_seq + found.decode_ms_per_seq_token * 100
    assert 0 < longest.ttft_ms / longest.prompt_tokens < one_step_ms


# --- the whole of it

@contextlib.contextmanager
def headrace_up(root: Path, run_dir: Path, *options: str) -> Iterator[tuple["subprocess.Popen[str]", dict[str, Any]]]:
    """`headrace up --json` in a process of its own, with what it says when it is ready."""
    command = [sys.executable, "-m", "headrace", "up", "--json", "--port", "0", "--admin-port", "0",
               "--run-dir", str(run_dir), *options]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        state: dict[str, Any] = {"engines": []}
        try:
            line = process.stdout.readline()
            assert line, f"`headrace up` ended with {process.wait(30)} before it was ready"
            state = json.loads(line)
            yield process, state
        finally:
            for pid in (process.pid, *(engine["pid"] for engine in state["engines"])):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@pytest.mark.real_engine
@pytest.mark.usefixtures("model_files")
def test_up_serves_real_text_from_real_engines(tmp_path: Path, root: Path) -> None:
    with headrace_up(root, tmp_path, "--no-calibrate") as (process, state):
        body = {"model": state["model"], "messages": GRAVITY, "max_tokens": 24, "temperature": 0}
        with httpx.Client(base_url=state["gateway_url"], timeout=60, trust_env=False) as client:
            answer = client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            assert "ravity" in answer.json()["choices"][0]["message"]["content"]
            assert answer.json()["model"] == state["model"]
            assert answer.headers["x-headrace-backend"] in NAMES
            with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as stream:
                assert list(stream.iter_lines())[-2:] == ["data: [DONE]", ""]
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        assert all_gone([engine["pid"] for engine in state["engines"]])


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_up_ends_all_of_it(tmp_path: Path, root: Path, signum: signal.Signals) -> None:
    with headrace_up(root, tmp_path, "--engines", "simulated", "--time-scale", "20") as (process, state):
        pids = [engine["pid"] for engine in state["engines"]]
        assert len(pids) == 3
        assert all(map(runs, pids))
        assert json.loads((tmp_path / "state.json").read_text()) == state
        process.send_signal(signum)
        assert process.wait(30) == (-signal.SIGKILL if signum is signal.SIGKILL else 0)
        assert all_gone(pids)


def test_up_brings_a_killed_engine_back_and_state_json_follows(tmp_path: Path, root: Path) -> None:
    with headrace_up(root, tmp_path, "--engines", "simulated", "--time-scale", "20") as (process, state):
        victim = state["engines"][1]
        os.kill(victim["pid"], signal.SIGKILL)
        deadline_s = time.monotonic() + 30
        while True:
            now = json.loads((tmp_path / "state.json").read_text())["engines"][1]
            if now["state"] == "ready" and now["restarts"] == 1:
                break
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        assert now["pid"] != victim["pid"]
        assert now["url"] == victim["url"]
        assert httpx.get(f"{now['url']}/health", trust_env=False).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert all_gone([now["pid"], state["engines"][0]["pid"]])
