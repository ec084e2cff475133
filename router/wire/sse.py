"""Server-sent events of an OpenAI-style stream: cut into events, looked at once each, edited only where documented.

Bytes come as the network cut them. `SseCutter` gives back whole events with every byte they had (comments, CRLF and
multi-line data included). `StreamReader` looks at each event with a few compiled expressions and parses JSON only where
these find something. The two documented edits are the model's name and the usage chunk that the client did not ask for.
"""

import re
from functools import lru_cache

import msgspec

from router.wire.answer_members import Usage, read_model, read_usage_chunk

MAX_EVENT_BYTES = 16 * 1024 * 1024
# A blank line ends an event: LF LF, LF CR LF (the end of a CRLF pair), or CR CR. WHATWG HTML §9.2.5.
_BLANK_LINE = re.compile(rb"\n\r?\n|\r\r")
# Three looks with a literal start each, at a tenth of the price of one expression for all.
_SUSPECT = re.compile(rb'"(?:usage"\s*:\s*\{|finish_reason"\s*:\s*"|error"\s*:\s*[{"]|object"\s*:\s*"error)')
# Errors come as `"error": {…}` (OpenAI, vLLM, SGLang), as `"error": "…"` (TGI) or as `"object": "error"` (older vLLM).
_NOTABLE = re.compile(
    rb'"usage"\s*:\s*\{|"finish_reason"\s*:\s*"|(?:^|\r)data:\s*\[DONE\]'
    rb'|(?:^|\r)event:\s*error\b|"error"\s*:\s*(?:\{|"[^"])|"object"\s*:\s*"error"',
    re.MULTILINE,
)
_CONTENT = re.compile(rb'"(?:content|text|reasoning_content|reasoning|refusal|arguments)"\s*:\s*"[^"]')
_DATA = re.compile(rb"(?:^|\r)data", re.MULTILINE)
_DATA_LINES = re.compile(rb"(?:^|\r)data:[ ]?([^\r\n]*)", re.MULTILINE)


class EventTooLargeError(ValueError):
    """One event is over `MAX_EVENT_BYTES`."""


def _end_of_event(data: bytes | bytearray, start: int) -> int:
    """Where the first event that ends after `start` ends; 0 where none does.

    Looking for bytes is a hundred times as fast as the expression, which only carriage returns need.
    """
    if data.find(b"\r", start) < 0:
        found = data.find(b"\n\n", start)
        return found + 2 if found >= 0 else 0
    match = _BLANK_LINE.search(data, start)
    return match.end() if match is not None else 0


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
        if not buffer and data.endswith(b"\n\n") and _end_of_event(data, 0) == len(data):
            return [data]  # the common case: one event a read
        buffer += data
        events: list[bytes] = []
        start = 0
        search_from = max(0, self._searched - 2)
        while (end := _end_of_event(buffer, search_from)) > 0:
            events.append(bytes(buffer[start:end]))
            start = search_from = end
        if start:
            del buffer[:start]
        self._searched = len(buffer)
        if self._searched > MAX_EVENT_BYTES:
            raise EventTooLargeError(f"an event is over {MAX_EVENT_BYTES} bytes")
        return events

    def rest(self) -> bytes:
        """Bytes of an event that has not ended."""
        return bytes(self._buffer)


@lru_cache(maxsize=256)
def _encoded(name: str) -> bytes:
    return msgspec.json.encode(name)


@lru_cache(maxsize=256)
def _pattern_for(foreign: tuple[bytes, ...]) -> re.Pattern[bytes]:
    # An unescaped `"model":` can only be a member's name: inside a JSON string its quotes would be escaped.
    return re.compile(rb'("model"\s*:\s*)(?:' + b"|".join(map(re.escape, foreign)) + b")")


