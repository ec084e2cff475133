"""A TCP proxy that spoils what a server answers: late, slow, in pieces, cut, half closed, or not at all.

It knows nothing of HTTP. Put it before any backend, change `faults` at any time (connections made from then on have
them), and the client behind it meets the network that it fears. Sizes count the bytes that the server sent on that
connection; a fault after 0 bytes strikes when the answer begins.
"""

import asyncio
import socket
import struct
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import urlsplit

from loadtest.loopback_server import LoopbackServer

READ_BYTES = 64 * 1024
BURST_S = 0.01
"""A slow link carries its bytes in portions of so much time."""


class Accept(StrEnum):
    """What becomes of a new connection."""

    SERVE = "serve"
    CLOSE = "close"
    RESET = "reset"
    IGNORE = "ignore"
    """Taken, and never read."""


@dataclass(frozen=True, slots=True)
class Faults:
    """What goes wrong with one connection; nothing, by default."""

    accept: Accept = Accept.SERVE
    latency_s: float = 0.0
    """Before each piece of an answer."""
    bytes_per_s: float | None = None
    split_at: tuple[int, ...] = ()
    """Positions where an answer is cut into segments of their own, a millisecond apart."""
    piece_bytes: int | None = None
    """The longest segment."""
    reset_after: int | None = None
    """Both sides get a reset once the client has so many bytes."""
    close_after: int | None = None
    """The same with an orderly end."""
    half_close_after: int | None = None
    """The client's side ends; what it says is still passed on."""
    black_hole_after: int | None = None
    """From there on the server's bytes vanish, and both connections stay."""


NO_FAULTS = Faults()


class FaultProxy(LoopbackServer):
    """Stands before one server. Use `serving`."""

    def __init__(self, server_url: str, faults: Faults = NO_FAULTS) -> None:
        super().__init__()
        parts = urlsplit(server_url)
        self._server = (parts.hostname or "127.0.0.1", parts.port or 80)
        self.faults = faults
        self.accepted = 0
        """Connections so far."""

    async def serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        await self._connection(self.faults, reader, writer)

    async def _connection(
        self, faults: Faults, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if faults.accept is Accept.RESET:
            reset(writer)
        elif faults.accept is Accept.CLOSE:
            writer.close()
        elif faults.accept is Accept.IGNORE:
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            await asyncio.Event().wait()
        else:
            own_reader, own_writer = await asyncio.open_connection(*self._server)
            try:
                await _Link(faults, reader, writer, own_reader, own_writer).run()
            finally:
                own_writer.transport.abort()


class _Link:
    """One client's connection joined to one to the server."""

    def __init__(
        self,
        faults: Faults,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        server_reader: asyncio.StreamReader,
        server_writer: asyncio.StreamWriter,
    ) -> None:
        self._faults = faults
        self._reader, self._writer = reader, writer
        self._server_reader, self._server_writer = server_reader, server_writer
        self._passed = 0
        ends = (faults.reset_after, faults.close_after, faults.half_close_after, faults.black_hole_after)
        self._end = min((end for end in ends if end is not None), default=None)

    async def run(self) -> None:
        """Until either side has gone, or the fault says so."""
        up, down = asyncio.create_task(self._up()), asyncio.create_task(self._down())
        try:
            await asyncio.wait((up, down), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (up, down):
                task.cancel()
            await asyncio.gather(up, down, return_exceptions=True)

    async def _up(self) -> None:
        while data := await self._reader.read(READ_BYTES):
            self._server_writer.write(data)
            await self._server_writer.drain()

    async def _down(self) -> None:
        while data := await self._server_reader.read(READ_BYTES):
            for piece in self._pieces(data):
                await self._pass(piece)
            if self._end is not None and self._passed >= self._end:
                await self._finish()
        self._writer.close()
        await self._writer.wait_closed()

    async def _pass(self, piece: bytes) -> None:
        faults = self._faults
        if faults.latency_s:
            await asyncio.sleep(faults.latency_s)
        self._writer.write(piece)
        await self._writer.drain()
        self._passed += len(piece)
        if faults.bytes_per_s is not None:
            await asyncio.sleep(len(piece) / faults.bytes_per_s)
        elif faults.split_at or faults.piece_bytes is not None:
            await asyncio.sleep(0.001)

    def _pieces(self, data: bytes) -> list[bytes]:
        """`data` cut where the faults cut it."""
        faults, start = self._faults, self._passed
        stop = start + len(data) if self._end is None else min(start + len(data), self._end)
        longest = faults.piece_bytes or len(data)
        if faults.bytes_per_s is not None:
            longest = min(longest, max(1, round(faults.bytes_per_s * BURST_S)))
        cuts = sorted({position for position in faults.split_at if start < position < stop} | {stop})
        pieces = []
        for cut in cuts:
            while start < cut:
                end = min(cut, start + longest)
                pieces.append(data[start - self._passed : end - self._passed])
                start = end
        return pieces

    async def _finish(self) -> None:
        """The place is reached where the fault strikes. Returns never, or by the end of the link."""
        faults, end = self._faults, self._end
        if end == faults.reset_after:
            reset(self._writer)
            reset(self._server_writer)
        elif end == faults.close_after:
            self._writer.close()
        elif end == faults.half_close_after:
            self._writer.write_eof()
            await asyncio.Event().wait()
        else:
            while await self._server_reader.read(READ_BYTES):
                pass
            await asyncio.Event().wait()
        raise ConnectionResetError("the fault struck")


def reset(writer: asyncio.StreamWriter) -> None:
    """End a connection with RST: what was written and not yet sent is lost."""
    own = writer.get_extra_info("socket")
    own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
