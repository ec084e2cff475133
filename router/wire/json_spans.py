"""Where the top-level members of a JSON object stand in its bytes.

The gateway relays bodies as the client wrote them (number spelling, key order, escapes) and changes one or two members
in place. So it needs positions, which no JSON library gives. msgspec validates the whole body and hands out each
top-level value as raw bytes without building it; a walk over the keys alone then finds where each value stands. The
cost in Python follows the number of top-level members, whatever the size of the prompt.
"""

import re

import msgspec

_OPEN = re.compile(rb"[ \t\r\n]*\{[ \t\r\n]*")
_KEY = re.compile(rb'("[^"\\]*(?:\\.[^"\\]*)*")[ \t\r\n]*:[ \t\r\n]*', re.DOTALL)
_NEXT = re.compile(rb"[ \t\r\n]*([,}])[ \t\r\n]*")
_PAIRED = re.compile(
    rb"(?:[^\\]++|\\(?:[^u]|u(?![dD][89a-fA-F])|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}))*+",
    re.DOTALL,
)
"""JSON up to the first escape that is half of a surrogate pair and stands alone."""
_HALF = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
MAX_SEARCHED_BYTES = 1024 * 1024
_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
MAX_COPIED_BYTES = 64 * 1024
MAX_MEMBERS = 1024
"""Of one object. The API has some fifty; a body of a million would hold the event loop for seconds."""


class DuplicateKeyError(ValueError):
    """A top-level key stands twice: two readers of the body could see two different requests (CWE-436)."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


class TooManyMembersError(ValueError):
    """The object has more than `MAX_MEMBERS`."""


class JsonObject(msgspec.Struct, frozen=True):
    """One object: its bytes, the raw value of each member, and where things stand."""

    body: bytes
    values: dict[str, msgspec.Raw]
    starts: dict[str, int]
    close: int
    """Position of the closing brace."""

    def replace(self, edits: dict[str, bytes]) -> bytes:
        """The body with members set to encoded JSON: in place where they stand, else added at the end."""
        body = self.body
        parts: list[bytes] = []
        position = 0
        for key in sorted(edits.keys() & self.starts.keys(), key=self.starts.__getitem__):
            start = self.starts[key]
            parts += (body[position:start], edits[key])
            position = start + len(self.values[key])
        parts.append(body[position : self.close])
        comma = b"," if self.values else b""
        for key in edits.keys() - self.starts.keys():
            parts += (comma, msgspec.json.encode(key), b":", edits[key])
            comma = b","
        parts.append(body[self.close :])
        return b"".join(parts)


def parse_object(body: bytes) -> JsonObject:
    """Validate `body` as one JSON object in UTF-8 and locate its members.

    Raises:
        DuplicateKeyError: a key stands twice, escapes undone.
        TooManyMembersError: there are more than `MAX_MEMBERS`.
        msgspec.DecodeError: not JSON, or not an object (`msgspec.ValidationError`).
        RecursionError: nested deeper than the interpreter's limit.
        UnicodeDecodeError: not UTF-8.
    """
    if not body.isascii():
        body.decode("utf-8")  # msgspec skips over raw values without looking at their encoding
    values = _decode(body)
    if len(values) > MAX_MEMBERS:
        raise TooManyMembersError
    starts, close = _as_libraries_write(body, values) or _walk(body, values)
    return JsonObject(body, values, starts, close)


def lone_surrogate(body: bytes) -> tuple[str, int] | None:
    """The first escape in a JSON text that is half of a surrogate pair and stands alone (RFC 8259 §8.2), and its byte.
    `None` where the first `MAX_SEARCHED_BYTES` have none."""
    paired = _PAIRED.match(body, 0, MAX_SEARCHED_BYTES)
    half = None if paired is None else _HALF.match(body, paired.end())
    if half is None or half.end() + len(half.group()) > MAX_SEARCHED_BYTES:  # a pair may have been cut in two there
        return None
    return half.group().decode("ascii"), half.start()


def _as_libraries_write(body: bytes, values: dict[str, msgspec.Raw]) -> tuple[dict[str, int], int] | None:
    """Where things stand in a small object that is spaced as JSON libraries do it, or `None`. A third of `_walk`.

    The members, written in order in that way, are the body: so no key stands twice, and where they stand is their sum.
    """
    if len(body) > MAX_COPIED_BYTES:
        return None
    first = len(next(iter(values), "").encode())
    spaced = body[4 + first : 5 + first] == b" "
    form, comma = (b'"%b": %b', b", ") if spaced else (b'"%b":%b', b",")
    members = [form % (key.encode(), raw) for key, raw in values.items()]
    if b"{%b}" % comma.join(members) != body:
        return None
    starts, end, gap = {}, 1 - len(comma), len(comma)
    for (key, raw), member in zip(values.items(), members, strict=True):
        end += gap + len(member)
        starts[key] = end - len(raw)
    return starts, len(body) - 1


def _walk(body: bytes, values: dict[str, msgspec.Raw]) -> tuple[dict[str, int], int]:
    """Where things stand, however the object is written.

    The decoder keeps the last of two equal keys, so the first shows itself: here its value does not fit.
    """
    starts: dict[str, int] = {}
    opening = _OPEN.match(body)
    assert opening is not None  # the decoder has seen an object
    position = opening.end()
    close = position
    while (match := _KEY.match(body, position)) is not None:
        key = msgspec.json.decode(match.group(1), type=str)
        start, raw = match.end(), bytes(values[key])
        end = start + len(raw)
        after = _NEXT.match(body, end) if body.startswith(raw, start) else None
        if after is None or key in starts:
            raise DuplicateKeyError(key)
        starts[key] = start
        position, close = after.end(), after.start(1)
        if after.group(1) == b"}":
            break
    return starts, close
