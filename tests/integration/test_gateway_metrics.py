"""The page of metrics: a fixed number of series, and counts that add up to what was sent."""

import asyncio
import random
import secrets
from pathlib import Path

import pytest

from tests.gateway_stack import ALIAS, MODEL, chat, client_of, fleet_document, gateway, write_fleet
from tests.raw_client import CHAT_PATH, at_rest, eventually, raw_client, raw_exchange, request_bytes, sample, series
from tests.scripted_backend import SSE_HEAD, Received, ScriptedBackend, answer_hello, completion, delta, event

pytestmark = pytest.mark.anyio


async def test_p50_nothing_that_a_client_sends_becomes_a_series(tmp_path: Path) -> None:
    def noise() -> str:
        return secrets.token_hex(8)

    async with (
        ScriptedBackend().serving() as backend,
        gateway(tmp_path, [backend], poll={"interval_s": 300, "timeout_s": 1}) as process,
        client_of(process) as client,
    ):

        async def one(word: str) -> None:
            headers = {"host": word, "authorization": f"Bearer {word}"}
            await client.post(CHAT_PATH, json=chat(model=word), headers=headers)
            await client.post(CHAT_PATH, json=chat(user=word, **{word: 1}), headers={"x-request-id": word})
            await client.post(CHAT_PATH, json=chat(), headers={"x-headrace-class": word})
            await client.post(f"/v1/{word}", json={})
            await client.get(f"/v1/models/{word}")
            await client.request(word[:5].upper(), CHAT_PATH)
            await client.post(f"{CHAT_PATH}?{word}={word}", json=chat(model=ALIAS))

        await one("warm")
        await eventually(lambda: at_rest(process))
        before = (await client.get("/metrics")).text
        words = [noise() for _ in range(30)]
        for word in words:
            await one(word)
        await eventually(lambda: at_rest(process))
        after = (await client.get("/metrics")).text

    def names(page: str) -> set[str]:
        return {line.rpartition(" ")[0] for line in page.splitlines() if not line.startswith("#")}

    assert names(after) == names(before)
    assert not any(word in after for word in words)
    assert len(after) < 1_000_000


async def test_p50_the_counts_add_up(tmp_path: Path) -> None:
    rng = random.Random(50)

    async def broken(request: Received) -> None:
        await request.write(SSE_HEAD)
        await request.chunk(event(delta("a")))
        await request.write(b"0\r\n\r\n")

    async def refusing(request: Received) -> None:
        await request.answer(400, {"error": {"message": "no"}})

    async def failing(request: Received) -> None:
        await request.answer(500, {"error": {"message": "no"}})

    async def hanging(request: Received) -> None:
        await request.until_gone()

    never_out = {"silent_failures_to_eject": 1000, "failures_to_eject": 1000, "failure_ratio_to_eject": None}
    plan = ["ok"] * 12 + ["truncated"] * 5 + ["client_error"] * 4 + ["backend_error"] * 3 + ["client_closed"] * 2
    plan += ["refused"] * 6
    rng.shuffle(plan)
    scripts = {"ok": answer_hello, "truncated": broken, "client_error": refusing, "backend_error": failing,
               "client_closed": hanging, "refused": answer_hello}  # fmt: skip
    async with (
        ScriptedBackend().serving() as one,
        ScriptedBackend().serving() as two,
        gateway(tmp_path, [one, two], health=never_out) as process,
    ):
        for outcome in plan:
            one.script = two.script = scripts[outcome]
            if outcome == "client_closed":
                sent = len(one.requests) + len(two.requests)
                async with raw_client(process) as client:
                    await client.send(request_bytes(chat(stream=True)))
                    await eventually(lambda sent=sent: len(one.requests) + len(two.requests) > sent)  # type: ignore[misc]
                    client.leave()
            else:
                body = b"{" if outcome == "refused" else chat(stream=rng.random() < 0.5 or outcome == "truncated")
                await raw_exchange(process, request_bytes(body, headers="connection: close\r\n"))
        await eventually(lambda: at_rest(process))
        for outcome in set(plan):
            assert sample(process, "headrace_requests_total", outcome=outcome) == plan.count(outcome), outcome
        assert sample(process, "headrace_requests_total") == len(plan)
        attempts = len(one.requests) + len(two.requests)
        sent = len(plan) - plan.count("refused") + plan.count("backend_error")  # a 500 has a second opinion
        assert sample(process, "headrace_attempts_total") == attempts == sent
        assert sample(process, "headrace_decision_seconds_count") == attempts
        assert sample(process, "headrace_request_duration_seconds_count") == len(plan)
        assert sample(process, "headrace_requests_total", backend="b0", outcome="ok") == sample(
            process, "headrace_attempts_total", backend="b0", outcome="success"
        )
        for name in ("headrace_backend_in_flight_requests", "headrace_backend_in_flight_tokens"):
            assert [value for _, value in series(process, name) if value] == []
        assert {labels["model"] for labels, _ in series(process, "headrace_requests_total")} <= {MODEL, "other"}


