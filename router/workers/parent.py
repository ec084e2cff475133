"""The parent of several worker processes: starts them, replaces them, ends them, and answers the operators for all.

The parent serves no client. It binds one listening socket per worker on one address (SO_REUSEPORT: the kernel spreads
connections over them evenly) and keeps them all open, so that none is ever refused while a worker is replaced.

Signals: SIGHUP reloads in every worker; SIGUSR2 replaces one worker after another, each only once its successor serves;
SIGTERM and SIGINT drain all of them, asked twice without waiting for open streams. Workers die with the parent.
"""

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import httpx
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from router.app import Listener, StartError, bind, listener_for, url_of
from router.config.fleet_file import ConfigError, LoadedFleet, load_fleet
from router.workers.merged_admin import merged_admin_app
from router.workers.merged_lending import LendingOrder
from router.workers.merged_metrics import Page, Retired
from router.workers.table import Header, Row, RowState, Table
from router.workers.worker import SeatPlan
from settings.source import read_source

log = logging.getLogger("headrace.workers")

TICK_S = 0.05
START_LIMIT_S = 60.0
HUNG_S = 30.0
"""A worker without a sign of life for so long is ended: its loop is stuck, and its clients with it."""
STEADY_S = 10.0
"""A worker that lived so long starts anew at once; one that dies sooner, again and again, waits longer each time."""
FIRST_BACKOFF_S = 0.25
MAX_BACKOFF_S = 10.0
KILL_AFTER_DRAIN_S = 1.5
FOLDER_PREFIX = "headrace-workers-"
LOCK_NAME = "lock"
PAGES_EVERY_S = 5.0


@dataclass(slots=True)
class Worker:
    """One worker process."""

    row: Row
    epoch: int
    process: "subprocess.Popen[bytes]"
    client: httpx.AsyncClient
    socket_path: Path
    page_fd: int
    """Where it leaves its metrics at its end."""
    started_at_s: float
    drained: tuple[str, ...]
    """Backends drained by hand that it was told of."""
    orders: Mapping[str, LendingOrder]
    """Orders of lending that it was told of, by backend."""
    ready: bool = False
    retiring: bool = False
    page: Page | None = None
    """Its metrics as they were last read."""

    @property
    def serves(self) -> bool:
        return self.row.header[Header.STATE] == RowState.SERVING and self.row.header[Header.EPOCH] == self.epoch


@dataclass(slots=True)
class Lane:
    """One listening socket and who accepts from it."""

    socket: socket.socket
    current: Worker | None = None
    incoming: Worker | None = None
    """Its successor, while that starts."""
    failures: int = 0
    """Workers in a row that did not live long."""
    due_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Serving:
    """Workers that serve, and where."""

    url: str
    admin_url: str
    workers: int


