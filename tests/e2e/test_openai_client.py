"""The official `openai` client, through the gateway, to real llama.cpp engines."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from backends.embedded.model_files import MODEL_NAME
from tests.e2e.conftest import MAX_BODY_BYTES, LlamaFleet
from tests.processes import GatewayProcess

pytestmark = pytest.mark.real_engine

ALIAS = "smollm2"
QUESTION = "Name three colours of the rainbow."


def says(text: str) -> Any:
    return [{"role": "user", "content": text}]


@pytest.fixture
def client(llama_fleet: LlamaFleet) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{llama_fleet.gateway.url}/v1", api_key="sk-of-the-client", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("name", [MODEL_NAME, ALIAS])
def test_a_chat_is_answered_under_the_name_that_was_asked_for(client: OpenAI, name: str) -> None:
    answer = client.chat.completions.create(model=name, messages=says(QUESTION), max_tokens=24, temperature=0)
    assert answer.model == name
    assert answer.choices[0].message.role == "assistant"
    assert (answer.choices[0].message.content or "").strip()
    assert answer.usage is not None
    assert answer.usage.prompt_tokens > 5
    assert 1 <= answer.usage.completion_tokens <= 24
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_gives_the_text_of_the_whole_answer_and_no_usage_that_nobody_asked_for(client: OpenAI) -> None:
    def create(**more: Any) -> Any:
        return client.chat.completions.create(
            model=ALIAS, messages=says(QUESTION), max_tokens=12, temperature=0, seed=1, **more)

    chunks = list(create(stream=True))
    assert {chunk.model for chunk in chunks} == {ALIAS}
    assert all(chunk.usage is None for chunk in chunks)
    assert all(chunk.choices for chunk in chunks)
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["length"]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert len([chunk for chunk in chunks if chunk.choices[0].delta.content]) > 3, "it came piece by piece"
    assert text.strip()


def test_usage_comes_last_where_it_is_asked_for(client: OpenAI) -> None:
    chunks = list(client.chat.completions.create(
        model=ALIAS, messages=says(QUESTION), max_tokens=8, stream=True, stream_options={"include_usage": True}))
    *before, last = chunks
    assert all(chunk.usage is None for chunk in before)
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 8
    assert last.model == ALIAS


def test_headers_say_who_answered_and_why(client: OpenAI, llama_fleet: LlamaFleet) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=ALIAS, messages=says("hi"), max_tokens=4, extra_headers={"x-request-id": "trace-me-42"})
    assert raw.headers["x-headrace-backend"] in {engine.name for engine in llama_fleet.engines}
    assert raw.headers["x-headrace-reason"]
    assert float(raw.headers["x-headrace-overhead-ms"]) >= 0
    assert raw.headers["x-request-id"] == "trace-me-42"
    assert raw.request_id == "trace-me-42"
    assert raw.parse().choices[0].message.content


def test_streamed_headers_come_with_the_first_token(client: OpenAI) -> None:
    with client.chat.completions.with_streaming_response.create(
        model=ALIAS, messages=says("hi"), max_tokens=4, stream=True
    ) as raw:
        assert raw.headers["x-headrace-backend"]
        assert raw.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in raw.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"


def test_legacy_completions(client: OpenAI) -> None:
    whole = client.completions.create(model=ALIAS, prompt="Once upon a time", max_tokens=8, temperature=0)
    assert whole.model == ALIAS
    assert whole.choices[0].text.strip()
    chunks = list(client.completions.create(model=ALIAS, prompt="Once upon a time", max_tokens=8, stream=True))
    assert {chunk.model for chunk in chunks} == {ALIAS}
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices).strip()


def test_embeddings(client: OpenAI) -> None:
    answer = client.embeddings.create(model=ALIAS, input=["water", "a turbine"])
    assert answer.model == ALIAS
    assert [entry.index for entry in answer.data] == [0, 1]
    one, two = (entry.embedding for entry in answer.data)
    assert len(one) == len(two) == 576, "SmolLM2-135M's width"
    assert one != two
    assert answer.usage.prompt_tokens > 1


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL_NAME]
    assert client.models.retrieve(MODEL_NAME).id == MODEL_NAME
    assert client.models.retrieve(ALIAS).id == ALIAS
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-99")


def test_an_unknown_model_is_not_found(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-99", messages=says("hi"))
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"
    assert MODEL_NAME in caught.value.message
    assert caught.value.request_id


def test_a_request_that_the_gateway_cannot_read_is_a_bad_one(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=ALIAS, messages=says("hi"), max_tokens=-1)
    assert caught.value.param == "max_tokens"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=ALIAS, messages=says("hi"), extra_headers={"x-headrace-class": "royal"})
    assert caught.value.code == "unknown_latency_class"


def test_a_request_that_the_engine_refuses_is_a_bad_one_in_its_words(client: OpenAI, llama_fleet: LlamaFleet) -> None:
    failed = sum(entry["failed_requests"] for entry in llama_fleet.gateway.fleet()["backends"])
    nonsense: Any = {"type": "nonsense"}
    with pytest.raises(openai.BadRequestError, match="response_format"):
        client.chat.completions.create(model=ALIAS, messages=says("hi"), max_tokens=4, response_format=nonsense)
    assert sum(entry["failed_requests"] for entry in llama_fleet.gateway.fleet()["backends"]) == failed


def test_a_prompt_that_no_backend_has_room_for_is_a_bad_request(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=ALIAS, messages=says("word " * 4_000), max_tokens=4)
    assert caught.value.code == "context_length_exceeded"


def test_a_body_over_the_limit_is_too_large(client: OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        client.chat.completions.create(model=ALIAS, messages=says("x" * (MAX_BODY_BYTES + 1)))
    assert caught.value.status_code == 413
    assert caught.value.code == "request_too_large"


def test_fields_that_the_gateway_does_not_know_reach_the_engine(client: OpenAI) -> None:
    """llama.cpp's own `n_probs` changes the answer, so it must have come through."""
    answer = client.chat.completions.create(
        model=ALIAS, messages=says("hi"), max_tokens=2, logprobs=True, top_logprobs=3,
        extra_body={"timings_per_token": True, "no_such_field": {"nested": [1, 2.50, None]}})
    assert answer.choices[0].logprobs is not None
    assert len((answer.choices[0].logprobs.content or [])[0].top_logprobs) == 3
    assert "timings" in (answer.model_extra or {}), "the engine's own members come back"


