"""Two gateways and one port; the end of a gateway while streams are open."""

import contextlib
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from loadtest.stack import child
from tests.gateway_stack import fleet_document
from tests.processes import (
    FakeEngine,
    GatewayProcess,
    RawStream,
    answers,
    fake_engines,
    gateway_process,
    is_running,
    until,
)

SHORT_TOKENS = 150
"""About 1.5 s on the card that is played: still open when the signal comes, over well before the drain's end."""
ENDLESS_TOKENS = 20_000


def engine_of(tmp_path: Path) -> FakeEngine:
    return FakeEngine("b0", tmp_path)


@pytest.mark.parametrize("taken", ["listen", "admin"])
def test_a_second_gateway_on_a_taken_port_is_refused_in_one_line_and_harms_nobody(tmp_path: Path, taken: str) -> None:
    (tmp_path / "second").mkdir()
    with engine_of(tmp_path) as engine, gateway_process(tmp_path, [engine.backend]) as first:
        with RawStream(first.url, max_tokens=SHORT_TOKENS).send() as stream:
            stream.read_until(b" t3")
            second = GatewayProcess(tmp_path / "second", first.document)
            port = first.port if taken == "listen" else first.admin_port
            second.document[taken] = {"port": port}
            second.write()
            done = subprocess.run(second.command, capture_output=True, text=True, timeout=30, check=False)
            assert done.returncode == 1
            assert done.stdout == "", "it never was ready"
            lines = done.stderr.strip().splitlines()
            assert len(lines) == 1, done.stderr
            assert re.search(rf"\bport {port}\b.*taken", lines[0])
            stream.read_to_end()
        assert stream.ended_well
        assert answers(first.url, "/readiness")
        other = second.port if taken == "admin" else second.admin_port
        assert not answers(f"http://127.0.0.1:{other}", "/readiness"), "nothing of the second one stays"


@pytest.mark.parametrize("options", [(), ("--workers", "2")])
def test_the_log_says_where_it_listens_without_json_too(tmp_path: Path, options: tuple[str, ...]) -> None:
    gateway = GatewayProcess(tmp_path, fleet_document([{"url": "http://127.0.0.1:9"}]))
    command = [part for part in gateway.command if part != "--json"]
    with child([*command, *options], gateway.log):
        until(lambda: gateway.url in gateway.log.read_text(), "a line that says where")
        assert gateway.admin_url in gateway.log.read_text()


def test_sigterm_lets_open_streams_finish_and_takes_no_more(tmp_path: Path) -> None:
    with engine_of(tmp_path) as engine, gateway_process(tmp_path, [engine.backend]) as gateway:
        assert gateway.process is not None
        streams = [RawStream(gateway.url, max_tokens=SHORT_TOKENS).send() for _ in range(5)]
        for stream in streams:
            stream.read_until(b" t3")
        gateway.send_signal(signal.SIGTERM)
        until(lambda: not answers(gateway.url, "/readiness"), "the gateway to take no more requests")
        assert engine.in_flight() == len(streams), "it closed its door while all of them were open"
        for stream in streams:
            with stream:
                stream.read_to_end()
                assert stream.ended_well
                assert b" t%d" % (SHORT_TOKENS - 1) in stream.seen
        assert gateway.process.wait(timeout=15) == 0
        assert engine.in_flight() == 0


def test_a_second_sigterm_ends_at_once_and_no_client_takes_its_answer_for_whole(tmp_path: Path) -> None:
    with (
        fake_engines(tmp_path, ["b0"]) as (engine,),
        gateway_process(tmp_path, [engine.backend]) as gateway,
        RawStream(gateway.url, max_tokens=ENDLESS_TOKENS).send() as stream,
    ):
        assert gateway.process is not None
        stream.read_until(b" t3")
        gateway.send_signal(signal.SIGTERM)
        until(lambda: not answers(gateway.url, "/readiness"), "the gateway to take no more requests")
        assert is_running(gateway.process.pid), "it waits for the open stream"
        asked_again_s = time.monotonic()
        gateway.send_signal(signal.SIGTERM)
        gateway.process.wait(timeout=8)  # less than the ten seconds that a drain may take
        print(f"second SIGTERM: gone after {time.monotonic() - asked_again_s:.2f} s, code {gateway.process.returncode}")
        stream.read_to_end()
        assert not stream.body_is_whole
        until(lambda: engine.in_flight() == 0, "the engine to notice that nobody listens")


def test_what_outlasts_the_drain_is_cut_off_visibly_and_the_process_ends_in_time(tmp_path: Path) -> None:
    drain_s = 2.0
    with (
        fake_engines(tmp_path, ["b0"]) as (engine,),
        gateway_process(tmp_path, [engine.backend], timeouts={"drain_s": drain_s}) as gateway,
        RawStream(gateway.url, max_tokens=SHORT_TOKENS // 2).send() as short,
        RawStream(gateway.url, max_tokens=ENDLESS_TOKENS).send() as endless,
        RawStream(gateway.url, stream=False, max_tokens=ENDLESS_TOKENS).send() as whole,
    ):
        assert gateway.process is not None
        short.read_until(b" t3")
        endless.read_until(b" t3")
        until(lambda: engine.in_flight() == 3, "the engine to have all three")
        asked_s = time.monotonic()
        gateway.send_signal(signal.SIGTERM)
        short.read_to_end()
        assert short.ended_well
        endless.read_to_end()
        assert not endless.body_is_whole
        assert b" 503 " in whole.read_to_end().partition(b"\r\n")[0], "nothing of it had come, so it may be asked again"
        assert gateway.process.wait(timeout=drain_s + 8) == 0
        took_s = time.monotonic() - asked_s
        print(f"drain of {drain_s:g} s over after {took_s:.2f} s")
        assert took_s >= drain_s - 0.5
        until(lambda: engine.in_flight() == 0, "the engine to be let go")


def test_P49_a_drain_with_three_hundred_streams_ends_two_hundred_well_and_tells_the_rest(tmp_path: Path) -> None:
    drain_s = 6.0
    with (
        fake_engines(tmp_path, ["b0", "b1"]) as engines,
        gateway_process(
            tmp_path, [{**engine.backend, "slots": 256} for engine in engines], timeouts={"drain_s": drain_s}
        ) as gateway,
        contextlib.ExitStack() as open_streams,
    ):
        assert gateway.process is not None

        def opened(count: int, max_tokens: int) -> list[RawStream]:
            return [
                open_streams.enter_context(RawStream(gateway.url, max_tokens=max_tokens).send()) for _ in range(count)
            ]

        endless, short = opened(100, ENDLESS_TOKENS), opened(200, SHORT_TOKENS // 2)
        for stream in [*endless, *short]:
            stream.read_until(b" t3")
        asked_s = time.monotonic()
        gateway.send_signal(signal.SIGTERM)
        until(lambda: not answers(gateway.url, "/readiness"), "the listener to close")
        for stream in short:
            stream.read_to_end()
        assert all(stream.ended_well for stream in short)
        for stream in endless:
            stream.read_to_end()
        assert all(b"gateway_stopping" in stream.seen for stream in endless), "each is told why"
        assert not any(stream.body_is_whole for stream in endless)
        assert gateway.process.wait(timeout=drain_s + 8) == 0
        print(f"drain of {drain_s:g} s with 300 streams over after {time.monotonic() - asked_s:.2f} s")
        until(lambda: sum(engine.in_flight() for engine in engines) == 0, "the engines to be let go")
