"""Figure H: slow and greedy clients have their deadlines, and the good ones do not feel them."""

import asyncio
import contextlib
import resource
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from loadtest.reliability.backend import ActingBackend
from loadtest.reliability.client import CHAT, Gateway, ask, backend_entry, chat, exchange, gateway, ready, request_bytes
from loadtest.reliability.measured import Measured, Size, quantile

SLOW = {Size.CI: 400, Size.LONG: 2_000}
GREEDY = {Size.CI: 40, Size.LONG: 200}
GOOD = {Size.CI: 300, Size.LONG: 3_000}
HEAD_S = {Size.CI: 8.0, Size.LONG: 20.0}
BODY_S = {Size.CI: 9.0, Size.LONG: 30.0}
"""The deadlines that the gateway is given: longer than the good traffic takes, and short enough to be waited for."""
STREAM_BYTES = 20 * 2**20
HEAD = f"POST {CHAT} HTTP/1.1\r\nhost: h\r\n".encode()
KINDS = {
    "silent": (b"", b"", HEAD_S),
    "a header byte a second": (HEAD + b"x: ", b"y", HEAD_S),
    "a body byte a second": (HEAD + b"content-length: 100000\r\n\r\n", b" ", BODY_S),
    "a chunk a second": (HEAD + b"transfer-encoding: chunked\r\n\r\n", b"1\r\n \r\n", BODY_S),
}
"""What it starts with, what it says each second, and when it must be cut off."""


def timeouts(size: Size) -> dict[str, float]:
    """Of the gateway."""
    return {"receive_head_s": HEAD_S[size], "receive_body_s": BODY_S[size], "total_s": BODY_S[size] + 3.0}


@dataclass
class SlowPeers:
    """Many slow senders in one task: plain sockets, looked after once a second."""

    address: tuple[str, int]
    size: Size
    open: list[tuple[socket.socket, bytes, float, float]] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)
    """By how much each deadline was overrun."""

    def connect(self, number: int) -> None:
        """Open so many, of all kinds in turn."""
        kinds = list(KINDS.values())
        for count in range(number):
            start, piece, deadline_s = kinds[count % len(kinds)]
            own = socket.create_connection(self.address)
            own.setblocking(False)
            with contextlib.suppress(OSError):
                own.send(start)
            self.open.append((own, piece, time.monotonic(), deadline_s[self.size]))

    async def run(self) -> None:
        """Until all of them have been cut off."""
        while self.open:
            held = []
            for entry in self.open:
                own, piece, began_s, deadline_s = entry
                if self._is_open(own, piece):
                    held.append(entry)
                else:
                    own.close()
                    self.late_s.append(time.monotonic() - began_s - deadline_s)
                if len(held) % 100 == 0:
                    await asyncio.sleep(0)
            self.open = held
            await asyncio.sleep(1.0)

    @staticmethod
    def _is_open(own: socket.socket, piece: bytes) -> bool:
        try:
            with contextlib.suppress(BlockingIOError):
                while own.recv(4096):
                    pass
                return False
            if piece:
                own.send(piece)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True


async def figure_h(size: Size) -> list[Measured]:
    """Good traffic alone, and among slow senders and clients that do not read; then a flood with few files."""
    with TemporaryDirectory() as folder:
        async with ActingBackend().serving() as backend:
            with gateway(Path(folder), [backend_entry("b0", backend.url)], timeouts=timeouts(size)) as started:
                await ready(started)
                return [*await _pressed(started, size), *await _few_files(Path(folder), backend, size)]


