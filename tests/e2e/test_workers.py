"""Several worker processes on one port: killed, replaced, drained and limited while clients stream through them."""

import contextlib
import functools
import hashlib
import http.client
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.gateway_stack import MODEL, fleet_document
from tests.processes import (
    GatewayProcess,
    OpenLoad,
    RawStream,
    Shape,
    answers,
    ask,
    ask_json,
    failures,
    fake_engines,
    is_running,
    until,
)

ENDLESS_TOKENS = 20_000
SHORT_TOKENS = 150


class WorkersProcess(GatewayProcess):
    """`headrace serve --workers N`."""

    def __init__(self, folder: Path, document: Mapping[str, Any], count: int) -> None:
        self.count = count
        super().__init__(folder, document)

    @property
    def command(self) -> list[str]:
        return [*super().command, "--workers", str(self.count)]

    def workers(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = ask_json(self.admin_url, "/admin/workers")["workers"]
        return found

    def pids(self) -> list[int]:
        return [entry["pid"] for entry in self.workers() if entry["state"] == "serving"]

    def is_gone(self, pid: int) -> bool:
        return pid not in [entry["pid"] for entry in self.workers()]

    def await_workers(self, count: int | None = None) -> list[int]:
        """The pids of all workers once so many serve and nobody else is left."""
        wanted = count or self.count
        until(lambda: len(self.workers()) == len(self.pids()) == wanted, f"{wanted} workers to serve")
        return self.pids()


@contextlib.contextmanager
def workers_process(
    folder: Path, engines: Sequence[Mapping[str, Any]], count: int, **sections: Any
) -> Iterator[WorkersProcess]:
    process = WorkersProcess(folder, fleet_document(engines, **sections), count)
    with process:
        yield process


def spread_streams(gateway: WorkersProcess, count: int, **members: Any) -> list[RawStream]:
    """Open streams that have begun, on more than one worker."""
    streams = [RawStream(gateway.url, **{"max_tokens": ENDLESS_TOKENS, **members}).send() for _ in range(count)]
    for stream in streams:
        stream.read_until(b" t2")
    return streams


def close_all(streams: Sequence[RawStream]) -> None:
    for stream in streams:
        stream.socket.close()


def keep_asking(url: str, stop: threading.Event, statuses: list[int]) -> None:
    """Whole answers one after another on one connection, for as long as the server keeps it; 0 is a broken one."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=20)
    body = json.dumps({"model": MODEL, "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]})
    while not stop.is_set():
        try:
            connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
            response = connection.getresponse()
            response.read()
            statuses.append(response.status)
        except OSError:
            statuses.append(0)
            connection.close()
        time.sleep(0.05)
    connection.close()


def test_all_workers_count_each_others_requests_and_a_killed_ones_vanish(tmp_path: Path) -> None:
    with (
        fake_engines(tmp_path, ["b0", "b1"]) as engines,
        workers_process(
            tmp_path, [engine.backend for engine in engines], 3, policy={"name": "least_inflight"}
        ) as gateway,
    ):
        streams = spread_streams(gateway, 18)
        held = {entry["pid"]: entry["in_flight"] for entry in gateway.workers()}
        assert sum(held.values()) == 18 == gateway.fleet()["in_flight"]
        assert sum(count > 0 for count in held.values()) > 1, held
        # Each worker saw what the others had sent, so the least loaded backend was the same one for all of them.
        shares = [gateway.in_flight(engine.name) for engine in engines]
        assert abs(shares[0] - shares[1]) <= 2, shares

        victim = max(held, key=lambda pid: held[pid])
        killed_s = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        left = 18 - held[victim]
        until(lambda: sum(entry["in_flight"] for entry in gateway.workers()) == left, "its leases to vanish", limit_s=5)
        took_s = time.monotonic() - killed_s
        print(f"{held[victim]} leases of a killed worker gone after {took_s * 1e3:.0f} ms")
        assert took_s < 1.0
        assert len(gateway.await_workers()) == 3
        assert victim not in gateway.pids()
        print(f"restarted after {time.monotonic() - killed_s:.2f} s")
        alive = 0
        for stream in streams:
            with contextlib.suppress(AssertionError, ConnectionError):
                stream.read_what_came()  # from the killed worker too, before it died
                mark = len(stream.seen)
                while len(stream.seen) < mark + 1000:
                    data = stream.socket.recv(65536)
                    assert data
                    stream.seen += data
                alive += 1
        assert alive == left, "streams of the other workers go on"
        close_all(streams)
        gateway.await_empty_books()


def test_no_connection_waits_long_for_a_worker_that_is_away(tmp_path: Path) -> None:
    with (
        fake_engines(tmp_path, ["b0"], time_scale=20) as (engine,),
        workers_process(tmp_path, [engine.backend], 3) as gateway,
    ):
        victim = gateway.pids()[-1]
        with OpenLoad(gateway.url, 40, Shape(max_tokens=5)) as load:
            load.await_served(20)
            os.kill(victim, signal.SIGSTOP)  # its socket is open and nobody accepts: the worst of deaths
            os.kill(victim, signal.SIGKILL)
            at_s = time.monotonic()
            gateway.await_workers()
            load.await_served(40, since_s=at_s)
        later = load.since(at_s)
        assert len(later) >= 40
        # What the dead worker held is lost with it; whatever came after its death is served by somebody.
        assert failures(load.since(at_s + 0.1)) == []


def test_a_frozen_parent_and_a_dead_worker_cost_no_client_and_no_lease(tmp_path: Path) -> None:
    with (
        fake_engines(tmp_path, ["b0"], time_scale=20) as (engine,),
        workers_process(tmp_path, [engine.backend], 3) as gateway,
    ):
        victim = gateway.pids()[0]  # the leader
        gateway.send_signal(signal.SIGSTOP)  # nobody clears the row, nobody starts a successor
        try:
            os.kill(victim, signal.SIGKILL)
            at_s = time.monotonic()
            with OpenLoad(gateway.url, 20, Shape(max_tokens=3)) as load:
                load.await_served(100)
            assert failures(load.since(at_s + 0.1)) == []
            slowest_s = max(record.e2e_s for record in load.records)
            print(f"a third of the sockets orphaned for good: slowest request {slowest_s:.2f} s")
            assert slowest_s < 8.0
        finally:
            gateway.send_signal(signal.SIGCONT)
        assert victim not in gateway.await_workers()


def test_a_rolling_restart_refuses_nobody_and_cuts_nobody(tmp_path: Path) -> None:
    with (
        fake_engines(tmp_path, ["b0", "b1"]) as engines,
        workers_process(
            tmp_path, [engine.backend for engine in engines], 2, timeouts={"drain_s": 10.0}
        ) as gateway,
    ):
        before = gateway.await_workers()
        stop = threading.Event()
        kept_alive: list[int] = []
        asking = threading.Thread(target=keep_asking, args=(gateway.url, stop, kept_alive))
        asking.start()
        with OpenLoad(gateway.url, 15, Shape(max_tokens=40)) as load:
            load.await_served(15)
            # Long enough to outlast the start of the first successor, short enough for the drain.
            streams = [RawStream(gateway.url, max_tokens=400).send() for _ in range(30)]
            for stream in streams:
                stream.read_until(b" t2")
            rolled_s = time.monotonic()
            gateway.send_signal(signal.SIGUSR2)
            threads = [threading.Thread(target=stream.read_to_end) for stream in streams]
            for thread in threads:
                thread.start()
            until(lambda: not set(before) & {entry["pid"] for entry in gateway.workers()}, "both to be replaced",
                  limit_s=40)
            after = gateway.await_workers()
            print(f"rolled 2 workers under load in {time.monotonic() - rolled_s:.1f} s")
            for thread in threads:
                thread.join(20)
            served = load.started
            load.await_served(served + 15)
        stop.set()
        asking.join(20)
        assert not set(before) & set(after)
        assert failures(load.records) == []
        assert len(load.records) > 50
        assert all(stream.ended_well for stream in streams), "open streams finish where they began"
        assert len(kept_alive) > 20
        assert set(kept_alive) == {200}, "nor does a client whose connection was kept notice anything"
        close_all(streams)
        gateway.await_empty_books()
        counted = gateway.metric("headrace_requests_total")
        assert counted == len(load.records) + len(streams) + len(kept_alive), "nothing is forgotten"


def test_a_drain_lets_streams_finish_and_cuts_the_rest_visibly(tmp_path: Path) -> None:
    drain_s = 3.0
    with (
        fake_engines(tmp_path, ["b0"]) as (engine,),
        workers_process(tmp_path, [engine.backend], 2, timeouts={"drain_s": drain_s}) as gateway,
    ):
        assert gateway.process is not None
        workers = gateway.pids()
        short = spread_streams(gateway, 6, max_tokens=SHORT_TOKENS)
        endless = spread_streams(gateway, 6)
        asked_s = time.monotonic()
        gateway.send_signal(signal.SIGTERM)
        until(lambda: not answers(gateway.url, "/readiness"), "the gateway to take no more requests", limit_s=1.5)
        for stream in short:
            stream.read_to_end()
            assert stream.ended_well
        for stream in endless:
            stream.read_to_end()
            assert b"gateway_stopping" in stream.seen
            assert not stream.body_is_whole
        assert gateway.process.wait(timeout=10) == 0
        took_s = time.monotonic() - asked_s
        print(f"drain of {drain_s:g} s over after {took_s:.2f} s")
        assert took_s < drain_s + 2.0
        assert not any(map(is_running, workers))
        until(lambda: engine.in_flight() == 0, "the engine to be let go")
        close_all([*short, *endless])


def test_asked_twice_it_does_not_wait(tmp_path: Path) -> None:
    with (
        fake_engines(tmp_path, ["b0"]) as (engine,),
        workers_process(tmp_path, [engine.backend], 2) as gateway,
    ):
        assert gateway.process is not None
        streams = spread_streams(gateway, 6)
        gateway.send_signal(signal.SIGINT)
        until(lambda: not answers(gateway.url, "/readiness"), "the gateway to take no more requests")
        assert is_running(gateway.process.pid)
        asked_again_s = time.monotonic()
        gateway.send_signal(signal.SIGTERM)
        gateway.process.wait(timeout=8)
        took_s = time.monotonic() - asked_again_s
        print(f"asked twice: gone after {took_s:.2f} s, code {gateway.process.returncode}")
        for stream in streams:
            stream.read_to_end()
            assert not stream.body_is_whole
        until(lambda: engine.in_flight() == 0, "the engine to be let go")
        close_all(streams)


def test_limits_hold_over_all_workers(tmp_path: Path) -> None:
    keys = {"one": "k" * 40, "many": "m" * 40}
    rows = [
        {"id": "one", "sha256": hashlib.sha256(keys["one"].encode()).hexdigest(), "max_parallel": 1},
        {"id": "many", "sha256": hashlib.sha256(keys["many"].encode()).hexdigest()},
    ]
    (tmp_path / "keys.json").write_text(json.dumps({"keys": rows}))

    def start(name: str) -> tuple[int, socket.socket]:
        """A stream by that key, and its status."""
        parts = urlsplit(gateway.url)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=20)
        body = {"model": MODEL, "stream": True, "max_tokens": ENDLESS_TOKENS,
                "messages": [{"role": "user", "content": "hi"}]}
        connection.request("POST", "/v1/chat/completions", json.dumps(body),
                           {"content-type": "application/json", "authorization": f"Bearer {keys[name]}"})
        held = connection.sock
        return connection.getresponse().status, held

    with (
        fake_engines(tmp_path, ["b0"]) as (engine,),
        workers_process(
            tmp_path, [engine.backend], 3, auth={"keys_file": "keys.json"}, limits={"max_in_flight": 10}
        ) as gateway,
    ):
        status, first = start("one")
        assert status == 200
        refused = [start("one") for _ in range(12)]
        assert [status for status, _ in refused] == [429] * 12
        first.close()
        until(lambda: gateway.fleet()["in_flight"] == 0, "the key's place to be free", limit_s=5)
        for _, connection in refused:
            connection.close()

        held = [start("many") for _ in range(14)]
        assert [status for status, _ in held] == [200] * 10 + [429] * 4
        assert len([entry for entry in gateway.workers() if entry["in_flight"] > 0]) > 1
        for _, connection in held:
            connection.close()
        gateway.await_empty_books()


def test_a_reload_reaches_every_worker_and_a_successor_runs_what_the_others_run(tmp_path: Path) -> None:
    with (
        fake_engines(tmp_path, ["b0", "b1"], time_scale=20) as engines,
        workers_process(tmp_path, [engine.backend for engine in engines], 2) as gateway,
    ):
        before = gateway.config()["config_hash"]
        gateway.set_weights(b0=2.0)
        assert ask(gateway.admin_url, "/admin/reload", method="POST")[0] == 200
        config = gateway.config()
        assert config["is_coherent"] is True
        assert len(config["workers"]) == 2
        assert config["config_hash"] != before

        assert ask(gateway.admin_url, "/admin/rollback", method="POST")[0] == 200
        os.kill(gateway.pids()[0], signal.SIGKILL)
        until(lambda: len(gateway.pids()) == 1, "its death to be seen")
        gateway.await_workers()
        time.sleep(0.5)  # a successor that took the file for news would have read it by now
        rolled_back = gateway.config()
        assert set(rolled_back["workers"].values()) == {before}, "the file stays rolled back for a successor, too"
        gateway.send_signal(signal.SIGHUP)
        edited = {config["config_hash"]}
        until(lambda: set(gateway.config()["workers"].values()) == edited, "all to read the file again")

        assert ask(gateway.admin_url, "/admin/backends/b1/drain", method="POST")[0] == 200
        gateway.write("this: is no fleet")
        assert ask(gateway.admin_url, "/admin/reload", method="POST")[0] == 422
        for pid in gateway.pids():
            os.kill(pid, signal.SIGKILL)
            until(functools.partial(gateway.is_gone, pid), "its death to be seen")
            gateway.await_workers()
        successors = gateway.config()
        assert set(successors["workers"]).isdisjoint(config["workers"])
        assert successors["is_coherent"] is True
        assert successors["config_hash"] == config["config_hash"], "the last good one, though the file is broken"
        with OpenLoad(gateway.url, 40, Shape(max_tokens=3)) as load:
            load.await_served(30)
        assert failures(load.records) == []
        assert {record.backend for record in load.records} == {"b0"}, "drained by hand stays drained"


def test_workers_die_with_their_parent(tmp_path: Path) -> None:
    with (
        fake_engines(tmp_path, ["b0"]) as (engine,),
        workers_process(tmp_path, [engine.backend], 2) as gateway,
    ):
        assert gateway.process is not None
        pids = gateway.pids()
        gateway.process.kill()
        until(lambda: not any(map(is_running, pids)), "the workers to be gone", limit_s=5)


def test_a_second_gateway_on_the_same_port_is_refused(tmp_path: Path) -> None:


    (tmp_path / "second").mkdir()
    with (
        fake_engines(tmp_path, ["b0"]) as (engine,),
        workers_process(tmp_path, [engine.backend], 2) as first,
    ):
        second = WorkersProcess(tmp_path / "second", first.document, 2)
        second.document["listen"] = {"port": first.port}
        second.write()
        done = subprocess.run(second.command, capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode == 1
        assert "taken" in done.stderr
