"""Backend's answer → client. The client's status line is written once the backend has said 2xx and sent a byte of body.

Until then a failure can still be answered by another backend; afterwards it can only be told: an error event, then a
body without its terminator, so that no client takes half an answer for a whole one.
"""

import asyncio
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
HEARTBEAT = b": keep-alive\n\n"
"""A comment: no client's parser makes an event of it (WHATWG HTML §9.2.6)."""
UNREAD_S = 10.0
"""How long past its end an answer waits for a client that does not read; the connection gives it up sooner."""
RELAYED_HEADERS = frozenset((
    b"cache-control", b"content-encoding", b"content-language", b"content-type", b"openai-model",
    b"openai-processing-ms", b"openai-version", b"retry-after", b"server-timing",
))  # fmt: skip
Headers = list[tuple[bytes, bytes]]


class Client(Protocol):
    """Where an answer goes. Nothing here waits: a client that reads too slowly pauses the source of its answer."""

    def start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None: ...
    def write(self, data: bytes) -> None: ...
    def finish(self, data: bytes = b"") -> None: ...
    def abort(self) -> None:
        """End the body without its terminator."""

    def feed_from(self, source: "Pausable | None") -> None:
        """Name what has to pause while the client does not read."""


class Pausable(Protocol):
    """What fills a client's socket."""

    def pause(self) -> None: ...
    def resume(self) -> None: ...


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
    heartbeat_s: float | None = None
    """Silence before a stream's first token after which a comment is sent, so that nothing between here and the client
    takes the connection for dead; `None` for never. The first one commits the answer to this backend: the status is its
    2xx from then on, no other backend can take over, and a failure can only be told inside the stream."""

    async def whole(self, edit: ModelNameEdit, max_bytes: int) -> Ending:
        """Relay a body that is not a stream of events: read whole, then sent with its length.

        Raises:
            UpstreamError: nothing has reached the client.
        """
        began_at_s = self.clock()
        body = await self.response.read_all(self.deadlines.total_s, max_bytes)
        now = self.clock()
        self.progress.waited_s += now - began_at_s
        if self.response.header(b"content-encoding") is None:
            edit.meet(body)
            body = edit.apply(body)
            self._note_usage(body)
        self.progress.last_token_at_s = now
        self.start([*relayed_headers(self.response), (b"content-length", b"%d" % len(body))])
        self.client.finish(body)
        return Ending.COMPLETE

    async def events(self, reader: StreamReader) -> Ending:
        """Relay a stream of events.

        Raises:
            UpstreamError: the backend failed before the client had a byte.
        """
        flow = _Flow(self, reader)
        self.client.feed_from(flow)
        try:
            self.response.follow(flow, min(self.deadlines.first_token_s, self.deadlines.total_s))
            ending = await flow.ended
        except UpstreamError as error:
            if not self.progress.started:
                raise
            ending = Ending.TIMEOUT if error.fault is UpstreamFault.TIMEOUT else Ending.TRUNCATED
            self._tell_truncated(ending)
        finally:
            flow.stop_beating()
            self.client.feed_from(None)
            self.progress.usage = reader.usage
        return ending

    def start(self, headers: Headers) -> None:
        """Write the client's status line, once."""
        if self.progress.started:
            return
        self.progress.started = True
        self.client.start(self.response.status, [*headers, *self.own_headers()])

    def note_tokens(self, tokens: int, now: float) -> None:
        """The engine has generated."""
        progress = self.progress
        if progress.first_token_at_s is None:
            progress.first_token_at_s = now
            self.lease.first_token()
        progress.last_token_at_s = now
        progress.generated_tokens += tokens
        self.lease.generated(tokens)

    def _tell_truncated(self, ending: Ending) -> None:
        code = "upstream_timeout" if ending is Ending.TIMEOUT else "upstream_truncated"
        message = (
            "The backend fell silent in mid answer." if ending is Ending.TIMEOUT
            else "The backend ended in mid answer."
        )  # fmt: skip
        error = {"error": {"message": message, "type": "upstream_error", "param": None, "code": code}}
        # Half an event that the backend left is not passed on: no client could read it, nor the error behind it.
        self.client.write(b"data: " + msgspec.json.encode(error) + b"\n\n")
        self.client.abort()

    def _note_usage(self, body: bytes) -> None:
        try:
            self.progress.usage = msgspec.json.decode(body, type=_WithUsage).usage
        except (msgspec.DecodeError, RecursionError):
            return  # not ours to judge
        if self.progress.usage is not None:
            self.progress.generated_tokens = self.progress.usage.completion_tokens or 0


