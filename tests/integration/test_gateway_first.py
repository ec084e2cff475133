"""One request through a real gateway: the shape of an answer, streamed and whole."""

from pathlib import Path

import pytest

from tests.gateway_stack import ALIAS, MODEL, chat, client_of, gateway
from tests.scripted_backend import ScriptedBackend, delta, event

pytestmark = pytest.mark.anyio


async def test_a_whole_answer_has_the_clients_model_name_and_says_who_answered(tmp_path: Path) -> None:
    async with (
        ScriptedBackend().serving() as backend,
        gateway(tmp_path, [backend]) as process,
        client_of(process) as client,
    ):
        answer = await client.post("/v1/chat/completions", json=chat(model=ALIAS))
    assert answer.status_code == 200
    assert answer.json()["model"] == ALIAS
    assert answer.headers["x-headrace-backend"] == "b0"
    assert answer.headers["x-headrace-reason"] == "only candidate"
    assert float(answer.headers["x-headrace-overhead-ms"]) >= 0
    assert backend.requests[0].json == chat(model="served")


async def test_a_stream_is_relayed_byte_for_byte_but_for_the_model_name(tmp_path: Path) -> None:
    async with (
        ScriptedBackend().serving() as backend,
        gateway(tmp_path, [backend]) as process,
        client_of(process) as client,
    ):
        answer = await client.post("/v1/chat/completions", json=chat(stream=True))
    expected = event(delta("hel", model=MODEL)) + event(delta("lo", model=MODEL, finish="stop")) + b"data: [DONE]\n\n"
    assert answer.content == expected
    assert backend.requests[0].json["stream_options"] == {"include_usage": True}
