"""An upstream call to be awaited, for tests: the product never waits for one."""

import asyncio

from backends.upstream import UpstreamCall, UpstreamError, UpstreamFault, UpstreamPool


class AwaitedCall(UpstreamCall):
    """Gathers what its hooks are told."""

    def __init__(self) -> None:
        super().__init__()
        self.body = b""
        self.pieces = 0
        self.max_bytes: int | None = None
        """Give up past so many, as a caller with a bound does."""
        self.read_s: float | None = None
        """Silence that is borne once the head has come."""
        self.began = asyncio.Event()
        """The head has come."""
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def whole(self) -> bytes:
        """The body, once it is whole.

        Raises:
            UpstreamError: it never was. A cancelled wait leaves the backend.
        """
        try:
            await self._ended
        finally:
            self.leave()
        return self.body

    def on_head(self) -> None:
        self.began.set()
        self._progress()

    def on_body(self, data: bytes) -> None:
        self.body += data
        self.pieces += 1
        self._progress()
        if self.max_bytes is not None and len(self.body) > self.max_bytes:
            self.leave()
            self._fail(UpstreamError(UpstreamFault.PROTOCOL, "over the caller's limit"))

    def on_end(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)

    def on_failure(self, error: UpstreamError) -> None:
        self._fail(error)

    def on_crash(self, error: Exception) -> None:
        self._fail(error)

    def _progress(self) -> None:
        if self.read_s is not None:
            self.set_deadline(asyncio.get_running_loop().time() + self.read_s)

    def _fail(self, error: Exception) -> None:
        if not self._ended.done():
            self._ended.set_exception(error)


def post(
    pool: UpstreamPool, body: bytes = b"{}", *, path: bytes = b"/v1/chat/completions", lines: bytes = b"",
    connect_s: float = 5.0, head_s: float = 5.0, read_s: float = 5.0, call: AwaitedCall | None = None,
) -> AwaitedCall:
    """Send a request; `lines` are further header lines."""
    call = call or AwaitedCall()
    call.read_s = read_s
    call.post(
        pool, b"%b%bcontent-length: %d\r\n\r\n%b" % (pool.head(path, []), lines, len(body), body),
        connect_timeout_s=connect_s, head_deadline_s=asyncio.get_running_loop().time() + head_s,
    )  # fmt: skip
    return call
