"""Figure C: a client that leaves takes its backend along, soon, in every phase, and nobody is blamed for it."""

import asyncio
import contextlib
import random
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from loadtest.reliability.backend import ActingBackend
from loadtest.reliability.client import Gateway, backend_entry, chat, connected, gateway, ready, request_bytes
from loadtest.reliability.measured import Measured, Size, quantile

ABORTS = {Size.CI: 2_000, Size.LONG: 20_000}
AT_ONCE = 25
UNREACHABLE = "unreachable"
AFTERS = ("nothing", "head", "a token", "the finish", "half a 503")
PHASES = (*AFTERS, "own body", "connecting")
"""What the backend has said when the client leaves; the client's own body half sent; no backend reached."""
SIGNS = {("a token", True): b"data:", ("the finish", True): b"finish_reason"}
"""Where the client can see the phase. Elsewhere it waits a moment."""


@contextlib.contextmanager
def unreachable() -> Iterator[str]:
    """The URL of a listener whose queue is full."""
    with socket.socket() as listener, contextlib.ExitStack() as fillers:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            filler = fillers.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


async def figure_c(size: Size) -> list[Measured]:
    """Abort many requests; see when the backend sees it."""
    dice, number = random.Random(1), ABORTS[size]
    with TemporaryDirectory() as folder, unreachable() as url:
        async with ActingBackend().serving() as backend:
            entries = [backend_entry("b0", backend.url), backend_entry("far", url, model=UNREACHABLE)]
            rare = {"interval_s": 300.0, "timeout_s": 30.0}
            with gateway(Path(folder), entries, poll=rare, timeouts={"connect_s": 30.0}) as started:
                return await _measure(started, backend, dice, number)


async def _measure(started: Gateway, backend: ActingBackend, dice: random.Random, number: int) -> list[Measured]:
    await ready(started, "b0")
    left_at_s: dict[str, float] = {}
    turns = iter(range(number))

    async def leavers() -> None:
        for turn in turns:
            phase, stream = PHASES[turn % len(PHASES)], dice.random() < 0.5
            await _leave(started, f"abort-{turn}", phase, stream, dice, left_at_s)

    files = started.open_files()
    await asyncio.gather(*[leavers() for _ in range(AT_ONCE)])
    rest = await started.at_rest()
    await asyncio.sleep(0.2)
    waits_s = [backend.left_at_s[name] - at_s for name, at_s in left_at_s.items() if name in backend.left_at_s]
    reached = sum(name in backend.seen for name in left_at_s)
    served = await started.probes(100)
    closed = await started.counter("headrace_requests_total", outcome="client_closed")
    blamed = sum(entry["failed_requests"] for entry in (await started.fleet())["backends"])
    return [
        Measured("C", "clients that left", number),
        Measured("C", "counted as client_closed", closed, bound=number, relation="=="),
        Measured("C", "backend sees it, p50", quantile(waits_s, 0.5) * 1e3, "ms"),
        Measured("C", "backend sees it, p99", quantile(waits_s, 0.99) * 1e3, "ms", 250),
        Measured("C", "backend sees it, longest", max(waits_s) * 1e3, "ms", 1000),
        Measured("C", "reached a backend that never saw it", reached - len(waits_s), bound=0, relation="=="),
        Measured("C", "booked against a backend", blamed, bound=0, relation="=="),
        Measured("C", "at rest afterwards", rest, bound=1, relation="=="),
        Measured("C", "of 100 probes served", served, bound=100, relation="=="),
        Measured("C", "files more than before", started.open_files() - files, bound=5),
    ]


async def _leave(
    to: Gateway, name: str, phase: str, stream: bool, dice: random.Random, left_at_s: dict[str, float]
) -> None:
    body: dict[str, Any] = chat(stream=stream, act={"kind": "hang", "after": phase})
    if phase == "connecting":
        body["model"] = UNREACHABLE
    data = request_bytes(body, request_id=name)
    async with connected(to) as (reader, writer):
        writer.write(data[:-5] if phase == "own body" else data)
        sign = SIGNS.get((phase, stream))
        if sign is not None:
            await reader.readuntil(sign)
        else:
            await asyncio.sleep(dice.uniform(0.005, 0.06))
        left_at_s[name] = time.monotonic()
