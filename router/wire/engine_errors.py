"""A backend's own error as a client may see it: in OpenAI's shape, without hosts or keys."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from time import time
from urllib.parse import urlsplit

import msgspec

from backends.catalog.spec import BackendSpec
from router.wire.errors import ERROR_TYPES
from router.wire.relayed_headers import Headers, relayed_headers
from router.wire.sse import ModelNameEdit

MAX_MESSAGE_BYTES = 500
MAX_STATUS = 599


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """A backend's own error, kept to be relayed if no other backend does better."""

    status: int
    headers: Headers
    body: bytes

    def lines(self) -> bytes:
        """Its header lines, length included."""
        headers = [*self.headers, (b"content-length", b"%d" % len(self.body))]
        return b"".join([b"%b: %b\r\n" % header for header in headers])

    def retry_in(self, wait_s: float) -> "ErrorAnswer":
        """The same, with the client asked to come back after so many seconds."""
        headers = [header for header in self.headers if header[0] != b"retry-after"]
        return replace(self, headers=[*headers, (b"retry-after", b"%d" % max(0, math.ceil(wait_s)))])


def error_answer(
    status: int, headers: Headers, body: bytes, spec: BackendSpec, edit: ModelNameEdit
) -> ErrorAnswer | None:
    """What a client may see of a backend's error; `None` where it is no business of the client's."""
    if status == 401 or not 400 <= status <= MAX_STATUS:
        return None  # our key, a redirect that is not followed, no status at all
    relayed = relayed_headers(headers)
    if any(name == b"content-encoding" for name, _ in headers):
        return ErrorAnswer(status, relayed, body)
    for secret in _secrets_of(spec):
        body = body.replace(secret, b"[backend]")
    body = edit.apply_to_error(body)
    relayed = [header for header in relayed if header[0] != b"content-type"]
    relayed.append((b"content-type", b"application/json"))
    return ErrorAnswer(status, relayed, in_openai_shape(status, body))


def retry_after_s(value: bytes | None) -> float | None:
    """Seconds by `Retry-After`, which is a number or a date (RFC 9110 §10.2.3)."""
    if value is None:
        return None
    text = value.decode("latin-1").strip()
    try:
        return max(0.0, float(text)) if text.isdigit() else max(0.0, parsedate_to_datetime(text).timestamp() - time())
    except (ValueError, OverflowError, TypeError, IndexError):  # the parser's ways to say that it is no date
        return None


def in_openai_shape(status: int, body: bytes) -> bytes:
    """A backend's error as OpenAI's SDKs read it: unchanged where it has the shape, else its message in the shape.

    A page that is no JSON speaks to the client about a 4xx, which is the client's to mend; on a 5xx it is the inside
    of an engine (a traceback, a proxy's page with its host), and is not shown.
    """
    message = f"The backend answered {status}."
    try:
        document = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        if status < 500:
            message = body[:MAX_MESSAGE_BYTES].decode("utf-8", "replace").strip() or message
    else:
        error = bytes(document.get("error", b""))
        if error.startswith(b"{"):
            return body
        for raw in (error, *(bytes(document.get(name, b"")) for name in ("message", "detail"))):
            if raw and raw != b"null":
                try:
                    message = str(msgspec.json.decode(raw))[:MAX_MESSAGE_BYTES]
                except RecursionError:
                    continue
                break
    error_type = ERROR_TYPES.get(status, "upstream_error" if status >= 500 else "invalid_request_error")
    return msgspec.json.encode(
        {"error": {"message": message, "type": error_type, "param": None, "code": f"upstream_{status}"}}
    )


def _secrets_of(spec: BackendSpec) -> Sequence[bytes]:
    """What an engine may quote in an error and no client should learn: the gateway's key there, and the address."""
    secrets = [urlsplit(spec.url).netloc]
    if spec.api_key:
        secrets.append(spec.api_key)
    return [secret.encode() for secret in secrets]