class Workers:
    """The parent's state. Belongs to one event loop, on the main thread: the kernel ties the workers to that thread."""

    def __init__(
        self, config_path: Path, loaded: LoadedFleet, lanes: list[socket.socket], drain_s: float | None
    ) -> None:
        self.config_path = config_path
        self.lanes = [Lane(lane) for lane in lanes]
        self.table = Table.create(4 * len(lanes))
        self.folder, self._folder_lock = own_folder()
        self.workers: list[Worker] = []
        self.drained: set[str] = set()
        self.orders: dict[str, LendingOrder] = {}
        """The last order on each backend that all workers took."""
        self.lending_version = 1
        """Grows by one whenever a backend enters another stage of lending, over all workers."""
        self.lending_stages: dict[str, str] = {}
        self.retired = Retired()
        self.starts = 0
        self.drain_s = loaded.config.timeouts.drain_s if drain_s is None else drain_s
        self._drain_given_s = drain_s
        self._config = read_source(config_path)
        self._config_hash = loaded.config_hash
        self._rolled_back = False
        self._rolls_due = 0
        """Rolling restarts asked for, the one under way among them."""
        self._pages_at_s = 0.0
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def metrics_path(self) -> Path:
        return self.folder / "parent.sock"

    def serving(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.serves]

    def leader(self) -> Worker | None:
        """The worker that probes for all."""
        return min(self.serving(), key=lambda worker: worker.row.index, default=None)

    # --- starting and ending ----------------------------------------------------------------------------------------

    async def start(self) -> None:
        """All workers, side by side.

        Raises:
            StartError: none of them serves.
        """
        for lane in self.lanes:
            lane.current = await self.spawn(lane)
        deadline_s = monotonic() + START_LIMIT_S
        while not all(worker.serves for worker in self.workers):
            codes = [worker.process.poll() for worker in self.workers]
            if any(code is not None for code in codes) or monotonic() > deadline_s:
                raise StartError("a worker could not start; what it said stands above")
            await asyncio.sleep(TICK_S)

    async def spawn(self, lane: Lane) -> Worker:
        """Start a worker on what its siblings run now."""
        await self._refresh_config()
        taken = {worker.row.index for worker in self.workers}
        row = next(row for row in self.table if row.index not in taken and row.state is RowState.EMPTY)
        self.starts += 1
        epoch = self.starts
        socket_path = self.folder / f"{epoch}.sock"
        with contextlib.ExitStack() as opened:
            config, page = _file_of(self._config), _file_of(b"")
            opened.callback(os.close, config)
            page_closes = opened.enter_context(contextlib.ExitStack())
            page_closes.callback(os.close, page)
            admin = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            admin.bind(str(socket_path))
            admin.listen(64)
            listener_fds = [each.socket.fileno() for each in self.lanes]
            drained, orders = tuple(sorted(self.drained)), dict(self.orders)
            plan = SeatPlan(
                config_path=str(self.config_path),
                config_fd=config,
                table_fd=self.table.handle,
                admin_fd=admin.fileno(),
                page_fd=page,
                listener_fds=listener_fds,
                listener=self.lanes.index(lane),
                row=row.index,
                epoch=epoch,
                workers=len(self.lanes),
                parent_pid=os.getpid(),
                merged_metrics=str(self.metrics_path),
                rolled_back=self._rolled_back,
                drained=list(drained),
                away={name: order.epoch for name, order in orders.items() if order.verb == "release"},
                drain_s=self._drain_given_s,
                log_level=logging.getLogger().getEffectiveLevel(),
            )
            process = subprocess.Popen(  # noqa: ASYNC220, S603  a millisecond, and its parent is this thread
                [sys.executable, "-m", "router.workers.worker", *plan.arguments()],
                pass_fds=(config, page, self.table.handle, admin.fileno(), *listener_fds),
                stdin=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C is the parent's to handle
            )
            page_closes.pop_all()  # it is read, and closed, at the worker's end
        client = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=str(socket_path)), base_url="http://worker", timeout=10.0,
            trust_env=False,
        )  # fmt: skip
        worker = Worker(row, epoch, process, client, socket_path, page, monotonic(), drained, orders)
        self.workers.append(worker)
        return worker

    async def tend(self) -> None:
        """Look after the workers until cancelled."""
        while True:
            for worker in list(self.workers):
                if worker.process.poll() is not None:
                    await self._bury(worker)
                else:
                    self._look_after(worker)
            now = monotonic()
            for lane in self.lanes:
                if lane.current is None and lane.incoming is None and now >= lane.due_s:
                    await self._fill(lane)
            if now - self._pages_at_s > PAGES_EVERY_S:
                self._pages_at_s = now
                self._start(self._read_pages())
            await asyncio.sleep(TICK_S)

    async def _fill(self, lane: Lane) -> None:
        try:
            lane.current = await self.spawn(lane)
        except OSError as error:  # no process, no memory, no descriptor now: perhaps later
            log.error("a worker could not be started: %s", error)
            lane.failures += 1
            lane.due_s = monotonic() + max(FIRST_BACKOFF_S, backoff_s(lane.failures))

    async def roll(self) -> None:
        """Replace every worker, one after the other; ends at the first successor that does not come up."""
        for lane in self.lanes:
            old = lane.current
            lane.incoming = new = await self.spawn(lane)
            while not new.serves:
                if new.process.poll() is not None or monotonic() - new.started_at_s > START_LIMIT_S:
                    log.error("a successor could not start; the workers that serve stay")
                    new.process.kill()
                    lane.incoming = None
                    return
                await asyncio.sleep(TICK_S)
            lane.current, lane.incoming = new, None
            if old is None:
                continue
            log.info("worker %d (pid %d) takes over", new.row.index, new.process.pid)
            await self.end(old)
        log.info("all workers are replaced")

    async def end(self, worker: Worker) -> None:
        """Let one worker drain, and wait for its end."""
        worker.retiring = True
        worker.process.send_signal(signal.SIGTERM)
        deadline_s = monotonic() + self._drain_limit_s
        while worker.process.poll() is None:
            if monotonic() > deadline_s:
                log.error("worker %d (pid %d) does not end by itself", worker.row.index, worker.process.pid)
                worker.process.kill()
                worker.process.wait()
            await asyncio.sleep(TICK_S)

    async def drain(self, asked_again: asyncio.Event) -> bool:
        """End all of them. Returns whether each ended by itself."""
        for lane in self.lanes:
            lane.socket.close()
        deadline_s = monotonic() + self._drain_limit_s
        alive = [worker for worker in self.workers if worker.process.poll() is None]
        _signal_all(alive, signal.SIGTERM)
        hurried = False
        while alive := [worker for worker in alive if worker.process.poll() is None]:
            if asked_again.is_set() and not hurried:
                hurried = True
                _signal_all(alive, signal.SIGTERM)
                deadline_s = min(deadline_s, monotonic() + KILL_AFTER_DRAIN_S)
            if monotonic() > deadline_s:
                log.error("%d workers do not end by themselves", len(alive))
                _signal_all(alive, signal.SIGKILL)
                for worker in alive:
                    worker.process.wait()
                return False
            await asyncio.sleep(TICK_S)
        return True

    async def close(self) -> None:
        """Nothing is left: no process, no socket, no file."""
        for task in self._tasks:
            task.cancel()
        for worker in self.workers:
            if worker.process.poll() is None:
                worker.process.kill()
                worker.process.wait()
            await worker.client.aclose()
            os.close(worker.page_fd)
        for lane in self.lanes:
            lane.socket.close()
        os.close(self.table.handle)
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._folder_lock)

    def signal_serving(self, signum: int) -> None:
        _signal_all(self.serving(), signum)

    @property
    def _drain_limit_s(self) -> float:
        return max(1.0, self.drain_s) + KILL_AFTER_DRAIN_S

    # --- looking after one worker -----------------------------------------------------------------------------------

    async def _bury(self, worker: Worker) -> None:
        self.table.clear(worker.row.index)
        self.workers.remove(worker)
        self._read_last_page(worker)
        if worker.page is not None:
            self.retired.add(worker.page)
        worker.socket_path.unlink(missing_ok=True)
        await worker.client.aclose()
        now = monotonic()
        for lane in self.lanes:
            if lane.incoming is worker:
                lane.incoming = None
            if lane.current is worker:
                lane.current = None
                lane.failures = 0 if now - worker.started_at_s > STEADY_S else lane.failures + 1
                lane.due_s = now + backoff_s(lane.failures)
        if not worker.retiring:
            log.error("worker %d (pid %d) died: %s", worker.row.index, worker.process.pid, _how(worker.process))

    def _look_after(self, worker: Worker) -> None:
        now = monotonic()
        if not worker.ready and worker.serves:
            worker.ready = True
            self._start(self._bring_up_to_date(worker))
        if worker.ready:
            if now - worker.row.floats[Header.HEARTBEAT_S] > HUNG_S:
                log.error("worker %d (pid %d) hangs", worker.row.index, worker.process.pid)
                worker.process.kill()
        elif now - worker.started_at_s > START_LIMIT_S:
            log.error("worker %d (pid %d) does not come up", worker.row.index, worker.process.pid)
            worker.process.kill()

    async def _bring_up_to_date(self, worker: Worker) -> None:
        """Tell a new worker what operators did while it started."""
        for name in sorted(self.drained.symmetric_difference(worker.drained)):
            verb = "drain" if name in self.drained else "undrain"
            with contextlib.suppress(httpx.HTTPError):
                await worker.client.post(f"/admin/backends/{name}/{verb}")
        for name, order in self.orders.items():
            if worker.orders.get(name) != order:
                with contextlib.suppress(httpx.HTTPError):
                    await worker.client.post(f"/admin/backends/{name}/{order.verb}?epoch={order.epoch}")

    async def _refresh_config(self) -> None:
        """What the workers run, for one that starts: the file may be broken by now, or rolled back behind."""
        leader = self.leader()
        if leader is None:
            return
        try:
            status = (await leader.client.get("/admin/config")).json()
        except (httpx.HTTPError, ValueError) as error:
            log.warning("worker %d does not say what it runs: %s", leader.row.index, error)
            return
        last = status.get("last_result") or {}
        self._rolled_back = last.get("trigger") == "rollback" and bool(last.get("ok"))
        if status.get("config_hash") != self._config_hash:
            self._config_hash, self._config = status["config_hash"], json.dumps(status["config"]).encode()

    async def _read_pages(self) -> None:
        await asyncio.gather(*(self._read_page(worker) for worker in self.workers if worker.ready))

    async def _read_page(self, worker: Worker) -> None:
        with contextlib.suppress(httpx.HTTPError, ValueError):
            worker.page = Page((await worker.client.get("/metrics")).text)

    def _read_last_page(self, worker: Worker) -> None:
        """What a worker left at its end; one that was killed left nothing, and what was read of it before stands."""
        if size := os.fstat(worker.page_fd).st_size:
            with contextlib.suppress(ValueError):
                worker.page = Page(os.pread(worker.page_fd, size, 0).decode())
        os.close(worker.page_fd)

    async def read_pages(self) -> dict[int, Page]:
        """The metrics of each worker, by row, as fresh as can be had."""
        await self._read_pages()
        return {worker.row.index: worker.page for worker in self.workers if worker.page is not None}

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def start_roll(self) -> None:
        """Begin to replace all workers; where that is under way, once more after it."""
        self._rolls_due = min(2, self._rolls_due + 1)
        if self._rolls_due == 1:
            self._start(self._roll_while_due())

    async def _roll_while_due(self) -> None:
        while self._rolls_due:
            try:
                await self.roll()
            finally:
                self._rolls_due -= 1


