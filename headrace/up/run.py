"""`headrace up`: the engines, the fleet file and the gateway, in the foreground, with one command.

In order: see that the ports are free, get the weights, start the engines, measure them (once per machine), write the
fleet file, serve it. Whatever ends first ends all the rest.
"""

import asyncio
import contextlib
import errno
import fcntl
import functools
import importlib.util
import json
import math
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from backends.embedded import trio
from backends.embedded.model_files import ModelFilesError, prepare
from backends.embedded.supervisor import ChildState, ChildStatus, Supervisor, SupervisorError, describe_exit
from headrace.up import fleet_file
from headrace.up.engine_sets import EngineSet, LlamaCppEngines, SimulatedEngines
from headrace.up.narrator import Narrator

EXIT_INTERRUPTED = 130
START_ATTEMPTS = 3
DRAIN_S = 3.0
"""How long answers under way may take after Ctrl-C: whoever tries things out does not want to wait."""
FIRST_ENGINE_PORT = 9101
"""Engines take the first free ports from here: below those that the kernel gives to outgoing connections (32768 and up
on Linux), so that no connection takes an engine's port while the engine restarts."""
LAST_ENGINE_PORT = 9999
DEMO_SLOTS = 4
"""Of each simulated engine in a demo: small ones, that a laptop's traffic can fill."""

T = TypeVar("T")


class UpError(Exception):
    """`up` cannot go on; the text says why and what to do."""


class Interrupted(Exception):
    """Asked to stop before everything was up."""


@dataclass(frozen=True, slots=True)
class UpOptions:
    """What the command line says. A port of 0 takes any free one."""

    engines: Literal["llamacpp", "simulated"] = "llamacpp"
    host: str = "127.0.0.1"
    port: int = 8080
    admin_port: int = 8081
    run_dir: Path = field(default_factory=lambda: Path(".headrace/run"))
    json: bool = False
    time_scale: float = 1.0
    """Simulated engines only: how many times as fast as the cards."""
    calibrate: bool = True
    """False: measure nothing; use what an earlier start measured, else go without."""
    demo: Literal["lending"] | None = None
    """Play it once everything is up, and end with it."""


async def run_up(options: UpOptions) -> int:
    """Runs until Ctrl-C, SIGTERM or the gateway's end; returns the exit code: 0, 1 after an error, 130 where it was
    interrupted before all was up.
    """
    stop = asyncio.Event()
    narrator = Narrator(quiet=options.json)
    with _signals_set(stop), narrator:
        try:
            return await _run(options, stop, narrator)
        except (UpError, ModelFilesError, SupervisorError) as error:
            narrator.error(str(error))
            return 1
        except Interrupted:
            narrator.say("Stopped before everything was up.")
            return EXIT_INTERRUPTED


async def _run(options: UpOptions, stop: asyncio.Event, narrator: Narrator) -> int:
    started_at_s = time.monotonic()
    port, admin_port = gateway_ports(options)
    with run_folder(options.run_dir) as folder:
        engines = await _engine_set(options, stop, narrator)
        state: _State | None = None

        def on_change(status: ChildStatus) -> None:
            _tell(status, narrator)
            if state is not None:
                state.write()

        narrator.progress("starting engines", 0, 0)
        async with _running(engines, folder, stop, on_change) as (supervisor, ports):
            coefficients = await _measure(engines, ports, stop, narrator)
            fleet_path = folder / "fleet.yaml"
            classes = engines.latency_classes
            if options.demo is not None:
                classes = engines.scene.classes(classes)
            text = fleet_file.render(
                fleet_file.FleetFile(
                    host=options.host, port=port, admin_port=admin_port, model=engines.model, aliases=engines.aliases,
                    latency_classes=classes, header=_header(engines),
                    lending={} if options.demo is None else engines.scene.lending(),
                ),
                engines.backends(ports, coefficients),
            )
            _write(fleet_path, text)
            state = _State(options, port, admin_port, engines.model, fleet_path, supervisor, ports, folder)

            become_ready = functools.partial(state.become_ready, narrator, started_at_s)
            state.write()
            try:
                if options.demo is not None:
                    return await _play(state, engines, narrator, stop)
                return await _serve(fleet_path, become_ready, stop)
            finally:
                narrator.say("Stopping engines.")
                state_path, state = state.path, None
                with contextlib.suppress(OSError):
                    state_path.unlink(missing_ok=True)


