"""Whose fault a 5xx is: the backend's, if another serves the request; the request's own, if two say the same of it."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from backends.catalog.health import HealthState, OutcomeKind
from router.app import Running
from router.fleet.live import LiveBackend
from tests.gateway_stack import chat, client_of, fleet_document, gateway, write_fleet
from tests.integration.test_gateway_hedging import COEFFICIENTS, HEDGED, fleet, hedges, hello_after, status_after
from tests.raw_client import CHAT_PATH, at_rest, eventually, raw_client, request_bytes, sample
from tests.scripted_backend import SSE_HEAD, Received, Script, ScriptedBackend, answer_hello, delta, event
from tests.told_learner import ToldLearner

pytestmark = pytest.mark.anyio

POISON = [{"role": "user", "content": [
    {"type": "text", "text": "hi"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
]}]  # fmt: skip


async def chokes_on_images(request: Received) -> None:
    """As llama.cpp does with an image that it cannot read."""
    if b"image_url" in request.body:
        await request.answer(500, {"error": {"message": "failed to load image"}})
    else:
        await answer_hello(request)


broken = status_after(0.0, 500)


@dataclass
class Stack:
    process: Running
    client: httpx.AsyncClient
    backends: Sequence[ScriptedBackend]
    learner: ToldLearner
    outcomes: Counter[tuple[str, OutcomeKind]] = field(default_factory=Counter)
    """What the health of each backend was told."""

    def live(self, name: str) -> LiveBackend:
        return self.process.gateway.fleet.backends[name]

    def told(self, name: str) -> dict[OutcomeKind, int]:
        return {kind: count for (backend, kind), count in self.outcomes.items() if backend == name}

    def attempts(self, outcome: str = "", **labels: str) -> float:
        return sample(self.process, "headrace_attempts_total", **({"outcome": outcome} if outcome else {}), **labels)

    async def ask(self, **members: Any) -> httpx.Response:
        return await self.client.post(CHAT_PATH, json=chat(**members))

    async def is_even(self) -> None:
        """Each attempt has ended once, for its books, for the metrics, for the learner and for health."""
        await eventually(lambda: at_rest(self.process))
        assert self.learner.is_even()
        assert sum(self.outcomes.values()) == self.attempts() == len(self.learner.ends)


@contextlib.asynccontextmanager
async def stack(
    tmp_path: Path, *scripts: Script, hedged: bool = False, members: Sequence[Mapping[str, Any]] = (), **sections: Any
) -> AsyncIterator[Stack]:
    """A gateway before so many backends; `members` are what the fleet file says of each of them."""
    async with contextlib.AsyncExitStack() as entered:
        backends = [await entered.enter_async_context(ScriptedBackend(script).serving()) for script in scripts]
        given: Sequence[Any] = fleet(*backends) if hedged else backends
        if members:
            given = [{"url": backend.url, "served_model_name": "served", **more}
                     for backend, more in zip(backends, members, strict=True)]
        process = await entered.enter_async_context(gateway(tmp_path, given, **sections))
        client = await entered.enter_async_context(client_of(process))
        living = process.gateway.fleet
        learner = living.learner = ToldLearner(living.learner)
        found = Stack(process, client, backends, learner)
        book = living.on_outcome

        def noted(live: LiveBackend, kind: OutcomeKind) -> None:
            found.outcomes[live.spec.name, kind] += 1
            book(live, kind)

        living.on_outcome = noted  # type: ignore[method-assign]
        yield found


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_that_no_backend_can_serve_ejects_none(tmp_path: Path, stream: bool) -> None:
    async with stack(tmp_path, *[chokes_on_images] * 3) as found:
        for _ in range(20):
            answer = await found.ask(messages=POISON, stream=stream)
            assert (answer.status_code, answer.json()["error"]["message"]) == (500, "failed to load image")
        for name in ("b0", "b1", "b2"):
            live = found.live(name)
            assert (live.health.state, live.failed_requests) == (HealthState.HEALTHY, 0)
            assert live.health.recent_failures == 0
            assert (await found.ask()).status_code == 200
        # Two opinions a request and no third, while the budget of retries pays; and that they were errors still counts.
        retries = sample(found.process, "headrace_retries_total", cause="status_5xx_other")
        assert 10 <= retries <= 20
        assert found.attempts("server_error") == 20 + retries
        assert sample(found.process, "headrace_requests_total", outcome="backend_error", status="500") == 20
        await found.is_even()


async def test_a_broken_backend_beside_a_good_one_is_ejected(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "headrace.gateway")
    async with stack(tmp_path, broken, answer_hello) as found:
        answers = [await found.ask() for _ in range(12)]
        assert {answer.status_code for answer in answers} == {200}
        assert {answer.headers["x-headrace-backend"] for answer in answers} == {"b1"}
        live = found.live("b0")
        assert live.health.state is HealthState.EJECTED
        assert live.failed_requests == len(found.backends[0].requests) == 5
        assert found.told("b0") == {OutcomeKind.SERVER_ERROR: 5}
        await found.is_even()
    levels = {record.getMessage().partition(" (was")[0]: record.levelname for record in caplog.records}
    assert levels["backend b0: healthy"] == "INFO"
    assert levels["backend b0: ejected: requests fail (server_error)"] == "WARNING"


async def test_of_three_two_broken_ones_are_ejected(tmp_path: Path) -> None:
    """Now and then both are asked and agree; what counts is that the third serves the others."""
    async with stack(tmp_path, broken, broken, answer_hello) as found:
        for _ in range(200):
            await found.ask()
            if all(found.live(name).health.state is HealthState.EJECTED for name in ("b0", "b1")):
                break
        assert found.live("b2").health.state is HealthState.HEALTHY
        assert [found.live(name).health.state for name in ("b0", "b1")] == [HealthState.EJECTED] * 2
        await found.is_even()


async def test_of_three_two_broken_ones_are_ejected_though_they_are_the_cheapest(tmp_path: Path) -> None:
    """Each is the other's next best: once they have agreed, one that has served others is asked."""
    members = [{"coefficients": COEFFICIENTS, "price_per_hour": price} for price in (1.0, 2.0, 9.0)]
    sections: dict[str, Any] = {"policy": {"name": "headrace"}, "retries": {"budget_floor_per_s": 1000.0}}
    async with stack(tmp_path, broken, broken, answer_hello, members=members, **sections) as found:
        found.process.gateway.fleet.on_outcome(found.live("b2"), OutcomeKind.SUCCESS)    # it has served before
        for _ in range(40):
            await found.ask()
        assert [found.live(name).health.state for name in ("b0", "b1")] == [HealthState.EJECTED] * 2
        assert found.live("b2").health.state is HealthState.HEALTHY
        assert (await found.ask()).status_code == 200