def backoff_s(failures: int) -> float:
    """Seconds until the next start after so many workers in a row that did not live long."""
    return 0.0 if failures < 2 else min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(failures - 2, 10))


async def serve_workers(
    config_path: Path,
    count: int,
    *,
    host: str | None = None,
    port: int | None = None,
    ready: Callable[[Serving], None] | None = None,
    drain_s: float | None = None,
) -> int:
    """Serve a fleet file with `count` worker processes until SIGTERM or SIGINT. Arguments as for `app.serve`.

    Returns:
        The exit code: 0; 1 where it could not start, or where a worker had to be killed.
    """
    try:
        loaded = load_fleet(config_path, dict(os.environ))
        listen, admin = loaded.config.listen, loaded.config.admin
        with contextlib.ExitStack() as sockets:
            lanes = bind_lanes(host or listen.host, listen.port if port is None else port, count)
            for lane in lanes:
                sockets.enter_context(lane)
            admin_socket = sockets.enter_context(bind(admin.host, admin.port))
            workers = Workers(config_path, loaded, lanes, drain_s)
            serving = Serving(url_of(lanes[0]), url_of(admin_socket), count)
            try:
                return await _serve(workers, admin_socket, serving, ready)
            finally:
                await workers.close()
    except (StartError, ConfigError) as error:
        print(f"headrace: {error}", file=sys.stderr)
        return 1


