"""Real processes for end-to-end tests: engines that can be killed, frozen and restarted, gateways, a steady load.

Everything listens on loopback, dies with the test process, and is gone when its context ends. Nothing here waits for a
fixed time: `until` polls, and says what it waited for when that does not come.
"""

import contextlib
import fcntl
import functools
import gc
import http.client
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from loadtest.openai_stream import Ask, Endpoint, Patience, StreamRecord, stream_chat
from loadtest.stack import child, tail
from tests.gateway_stack import MODEL, fleet_document

START_LIMIT_S = 40.0
BELOW_EPHEMERAL = range(21_000, 31_000)
"""Where ports of restarted servers come from: no outgoing connection can take one while its server is away."""

PATIENCE = Patience(connect_s=5.0, first_token_s=30.0, inter_token_s=30.0)

_COLLECTING = threading.Lock()
T = TypeVar("T")


# --- waiting and asking


def until(look: Callable[[], T], what: str, *, limit_s: float = 20.0, every_s: float = 0.02) -> T:
    """The first truthy answer of `look`; fails with `what` where none comes in time."""
    deadline_s = time.monotonic() + limit_s
    while not (found := look()):
        assert time.monotonic() < deadline_s, f"waited {limit_s:g} s in vain for: {what}; last answer: {found!r}"
        time.sleep(every_s)
    return found