class ModelNameEdit:
    """Puts the client's name for the model where the engine wrote its own."""

    __slots__ = ("_client_model", "_foreign", "_pattern", "_served")

    def __init__(self, served_model_name: str, client_model: str) -> None:
        self._served = _encoded(served_model_name)
        self._client_model = _encoded(client_model)
        self._foreign: tuple[bytes, ...] = ()
        """JSON spellings that are to be replaced."""
        self._pattern: re.Pattern[bytes] | None = None
        self.meet_name(self._served)

    def meet(self, document: bytes) -> None:
        """Learn what the engine calls itself, from one JSON document: often a file's path, whatever was asked for."""
        try:
            self.meet_name(bytes(read_model(document).model))
        except (msgspec.DecodeError, RecursionError):
            return  # an error page, `[DONE]`, half a document

    def meet_name(self, spelled: bytes) -> None:
        """Learn what the engine calls itself; `spelled` is the value of its member `model`, empty where it has none."""
        if spelled != self._client_model and spelled not in self._foreign and spelled.startswith(b'"'):
            self._foreign = (*self._foreign, spelled)
            self._pattern = _pattern_for(self._foreign)

    def apply(self, data: bytes) -> bytes:
        """`data` with the client's name in each member `model` that holds one of the engine's names."""
        if self._pattern is None:
            return data
        return self._pattern.sub(rb"\g<1>" + self._client_model.replace(b"\\", b"\\\\"), data)

    def apply_to_error(self, body: bytes) -> bytes:
        """As `apply`, and where the text of an error quotes the engine's name (`The model "x" does not exist`)."""
        self.meet(body)
        served, asked = self._served[1:-1], self._client_model[1:-1]
        for quote in (b"'", b"`", b'\\"'):
            body = body.replace(quote + served + quote, quote + asked + quote)
        return self.apply(body)


class StreamReader:
    """Follows one stream of events: first token, tokens, finish, usage, end. Returns what the client is to get."""

    __slots__ = (
        "_choices", "_cutter", "_edit", "_hide_usage", "aborted", "content_events", "data_events", "done", "failed",
        "finished_choices", "usage",
    )  # fmt: skip

    def __init__(self, edit: ModelNameEdit, *, hide_usage: bool, choices: int = 1) -> None:
        self._cutter = SseCutter()
        self._edit = edit
        self._hide_usage = hide_usage
        self._choices = choices
        self.data_events = 0
        """Events that carried anything; comments, `retry:` and `id:` alone are signs of life, not of progress."""
        self.content_events = 0
        """Events that carried generated text; about one per token."""
        self.finished_choices = 0
        """Each `finish_reason` that was seen."""
        self.done = False
        """`[DONE]` was seen."""
        self.failed = False
        """The engine reported an error inside the stream."""
        self.aborted = False
        """The engine gave the request up: vLLM ends a stream it is made to drop with `finish_reason: "abort"`, one that
        it failed with `"error"`."""
        self.usage: Usage | None = None

    @property
    def complete(self) -> bool:
        """The engine said in some way that the answer is whole."""
        return (self.done or self.finished_choices >= self._choices) and not self.aborted

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
        elif _DATA.search(event) is None:
            return event
        self.data_events += 1
        if self.data_events == 1:
            self._edit.meet(_payload(event))
        suspect = _SUSPECT.search(event) is not None or b"[DONE]" in event or b"event:" in event
        if suspect and self._note(event):
            return b""
        return self._edit.apply(event)

    def _note(self, event: bytes) -> bool:
        """Record what is notable; true where the event is to be hidden."""
        has_usage = has_error = False
        for match in _NOTABLE.finditer(event):
            what = match.group()
            if what.startswith(b'"finish_reason"'):
                self.finished_choices += 1
                self.aborted = self.aborted or event.startswith((b'abort"', b'error"'), match.end())
            elif what.startswith(b'"usage"'):
                has_usage = True
            elif what.endswith(b"[DONE]"):
                self.done = True
            else:
                has_error = self.failed = True
        return has_usage and self._note_usage(event) and not has_error

    def _note_usage(self, event: bytes) -> bool:
        try:
            chunk = read_usage_chunk(_payload(event))
        except (msgspec.DecodeError, RecursionError):
            return False  # not ours to judge: the client gets it as it is
        if chunk.usage is not None:
            self.usage = chunk.usage
        return self._hide_usage and chunk.usage is not None and not chunk.choices


def _payload(event: bytes) -> bytes:
    return b"\n".join(_DATA_LINES.findall(event))
