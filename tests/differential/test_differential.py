"""The suites of others: what passes straight at a backend passes through the gateway, and no input makes it fail.

They need an environment of their own, which `scripts/differential` makes; without it they are skipped.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from router.app import Running
from tests.gateway_stack import MODEL, gateway
from tests.raw_client import at_rest, eventually, sample
from tests.scripted_backend import Received, ScriptedBackend, completion, delta

HOME = Path(os.environ.get("HEADRACE_DIFFERENTIAL", "/nonexistent")).absolute()
pytestmark = [
    pytest.mark.anyio,
    pytest.mark.differential,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not HOME.is_dir(), reason="scripts/differential makes what these need, and runs them"),
]
OPENAI_TESTS = ("chat/test_completions.py", "test_completions.py", "test_models.py")
SELECTED = "create or (list and models) or (retrieve and models)"
OPENAI_MODELS = ("gpt-6-astra", "gpt-3.5-turbo-instruct", "model", MODEL)
"""Names that the tests ask for."""
USAGE = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}


async def answer_any(request: Received) -> None:
    """An engine that answers every route in OpenAI's shape, whatever it is asked."""
    model = request.json.get("model", "m")
    if request.path.endswith("/embeddings"):
        vector = {"object": "embedding", "index": 0, "embedding": [0.5, -0.5]}
        await request.answer(200, {"object": "list", "model": model, "data": [vector], "usage": USAGE})
    elif request.path.endswith("/chat/completions"):
        if request.json.get("stream"):
            await request.events(delta("hel", model=model), delta("lo", model=model, finish="stop"))
        else:
            answer = completion(model=model)
            answer["choices"][0]["logprobs"] = None
            answer["choices"][0]["message"]["refusal"] = None
            await request.answer(200, answer)
    else:
        choice = {"index": 0, "text": "hello", "finish_reason": "stop", "logprobs": None}
        document = {"id": "c", "object": "text_completion", "created": 1, "model": model, "choices": [choice]}
        if request.json.get("stream"):
            await request.events(document)
        else:
            await request.answer(200, {**document, "usage": USAGE})


class Engine(ScriptedBackend):
    """Lists its models as the gateway does, so that both can be asked the same."""

    async def _answer_probe(self, request: Received) -> None:
        cards = [{"id": name, "object": "model", "created": 1, "owned_by": "x"} for name in OPENAI_MODELS]
        if request.path == "/v1/models":
            await request.answer(200, {"object": "list", "data": cards})
        elif request.path.startswith("/v1/models/"):
            await request.answer(200, {**cards[0], "id": request.path.rpartition("/")[2]})
        else:
            await super()._answer_probe(request)


@asynccontextmanager
async def stack(folder: Path) -> AsyncIterator[tuple[Engine, Running]]:
    engine = Engine(answer_any)
    async with engine.serving():
        entries = [{"url": engine.url, "model": name} for name in OPENAI_MODELS]
        models = [{"name": name} for name in OPENAI_MODELS]
        async with gateway(folder, entries, models=models) as process:
            yield engine, process


async def run(*command: str, cwd: Path, environment: Mapping[str, str]) -> tuple[int, str]:
    """Exit code and output of a program of the suites' environment."""
    process = await asyncio.create_subprocess_exec(
        str(HOME / "venv/bin" / command[0]), *command[1:], cwd=cwd, env={**os.environ, **environment},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    out, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode("utf-8", "replace")


async def passed(base_url: str, report: Path) -> set[str]:
    """Which of openai-python's tests pass at this address."""
    code, out = await run(
        "python", "-m", "pytest", *[f"tests/api_resources/{name}" for name in OPENAI_TESTS], "-k", SELECTED,
        "-o", "addopts=", "-p", "no:cacheprovider", "-q", f"--junitxml={report}",
        cwd=HOME / "openai", environment={"TEST_API_BASE_URL": base_url},
    )  # fmt: skip
    assert code in (0, 1), out[-3000:]
    cases = ElementTree.parse(report).getroot().iter("testcase")  # noqa: S314 written by the suite we started
    return {
        f"{case.get('classname')}.{case.get('name')}" for case in cases
        if not any(case.find(word) is not None for word in ("failure", "error", "skipped"))
    }


async def test_openais_own_tests_pass_through_the_gateway_as_they_do_without(tmp_path: Path) -> None:
    async with stack(tmp_path) as (engine, process):
        direct = await passed(f"{engine.url}/v1", tmp_path / "direct.xml")
        known = len(engine.requests)
        through = await passed(f"{process.url}/v1", tmp_path / "through.xml")
        print(f"openai-python: {len(direct)} pass direct, {len(through)} through the gateway")
        assert len(direct) > 60
        assert through == direct
        await eventually(lambda: at_rest(process))
        assert sample(process, "headrace_requests_total", outcome="ok") == len(engine.requests) - known > 60


async def test_schemathesis_finds_no_failure_of_the_gateways_own(tmp_path: Path, root: Path) -> None:
    arguments: dict[str, Any] = {"--phases": "examples,coverage,fuzzing", "-n": "40", "--seed": "1", "--max-time": "40"}
    async with stack(tmp_path) as (engine, process):
        code, out = await run(
            "schemathesis", "run", str(root / "docs/openapi.yaml"), "--url", process.url,
            "--checks", "not_a_server_error,response_schema_conformance,content_type_conformance",
            "--generation-deterministic", "--no-color", *[part for pair in arguments.items() for part in pair],
            cwd=tmp_path, environment={},
        )  # fmt: skip
        print(out[-1200:])
        assert code == 0, out[-6000:]
        await eventually(lambda: at_rest(process))
        assert sample(process, "headrace_requests_total", outcome="internal_error") == 0
        assert sample(process, "headrace_requests_total", outcome="ok") == len(engine.requests) > 0
