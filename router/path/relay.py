"""Backend's answer → client. The client's status line is written once the backend has said 2xx and sent a byte of body.

Until then a failure can still be answered by another backend; afterwards it can only be told: an error event, then a
body without its terminator, so that no client takes half an answer for a whole one.
"""

import asyncio
import math
from collections.abc import Callable
from enum import StrEnum
from typing import Protocol

import msgspec

from backends.upstream import UpstreamError, UpstreamFault
from router.fleet.feedback import Feedback
from router.fleet.leases import Lease
from router.request.exchange import Exchange
from router.request.intake import PhaseTimeouts
from router.wire.sse import EventTooLargeError, StreamReader

TAIL_S = 1.0
"""How long the end of the body may take after the engine has said all it will."""
HEARTBEAT = b": keep-alive\n\n"
"""A comment: no client's parser makes an event of it (WHATWG HTML §9.2.6)."""
UNREAD_S = 10.0
"""How long past its end an answer waits for a client that does not read; the connection gives it up sooner."""


class Client(Protocol):
    """Where an answer goes. Nothing here waits: a client that reads too slowly pauses the source of its answer."""

    def start(self, status: int, lines: bytes, *, sized: bool) -> None:
        """Its head: `lines` are whole header lines, with `content-length` among them where the body is `sized`."""

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


class Source(Protocol):
    """The backend's side of an answer, and whoever is told how it ended."""

    def start_answer(self) -> None:
        """Write the client's status line."""

    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def set_deadline(self, deadline_s: float) -> None: ...
    def failed(self, error: UpstreamError) -> None:
        """The answer broke off before the client had a byte."""

    def ended(self, ending: Ending) -> None:
        """The client has its answer, or as much of one as there will be."""