async def _serve(fleet_path: Path, become_ready: Callable[[], None], stop: asyncio.Event) -> int:
    from router.app import serve

    return await serve(fleet_path, ready=lambda _: become_ready(), stop=stop, drain_s=DRAIN_S)


async def _play(state: "_State", engines: EngineSet, narrator: Narrator, stop: asyncio.Event) -> int:
    """Serve while the demo runs; its account is the result. 1 where a promise was broken, 130 where it was stopped."""
    from headrace.up.demo import DemoError, LendingDemo, story

    demo = LendingDemo(
        scene=engines.scene, gateway_url=state.gateway_url, admin_url=state.admin_url, model=state.model,
        budget=engines.scene.classes(engines.latency_classes)[0], engines=engines.names,
        supervisor=state.supervisor, folder=state.folder, narrator=narrator)
    ready, playing_ended = asyncio.Event(), asyncio.Event()
    serving = asyncio.create_task(_serve(state.fleet_path, ready.set, playing_ended))
    try:
        await asyncio.wait((serving, up := asyncio.create_task(ready.wait())), return_when=asyncio.FIRST_COMPLETED)
        up.cancel()
        if serving.done():
            return serving.result()
        narrator.close_progress()
        account = await _unless_stopped(demo.run(), stop)
    except Interrupted:
        narrator.say("Stopped before the end of the demo.")
        return EXIT_INTERRUPTED
    except DemoError as error:
        raise UpError(str(error)) from error
    finally:
        playing_ended.set()
        await asyncio.gather(serving, return_exceptions=True)
    narrator.announce(json.dumps(account) if state.options.json else story(account))
    return 0 if account["ok"] else 1


async def _engine_set(options: UpOptions, stop: asyncio.Event, narrator: Narrator) -> EngineSet:
    if options.engines == "simulated":
        if not 0 < options.time_scale < math.inf:
            raise UpError(f"--time-scale must be a number above 0, got {options.time_scale:g}")
        if options.demo is not None:
            return SimulatedEngines(options.time_scale, slots=DEMO_SLOTS)
        return SimulatedEngines(options.time_scale)
    missing = [name for name in ("xllamacpp", "gguf", "numpy") if importlib.util.find_spec(name) is None]
    if missing:
        raise UpError(
            f"the llama.cpp engines need {', '.join(missing)}: run `pip install 'headrace[engines]'`, "
            "or start without them: `headrace up --engines simulated`."
        )

    def progress(what: str, done: int, total: int) -> None:
        if stop.is_set():       # raised inside the worker thread: it cleans up and ends
            raise Interrupted
        narrator.progress(what, done, total)

    return LlamaCppEngines(await asyncio.to_thread(prepare, os.environ, progress), options.calibrate)


@contextlib.asynccontextmanager
async def _running(
    engines: EngineSet, folder: Path, stop: asyncio.Event, on_change: Callable[[ChildStatus], None]
) -> AsyncIterator[tuple[Supervisor, dict[str, int]]]:
    """Runs the engines on free ports; chooses others where one was taken between the look and the start."""
    for attempt in range(1, START_ATTEMPTS + 1):
        ports = engine_ports(engines.names)
        children = engines.children(ports, folder / "logs")
        async with Supervisor(children, on_change=on_change) as supervisor:
            try:
                await _unless_stopped(supervisor.wait_ready(), stop)
            except SupervisorError:
                await supervisor.aclose()
                if attempt == START_ATTEMPTS or all(is_free("127.0.0.1", port) for port in ports.values()):
                    raise
                continue
            yield supervisor, ports
            return


