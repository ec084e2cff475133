"""Who asks: API keys, the tenant that each belongs to, and how many requests each may have in flight.

Keys are kept as SHA-256 digests only. A slow password hash protects secrets that people choose; a key is 192 random
bits (`headrace keys new`), so that guessing it fails at any speed of hashing. NIST SP 800-63B §5.1.2.2 and OWASP ASVS
5.0 V6.5.2 ask of secrets with 112 bits or more no more than an approved one-way hash, without salt.

A lookup tells nothing through the time it takes: what is compared are digests, and who wants a digest near to a known
one has no better way than trying keys. One `compare_digest` over the whole of it settles the matter.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from hmac import compare_digest
from math import inf
from types import TracebackType

from router.wire.errors import ApiError, overloaded

MAX_HEADER_BYTES = 512
DEFAULT_TENANT = "default"
RETRY_AFTER_S = 1.0
_SELECTOR_BYTES = 16


@dataclass(frozen=True, slots=True)
class KeyRow:
    """One key as it is kept: everything but the key."""

    id: str
    """Names the key in records, logs and problems."""
    digest: bytes = field(repr=False)
    """SHA-256 of the key's bytes."""
    tenant: str = DEFAULT_TENANT
    max_parallel: int | None = None
    """Requests that it may have in flight at once; `None`: no limit of its own."""
    disabled: bool = False
    expires_at_s: float = inf
    """Unix time from which it is refused."""


@dataclass(frozen=True, slots=True)
class Principal:
    """Whom a request is made for."""

    key_id: str
    tenant: str
    max_parallel: int | None = None


ANYONE = Principal("none", DEFAULT_TENANT)
"""The caller where no key is asked for."""


def digest_of(key: bytes) -> bytes:
    """What is kept of a key."""
    return sha256(key).digest()


def environment_rows(keys: Mapping[str, bytes]) -> tuple[KeyRow, ...]:
    """Rows for keys that environment variables hold, by the variables' names: tenant `default`, no limits.

    A key that two variables hold is one key.
    """
    rows: dict[bytes, KeyRow] = {}
    for name, key in keys.items():
        digest = digest_of(key)
        rows.setdefault(digest, KeyRow(f"env:{name}", digest))
    return tuple(rows.values())


def sole_authorization(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """The `Authorization` header of a request; `None` where there is none.

    Several make an empty one, which nobody's key is: which of them a proxy in front has checked cannot be known.
    """
    found: bytes | None = None
    for name, value in headers:
        if name == b"authorization":
            if found is not None:
                return b""
            found = value
    return found


class KeyRing:
    """The keys in force. Never changed once built: a reload builds another.

    Holds digests only, and remembers nothing of what was presented. `clock` is Unix time, for keys that expire.
    """

    __slots__ = ("_clock", "_entries", "_open", "fingerprint")

    def __init__(self, rows: Iterable[KeyRow], *, is_open: bool, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._open = is_open
        self._entries: dict[bytes, tuple[bytes, float, Principal]] = {}
        hashed = sha256(b"open" if is_open else b"keys")
        ids: set[str] = set()
        for row in sorted(rows, key=lambda row: row.id):
            selector = row.digest[:_SELECTOR_BYTES]
            if len(row.digest) != 32 or row.id in ids or selector in self._entries:
                raise ValueError(f"key {row.id}: ids and digests must be SHA-256 and unique")
            ids.add(row.id)
            expires_at_s = -inf if row.disabled else row.expires_at_s
            self._entries[selector] = (row.digest, expires_at_s, Principal(row.id, row.tenant, row.max_parallel))
            hashed.update(repr((row.id, row.digest, row.tenant, row.max_parallel, expires_at_s)).encode())
        self.fingerprint = hashed.hexdigest()[:12]
        """Names the content: rings of the same rows have the same."""

    @classmethod
    def of(cls, *rows: KeyRow, clock: Callable[[], float] = time.time) -> "KeyRing":
        """A ring of these keys. Without any it lets nobody in: an emptied keys file is no open door.

        Raises:
            ValueError: two rows share an id or a key, or a digest is not SHA-256's length.
        """
        return cls(rows, is_open=False, clock=clock)

    @classmethod
    def asking_nothing(cls) -> "KeyRing":
        """The ring of a gateway that asks for no key: everybody is `ANYONE`."""
        return cls((), is_open=True, clock=time.time)

    @property
    def is_open(self) -> bool:
        """No key is asked for."""
        return self._open

    def __len__(self) -> int:
        """Keys on the ring, those that are disabled or expired among them."""
        return len(self._entries)

    def authenticate(self, authorization: bytes | None) -> Principal | None:
        """Who presents this `Authorization` header; `None` is 401. Never raises, whatever the bytes.

        The scheme is read without case (RFC 9110 §11.1), the key byte by byte.
        """
        if self._open:
            return ANYONE
        if authorization is None or len(authorization) > MAX_HEADER_BYTES:
            return None
        scheme = authorization[:7]
        if scheme != b"Bearer " and scheme.lower() != b"bearer ":
            return None
        digest = sha256(authorization[7:].strip(b" \t")).digest()
        entry = self._entries.get(digest[:_SELECTOR_BYTES])
        if entry is None or not compare_digest(entry[0], digest):
            return None
        expires_at_s = entry[1]
        if expires_at_s != inf and self._clock() >= expires_at_s:
            return None
        return entry[2]


class Parallel:
    """Requests that each key has in flight. One a process: it outlives every reload, and counts by the key's id."""

    __slots__ = ("_in_flight",)

    def __init__(self) -> None:
        self._in_flight: dict[str, int] = {}

    def of(self, key_id: str) -> int:
        """Requests of one key in flight."""
        return self._in_flight.get(key_id, 0)

    def snapshot(self) -> dict[str, int]:
        """Requests in flight of each key that has any."""
        return dict(self._in_flight)

    def lease(self, principal: Principal) -> "ParallelLease":
        """One request's place among those of its key. Nothing is counted before it is entered."""
        return ParallelLease(self._in_flight, principal)


def too_many(count: int, limit: int) -> ApiError:
    """429 for a key that has as many requests in flight as it may."""
    return overloaded(f"This API key has {count} requests in flight and may have {limit}. Wait for one to end.",
                      RETRY_AFTER_S)


class ParallelLease:
    """One place, taken by `take` or by entering, given back by `release` or by leaving: once, however often asked.

    A lease that is let go of without either gives its place back as it is collected, so that no path of a request can
    starve its key.
    """

    __slots__ = ("_in_flight", "_principal", "_taken")

    def __init__(self, in_flight: dict[str, int], principal: Principal) -> None:
        self._in_flight = in_flight
        self._principal = principal
        self._taken = False

    def take(self) -> None:
        """Count this request.

        Raises:
            ApiError: 429 where its key has as many in flight as it may; nothing is counted.
            RuntimeError: it is taken already.
        """
        if self._taken:
            raise RuntimeError("a place is taken once")
        principal = self._principal
        count = self._in_flight.get(principal.key_id, 0)
        limit = principal.max_parallel
        if limit is not None and count >= limit:
            raise too_many(count, limit)
        self._in_flight[principal.key_id] = count + 1
        self._taken = True

    def release(self) -> None:
        """Give the place back, if it is held."""
        if not self._taken:
            return
        self._taken = False
        key_id = self._principal.key_id
        count = self._in_flight[key_id] - 1
        if count:
            self._in_flight[key_id] = count
        else:
            # Ids that reloads have removed leave no trace.
            del self._in_flight[key_id]

    def __enter__(self) -> "ParallelLease":
        self.take()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    def __del__(self) -> None:
        self.release()
