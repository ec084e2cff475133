"""`headrace serve` and `headrace allocate` as two processes: the allocator's file names the router, and that is all.

The router says what it can spare, a job gets the engine's place, and a recall brings the engine back under traffic.
"""

import asyncio
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.allocator_processes import QUICK, ROOT, SAVES_AND_GOES, AllocatorProcess, devices, python, sweep
from tests.gateway_stack import MODEL, fleet_document
from tests.integration.test_gateway_lending import COEFFICIENTS
from tests.processes import GatewayProcess, OpenLoad, Shape, ask_json, failures, free_port, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the local engine reads /proc")
NAMES = ("b0", "b1")
LENDING = {"bin_s": 0.2, "season_s": 2.0, "forecaster": "ewma_quantile", "horizon_s": 2.0, "grace_s": 1.0,
           "headroom_replicas": 0, "assumed_return_s": 3.0, "warmup_requests": 1}


def command(port: int) -> list[str]:
    return ["env", f"PYTHONPATH={ROOT}", sys.executable, "-m", "loadtest.fake_engine", "--port", str(port),
            "--time-scale", "0.1", "--served-model-name", MODEL]


def file_of(router_url: str, ports: dict[str, int], folder: Path) -> dict[str, Any]:
    return {
        "version": 1, "state": str(folder / "state"), "listen": {"port": free_port()}, "execution": {"poll_s": 0.05},
        "router": {"url": router_url, "hold_s": 0.0},
        "nodes": [{"name": name, "card": "v100", **devices(name, 1), "labels": {"for": "inference"}} for name in NAMES],
        "pools": [{"name": "training", "kind": "training", "selector": {"for": "training"}},
                  {"name": "inference", "kind": "inference", "selector": {"for": "inference"}}],
        "queues": [{"name": "q", "parent": "training"}],
        "backends": [{"name": name, "pool": "inference", "devices": [f"{name}:0"], "command": command(ports[name])}
                     for name in NAMES],
        "rules": {**QUICK, "grace_s": 8.0, "min_loan_worth": 0.0},
    }


@contextmanager
def pair(folder: Path) -> Iterator[tuple[GatewayProcess, AllocatorProcess]]:
    """A gateway in front of engines that the allocator runs."""
    ports = {name: free_port() for name in NAMES}
    backends = [{"name": name, "url": f"http://127.0.0.1:{port}", "engine": "vllm", "coefficients": COEFFICIENTS,
                 "card": {"type": "v100"}} for name, port in ports.items()]
    gateway = GatewayProcess(folder, fleet_document(backends, lending=LENDING, poll={"interval_s": 0.2}))
    allocator = AllocatorProcess(folder, file_of(gateway.admin_url, ports, folder))
    with ExitStack() as running:
        running.callback(sweep, folder / "state")
        running.enter_context(gateway)
        running.enter_context(allocator)
        until(lambda: all(gateway.health(name) in ("healthy", "slow_start") for name in NAMES),
              "the engines that the allocator started to serve", limit_s=40.0)
        yield gateway, allocator


def stages(gateway: GatewayProcess) -> dict[str, str]:
    return {entry["name"]: entry["stage"] for entry in ask_json(gateway.admin_url, "/admin/lending")["backends"]}


@pytest.mark.timeout(180)
def test_a_file_that_names_the_router_closes_the_loop(tmp_path: Path) -> None:
    with pair(tmp_path) as (gateway, allocator):
        with OpenLoad(gateway.url, 8.0, Shape(max_tokens=4)) as load:
            until(lambda: any(entry["lendable"] for entry in
                              ask_json(gateway.admin_url, "/admin/lending")["backends"]), "something to spare")
            allocator.submit("train", python(SAVES_AND_GOES), cards=["v100"], gang=1)
            allocator.await_running("train", limit_s=40.0)
            (loan,) = allocator.loans()
            assert stages(gateway)[loan] == "released", "it was taken before the router had let it go"
            assert not any(run.startswith(f"serve-{loan}-") for run in serving(allocator))
            allocator.kill()
            allocator.start()
            assert set(allocator.loans()) == {loan}, "a restart forgot the loan"
            assert not any(run.startswith(f"serve-{loan}-") for run in serving(allocator)), "it started a lent engine"
            before = load.started
            allocator.recall(loan)
            allocator.await_home(loan, limit_s=40.0)
            until(lambda: stages(gateway)[loan] == "serving", "the router to take it back", limit_s=40.0)
            assert any(run.startswith(f"serve-{loan}-") for run in serving(allocator))
        assert failures(load.records) == []
        assert len(load.records) > before, "nobody asked for anything during the recall"
        steps = allocator.steps_of_loan(loan)
        assert [step for step in steps if step in ("lent", "returned")][:2] == ["lent", "returned"]
        allocator.check_journal()


def serving(allocator: AllocatorProcess) -> list[str]:
    """The engines that are up, as the execution engine sees them."""
    return [report.run_id for report in asyncio.run(allocator.engine().adopt()) if not report.ended]
