"""A backend that does what each request asks of it, and keeps count.

Gateways pass on members that they do not know, so a request carries its own stage direction in `act`:
`{"act": {"kind": "stream", "events": 5, "every_s": 0.01}}`. Requests are known by the id that the gateway passes on.
"""

import asyncio
import contextlib
import json
import time
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any

from loadtest.loopback_server import LoopbackServer

SSE_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
SERVED = "served"
LONGEST_PARSED = 2**20
DONE = b"data: [DONE]\n\n"


def delta(text: str, *, finish: str | None = None) -> bytes:
    """One event of a chat stream."""
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    document = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": SERVED, "choices": [choice]}
    return b"data: " + json.dumps(document).encode() + b"\n\n"


WHOLE = json.dumps({
    "id": "c", "object": "chat.completion", "created": 1, "model": SERVED,
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4},
}).encode()  # fmt: skip
FINISH = delta("", finish="stop")


def sealed(number: int) -> str:
    """A text that tells its place, the moment it was made, and whether it is still whole."""
    text = f"{number} {time.monotonic():.6f}"
    return f"{text} {zlib.crc32(text.encode())}"


class ActingBackend(LoopbackServer):
    """Serves on loopback while inside `serving`."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()
        """Requests by id."""
        self.left_at_s: dict[str, float] = {}
        """When the gateway was seen to have left in mid exchange, by request id. Monotonic seconds."""

    async def serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while not writer.is_closing():
            await self._exchange(reader, writer)

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        headers = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if line)
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        if not head.startswith("POST "):
            model_list = b'{"object":"list","data":[{"id":"%b"}]}' % SERVED.encode()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(model_list), model_list))
            return
        request_id = headers.get("x-request-id", "")
        self.seen[request_id] += 1
        # Parsing megabytes would hold up everybody else on this loop, and be taken for the gateway's doing.
        asked = json.loads(body) if len(body) < LONGEST_PARSED else {}
        act = asked.get("act") if isinstance(asked.get("act"), dict) else {}
        watch = asyncio.create_task(self._watch(reader, request_id))
        try:
            await self._act(writer, act or {}, stream=bool(asked.get("stream")), left=watch)
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)

    async def _watch(self, reader: asyncio.StreamReader, request_id: str) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.read(1)
        self.left_at_s[request_id] = time.monotonic()

    async def _act(
        self, writer: asyncio.StreamWriter, act: dict[str, Any], *, stream: bool, left: "asyncio.Task[None]"
    ) -> None:
        kind = act.get("kind", "answer")
        if kind == "status":
            retry_after = f"retry-after: {act['retry_after']}\r\n" if "retry_after" in act else ""
            body = b'{"error":{"message":"asked for"}}'
            writer.write(
                f"HTTP/1.1 {act['status']} X\r\ncontent-length: {len(body)}\r\n{retry_after}\r\n".encode() + body)
        elif kind == "hang":
            writer.write(PAUSES[act["after"]](stream))
            await left
        elif kind == "bytes":  # as they are, in the pieces that are asked for
            data, start = act["text"].encode(), 0
            writer.write(SSE_HEAD)
            for cut in (*act["cuts"], len(data)):
                writer.write(b"%x\r\n%b\r\n" % (cut - start, data[start:cut]))
                await writer.drain()
                await asyncio.sleep(0)
                start = cut
            writer.write(b"0\r\n\r\n")
        elif stream:
            await self._stream(writer, act)
        else:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
                len(WHOLE), WHOLE))
        await writer.drain()

    async def _stream(self, writer: asyncio.StreamWriter, act: dict[str, Any]) -> None:
        writer.write(SSE_HEAD)
        every_s, size = float(act.get("every_s", 0.0)), int(act.get("bytes", 0))
        padding = _chunk(delta("x" * size)) if size else b""
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        for number in range(int(act.get("events", 2))):
            writer.write(padding or _chunk(delta(sealed(number))))
            await writer.drain()
            # A drain does not wait while the socket takes all, and the clients who measure are on this loop as well.
            due_s += every_s
            await asyncio.sleep(max(0.0, due_s - loop.time()) if every_s else 0.0)
        writer.write(_chunk(FINISH + DONE) + b"0\r\n\r\n")


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


JSON_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(WHOLE)
PAUSES: dict[str, Callable[[bool], bytes]] = {
    "nothing": lambda _: b"",
    "head": lambda stream: SSE_HEAD if stream else JSON_HEAD,
    "a token": lambda stream: SSE_HEAD + _chunk(delta("a")) if stream else JSON_HEAD + WHOLE[:20],
    "the finish": lambda stream: SSE_HEAD + _chunk(delta("a") + FINISH) if stream else JSON_HEAD + WHOLE[:-1],
    "half a 503": lambda _: b"HTTP/1.1 503 Busy\r\ncontent-length: 9\r\n\r\n{",
}
"""What a request that is to hang gets first."""
