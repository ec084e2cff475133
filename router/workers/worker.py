"""One worker process: a gateway in a seat among siblings. Started by `router.workers.parent`, never by hand.

``python -m router.workers.worker SEAT`` is given everything as JSON and inherits the descriptors that it names: the
listening sockets of all workers, the socket of its own admin routes, the shared table, and the configuration that its
siblings run. It is a new program, not a fork of a running one: no loop, thread or lock comes along.

Each worker accepts from a listening socket of its own, and the parent holds all of them. So no connection is lost with
a worker: those that its socket has queued wait for its successor, and where that takes long, the leader accepts them.
"""

import asyncio
import json
import logging
import os
import socket
import sys
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import httpx
import uvloop
from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from backends.embedded.tether import die_with_parent
from router.api.public import public_app
from router.app import Listener, Running, Seat, serve
from router.config.fleet_file import FleetConfig, LoadedFleet, load_fleet_bytes
from router.gateway import Gateway
from router.workers.demand import SharedTally
from router.workers.limits import SharedInFlight, SharedParallel
from router.workers.peers import STALE_S, Peers
from router.workers.table import Header, RowState, Table

log = logging.getLogger("headrace.workers")

PARTING_S = 1.0
ORPHANED_S = 0.25
"""A listening socket that nobody has served for so long gets a stand-in."""


@dataclass(frozen=True, slots=True)
class SeatPlan:
    """Everything that a worker is told at its start. `*_fd` are inherited descriptors."""

    config_path: str
    config_fd: int
    table_fd: int
    admin_fd: int
    page_fd: int
    """Where it leaves its metrics at its end."""
    listener_fds: list[int]
    listener: int
    """Which of them is its own."""
    row: int
    epoch: int
    workers: int
    parent_pid: int
    merged_metrics: str
    """Path of the unix socket where the parent serves the metrics of all."""
    rolled_back: bool
    """The file holds something else than what runs, and is to be left alone until it is edited."""
    drained: list[str]
    """Backends that an operator has drained by hand."""
    drain_s: float | None = None
    log_level: int = logging.WARNING
    away: dict[str, int] = field(default_factory=dict)
    """Backends that were let go, and the epoch of that order."""

    def arguments(self) -> list[str]:
        """The command line's end."""
        return [json.dumps(asdict(self))]