def _tell(status: ChildStatus, narrator: Narrator) -> None:
    if status.state is ChildState.BACKOFF:
        narrator.say(f"{status.name} {status.error or describe_exit(status.last_exit or 0)}; starting it again.")
    elif status.state is ChildState.READY and status.restarts:
        narrator.say(f"{status.name} is back (pid {status.pid}, restart {status.restarts}).")


async def _measure(
    engines: EngineSet, ports: Mapping[str, int], stop: asyncio.Event, narrator: Narrator
) -> dict[str, Any]:
    """Coefficients; an engine that cannot be measured is no reason not to serve."""
    try:
        return await _unless_stopped(engines.measure(ports, narrator.progress), stop)
    except (OSError, RuntimeError, ValueError) as error:
        narrator.say(f"Serving without coefficients: {error}")
        return {}


async def _unless_stopped(work: Coroutine[Any, Any, T], stop: asyncio.Event) -> T:
    """The result of `work`; raises Interrupted, with `work` cancelled, where `stop` is set first."""
    task, stopped = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Interrupted
        return task.result()
    finally:
        for pending in (task, stopped):
            pending.cancel()
        await asyncio.gather(task, stopped, return_exceptions=True)


@contextlib.contextmanager
def _signals_set(stop: asyncio.Event) -> Iterator[None]:
    """SIGINT and SIGTERM set `stop`, while inside."""
    loop = asyncio.get_running_loop()
    held = []
    for signum in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(ValueError, RuntimeError):     # not the main thread: its owner sets what it wants
            loop.add_signal_handler(signum, stop.set)
            held.append(signum)
    try:
        yield
    finally:
        for signum in held:
            loop.remove_signal_handler(signum)


def headrace_command() -> str:
    """How to call this program again from here: by name where that finds it, else by its path."""
    program = Path(sys.argv[0])
    if program.name != "headrace":
        return f"{sys.executable} -m headrace"
    found = shutil.which("headrace")
    if found is not None and Path(found).resolve() == program.resolve():
        return "headrace"
    return os.path.relpath(program)


def gateway_ports(options: UpOptions) -> tuple[int, int]:
    """The two ports to listen on. Raises UpError where one cannot be had."""
    port = options.port or free_port(options.host)
    admin_port = options.admin_port or free_port("127.0.0.1", without=(port,))
    if port == admin_port:
        raise UpError(f"--port and --admin-port are both {port}; they must differ.")
    for host, number, option in ((options.host, port, "--port"), ("127.0.0.1", admin_port, "--admin-port")):
        try:
            _bind(host, number)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise UpError(
                    f"port {number} on {host} is taken, perhaps by another `headrace up`. "
                    f"Stop that, or choose another with {option}."
                ) from error
            raise UpError(f"cannot listen on {host}:{number}: {error.strerror or error}.") from error
    return port, admin_port


