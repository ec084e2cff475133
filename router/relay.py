"""Backend's answer → client. The client's status line is written once the backend has said 2xx and sent a byte of body.

Until then a failure can still be answered by another backend; afterwards it can only be told: an error event, then a
body without its terminator, so that no client takes half an answer for a whole one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import msgspec

from backends.upstream import UpstreamError, UpstreamFault, UpstreamResponse
from router.leases import Lease
from router.sse import EventTooLargeError, ModelNameEdit, StreamReader, Usage

TAIL_S = 1.0
"""How long the end of the body may take after the engine has said all it will."""
RELAYED_HEADERS = frozenset((
    b"cache-control", b"content-encoding", b"content-language", b"content-type", b"openai-model",
    b"openai-processing-ms", b"openai-version", b"retry-after", b"server-timing",
))  # fmt: skip
Headers = list[tuple[bytes, bytes]]


class Client(Protocol):
    """Where an answer goes. Writing waits while the client does not read, and the backend's socket waits with it."""

    async def start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None: ...
    async def write(self, data: bytes) -> None: ...
    async def finish(self, data: bytes = b"") -> None: ...
    async def abort(self) -> None:
        """End the body without its terminator."""


class Ending(StrEnum):
    """How a relayed answer ended."""

    COMPLETE = "complete"
    ENGINE_ERROR = "engine_error"
    TRUNCATED = "truncated"
    TIMEOUT = "timeout"


