"""A client that is a bare connection, and a gateway that is a process of its own."""

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

from loadtest.stack import StackError, child, free_ports, tail

MODEL = "m"
CHAT = "/v1/chat/completions"
START_S = 30.0


def chat(*, stream: bool = True, **members: Any) -> dict[str, Any]:
    """A request body."""
    return {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": stream, **members}


def request_bytes(body: Mapping[str, Any] | bytes, *, request_id: str = "", close: bool = True) -> bytes:
    """A POST as bytes."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = f"content-type: application/json\r\ncontent-length: {len(raw)}\r\n"
    headers += f"x-request-id: {request_id}\r\n" if request_id else ""
    headers += "connection: close\r\n" if close else ""
    return f"POST {CHAT} HTTP/1.1\r\nhost: h\r\n{headers}\r\n".encode() + raw


@dataclass(frozen=True, slots=True)
class Gateway:
    """A running gateway process."""

    url: str
    admin_url: str
    log: Path
    process: "subprocess.Popen[bytes]"

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        return parts.hostname or "", parts.port or 80

    def rss_mb(self) -> float:
        """Resident memory."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * 4096 / 2**20

    def open_files(self) -> int:
        """Descriptors it holds."""
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    async def fleet(self) -> Any:
        """What its admin listener says of the fleet."""
        return json.loads(await asyncio.to_thread(_get, f"{self.admin_url}/admin/fleet"))

    async def counter(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples with these labels."""
        page = (await asyncio.to_thread(_get, f"{self.url}/metrics")).decode()
        return sum(
            sample.value for family in text_string_to_metric_families(page) for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    async def at_rest(self, timeout_s: float = 10.0) -> bool:
        """Whether it comes to hold no request within that time."""
        end_s = time.monotonic() + timeout_s
        while time.monotonic() < end_s:
            fleet = await self.fleet()
            if fleet["in_flight"] == 0 and not any(
                any(entry["in_flight"].values()) for entry in (*fleet["backends"], *fleet["retiring"])
            ):
                return True
            await asyncio.sleep(0.05)
        return False

    async def probes(self, number: int) -> int:
        """How many of so many plain requests are served."""
        return sum([(await ask(self, chat())).ended == "whole" for _ in range(number)])


def _get(url: str) -> bytes:
    with urlopen(url, timeout=30) as answer:  # noqa: S310 our own loopback address
        body: bytes = answer.read()
        return body


def backend_entry(name: str, url: str, **members: Any) -> dict[str, Any]:
    """A backend of the fleet file."""
    return {"name": name, "url": url, "engine": "openai", "model": MODEL, "served_model_name": "served",
            "card": {"type": "none"}, "slots": 4096, **members}


@contextmanager
def gateway(folder: Path, backends: Sequence[Mapping[str, Any]], **sections: Any) -> Iterator[Gateway]:
    """A gateway process before these backends.

    Raises:
        StackError: it did not come up in 30 s; the message ends with its log.
    """
    port, admin_port = free_ports(2)
    document = {
        "version": 1, "listen": {"port": port}, "admin": {"port": admin_port},
        "models": [{"name": model} for model in dict.fromkeys(entry["model"] for entry in backends)],
        "policy": {"name": "round_robin"}, "backends": list(backends), "poll": {"interval_s": 1.0, "timeout_s": 1.0},
        **sections,
    }  # fmt: skip
    fleet_file, log = folder / "fleet.yaml", folder / "gateway.log"
    fleet_file.write_text(json.dumps(document, indent=1))  # JSON is YAML
    with child([sys.executable, "-m", "headrace", "serve", "--config", str(fleet_file)], log) as process:
        yield Gateway(f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin_port}", log, process)


async def ready(started: Gateway, *backends: str) -> None:
    """Wait until it takes requests and knows these backends' health; all by default.

    The backends are on this process's loop, so nothing here may block it.

    Raises:
        StackError: it does not within 30 s.
    """
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s and started.process.poll() is None:
        with contextlib.suppress(OSError):
            fleet = await started.fleet()
            unknown = {entry["name"] for entry in fleet["backends"] if entry["health"]["state"] == "unknown"}
            if not (unknown & set(backends) if backends else unknown):
                return
        await asyncio.sleep(0.05)
    raise StackError(f"the gateway did not come up within {START_S:.0f} s:\n{tail(started.log)}")


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back on one connection."""

    raw: bytes
    took_s: float
    silent: bool = False
    """The time ran out."""

    @property
    def status(self) -> int:
        """0 where no answer came."""
        return int(self.raw[9:12]) if self.raw.startswith(b"HTTP/1.1 ") else 0

    @property
    def head(self) -> bytes:
        return self.raw.partition(b"\r\n\r\n")[0].lower()

    @property
    def body(self) -> bytes:
        """With the framing of its chunks taken off."""
        body = self.raw.partition(b"\r\n\r\n")[2]
        if b"transfer-encoding: chunked" not in self.head:
            return body
        parts = []
        while (size := int(body.partition(b"\r\n")[0] or b"0", 16)) > 0:
            start = body.index(b"\r\n") + 2
            parts.append(body[start : start + size])
            body = body[start + size + 2 :]
        return b"".join(parts)

    @property
    def ended(self) -> str:
        """`whole`, `error` (a status), `told` (an error event, and then cut), `cut`, or `none`."""
        if self.silent or self.status == 0:
            return "none"
        if self.status != 200:
            return "error"
        if b"transfer-encoding: chunked" not in self.head or self.raw.endswith(b"0\r\n\r\n"):
            return "whole"
        return "told" if b'data: {"error"' in self.raw else "cut"


@contextlib.asynccontextmanager
async def connected(to: Gateway) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection that is dropped at the end."""
    reader, writer = await asyncio.open_connection(*to.address)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def exchange(to: Gateway, data: bytes, *, timeout_s: float = 30.0) -> Answer:
    """Send bytes, read to the end."""
    began_s, parts = time.monotonic(), []
    silent = False
    try:
        async with asyncio.timeout(timeout_s), connected(to) as (reader, writer):
            writer.write(data)
            with contextlib.suppress(ConnectionError):
                while part := await reader.read(65536):
                    parts.append(part)
    except TimeoutError:
        silent = True
    except ConnectionError:
        pass
    return Answer(b"".join(parts), time.monotonic() - began_s, silent)


async def ask(to: Gateway, body: Mapping[str, Any], *, request_id: str = "", timeout_s: float = 30.0) -> Answer:
    """One request on its own connection."""
    return await exchange(to, request_bytes(body, request_id=request_id), timeout_s=timeout_s)
