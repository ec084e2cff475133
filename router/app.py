"""One gateway process from its start to its end: listeners, signals, reload, drain."""

import asyncio
import contextlib
import errno
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Generator
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from router.api.admin import admin_app
from router.api.public import public_app
from router.config.fleet_file import ConfigError, FleetConfig, LoadedFleet, load_fleet
from router.gateway import Gateway
from router.path.hotprotocol import protocol_for
from router.wire.head import WireLimits

BACKLOG = 2048
KEEP_ALIVE_S = 75

# One line per probe of each backend, each second, is no news; what a probe finds shows in the health transitions.
logging.getLogger("httpx").setLevel(logging.WARNING)
# An answer that ends without its terminator is how a client learns that it is truncated, not an accident.
logging.getLogger("uvicorn.error").addFilter(lambda record: "without completing response" not in record.getMessage())


class StartError(Exception):
    """The process cannot serve; the text says why and what to do."""


class Listener(uvicorn.Server):
    """A uvicorn server that leaves signals to its owner and tells when it accepts connections.

    Where another process takes its clients over, it parts from them in two steps: for `parting_s` it accepts nobody and
    answers with `connection: close`, and only then closes the connections that have nothing under way. A client that
    has just connected still gets its answer; a busy one leaves by itself before its connection is closed under it.
    """

    def __init__(self, config: uvicorn.Config, parting_s: float = 0.0) -> None:
        super().__init__(config)
        self.accepting = asyncio.Event()
        self._parting_s = parting_s

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.accepting.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._parting_s:
            await self._part()
        await super().shutdown(sockets)
        for task in list(self.server_state.tasks):  # that the drain time, or a second signal, did not wait for
            task.cancel()

    async def _part(self) -> None:
        state, loop = self.server_state, asyncio.get_running_loop()
        for server in self.servers:
            server.close()
        state.default_headers = [*state.default_headers, (b"connection", b"close")]
        began_s = loop.time()
        while state.connections and not self.force_exit and loop.time() < began_s + self._parting_s:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        drain_s = self.config.timeout_graceful_shutdown or 0
        self.config.timeout_graceful_shutdown = max(1, round(drain_s - (loop.time() - began_s)))

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


class Seat:
    """Where a gateway process sits: by itself, with sockets of its own. One among siblings: `router.workers.worker`."""

    parting_s = 0.0

    def __init__(self, config_path: Path, *, host: str | None = None, port: int | None = None) -> None:
        self.config_path = config_path
        self._host = host
        self._port = port

    def load(self, environ: dict[str, str]) -> LoadedFleet:
        """The configuration to start with.

        Raises:
            ConfigError: there is none.
        """
        return load_fleet(self.config_path, environ)

    def sockets(self, config: FleetConfig) -> tuple[socket.socket, socket.socket]:
        """For clients and for operators, listening.

        Raises:
            StartError: one of the addresses cannot be had.
        """
        public = bind(self._host or config.listen.host, config.listen.port if self._port is None else self._port)
        try:
            return public, bind(config.admin.host, config.admin.port)
        except StartError:
            public.close()
            raise

    def gateway(self, loaded: LoadedFleet, environ: dict[str, str]) -> Gateway:
        return Gateway(self.config_path, loaded, environ)

    def public_app(self, gateway: Gateway) -> Starlette:
        return public_app(gateway)

    async def watch_backends(self, process: "Running") -> None:
        """Keep the picture of the backends fresh until cancelled."""
        await process.gateway.poller.run()

    def leave(self) -> None:
        """From here on the process drains."""


async def serve(
    config_path: Path,
    *,
    host: str | None = None,
    port: int | None = None,
    ready: Callable[["Running"], None] | None = None,
    stop: asyncio.Event | None = None,
    drain_s: float | None = None,
    seat: Seat | None = None,
) -> int:
    """Serve a fleet file until SIGTERM, SIGINT or `stop`.

    Args:
        host, port: replace the file's `listen`.
        ready: told where, once both listeners accept connections.
        stop: ends the process's serving; where it is given, SIGTERM and SIGINT are its owner's business.
        drain_s: how long open requests may take after that; replaces the file's `timeouts.drain_s`.
        seat: among worker processes; by default the process is alone.

    Returns:
        The exit code: 0, or 1 where it could not start (said on stderr).
    """
    stopped = stop or asyncio.Event()
    try:
        # The handlers stay until the drain is over: a signal then must not end the process by its default action.
        with contextlib.ExitStack() as handlers:
            async with running(config_path, host=host, port=port, drain_s=drain_s, seat=seat) as process:
                _handle_signals(process, stopped, handlers, terminates=stop is None)
                _spare_the_collector()
                if ready is not None:
                    ready(process)
                await stopped.wait()
    except (StartError, ConfigError) as error:
        print(f"headrace: {error}", file=sys.stderr)
        return 1
    return 0


