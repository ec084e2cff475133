"""Server-sent events of an OpenAI-style stream: cut into events, looked at once each, edited only where documented.

Bytes come as the network cut them. `SseCutter` gives back whole events with every byte they had (comments, CRLF and
multi-line data included). `StreamReader` looks at each event with one compiled expression and parses JSON only where
that finds something. The two documented edits are the model's name and the usage chunk that the client did not ask for.
"""

import re

import msgspec

MAX_EVENT_BYTES = 16 * 1024 * 1024
# A blank line ends an event: LF LF, LF CR LF (the end of a CRLF pair), or CR CR. WHATWG HTML §9.2.5.
_BLANK_LINE = re.compile(rb"\n\r?\n|\r\r")
_NOTABLE = re.compile(
    rb'"usage"\s*:\s*\{|"finish_reason"\s*:\s*"|^data:\s*\[DONE\]|^(?:event:\s*error\b|data:\s*\{\s*"error"\s*:)',
    re.MULTILINE,
)
_CONTENT = re.compile(rb'"(?:content|text|reasoning_content|reasoning|refusal|arguments)"\s*:\s*"[^"]')
_DATA_LINES = re.compile(rb"^data:[ ]?([^\r\n]*)", re.MULTILINE)


class EventTooLargeError(ValueError):
    """One event is over `MAX_EVENT_BYTES`."""


class SseCutter:
    """Byte stream → events. Linear in the bytes, however they are cut."""

    __slots__ = ("_buffer", "_searched")

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._searched = 0

    def feed(self, data: bytes) -> list[bytes]:
        """Whole events, each with the blank line that ends it.

        Raises:
            EventTooLargeError: an event does not end within `MAX_EVENT_BYTES`.
        """
        buffer = self._buffer
        if not buffer and data.endswith(b"\n\n") and _BLANK_LINE.search(data).end() == len(data):  # type: ignore[union-attr]
            return [data]  # the common case: one event a read
        buffer += data
        events: list[bytes] = []
        start = 0
        search_from = max(0, self._searched - 2)
        while (match := _BLANK_LINE.search(buffer, search_from)) is not None:
            events.append(bytes(buffer[start : match.end()]))
            start = search_from = match.end()
        if start:
            del buffer[:start]
        self._searched = len(buffer)
        if self._searched > MAX_EVENT_BYTES:
            raise EventTooLargeError(f"an event is over {MAX_EVENT_BYTES} bytes")
        return events

    def rest(self) -> bytes:
        """Bytes of an event that has not ended."""
        return bytes(self._buffer)


class Usage(msgspec.Struct, frozen=True):
    """Token counts as an engine reports them."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _UsageChunk(msgspec.Struct):
    choices: list[msgspec.Raw] | None = None
    usage: Usage | None = None


class ModelNameEdit:
    """Puts the client's name for the model where the engine wrote its own."""

    __slots__ = ("_pattern", "_replacement")

    def __init__(self, served_model_name: str, client_model: str) -> None:
        # An unescaped `"model":` can only be a member's name: inside a JSON string its quotes would be escaped.
        served = re.escape(msgspec.json.encode(served_model_name))
        self._pattern = re.compile(rb'("model"\s*:\s*)' + served)
        replacement = msgspec.json.encode(client_model).replace(b"\\", b"\\\\")
        self._replacement = rb"\g<1>" + replacement

    def apply(self, data: bytes) -> bytes:
        return self._pattern.sub(self._replacement, data)


class StreamReader:
    """Follows one stream of events: first token, tokens, finish, usage, end. Returns what the client is to get."""

    __slots__ = ("_cutter", "_edit", "_hide_usage", "aborted", "content_events", "done", "failed", "finished", "usage")

    def __init__(self, edit: ModelNameEdit | None, *, hide_usage: bool) -> None:
        self._cutter = SseCutter()
        self._edit = edit
        self._hide_usage = hide_usage
        self.content_events = 0
        """Events that carried generated text; about one per token."""
        self.finished = False
        """A `finish_reason` was seen."""
        self.done = False
        """`[DONE]` was seen."""
        self.failed = False
        """The engine reported an error inside the stream."""
        self.aborted = False
        """The engine gave the request up: vLLM ends a stream it is made to drop with `finish_reason: "abort"`."""
        self.usage: Usage | None = None

    @property
    def complete(self) -> bool:
        """The engine said in some way that the answer is whole."""
        return self.done or self.finished

    def feed(self, data: bytes) -> bytes:
        """Bytes for the client; may be empty while an event is not whole.

        Raises:
            EventTooLargeError: see `SseCutter.feed`.
        """
        return b"".join([self._event(event) for event in self._cutter.feed(data)])

    def rest(self) -> bytes:
        """What follows the last whole event when the body ends: relayed, for nothing may be lost."""
        rest = self._cutter.rest()
        return self._event(rest) if rest else b""

    def _event(self, event: bytes) -> bytes:
        if _CONTENT.search(event) is not None:
            self.content_events += 1
        if _NOTABLE.search(event) is not None and self._note(event):
            return b""
        return event if self._edit is None else self._edit.apply(event)

    def _note(self, event: bytes) -> bool:
        """Record what is notable; true where the event is to be hidden."""
        hide = False
        for match in _NOTABLE.finditer(event):
            what = match.group()
            if what.startswith(b'"finish_reason"'):
                self.finished = True
                self.aborted = self.aborted or event.startswith(b'abort"', match.end())
            elif what.startswith(b'"usage"'):
                hide = self._note_usage(event)
            elif what.endswith(b"[DONE]"):
                self.done = True
            else:
                self.failed = True
        return hide

    def _note_usage(self, event: bytes) -> bool:
        payload = b"\n".join(_DATA_LINES.findall(event))
        try:
            chunk = msgspec.json.decode(payload, type=_UsageChunk)
        except (msgspec.DecodeError, RecursionError):
            return False  # not ours to judge: the client gets it as it is
        if chunk.usage is not None:
            self.usage = chunk.usage
        return self._hide_usage and chunk.usage is not None and not chunk.choices