@dataclass(slots=True)
class Progress:
    """What has become of an answer so far. Filled while relaying, read by whoever settles the attempt."""

    started: bool = False
    """The client has its status line: no other backend can answer any more."""
    first_token_at_s: float | None = None
    last_token_at_s: float | None = None
    generated_tokens: int = 0
    usage: Usage | None = None
    waited_s: float = 0.0
    """Time spent waiting for the backend before the answer began."""


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Loop times by which the phases of one attempt must be over, and the longest silence between tokens."""

    first_token_s: float
    total_s: float
    inter_token_s: float


@dataclass(frozen=True, slots=True)
class Relay:
    """One answer on its way. `own_headers` is asked once, at the moment the answer begins."""

    response: UpstreamResponse
    client: Client
    lease: Lease
    deadlines: Deadlines
    progress: Progress
    clock: Callable[[], float]
    own_headers: Callable[[], Headers]

    async def whole(self, edit: ModelNameEdit, max_bytes: int) -> Ending:
        """Relay a body that is not a stream of events: read whole, then sent with its length.

        Raises:
            UpstreamError: nothing has reached the client.
        """
        began_at_s = self.clock()
        body = await self.response.read_all(self.deadlines.total_s, max_bytes)
        self.progress.waited_s += self.clock() - began_at_s
        if self.response.header(b"content-encoding") is None:
            edit.meet(body)
            body = edit.apply(body)
            self._note_usage(body)
        self.progress.last_token_at_s = self.clock()
        await self._start([*relayed_headers(self.response), (b"content-length", b"%d" % len(body))])
        await self.client.finish(body)
        return Ending.COMPLETE

    async def events(self, reader: StreamReader) -> Ending:
        """Relay a stream of events.

        Raises:
            UpstreamError: the backend failed before the client had a byte.
        """
        try:
            ending = await self._pump(reader)
        except (UpstreamError, EventTooLargeError) as error:
            if not self.progress.started:
                raise _as_upstream_error(error) from error
            timed_out = isinstance(error, UpstreamError) and error.fault is UpstreamFault.TIMEOUT
            ending = Ending.TIMEOUT if timed_out else Ending.TRUNCATED
        finally:
            self.progress.usage = reader.usage
        if ending is Ending.TRUNCATED or ending is Ending.TIMEOUT:
            await self._tell_truncated(ending)
        return ending

    async def _pump(self, reader: StreamReader) -> Ending:
        progress, deadlines = self.progress, self.deadlines
        deadline = deadlines.first_token_s
        held = b""
        while data := await self._read(reader, min(deadline, deadlines.total_s)):
            tokens, events, failed = reader.content_events, reader.data_events, reader.failed
            out = reader.feed(data)
            if reader.content_events > tokens:
                self._note_tokens(reader.content_events - tokens, self.clock())
            if not progress.started:
                # Comments alone do not commit the answer to this backend: they wait for the first event with data.
                out = held = held + out
                if reader.data_events == 0:
                    continue
                await self._start(relayed_headers(self.response))
            if reader.done and reader.complete and not reader.failed:
                return await self._finish_early(out)
            if out:
                await self.client.write(out)
            # After the write, which waits for the client: its slowness is not the backend's.
            now = self.clock()
            if now > deadlines.total_s:
                raise UpstreamError(UpstreamFault.TIMEOUT, "the answer takes longer than its total timeout")
            if reader.failed:
                deadline = deadline if failed else now + TAIL_S  # the engine has said why; the socket may stay open
            elif reader.data_events > events or not out:
                deadline = now + deadlines.inter_token_s
                if progress.first_token_at_s is None:
                    deadline = max(deadline, deadlines.first_token_s)
        return await self._end(reader, held)

    async def _read(self, reader: StreamReader, deadline_s: float) -> bytes:
        """The next bytes; none at the end of the body, or where it broke off after the engine had said all."""
        if self.progress.started:
            try:
                return await self.response.read(deadline_s)
            except UpstreamError:
                if reader.failed or reader.complete:
                    return b""
                raise
        began_at_s = self.clock()
        try:
            return await self.response.read(deadline_s)
        finally:
            self.progress.waited_s += self.clock() - began_at_s

    async def _finish_early(self, out: bytes) -> Ending:
        # Clients hang up on `[DONE]`, so it is the end for them, and the connection to the backend is worth a moment.
        await self.client.finish(out)
        deadline_s = self.clock() + TAIL_S
        try:
            while await self.response.read(deadline_s):
                pass
        except UpstreamError:
            pass  # the answer is whole; closing the response closes the socket
        return Ending.COMPLETE

    async def _end(self, reader: StreamReader, held: bytes) -> Ending:
        rest = reader.rest()
        if not (reader.complete or reader.failed):
            raise UpstreamError(UpstreamFault.TRUNCATED, "the stream ended before its finish_reason")
        if not self.progress.started:
            rest = held + rest
            await self._start(relayed_headers(self.response))
        await self.client.finish(rest)
        return Ending.ENGINE_ERROR if reader.failed else Ending.COMPLETE

    def _note_tokens(self, tokens: int, now: float) -> None:
        progress = self.progress
        if progress.first_token_at_s is None:
            progress.first_token_at_s = now
            self.lease.first_token()
        progress.last_token_at_s = now
        progress.generated_tokens += tokens
        self.lease.generated(tokens)

    async def _start(self, headers: Headers) -> None:
        if self.progress.started:
            return
        self.progress.started = True
        await self.client.start(self.response.status, [*headers, *self.own_headers()])

    async def _tell_truncated(self, ending: Ending) -> None:
        code = "upstream_timeout" if ending is Ending.TIMEOUT else "upstream_truncated"
        message = (
            "The backend fell silent in mid answer." if ending is Ending.TIMEOUT
            else "The backend ended in mid answer."
        )  # fmt: skip
        error = {"error": {"message": message, "type": "upstream_error", "param": None, "code": code}}
        # Half an event that the backend left is not passed on: no client could read it, nor the error behind it.
        await self.client.write(b"data: " + msgspec.json.encode(error) + b"\n\n")
        await self.client.abort()

    def _note_usage(self, body: bytes) -> None:
        try:
            self.progress.usage = msgspec.json.decode(body, type=_WithUsage).usage
        except (msgspec.DecodeError, RecursionError):
            return  # not ours to judge
        if self.progress.usage is not None:
            self.progress.generated_tokens = self.progress.usage.completion_tokens or 0


class _WithUsage(msgspec.Struct):
    usage: Usage | None = None


def relayed_headers(response: UpstreamResponse) -> Headers:
    """The backend's headers that are the client's business; hop-by-hop and framing headers are not among them."""
    return [(name, value) for name, value in response.headers if name in RELAYED_HEADERS]


def is_event_stream(response: UpstreamResponse) -> bool:
    """Whether the body is server-sent events in the clear."""
    media_type = (response.header(b"content-type") or b"").partition(b";")[0].strip().lower()
    return media_type == b"text/event-stream" and response.header(b"content-encoding") is None


def _as_upstream_error(error: UpstreamError | EventTooLargeError) -> UpstreamError:
    return error if isinstance(error, UpstreamError) else UpstreamError(UpstreamFault.PROTOCOL, str(error))
