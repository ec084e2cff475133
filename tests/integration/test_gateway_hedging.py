"""Hedging: a silent backend's request goes to a second one, the first answer counts, and the other is called back.

`b0` is cheap and `b1` dear, so that the first attempt of each request goes to `b0`. By their coefficients both begin 99
of 100 answers within 0.12 s, and half a second is promised: a hedge is due after 0.33 s, and too late after 0.38.
"""

import asyncio
import gc
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from backends.catalog.views import BackendView
from policies.attempts import FailureCause
from policies.beliefs.tails import PRIOR
from policies.facts import RequestFacts
from policies.hedging import Awaited, First, Hedge, HedgeRules
from policies.policy import Priced
from router.app import Running
from router.path.attempt import Attempt
from router.path.course import Course
from router.path.hedging import Hedging
from router.request.exchange import HedgeEnd
from tests.gateway_stack import chat, client_of, fleet_document, gateway, write_fleet
from tests.integration.test_gateway_cancellation import blameless
from tests.raw_client import CHAT_PATH, at_rest, eventually, raw_client, request_bytes, sample
from tests.scripted_backend import (
    SSE_HEAD,
    Received,
    Script,
    ScriptedBackend,
    answer_hello,
    completion,
    delta,
    event,
)
from tests.told_learner import ToldLearner

pytestmark = pytest.mark.anyio