async def test_more_of_them_than_retries_can_be_paid_eject_none_either(tmp_path: Path) -> None:
    retries = {"budget_ratio": 0.05, "budget_floor_per_s": 0.0}
    async with stack(tmp_path, *[chokes_on_images] * 3, retries=retries) as found:
        for _ in range(60):
            await found.ask(messages=POISON)
        assert found.attempts("server_error") < 60 + 20
        assert {found.live(name).failed_requests for name in ("b0", "b1", "b2")} == {0}
        await found.is_even()


async def test_a_broken_backend_is_ejected_though_retries_are_short(tmp_path: Path) -> None:
    retries = {"budget_ratio": 0.1, "budget_floor_per_s": 0.0}
    async with stack(tmp_path, broken, answer_hello, retries=retries) as found:
        while found.live("b0").health.state is not HealthState.EJECTED:
            assert len(found.backends[0].requests) <= 60
            await found.ask()
        await found.is_even()


@pytest.mark.parametrize(("scripts", "sections"), [
    ([broken], {}),
    ([broken, broken], {"retries": {"max_attempts": 1}}),
    ([broken, broken], {"retries": {"budget_ratio": 0.0, "budget_floor_per_s": 0.0}}),
    ([broken, status_after(0.0, 507)], {}),
    ([broken, status_after(0.0, 403)], {}),
], ids=["alone", "no retries", "no budget", "they differ", "not about the content"])  # fmt: skip
async def test_one_opinion_alone_stands_against_its_backend(
    tmp_path: Path, scripts: list[Script], sections: dict[str, Any]
) -> None:
    async with stack(tmp_path, *scripts, **sections) as found:
        while not found.live("b0").failed_requests:
            assert len(found.backends[0].requests) < 30  # what the budget has saved up is spent by then
            await found.ask()
        if len(scripts) == 1:
            assert found.attempts() == 1  # its own second opinion is none
        await found.is_even()


