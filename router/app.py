"""One gateway process from its start to its end: listeners, signals, reload, drain."""

import asyncio
import contextlib
import errno
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

from router.admin import admin_app
from router.config import ConfigError, FleetConfig, load_fleet
from router.gateway import Gateway
from router.hotprotocol import protocol_for
from router.public import public_app
from router.wire import WireLimits

BACKLOG = 2048
KEEP_ALIVE_S = 75

# One line per probe of each backend, each second, is no news; what a probe finds shows in the health transitions.
logging.getLogger("httpx").setLevel(logging.WARNING)
# An answer that ends without its terminator is how a client learns that it is truncated, not an accident.
logging.getLogger("uvicorn.error").addFilter(lambda record: "without completing response" not in record.getMessage())


class StartError(Exception):
    """The process cannot serve; the text says why and what to do."""


class Listener(uvicorn.Server):
    """A uvicorn server that leaves signals to its owner and tells when it accepts connections."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.accepting = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.accepting.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


async def serve(
    config_path: Path,
    *,
    host: str | None = None,
    port: int | None = None,
    ready: Callable[["Running"], None] | None = None,
    stop: asyncio.Event | None = None,
    drain_s: float | None = None,
) -> int:
    """Serve a fleet file until SIGTERM, SIGINT or `stop`.

    Args:
        host, port: replace the file's `listen`.
        ready: told where, once both listeners accept connections.
        stop: ends the process's serving; where it is given, SIGTERM and SIGINT are its owner's business.
        drain_s: how long open requests may take after that; replaces the file's `timeouts.drain_s`.

    Returns:
        The exit code: 0, or 1 where it could not start (said on stderr).
    """
    stopped = stop or asyncio.Event()
    try:
        # The handlers stay until the drain is over: a signal then must not end the process by its default action.
        with contextlib.ExitStack() as handlers:
            async with running(config_path, host=host, port=port, drain_s=drain_s) as process:
                _handle_signals(process, stopped, handlers, terminates=stop is None)
                if ready is not None:
                    ready(process)
                await stopped.wait()
    except (StartError, ConfigError) as error:
        print(f"headrace: {error}", file=sys.stderr)
        return 1
    return 0


@dataclass(frozen=True, slots=True)
class Running:
    """A gateway that accepts connections, and where."""

    gateway: Gateway
    listeners: tuple[Listener, Listener]
    url: str
    admin_url: str


@contextlib.asynccontextmanager
async def running(
    config_path: Path, *, host: str | None = None, port: int | None = None, drain_s: float | None = None
) -> AsyncIterator[Running]:
    """Serve a fleet file while inside; leaving drains. Arguments as for `serve`.

    Raises:
        ConfigError, StartError: it could not start; nothing is left behind.
    """
    environ = dict(os.environ)
    loaded = load_fleet(config_path, environ)
    listen, admin = loaded.config.listen, loaded.config.admin
    with contextlib.ExitStack() as sockets:
        public_socket = sockets.enter_context(_bind(host or listen.host, listen.port if port is None else port))
        admin_socket = sockets.enter_context(_bind(admin.host, admin.port))
        gateway = Gateway(config_path, loaded, environ)
        drain_s = loaded.config.timeouts.drain_s if drain_s is None else drain_s
        listeners = (
            _listener(public_app(gateway), protocol_for(gateway.dispatcher, _wire_limits(loaded.config)), drain_s),
            _listener(admin_app(gateway), HttpToolsProtocol, 1.0),
        )
        async with asyncio.TaskGroup() as group:
            serving = [
                group.create_task(listener.serve(sockets=[bound]))
                for listener, bound in zip(listeners, (public_socket, admin_socket), strict=True)
            ]
            background = [group.create_task(gateway.poller.run()), group.create_task(gateway.reloader.watch())]
            for listener in listeners:
                await listener.accepting.wait()
            try:
                yield Running(gateway, listeners, _url(public_socket), _url(admin_socket))
            finally:
                gateway.stopping = True
                for listener in listeners:
                    listener.should_exit = True
                await asyncio.wait(serving)
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


def _bind(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    bound = socket.socket(family, kind, protocol)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
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


def _url(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _wire_limits(config: FleetConfig) -> WireLimits:
    return WireLimits(
        max_connections=config.limits.max_connections,
        head_s=config.timeouts.receive_head_s,
        body_s=config.timeouts.receive_body_s,
    )


def _listener(app: Starlette, protocol: type[HttpToolsProtocol], drain_s: float) -> Listener:
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
    return Listener(config)
