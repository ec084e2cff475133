"""Lending with two worker processes: one demand, orders that reach both, and a worker that dies meanwhile."""

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_workers import WorkersProcess, workers_process
from tests.integration.test_gateway_lending import COEFFICIENTS
from tests.processes import OpenLoad, RawStream, Shape, ask, ask_json, failures, fake_engines, served_by, until

RATE_PER_S = 16.0
LENDING = {"bin_s": 0.5, "season_s": 5.0, "forecaster": "ewma_quantile", "horizon_s": 2.0, "grace_s": 1.0,
           "headroom_replicas": 0, "assumed_return_s": 3.0, "warmup_requests": 1}


def publication(gateway: WorkersProcess, query: str = "") -> Any:
    return ask_json(gateway.admin_url, f"/admin/lending{query}")


def entry_of(gateway: WorkersProcess, name: str) -> Any:
    return next(entry for entry in publication(gateway)["backends"] if entry["name"] == name)


def order(gateway: WorkersProcess, name: str, verb: str, epoch: int) -> tuple[int, Any]:
    path = f"/admin/backends/{name}/{verb}?epoch={epoch}"
    status = ask(gateway.admin_url, path, method="POST")
    return status[0], status[1]


@pytest.mark.timeout(180)
def test_two_workers_lend_as_one(tmp_path: Path) -> None:
    with fake_engines(tmp_path, ["b0", "b1"], time_scale=0.2) as engines:
        backends = [{**engine.backend, "coefficients": COEFFICIENTS} for engine in engines]
        with workers_process(tmp_path, backends, 2, lending=LENDING, policy={"name": "round_robin"}) as gateway:
            gateway.await_workers()
            with OpenLoad(gateway.url, RATE_PER_S, Shape(max_tokens=4)) as load:
                load.await_served(int(8 * RATE_PER_S), limit_s=60.0)
                # Each worker serves about half of it, and knows of all of it.
                until(lambda: (publication(gateway)["models"][0]["demand_per_s"] or 0.0) > 0.8 * RATE_PER_S,
                      "the demand for both workers together")
                until(lambda: any(entry["lendable"] for entry in publication(gateway)["backends"]), "one to spare")

                version = publication(gateway)["version"]
                assert order(gateway, "b0", "release", 7)[0] == 200
                until(lambda: entry_of(gateway, "b0")["stage"] == "released", "both workers to let it go")
                assert publication(gateway, f"?after={version}&wait_s=5")["version"] > version
                assert order(gateway, "b0", "return", 6)[0] == 409, "an order that was superseded"
                assert order(gateway, "b1", "release", 8)[0] == 409, "the last one that serves"
                assert entry_of(gateway, "b1")["stage"] == "serving"

                # One worker dies; its successor knows that the engine may be gone, and knows of the demand.
                os.kill(gateway.pids()[0], signal.SIGKILL)
                killed_at_s = time.monotonic()
                until(lambda: len(gateway.pids()) == 2, "the successor")
                requests = len(engines[0].requests())
                began = len(load.records)
                load.await_served(began + int(4 * RATE_PER_S), limit_s=60.0)
                assert len(engines[0].requests()) == requests, "a worker still sends there"
                assert entry_of(gateway, "b0")["stage"] == "released"
                until(lambda: (publication(gateway)["models"][0]["demand_per_s"] or 0.0) > 0.8 * RATE_PER_S,
                      "the demand, by whoever leads now")

                assert order(gateway, "b0", "return", 9)[0] == 200
                until(lambda: entry_of(gateway, "b0")["stage"] == "serving", "both workers to take it back")
                began = len(load.records)
                load.await_served(began + int(3 * RATE_PER_S), limit_s=60.0)
            assert len(engines[0].requests()) > requests + 2, "warmed up, and nothing more"
            lost = failures(load.records)
            # Only what the killed worker held may be lost: nothing that was due once the kernel had closed its sockets.
            assert all(record.intended_at_s < killed_at_s + 0.25 for record in lost), lost
            assert len(lost) < RATE_PER_S, lost
            assert served_by(load.records)["b1"] > served_by(load.records)["b0"] > 0


@pytest.mark.timeout(120)
def test_an_open_stream_at_either_worker_holds_the_engine(tmp_path: Path) -> None:
    with contextlib.ExitStack() as opened:
        engines = opened.enter_context(fake_engines(tmp_path, ["b0", "b1"]))
        gateway = opened.enter_context(workers_process(
            tmp_path, [engine.backend for engine in engines], 2, lending=LENDING, policy={"name": "round_robin"}))
        gateway.await_workers()
        streams = [opened.enter_context(RawStream(gateway.url, max_tokens=400).send()) for _ in range(12)]
        for stream in streams:
            stream.read_until(b" t2")
        held = entry_of(gateway, "b0")["in_flight"]
        assert held > 0
        assert order(gateway, "b0", "release", 1)[0] == 200
        entry = entry_of(gateway, "b0")
        assert (entry["stage"], entry["in_flight"]) == ("draining", held)
        for stream in streams:
            stream.read_to_end()
            assert stream.ended_well
        until(lambda: entry_of(gateway, "b0")["stage"] == "released", "the last stream's end")