async def _pressed(started: Gateway, size: Size) -> list[Measured]:
    await _good(started, 100)
    calm_s = await _good(started, GOOD[size])
    files, rss_mb = started.open_files(), started.rss_mb()
    peers = SlowPeers(started.address, size)
    await asyncio.to_thread(peers.connect, SLOW[size])
    running = asyncio.create_task(peers.run())
    greedy = [_greedy(started) for _ in range(GREEDY[size])]
    await asyncio.sleep(1.0)
    pressed_s = await _good(started, GOOD[size])
    held_up_s = await _empty_lists(started)
    grown_mb = started.rss_mb() - rss_mb
    held = len(peers.open)
    await running
    for own in greedy:
        own.close()
    rest = await started.at_rest()
    await asyncio.sleep(0.5)
    added_ms = (quantile(pressed_s, 0.99) - quantile(calm_s, 0.99)) * 1e3
    return [
        Measured("H", "slow senders, four kinds", SLOW[size]),
        Measured("H", "of these open while the good traffic ran", held, bound=SLOW[size], relation="=="),
        Measured("H", "clients that read nothing of a 20 MB stream", GREEDY[size]),
        Measured("H", "good traffic alone, p99", quantile(calm_s, 0.99) * 1e3, "ms"),
        Measured("H", "good traffic among them, p99", quantile(pressed_s, 0.99) * 1e3, "ms"),
        Measured("H", "added p99", added_ms, "ms", 20),
        Measured("H", "longest wait of another while 12 MB of empty lists pass", held_up_s * 1e3, "ms", 100),
        Measured("H", "a deadline overrun, longest (looked at once a second)", max(peers.late_s), "s", 2.0),
        Measured("H", "cut off too early, longest", max(0.0, -min(peers.late_s)), "s", 0.5),
        Measured("H", "memory grown", grown_mb, "MB", 200),
        Measured("H", "at rest afterwards", rest, bound=1, relation="=="),
        Measured("H", "files more than before", started.open_files() - files, bound=5),
    ]


async def _few_files(folder: Path, backend: ActingBackend, size: Size) -> list[Measured]:
    """A flood of 1,500 connections at a gateway that may open 1,024 files."""
    with contextlib.ExitStack() as running:
        with _file_limit(1024):
            entry = backend_entry("b0", backend.url)
            started = running.enter_context(gateway(folder, [entry], timeouts=timeouts(size)))
        await ready(started)
        flood = SlowPeers(started.address, size)
        await asyncio.to_thread(flood.connect, 1_500)
        during = await exchange(started, request_bytes(chat()))
        for own, *_ in flood.open:
            own.close()
        await asyncio.sleep(0.5)
        served = await started.probes(20)
        return [
            Measured("H", "1,500 connections at 1,024 files: a newcomer gets (0 for a closed door)", during.status),
            Measured("H", "of 20 probes afterwards served", served, bound=20, relation="=="),
        ]


@contextlib.contextmanager
def _file_limit(soft: int) -> Iterator[None]:
    """For children that start inside; this process keeps what it has open."""
    before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, hard))


async def _good(to: Gateway, number: int) -> list[float]:
    """Seconds that each of so many short streams took, four at a time."""
    took_s: list[float] = []

    async def one_after_another() -> None:
        for _ in range(number // 4):
            answer = await ask(to, chat())
            if answer.ended != "whole":
                raise AssertionError(f"good traffic was answered {answer.raw[:200]!r}")
            took_s.append(answer.took_s)

    await asyncio.gather(*[one_after_another() for _ in range(4)])
    return took_s


def _greedy(to: Gateway) -> socket.socket:
    """Asks for a long stream and never reads."""
    own = socket.socket()
    own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    own.connect(to.address)
    piece = 64_000
    own.sendall(request_bytes(chat(act={"kind": "stream", "events": STREAM_BYTES // piece, "bytes": piece})))
    return own


async def _empty_lists(to: Gateway) -> float:
    """The longest that another client waited for an answer meanwhile, in seconds."""
    body = b'{"model":"m","messages":[' + b"[]," * (4 * 2**20) + b"[]]}"
    data, done, waits_s = request_bytes(body), threading.Event(), [0.0]

    def ask_all_the_time() -> None:  # in a thread: this loop carries the twelve megabytes
        while not done.is_set():
            began_s = time.monotonic()
            with socket.create_connection(to.address) as own:
                own.sendall(b"GET /liveness HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n")
                while own.recv(4096):
                    pass
            waits_s.append(time.monotonic() - began_s)

    asking = asyncio.create_task(asyncio.to_thread(ask_all_the_time))
    for _ in range(3):
        answer = await exchange(to, data)
        if answer.ended != "whole":
            raise AssertionError(f"twelve megabytes were answered {answer.raw[:200]!r}")
    done.set()
    await asking
    return max(waits_s)
