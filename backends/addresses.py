"""Where a backend's name leads: asked anew for each connection, and remembered for when nobody answers.

A changed record is followed by every connection made after it, and kept-alive ones end at their pool's `max_age_s`. A
resolver that fails or falls silent says nothing about the backend, so its last good answer goes on.
"""

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence

log = logging.getLogger("headrace.upstream")
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


async def resolve(host: str, port: int) -> list[str]:
    """IP addresses of a name, in the resolver's order.

    Raises:
        OSError: no such name, or no resolver.
    """
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


class Addresses:
    """The addresses of one host."""

    def __init__(self, host: str, port: int, ask: Resolve = resolve) -> None:
        self._host, self._port, self._ask = host, port, ask
        self._known: Sequence[str] = ()
        self._literal = _is_literal(host)

    async def find(self, timeout_s: float) -> Sequence[str]:
        """Where to connect, at least one. With an older answer at hand, a resolver has half of `timeout_s`.

        Raises:
            OSError: the name leads nowhere and never did.
            TimeoutError: the resolver is silent and never spoke.
        """
        if self._literal:
            return (self._host,)
        try:
            async with asyncio.timeout(timeout_s / 2 if self._known else timeout_s):
                found = await self._ask(self._host, self._port)
        except OSError as error:  # TimeoutError is one
            if not self._known:
                raise
            log.warning("%s does not resolve (%s); its last address is used", self._host, error or "no answer")
        else:
            self._known = found or self._known
        if not self._known:
            raise OSError(f"{self._host} has no address")
        return self._known


def _is_literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
