"""A raw TCP server on a free loopback port, for peers whose every byte is decided by whoever tests with them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Self


class LoopbackServer:
    """Accepts connections while inside `serving`, each in a task that ends with it. Subclasses say what one does."""

    backlog = 2048

    def __init__(self) -> None:
        self.url = ""
        """Where it listens; empty before."""
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def open_connections(self) -> int:
        """Connections that neither side has ended."""
        return len(self._tasks)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[Self]:
        """Listen while inside; leaving ends every connection."""
        listener = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=2**26, backlog=self.backlog)
        host, port = listener.sockets[0].getsockname()
        self.url = f"http://{host}:{port}"
        try:
            yield self
        finally:
            listener.close()
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection to its end. A peer that leaves may be met with any `ConnectionError` or short read."""
        raise NotImplementedError

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self.serve_connection(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            self.end_connection(writer)

    def end_connection(self, writer: asyncio.StreamWriter) -> None:
        """How this side closes: at once, whatever is unsent."""
        writer.transport.abort()
