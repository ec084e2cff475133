"""Figure G: whatever bytes come, no traceback, no 5xx of the gateway's own, nobody waits, and the next is served."""

import asyncio
import json
import random
import string
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from loadtest.reliability.backend import ActingBackend
from loadtest.reliability.client import Answer, Gateway, backend_entry, chat, exchange, gateway, ready, request_bytes
from loadtest.reliability.measured import Measured, Size, quantile

INPUTS = {Size.CI: 2_000, Size.LONG: 100_000}
BATCH = 100
AT_ONCE = 20
HUNG_S = 5.0
LAG_BOUND_S = 0.05
ODD = (b"\0", b"\r", b"\n", b"\r\n", b"\r\n\r\n", b" ", b"\t", b":", b",", b"\xff", b"\xed\xa0\x80", b"\x7f", b"0",
       b"9" * 30, b"-", b"%00", b"{", b"}", b"[", b'"', b"\\", b"chunked", b"Content-Length: 5\r\n",
       b"Transfer-Encoding: chunked\r\n", b"Host: x\r\n", b"HTTP/1.1", b"GET / HTTP/1.1\r\n\r\n")  # fmt: skip
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/models", "/v1/models/x", "/health", "/")
MEMBERS = ("model", "messages", "prompt", "input", "stream", "stream_options", "max_tokens", "max_completion_tokens",
           "n", "temperature", "tools", "user", "metadata", "act")  # fmt: skip


def any_value(dice: random.Random, depth: int = 0) -> Any:
    """A JSON value of any kind."""
    kind = dice.randrange(9 if depth < 4 else 6)
    if kind == 0:
        return dice.choice([None, True, False])
    if kind == 1:
        return dice.choice([0, -1, 1, 2**31, 2**63, 2**64, 10**30, -(10**400), 0.5, 1e308, -1e-320])
    if kind in (2, 3):
        return "".join(dice.choices([*string.printable, "é", "水", "🌊", "\0", "\u2028"], k=dice.randrange(12)))
    if kind in (4, 5):
        return dice.choice(["m", "served", "true", "", "user", "stream", "json_object", "auto"])
    if kind == 6:
        return [any_value(dice, depth + 1) for _ in range(dice.randrange(5))]
    if kind == 7:
        return {dice.choice(MEMBERS): any_value(dice, depth + 1) for _ in range(dice.randrange(5))}
    value: Any = dice.choice([[], {}])
    for _ in range(dice.choice([3, 50, 2000])):
        value = [value] if dice.random() < 0.9 else {"a": value}
    return value


def json_body(dice: random.Random) -> bytes:
    """A request body, right but for some of its members or some of its bytes."""
    document = chat(stream=dice.random() < 0.5, prompt="x", input="x")
    for _ in range(dice.randrange(4)):
        document[dice.choice(MEMBERS)] = any_value(dice)
    document.pop("act", None)
    try:
        raw = json.dumps(document, ensure_ascii=dice.random() < 0.5).encode("utf-8", "surrogatepass")
    except RecursionError:
        raw = b'{"model":"m","messages":' + b"[" * 5000 + b"]" * 5000 + b"}"
    if dice.random() < 0.1:
        raw = raw[:-1] + b',"' + dice.choice(MEMBERS).encode() + b'":NaN}'
    return mangled(dice, raw) if dice.random() < 0.3 else raw


def mangled(dice: random.Random, data: bytes) -> bytes:
    """A few bytes lost, doubled, changed or put in."""
    for _ in range(dice.randint(1, 4)):
        at = dice.randrange(len(data) + 1)
        how = dice.randrange(4)
        if how == 0:
            data = data[:at] + data[at + dice.randint(1, 9) :]
        elif how == 1:
            data = data[:at] + data[at : at + dice.randint(1, 40)] + data[at:]
        elif how == 2:
            data = data[:at] + bytes([dice.randrange(256)]) + data[at + 1 :]
        else:
            data = data[:at] + dice.choice(ODD) + data[at:]
    return data


