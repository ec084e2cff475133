"""Retrying: another backend while the client has had nothing, never after, and never more than the budget."""

import asyncio
import contextlib
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import pytest

from backends.catalog.health import HealthState
from tests.gateway_stack import chat, client_of, gateway
from tests.raw_client import CHAT_PATH, at_rest, eventually, raw_client, request_bytes, sample
from tests.scripted_backend import SSE_HEAD, Received, ScriptedBackend, answer_hello, delta, event

pytestmark = pytest.mark.anyio
NEVER_OUT = {"silent_failures_to_eject": 1000, "failures_to_eject": 1000, "failure_ratio_to_eject": None}


async def reset_at_once(request: Received) -> None:
    request.reset()


async def reset_in_the_head(request: Received) -> None:
    await request.write(b"HTTP/1.1 200 OK\r\ncontent-")
    request.reset()


async def reset_after_the_head(request: Received) -> None:
    await request.write(SSE_HEAD if request.json.get("stream") else b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{")
    await asyncio.sleep(0.02)
    request.reset()


async def comment_then_reset(request: Received) -> None:
    await request.write(SSE_HEAD)
    await request.chunk(b": ping\n\n")
    await asyncio.sleep(0.02)
    request.reset()


async def half_an_event(request: Received) -> None:
    await request.write(SSE_HEAD)
    await request.chunk(event(delta("a"))[:30])
    await asyncio.sleep(0.02)
    request.reset()


async def no_http(request: Received) -> None:
    await request.write(b"SSH-2.0-x\r\n")


async def silent(request: Received) -> None:
    await request.until_gone()


async def silent_after_the_head(request: Received) -> None:
    await request.write(SSE_HEAD)
    await request.until_gone()


async def pinging(request: Received) -> None:
    await request.write(SSE_HEAD)
    while not request.gone.is_set():
        await request.chunk(b": ping\n\n")
        await asyncio.sleep(0.05)


async def busy_503(request: Received) -> None:
    await request.answer(503, {"error": {"message": "busy"}}, retry_after="0")


async def limited_429(request: Received) -> None:
    await request.answer(429, {"error": {"message": "slow down"}}, retry_after="0")


async def own_key_401(request: Received) -> None:
    await request.answer(401, {"error": {"message": "bad key"}})


FAILURES = [
    (reset_at_once, "reset", "reset_before_byte"),
    (reset_in_the_head, "truncated", "truncated"),
    (reset_after_the_head, "truncated", "truncated"),
    (comment_then_reset, "truncated", "truncated"),
    (half_an_event, "truncated", "truncated"),
    (no_http, "server_error", "reset_before_byte"),
    (silent, "timeout", "first_token_timeout"),
    (silent_after_the_head, "timeout", "first_token_timeout"),
    (pinging, "timeout", "first_token_timeout"),
    (busy_503, "server_error", "status_503"),
    (limited_429, "overloaded", "status_429"),
    (own_key_401, "client_error", "status_502"),
]


@pytest.mark.parametrize(("failing", "outcome", "cause"), FAILURES, ids=lambda value: getattr(value, "__name__", value))
async def test_a_failure_before_the_first_byte_is_answered_by_another(
    tmp_path: Path, failing: object, outcome: str, cause: str
) -> None:
    async with (
        ScriptedBackend(failing).serving() as bad,  # type: ignore[arg-type]
        ScriptedBackend().serving() as good,
        gateway(tmp_path, [bad, good], health=NEVER_OUT, timeouts={"first_token_s": 0.6}) as process,
        client_of(process) as client,
    ):
        for _ in range(4):
            answer = await client.post(CHAT_PATH, json=chat(stream=True))
            assert (answer.status_code, answer.headers["x-headrace-backend"]) == (200, "b1")
            assert answer.content.endswith(b"data: [DONE]\n\n")
            assert b"ping" not in answer.content  # nothing of the backend that failed
        assert len(bad.requests) >= 1
        await eventually(lambda: at_rest(process))
        failed = len(bad.requests)
        assert sample(process, "headrace_attempts_total", backend="b0", outcome=outcome) == failed
        assert sample(process, "headrace_retries_total", cause=cause) == failed
        assert sample(process, "headrace_requests_total", outcome="ok", backend="b1") == 4
        assert all(request.body == good.requests[0].body for request in good.requests)


async def test_p31_a_dead_host_costs_no_client_an_error_and_is_soon_out(tmp_path: Path) -> None:
    dying = contextlib.AsyncExitStack()
    async with (
        dying,
        ScriptedBackend().serving() as one,
        ScriptedBackend().serving() as two,
        gateway(
            tmp_path,
            [await dying.enter_async_context(ScriptedBackend().serving()), one, two],
            poll={"interval_s": 300, "timeout_s": 1},
        ) as process,
        client_of(process) as client,
    ):
        live = process.gateway.fleet.backends["b0"]
        await eventually(lambda: live.health.state is HealthState.HEALTHY)
        await dying.aclose()  # and no probe comes to say so
        answers = [await client.post(CHAT_PATH, json=chat()) for _ in range(30)]
        assert {answer.status_code for answer in answers} == {200}
        assert 1 <= sample(process, "headrace_attempts_total", backend="b0", outcome="connect_error") <= 3
        assert live.health.state is HealthState.EJECTED
        assert sample(process, "headrace_retries_total", cause="connect") <= 3


async def test_nothing_is_retried_after_the_first_byte(tmp_path: Path) -> None:
    async def breaks_off(request: Received) -> None:
        await request.write(SSE_HEAD)
        await request.chunk(event(delta("a")))
        await asyncio.sleep(0.02)
        request.reset()

    async with (
        ScriptedBackend(breaks_off).serving() as one,
        ScriptedBackend(breaks_off).serving() as two,
        gateway(tmp_path, [one, two]) as process,
        raw_client(process) as client,
    ):
        await client.send(request_bytes(chat(stream=True)))
        assert b"upstream_truncated" in await client.to_end()
        assert len(one.requests) + len(two.requests) == 1
        assert sample(process, "headrace_retries_total") == 0


async def test_p33_a_500_has_a_second_opinion_and_no_third(tmp_path: Path) -> None:
    async def fails(request: Received) -> None:
        await request.answer(500, {"error": {"message": "cuda assert"}})

    async with (
        ScriptedBackend(fails).serving() as one,
        ScriptedBackend(fails).serving() as two,
        ScriptedBackend(fails).serving() as three,
        gateway(tmp_path, [one, two, three]) as process,
        client_of(process) as client,
    ):
        answer = await client.post(CHAT_PATH, json=chat())
        assert (answer.status_code, answer.json()["error"]["message"]) == (500, "cuda assert")
        assert sorted(len(backend.requests) for backend in (one, two, three)) == [0, 1, 1]


async def test_attempts_are_bounded(tmp_path: Path) -> None:
    async with (
        ScriptedBackend(reset_at_once).serving() as one,
        ScriptedBackend(reset_at_once).serving() as two,
        ScriptedBackend(reset_at_once).serving() as three,
        gateway(tmp_path, [one, two, three], retries={"max_attempts": 2}, health=NEVER_OUT) as process,
        client_of(process) as client,
    ):
        answer = await client.post(CHAT_PATH, json=chat())
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "upstream_error")
        assert len(one.requests) + len(two.requests) + len(three.requests) == 2


async def test_the_retry_budget_bounds_an_outage(tmp_path: Path) -> None:
    requests = 200
    retries = {"max_attempts": 3, "budget_ratio": 0.1, "budget_floor_per_s": 0}
    async with (
        ScriptedBackend(reset_at_once).serving() as one,
        ScriptedBackend(reset_at_once).serving() as two,
        gateway(tmp_path, [one, two], retries=retries, health=NEVER_OUT) as process,
        client_of(process) as client,
    ):
        answers = await asyncio.gather(*[client.post(CHAT_PATH, json=chat()) for _ in range(requests)])
        assert {answer.status_code for answer in answers} == {502}
        sent = len(one.requests) + len(two.requests)
        assert requests < sent <= requests * 1.1 + 20  # the ratio, and what may have been saved up
        assert sample(process, "headrace_retries_total") == sent - requests


async def test_p32_retry_after_is_kept_by_the_gateway_too(tmp_path: Path) -> None:
    async def limited(request: Received) -> None:
        await request.answer(429, {"error": {"message": "slow down"}}, retry_after="1")

    async with (
        ScriptedBackend(limited).serving() as limiting,
        ScriptedBackend().serving() as good,
        gateway(tmp_path, [limiting, good]) as process,
        client_of(process) as client,
    ):
        loop = asyncio.get_running_loop()
        while not limiting.requests:
            assert (await client.post(CHAT_PATH, json=chat())).status_code == 200
        asked_at = loop.time()
        for _ in range(10):
            assert (await client.post(CHAT_PATH, json=chat())).status_code == 200
        if loop.time() - asked_at < 0.9:  # a busy machine may have spent the second
            assert len(limiting.requests) == 1
        limiting.script = answer_hello
        await asyncio.sleep(1.1)
        for _ in range(4):
            await client.post(CHAT_PATH, json=chat())
        assert len(limiting.requests) > 1
        assert process.gateway.fleet.backends["b0"].failed_requests == 0  # load, not health


async def test_p32_the_client_is_told_the_smallest_wait(tmp_path: Path) -> None:
    waits: dict[object, str] = {}

    async def limited(request: Received) -> None:
        wait = waits[request.writer.get_extra_info("sockname")]
        await request.answer(429, {"error": {"message": "slow down"}}, retry_after=wait)

    def address(backend: ScriptedBackend) -> tuple[str, int]:
        host, _, port = backend.url.removeprefix("http://").partition(":")
        return host, int(port)

    date = format_datetime(datetime.now(UTC) + timedelta(seconds=9), usegmt=True)
    cases = [("4", "2", (2,)), ("2", "4", (2,)), (date, "30", (7, 8, 9)), ("1000000000", "5", (5,)), ("0", "7", (0,)),
             ("-3", "7", (7,)), ("soon", "7", (7,))]  # fmt: skip
    async with (
        ScriptedBackend(limited).serving() as one,
        ScriptedBackend(limited).serving() as two,
        gateway(tmp_path, [one, two], retries={"max_attempts": 2}) as process,
        client_of(process) as client,
    ):
        for first, second, least in cases:
            waits.update({address(one): first, address(two): second})
            for live in process.gateway.fleet.backends.values():
                live.backoff_until_s = live.silence_asked_until_s = 0.0
            answer = await client.post(CHAT_PATH, json=chat())
            assert answer.status_code == 429
            assert int(answer.headers["retry-after"]) in least, (first, second)
            assert answer.headers.get_list("retry-after") == [answer.headers["retry-after"]]


async def test_p32_a_backend_that_asked_for_silence_gets_it_though_no_other_is_left(tmp_path: Path) -> None:
    async def limited(request: Received) -> None:
        await request.answer(429, {"error": {"message": "slow down"}}, retry_after="30")

    async with (
        ScriptedBackend(limited).serving() as one,
        ScriptedBackend(limited).serving() as two,
        gateway(tmp_path, [one, two]) as process,
        client_of(process) as client,
    ):
        for _ in range(5):
            answer = await client.post(CHAT_PATH, json=chat())
            assert answer.status_code == 429
            assert 25 <= int(answer.headers["retry-after"]) <= 30
        assert len(one.requests) == len(two.requests) == 1
