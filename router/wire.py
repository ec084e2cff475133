"""What a request's head and pace must be for the gateway to read on: limits of size and time, and framing that every
HTTP implementation reads the same way.

llhttp already refuses conflicting or repeated lengths, broken chunks and folded headers. What it lets through, and what
two implementations could read differently (request smuggling, CWE-444), is refused here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from router.errors import ApiError, bad_request

HeaderList = Sequence[tuple[bytes, bytes]]


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

    def receive_deadline_s(self, began_at_s: float, *, head_complete: bool, received_bytes: int) -> float:
        """By when the message must be whole, given what has come so far. Loop time."""
        if not head_complete:
            return began_at_s + self.head_s
        return began_at_s + self.body_s + received_bytes / self.body_rate_floor


def refuse_head(http_version: str, target: bytes, headers: HeaderList) -> ApiError | None:
    """Why a head is not read on, or `None`. Header names come in lower case."""
    hosts = transfer_encodings = 0
    for name, value in headers:
        if name == b"host":
            hosts += 1
        elif name == b"transfer-encoding":
            transfer_encodings += 1
            if value.strip().lower() != b"chunked":
                return bad_request("Transfer-Encoding must be 'chunked' alone.", code="invalid_http")
    if hosts > 1 or (hosts == 0 and http_version == "1.1"):
        return bad_request("A request has exactly one Host header.", code="invalid_http")
    if transfer_encodings > 1:
        return bad_request("Transfer-Encoding stands twice.", code="invalid_http")
    if not target.startswith(b"/"):
        return bad_request("The request target must be a path.", code="invalid_http")
    return None