class EventRelay:
    """A stream of events passing through: called by the backend's socket, writes to the client's.

    With `PhaseTimeouts.heartbeat_s`, a comment is sent after so much silence before the first token, so that nothing
    between here and the client takes the connection for dead. The first one commits the answer to this backend: the
    status is its 2xx from then on, no other backend can take over, and a failure can only be told inside the stream.
    """

    __slots__ = (
        "_client", "_clock", "_exchange", "_feedback", "_first_token_by_s", "_hear_at_s", "_heartbeat", "_held",
        "_lease", "_over", "_paused", "_reader", "_source", "_timeouts", "_told", "_wrote_at_s",
    )  # fmt: skip

    def __init__(
        self,
        source: Source,
        client: Client,
        exchange: Exchange,
        lease: Lease,
        feedback: Feedback,
        reader: StreamReader,
        timeouts: PhaseTimeouts,
        clock: Callable[[], float],
    ) -> None:
        now = clock()
        self._source = source
        self._client = client
        self._exchange = exchange
        self._lease = lease
        self._feedback = feedback
        self._hear_at_s = -math.inf
        """When the learner wants to hear of this stream again: of its first token, and of its pace in turn."""
        self._reader = reader
        self._timeouts = timeouts
        self._clock = clock
        self._first_token_by_s = min(now + timeouts.first_token_s, exchange.deadline_s)
        self._held = b""
        """Comments that came before the first event with data: alone they do not commit the answer to this backend."""
        self._paused = False
        self._told = False
        """The client has its end; what the backend still sends is waited for, since its connection is worth it."""
        self._over = False
        self._wrote_at_s = now
        self._heartbeat: asyncio.TimerHandle | None = None
        every_s = timeouts.heartbeat_s
        if every_s is not None:
            self._heartbeat = asyncio.get_running_loop().call_later(every_s, self._beat, every_s)
        source.set_deadline(self._first_token_by_s)

    def body(self, data: bytes) -> None:
        """The backend has sent a piece of the body."""
        if self._told:
            return
        exchange, reader = self._exchange, self._reader
        now = self._clock()
        tokens, events, failed = reader.content_events, reader.data_events, reader.failed
        try:
            out = reader.feed(data)
        except EventTooLargeError as error:
            self.fail(UpstreamError(UpstreamFault.PROTOCOL, str(error)))
            return
        if reader.content_events > tokens:
            tokens = reader.content_events - tokens
            exchange.generated(tokens, now)
            self._lease.generated(tokens)
            if now >= self._hear_at_s:
                self._hear_at_s = self._feedback.heard(exchange.generated_tokens, now)
        if not exchange.started:
            out = self._held = self._held + out
            if reader.data_events == 0:
                return
            self._held = b""
            self._begin()
        if reader.done and reader.complete and not reader.failed:
            # Clients hang up on `[DONE]`, so it is the end for them.
            self._client.finish(out)
            self._told = True
            self._source.set_deadline(now + TAIL_S)
            return
        if out:
            self._client.write(out)
            self._wrote_at_s = now
        if now > exchange.deadline_s:
            self.fail(UpstreamError(UpstreamFault.TIMEOUT, "the answer takes longer than its total timeout"))
        elif reader.failed:
            if not failed:  # the engine has said why; its socket may stay open for ever
                self._expect_by(now + TAIL_S)
        elif reader.data_events > events or not out:
            deadline_s = now + self._timeouts.inter_token_s
            if exchange.first_token_at_s is None:
                deadline_s = max(deadline_s, self._first_token_by_s)
            self._expect_by(deadline_s)

    def end(self) -> None:
        """The body has ended."""
        reader = self._reader
        if self._told:
            self._end(Ending.COMPLETE)
            return
        rest = reader.rest()
        if not (reader.complete or reader.failed):
            self.fail(UpstreamError(UpstreamFault.TRUNCATED, "the stream ended before its finish_reason"))
            return
        if not self._exchange.started:
            rest = self._held + rest
            self._begin()
        self._client.finish(rest)
        self._end(Ending.ENGINE_ERROR if reader.failed else Ending.COMPLETE)

    def fail(self, error: UpstreamError) -> None:
        """The backend broke off; after it had said all, that is no loss."""
        reader = self._reader
        if self._over:
            return
        if self._told:
            self._end(Ending.COMPLETE)
        elif not self._exchange.started:
            self.close()
            self._source.failed(error)
        elif reader.failed or reader.complete:
            self.end()
        else:
            ending = Ending.TIMEOUT if error.fault is UpstreamFault.TIMEOUT else Ending.TRUNCATED
            # Half an event that the backend left is not passed on: no client could read it, nor the error behind it.
            self._client.write(TRUNCATED_EVENTS[ending])
            self._client.abort()
            self._end(ending)

    def close(self) -> None:
        """Let go of the client: the answer has ended in whatever way."""
        self._over = True
        if self._heartbeat is not None:
            self._heartbeat.cancel()
            self._heartbeat = None
        if self._exchange.started:  # else the client is not ours: another backend may be about to answer it
            self._client.feed_from(None)
            self._exchange.usage = self._reader.usage

    @property
    def is_good(self) -> bool:
        """An event has come, and none that is an error."""
        return self._reader.data_events > 0 and not self._reader.failed

    # --- Pausable ---------------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """The client does not read; that is no fault of the backend, whose silence is now ours."""
        self._paused = True
        self._feedback.held_up(self._clock())
        self._source.pause()
        self._source.set_deadline(self._exchange.deadline_s + UNREAD_S)

    def resume(self) -> None:
        """The client reads again."""
        self._paused = False
        self._source.set_deadline(self._clock() + self._timeouts.inter_token_s)
        self._source.resume()

    def _begin(self) -> None:
        """The client hears of this backend from now on, and of no other."""
        self._source.start_answer()
        self._client.feed_from(self)

    def _expect_by(self, deadline_s: float) -> None:
        if not self._paused:
            self._source.set_deadline(min(deadline_s, self._exchange.deadline_s))

    def _end(self, ending: Ending) -> None:
        self.close()
        self._source.ended(ending)

    # --- heartbeat --------------------------------------------------------------------------------------------------

    def _beat(self, every_s: float) -> None:
        """One timer for the whole prefill: it looks at the last write when it fires."""
        if self._told or self._exchange.first_token_at_s is not None:
            return
        now = self._clock()
        due_s = self._wrote_at_s + every_s - now
        if due_s <= 0.0:
            due_s = every_s
            if not self._paused:  # a client that does not read has bytes enough on their way to it
                self._send_heartbeat(now)
        self._heartbeat = asyncio.get_running_loop().call_later(due_s, self._beat, every_s)

    def _send_heartbeat(self, now: float) -> None:
        # What has been relayed so far ends with a whole event, so a comment may stand here.
        out = HEARTBEAT
        if not self._exchange.started:
            out, self._held = self._held + HEARTBEAT, b""
            self._begin()
        self._client.write(out)
        self._wrote_at_s = now


def _truncated_event(code: str, message: str) -> bytes:
    error = {"error": {"message": message, "type": "upstream_error", "param": None, "code": code}}
    return b"data: " + msgspec.json.encode(error) + b"\n\n"


TRUNCATED_EVENTS = {
    Ending.TIMEOUT: _truncated_event("upstream_timeout", "The backend fell silent in mid answer."),
    Ending.TRUNCATED: _truncated_event("upstream_truncated", "The backend ended in mid answer."),
}