async def _serve(
    workers: Workers, admin_socket: socket.socket, serving: Serving, ready: Callable[[Serving], None] | None
) -> int:
    stopped, asked_again = asyncio.Event(), asyncio.Event()
    metrics_socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    metrics_socket.bind(str(workers.metrics_path))
    metrics_socket.listen(64)
    app = merged_admin_app(workers)
    listeners: list[Listener] = [listener_for(app, HttpToolsProtocol, 1.0) for _ in range(2)]
    answering = [
        asyncio.ensure_future(listener.serve(sockets=[bound]))
        for listener, bound in zip(listeners, (admin_socket, metrics_socket), strict=True)
    ]
    tending: asyncio.Task[None] | None = None
    with _signals(workers, stopped, asked_again):
        try:
            await workers.start()
            tending = asyncio.ensure_future(workers.tend())
            for listener in listeners:
                await listener.accepting.wait()
            if ready is not None:
                ready(serving)
            stopping = asyncio.ensure_future(stopped.wait())
            await asyncio.wait([stopping, tending, *answering], return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            if tending.done():
                tending.result()
            tending.cancel()
            return 0 if await workers.drain(asked_again) else 1
        finally:
            if tending is not None:
                tending.cancel()
            for listener in listeners:
                listener.should_exit = listener.force_exit = True
            await asyncio.wait(answering)


@contextlib.contextmanager
def _signals(workers: Workers, stopped: asyncio.Event, asked_again: asyncio.Event) -> Iterator[None]:
    loop = asyncio.get_running_loop()

    def stop() -> None:
        (asked_again if stopped.is_set() else stopped).set()

    handlers: dict[signal.Signals, Callable[[], None]] = {
        signal.SIGTERM: stop,
        signal.SIGINT: stop,
        signal.SIGHUP: lambda: workers.signal_serving(signal.SIGHUP),
        signal.SIGUSR2: workers.start_roll,
    }
    for signum, handler in handlers.items():
        loop.add_signal_handler(signum, handler)
    try:
        yield
    finally:
        for signum in handlers:
            loop.remove_signal_handler(signum)


def bind_lanes(host: str, port: int, count: int) -> list[socket.socket]:
    """So many listening sockets on one address.

    Raises:
        StartError: somebody else listens there.
    """
    # With SO_REUSEPORT alone, a second gateway of the same user would take half of the first one's clients unnoticed.
    with bind(host, port) as alone:
        port = alone.getsockname()[1]
    with contextlib.ExitStack() as opened:
        lanes = [opened.enter_context(bind(host, port, shared=True)) for _ in range(count)]
        opened.pop_all()
    return lanes


def own_folder() -> tuple[Path, int]:
    """A folder of this process's own for sockets, and the lock on it. Sweeps up after parents that were killed."""
    for lock in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*/{LOCK_NAME}"):
        with contextlib.suppress(OSError):  # held by a parent that lives, or somebody else's altogether
            handle = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
            finally:
                os.close(handle)
    folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
    handle = os.open(folder / f"{LOCK_NAME}.new", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    fcntl.flock(handle, fcntl.LOCK_EX)
    os.rename(folder / f"{LOCK_NAME}.new", folder / LOCK_NAME)  # never to be seen unlocked
    return folder, handle


def _signal_all(workers: list[Worker], signum: int) -> None:
    for worker in workers:
        with contextlib.suppress(ProcessLookupError):
            worker.process.send_signal(signum)


def _how(process: "subprocess.Popen[bytes]") -> str:
    code = process.returncode
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return signal.Signals(-code).name
    return f"exit code {code}"


def _file_of(content: bytes) -> int:
    """An inheritable descriptor of an anonymous file that holds this."""
    with tempfile.TemporaryFile(prefix="headrace-") as file:
        file.write(content)
        file.flush()
        return os.dup(file.fileno())