async def test_in_flight_is_seen_while_it_lasts(tmp_path: Path) -> None:
    first, go_on = asyncio.Event(), asyncio.Event()

    async def script(request: Received) -> None:
        await request.write(SSE_HEAD)
        await first.wait()
        await request.chunk(event(delta("a")))
        await go_on.wait()
        await request.chunk(event(delta("", finish="stop")) + b"data: [DONE]\n\n")
        await request.write(b"0\r\n\r\n")

    async with (
        ScriptedBackend(script).serving() as backend,
        gateway(tmp_path, [backend]) as process,
        client_of(process) as client,
    ):
        held = asyncio.create_task(client.post(CHAT_PATH, json=chat(stream=True)))
        await eventually(lambda: sample(process, "headrace_backend_in_flight_requests") == 1)
        assert sample(process, "headrace_backend_in_flight_tokens", kind="prefill") >= 1
        first.set()
        await eventually(lambda: sample(process, "headrace_backend_in_flight_tokens", kind="context") >= 2)
        assert sample(process, "headrace_backend_in_flight_tokens", kind="prefill") == 0
        go_on.set()
        await held
        await eventually(lambda: sample(process, "headrace_backend_in_flight_requests") == 0)
        assert sample(process, "headrace_time_to_first_token_seconds_count", backend="b0") == 1


async def test_what_a_removed_backend_still_has_is_counted(tmp_path: Path) -> None:
    go_on = asyncio.Event()

    async def script(request: Received) -> None:
        await go_on.wait()
        await request.answer(200, completion())

    def in_flight() -> dict[str, float]:
        found = list(series(process, "headrace_backend_in_flight_requests"))
        assert len({labels["backend"] for labels, _ in found}) == len(found)
        return {labels["backend"]: value for labels, value in found}

    async with (
        ScriptedBackend(script).serving() as old,
        ScriptedBackend(script).serving() as new,
        gateway(tmp_path, [old, old]) as process,
        client_of(process) as client,
    ):
        held = [asyncio.create_task(client.post(CHAT_PATH, json=chat())) for _ in range(4)]
        await eventually(lambda: in_flight() == {"b0": 2, "b1": 2})
        write_fleet(tmp_path / "fleet.yaml", fleet_document([new]))  # another b0, and b1 is gone
        assert (await process.gateway.reloader.reload("test")).ok
        assert in_flight() == {"b0": 2, "b1": 2}
        held.append(asyncio.create_task(client.post(CHAT_PATH, json=chat())))
        await eventually(lambda: in_flight() == {"b0": 3, "b1": 2})
        go_on.set()
        assert {answer.status_code for answer in await asyncio.gather(*held)} == {200}
        await eventually(lambda: in_flight() == {"b0": 0})


@pytest.mark.parametrize(
    "usage", [{"completion_tokens": -5}, {"prompt_tokens": 10**400}, [], "7", {"prompt_tokens": "x"}]
)
async def test_counts_that_are_none_spoil_no_metric(tmp_path: Path, usage: object) -> None:
    async def script(request: Received) -> None:
        if request.json.get("stream"):
            await request.events(delta("a"), delta("", finish="stop", usage=usage))
        else:
            await request.answer(200, {**completion(), "usage": usage})

    async with (
        ScriptedBackend(script).serving() as backend,
        gateway(tmp_path, [backend]) as process,
        client_of(process) as client,
    ):
        for stream in (False, True):
            assert (await client.post(CHAT_PATH, json=chat(stream=stream))).status_code == 200
        await eventually(lambda: at_rest(process))
        assert sample(process, "headrace_requests_total", outcome="ok") == 2
        assert sample(process, "headrace_request_duration_seconds_count") == 2
        assert sample(process, "headrace_tokens_total") == 0
