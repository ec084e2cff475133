"""The loop's turns, shared out among those that could each fill one."""

import asyncio
from collections import deque
from collections.abc import Callable

BIG_READ_BYTES = 64 * 1024
"""A read of so much has more behind it, likely enough."""


class Turns:
    """A queue of those that could fill a turn of the loop on their own: one goes on each turn, first come first served.

    Full sockets are one kind. libuv reads a socket that fills its buffer (256,000 bytes in uvloop) up to 32 times
    before it looks at the next; with some tens of answers of megabytes a turn then takes most of a second, and
    everybody waits for it. Here such a socket is read once and waits, which makes about 2 ms of relaying a turn. Bodies
    of megabytes that are to be parsed are another kind. Whoever does little at a time is never in the queue.
    """

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()

    def wait(self, loop: asyncio.AbstractEventLoop, go_on: Callable[[], None]) -> None:
        """Call `go_on` when its turn has come: in the loop's next at the earliest."""
        if not self._waiting:
            loop.call_soon(self._next, loop)
        self._waiting.append(go_on)

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        go_on = self._waiting.popleft()
        if self._waiting:
            loop.call_soon(self._next, loop)
        go_on()
