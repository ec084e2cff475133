"""What the official `openai` client makes of a fleet in trouble: the exception classes that its users catch."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.gateway_stack import MODEL
from tests.processes import FakeEngine, GatewayProcess, RawStream, fake_engines, gateway_process, until

MESSAGES: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def shared_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeEngine]:
    with fake_engines(tmp_path_factory.mktemp("openai_errors"), ["b0"]) as (engine,):
        yield engine


@pytest.fixture
def engine(shared_engine: FakeEngine) -> Iterator[FakeEngine]:
    yield shared_engine
    shared_engine.set_faults()


@contextmanager
def client_of(gateway: GatewayProcess, **options: Any) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{gateway.url}/v1", api_key="sk-of-the-client", max_retries=0, **options) as client:
        yield client


@pytest.mark.parametrize("fault", ["cut 5", "cut 5 clean"])
def test_half_an_answer_raises_after_the_part_that_came(engine: FakeEngine, tmp_path: Path, fault: str) -> None:
    """Also where the engine's own connection ended as cleanly as if the answer were whole."""
    engine.set_faults(fault)
    with gateway_process(tmp_path, [engine.backend]) as gateway, client_of(gateway) as client:
        pieces: list[str] = []
        with client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=20, stream=True) as stream:
            texts = (chunk.choices[0].delta.content or "" for chunk in stream)
            with pytest.raises(openai.APIError) as caught:
                pieces.extend(texts)
    assert "".join(pieces) == " t0 t1 t2 t3 t4"
    assert caught.value.code == "upstream_truncated"


def test_keys_stay_on_their_own_side_of_the_gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients show the gateway their key, the gateway shows the engine its own; neither knows the other's."""
    monkeypatch.setenv("KEY_OF_THE_CLIENT", "sk-of-the-client")
    monkeypatch.setenv("KEY_OF_THE_ENGINE", "sk-of-the-engine")
    with (
        fake_engines(tmp_path, ["b0"], "--api-key", "sk-of-the-engine") as (engine,),
        gateway_process(tmp_path, [{**engine.backend, "api_key_env": "KEY_OF_THE_ENGINE"}],
                        auth={"api_keys_env": ["KEY_OF_THE_CLIENT"]}) as gateway,
        client_of(gateway) as client,
    ):
        assert client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=2).choices
        assert [model.id for model in client.models.list()] == [MODEL]
        for key in ("sk-of-the-engine", "sk-of-somebody", "sk-of-the-clien"):
            other = client.with_options(api_key=key)
            with pytest.raises(openai.AuthenticationError) as caught:
                other.chat.completions.create(model=MODEL, messages=MESSAGES)
            assert caught.value.code == "invalid_api_key"
            with pytest.raises(openai.AuthenticationError):
                other.models.list()
        assert len(engine.requests()) == 1
        said = gateway.log.read_text() + str(gateway.config()) + str(gateway.fleet())
        assert "sk-of-the" not in said


def test_nobody_to_serve_is_503_with_a_date(engine: FakeEngine, tmp_path: Path) -> None:
    with (
        gateway_process(tmp_path, [{**engine.backend, "weight": 0}]) as gateway,
        client_of(gateway) as client,
        pytest.raises(openai.InternalServerError) as caught,
    ):
        client.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert caught.value.status_code == 503
    assert caught.value.code == "no_backend_available"
    assert int(caught.value.response.headers["retry-after"]) >= 1


def test_too_many_at_once_is_a_rate_limit(engine: FakeEngine, tmp_path: Path) -> None:
    with (
        gateway_process(tmp_path, [engine.backend], limits={"max_in_flight": 1}) as gateway,
        client_of(gateway) as client,
    ):
        with RawStream(gateway.url, max_tokens=20_000).send() as stream:
            stream.read_until(b" t3")
            with pytest.raises(openai.RateLimitError) as caught:
                client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=3)
        gateway.await_empty_books()
        assert client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=3).choices
    assert int(caught.value.response.headers["retry-after"]) >= 1


def test_an_engine_that_never_answers_is_504(engine: FakeEngine, tmp_path: Path) -> None:
    engine.set_faults("hang")
    timeouts = {"first_token_s": 0.5, "total_s": 1.0}
    with gateway_process(tmp_path, [engine.backend], timeouts=timeouts) as gateway, client_of(gateway) as client:
        for stream in (True, False):
            with pytest.raises(openai.InternalServerError) as caught:
                client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=stream)
            assert caught.value.status_code == 504
            assert caught.value.code == "upstream_timeout"
        until(lambda: engine.in_flight() == 0, "the engine to be let go", limit_s=5)


def test_an_engine_that_is_overloaded_is_heard_in_its_own_words(engine: FakeEngine, tmp_path: Path) -> None:
    engine.set_faults("error 429:7")
    with (
        gateway_process(tmp_path, [engine.backend]) as gateway,
        client_of(gateway) as client,
        pytest.raises(openai.RateLimitError, match="injected fault") as caught,
    ):
        client.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert caught.value.response.headers["retry-after"] == "7"


def test_the_clients_own_retry_finds_the_engine_once_it_is_well(engine: FakeEngine, tmp_path: Path) -> None:
    """A fault of a second, a client that tries again: its user sees an answer."""
    with (
        gateway_process(tmp_path, [engine.backend], health={"base_ejection_s": 0.5}) as gateway,
        OpenAI(base_url=f"{gateway.url}/v1", api_key="x", max_retries=4) as client,
    ):
        engine.set_faults("error 503:1 from 0 to 1")
        raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=MESSAGES, max_tokens=3)
    assert raw.parse().choices[0].message.content == " t0 t1 t2"
    assert raw.retries_taken >= 1
