"""A backend whose every byte a test decides, on a real socket; it notes what was asked of it and when it was left."""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from loadtest.loopback_server import LoopbackServer

SSE_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


@dataclass
class Received:
    """One inference request as it came in."""

    path: str
    headers: dict[str, str]
    body: bytes
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the router has closed its side."""

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    async def write(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def chunk(self, data: bytes) -> None:
        """Write one HTTP chunk."""
        await self.write(b"%x\r\n%s\r\n" % (len(data), data))

    async def events(self, *payloads: Any, done: bool = True, end: bool = True) -> None:
        """Write a whole stream: head, one event a payload, `[DONE]`, end of body."""
        await self.write(SSE_HEAD)
        for payload in payloads:
            await self.chunk(event(payload))
        if done:
            await self.chunk(b"data: [DONE]\n\n")
        if end:
            await self.write(b"0\r\n\r\n")

    async def answer(self, status: int, body: Any, **headers: str) -> None:
        """Write a whole answer with its length."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        fields = {"content-type": "application/json", "content-length": str(len(raw))}
        fields.update({name.replace("_", "-"): value for name, value in headers.items()})
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        await self.write(f"HTTP/1.1 {status} Scripted\r\n{head}\r\n".encode() + raw)

    async def until_gone(self) -> None:
        """Wait for the router to close the connection."""
        await self.gone.wait()

    def reset(self) -> None:
        """Close with a TCP reset rather than an end."""
        self.writer.transport.abort()


Script = Callable[[Received], Awaitable[None]]


def event(payload: Any) -> bytes:
    return b"data: " + json.dumps(payload, ensure_ascii=False).encode() + b"\n\n"


def delta(text: str, *, model: str = "served", finish: str | None = None, **extra: Any) -> dict[str, Any]:
    """One chunk of a chat stream."""
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    return {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": model, "choices": [choice], **extra}


def completion(text: str = "hello", *, model: str = "served") -> dict[str, Any]:
    """A whole chat answer."""
    message = {"role": "assistant", "content": text}
    return {
        "id": "c1", "object": "chat.completion", "created": 1, "model": model,
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 7, "completion_tokens": 1, "total_tokens": 8},
    }  # fmt: skip


async def answer_hello(request: Received) -> None:
    """A polite engine."""
    if request.json.get("stream"):
        await request.events(delta("hel"), delta("lo", finish="stop"))
    else:
        await request.answer(200, completion())


class ScriptedBackend(LoopbackServer):
    """Plays `script` for each POST; answers health checks by itself while `healthy`."""

    def __init__(self, script: Script = answer_hello, *, served_model_name: str = "served") -> None:
        super().__init__()
        self.script = script
        self.served_model_name = served_model_name
        self.healthy = True
        self.requests: list[Received] = []

    async def serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while not writer.is_closing():
            await self._exchange(reader, writer)

    def end_connection(self, writer: asyncio.StreamWriter) -> None:
        writer.close()  # what the script wrote last still goes out

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        request_line, *lines = head.split("\r\n")
        method, path, _ = request_line.split(" ", 2)
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines if line)}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        request = Received(path, headers, body, reader, writer)
        if method != "POST":
            await self._answer_probe(request)
            return
        self.requests.append(request)
        # Nothing more is expected on the connection before the answer ends, so a read ends when the router leaves.
        watch = asyncio.create_task(self._watch(request))
        try:
            await self.script(request)
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)

    async def _answer_probe(self, request: Received) -> None:
        if request.path == "/v1/models":
            await request.answer(200, {"object": "list", "data": [{"id": self.served_model_name}]})
        elif request.path == "/health":
            await request.answer(200 if self.healthy else 503, {})
        else:
            await request.answer(404, {})

    async def _watch(self, request: Received) -> None:
        with contextlib.suppress(ConnectionError):
            if await request.reader.read(1) != b"":
                raise AssertionError("the router wrote into an exchange that had not ended")
        request.gone.set()
