"""The loop's turns, shared out among sockets that could each fill one."""

import asyncio
from collections import deque
from collections.abc import Callable

BIG_READ_BYTES = 64 * 1024
"""A read of so much has more behind it, likely enough."""


class Turns:
    """A queue of sockets that were read in full and wait to be read on.

    libuv reads a socket that fills its buffer (256,000 bytes in uvloop) up to 32 times before it looks at the next.
    With some tens of answers of megabytes a turn of the loop then takes most of a second, and everybody waits for it.
    A socket in this queue is not read; one leaves it each turn, first come first served, which is about 2 ms of
    relaying. Sockets that bring little at a time are never in it.
    """

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()

    def wait(self, loop: asyncio.AbstractEventLoop, read_on: Callable[[], None]) -> None:
        """Call `read_on` when its turn has come: in the loop's next at the earliest."""
        if not self._waiting:
            loop.call_soon(self._next, loop)
        self._waiting.append(read_on)

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        read_on = self._waiting.popleft()
        if self._waiting:
            loop.call_soon(self._next, loop)
        read_on()