def any_request(dice: random.Random) -> bytes:
    """One connection's bytes."""
    body, path = json_body(dice), dice.choice(PATHS).encode()
    if dice.random() < 0.3:
        size = dice.randint(1, len(body) + 1)
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part)
                          for start in range(0, len(body), size) if (part := body[start : start + size]))
        data = (b"POST %b HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n%b0\r\n\r\n"
                % (path, chunks))
    else:
        data = request_bytes(body).replace(PATHS[0].encode(), path, 1)
    return mangled(dice, data) if dice.random() < 0.6 else data


async def figure_g(size: Size) -> list[Measured]:
    """Send generated inputs in batches, each followed by a probe, while another connection feels the loop's lag."""
    dice, number = random.Random(1), INPUTS[size]
    with TemporaryDirectory() as folder:
        async with ActingBackend().serving() as backend:
            with gateway(Path(folder), [backend_entry("b0", backend.url)]) as started:
                await ready(started)
                return await _measure(started, backend, dice, number)


async def _measure(started: Gateway, backend: ActingBackend, dice: random.Random, number: int) -> list[Measured]:
    statuses: dict[int, int] = {}
    hung = probes = 0
    lags_s: list[float] = []
    lag = asyncio.create_task(_feel_lag(started, lags_s))
    turns = asyncio.Semaphore(AT_ONCE)

    async def one(data: bytes) -> Answer:
        async with turns:
            return await _half_closed(started, data)

    for _ in range(0, number, BATCH):
        for answer in await asyncio.gather(*[one(any_request(dice)) for _ in range(BATCH)]):
            hung += answer.silent
            statuses[answer.status] = statuses.get(answer.status, 0) + 1
        probes += await started.probes(1)
    lag.cancel()
    rest = await started.at_rest()
    attempts = await started.counter("headrace_attempts_total")
    log = started.log.read_text("utf-8", "replace")
    own_5xx = sum(count for status, count in statuses.items() if status >= 500)
    return [
        Measured("G", "inputs", number),
        *[Measured("G", f"answered {status or 'by closing'}", count) for status, count in sorted(statuses.items())],
        Measured("G", "5xx of the gateway's own", own_5xx, bound=0, relation="=="),
        Measured("G", "tracebacks in its log", log.count("Traceback"), bound=0, relation="=="),
        Measured("G", "without an end within 5 s", hung, bound=0, relation="=="),
        Measured("G", "probes served", probes, bound=number // BATCH, relation="=="),
        Measured("G", "requests seen by the backend", sum(backend.seen.values()), bound=attempts, relation="=="),
        Measured("G", "another client waits for /liveness, p99", quantile(lags_s, 0.99) * 1e3, "ms", LAG_BOUND_S * 1e3),
        Measured("G", "at rest afterwards", rest, bound=1, relation="=="),
    ]


async def _half_closed(to: Gateway, data: bytes) -> Answer:
    """An exchange whose client says after its bytes that it has no more: half a request must not be waited for."""
    reader, writer = await asyncio.open_connection(*to.address)
    parts: list[bytes] = []
    silent = False
    try:
        async with asyncio.timeout(HUNG_S):
            writer.write(data)
            first = asyncio.create_task(reader.read(65536))
            await asyncio.wait([first], timeout=0.3)
            if not first.done():  # it may rightly wait for the rest
                writer.write_eof()
            while part := await first:
                parts.append(part)
                first = asyncio.create_task(reader.read(65536))
                await asyncio.wait([first], timeout=0.3)
                if not first.done() and writer.can_write_eof():
                    writer.write_eof()
    except TimeoutError:
        silent = True
    except (ConnectionError, OSError):
        pass
    finally:
        writer.transport.abort()
    return Answer(b"".join(parts), 0.0, silent)


async def _feel_lag(to: Gateway, lags_s: list[float]) -> None:
    loop = asyncio.get_running_loop()
    while True:
        began_s = loop.time()
        await exchange(to, b"GET /liveness HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n")
        lags_s.append(loop.time() - began_s)
        await asyncio.sleep(0.01)