async def test_a_backend_that_finds_fault_with_the_request_clears_the_other(tmp_path: Path) -> None:
    async with stack(tmp_path, broken, status_after(0.0, 400)) as found:
        for _ in range(12):
            assert (await found.ask()).status_code == 400
        assert len(found.backends[0].requests) == found.attempts("server_error", backend="b0") >= 5
        assert (found.live("b0").health.state, found.live("b0").failed_requests) == (HealthState.HEALTHY, 0)
        await found.is_even()


async def test_what_an_engine_cannot_do_is_asked_of_no_other(tmp_path: Path) -> None:
    async with stack(tmp_path, status_after(0.0, 501), status_after(0.0, 501)) as found:
        assert (await found.ask()).status_code == 501
        assert sum(len(backend.requests) for backend in found.backends) == 1
        assert found.attempts("client_error") == 1


async def test_a_stream_that_has_begun_settles_it_long_before_its_end(tmp_path: Path) -> None:
    async def long_stream(request: Received) -> None:
        await request.write(SSE_HEAD)
        await request.chunk(event(delta("a")))
        await request.until_gone()

    async with stack(tmp_path, broken, long_stream) as found, contextlib.AsyncExitStack() as clients:
        while not found.live("b0").failed_requests:
            assert len(found.backends[1].requests) < 3
            client = await clients.enter_async_context(raw_client(found.process))
            await client.send(request_bytes(chat(stream=True)))
            await client.until(b"data: ")
    assert found.told("b0") == {OutcomeKind.SERVER_ERROR: 1}


async def test_a_heartbeat_and_an_error_event_are_no_answer(tmp_path: Path) -> None:
    async def fails_inside(request: Received) -> None:
        await request.write(SSE_HEAD)
        await asyncio.sleep(0.3)
        await request.chunk(event({"error": {"message": "out of memory"}}))
        await request.write(b"0\r\n\r\n")

    async with stack(tmp_path, broken, fails_inside, timeouts={"heartbeat_s": 0.1}) as found:
        while not found.backends[0].requests:
            assert b"out of memory" in (await found.ask(stream=True)).content
        assert found.told("b0") == {OutcomeKind.SERVER_ERROR: 1}  # one opinion, and nobody has served it
        await found.is_even()


@pytest.mark.parametrize("how", ["leaves", "reload", "reload and stop"])
async def test_between_two_opinions(tmp_path: Path, how: str) -> None:
    asked, answer = asyncio.Event(), asyncio.Event()

    async def thinks(request: Received) -> None:
        asked.set()
        await answer.wait()
        await answer_hello(request)

    async with stack(tmp_path, broken, thinks) as found, raw_client(found.process) as client:
        while not found.backends[0].requests:
            asked.clear()
            answer.clear()
            await client.send(request_bytes(chat()))
            await asyncio.wait_for(asked.wait(), 5.0)
            if not found.backends[0].requests:
                answer.set()
                await client.until(b"}}")
        assert found.told("b0") == {}  # open
        assert found.attempts("server_error", backend="b0") == 1
        old = found.live("b0")
        assert old.books.requests == 0
        if how == "leaves":
            client.leave()
            await found.is_even()
            assert found.told("b0") == {OutcomeKind.EXCUSED: 1}
            assert (old.failed_requests, old.health.failures) == (0, 0)
            return
        document = fleet_document(found.backends)
        document["backends"] = document["backends"][1:]
        write_fleet(tmp_path / "fleet.yaml", document)
        await found.process.gateway.reloader.reload("test")
        assert "b0" not in found.process.gateway.fleet.backends
        if how == "reload":
            answer.set()
            assert b"200 OK" in await client.until(b"}}")
            await found.is_even()
            assert (found.told("b0"), old.failed_requests) == ({OutcomeKind.SERVER_ERROR: 1}, 1)
    assert sum(found.told("b0").values()) == 1


@pytest.mark.parametrize("second", [500, 200])
async def test_a_race_is_judged_likewise(tmp_path: Path, second: int) -> None:
    """The hedge is sent a third of a second after the first, and both are under way when the first fails."""
    hedge = hello_after(0.4) if second == 200 else status_after(0.4, 500)
    async with stack(tmp_path, status_after(0.6, 500), hedge, hedged=True, **HEDGED) as found:
        answer = await found.ask(stream=True)
        assert answer.status_code == second
        await found.is_even()
        assert hedges(found.process, "took_over") == 1
        assert sample(found.process, "headrace_retries_total") == 0
        blamed = 1 if second == 200 else 0
        assert (found.live("b0").failed_requests, found.live("b1").failed_requests) == (blamed, 0)
        assert found.attempts("server_error", backend="b0") == 1