def _spare_the_collector() -> None:
    """What stands now lives as long as the process, and requests leave hardly a cycle: look for garbage less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)


@dataclass(frozen=True, slots=True)
class Running:
    """A gateway that accepts connections, and where."""

    gateway: Gateway
    listeners: tuple[Listener, Listener]
    url: str
    admin_url: str


@contextlib.asynccontextmanager
async def running(
    config_path: Path,
    *,
    host: str | None = None,
    port: int | None = None,
    drain_s: float | None = None,
    seat: Seat | None = None,
) -> AsyncIterator[Running]:
    """Serve a fleet file while inside; leaving drains. Arguments as for `serve`.

    Raises:
        ConfigError, StartError: it could not start; nothing is left behind.
    """
    environ = dict(os.environ)
    seat = seat or Seat(config_path, host=host, port=port)
    loaded = seat.load(environ)
    with contextlib.ExitStack() as sockets:
        bound_sockets = seat.sockets(loaded.config)
        for bound in bound_sockets:
            sockets.enter_context(bound)
        public_url, admin_url = map(url_of, bound_sockets)
        gateway = seat.gateway(loaded, environ)
        drain_s = loaded.config.timeouts.drain_s if drain_s is None else drain_s
        listeners = (
            listener_for(
                seat.public_app(gateway),
                protocol_for(gateway.dispatcher, _wire_limits(loaded.config)),
                drain_s,
                parting_s=seat.parting_s,
            ),
            listener_for(admin_app(gateway), HttpToolsProtocol, 1.0),
        )
        process = Running(gateway, listeners, public_url, admin_url)
        async with asyncio.TaskGroup() as group:
            serving = [
                group.create_task(listener.serve(sockets=[bound]))
                for listener, bound in zip(listeners, bound_sockets, strict=True)
            ]
            background = [
                group.create_task(watch)
                for watch in (seat.watch_backends(process), gateway.reloader.watch(), gateway.keep_state())
            ]
            for listener in listeners:
                await listener.accepting.wait()
            try:
                yield process
            finally:
                gateway.stopping = True
                seat.leave()
                for listener, task in zip(listeners, serving, strict=True):  # operators can watch the drain
                    listener.should_exit = True
                    await asyncio.wait([task])
                for task in background:
                    task.cancel()
                await gateway.aclose()


def _handle_signals(
    process: Running, stopped: asyncio.Event, handlers: contextlib.ExitStack, *, terminates: bool
) -> None:
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stopped.is_set():  # asked twice: do not wait for open streams
            for listener in process.listeners:
                listener.force_exit = True
        stopped.set()

    handlers.callback(process.gateway.reloader.install_sighup(loop))
    for signum in (signal.SIGTERM, signal.SIGINT) if terminates else ():
        loop.add_signal_handler(signum, on_signal)
        handlers.callback(loop.remove_signal_handler, signum)


def bind(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A listening socket; a `shared` one lets others of this process's user listen on its port beside it.

    Raises:
        StartError: it cannot be had.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    bound = socket.socket(family, kind, protocol)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        bound.bind(address)
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise StartError(
                f"port {port} on {host} is taken, perhaps by another headrace. Stop that one, or choose another port."
            ) from None
        raise StartError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    bound.setblocking(False)
    return bound


def url_of(bound: socket.socket) -> str:
    if bound.family == socket.AF_UNIX:
        return f"unix:{bound.getsockname()}"
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _wire_limits(config: FleetConfig) -> WireLimits:
    return WireLimits(
        max_connections=config.limits.max_connections,
        head_s=config.timeouts.receive_head_s,
        body_s=config.timeouts.receive_body_s,
    )


def listener_for(
    app: Starlette, protocol: type[asyncio.Protocol], drain_s: float, *, parting_s: float = 0.0
) -> Listener:
    """A server of this app, which waits for its open requests for `drain_s` when it ends."""
    config = uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan="off",
        loop="none",
        access_log=False,
        proxy_headers=False,  # nothing here trusts or needs the client's address
        log_config=None,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, round(drain_s)),
    )
    return Listener(config, parting_s)