def ask(url: str, path: str, *, method: str = "GET", body: Any = None, timeout_s: float = 10.0) -> tuple[int, bytes]:
    """Status and body of one request on a connection of its own."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)
    try:
        raw = None if body is None else json.dumps(body).encode()
        connection.request(method, path, raw, {"content-type": "application/json"} if raw else {})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def ask_json(url: str, path: str, *, method: str = "GET", body: Any = None) -> Any:
    return json.loads(ask(url, path, method=method, body=body)[1])


def answers(url: str, path: str, status: int = 200) -> bool:
    """Whether a server answers there with that status."""
    try:
        return ask(url, path, timeout_s=1.0)[0] == status
    except OSError:
        return False


def is_running(pid: int) -> bool:
    """True while the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def free_port() -> int:
    """A port that nobody listens on, that stays out of the way of outgoing connections, and that no other run of tests
    on this machine gets while this one lasts: it may be away for a while, between two servers.
    """
    for port in random.sample(BELOW_EPHEMERAL, 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            fcntl.lockf(_ports_taken(), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no free port")


@functools.cache
def _ports_taken() -> int:
    """A file of which each run of tests locks one byte for every port it was given, until it ends."""
    return os.open(Path(tempfile.gettempdir()) / f"headrace-test-ports-{os.getuid()}", os.O_RDWR | os.O_CREAT, 0o666)


def read_line(process: "subprocess.Popen[bytes]", limit_s: float, log: Path) -> dict[str, Any]:
    """The JSON line that a process prints once it is ready."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], limit_s)
    line = process.stdout.readline() if ready else b""
    assert line, f"no line from pid {process.pid} (exit code {process.poll()}); its log ends with\n{tail(log)}"
    found: dict[str, Any] = json.loads(line)
    return found


# --- engines


class Started:
    """Runs while inside; a start that fails leaves nothing behind."""

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> object:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class EngineProcess(Started):
    """An engine that keeps its port over restarts. `command` makes the command line for a port."""

    def __init__(self, name: str, command: Callable[[int], Sequence[str]], folder: Path) -> None:
        self.name = name
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = command
        self._log = folder / f"{name}.log"
        self._running = contextlib.ExitStack()
        self._process: subprocess.Popen[bytes] | None = None

    def close(self) -> None:
        """End it, frozen or not."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
        self._running.close()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def launch(self) -> None:
        """Start, or start again on the same port."""
        self._running.close()
        self._process = self._running.enter_context(
            child(list(self._command(self.port)), self._log, stdout=subprocess.PIPE))

    def await_ready(self) -> None:
        """Returns once it answers."""
        assert self._process is not None
        read_line(self._process, START_LIMIT_S, self._log)
        until(lambda: answers(self.url, "/health"), f"{self.name} to be healthy", limit_s=START_LIMIT_S)

    def start(self) -> None:
        """`launch`, and wait."""
        self.launch()
        self.await_ready()

    def kill(self) -> float:
        """SIGKILL; returns the monotonic time of it."""
        at_s = time.monotonic()
        os.kill(self.pid, signal.SIGKILL)
        assert self._process is not None
        self._process.wait()
        return at_s

    def freeze(self) -> float:
        """SIGSTOP: its sockets stay open and nobody answers. Returns the monotonic time of it."""
        at_s = time.monotonic()
        os.kill(self.pid, signal.SIGSTOP)
        return at_s

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)


class FakeEngine(EngineProcess):
    """`python -m loadtest.fake_engine` as a process of its own."""

    def __init__(self, name: str, folder: Path, *options: str, card: str = "h100x2-fp8", time_scale: float = 1) -> None:
        self.served_model_name = f"served-by-{name}"

        def command(port: int) -> list[str]:
            return [
                sys.executable, "-m", "loadtest.fake_engine", "--card", card, "--port", str(port), "--die-with-parent",
                "--served-model-name", self.served_model_name, "--time-scale", f"{time_scale:g}", *options,
            ]

        super().__init__(name, command, folder)

    @property
    def backend(self) -> dict[str, Any]:
        """Its entry in a fleet file."""
        return {"name": self.name, "url": self.url, "engine": "vllm", "served_model_name": self.served_model_name}

    def requests(self) -> list[dict[str, Any]]:
        """What the engine did with each request, in its own words."""
        found: list[dict[str, Any]] = ask_json(self.url, "/fake/requests")["requests"]
        return found

    def in_flight(self) -> int:
        """Requests whose body has come and whose answer has not ended, by the engine's own count."""
        return int(ask_json(self.url, "/fake/requests")["in_flight"])

    def set_faults(self, *faults: str) -> None:
        """Replace what goes wrong there."""
        answer = ask_json(self.url, "/fake/faults", method="POST", body={"faults": list(faults)})
        assert len(answer["faults"]) == len(faults), answer


@contextlib.contextmanager
def fake_engines(
    folder: Path, names: Sequence[str], *options: str, time_scale: float = 1
) -> Iterator[list[FakeEngine]]:
    """Fake engines, started side by side."""
    engines = [FakeEngine(name, folder, *options, time_scale=time_scale) for name in names]
    with contextlib.ExitStack() as running:
        for engine in engines:
            running.callback(engine.close)
            engine.launch()
        for engine in engines:
            engine.await_ready()
        yield engines


# --- the gateway


class GatewayProcess(Started):
    """`headrace serve` as a process, and its fleet file."""

    def __init__(self, folder: Path, document: Mapping[str, Any]) -> None:
        self.port, self.admin_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.admin_url = f"http://127.0.0.1:{self.admin_port}"
        self.fleet_file = folder / "fleet.yaml"
        self.log = folder / "gateway.log"
        self.document = {**document, "listen": {"port": self.port}, "admin": {"port": self.admin_port}}
        self.process: subprocess.Popen[bytes] | None = None
        self._running = contextlib.ExitStack()
        self.write()

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-m", "headrace", "serve", "--config", str(self.fleet_file), "--json"]

    def start(self) -> None:
        """Returns once it accepts requests and knows each backend's health."""
        self.process = self._running.enter_context(child(self.command, self.log, stdout=subprocess.PIPE))
        line = read_line(self.process, START_LIMIT_S, self.log)
        assert line["event"] == "ready", line
        until(lambda: all(entry["health"]["state"] != "unknown" for entry in self.fleet()["backends"]),
              "the first probe of each backend")

    def close(self) -> None:
        """End it at once: tests of the drain end it themselves."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
        self._running.close()

    def send_signal(self, signum: int) -> None:
        assert self.process is not None
        self.process.send_signal(signum)

    # The fleet file

    def write(self, text: str | None = None) -> None:
        """Put `document`, or any text, in the fleet file's place by one rename, as editors do."""
        part = self.fleet_file.with_suffix(".part")
        part.write_text(json.dumps(self.document, indent=1) if text is None else text)
        part.replace(self.fleet_file)

    def edit_backends(self, change: Mapping[str, Mapping[str, Any]]) -> None:
        """Change fields of backends by name, and save."""
        for entry in self.document["backends"]:
            entry.update(change.get(entry["name"], {}))
        self.write()

    def set_weights(self, **weights: float) -> None:
        self.edit_backends({name: {"weight": weight} for name, weight in weights.items()})

    def await_weights(self, **weights: float) -> None:
        """Returns once these weights are in force."""
        until(lambda: all(self.backend(name)["weight"] == weight for name, weight in weights.items()),
              f"weights {weights} in force")

    # What it says of itself

    def fleet(self) -> dict[str, Any]:
        found: dict[str, Any] = ask_json(self.admin_url, "/admin/fleet")
        return found

    def config(self) -> dict[str, Any]:
        found: dict[str, Any] = ask_json(self.admin_url, "/admin/config")
        return found

    def backend(self, name: str) -> dict[str, Any]:
        return next(entry for entry in self.fleet()["backends"] if entry["name"] == name)

    def health(self, name: str) -> str:
        return str(self.backend(name)["health"]["state"])

    def in_flight(self, name: str) -> int:
        return int(self.backend(name)["in_flight"]["requests"])

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples of that name which carry these labels."""
        page = ask(self.url, "/metrics")[1].decode()
        return sum(
            sample.value for family in text_string_to_metric_families(page) for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def await_empty_books(self) -> None:
        """Returns once the gateway holds no request, and holds nothing against any backend."""

        def is_empty() -> bool:
            fleet = self.fleet()
            entries = fleet["backends"] + fleet["retiring"]
            return fleet["in_flight"] == 0 and not any(any(entry["in_flight"].values()) for entry in entries)

        until(is_empty, "the books to be empty")


@contextlib.contextmanager
def gateway_process(folder: Path, engines: Sequence[Mapping[str, Any]], **sections: Any) -> Iterator[GatewayProcess]:
    """A gateway before these backends (entries of a fleet file); `sections` replace or add sections of the file."""
    with GatewayProcess(folder, fleet_document(engines, **sections)) as process:
        yield process


# --- load


@dataclass(frozen=True, slots=True)
class Shape:
    """What each request of a load is like."""

    prompt: str = "tell me of turbines and of the water that drives them"
    max_tokens: int = 30
    exact_tokens: bool = True
    model: str = MODEL


class OpenLoad:
    """Streamed chats at a fixed rate: request n starts when its time has come, whatever became of those before it.

    Leaving the context stops the schedule and waits for every request to end.
    """

    def __init__(self, url: str, rate_per_s: float, shape: Shape = Shape()) -> None:
        self._endpoint = Endpoint.parse(url)
        self._rate_per_s = rate_per_s
        self._shape = shape
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(max_workers=400)
        self._futures: list[Future[StreamRecord]] = []
        self._clockwork = threading.Thread(target=self._run, name="open load")

    def __enter__(self) -> Self:
        self._clockwork.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._clockwork.join()
        self._pool.shutdown()

    def _run(self) -> None:
        began_s = time.monotonic()
        number = 0
        while not self._stop.wait(max(0.0, began_s + number / self._rate_per_s - time.monotonic())):
            due_s = began_s + number / self._rate_per_s
            self._futures.append(self._pool.submit(send, self._endpoint, self._shape, due_s))
            number += 1

    @property
    def started(self) -> int:
        return len(self._futures)

    @property
    def records(self) -> list[StreamRecord]:
        """Every request that has ended. A failure is a record; anything unforeseen is raised here."""
        return [future.result() for future in list(self._futures) if future.done()]

    def since(self, at_s: float, before_s: float = float("inf")) -> list[StreamRecord]:
        """Those that ended and whose start was due in that time (monotonic seconds)."""
        return [record for record in self.records if at_s <= record.intended_at_s < before_s]

    def await_served(self, count: int, *, since_s: float = 0.0, limit_s: float = 30.0) -> None:
        """Returns once so many requests due after `since_s` have ended."""
        until(lambda: len(self.since(since_s)) >= count, f"{count} requests to end", limit_s=limit_s)


def send(endpoint: Endpoint, shape: Shape, due_s: float | None = None) -> StreamRecord:
    """One streamed chat, now."""
    due_s = time.monotonic() if due_s is None else due_s
    asked = Ask(due_s, shape.model, shape.prompt, max(1, len(shape.prompt) // 4), shape.max_tokens,
                exact_tokens=shape.exact_tokens)
    record = stream_chat(endpoint, asked, patience=PATIENCE)
    if record.failure is not None:
        # The fault, its traceback and the socket hold each other until the collector comes by. It comes here, with the
        # warning about the socket off, and not in the middle of somebody else's test.
        with _COLLECTING, warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()
    return record


def served_by(records: Sequence[StreamRecord]) -> Counter[str]:
    """How many requests each backend served."""
    return Counter(record.backend or "nobody" for record in records)


def failures(records: Sequence[StreamRecord]) -> list[StreamRecord]:
    return [record for record in records if record.failure is not None]


class RawStream:
    """A streamed chat on a bare socket: its owner decides how much to read, and when to go."""

    def __init__(self, url: str, *, path: str = "/v1/chat/completions", **members: Any) -> None:
        parts = urlsplit(url)
        self._address = (parts.hostname or "", parts.port or 80)
        prompt = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hi"}
        self.body = json.dumps({"model": MODEL, "stream": True, **prompt, **members}).encode()
        self._path = path
        self.socket = socket.create_connection(self._address, timeout=20)
        self.seen = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, share: float = 1.0) -> Self:
        """Send the head and that share of the body."""
        host = f"{self._address[0]}:{self._address[1]}"
        head = (f"POST {self._path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(self.body)}\r\n\r\n")
        self.socket.sendall(head.encode() + self.body[: int(len(self.body) * share)])
        return self

    def read_until(self, text: bytes, *, limit_s: float = 20.0) -> bytes:
        """Everything read so far, once `text` is in it."""
        while text not in self.seen:
            self.socket.settimeout(limit_s)
            data = self.socket.recv(65536)
            assert data, f"the stream ended without {text!r}: {self.seen[-300:]!r}"
            self.seen += data
        return self.seen

    def read_what_came(self, *, limit_s: float = 20.0) -> bytes:
        """Everything that has come up to now; fails where that is the end."""
        self.socket.settimeout(0.0)
        with contextlib.suppress(BlockingIOError):
            while data := self.socket.recv(65536):
                self.seen += data
            raise AssertionError("the stream ended")
        self.socket.settimeout(limit_s)
        return self.seen

    def read_to_end(self, *, limit_s: float = 20.0) -> bytes:
        """Everything until the server closes or, on a kept connection, the body's last chunk."""
        self.socket.settimeout(limit_s)
        with contextlib.suppress(ConnectionError):
            while not self.body_is_whole and (data := self.socket.recv(65536)):
                self.seen += data
        return self.seen

    @property
    def backend(self) -> str:
        """Who serves it, by the answer's head."""
        head = self.read_until(b"\r\n\r\n").partition(b"\r\n\r\n")[0].decode().lower()
        return next(line.partition(": ")[2] for line in head.split("\r\n") if line.startswith("x-headrace-backend"))

    @property
    def body_is_whole(self) -> bool:
        """Whether the body ended with its terminator, as HTTP has it."""
        return self.seen.endswith(b"\r\n0\r\n\r\n")

    @property
    def ended_well(self) -> bool:
        """Whether a client would take the answer for whole: `[DONE]`, then the body's terminator."""
        return b"data: [DONE]\n\n" in self.seen and self.body_is_whole