def test_n_stop_and_seed(client: OpenAI) -> None:
    several = client.chat.completions.create(model=ALIAS, messages=says("Say a number."), n=2, max_tokens=3)
    assert [choice.index for choice in several.choices] == [0, 1]
    counting: dict[str, Any] = {"model": ALIAS, "prompt": "1, 2, 3, 4, 5, 6,", "max_tokens": 24, "temperature": 0}
    assert "9" in client.completions.create(**counting).choices[0].text
    stopped = client.completions.create(**counting, stop=["9"]).choices[0]
    assert "9" not in stopped.text
    assert stopped.finish_reason == "stop"


def test_a_seed_repeats_an_answer_on_the_same_backend(client: OpenAI) -> None:
    seen: dict[str, str] = {}
    for _ in range(12):
        raw = client.chat.completions.with_raw_response.create(
            model=ALIAS, messages=says("Tell me a joke."), max_tokens=6, seed=7, temperature=1.0,
            extra_body={"cache_prompt": False})
        backend, text = raw.headers["x-headrace-backend"], raw.parse().choices[0].message.content or ""
        if backend in seen:
            assert text == seen[backend]
            return
        seen[backend] = text
    raise AssertionError("no backend served twice")


@pytest.mark.parametrize("text", ["Zürich, 東京, \u2028 🚰", 'quotes " and \\ back', "\ufeffeńd\u200d\ud7ff"])
def test_text_of_any_script_passes_unharmed(client: OpenAI, text: str) -> None:
    """Written out through a grammar that allows this text alone, so what comes back is what went in."""
    literal = "".join(f"\\U{ord(character):08x}" for character in text)
    for stream in (False, True):
        answer: Any = client.chat.completions.create(
            model=ALIAS, messages=says(f"Repeat: {text}"), max_tokens=60, stream=stream,
            extra_body={"grammar": f'root ::= "{literal}"'})
        parts = [chunk.choices[0].delta.content or "" for chunk in answer] if stream else [
            answer.choices[0].message.content]
        assert "".join(parts) == text


def test_the_async_client_in_parallel(llama_fleet: LlamaFleet) -> None:
    async def run() -> None:
        async with AsyncOpenAI(base_url=f"{llama_fleet.gateway.url}/v1", api_key="x", max_retries=0) as client:
            async def one(number: int) -> str:
                stream = await client.chat.completions.create(
                    model=ALIAS, messages=says(f"Count to {number}."), max_tokens=8, stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            texts = await asyncio.gather(*[one(number) for number in range(6)])
            assert all(text.strip() for text in texts)
            whole = await client.chat.completions.create(model=ALIAS, messages=says("hi"), max_tokens=4)
            assert whole.choices[0].message.content

    asyncio.run(run())
    llama_fleet.gateway.await_empty_books()


def test_a_client_that_breaks_off_a_stream_frees_the_engine(client: OpenAI, llama_fleet: LlamaFleet) -> None:
    with client.chat.completions.create(
        model=ALIAS, messages=says("Tell a long story."), max_tokens=900, stream=True
    ) as stream:
        for number, _ in enumerate(stream):
            if number == 3:
                break
    llama_fleet.gateway.await_empty_books()


def test_three_backends_serve_within_the_first_thirty_requests_and_it_is_said_why(
    llama_fleet: LlamaFleet, tmp_path: Path
) -> None:
    seen: dict[str, list[str]] = {}
    with (
        GatewayProcess(tmp_path, llama_fleet.gateway.document) as fresh,
        OpenAI(base_url=f"{fresh.url}/v1", api_key="x", max_retries=0) as client,
    ):
        for number in range(30):
            raw = client.chat.completions.with_raw_response.create(
                model=ALIAS, messages=says(f"Say {number}."), max_tokens=2)
            seen.setdefault(raw.headers["x-headrace-backend"], []).append(raw.headers["x-headrace-reason"])
        served = {entry["name"]: entry["served_requests"] for entry in fresh.fleet()["backends"]}
    print({name: f"{len(reasons)}, last for {reasons[-1]!r}" for name, reasons in seen.items()})
    assert set(seen) == {engine.name for engine in llama_fleet.engines}
    assert all(reasons[0] for reasons in seen.values())
    assert served == {name: len(reasons) for name, reasons in seen.items()}
