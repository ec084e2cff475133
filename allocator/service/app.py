"""One allocator process: the listener, the signals, the watch on its file, and the service behind them."""

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from watchfiles import awatch

from allocator.model.world import World
from allocator.service.api import api
from allocator.service.config import Declared
from allocator.service.metrics import AllocatorMetrics
from allocator.service.service import Load, MakeLender, Service, open_store

log = logging.getLogger("headrace.allocator")

SUM_UP_EVERY_S = 1.0

# A journal beside the file changes all the time, and that is no news.
logging.getLogger("watchfiles").setLevel(logging.WARNING)


class StartError(Exception):
    """The process cannot serve; the text says why and what to do."""


@dataclass(frozen=True, slots=True)
class Ready:
    """What is said once it listens."""

    url: str
    pid: int


class _Listener(uvicorn.Server):
    """A server that leaves the signals to its owner."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


async def serve(path: Path, declared: Declared, load: Load, make_lender: MakeLender,
                ready: Callable[[Ready], None]) -> None:
    """Serves until SIGTERM or SIGINT. `make_lender` makes the lender of each term in which this process leads.

    Raises:
        StartError: its address or token cannot be had.
        StoreError: the store cannot be opened.
    """
    token = _token(declared)
    database = open_store(declared)
    listening = _bind(declared)
    host, port = listening.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    service = Service(declared, load, database, url, make_lender=make_lender)

    def world() -> tuple[World, float] | None:
        keeper = service.keeper
        return None if keeper is None else (keeper.world, keeper.clock.now_s())

    metrics = AllocatorMetrics(world, lambda: service.reloads)
    service.watchers.append(metrics.watch)
    listener = _Listener(uvicorn.Config(api(service, metrics, token), log_config=None, access_log=False, lifespan="off",
                                        server_header=False, timeout_graceful_shutdown=3))
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    reload = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stopping.set)
    loop.add_signal_handler(signal.SIGHUP, reload.set)
    tasks = [asyncio.create_task(work) for work in (
        service.run(), listener.serve(sockets=[listening]), _reloading(service, reload), _watching(path, reload),
        _summing(service, metrics))]
    waiting = asyncio.create_task(stopping.wait())
    try:
        ready(Ready(url, os.getpid()))
        done, _ = await asyncio.wait([*tasks, waiting], return_when=asyncio.FIRST_COMPLETED)
        for task in done - {waiting}:
            task.result()       # none of them ends by itself, so this raises
    finally:
        listener.should_exit = True
        for task in (waiting, tasks[0], *tasks[2:]):
            task.cancel()
        await asyncio.gather(waiting, *tasks, return_exceptions=True)
        database.dispose()


async def _reloading(service: Service, reload: asyncio.Event) -> None:
    while True:
        await reload.wait()
        await asyncio.sleep(0.05)       # an editor's several steps are one
        reload.clear()
        result = await service.reload()
        if result.ok and result.changed:
            log.info("the file is taken over: config %s", result.config)


async def _watching(path: Path, reload: asyncio.Event) -> None:
    """The folder is watched, not the file: editors rename another one over it."""
    seen = await asyncio.to_thread(_content, path)
    ours = {path.name, "..data"}       # the latter is what Kubernetes swaps beside a mounted file
    async for _ in awatch(path.parent, watch_filter=lambda _, changed: os.path.basename(changed) in ours,
                          recursive=False, step=50, debounce=200, rust_timeout=2_000, yield_on_timeout=True):
        now = await asyncio.to_thread(_content, path)
        if now != seen:
            seen = now
            reload.set()


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


async def _summing(service: Service, metrics: AllocatorMetrics) -> None:
    while True:
        await asyncio.sleep(SUM_UP_EVERY_S)
        keeper = service.keeper
        if keeper is not None:
            metrics.sum_up(keeper.world, keeper.clock.now_s(), service.declared.price_per_hour)


def _token(declared: Declared) -> str | None:
    name = declared.config.listen.token_env
    if name is None:
        return None
    token = os.environ.get(name, "").strip()
    if not token:
        raise StartError(f"listen.token_env: environment variable {name} is not set or empty")
    return token


def _bind(declared: Declared) -> socket.socket:
    listen = declared.config.listen
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            listen.host, listen.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        bound = socket.socket(family, kind, protocol)
    except socket.gaierror as problem:
        raise StartError(f"listen.host {listen.host}: {problem.strerror}") from problem
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(128)
    except OSError as problem:
        bound.close()
        hint = "; is another allocator running? Give listen.port another number" if problem.errno == errno.EADDRINUSE \
            else ""
        raise StartError(f"cannot listen on {listen.host} port {listen.port}: {problem.strerror}{hint}") from problem
    return bound