class _Flow:
    """A stream of events passing through: called by the backend's socket, writes to the client's."""

    __slots__ = (
        "_began_at_s", "_heartbeat", "_held", "_loop", "_paused", "_reader", "_relay", "_told", "_wrote_at_s", "ended",
    )  # fmt: skip

    def __init__(self, relay: Relay, reader: StreamReader) -> None:
        self._relay = relay
        self._reader = reader
        self._held = b""
        """Comments that came before the first event with data: alone they do not commit the answer to this backend."""
        self._began_at_s = relay.clock()
        self._paused = False
        self._told = False
        """The client has its end; what the backend still sends is waited for, since its connection is worth it."""
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[Ending] = self._loop.create_future()
        self._wrote_at_s = self._began_at_s
        self._heartbeat: asyncio.TimerHandle | None = None
        if relay.heartbeat_s is not None:
            self._heartbeat = self._loop.call_later(relay.heartbeat_s, self._beat, relay.heartbeat_s)

    # --- upstream.Sink ----------------------------------------------------------------------------------------------

    def body(self, data: bytes) -> None:
        if self._told:
            return
        relay, reader = self._relay, self._reader
        progress = relay.progress
        now = relay.clock()
        tokens, events, failed = reader.content_events, reader.data_events, reader.failed
        try:
            out = reader.feed(data)
        except EventTooLargeError as error:
            self.fail(UpstreamError(UpstreamFault.PROTOCOL, str(error)))
            return
        if reader.content_events > tokens:
            relay.note_tokens(reader.content_events - tokens, now)
        if not progress.started:
            out = self._held = self._held + out
            if reader.data_events == 0:
                return
            self._start(now)
        if reader.done and reader.complete and not reader.failed:
            # Clients hang up on `[DONE]`, so it is the end for them.
            relay.client.finish(out)
            self._told = True
            relay.response.set_deadline(now + TAIL_S)
            return
        if out:
            relay.client.write(out)
            self._wrote_at_s = now
        if now > relay.deadlines.total_s:
            self.fail(UpstreamError(UpstreamFault.TIMEOUT, "the answer takes longer than its total timeout"))
        elif reader.failed:
            if not failed:  # the engine has said why; its socket may stay open for ever
                self._expect_by(now + TAIL_S)
        elif reader.data_events > events or not out:
            deadline_s = now + relay.deadlines.inter_token_s
            if progress.first_token_at_s is None:
                deadline_s = max(deadline_s, relay.deadlines.first_token_s)
            self._expect_by(deadline_s)

    def end(self) -> None:
        """The body has ended."""
        relay, reader = self._relay, self._reader
        if self._told:
            self._end(Ending.COMPLETE)
            return
        rest = reader.rest()
        if not (reader.complete or reader.failed):
            self.fail(UpstreamError(UpstreamFault.TRUNCATED, "the stream ended before its finish_reason"))
            return
        if not relay.progress.started:
            rest = self._held + rest
            self._start(relay.clock())
        relay.client.finish(rest)
        self._end(Ending.ENGINE_ERROR if reader.failed else Ending.COMPLETE)

    def fail(self, error: UpstreamError) -> None:
        """The backend broke off; after it had said all, that is no loss."""
        reader = self._reader
        if self._told:
            self._end(Ending.COMPLETE)
        elif self._relay.progress.started and (reader.failed or reader.complete):
            self.end()
        elif not self.ended.done():
            self.ended.set_exception(error)

    # --- Pausable ---------------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """The client does not read; that is no fault of the backend, whose silence is now ours."""
        self._paused = True
        response = self._relay.response
        response.pause()
        response.set_deadline(self._relay.deadlines.total_s + UNREAD_S)

    def resume(self) -> None:
        """The client reads again."""
        self._paused = False
        response = self._relay.response
        response.set_deadline(self._relay.clock() + self._relay.deadlines.inter_token_s)
        response.resume()

    def _expect_by(self, deadline_s: float) -> None:
        if not self._paused:
            self._relay.response.set_deadline(min(deadline_s, self._relay.deadlines.total_s))

    def _start(self, now: float) -> None:
        self._relay.progress.waited_s += now - self._began_at_s
        self._relay.start(relayed_headers(self._relay.response))

    # --- heartbeat --------------------------------------------------------------------------------------------------

    def stop_beating(self) -> None:
        """The answer has ended."""
        if self._heartbeat is not None:
            self._heartbeat.cancel()
            self._heartbeat = None

    def _beat(self, every_s: float) -> None:
        """One timer for the whole prefill: it looks at the last write when it fires."""
        if self._told or self.ended.done() or self._relay.progress.first_token_at_s is not None:
            return
        now = self._relay.clock()
        due_s = self._wrote_at_s + every_s - now
        if due_s <= 0.0:
            due_s = every_s
            if not self._paused:  # a client that does not read has bytes enough on their way to it
                self._send_heartbeat(now)
        self._heartbeat = self._loop.call_later(due_s, self._beat, every_s)

    def _send_heartbeat(self, now: float) -> None:
        # What has been relayed so far ends with a whole event, so a comment may stand here.
        out = HEARTBEAT
        if not self._relay.progress.started:
            out = self._held + HEARTBEAT
            self._start(now)
        self._relay.client.write(out)
        self._wrote_at_s = now

    def _end(self, ending: Ending) -> None:
        if not self.ended.done():
            self.ended.set_result(ending)


class _WithUsage(msgspec.Struct):
    usage: Usage | None = None


def relayed_headers(response: UpstreamResponse) -> Headers:
    """The backend's headers that are the client's business; hop-by-hop and framing headers are not among them."""
    return [(name, value) for name, value in response.headers if name in RELAYED_HEADERS]


def is_event_stream(response: UpstreamResponse) -> bool:
    """Whether the body is server-sent events in the clear."""
    media_type = (response.header(b"content-type") or b"").partition(b";")[0].strip().lower()
    return media_type == b"text/event-stream" and response.header(b"content-encoding") is None
