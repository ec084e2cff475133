"""The router's half of a loan, over its admin API: what is published, and the levers that let go and take back."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from backends.catalog.health import HealthState
from router.app import Running
from tests.gateway_stack import MODEL, chat, client_of, gateway, write_fleet
from tests.raw_client import CHAT_PATH, eventually, raw_client, request_bytes, sample
from tests.scripted_backend import SSE_HEAD, Received, ScriptedBackend, delta, event

pytestmark = pytest.mark.anyio
COEFFICIENTS = {
    "version": "v1", "source": "made up", "prefill_base_ms": 5, "prefill_ms_per_token": 0.1, "prefill_ms_per_pair": 0,
    "decode_base_ms": 10, "decode_ms_per_seq": 0.5, "decode_ms_per_seq_token": 0.001,
}  # fmt: skip
QUICK: dict[str, Any] = {"bin_s": 0.1, "season_s": 1.0, "forecaster": "ewma_quantile", "horizon_s": 1.0, "grace_s": 0.5,
         "headroom_replicas": 0, "assumed_return_s": 7.0}


@contextlib.asynccontextmanager
async def admin_of(process: Running) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=process.admin_url, timeout=30.0) as client:
        yield client


def known(backend: ScriptedBackend, **fields: Any) -> dict[str, Any]:
    return {"url": backend.url, "served_model_name": backend.served_model_name, "coefficients": COEFFICIENTS, **fields}


async def published(admin: httpx.AsyncClient, name: str) -> dict[str, Any]:
    document = (await admin.get("/admin/lending")).json()
    return next(entry for entry in document["backends"] if entry["name"] == name)


async def until_healthy(process: Running, count: int) -> None:
    backends = process.gateway.fleet.backends.values()
    await eventually(lambda: sum(live.health.state is HealthState.HEALTHY for live in backends) == count)


async def test_a_backend_is_let_go_once_its_stream_has_ended_and_comes_back_warm(tmp_path: Path) -> None:
    finish = asyncio.Event()

    async def held(request: Received) -> None:
        if not request.json.get("stream"):
            await request.answer(200, {"choices": []})
            return
        await request.write(SSE_HEAD)
        await request.chunk(event(delta("a")))
        await finish.wait()
        await request.chunk(event(delta("b", finish="stop")) + b"data: [DONE]\n\n")
        await request.write(b"0\r\n\r\n")

    async with (
        ScriptedBackend(held).serving() as one,
        ScriptedBackend().serving() as two,
        gateway(tmp_path, [known(one), known(two)], lending=QUICK) as process,
        admin_of(process) as admin,
        client_of(process) as client,
        raw_client(process) as caller,
    ):
        await until_healthy(process, 2)
        await caller.send(request_bytes(chat(stream=True), headers="connection: close\r\n"))
        await caller.until(b'"a"')
        name, other = ("b0", two) if process.gateway.fleet.backends["b0"].books.requests else ("b1", one)
        released = await admin.post(f"/admin/backends/{name}/release?epoch=3")
        assert released.json()["stage"] == "draining"
        assert released.json()["in_flight"] == 1
        version = (await admin.get("/admin/lending")).json()["version"]

        told = asyncio.create_task(admin.get(f"/admin/lending?after={version}&wait_s=20"))
        before = len(other.requests)
        for _ in range(6):
            assert (await client.post(CHAT_PATH, json=chat())).headers["x-headrace-backend"] != name
        assert len(other.requests) == before + 6
        assert not told.done()
        finish.set()
        assert (await caller.to_end()).endswith(b"0\r\n\r\n"), "the stream was cut"
        news = (await told).json()
        assert news["version"] > version
        assert (await published(admin, name))["stage"] == "released"
        assert (await admin.post(f"/admin/backends/{name}/release?epoch=3&wait_s=5")).json()["stage"] == "released"
        assert sample(process, "headrace_backend_lending_stage", backend=name, stage="released") == 1

        drained = {"b0": one, "b1": two}[name]
        warmed = len(drained.requests)
        drained.healthy = False
        returned = await admin.post(f"/admin/backends/{name}/return?epoch=4")
        assert returned.json()["stage"] == "returning"
        assert returned.json()["return_s"] == 7.0
        for _ in range(4):
            assert (await client.post(CHAT_PATH, json=chat())).headers["x-headrace-backend"] != name
        drained.healthy = True
        await eventually(lambda: process.gateway.desk.lending.place(name).stage == "serving")
        assert len(drained.requests) == warmed + 2, "it was not warmed up"
        assert process.gateway.fleet.backends[name].health.state is HealthState.SLOW_START
        back = await published(admin, name)
        assert back["returns_measured"] == 1
        assert 0.0 < back["return_s"] < 7.0
        served = {(await client.post(CHAT_PATH, json=chat())).headers["x-headrace-backend"] for _ in range(8)}
        assert name in served


async def test_orders_are_fenced_and_the_last_backend_stays(tmp_path: Path) -> None:
    async with (
        ScriptedBackend().serving() as one,
        ScriptedBackend().serving() as two,
        gateway(tmp_path, [known(one), known(two)], lending=QUICK) as process,
        admin_of(process) as admin,
    ):
        await until_healthy(process, 2)
        assert (await admin.post("/admin/backends/b0/release?epoch=7&wait_s=5")).json()["stage"] == "released"
        stale = await admin.post("/admin/backends/b0/return?epoch=6")
        assert (stale.status_code, stale.json()["error"]["code"]) == (409, "stale_epoch")
        last = await admin.post("/admin/backends/b1/release?epoch=1")
        assert (last.status_code, last.json()["error"]["code"]) == (409, "last_backend")
        assert (await admin.post("/admin/backends/bX/release")).status_code == 404
        assert (await admin.post("/admin/backends/b0/release?epoch=x")).status_code == 400
        assert (await admin.get("/admin/lending?wait_s=-1")).status_code == 400
        assert (await admin.post("/admin/backends/b0/return?epoch=7")).json()["stage"] == "returning"


async def test_a_backend_that_was_only_draining_is_back_at_once(tmp_path: Path) -> None:
    async def hanging(request: Received) -> None:
        await request.until_gone()

    async with (
        ScriptedBackend(hanging).serving() as one,
        ScriptedBackend(hanging).serving() as two,
        gateway(tmp_path, [known(one), known(two)], lending=QUICK) as process,
        admin_of(process) as admin,
        raw_client(process) as caller,
    ):
        await until_healthy(process, 2)
        await caller.send(request_bytes(chat()))
        await eventually(lambda: len(one.requests) + len(two.requests) == 1)
        name = "b0" if one.requests else "b1"
        assert (await admin.post(f"/admin/backends/{name}/release")).json()["stage"] == "draining"
        assert process.gateway.fleet.backends[name].health.state is not HealthState.SLOW_START
        assert (await admin.post(f"/admin/backends/{name}/return")).json()["stage"] == "serving"
        assert not process.gateway.fleet.backends[name].draining


async def test_what_can_be_spared_follows_demand_and_unknown_spares_nothing(tmp_path: Path) -> None:
    async with (
        ScriptedBackend().serving() as one,
        ScriptedBackend().serving() as two,
        gateway(tmp_path, [known(one, price_per_hour=3), known(two, price_per_hour=1)], lending=QUICK) as process,
        admin_of(process) as admin,
        client_of(process) as client,
    ):
        await until_healthy(process, 2)
        before = (await admin.get("/admin/lending")).json()
        assert before["models"][0]["surplus_per_s"] is None
        assert not any(entry["lendable"] for entry in before["backends"])
        for _ in range(20):
            await client.post(CHAT_PATH, json=chat())
            await asyncio.sleep(0.08)
        document = (await admin.get("/admin/lending")).json()
        (model,) = document["models"]
        assert model["demand_per_s"] > 0
        assert model["forecast_q99_per_s"] > 0
        assert [entry["name"] for entry in document["backends"] if entry["lendable"]] == ["b0"], "the dearer one"
        backend = document["backends"][0]
        assert model["capacity_per_s"] == pytest.approx(
            sum(entry["capacity_per_s"] for entry in document["backends"]), rel=1e-3)
        assert backend["headroom_without_per_s"] == pytest.approx(
            model["surplus_per_s"] - backend["capacity_per_s"], rel=1e-2)
        assert sample(process, "headrace_model_lendable_backends") == 1


async def test_demand_and_lead_times_are_kept_over_a_restart(tmp_path: Path) -> None:
    sections: dict[str, Any] = {"lending": QUICK, "state": {"path": "state.json"}}
    async with ScriptedBackend().serving() as one, ScriptedBackend().serving() as two:
        fleet = [known(one), known(two)]
        async with (
            gateway(tmp_path, fleet, **sections) as process, admin_of(process) as admin, client_of(process) as client,
        ):
            await until_healthy(process, 2)
            for _ in range(20):
                await client.post(CHAT_PATH, json=chat())
                await asyncio.sleep(0.08)
            await admin.post("/admin/backends/b0/release?wait_s=5")
            await admin.post("/admin/backends/b0/return")
            await eventually(lambda: process.gateway.desk.lending.place("b0").stage == "serving")
            taken_s = (await published(admin, "b0"))["return_s"]
        async with gateway(tmp_path, fleet, **sections) as process, admin_of(process) as admin:
            await until_healthy(process, 2)
            (model,) = (await admin.get("/admin/lending")).json()["models"]
            assert model["forecast_q99_per_s"] > 0, "nothing is known"
            back = await published(admin, "b0")
            assert (back["return_s"], back["returns_measured"]) == (taken_s, 1)
            assert back["capacity_per_s"] > 0, "what requests are like is forgotten"
        other = {**QUICK, "bin_s": 0.2}
        async with gateway(tmp_path, fleet, lending=other, state=sections["state"]) as process:
            assert process.gateway.desk.surveys()[MODEL].steps == (), "bins of another length say nothing"


async def test_a_reload_brings_no_lent_backend_back(tmp_path: Path) -> None:
    async with (
        ScriptedBackend().serving() as one,
        ScriptedBackend().serving() as two,
        ScriptedBackend(served_model_name="moved").serving() as moved,
        gateway(tmp_path, [known(one), known(two)], lending=QUICK) as process,
        admin_of(process) as admin,
    ):
        await until_healthy(process, 2)
        assert (await admin.post("/admin/backends/b0/release?wait_s=5")).json()["stage"] == "released"
        document = process.gateway.loaded.config.model_dump(mode="json")
        document["backends"][0] |= {"url": moved.url, "served_model_name": "moved"}
        document["listen"]["port"] = document["admin"]["port"] = 0
        write_fleet(tmp_path / "fleet.yaml", document)
        result = await admin.post("/admin/reload")
        assert result.json()["ok"], result.text
        assert process.gateway.fleet.backends["b0"].spec.url == moved.url
        assert process.gateway.fleet.backends["b0"].draining
        document["backends"].pop(0)
        write_fleet(tmp_path / "fleet.yaml", document)
        assert (await admin.post("/admin/reload")).json()["ok"]
        assert [entry["name"] for entry in (await admin.get("/admin/lending")).json()["backends"]] == ["b1"]
