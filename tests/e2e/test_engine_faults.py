"""Death, freeze and return of an engine process under load: whoever had no byte yet is answered by another one."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from backends.embedded.model_files import MODEL_NAME
from loadtest.openai_stream import StreamRecord
from tests.e2e.conftest import LlamaFleet
from tests.processes import (
    FakeEngine,
    GatewayProcess,
    OpenLoad,
    RawStream,
    Shape,
    ask,
    failures,
    fake_engines,
    gateway_process,
    served_by,
    until,
)

pytestmark = pytest.mark.load

NAMES = ("b0", "b1", "b2")
RATE_PER_S = 20.0
SHAPE = Shape(max_tokens=30)
"""About 0.4 s on the card that is played."""
LONG_TOKENS = 20_000
# Thresholds as shipped; only the times are shorter, so that a test sees a whole illness and recovery in seconds.
TIMES = {
    "health": {"base_ejection_s": 1.0, "slow_start_s": 3.0},
    "timeouts": {"connect_s": 1.0, "first_token_s": 2.0, "inter_token_s": 2.0},
    "poll": {"interval_s": 0.2, "timeout_s": 1.0},
}
IN_SERVICE = ("healthy", "slow_start", "unknown")


@contextmanager
def small_fleet(folder: Path) -> Iterator[tuple[list[FakeEngine], GatewayProcess]]:
    """Three engines and a gateway."""
    with (
        fake_engines(folder, NAMES) as engines,
        gateway_process(folder, [engine.backend for engine in engines], **TIMES) as gateway,
    ):
        yield engines, gateway


@contextmanager
def settled_load(gateway: GatewayProcess) -> Iterator[OpenLoad]:
    """A load that each backend has a part in; at the end of the context every request has ended."""
    with OpenLoad(gateway.url, RATE_PER_S, SHAPE) as load:
        until(lambda: len(served_by(load.records)) == len(NAMES), "each engine to have served")
        yield load


def hold_requests(victim: FakeEngine, gateway: GatewayProcess, count: int) -> None:
    """Have the victim take requests and say nothing, until so many wait there for their first byte."""
    victim.set_faults("hang")
    until(lambda: victim.in_flight() >= count and gateway.in_flight(victim.name) >= count, f"{count} held requests")


def await_out(gateway: GatewayProcess, name: str, since_s: float) -> float:
    """Returns once the gateway has taken that backend out of service; the monotonic time of it."""
    until(lambda: gateway.health(name) not in IN_SERVICE, f"{name} to be out of service")
    at_s = time.monotonic()
    print(f"{name}: out of service {at_s - since_s:.2f} s after its end")
    return at_s


def check_only_begun_streams_failed(records: Sequence[StreamRecord], victim: str, ended_at_s: float) -> None:
    """Nobody but those who had a part of their answer from the victim lost it, and those were told in so many words.

    `error_in_stream` is an error event. Lost or disordered tokens under a clean end would have other names.
    """
    failed = failures(records)
    print(f"{len(records)} requests, {len(failed)} failed (begun on {victim} when it ended)")
    for record in failed:
        assert (record.backend, record.status, record.failure) == (victim, 200, "error_in_stream"), record
        assert record.ttft_s is not None, record
        assert record.intended_at_s + record.ttft_s <= ended_at_s + 0.5, record
        assert record.tokens < record.max_tokens


def check_return(gateway: GatewayProcess, load: OpenLoad, name: str, back_since_s: float) -> None:
    """The backend is trusted again by degrees: a start with less than its share, and in the end its full share."""
    until(lambda: gateway.health(name) in ("half_open", "slow_start", "healthy"), f"{name} to be tried again")
    until(lambda: gateway.health(name) == "slow_start", f"{name} to be in its slow start")
    begun_s = time.monotonic()
    print(f"{name}: slow start {begun_s - back_since_s:.2f} s after its return")
    until(lambda: gateway.health(name) == "healthy", f"{name} to be healthy")
    healthy_s = time.monotonic()
    load.await_served(30, since_s=healthy_s)
    early = served_by(load.since(begun_s, begun_s + 1.5))
    late = served_by(load.since(healthy_s))
    print(f"{name}: {early[name]} of {early.total()} at first, {late[name]} of {late.total()} when healthy")
    early_share, late_share = early[name] / early.total(), late[name] / late.total()
    # In its first 1.5 of 3 s it pulls a quarter of its weight on average: a share of 11 % instead of 33 %.
    assert early_share < 0.75 * late_share
    assert late_share > 0.2


def test_p30_sigkill_and_restart_lose_only_streams_that_had_begun(tmp_path: Path) -> None:
    with small_fleet(tmp_path) as (engines, gateway):
        with settled_load(gateway) as load, RawStream(gateway.url, max_tokens=LONG_TOKENS).send() as stream:
            victim = next(engine for engine in engines if engine.name == stream.backend)
            stream.read_until(b" t3")
            hold_requests(victim, gateway, 7)
            killed_s = victim.kill()
            stream.read_to_end()
            out_s = await_out(gateway, victim.name, killed_s)
            load.await_served(25, since_s=out_s)
            restarted_s = time.monotonic()
            victim.start()
            check_return(gateway, load, victim.name, time.monotonic())
        assert b'"upstream_truncated"' in stream.seen, "a begun stream is told that it is cut"
        assert not stream.body_is_whole
        assert len(load.records) == load.started
        check_only_begun_streams_failed(load.records, victim.name, killed_s)
        assert served_by(load.since(out_s + 0.2, restarted_s))[victim.name] == 0, "none went to the dead engine"
        retried = gateway.metric("headrace_retries_total", cause="reset_before_byte")
        assert retried >= 4, "those that waited there were sent elsewhere"
        gateway.await_empty_books()


def test_sigstop_and_sigcont_lose_only_streams_that_had_begun(tmp_path: Path) -> None:
    with small_fleet(tmp_path) as (engines, gateway):
        with settled_load(gateway) as load, RawStream(gateway.url, max_tokens=LONG_TOKENS).send() as stream:
            victim = next(engine for engine in engines if engine.name == stream.backend)
            stream.read_until(b" t3")
            frozen_s = victim.freeze()
            out_s = await_out(gateway, victim.name, frozen_s)
            stream.read_to_end()
            load.await_served(25, since_s=out_s)
            thawed_s = time.monotonic()
            victim.thaw()
            check_return(gateway, load, victim.name, thawed_s)
        assert b'"upstream_timeout"' in stream.seen, "a stream that stands still is told so"
        assert not stream.body_is_whole
        assert len(load.records) == load.started
        check_only_begun_streams_failed(load.records, victim.name, frozen_s)
        assert gateway.metric("headrace_retries_total") >= 1, "those that waited there were sent elsewhere"
        print(f"slowest first token {max(record.ttft_s or 0.0 for record in load.records):.2f} s")
        gateway.await_empty_books()
        until(lambda: victim.in_flight() == 0, "the thawed engine to be idle: nobody waits for what it held")


@pytest.mark.real_engine
def test_a_real_engine_killed_by_its_pid_loses_only_streams_that_had_begun(
    llama_fleet: LlamaFleet, tmp_path: Path
) -> None:
    """llama.cpp under load: by turns, so that each engine has streams when the victim dies."""
    document = {**llama_fleet.gateway.document, "policy": {"name": "round_robin"}}
    shape = Shape(prompt="Tell me a story.", max_tokens=16, exact_tokens=False, model=MODEL_NAME)
    victim = llama_fleet.engines[1]
    with GatewayProcess(tmp_path, document) as gateway:
        with OpenLoad(gateway.url, 3.0, shape) as load:
            until(lambda: len(served_by(load.records)) == len(NAMES), "each engine to have served", limit_s=60)
            until(lambda: gateway.in_flight(victim.name) >= 1, "the victim to be at work")
            killed_s = victim.kill()
            out_s = await_out(gateway, victim.name, killed_s)
            load.await_served(6, since_s=out_s, limit_s=60)
            victim.start()
            back_s = time.monotonic()
            until(lambda: served_by(load.since(back_s))[victim.name] >= 2, "the victim to serve again", limit_s=60)
        assert len(load.records) == load.started
        check_only_begun_streams_failed(load.records, victim.name, killed_s)
        gateway.await_empty_books()


def test_P38_with_every_backend_frozen_the_gateways_own_pages_answer_at_once(tmp_path: Path) -> None:
    """Kernels still accept connections for them, and nobody ever says a word: whoever waits for one waits for long."""
    probe_timeout_s = 2.0
    took_s: dict[str, list[float]] = {path: [] for path in ("/health", "/liveness", "/readiness", "/metrics")}
    with (
        fake_engines(tmp_path, ["b0", "b1", "b2", "b3"]) as engines,
        gateway_process(
            tmp_path, [engine.backend for engine in engines], poll={"interval_s": 0.1, "timeout_s": probe_timeout_s}
        ) as gateway,
    ):
        for engine in engines:
            engine.freeze()
        until(lambda: any(gateway.health(engine.name) not in IN_SERVICE for engine in engines), "one to be out")
        for _ in range(30):
            for path, times in took_s.items():
                asked_s = time.monotonic()
                status, _ = ask(gateway.url, path)
                times.append(time.monotonic() - asked_s)
                assert status == 200 or (path, status) == ("/readiness", 503)
            time.sleep(0.02)
    print({path: f"at most {1000 * max(times):.1f} ms" for path, times in took_s.items()})
    assert max(map(max, took_s.values())) < probe_timeout_s / 4
