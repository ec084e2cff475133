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

ERROR_TAIL_S = 1.0
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

    async def whole(self, edit: ModelNameEdit | None, max_bytes: int) -> Ending:
        """Relay a body that is not a stream of events: read whole, then sent with its length.

        Raises:
            UpstreamError: nothing has reached the client.
        """
        began_at_s = self.clock()
        body = await self.response.read_all(self.deadlines.total_s, max_bytes)
        self.progress.waited_s += self.clock() - began_at_s
        if self.response.header(b"content-encoding") is None:
            if edit is not None:
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
        self.progress.usage = reader.usage
        if ending is Ending.COMPLETE:
            await self._start(relayed_headers(self.response))
            await self.client.finish(reader.rest())
        elif ending is Ending.ENGINE_ERROR:
            await self.client.finish(reader.rest())
        else:
            await self._tell_truncated(reader.rest(), ending)
        return ending

    async def _pump(self, reader: StreamReader) -> Ending:
        progress, deadlines = self.progress, self.deadlines
        while True:
            data = await self._read(reader)
            if not data:
                if reader.complete and not reader.aborted:
                    return Ending.COMPLETE
                if reader.failed:
                    return Ending.ENGINE_ERROR
                raise UpstreamError(UpstreamFault.TRUNCATED, "the stream ended before its finish_reason")
            before = reader.content_events
            out = reader.feed(data)
            if reader.content_events > before:
                self._note_tokens(reader.content_events - before)
            if out:
                if not progress.started:
                    await self._start(relayed_headers(self.response))
                await self.client.write(out)
            if self.clock() > deadlines.total_s:
                raise UpstreamError(UpstreamFault.TIMEOUT, "the answer takes longer than its total timeout")

    async def _read(self, reader: StreamReader) -> bytes:
        deadlines = self.deadlines
        now = self.clock()
        if reader.failed:  # the engine has said why; the socket may stay open for ever
            deadline = now + ERROR_TAIL_S
        elif self.progress.first_token_at_s is None:
            deadline = deadlines.first_token_s
        else:
            deadline = now + deadlines.inter_token_s
        try:
            data = await self.response.read(min(deadline, deadlines.total_s))
        except UpstreamError:
            if reader.failed:
                return b""
            raise
        finally:
            if not self.progress.started:
                self.progress.waited_s += self.clock() - now
        return data

    def _note_tokens(self, tokens: int) -> None:
        progress = self.progress
        now = self.clock()
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

    async def _tell_truncated(self, rest: bytes, ending: Ending) -> None:
        code = "upstream_timeout" if ending is Ending.TIMEOUT else "upstream_truncated"
        message = (
            "The backend fell silent in mid answer." if ending is Ending.TIMEOUT
            else "The backend ended in mid answer."
        )  # fmt: skip
        error = {"error": {"message": message, "type": "upstream_error", "param": None, "code": code}}
        # A blank line first: the rest may be half an event, and the error must not become part of it.
        gap = b"\n\n" if rest else b""
        await self.client.write(rest + gap + b"data: " + msgspec.json.encode(error) + b"\n\n")
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