PROMISED_S = 0.5
COEFFICIENTS = {
    "version": "measured", "source": "a test", "prefill_base_ms": 80.0, "prefill_ms_per_token": 0.05,
    "prefill_ms_per_pair": 0.0, "decode_base_ms": 0.01, "decode_ms_per_seq": 0.0, "decode_ms_per_seq_token": 0.0,
}  # fmt: skip
FREELY = {"enabled": True, "budget_ratio": 0.25, "budget_floor_per_s": 1000.0}
HEDGED: dict[str, Any] = {
    "policy": {"name": "headrace", "settings": {"first_request": False}},
    "poll": {"interval_s": 300, "timeout_s": 1},
    "latency_classes": [{"name": "default", "ttft_s": PROMISED_S, "e2e_s": PROMISED_S}],
    "timeouts": {"first_token_s": 5.0},
    "hedging": FREELY,
}
PATIENT: dict[str, Any] = {
    **HEDGED,
    "timeouts": {"first_token_s": 0.7, "total_s": 1.0},
    "health": {"failures_to_eject": 9999, "silent_failures_to_eject": 9999, "failure_ratio_to_eject": None},
}
"""No backend is taken out, whatever it does."""
SILENCES: dict[str, tuple[bool, bytes]] = {
    "stream": (True, b""),
    "stream_with_a_head": (True, SSE_HEAD),
    "stream_with_a_comment": (True, SSE_HEAD + b"8\r\n: ping\n\n\r\n"),
    "whole": (False, b""),
    "whole_with_a_head": (False, b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{"),
}
"""What a silent backend has written."""


def fleet(cheap: ScriptedBackend, dear: ScriptedBackend, **members: Any) -> list[dict[str, Any]]:
    return [
        {"url": backend.url, "served_model_name": "served", "coefficients": COEFFICIENTS, "price_per_hour": price,
         **members}
        for backend, price in ((cheap, 1.0), (dear, 5.0))
    ]  # fmt: skip


def silent_after(written: bytes) -> Script:
    async def script(request: Received) -> None:
        await request.write(written)
        await request.until_gone()

    return script


silent = silent_after(b"")


def hello_after(wait_s: float) -> Script:
    async def script(request: Received) -> None:
        await asyncio.sleep(wait_s)
        await answer_hello(request)

    return script


def status_after(wait_s: float, status: int) -> Script:
    async def script(request: Received) -> None:
        await asyncio.sleep(wait_s)
        await request.answer(status, {"error": {"message": f"said {status}"}})

    return script


def hedges(process: Running, outcome: str = "") -> float:
    return sample(process, "headrace_hedges_total", **({"outcome": outcome} if outcome else {}))


def withheld(process: Running, reason: str) -> float:
    return sample(process, "headrace_hedges_withheld_total", reason=reason)


def attempts(process: Running, outcome: str, backend: str) -> float:
    return sample(process, "headrace_attempts_total", outcome=outcome, backend=backend)


async def asked(client: httpx.AsyncClient, *, stream: bool = True, **options: Any) -> httpx.Response:
    return await client.post(CHAT_PATH, json=chat(stream=stream), **options)


def soon(rules: HedgeRules, facts: RequestFacts, backend: BackendView, left_s: float, now: float) -> First:
    """Stands in for `first_of`, so that it does not take minutes: whoever is silent for 20 ms is late."""
    return First(backend.spec.name, Awaited(0.01, 0.001, PRIOR), left_s, 0.02, 0.02)


def at_once(facts: RequestFacts, first: First, elapsed_s: float, candidates: Sequence[Priced], now: float) -> Hedge:
    """Stands in for `hedge`."""
    return Hedge(next(candidate for candidate in candidates if candidate.backend.spec.name != first.backend))


# --- who wins -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("silence", SILENCES)
async def test_a_stalled_backend_is_rescued_by_a_second_and_left(tmp_path: Path, silence: str) -> None:
    stream, written = SILENCES[silence]
    answered_at_s = 0.0

    async def good(request: Received) -> None:
        nonlocal answered_at_s
        answered_at_s = asyncio.get_running_loop().time()
        await answer_hello(request)

    async with (
        ScriptedBackend(silent_after(written)).serving() as stalled,
        ScriptedBackend(good).serving() as second,
        gateway(tmp_path, fleet(stalled, second), **HEDGED) as process,
        client_of(process) as client,
    ):
        learner = process.gateway.fleet.learner = ToldLearner(process.gateway.fleet.learner)
        answer = await asked(client, stream=stream)
        async with asyncio.timeout(0.25):
            await stalled.requests[0].gone.wait()
        assert asyncio.get_running_loop().time() - answered_at_s < 0.25
        assert answer.status_code == 200
        assert (answer.headers["x-headrace-backend"], answer.headers["x-headrace-reason"]) == ("b1", "hedge of b0")
        assert float(answer.headers["x-headrace-overhead-ms"]) < PROMISED_S * 1e3 / 2
        await eventually(lambda: at_rest(process))
        assert (len(stalled.requests), len(second.requests)) == (1, 1)
        assert second.requests[0].body == stalled.requests[0].body
        # The bytes are the second's alone.
        stalled.script = answer_hello
        assert (await asked(client, stream=stream)).content == answer.content
        assert len(stalled.requests) == 2
        # Nobody is blamed, and what it cost is counted.
        live = process.gateway.fleet.backends["b0"]
        assert (live.failed_requests, live.health.failures) == (0, 0)
        assert (hedges(process), hedges(process, "won")) == (1, 1)
        assert (attempts(process, "superseded", "b0"), attempts(process, "success", "b1")) == (1, 1)
        wasted_s = sample(process, "headrace_hedge_wasted_seconds_total", backend="b0")
        assert wasted_s > PROMISED_S / 2
        assert sample(process, "headrace_hedge_wasted_seconds_total") == wasted_s
        assert sample(process, "headrace_requests_total", outcome="ok", backend="b1") == 1
        assert sample(process, "headrace_retries_total") == 0
        # For the learner the one that was called back was left, and no sample of how long anything takes.
        assert learner.is_even()
        called_back = next(end for sent, end in learner.ends if sent.backend == "b0")
        assert (called_back.failure, called_back.output_tokens) == (FailureCause.CLIENT_GONE, 0)
        assert learner.belief("b0", 0.0).ttft.samples <= 1


@pytest.mark.parametrize("stream", [True, False])
async def test_the_first_may_still_win_and_the_hedge_is_called_back(tmp_path: Path, stream: bool) -> None:
    hedge_came = asyncio.Event()

    async def late(request: Received) -> None:
        await hedge_came.wait()
        await answer_hello(request)

    async def second(request: Received) -> None:
        hedge_came.set()
        await request.write(SSE_HEAD if stream else b"")
        await request.until_gone()

    async with (
        ScriptedBackend(late).serving() as one,
        ScriptedBackend(second).serving() as two,
        gateway(tmp_path, fleet(one, two), **HEDGED) as process,
        client_of(process) as client,
    ):
        answer = await asked(client, stream=stream)
        assert answer.headers["x-headrace-backend"] == "b0"
        assert b"lo" in answer.content
        async with asyncio.timeout(0.25):
            await two.requests[0].gone.wait()
        await eventually(lambda: at_rest(process))
        assert (hedges(process), hedges(process, "lost")) == (1, 1)
        assert (attempts(process, "success", "b0"), attempts(process, "superseded", "b1")) == (1, 1)
        assert blameless(process, "b1")
        assert sample(process, "headrace_requests_total", outcome="ok", backend="b0") == 1


async def test_a_client_that_reads_slowly_pauses_the_winner(tmp_path: Path) -> None:
    """The client is fed by the winner, though the other's head came later than its own."""
    piece, count = event(delta("x" * 60_000)), 200
    written = 0

    async def stalled(request: Received) -> None:
        await request.write(SSE_HEAD)
        await request.until_gone()

    async def flood(request: Received) -> None:
        nonlocal written
        await request.write(SSE_HEAD)
        for _ in range(count):
            await request.chunk(piece)
            written += 1
        await request.chunk(event(delta("", finish="stop")) + b"data: [DONE]\n\n")
        await request.write(b"0\r\n\r\n")

    async with (
        ScriptedBackend(stalled).serving() as one,
        ScriptedBackend(flood).serving() as two,
        gateway(tmp_path, fleet(one, two), **HEDGED) as process,
        raw_client(process, receive_buffer_bytes=4096) as client,
    ):
        await client.send(request_bytes(chat(stream=True)))
        await client.until(b"data: ")
        await one.requests[0].gone.wait()
        await asyncio.sleep(0.3)
        held = written
        await asyncio.sleep(0.2)
        assert held == written < count
        client.leave()
        await asyncio.wait_for(two.requests[0].gone.wait(), 1)
        await eventually(lambda: at_rest(process))


# --- failures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [503, 500])
async def test_where_the_first_fails_the_hedge_is_the_retry(tmp_path: Path, status: int) -> None:
    async with (
        ScriptedBackend(status_after(0.6, status)).serving() as one,
        ScriptedBackend(hello_after(0.4)).serving() as two,
        gateway(tmp_path, fleet(one, two), **HEDGED) as process,
        client_of(process) as client,
    ):
        answer = await asked(client)
        assert (answer.status_code, answer.headers["x-headrace-backend"]) == (200, "b1")
        await eventually(lambda: at_rest(process))
        assert (hedges(process), hedges(process, "took_over")) == (1, 1)
        assert sample(process, "headrace_retries_total") == 0
        assert (len(one.requests), len(two.requests)) == (1, 1)
        assert attempts(process, "server_error", "b0") == 1
        assert process.gateway.fleet.backends["b0"].failed_requests == 1
        assert sample(process, "headrace_hedge_wasted_seconds_total") == 0


@pytest.mark.parametrize("status", [503, 500])
async def test_where_the_hedge_fails_the_first_goes_on(tmp_path: Path, status: int) -> None:
    async with (
        ScriptedBackend(hello_after(0.9)).serving() as one,
        ScriptedBackend(status_after(0.0, status)).serving() as two,
        gateway(tmp_path, fleet(one, two), **HEDGED) as process,
        client_of(process) as client,
    ):
        answer = await asked(client)
        assert (answer.status_code, answer.headers["x-headrace-backend"]) == (200, "b0")
        await eventually(lambda: at_rest(process))
        assert (hedges(process), hedges(process, "failed")) == (1, 1)
        assert (len(one.requests), len(two.requests)) == (1, 1)  # and none is hedged twice


@pytest.mark.parametrize("last", ["first", "hedge"])
async def test_where_both_fail_the_client_is_told_once(tmp_path: Path, last: str) -> None:
    """Told is what the one said that failed last: until then there was hope."""
    under_way, failed = asyncio.Event(), asyncio.Event()

    def failing(status: int, *, is_last: bool) -> Script:
        async def script(request: Received) -> None:
            if is_last:
                await failed.wait()
                await asyncio.sleep(0.1)
            else:
                await under_way.wait()
            await request.answer(status, {"error": {"message": f"said {status}"}})
            failed.set()

        return script

    first, hedge = failing(500, is_last=last == "first"), failing(503, is_last=last == "hedge")

    async def hedged(request: Received) -> None:
        under_way.set()
        await hedge(request)

    async with (
        ScriptedBackend(first).serving() as one,
        ScriptedBackend(hedged).serving() as two,
        gateway(tmp_path, fleet(one, two), **HEDGED) as process,
        client_of(process) as client,
    ):
        answer = await asked(client)
        # What is the request's own doing, by one of two, is not tried on a third.
        told = 500 if last == "first" else 503
        assert (answer.status_code, len(one.requests), len(two.requests)) == (told, 1, 1)
        await eventually(lambda: at_rest(process))
        assert sample(process, "headrace_requests_total") == 1


async def test_a_final_error_about_the_request_is_an_answer(tmp_path: Path) -> None:
    async with (
        ScriptedBackend(silent).serving() as one,
        ScriptedBackend(status_after(0.0, 400)).serving() as two,
        gateway(tmp_path, fleet(one, two), **HEDGED) as process,
        client_of(process) as client,
    ):
        answer = await asked(client)
        assert (answer.status_code, answer.headers["x-headrace-backend"]) == (400, "b1")
        await asyncio.wait_for(one.requests[0].gone.wait(), 0.25)
        await eventually(lambda: at_rest(process))
        assert hedges(process, "won") == 1


async def test_each_attempt_keeps_its_own_timeouts(tmp_path: Path) -> None:
    """The first is silent past its timeout; the hedge, sent later, answers later than that and within its own."""
    sections = {**HEDGED, "timeouts": {"first_token_s": 0.7}}
    async with (
        ScriptedBackend(silent).serving() as one,
        ScriptedBackend(hello_after(0.5)).serving() as two,
        gateway(tmp_path, fleet(one, two), **sections) as process,
        client_of(process) as client,
    ):
        answer = await asked(client)
        assert (answer.status_code, answer.headers["x-headrace-backend"]) == (200, "b1")
        await eventually(lambda: at_rest(process))
        assert hedges(process, "took_over") == 1
        assert attempts(process, "timeout", "b0") == 1


# --- the client leaves ----------------------------------------------------------------------------------------------

TWO_SILENT: dict[str, tuple[bool, bytes, bytes]] = {
    "stream_no_head": (True, b"", b""),
    "stream_head_of_the_first": (True, SSE_HEAD, b""),
    "stream_head_of_the_hedge": (True, b"", SSE_HEAD),
    "stream_both_heads": (True, SSE_HEAD, SSE_HEAD),
    "stream_error_body": (True, b"", b"HTTP/1.1 503 Busy\r\ncontent-length: 100\r\n\r\n{"),
    "whole_no_head": (False, b"", b""),
    "whole_in_mid": (False, b"", b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{"),
}


@pytest.mark.parametrize("phase", TWO_SILENT)
async def test_p01_a_client_that_leaves_takes_both_along(tmp_path: Path, phase: str) -> None:
    stream, of_first, of_hedge = TWO_SILENT[phase]
    async with (
        ScriptedBackend(silent_after(of_first)).serving() as one,
        ScriptedBackend(silent_after(of_hedge)).serving() as two,
        gateway(tmp_path, fleet(one, two), **HEDGED) as process,
    ):
        async with raw_client(process) as client:
            await client.send(request_bytes(chat(stream=stream)))
            await eventually(lambda: bool(two.requests))
            await asyncio.sleep(0.02)
            assert process.gateway.dispatcher.in_flight == 1
            client.leave(reset=True)
        async with asyncio.timeout(0.25):
            await asyncio.gather(one.requests[0].gone.wait(), two.requests[0].gone.wait())
        await eventually(lambda: at_rest(process), 1)
        assert (hedges(process), hedges(process, "left")) == (1, 1)
        assert sample(process, "headrace_attempts_total", outcome="client_gone") == 2
        assert sample(process, "headrace_requests_total", outcome="client_closed") == 1
        assert blameless(process, "b0")
        assert blameless(process, "b1")


async def test_p01_a_client_that_leaves_in_mid_stream_takes_the_winner_along(tmp_path: Path) -> None:
    async def begins(request: Received) -> None:
        await request.write(SSE_HEAD)
        await request.chunk(event(delta("a")))
        await request.until_gone()

    async with (
        ScriptedBackend(silent).serving() as one,
        ScriptedBackend(begins).serving() as two,
        gateway(tmp_path, fleet(one, two), **HEDGED) as process,
    ):
        async with raw_client(process) as client:
            await client.send(request_bytes(chat(stream=True)))
            await client.until(b"data:")
            await asyncio.wait_for(one.requests[0].gone.wait(), 0.25)
            client.leave()
        await asyncio.wait_for(two.requests[0].gone.wait(), 0.25)
        await eventually(lambda: at_rest(process), 1)
        assert attempts(process, "superseded", "b0") == attempts(process, "client_gone", "b1") == 1
        assert hedges(process, "won") == hedges(process) == 1


async def test_a_client_that_leaves_before_the_hedge_is_due_is_not_hedged(tmp_path: Path) -> None:
    async with (
        ScriptedBackend(silent).serving() as one,
        ScriptedBackend().serving() as two,
        gateway(tmp_path, fleet(one, two), **HEDGED) as process,
    ):
        async with raw_client(process) as client:
            await client.send(request_bytes(chat(stream=True)))
            await eventually(lambda: bool(one.requests))
            client.leave()
        await eventually(lambda: at_rest(process), 1)
        await asyncio.sleep(PROMISED_S)
        assert two.requests == []
        assert hedges(process) == 0


# --- bounds ---------------------------------------------------------------------------------------------------------


async def test_the_budget_is_kept_and_is_not_that_of_retries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.path.hedging.first_of", soon)
    monkeypatch.setattr("router.path.hedging.hedge", at_once)
    requests, ratio = 60, 0.05
    bounds = {"enabled": True, "budget_ratio": ratio, "budget_floor_per_s": 0.0}
    async with (
        ScriptedBackend(hello_after(0.8)).serving() as one,
        ScriptedBackend().serving() as two,
        gateway(tmp_path, fleet(one, two), **{**HEDGED, "hedging": bounds}) as process,
        client_of(process) as client,
    ):
        retries_before = process.gateway.dispatcher._retry_budget.tokens
        answers = await asyncio.gather(*[asked(client) for _ in range(requests)])
        assert {answer.status_code for answer in answers} == {200}
        assert 1 <= hedges(process) <= 1 + requests * ratio
        assert withheld(process, "budget_empty") >= 1
        assert len(one.requests) + len(two.requests) == requests + hedges(process)
        assert process.gateway.dispatcher._retry_budget.tokens == retries_before
        assert sample(process, "headrace_retries_total") == 0
        await eventually(lambda: at_rest(process))


async def test_a_full_gateway_does_not_hedge(tmp_path: Path) -> None:
    async with (
        ScriptedBackend(hello_after(0.8)).serving() as one,
        ScriptedBackend().serving() as two,
        gateway(tmp_path, fleet(one, two), limits={"max_in_flight": 1}, **HEDGED) as process,
        client_of(process) as client,
    ):
        assert (await asked(client)).headers["x-headrace-backend"] == "b0"
        assert (hedges(process), withheld(process, "overloaded")) == (0, 1)
        assert two.requests == []


async def test_a_backend_without_a_free_slot_gets_no_hedge(tmp_path: Path) -> None:
    async with (
        ScriptedBackend(hello_after(0.8)).serving() as one,
        ScriptedBackend().serving() as two,
        gateway(tmp_path, fleet(one, two, slots=1), **HEDGED) as process,
        client_of(process) as client,
    ):
        process.gateway.fleet.backends["b1"].lease(10).take()
        answer = await asked(client)
        assert answer.headers["x-headrace-backend"] == "b0"
        assert withheld(process, "overloaded") + withheld(process, "too_late") == 1
        assert two.requests == []


async def test_a_hedged_request_counts_once_for_its_class(tmp_path: Path) -> None:
    async with (
        ScriptedBackend(silent).serving() as one,
        ScriptedBackend(silent).serving() as two,
        gateway(tmp_path, fleet(one, two), limits={"max_in_flight": 2}, **HEDGED) as process,
        raw_client(process) as client,
    ):
        await client.send(request_bytes(chat(stream=True)))
        await eventually(lambda: bool(two.requests))
        dispatcher, backends = process.gateway.dispatcher, process.gateway.fleet.backends
        assert (dispatcher.in_flight, dict(dispatcher.by_class())) == (1, {"default": 1})
        assert [backends[name].books.requests for name in ("b0", "b1")] == [1, 1]


async def test_after_a_heartbeat_nobody_else_can_answer(tmp_path: Path) -> None:
    async def slow(request: Received) -> None:
        await request.write(SSE_HEAD)
        await asyncio.sleep(0.8)
        await request.chunk(event(delta("a", finish="stop")) + b"data: [DONE]\n\n")
        await request.write(b"0\r\n\r\n")

    sections = {**HEDGED, "timeouts": {"first_token_s": 5.0, "heartbeat_s": 0.1}}
    async with (
        ScriptedBackend(slow).serving() as one,
        ScriptedBackend().serving() as two,
        gateway(tmp_path, fleet(one, two), **sections) as process,
        client_of(process) as client,
    ):
        answer = await asked(client)
        assert (answer.status_code, answer.headers["x-headrace-backend"]) == (200, "b0")
        assert answer.content.startswith(b": keep-alive")
        assert two.requests == []


async def test_hundreds_of_hedges_leave_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.path.hedging.first_of", soon)
    monkeypatch.setattr("router.path.hedging.hedge", at_once)
    waves, wave = 40, 10  # no more than the budget can save up at once
    moods: list[Script] = [silent, silent_after(SSE_HEAD), hello_after(0.06), status_after(0.03, 503)]

    def moody() -> Script:
        turns = 0

        async def script(request: Received) -> None:
            nonlocal turns
            turns += 1
            await moods[turns % len(moods)](request)

        return script

    async with (
        ScriptedBackend(moody()).serving() as one,
        ScriptedBackend(hello_after(0.03)).serving() as two,
        gateway(tmp_path, fleet(one, two), **PATIENT) as process,
        client_of(process) as client,
    ):
        learner = process.gateway.fleet.learner = ToldLearner()  # believes nothing: the cheap one stays the first
        for _ in range(waves):
            for live in process.gateway.fleet.backends.values():
                live.backoff_until_s = 0.0
            answers = await asyncio.gather(*[asked(client) for _ in range(wave)])
            assert {answer.status_code for answer in answers} == {200}
        await eventually(lambda: at_rest(process))
        assert hedges(process) >= 200
        assert sum(hedges(process, how) for how in HedgeEnd) == hedges(process)
        assert learner.is_even()
        gc.collect()
        await eventually(lambda: not any(isinstance(kept, Attempt) for kept in gc.get_objects()))
        # asyncio may hold on to the handle of a timer that has fired, and with it to the course that it looked at.
        assert sum(isinstance(kept, Course) for kept in gc.get_objects()) <= waves


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_happens_one_backend_answers_and_the_books_are_even(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Both backends wait, write, stop and fail as dice say, and clients leave when they say."""
    monkeypatch.setattr("router.path.hedging.first_of", soon)
    monkeypatch.setattr("router.path.hedging.hedge", at_once)
    dice = Random(seed)

    def acting(name: str) -> Script:
        async def script(request: Received) -> None:
            await asyncio.sleep(dice.choice([0.0, 0.01, 0.02, 0.03, 0.05]))
            fate = dice.choice(["answer", "answer", "silent", "reset", "status", "break off", "refuse"])
            if fate == "reset":
                request.reset()
            elif fate == "silent":
                await silent(request)
            elif fate in ("status", "refuse"):
                await request.answer(503 if fate == "status" else 400, {"error": {"message": name}})
            elif not request.json.get("stream"):
                await request.answer(200, completion(name))
            else:
                await request.write(SSE_HEAD)
                await asyncio.sleep(dice.choice([0.0, 0.0, 0.02, 0.04]))
                for _ in range(3):
                    await request.chunk(event(delta(name)))
                    await asyncio.sleep(dice.choice([0.0, 0.01]))
                if fate == "answer":
                    await request.chunk(event(delta(name, finish="stop")) + b"data: [DONE]\n\n")
                    await request.write(b"0\r\n\r\n")
                else:
                    request.reset()

        return script

    async def one_client(process: Running) -> bytes:
        async with raw_client(process) as client:
            stream = dice.random() < 0.7
            await client.send(request_bytes(chat(stream=stream), headers="connection: close\r\n"))
            if dice.random() < 0.2:
                await asyncio.sleep(dice.uniform(0.0, 0.08))
                client.leave(reset=dice.random() < 0.5)
                return b""
            return await client.to_end()

    async with (
        ScriptedBackend(acting("one")).serving() as one,
        ScriptedBackend(acting("two")).serving() as two,
        gateway(tmp_path, fleet(one, two), **PATIENT) as process,
    ):
        learner = process.gateway.fleet.learner = ToldLearner()
        for _ in range(12):
            for live in process.gateway.fleet.backends.values():
                live.backoff_until_s = 0.0
            for raw in await asyncio.gather(*[one_client(process) for _ in range(10)]):
                assert not (b"one" in raw and b"two" in raw)
                assert raw == b"" or raw.startswith((b"HTTP/1.1 200 ", b"HTTP/1.1 4", b"HTTP/1.1 5"))
        await eventually(lambda: at_rest(process))
        assert learner.is_even()
        assert len(learner.sents) == sample(process, "headrace_attempts_total") > 120
        assert sum(hedges(process, how) for how in HedgeEnd) == hedges(process) > 20
        assert sample(process, "headrace_requests_total") == 120
        assert sample(process, "headrace_requests_total", outcome="internal_error") == 0
        assert process.gateway.dispatcher.faults.count == 0


# --- off, on, and wrong ---------------------------------------------------------------------------------------------


async def test_off_is_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def watched(*_: Any) -> None:
        raise AssertionError("a request is watched though hedging is off")

    monkeypatch.setattr(Hedging, "watch", watched)
    sections = {**HEDGED, "hedging": {**FREELY, "enabled": False}}
    async with (
        ScriptedBackend(hello_after(0.8)).serving() as one,
        ScriptedBackend().serving() as two,
        gateway(tmp_path, fleet(one, two), **sections) as process,
        client_of(process) as client,
    ):
        assert (await asked(client)).headers["x-headrace-backend"] == "b0"
        assert two.requests == []


@pytest.mark.parametrize(
    ("stream", "sections"),
    [
        (True, {"latency_classes": [{"name": "default", "e2e_s": 0.2}]}),
        (False, {"latency_classes": [{"name": "default", "ttft_s": 0.2}]}),
        (True, {"hedging": {**FREELY, "latency_classes": ["other"]},
                "latency_classes": [{"name": "default", "ttft_s": 0.2}, {"name": "other", "ttft_s": 0.2}]}),
    ],
    ids=["no_ttft_promised", "no_end_promised", "another_class"],
)  # fmt: skip
async def test_a_request_that_may_not_be_hedged_has_no_timer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool, sections: dict[str, Any]
) -> None:
    monkeypatch.setattr(Hedging, "_look_in", lambda *_: pytest.fail("a timer was made"))
    async with (
        ScriptedBackend(hello_after(0.5)).serving() as one,
        ScriptedBackend().serving() as two,
        gateway(tmp_path, fleet(one, two), **{**HEDGED, **sections}) as process,
        client_of(process) as client,
    ):
        assert (await asked(client, stream=stream)).status_code == 200
        assert two.requests == []


def is_on(process: Running, wanted: bool) -> bool:
    return (process.gateway.dispatcher.generation.hedging is not None) is wanted


async def test_a_reload_turns_it_on_and_off(tmp_path: Path) -> None:
    async with (
        ScriptedBackend(hello_after(0.9)).serving() as one,
        ScriptedBackend().serving() as two,
        gateway(tmp_path, fleet(one, two), **{**HEDGED, "hedging": {"enabled": False}}) as process,
        client_of(process) as client,
    ):
        for enabled, backend in ((True, "b1"), (False, "b0")):
            sections = {**HEDGED, "hedging": {**FREELY, "enabled": enabled}}
            write_fleet(tmp_path / "fleet.yaml", fleet_document(fleet(one, two), **sections))
            await eventually(partial(is_on, process, enabled))
            answer = await asked(client)
            assert answer.headers["x-headrace-backend"] == backend


@pytest.mark.parametrize("where", ["hedge", "post"])
async def test_a_bug_is_a_500_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError

    async with (
        ScriptedBackend(silent).serving() as one,
        ScriptedBackend().serving() as two,
        gateway(tmp_path, fleet(one, two), **HEDGED) as process,
        client_of(process) as client,
    ):
        asking = asyncio.create_task(asked(client))
        await eventually(lambda: bool(one.requests))
        if where == "hedge":
            monkeypatch.setattr("router.path.hedging.hedge", broken)
        else:
            monkeypatch.setattr(Attempt, "post", broken)
        assert (await asking).status_code == 500
        await asyncio.wait_for(one.requests[0].gone.wait(), 1)
        await eventually(lambda: at_rest(process))
        assert sample(process, "headrace_requests_total", outcome="internal_error") == 1


async def test_the_record_has_the_hedge_and_both_attempts(tmp_path: Path) -> None:
    async with (
        ScriptedBackend(silent).serving() as one,
        ScriptedBackend().serving() as two,
        gateway(tmp_path, fleet(one, two), decision_log={"path": "d.jsonl"}, **HEDGED) as process,
        client_of(process) as client,
    ):
        assert (await asked(client)).status_code == 200
        path = tmp_path / "d.jsonl"
        await eventually(lambda: path.exists() and path.stat().st_size > 0)
        line = json.loads(path.read_text())
        assert (line["hedge"], line["backend"], line["reason"], line["outcome"]) == ("won", "b1", "hedge of b0", "ok")
        called_back, answered = line["attempts"]
        assert (called_back["backend"], called_back["cause"], called_back["hedge"]) == ("b0", "superseded", False)
        assert (answered["backend"], answered["cause"], answered["hedge"]) == ("b1", None, True)
        assert answered["began_s"] > called_back["began_s"]
        assert line["waited_s"] < line["total_s"] + 0.05  # the two waits overlap, and count once
