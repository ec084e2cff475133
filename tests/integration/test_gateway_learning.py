"""The policy live: the learner hears of each attempt, and what it believes shows in answers, metrics and `explain`."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from backends.catalog.health import Probe
from policies.attempts import FailureCause
from policies.learners.ccr.learner import CcrLearner
from router.app import Running
from router.wire.errors import ERROR_TYPES
from tests.gateway_stack import MODEL, chat, client_of, gateway, write_fleet
from tests.raw_client import CHAT_PATH, at_rest, eventually, raw_client, request_bytes, sample
from tests.scripted_backend import SSE_HEAD, Received, ScriptedBackend, answer_hello, delta, event
from tests.told_learner import ToldLearner

pytestmark = pytest.mark.anyio

HEADRACE: dict[str, Any] = {"policy": {"name": "headrace"}, "poll": {"interval_s": 300, "timeout_s": 1}}
COEFFICIENTS = {
    "version": "measured", "source": "a test", "prefill_base_ms": 5.0, "prefill_ms_per_token": 0.05,
    "prefill_ms_per_pair": 0.0, "decode_base_ms": 10.0, "decode_ms_per_seq": 0.1, "decode_ms_per_seq_token": 1e-5,
}  # fmt: skip


def entry(backend: ScriptedBackend, **members: Any) -> dict[str, Any]:
    return {"url": backend.url, "served_model_name": "served", "coefficients": COEFFICIENTS, "price_per_hour": 1.0,
            **members}


def told(process: Running) -> ToldLearner:
    learner = process.gateway.fleet.learner = ToldLearner(process.gateway.fleet.learner)
    return learner


async def streamed(client: httpx.AsyncClient, **options: Any) -> httpx.Response:
    return await client.post(CHAT_PATH, json=chat(stream=True), **options)


def out(process: Running, name: str = "b0") -> None:
    """Health checks find a backend that has served gone."""
    for _ in range(2):
        process.gateway.fleet.on_probe(name, Probe(True))
    for _ in range(3):
        process.gateway.fleet.on_probe(name, Probe(False))


def back(process: Running, name: str = "b0") -> None:
    for _ in range(2):
        process.gateway.fleet.on_probe(name, Probe(True))


# --- what the learner hears -----------------------------------------------------------------------------------------


async def test_a_stream_is_told_from_its_decision_to_its_end(tmp_path: Path) -> None:
    usage = {"prompt_tokens": 12, "completion_tokens": 40, "prompt_tokens_details": {"cached_tokens": 8}}

    async def script(request: Received) -> None:
        await request.write(SSE_HEAD)
        for number in range(40):
            await request.chunk(event(delta(f"t{number} ")))
            await asyncio.sleep(0.01)
        await request.chunk(event(delta("", finish="stop")) + event({"choices": [], "usage": usage}))
        await request.chunk(b"data: [DONE]\n\n")
        await request.write(b"0\r\n\r\n")

    async with (
        ScriptedBackend(script).serving() as backend,
        gateway(tmp_path, [entry(backend)], **HEADRACE) as process,
        client_of(process) as client,
    ):
        learner = told(process)
        assert (await streamed(client)).status_code == 200
        await eventually(lambda: at_rest(process))
        (sent,), ((ended, end),) = learner.sents, learner.ends
        assert ended is sent
        assert (end.output_tokens, end.failure, end.prompt_tokens, end.cached_tokens) == (40, None, 12, 8)
        assert learner.firsts == [sent]
        assert 2 <= len(learner.paces) <= 8
        assert all(0.005 < gap_s < 0.1 for _, gap_s, _, _ in learner.paces)
        belief = process.gateway.fleet.backends["b0"].belief
        assert belief.open_requests == 0
        assert belief.ttft.samples == 1
        # The next decision reckons with what this one taught.
        expected = learner.expect_output(sent.facts)
        assert expected < 128
        await streamed(client)
        assert learner.sents[-1].facts.expected_output_tokens == expected


@pytest.mark.parametrize("policy", ["headrace", "peak_ewma", "litellm_latency", "sglang_cache_aware", "prequal"])
async def test_whoever_learns_hears_of_each_attempt_once(tmp_path: Path, policy: str) -> None:
    turns = 0

    async def moody(request: Received) -> None:
        nonlocal turns
        turns += 1
        if turns % 5 == 0:
            request.reset()
        elif turns % 5 == 1:
            await request.answer(503, {"error": "busy"}, retry_after="0")
        elif turns % 5 == 2:
            await request.events(delta("half"), done=False)
        elif turns % 5 == 3:
            await request.until_gone()
        else:
            await answer_hello(request)

    async with (
        ScriptedBackend(moody).serving() as one,
        ScriptedBackend(moody).serving() as two,
        gateway(tmp_path, [entry(one), entry(two)], policy={"name": policy}, poll=HEADRACE["poll"]) as process,
        client_of(process) as client,
    ):
        learner = told(process)

        async def ask(number: int) -> None:
            try:
                async with asyncio.timeout(0.3):
                    await client.post(CHAT_PATH, json=chat(stream=number % 2 == 0))
            except (TimeoutError, httpx.HTTPError):
                pass

        for start in range(0, 60, 6):
            await asyncio.gather(*[ask(number) for number in range(start, start + 6)])
        await eventually(lambda: at_rest(process))
        assert learner.is_even()
        assert len(learner.sents) == sample(process, "headrace_attempts_total") > 50
        causes = {end.failure for _, end in learner.ends}
        assert {None, FailureCause.STATUS_503, FailureCause.CLIENT_GONE} <= causes
        assert process.gateway.dispatcher.faults.count == 0


async def test_a_client_that_stops_reading_does_not_make_its_backend_slow(tmp_path: Path) -> None:
    async def flood(request: Received) -> None:
        await request.write(SSE_HEAD)
        for _ in range(400):
            await request.chunk(event(delta("x" * 20_000)))
        await request.chunk(event(delta("", finish="stop")) + b"data: [DONE]\n\n")
        await request.write(b"0\r\n\r\n")

    async with (
        ScriptedBackend(flood).serving() as backend,
        gateway(tmp_path, [entry(backend)], **HEADRACE) as process,
        raw_client(process, receive_buffer_bytes=4096) as client,
    ):
        learner = told(process)
        await client.send(request_bytes(chat(stream=True), headers="connection: close\r\n"))
        await eventually(lambda: len(learner.ends) == 1)
        assert learner.ends[0][1].failure is FailureCause.CLIENT_GONE
        assert sample(process, "headrace_requests_total") == 0, "the stream itself goes on"
        await client.to_end()
        await eventually(lambda: at_rest(process))
        assert sample(process, "headrace_requests_total", outcome="ok") == 1
        assert learner.is_even()


async def test_a_retry_says_how_long_the_request_has_waited(tmp_path: Path) -> None:
    async def slow_503(request: Received) -> None:
        await asyncio.sleep(0.15)
        await request.answer(503, {"error": "busy"})

    async with (
        ScriptedBackend(slow_503).serving() as busy,
        ScriptedBackend().serving() as good,
        gateway(tmp_path, [entry(busy, price_per_hour=0.1), entry(good)], **HEADRACE) as process,
        client_of(process) as client,
    ):
        learner = told(process)
        await streamed(client)
        await streamed(client)
        retried = [sent.facts for sent in learner.sents if sent.facts.tried]
        assert retried
        assert all(0.15 <= facts.waited_s < 2.0 for facts in retried)
        assert all(sent.facts.waited_s == 0.0 for sent in learner.sents if not sent.facts.tried)


async def test_the_learner_is_kept_over_a_reload_unless_the_policy_wants_another(tmp_path: Path) -> None:
    async with (
        ScriptedBackend().serving() as one,
        ScriptedBackend().serving() as two,
        gateway(tmp_path, [entry(one), entry(two)], **HEADRACE) as process,
        client_of(process) as client,
    ):
        for _ in range(4):
            await streamed(client)
        learner = process.gateway.fleet.learner
        assert isinstance(learner, CcrLearner)
        beliefs = dict(learner.backends)

        async def reloaded(**changes: Any) -> None:
            running = process.gateway.loaded.config.model_dump(mode="json", exclude_unset=True)
            document = {**running, **changes}
            write_fleet(tmp_path / "fleet.yaml", document)
            assert (await process.gateway.reloader.reload("test")).ok

        backends = process.gateway.loaded.config.model_dump(mode="json", exclude_unset=True)["backends"]
        await reloaded(backends=[{**backends[0], "weight": 2.0}, {**backends[1], "coefficients": {**COEFFICIENTS,
                                                                  "host_ms": 3.0}}])
        assert process.gateway.fleet.learner is learner
        assert learner.belief("b0", 0.0) is beliefs["b0"]
        assert learner.belief("b1", 0.0) is not beliefs["b1"], "it was learned against other coefficients"
        await reloaded(backends=backends[:1])
        assert "b1" not in learner.backends
        await reloaded(policy={"name": "peak_ewma"})
        assert process.gateway.fleet.learner.name == "peak_ewma"
        assert (await streamed(client)).status_code == 200


# --- shed, coverage, explain ----------------------------------------------------------------------------------------


async def test_a_request_that_may_be_shed_is_where_it_would_come_far_too_late(tmp_path: Path) -> None:
    classes = [{"name": "hopeless", "ttft_s": 0.001, "sheddable": True}, {"name": "firm", "ttft_s": 0.001}]
    slow = {**COEFFICIENTS, "prefill_base_ms": 300.0}
    async with (
        ScriptedBackend().serving() as backend,
        gateway(tmp_path, [entry(backend, coefficients=slow)], latency_classes=classes,
                default_latency_class="hopeless", **HEADRACE) as process,
        client_of(process) as client,
    ):
        shed = await streamed(client)
        assert shed.status_code == 429
        assert backend.requests == [], "nobody was asked to serve it"
        error = shed.json()["error"]
        assert (error["type"], error["code"]) == (ERROR_TYPES[429], "rate_limit_exceeded")
        assert "budget of 0.001 s to the first token, not even an idle one" in error["message"]
        assert "the quickest needs about 0.3" in error["message"]
        assert (shed.headers["retry-after"], shed.headers["x-should-retry"]) == ("60", "false")
        assert sample(process, "headrace_turned_away_total", latency_class="hopeless", reason="budget") >= 1
        assert sample(process, "headrace_decisions_total", why="shed") >= 1
        assert sample(process, "headrace_requests_total", outcome="shed") >= 1
        firm = await streamed(client, headers={"x-headrace-class": "firm"})
        assert firm.status_code == 200
        assert sample(process, "headrace_decisions_total", why="late") >= 1


async def test_coverage_and_budgets_are_counted(tmp_path: Path) -> None:
    async def paced(request: Received) -> None:
        await request.write(SSE_HEAD)
        for number in range(5):
            await request.chunk(event(delta(f"{number}")))
            await asyncio.sleep(0.01)
        await request.chunk(event(delta("", finish="stop")) + b"data: [DONE]\n\n")
        await request.write(b"0\r\n\r\n")

    classes = [{"name": "easy", "ttft_s": 20.0, "inter_token_s": 1.0}, {"name": "hard", "e2e_s": 0.02},
               {"name": "free"}]
    async with (
        ScriptedBackend(paced).serving() as backend,
        gateway(tmp_path, [entry(backend)], latency_classes=classes, default_latency_class="easy",
                **HEADRACE) as process,
        client_of(process) as client,
    ):
        for name in ("easy", "hard", "free") * 4:
            await streamed(client, headers={"x-headrace-class": name})
        await eventually(lambda: at_rest(process))

        def budgets(**labels: str) -> float:
            return sample(process, "headrace_budgets_total", **labels)

        assert budgets(latency_class="easy", budget="ttft", result="kept") == 4
        assert budgets(latency_class="easy", budget="inter_token", result="kept") == 4
        assert budgets(latency_class="easy", budget="all", result="kept") == 4
        assert budgets(latency_class="hard", budget="e2e", result="missed") == 4
        assert budgets(latency_class="hard", budget="all", result="missed") == 4
        assert budgets(latency_class="free") == 0
        assert sample(process, "headrace_budget_late_seconds_total", latency_class="hard", budget="e2e") > 0.08
        judged = sample(process, "headrace_predicted_total", backend="b0", span="ttft")
        assert judged == 12
        assert 0 < sample(process, "headrace_within_predicted_total", backend="b0", span="ttft") <= judged
        assert sample(process, "headrace_class_miss_weight", latency_class="hard") > sample(
            process, "headrace_class_miss_weight", latency_class="easy")
        assert sample(process, "headrace_backend_model_state", backend="b0", state="calibrated") == 1
        assert sample(process, "headrace_learner_faults_total") == 0


@pytest.mark.parametrize("policy", ["headrace", "bounded_miss"])
async def test_what_is_known_of_a_class_is_shown_whoever_learned_it(tmp_path: Path, policy: str) -> None:
    classes = [{"name": "easy", "ttft_s": 20.0}, {"name": "hard", "e2e_s": 0.0001}]
    async with (
        ScriptedBackend().serving() as backend,
        gateway(tmp_path, [entry(backend)], latency_classes=classes, default_latency_class="easy",
                policy={"name": policy}) as process,
        client_of(process) as client,
        httpx.AsyncClient(base_url=process.admin_url) as admin,
    ):
        for name in ("easy", "hard") * 4:
            assert (await streamed(client, headers={"x-headrace-class": name})).status_code == 200
        await eventually(lambda: at_rest(process))
        missed = {name: sample(process, "headrace_class_missed_ratio", latency_class=name) for name in ("easy", "hard")}
        assert missed["hard"] > missed["easy"] >= 0.0
        assert sample(process, "headrace_class_expected_output_tokens", latency_class="easy") >= 1
        explained = (await admin.post("/admin/explain", json=chat(stream=True))).json()["class"]
        assert explained["missed_ratio"] == pytest.approx(missed["easy"], abs=1e-4)


async def test_explain_says_what_would_happen_and_changes_nothing(tmp_path: Path) -> None:
    classes = [{"name": "interactive", "ttft_s": 2.0, "inter_token_s": 0.1}, {"name": "batch"}]
    async with (
        ScriptedBackend().serving() as one,
        ScriptedBackend().serving() as two,
        gateway(tmp_path, [entry(one), entry(two, price_per_hour=3.0)], latency_classes=classes,
                default_latency_class="interactive", **HEADRACE) as process,
        client_of(process) as client,
        httpx.AsyncClient(base_url=process.admin_url) as admin,
    ):
        for _ in range(4):
            await streamed(client)
        await eventually(lambda: at_rest(process))
        gw = process.gateway
        state, dice = gw.fleet.learner.export(), gw.dispatcher._rng.getstate()
        sequence, decisions = gw.fleet._sequence, sample(process, "headrace_decisions_total")
        asked = [await admin.post("/admin/explain", json=chat(stream=True), headers={"x-slo-ttft-ms": "750"})
                 for _ in range(3)]
        assert gw.fleet.learner.export() == state
        assert gw.dispatcher._rng.getstate() == dice
        assert (gw.fleet._sequence, sample(process, "headrace_decisions_total")) == (sequence, decisions)
        assert len(one.requests) + len(two.requests) == 4

        document = asked[0].json()
        assert asked[0].status_code == 200
        assert document["backend"] == "b0"
        assert document["reason"].startswith("cheapest")
        assert not document["shed"]
        assert document["request"]["budget"] == {"ttft_s": 0.75, "inter_token_s": 0.1, "e2e_s": None}
        assert [entry["backend"] for entry in document["candidates"]] == ["b0", "b1"]
        for candidate in document["candidates"]:
            assert candidate["price"] == pytest.approx(sum(candidate["terms"].values()))
            assert 0.0 <= candidate["miss_probability"] <= 1.0
            for span in ("ttft", "tpot", "e2e"):
                spread = candidate[span]
                assert 0.0 <= spread["p01_s"] <= spread["p50_s"] <= spread["p99_s"]
            assert candidate["ttft"]["mean_s"] == pytest.approx(
                candidate["of_ttft"]["waiting_s"] + candidate["of_ttft"]["prefill_s"], abs=1e-5)
            assert candidate["model_state"] == "calibrated"
        # As a real request is decided on now.
        answer = await streamed(client, headers={"x-slo-ttft-ms": "750"})
        assert answer.headers["x-headrace-backend"] == document["backend"]


async def test_explain_takes_sizes_and_refuses_in_words(tmp_path: Path) -> None:
    async with (
        ScriptedBackend().serving() as backend,
        gateway(tmp_path, [entry(backend, context_tokens=8000)], **HEADRACE) as process,
        httpx.AsyncClient(base_url=process.admin_url) as admin,
    ):

        async def ask(**members: Any) -> tuple[int, dict[str, Any]]:
            answer = await admin.post("/admin/explain", json={"model": MODEL, **members})
            return answer.status_code, answer.json()

        small, large = [(await ask(prompt_tokens=tokens, expected_output_tokens=50))[1] for tokens in (100, 5000)]
        assert (large["request"]["prompt_tokens"], large["request"]["expected_output_tokens"]) == (5000, 50)
        assert large["candidates"][0]["ttft"]["mean_s"] > 5 * small["candidates"][0]["ttft"]["mean_s"]
        _, too_large = await ask(prompt_tokens=50_000)
        assert too_large["backend"] is None
        assert too_large["rejected"] == [{"backend": "b0", "reason": "context_too_small"}]
        wrong: tuple[tuple[dict[str, Any], str], ...] = (
            ({}, "messages"), ({"prompt_tokens": 0}, "prompt_tokens"),
            ({"prompt_tokens": "many"}, "prompt_tokens"), ({"prompt_tokens": 5, "model": "x"}, "model"),
        )  # fmt: skip
        for members, param in wrong:
            status, document = await ask(**members)
            assert status in (400, 404)
            assert document["error"]["param"] == param
        assert (await admin.post("/admin/explain", content=b"[1]")).status_code == 400
        assert (await admin.post("/admin/explain", json={"model": MODEL, "prompt_tokens": 5},
                                 headers={"x-headrace-class": "none"})).status_code == 400


# --- room and waiting -----------------------------------------------------------------------------------------------


async def test_a_class_finds_the_room_that_is_reserved_for_it(tmp_path: Path) -> None:
    release = asyncio.Event()

    async def hold(request: Received) -> None:
        await release.wait()
        await answer_hello(request)

    classes = [{"name": "gold", "reserved_share": 0.5}, {"name": "batch"}]
    async with (
        ScriptedBackend(hold).serving() as backend,
        gateway(tmp_path, [entry(backend)], latency_classes=classes, default_latency_class="batch",
                limits={"max_in_flight": 4}, **HEADRACE) as process,
        client_of(process) as client,
    ):
        tasks = [asyncio.create_task(client.post(CHAT_PATH, json=chat())) for _ in range(2)]
        await eventually(lambda: len(backend.requests) == 2)
        refused = await client.post(CHAT_PATH, json=chat())
        assert refused.status_code == 429
        assert "other latency classes" in refused.json()["error"]["message"]
        assert "retry-after" in refused.headers
        gold = {"x-headrace-class": "gold"}
        tasks += [asyncio.create_task(client.post(CHAT_PATH, json=chat(), headers=gold)) for _ in range(2)]
        await eventually(lambda: len(backend.requests) == 4)
        full = await client.post(CHAT_PATH, json=chat(), headers=gold)
        assert full.status_code == 429
        release.set()
        assert [answer.status_code for answer in await asyncio.gather(*tasks)] == [200] * 4
        await eventually(lambda: at_rest(process))
        assert sum(process.gateway.dispatcher.held.by_class().values()) == 0
        assert sample(process, "headrace_turned_away_total", reason="reserved", latency_class="batch") == 1
        assert sample(process, "headrace_turned_away_total", reason="full", latency_class="gold") == 1
        assert (await client.post(CHAT_PATH, json=chat())).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_waits_for_a_backend_that_comes_back_in_time(tmp_path: Path, stream: bool) -> None:
    async with (
        ScriptedBackend().serving() as backend,
        gateway(tmp_path, [entry(backend)], **HEADRACE) as process,
        client_of(process) as client,
    ):
        learner = told(process)
        out(process)
        asked = asyncio.create_task(client.post(CHAT_PATH, json=chat(stream=stream)))
        await eventually(lambda: sample(process, "headrace_waiting_requests", latency_class="default") == 1)
        assert backend.requests == []
        assert learner.sents == []
        await asyncio.sleep(0.1)
        back(process)
        answer = await asked
        assert answer.status_code == 200
        assert float(answer.headers["x-headrace-overhead-ms"]) < 80  # waiting is not the gateway's own time
        assert learner.sents[0].facts.waited_s >= 0.1
        assert sample(process, "headrace_queue_wait_seconds_count", ended="served") == 1
        assert sample(process, "headrace_waiting_requests") == 0
        await eventually(lambda: at_rest(process))


async def test_the_most_important_leaves_first_and_the_least_gives_way(tmp_path: Path) -> None:
    classes = [{"name": name, "priority": priority, "ttft_s": 5.0} for name, priority in
               (("low", -1), ("middle", 0), ("high", 1))]
    async with (
        ScriptedBackend().serving() as backend,
        gateway(tmp_path, [entry(backend)], latency_classes=classes, default_latency_class="low",
                limits={"max_waiting": 2}, **HEADRACE) as process,
        client_of(process) as client,
    ):
        out(process)
        learner = told(process)

        def ask(name: str) -> asyncio.Task[httpx.Response]:
            return asyncio.create_task(client.post(CHAT_PATH, json=chat(), headers={"x-headrace-class": name}))

        waiting = process.gateway.dispatcher.waiting
        tasks = {"low": ask("low")}
        await eventually(lambda: len(waiting) == 1)
        tasks["middle"] = ask("middle")
        await eventually(lambda: len(waiting) == 2)
        tasks["high"] = ask("high")
        low = await tasks["low"]
        assert low.status_code == 503
        assert "retry-after" in low.headers
        assert sample(process, "headrace_turned_away_total", latency_class="low", reason="queue_full") == 1
        back(process)
        assert [(await tasks[name]).status_code for name in ("middle", "high")] == [200, 200]
        assert [sent.facts.latency_class for sent in learner.sents] == ["high", "middle"]


async def test_who_has_waited_long_enough_is_told_so(tmp_path: Path) -> None:
    async with (
        ScriptedBackend().serving() as backend,
        gateway(tmp_path, [entry(backend)], latency_classes=[{"name": "default", "ttft_s": 0.5}],
                **HEADRACE) as process,
        client_of(process) as client,
    ):
        out(process)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        answer = await client.post(CHAT_PATH, json=chat())
        assert answer.status_code == 503
        assert "retry-after" in answer.headers
        assert 0.2 <= loop.time() - began_s < 2.0  # 0.4 of the budget
        assert sample(process, "headrace_turned_away_total", reason="no_waiting") == 1
        assert backend.requests == []
        await eventually(lambda: at_rest(process))


async def test_a_backend_that_never_was_up_is_not_waited_for(tmp_path: Path) -> None:
    async with (
        ScriptedBackend().serving() as backend,
        gateway(tmp_path, [entry(backend)], **HEADRACE) as process,
        client_of(process) as client,
    ):
        process.gateway.fleet.on_probe("b0", Probe(False))
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        assert (await client.post(CHAT_PATH, json=chat())).status_code == 503
        assert loop.time() - began_s < 1.0


@pytest.mark.parametrize("reset", [True, False])
async def test_p01_a_client_that_leaves_the_queue_leaves_nothing_behind(tmp_path: Path, reset: bool) -> None:
    async with (
        ScriptedBackend().serving() as backend,
        gateway(tmp_path, [entry(backend)], **HEADRACE) as process,
    ):
        learner = told(process)
        out(process)
        async with raw_client(process) as client:
            await client.send(request_bytes(chat(stream=True)))
            await eventually(lambda: len(process.gateway.dispatcher.waiting) == 1)
            client.leave(reset=reset)
        await eventually(lambda: len(process.gateway.dispatcher.waiting) == 0, 0.5)
        await eventually(lambda: at_rest(process))
        assert sample(process, "headrace_requests_total", outcome="client_closed", status="499", backend="none") == 1
        assert sample(process, "headrace_queue_wait_seconds_count", ended="left") == 1
        assert sample(process, "headrace_attempts_total") == 0
        assert learner.sents == []
        back(process)
        await asyncio.sleep(0.1)
        assert backend.requests == []


async def test_a_stop_tells_who_waits(tmp_path: Path) -> None:
    async with ScriptedBackend().serving() as backend, httpx.AsyncClient(timeout=30.0) as client:
        async with gateway(tmp_path, [entry(backend)], drain_s=1.0, latency_classes=[{"name": "default", "ttft_s": 60}],
                           **HEADRACE) as process:
            out(process)
            asked = asyncio.create_task(client.post(process.url + CHAT_PATH, json=chat()))
            await eventually(lambda: len(process.gateway.dispatcher.waiting) == 1)
        answer = await asked
        assert answer.status_code == 503
        assert "stopping" in answer.json()["error"]["message"]


# --- over a restart -------------------------------------------------------------------------------------------------


async def test_what_was_learned_survives_a_restart(tmp_path: Path) -> None:
    state = {"path": "state.json", "save_every_s": 300}
    async with ScriptedBackend().serving() as backend:
        async with (
            gateway(tmp_path, [entry(backend)], state=state, **HEADRACE) as process,
            client_of(process) as client,
        ):
            for _ in range(30):
                await streamed(client)
            learner = process.gateway.fleet.learner
            samples = learner.belief("b0", 0.0).ttft.samples
            assert samples > 20
        async with gateway(tmp_path, [entry(backend)], state=state, **HEADRACE) as process:
            again = process.gateway.fleet.learner
            assert again is not learner
            assert again.belief("b0", 0.0).ttft.samples == pytest.approx(samples, rel=0.01)
