"""What a request's head and pace must be for the gateway to read on: limits of size and time, and framing that every
HTTP implementation reads the same way.

llhttp already refuses conflicting or repeated lengths, broken chunks and folded headers. What it lets through, and what
two implementations could read differently (request smuggling, CWE-444), is refused here.
"""

import re
import resource
from collections.abc import Sequence
from dataclasses import dataclass, replace

from router.wire.errors import ApiError, bad_request, headers_too_large

HeaderList = Sequence[tuple[bytes, bytes]]
VERSIONS = ("1.1", "1.0")
OWN_OPEN_FILES = 64
"""Files that the process needs besides its clients' and backends' sockets."""
# What RFC 3986 §3.2 allows in a host and port, but for the comma: two Host fields joined on their way must not pass.
_HOST = re.compile(rb"[A-Za-z0-9._~!$&'()*+;=:%\[\]-]*")


@dataclass(frozen=True, slots=True)
class WireLimits:
    """Bounds on one connection. Times in seconds, sizes in bytes."""

    max_connections: int = 8192
    max_head_bytes: int = 64 * 1024
    max_headers: int = 100
    head_s: float = 10.0
    """From a request's first byte to the end of its head; from the connection's start, too."""
    body_s: float = 30.0
    """The same for its body, plus a second for each `body_rate_floor` bytes that have come."""
    body_rate_floor: float = 16 * 1024
    """Bytes a second that a slow sender must keep up."""
    unread_s: float = 30.0
    """How long bytes of an answer that has ended may wait for a client that reads none of them."""

    def receive_deadline_s(self, began_at_s: float, *, head_complete: bool, received_bytes: int) -> float:
        """By when the message must be whole, given what has come so far. Loop time."""
        if not head_complete:
            return began_at_s + self.head_s
        return began_at_s + self.body_s + received_bytes / self.body_rate_floor

    def refuse_growth(self, *, head_complete: bool, received_bytes: int, body_bytes: int) -> ApiError | None:
        """Why a message of which so much has come is not read on, or `None`.

        The parser keeps a header to itself until it has come whole, and drops chunk extensions (CVE-2023-39326). Only
        the count of raw bytes sees either. A chunk of one byte has five of framing.
        """
        if not head_complete:
            if received_bytes > self.max_head_bytes:
                return headers_too_large(self.max_head_bytes, self.max_headers)
        elif received_bytes > 2 * self.max_head_bytes + 16 * body_bytes:
            return bad_request("The body is hardly more than its own framing.", code="invalid_http")
        return None

    def within_open_files(self) -> "WireLimits":
        """These limits, with no more connections than the process may open files: a request takes two sockets."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft == resource.RLIM_INFINITY:
            return self
        return replace(self, max_connections=min(self.max_connections, max(1, (soft - OWN_OPEN_FILES) // 2)))


def refuse_head(http_version: str, target: bytes, headers: HeaderList) -> ApiError | None:
    """Why a head is not read on, or `None`. Header names come in lower case."""
    if http_version not in VERSIONS:
        return bad_request("The protocol must be HTTP/1.1 or HTTP/1.0.", code="invalid_http")
    hosts = transfer_encodings = 0
    for name, value in headers:
        if name == b"host":
            hosts += 1
            if _HOST.fullmatch(value) is None:
                return bad_request("The Host header names no host.", code="invalid_http")
        elif name == b"transfer-encoding":
            transfer_encodings += 1
            if value.strip().lower() != b"chunked":
                return bad_request("Transfer-Encoding must be 'chunked' alone.", code="invalid_http")
    if hosts > 1 or (hosts == 0 and http_version == "1.1"):
        return bad_request("A request has exactly one Host header.", code="invalid_http")
    if transfer_encodings > 1:
        return bad_request("Transfer-Encoding stands twice.", code="invalid_http")
    if transfer_encodings and http_version == "1.0":  # RFC 9112 §6.1: its framing is faulty
        return bad_request("HTTP/1.0 knows no Transfer-Encoding.", code="invalid_http")
    if not target.startswith(b"/"):
        return bad_request("The request target must be a path.", code="invalid_http")
    return None
