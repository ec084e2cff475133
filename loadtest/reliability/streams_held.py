"""Figure J: many streams held open for long; every event arrives once, whole, in order and soon."""

import asyncio
import json
import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

from loadtest.reliability.backend import ActingBackend
from loadtest.reliability.client import backend_entry, chat, gateway, ready, request_bytes
from loadtest.reliability.measured import Measured, Size, quantile

STREAMS = {Size.CI: 200, Size.LONG: 1_000}
SECONDS = {Size.CI: 4.0, Size.LONG: 600.0}
DIRECT_S = {Size.CI: 2.0, Size.LONG: 20.0}
EVENTS_PER_S = 10.0


@dataclass
class Seen:
    """What the clients of many streams saw."""

    delays_s: list[float] = field(default_factory=list)
    wrong: int = 0
    """Events out of place, twice, or not whole."""
    whole: int = 0
    """Streams that ended as they should."""


async def figure_j(size: Size) -> list[Measured]:
    """The same streams straight from the backend, then through the gateway."""
    number = STREAMS[size]
    with TemporaryDirectory() as folder:
        async with ActingBackend().serving() as backend:
            direct = await _hold(_address(backend.url), number, DIRECT_S[size])
            with gateway(Path(folder), [backend_entry("b0", backend.url)], limits={"max_in_flight": 4096},
                         timeouts={"total_s": 3600.0}) as started:
                await ready(started)
                held = await _hold(started.address, number, SECONDS[size])
                rss_mb, rest = started.rss_mb(), await started.at_rest()
    added_ms = (quantile(held.delays_s, 0.99) - quantile(direct.delays_s, 0.99)) * 1e3
    return [
        Measured("J", f"streams of {EVENTS_PER_S:g} events a second held for {SECONDS[size]:g} s", number),
        Measured("J", "events", len(held.delays_s)),
        Measured("J", "events lost", number * round(SECONDS[size] * EVENTS_PER_S) - len(held.delays_s), bound=0,
                 relation="=="),
        Measured("J", "events twice, out of place or not whole", held.wrong, bound=0, relation="=="),
        Measured("J", "streams ended whole", held.whole, bound=number, relation="=="),
        Measured("J", "delay of an event direct, p99", quantile(direct.delays_s, 0.99) * 1e3, "ms"),
        Measured("J", "delay of an event through the gateway, p99", quantile(held.delays_s, 0.99) * 1e3, "ms"),
        Measured("J", "added, p99", added_ms, "ms", 20),
        Measured("J", "memory at the end", rss_mb, "MB"),
        Measured("J", "at rest afterwards", rest, bound=1, relation="=="),
    ]


def _address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or 80


async def _hold(address: tuple[str, int], number: int, seconds: float) -> Seen:
    seen = Seen()
    act = {"kind": "stream", "events": round(seconds * EVENTS_PER_S), "every_s": 1 / EVENTS_PER_S}
    data = request_bytes(chat(act=act))
    # Spread over one period, or every stream would have its events at the same moment.
    await asyncio.gather(*[_one(address, data, count / number / EVENTS_PER_S, seen) for count in range(number)])
    return seen


async def _one(address: tuple[str, int], data: bytes, wait_s: float, seen: Seen) -> None:
    await asyncio.sleep(wait_s)
    reader, writer = await asyncio.open_connection(*address)
    try:
        writer.write(data)
        await reader.readuntil(b"\r\n\r\n")
        expected = 0
        while line := await reader.readline():
            if not line.startswith(b"data: {"):
                if line.startswith(b"data: [DONE]"):
                    seen.whole += 1
                    return
                continue
            choice = json.loads(line[6:])["choices"][0]
            if choice["finish_reason"] is None:
                _check(choice["delta"]["content"], expected, seen)
                expected += 1
    except (ConnectionError, asyncio.IncompleteReadError):
        pass  # the stream is missing among the whole ones
    finally:
        writer.transport.abort()


def _check(content: str, expected: int, seen: Seen) -> None:
    text, _, crc = content.rpartition(" ")
    number, _, sent_at_s = text.partition(" ")
    seen.delays_s.append(time.monotonic() - float(sent_at_s))
    if int(number) != expected or zlib.crc32(text.encode()) != int(crc):
        seen.wrong += 1