class WorkerSeat(Seat):
    """Takes its configuration and sockets from the plan, and shares the picture of the fleet."""

    parting_s = PARTING_S

    def __init__(self, plan: SeatPlan) -> None:
        super().__init__(Path(plan.config_path))
        self._plan = plan
        self._table = Table.attach(plan.table_fd)
        self._peers = Peers(self._table, plan.row)
        self._peers.own.begin(plan.epoch, os.getpid(), plan.listener, monotonic())
        self._gateway: Gateway | None = None
        self._listeners = [socket.socket(fileno=fd) for fd in plan.listener_fds]
        self._stand_ins: dict[int, asyncio.Server] = {}
        self._orphaned_since_s: dict[int, float] = {}

    def load(self, environ: dict[str, str]) -> LoadedFleet:
        size = os.fstat(self._plan.config_fd).st_size
        return load_fleet_bytes(os.pread(self._plan.config_fd, size, 0), str(self.config_path), environ)

    def sockets(self, config: FleetConfig) -> tuple[socket.socket, socket.socket]:
        return self._listeners[self._plan.listener].dup(), socket.socket(fileno=self._plan.admin_fd)

    def gateway(self, loaded: LoadedFleet, environ: dict[str, str]) -> Gateway:
        gateway = WorkerGateway(self.config_path, loaded, environ, workers=self._plan.workers)
        for name in self._plan.drained:
            if name in gateway.fleet.backends:
                gateway.fleet.backends[name].drained_by_hand = True
        if self._plan.rolled_back:
            gateway.reloader.overlook()
        self._gateway = gateway
        peers = self._peers
        peers.join(gateway.fleet)
        gateway.dispatcher.held = held = SharedInFlight(peers)
        held.know(entry.name for entry in loaded.config.latency_classes)
        gateway.dispatcher.parallel = SharedParallel(peers)
        gateway.desk.count_with(SharedTally(peers))
        for name, epoch in self._plan.away.items():
            gateway.desk.lending.begin_away(name, epoch)
        gateway.keeps_state = lambda: peers.leader() is peers.own
        gateway.poller.on_probe, gateway.poller.on_sample = peers.on_probe, peers.on_sample
        return gateway

    def public_app(self, gateway: Gateway) -> Starlette:
        app = public_app(gateway)
        app.router.routes.insert(0, Route("/metrics", merged_metrics(self._plan.merged_metrics)))
        return app

    async def watch_backends(self, process: Running) -> None:
        for listener in process.listeners:
            await listener.accepting.wait()
        self._peers.own.enter(RowState.SERVING)
        try:
            await self._peers.run(process.gateway.poller.run, partial(self._mind_orphans, process.listeners[0]))
        finally:
            self._dismiss(self._stand_ins)

    def leave(self) -> None:
        self._dismiss(self._stand_ins)
        if self._gateway is not None:
            led = self._gateway.keeps_state()  # to the end: nobody leads while all drain
            self._gateway.keeps_state = lambda: led
        self._peers.own.enter(RowState.DRAINING)

    def leave_page(self) -> None:
        """The last word on everything that was counted here."""
        if self._gateway is not None:
            os.pwrite(self._plan.page_fd, generate_latest(self._gateway.metrics.registry), 0)

    # --- listening sockets without a worker -------------------------------------------------------------------------

    def _mind_orphans(self, listener: Listener) -> None:
        """As the leader, accept from sockets whose worker is away, until it is back or another leads."""
        own = self._peers.own
        if own.header[Header.STATE] != RowState.SERVING:
            return
        now = monotonic()
        served = {
            row.header[Header.LISTENER]
            for row in self._table
            if row.header[Header.STATE] == RowState.SERVING and now - row.floats[Header.HEARTBEAT_S] < STALE_S
        }
        leads = self._peers.leader() is own
        for index in range(len(self._listeners)):
            if index in served or not leads:
                self._orphaned_since_s.pop(index, None)
                self._dismiss([index])
            elif now - self._orphaned_since_s.setdefault(index, now) > ORPHANED_S and index not in self._stand_ins:
                asyncio.ensure_future(self._stand_in(index, listener))  # noqa: RUF006  it ends at once

    async def _stand_in(self, index: int, listener: Listener) -> None:
        def connect() -> asyncio.Protocol:
            protocol: Any = listener.config.http_protocol_class
            connection: asyncio.Protocol = protocol(
                config=listener.config, server_state=listener.server_state, app_state={}
            )
            return connection

        server = await asyncio.get_running_loop().create_server(connect, sock=self._listeners[index].dup())
        if index in self._stand_ins or self._peers.own.header[Header.STATE] != RowState.SERVING:
            server.close()
            return
        self._stand_ins[index] = server
        log.warning("accepting for a worker that is away (listener %d)", index)

    def _dismiss(self, indices: Any) -> None:
        for index in list(indices):
            server = self._stand_ins.pop(index, None)
            if server is not None:
                server.close()


class WorkerGateway(Gateway):
    """A gateway with its share of what all of them may do."""

    def __init__(self, path: Path, loaded: LoadedFleet, environ: dict[str, str], *, workers: int) -> None:
        self._workers = workers
        super().__init__(path, loaded, environ)
        self._take_share()

    def apply(self, loaded: LoadedFleet) -> None:
        super().apply(loaded)
        self._take_share()

    def _take_share(self) -> None:
        """Retries and hedges: the ratio follows each worker's own requests, the floor is one for all and is divided.

        Who is in flight all workers count together; who waits each counts for itself, of its part of the places.
        """
        generation = self.dispatcher.generation
        if isinstance(self.dispatcher.held, SharedInFlight):
            self.dispatcher.held.know(generation.vocabulary.latency_classes)
        rules = generation.admission
        admission = replace(rules, max_waiting=rules.max_waiting // self._workers)
        config = generation.config
        shares = {
            name: section.model_copy(update={"budget_floor_per_s": section.budget_floor_per_s / self._workers})
            for name, section in (("retries", config.retries), ("hedging", config.hedging))
        }
        self.dispatcher.generation = replace(generation, config=config.model_copy(update=shares), admission=admission)


def merged_metrics(path: str) -> Callable[[Request], Awaitable[Response]]:
    """GET handler for the page of all workers, which the parent makes."""
    client = httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=path), timeout=5.0, trust_env=False)

    async def metrics(_: Request) -> Response:
        try:
            answer = await client.get("http://parent/metrics")
        except httpx.HTTPError:
            return Response("the metrics of all workers cannot be had now\n", status_code=503)
        return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))

    return metrics


def main(arguments: list[str]) -> int:
    """Serve until told to drain."""
    plan = SeatPlan(**json.loads(arguments[0]))
    die_with_parent(plan.parent_pid)
    logging.basicConfig(level=plan.log_level, format=f"%(asctime)s %(levelname)s [{os.getpid()}] %(name)s: %(message)s")
    try:
        seat = WorkerSeat(plan)
    except ValueError as error:
        print(f"headrace: {error}", file=sys.stderr)
        return 1
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        code = runner.run(serve(seat.config_path, seat=seat, drain_s=plan.drain_s))
    seat.leave_page()
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
