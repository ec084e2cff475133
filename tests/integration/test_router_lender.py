"""The allocator's lender against a real gateway: from what is published to released, and back to serving."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from allocator.execution.values import Report
from allocator.lender.router_lender import RouterAdmin, RouterLender, RouterUnreachable
from allocator.model.inventory import BackendState, Supply
from allocator.service.config import Declared
from allocator.service.lender import Seen
from headrace.allocator.file import load_allocator
from tests.gateway_stack import chat, client_of, gateway
from tests.integration.test_gateway_lending import QUICK, known, until_healthy
from tests.raw_client import CHAT_PATH
from tests.scripted_backend import ScriptedBackend

pytestmark = pytest.mark.anyio
NAMES = ("b0", "b1")


@dataclass
class Engines:
    """Engines that take as long to go as a test says."""

    gone: set[str] = field(default_factory=set)
    orders: list[str] = field(default_factory=list)

    async def look(self, reports: Mapping[str, Report]) -> None:
        pass

    async def stop(self, backend: str) -> None:
        self._order(f"stop {backend}")

    async def start(self, backend: str) -> None:
        self._order(f"start {backend}")
        self.gone.discard(backend)

    def _order(self, order: str) -> None:
        """Orders come again with each look; those that change something are kept."""
        before = next((given for given in reversed(self.orders) if given.split()[1] == order.split()[1]), "")
        if order != before:
            self.orders.append(order)

    def owns_run(self, run_id: str) -> bool:
        return False

    def redeclare(self, declared: Declared) -> None:
        pass

    async def is_gone(self, backend: str) -> bool:
        return backend in self.gone


def declared(folder: Path) -> Declared:
    document: dict[str, Any] = {
        "version": 1,
        "nodes": [{"name": name, "card": "v100", "devices": 1, "labels": {"purpose": "inference"}} for name in NAMES],
        "pools": [{"name": "inference", "kind": "inference", "selector": {"purpose": "inference"}}],
        "backends": [{"name": name, "pool": "inference", "devices": [f"{name}:0"]} for name in NAMES],
    }
    path = folder / "allocator.yaml"
    path.write_text(json.dumps(document))
    return load_allocator(path)


async def looked(lender: RouterLender) -> Seen:
    seen = await lender.observe({})
    assert seen is not None
    return seen


def state_of(seen: Seen, name: str) -> BackendState:
    return next(backend.state for backend in seen.backends if backend.name == name)


async def until_state(lender: RouterLender, name: str, state: BackendState) -> Seen:
    async with asyncio.timeout(10):
        while state_of(seen := await looked(lender), name) is not state:  # noqa: ASYNC110  a look is what moves it
            await asyncio.sleep(0.05)
    return seen


async def test_a_backend_counts_as_released_once_its_engine_is_gone_too(tmp_path: Path) -> None:
    async with (
        ScriptedBackend().serving() as one,
        ScriptedBackend().serving() as two,
        gateway(tmp_path, [known(one), known(two)], lending=QUICK) as process,
        client_of(process) as client,
    ):
        router, engines = RouterAdmin(process.admin_url), Engines()
        lender = RouterLender(router, engines, declared(tmp_path), hold_s=0.0)
        await until_healthy(process, 2)
        assert state_of(await looked(lender), "b0") is BackendState.SERVING
        await lender.drain("b0", 4)
        await asyncio.sleep(0.1)
        assert state_of(await looked(lender), "b0") is BackendState.DRAINING, "its engine still runs"
        assert engines.orders == ["start b0", "start b1", "stop b0"]
        engines.gone.add("b0")
        assert state_of(await looked(lender), "b0") is BackendState.RELEASED
        for _ in range(4):
            assert (await client.post(CHAT_PATH, json=chat())).headers["x-headrace-backend"] == "b1"

        # An allocator that restarts knows what was wanted, and no epoch: it learns that from the router.
        again = RouterLender(router, engines, declared(tmp_path), hold_s=0.0)
        again.restore({"b0": BackendState.RELEASED, "b1": BackendState.SERVING})
        assert state_of(await looked(again), "b0") is BackendState.RELEASED
        # One that was superseded in the meantime is not heard.
        await again.serve("b0", 9)
        await lender.drain("b0", 5)
        await until_state(again, "b0", BackendState.SERVING)
        assert engines.orders[-1] == "start b0"
        assert (await looked(again)).backends[0].reload_s < QUICK["assumed_return_s"], "it was not measured"
        await router.aclose()


async def test_a_router_that_restarts_is_told_again(tmp_path: Path) -> None:
    async with ScriptedBackend().serving() as one, ScriptedBackend().serving() as two:
        engines = Engines(gone={"b0"})
        fleet = [known(one), known(two)]
        for attempt in range(2):
            async with gateway(tmp_path, fleet, lending=QUICK) as process:
                router = RouterAdmin(process.admin_url)
                lender = RouterLender(router, engines, declared(tmp_path), hold_s=0.0)
                await until_healthy(process, 2)
                if attempt == 0:
                    await lender.drain("b0", 3)
                else:
                    lender.restore({"b0": BackendState.RELEASED})
                await until_state(lender, "b0", BackendState.RELEASED)
                assert process.gateway.fleet.backends["b0"].draining
                await router.aclose()


async def test_the_figures_are_the_routers_and_an_operator_may_lower_them(tmp_path: Path) -> None:
    async with (
        ScriptedBackend().serving() as one,
        ScriptedBackend().serving() as two,
        gateway(tmp_path, [known(one), known(two)], lending=QUICK) as process,
        client_of(process) as client,
    ):
        router = RouterAdmin(process.admin_url)
        lender = RouterLender(router, Engines(), declared(tmp_path), hold_s=0.0)
        await until_healthy(process, 2)
        assert (await looked(lender)).supplies == (Supply("inference", "v100", 0, 0),), "nothing is known yet"
        for _ in range(20):
            await client.post(CHAT_PATH, json=chat())
            await asyncio.sleep(0.08)
        assert (await looked(lender)).supplies == (Supply("inference", "v100", 1, 1),)
        lender.tell(Supply("inference", "v100", 0, 0))
        assert (await looked(lender)).supplies == (Supply("inference", "v100", 0, 0),)
        await router.aclose()


async def test_a_router_that_is_not_there_cannot_tell(tmp_path: Path) -> None:
    router = RouterAdmin("http://127.0.0.1:9")
    lender = RouterLender(router, Engines(), declared(tmp_path), hold_s=0.0)
    assert await lender.observe({}) is None
    with pytest.raises(RouterUnreachable, match="does not answer"):
        await lender.drain("b0", 1)
    await router.aclose()