def _bind(host: str, port: int) -> int:
    """Binds and lets go at once; returns the port that it was. Raises OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)     # as servers do: TIME_WAIT is no obstacle
        probe.bind(address)
        return int(probe.getsockname()[1])


def is_free(host: str, port: int) -> bool:
    """True where a server could bind the port now."""
    try:
        _bind(host, port)
    except OSError:
        return False
    return True


def free_port(host: str, without: tuple[int, ...] = ()) -> int:
    """Any free port."""
    while (port := _bind(host, 0)) in without:
        pass
    return port


def engine_ports(names: tuple[str, ...]) -> dict[str, int]:
    """A free port for each engine, the lowest there are. Raises UpError where too few are free."""
    found = (port for port in range(FIRST_ENGINE_PORT, LAST_ENGINE_PORT + 1) if is_free("127.0.0.1", port))
    ports = dict(zip(names, found, strict=False))
    if len(ports) < len(names):
        raise UpError(f"fewer than {len(names)} free ports between {FIRST_ENGINE_PORT} and {LAST_ENGINE_PORT}.")
    return ports


@contextlib.contextmanager
def run_folder(path: Path) -> Iterator[Path]:
    """Makes the run folder and holds it against a second `up`. Raises UpError."""
    folder = path.expanduser().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise UpError(f"cannot use the folder {folder}: {error.strerror}. Choose another with --run-dir.") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UpError(
                f"another `headrace up` runs in {folder}. Stop it, or choose another folder with --run-dir."
            ) from error
        yield folder


def _header(engines: EngineSet) -> str:
    return (
        "Written by `headrace up`, anew at each start. Edit and save: the running gateway follows at once. To keep a\n"
        f"fleet file of your own, copy this one and run `headrace serve --config FILE`.\n\n{engines.about()}"
    )


def _write(path: Path, text: str) -> None:
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise UpError(f"cannot write {path}: {error.strerror}.") from error


@dataclass(slots=True)
class _State:
    """What runs, for `state.json`, for the one line of `--json` and for the page that says what to try."""

    options: UpOptions
    port: int
    admin_port: int
    model: str
    fleet_path: Path
    supervisor: Supervisor
    ports: Mapping[str, int]
    folder: Path
    ready_after_s: float | None = None

    @property
    def path(self) -> Path:
        return self.folder / "state.json"

    @property
    def gateway_url(self) -> str:
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self.options.host, self.options.host)  # noqa: S104
        return f"http://{host}:{self.port}"

    @property
    def admin_url(self) -> str:
        return f"http://127.0.0.1:{self.admin_port}"

    def as_dict(self) -> dict[str, Any]:
        engines = [
            {
                "name": status.name, "url": trio.url(self.ports[status.name]), "pid": status.pid,
                "state": status.state.value, "restarts": status.restarts, "log": str(spec.log_path),
            }
            for spec, status in zip(self.supervisor.specs, self.supervisor.status(), strict=True)
        ]
        return {
            "ready": self.ready_after_s is not None,
            "ready_after_s": None if self.ready_after_s is None else round(self.ready_after_s, 3),
            "pid": os.getpid(),
            "gateway_url": self.gateway_url,
            "admin_url": self.admin_url,
            "model": self.model,
            "fleet_file": str(self.fleet_path),
            "state_file": str(self.path),
            "engines": engines,
        }

    def write(self) -> None:
        """Writes `state.json`. A full disk must not stop engines from being restarted, so failures pass."""
        with contextlib.suppress(UpError):
            _write(self.path, json.dumps(self.as_dict(), indent=1) + "\n")

    def become_ready(self, narrator: Narrator, started_at_s: float) -> None:
        """Everything is up: notes it, and tells the user by one JSON line or a page of things to try."""
        narrator.close_progress()
        self.ready_after_s = time.monotonic() - started_at_s
        self.write()
        narrator.announce(json.dumps(self.as_dict()) if self.options.json else self._page())

    def _page(self) -> str:
        def curl(flags: str, **fields: Any) -> str:
            messages = [{"role": "user", "content": "Explain gravity in one sentence."}]
            body = json.dumps({"model": self.model, **fields, "messages": messages})
            url = f"{self.gateway_url}/v1/chat/completions"
            return f"curl {flags} {url} -H 'content-type: application/json' -d '{body}'"

        engines = "\n".join(f"  {name:<18} {trio.url(port)}" for name, port in self.ports.items())
        admin = "" if self.admin_port == 8081 else f" --admin http://127.0.0.1:{self.admin_port}"
        return f"""
Headrace is up after {self.ready_after_s or 0:.1f} s: {self.gateway_url}/v1 serves {self.model} from
{engines}

Stream an answer:
  {curl("-N", stream=True)}

See which engine served and why (x-headrace-backend, x-headrace-reason):
  {curl("-i", max_tokens=48)}

Watch the fleet:   {headrace_command()} status{admin}
Change routes:     edit {self.fleet_path} and save; it takes effect at once
Logs:              {self.folder / "logs"}
Stop all of it:    Ctrl-C
"""
