"""The poller against loopback servers that behave, stall, drip, lie and die."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest

from backends.catalog.health import Health, HealthState, Outcome, OutcomeKind, Probe, step_health
from backends.catalog.sample import LoadSample
from backends.catalog.spec import BackendSpec
from backends.engines.exposition import MAX_PAGE_BYTES
from backends.poller import Poller

pytestmark = pytest.mark.real_time

MODELS = b'{"object":"list","data":[{"id":"m","aliases":["m-alias"],"object":"model"}]}'
METRICS = b"llamacpp:requests_processing 2\nllamacpp:requests_deferred 1\n"

Reply = Callable[[asyncio.StreamWriter], Awaitable[None]]


def answer(body: bytes, status: str = "200 OK", after_s: float = 0.0, head: str = "") -> Reply:
    async def reply(writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(after_s)
        writer.write(f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n{head}\r\n".encode() + body)
    return reply


async def hang(writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(60)


async def cut(writer: asyncio.StreamWriter) -> None:
    """Closes without a byte."""


async def drip(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n")
    for _ in range(600):
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.05)


async def flood(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    for _ in range(4 * MAX_PAGE_BYTES // 65536):
        writer.write(METRICS.ljust(65536, b"\n"))
        await writer.drain()


@dataclass
class Engine:
    """A server that answers each path as told, and remembers what it was asked."""

    replies: dict[str, Reply]
    asked: Counter[str] = field(default_factory=Counter)
    heads: list[bytes] = field(default_factory=list)
    open_connections: int = 0
    port: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open_connections += 1
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            path = head.split()[1].decode()
            self.heads.append(head)
            self.asked[path] += 1
            reply = asyncio.ensure_future(self.replies[path](writer))
            gone = asyncio.ensure_future(reader.read())
            await asyncio.wait({reply, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not reply.done():
                reply.cancel()
            elif reply.exception() is None:
                await writer.drain()
            gone.cancel()
            await asyncio.gather(reply, gone, return_exceptions=True)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.open_connections -= 1
            writer.close()


def good() -> dict[str, Reply]:
    return {"/health": answer(b'{"status":"ok"}'), "/metrics": answer(METRICS), "/v1/models": answer(MODELS)}


@asynccontextmanager
async def engine(**replies: Reply) -> AsyncIterator[Engine]:
    """An engine that is well but for `replies`, whose names are paths with `_` for `/`."""
    told = Engine(good() | {"/" + path.replace("_", "/"): reply for path, reply in replies.items()})
    server = await asyncio.start_server(told.serve, "127.0.0.1", 0)
    told.port = server.sockets[0].getsockname()[1]
    try:
        yield told
    finally:
        server.close()


def spec(name: str, port: int, engine: str = "llamacpp", model: str = "m") -> BackendSpec:
    return BackendSpec(name=name, url=f"http://127.0.0.1:{port}/", engine=engine, model="m",
                       served_model_name=model, card_type="cpu")


@dataclass
class Heard:
    probes: list[tuple[str, Probe]] = field(default_factory=list)
    samples: list[tuple[str, LoadSample]] = field(default_factory=list)

    def probe(self, name: str, probe: Probe) -> None:
        self.probes.append((name, probe))

    def sample(self, name: str, sample: LoadSample) -> None:
        self.samples.append((name, sample))

    def probes_of(self, name: str) -> list[Probe]:
        return [probe for who, probe in self.probes if who == name]


async def until(true: Callable[[], bool], within_s: float = 20.0) -> None:
    async with asyncio.timeout(within_s):
        while not true():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.01)


@asynccontextmanager
async def polling(*specs: BackendSpec, interval_s: float = 0.05, timeout_s: float = 5.0,
                  identity_interval_s: float = 10.0) -> AsyncIterator[tuple[Poller, Heard]]:
    heard = Heard()
    poller = Poller(specs, interval_s=interval_s, timeout_s=timeout_s, on_sample=heard.sample, on_probe=heard.probe,
                    identity_interval_s=identity_interval_s)
    run = asyncio.create_task(poller.run())
    try:
        yield poller, heard
    finally:
        await poller.aclose()
        async with asyncio.timeout(10):
            await run


async def one_probe(timeout_s: float = 5.0, engine_name: str = "llamacpp", model: str = "m", **replies: Reply) -> Probe:
    async with engine(**replies) as server, \
            polling(spec("a", server.port, engine_name, model), timeout_s=timeout_s) as (_, heard):
        await until(lambda: bool(heard.probes))
        return heard.probes[0][1]


@pytest.mark.anyio
async def test_a_good_engine_is_probed_sampled_and_identified() -> None:
    async with engine() as server, polling(spec("a", server.port)) as (poller, heard):
        await until(lambda: len(heard.samples) >= 3 and len(heard.probes) >= 3)
        name, sample = heard.samples[-1]
        assert (name, sample.running_requests, sample.waiting_requests) == ("a", 2, 1)
        assert 0 <= sample.age_s(poller.clock()) < 60
        assert all(probe.ok for _, probe in heard.probes)
        assert server.asked["/v1/models"] == 1


@pytest.mark.anyio
async def test_after_close_no_task_and_no_connection_is_left() -> None:
    async with engine(health=hang) as server:
        async with polling(spec("a", server.port)) as (_, heard):
            await until(lambda: bool(heard.samples) and server.open_connections > 0)
            assert "poll a" in {task.get_name() for task in asyncio.all_tasks()}
        assert not any("backends/poller.py" in repr(task) for task in asyncio.all_tasks())
        await until(lambda: server.open_connections == 0)


@pytest.mark.anyio
async def test_a_hung_backend_delays_no_other() -> None:
    async with engine(health=hang, metrics=hang) as hung, engine() as well, \
            polling(spec("hung", hung.port), spec("well", well.port), timeout_s=20.0) as (_, heard):
        await until(lambda: len(heard.probes_of("well")) >= 10)
        assert heard.probes_of("hung") == []
        assert hung.asked["/health"] == 1


@pytest.mark.anyio
async def test_a_hung_health_page_does_not_delay_the_metrics() -> None:
    async with engine(health=hang) as server, polling(spec("a", server.port), timeout_s=20.0) as (_, heard):
        await until(lambda: len(heard.samples) == 1)
        assert heard.probes == []


@pytest.mark.anyio
@pytest.mark.parametrize("late", [hang, drip, answer(b"ok", after_s=1.0)], ids=["hang", "drip", "1 s"])
async def test_P36b_no_answer_in_time_is_slow_and_not_ok(late: Reply) -> None:
    probe = await one_probe(timeout_s=0.3, health=late)
    assert (probe.ok, probe.slow) == (False, True)
    assert "no answer within 0.3 s" in probe.detail


@pytest.mark.anyio
async def test_P36b_a_late_answer_within_the_timeout_is_ok_and_slow() -> None:
    probe = await one_probe(timeout_s=4.0, health=answer(b"ok", after_s=2.2))
    assert (probe.ok, probe.slow) == (True, True)


@pytest.mark.anyio
async def test_P36b_a_busy_engine_that_serves_requests_stays_in() -> None:
    async with engine(health=answer(b"ok", after_s=3.0)) as server, \
            polling(spec("a", server.port), timeout_s=0.1) as (_, heard):
        await until(lambda: len(heard.probes) >= 5)
        busy = idle = Health(HealthState.HEALTHY)
        for _, probe in heard.probes:
            busy = step_health(step_health(busy, Outcome(OutcomeKind.SUCCESS), 1.0), probe, 1.0)
            idle = step_health(idle, probe, 1.0)
        assert busy.state is HealthState.HEALTHY
        assert idle.state is HealthState.UNHEALTHY


@pytest.mark.anyio
@pytest.mark.parametrize(("reply", "words"), [
    (answer(b"loading", "503 Service Unavailable"), "answered 503"),
    (answer(b"", "500 Internal Server Error"), "answered 500"),
    (answer(b"", "401 Unauthorized"), "its key is wrong or missing"),
    (answer(b"", "404 Not Found"), "is this the right engine?"),
    (answer(b"", "302 Found", head="location: /metrics\r\n"), "redirects are not followed"),
    (cut, "disconnected"),
], ids=["503", "500", "401", "404", "302", "cut"])
async def test_a_bad_answer_is_not_ok_and_not_slow(reply: Reply, words: str) -> None:
    probe = await one_probe(health=reply)
    assert (probe.ok, probe.slow) == (False, False)
    assert words in probe.detail


@pytest.mark.anyio
async def test_429_of_a_health_page_is_load() -> None:
    probe = await one_probe(health=answer(b"", "429 Too Many Requests"))
    assert (probe.ok, probe.slow) == (True, True)


@pytest.mark.anyio
async def test_a_refused_connection_is_not_ok_and_not_slow_and_recovers() -> None:
    async with engine() as server:
        port = server.port
    async with polling(spec("a", port)) as (_, heard):
        await until(lambda: len(heard.probes) >= 2)
        assert not any(probe.ok or probe.slow for _, probe in heard.probes)
        back = Engine(good())
        listener = await asyncio.start_server(back.serve, "127.0.0.1", port)
        await until(lambda: heard.probes[-1][1].ok)
        listener.close()


@pytest.mark.anyio
@pytest.mark.parametrize("name", ["m", "m-alias"])
async def test_P39_the_served_model_may_go_by_an_alias(name: str) -> None:
    assert (await one_probe(model=name)).ok


@pytest.mark.anyio
async def test_P39_another_models_server_on_the_port_is_found_out() -> None:
    probe = await one_probe(model="other")
    assert (probe.ok, probe.slow) == (False, False)
    assert probe.detail == "serves m, m-alias, not other"


@pytest.mark.anyio
async def test_P39_a_model_swapped_while_it_runs_is_found_out_within_the_identity_interval() -> None:
    async with engine() as server, polling(spec("a", server.port), identity_interval_s=0.1) as (_, heard):
        await until(lambda: len(heard.probes) >= 2)
        assert heard.probes[-1][1].ok
        server.replies["/v1/models"] = answer(MODELS.replace(b'"m', b'"n'))
        await until(lambda: not heard.probes[-1][1].ok)


@pytest.mark.anyio
async def test_P39_identity_is_checked_again_after_a_failed_probe() -> None:
    async with engine() as server, polling(spec("a", server.port), identity_interval_s=1e9) as (_, heard):
        await until(lambda: bool(heard.probes))
        server.replies |= {"/health": answer(b"", "503 Service Unavailable"),
                           "/v1/models": answer(MODELS.replace(b'"m', b'"n'))}
        await until(lambda: not heard.probes[-1][1].ok)
        server.replies["/health"] = answer(b"ok")
        await until(lambda: "serves n" in heard.probes[-1][1].detail)


@pytest.mark.anyio
@pytest.mark.parametrize("models", [
    answer(b"", "404 Not Found"), answer(b"[" * 500_000), answer(b'{"data":[]}'), answer(b'{"data":"x"}'),
    answer(b"\xff\xfe"), cut,
], ids=["404", "nested", "empty", "mistyped", "bytes", "cut"])
async def test_P39_an_unreadable_model_list_is_no_evidence(models: Reply) -> None:
    assert (await one_probe(v1_models=models)).ok


@pytest.mark.anyio
async def test_a_plain_openai_server_is_probed_by_its_model_list_alone() -> None:
    async with engine(health=answer(b"", "404 Not Found")) as server, \
            polling(spec("a", server.port, "openai")) as (_, heard):
        await until(lambda: len(heard.probes) >= 2)
        assert heard.probes[-1][1].ok
        assert set(server.asked) == {"/v1/models"}
        assert heard.samples == []
    assert not (await one_probe(engine_name="openai", model="other")).ok


@pytest.mark.anyio
@pytest.mark.parametrize("metrics", [
    answer(b"", "404 Not Found"), answer(b"", "302 Found", head="location: /health\r\n"), flood, drip, cut, hang,
], ids=["404", "302", "10 MB and more", "drip", "cut", "hang"])
async def test_P40_P41_a_failed_scrape_gives_no_sample_and_no_failed_probe(metrics: Reply) -> None:
    async with engine(metrics=metrics) as server, polling(spec("a", server.port), timeout_s=0.5) as (_, heard):
        await until(lambda: server.asked["/metrics"] >= 2)
        assert heard.samples == []
        assert heard.probes[0][1].ok


@pytest.mark.anyio
async def test_P40_a_page_without_known_series_is_a_blank_sample() -> None:
    async with engine(metrics=answer(b"<html>hello</html>")) as server, \
            polling(spec("a", server.port)) as (_, heard):
        await until(lambda: bool(heard.samples))
        assert heard.samples[0][1].is_blank


@pytest.mark.anyio
async def test_P41_when_scrapes_stop_the_last_sample_grows_old() -> None:
    async with engine() as server, polling(spec("a", server.port), timeout_s=0.2) as (poller, heard):
        await until(lambda: bool(heard.samples))
        server.replies["/metrics"] = hang
        seen = server.asked["/metrics"]
        await until(lambda: server.asked["/metrics"] > seen + 1)
        count, age_s = len(heard.samples), heard.samples[-1][1].age_s(poller.clock())
        await until(lambda: server.asked["/metrics"] > seen + 2)
        assert len(heard.samples) == count
        assert heard.samples[-1][1].age_s(poller.clock()) > age_s


@pytest.mark.anyio
async def test_the_key_is_sent_as_a_bearer_and_only_where_there_is_one() -> None:
    async with engine() as keyed, engine() as open_, \
            polling(replace(spec("k", keyed.port), api_key="s3cret"), spec("o", open_.port)) as (_, heard):
        await until(lambda: bool(heard.probes_of("k") and heard.probes_of("o")) and len(heard.samples) >= 2)
        assert all(b"authorization: bearer s3cret" in head.lower() for head in keyed.heads)
        assert not any(b"authorization" in head.lower() for head in open_.heads)


@pytest.mark.anyio
async def test_a_proxy_in_the_environment_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    assert (await one_probe()).ok


@pytest.mark.anyio
async def test_update_drops_adds_and_leaves_alone() -> None:
    async with engine() as first, engine() as second, \
            polling(spec("a", first.port), spec("b", first.port), identity_interval_s=1e9) as (poller, heard):
        await until(lambda: bool(heard.probes_of("a") and heard.probes_of("b")))
        identified = first.asked["/v1/models"]
        poller.update([replace(spec("a", first.port), weight=3.0, price_per_hour=9.0), spec("c", second.port)])
        b_probes = len(heard.probes_of("b"))
        await until(lambda: len(heard.probes_of("c")) >= 3)
        assert len(heard.probes_of("b")) == b_probes
        assert first.asked["/v1/models"] == identified, "a reload of the price alone starts nothing anew"
        poller.update([spec("a", second.port)])
        await until(lambda: second.asked["/v1/models"] >= 2)


@pytest.mark.anyio
async def test_an_unknown_engine_is_refused_and_changes_nothing() -> None:
    async with engine() as server, polling(spec("a", server.port)) as (poller, heard):
        with pytest.raises(ValueError, match="backend b: no dialect for engine 'abacus'"):
            poller.update([spec("b", server.port, "abacus")])
        count = len(heard.probes)
        await until(lambda: len(heard.probes) > count + 1)
        assert {name for name, _ in heard.probes} == {"a"}


@pytest.mark.anyio
async def test_a_listener_that_raises_is_logged_and_polling_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    def broken(name: str, news: object) -> None:
        raise RuntimeError("full")

    async with engine() as server:
        poller = Poller([spec("a", server.port)], interval_s=0.01, on_sample=broken, on_probe=broken)
        run = asyncio.create_task(poller.run())
        await until(lambda: server.asked["/health"] >= 3 and server.asked["/metrics"] >= 3)
        await poller.aclose()
        await run
    assert "news of backend a was not taken" in caplog.text


@pytest.mark.anyio
async def test_many_late_answers_leave_no_connection_behind() -> None:
    async with engine(health=drip, metrics=drip) as server, \
            polling(spec("a", server.port), interval_s=0.01, timeout_s=0.05) as (_, heard):
        await until(lambda: len(heard.probes) >= 30)
        assert server.open_connections <= 6
