"""The policy live before engines with the physics of real cards: it notices, it explains, it remembers."""

import json
import signal
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadtest.fake_engine.cards import load_cards
from tests.e2e.test_workers import WorkersProcess
from tests.gateway_stack import MODEL, fleet_document
from tests.processes import FakeEngine, GatewayProcess, OpenLoad, Shape, fake_engines, until

CARD = "h100x2-fp8"
SECTIONS: dict[str, Any] = {
    "policy": {"name": "headrace"},
    "latency_classes": [{"name": "interactive", "ttft_s": 2.0, "inter_token_s": 0.1}, {"name": "batch"}],
    "default_latency_class": "interactive",
}


def measured(engine: FakeEngine, price: float) -> dict[str, Any]:
    """Its entry with the coefficients that it keeps to."""
    coefficients = {name: value for name, value in asdict(load_cards()[CARD].coefficients).items() if value is not None}
    return {**engine.backend, "coefficients": coefficients, "slots": 256, "price_per_hour": price}


def explain(gateway: GatewayProcess, **members: Any) -> dict[str, Any]:
    body = {"model": MODEL, "prompt_tokens": 500, "stream": True, **members}
    answer = httpx.post(f"{gateway.admin_url}/admin/explain", json=body, headers={"x-headrace-class": "interactive"})
    assert answer.status_code == 200, answer.text
    document: dict[str, Any] = answer.json()
    return document


def test_a_silent_slowdown_is_noticed_and_explained_while_streams_run(tmp_path: Path) -> None:
    with (
        fake_engines(tmp_path, ["b0", "b1"]) as engines,
        GatewayProcess(tmp_path, fleet_document(
            [measured(engines[0], 4.0), measured(engines[1], 4.4)], **SECTIONS)) as gateway,
        OpenLoad(gateway.url, 6.0, Shape(max_tokens=150)) as load,
    ):
        load.await_served(20)
        assert gateway.metric("headrace_backend_drift_ratio", backend="b0") == pytest.approx(1.0, abs=0.3)
        assert explain(gateway)["backend"] == "b0"
        engines[0].set_faults("slow x4")
        until(lambda: gateway.metric("headrace_backend_drift_ratio", backend="b0") > 2.0, "the slowdown to be believed",
              limit_s=8.0)
        slowed = explain(gateway)
        by_name = {entry["backend"]: entry for entry in slowed["candidates"]}
        assert slowed["backend"] == "b1"
        assert by_name["b0"]["drift"] > 2.0
        assert by_name["b0"]["tpot"]["mean_s"] > 1.5 * by_name["b1"]["tpot"]["mean_s"]
        assert gateway.health("b0") == "healthy", "no probe and no error says so"
        load.await_served(40)


def test_what_workers_learned_is_there_after_a_restart(tmp_path: Path) -> None:
    with fake_engines(tmp_path, ["b0"], time_scale=10) as (engine,):
        entry = measured(engine, 4.0)
        entry["coefficients"] = {name: value / 10 if name.endswith("_ms") or "_ms_" in name else value
                                 for name, value in entry["coefficients"].items()}
        document = fleet_document([entry], **SECTIONS, state={"path": "state.json", "save_every_s": 1.0})
        process = WorkersProcess(tmp_path, document, 2)
        with process:
            assert explain(process)["class"] is None
            for _ in range(40):  # each on a connection of its own, so that the worker that saves has its share
                answer = httpx.post(f"{process.url}/v1/chat/completions", timeout=20, json={
                    "model": MODEL, "max_tokens": 17, "messages": [{"role": "user", "content": "word " * 300}]})
                assert answer.status_code == 200
            until(lambda: process.metric("headrace_budgets_total", budget="all") == 40, "all to be counted")
            state_file = tmp_path / "state.json"
            until(state_file.exists, "the leader to save what was learned")
            process.send_signal(signal.SIGTERM)
            assert process.process is not None
            assert process.process.wait(timeout=20) == 0
        saved = json.loads(state_file.read_text())
        assert saved["learner"]["name"] == "ccr"
        assert list(saved["backends"]) == ["b0"]
        again = WorkersProcess(tmp_path, document, 2)
        with again:
            known = explain(again)["class"]
            assert known is not None
            assert known["expected_output_tokens"] < 100
            assert 'cannot be taken over' not in again.log.read_text()
