"""P28: a name that moves is followed, a resolver that fails is survived."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Sequence

import pytest

from backends.addresses import Addresses, resolve
from backends.upstream import PoolLimits, UpstreamError, UpstreamFault, UpstreamPool
from tests.upstream_client import post as send

pytestmark = [pytest.mark.anyio, pytest.mark.real_time]
NAME = "engine.example"


class Resolver:
    """Says what a test says."""

    def __init__(self, *addresses: str) -> None:
        self.addresses: Sequence[str] = addresses
        self.error: OSError | None = None
        self.silent = False
        self.asked = 0

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked += 1
        assert host == NAME
        if self.silent:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error
        return self.addresses


async def test_what_is_an_address_already_is_not_asked_for() -> None:
    resolver = Resolver()
    for literal in ("127.0.0.1", "::1"):
        assert await Addresses(literal, 80, resolver).find(1.0) == (literal,)
    assert resolver.asked == 0


async def test_p28_the_last_good_answer_outlives_its_resolver() -> None:
    resolver = Resolver("10.0.0.1", "10.0.0.2")
    addresses = Addresses(NAME, 80, resolver)
    assert await addresses.find(1.0) == ("10.0.0.1", "10.0.0.2")
    resolver.error = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
    assert await addresses.find(1.0) == ("10.0.0.1", "10.0.0.2")
    resolver.error, resolver.addresses = None, ()
    assert await addresses.find(1.0) == ("10.0.0.1", "10.0.0.2")
    resolver.silent = True
    assert await addresses.find(0.1) == ("10.0.0.1", "10.0.0.2")
    resolver.silent, resolver.addresses = False, ("10.0.0.3",)
    assert await addresses.find(1.0) == ("10.0.0.3",)


async def test_a_name_that_never_led_anywhere_is_an_error() -> None:
    resolver = Resolver()
    addresses = Addresses(NAME, 80, resolver)
    with pytest.raises(OSError, match="no address"):
        await addresses.find(1.0)
    resolver.error = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    with pytest.raises(socket.gaierror):
        await addresses.find(1.0)
    resolver.silent = True
    with pytest.raises(TimeoutError):
        await addresses.find(0.05)


async def test_the_systems_resolver_knows_this_machine() -> None:
    assert set(await resolve("localhost", 80)) & {"127.0.0.1", "::1"}


# --- the pool, on loopback addresses that stand for two machines


class Machine:
    """Answers every request on its connection; counts them."""

    def __init__(self) -> None:
        self.requests = 0
        self.slow = asyncio.Event()
        self.slow.set()
        self.open: set[asyncio.Task[None]] = set()

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.open.add(task)
        task.add_done_callback(self.open.discard)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                await reader.readuntil(b"\r\n\r\n")
                self.requests += 1
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\no")
                await self.slow.wait()
                writer.write(b"k")
        writer.transport.abort()


@contextlib.asynccontextmanager
async def two_machines() -> AsyncIterator[tuple[int, Machine, Machine]]:
    one, two = Machine(), Machine()
    async with await asyncio.start_server(one.connection, "127.0.0.2", 0) as listener:
        port = listener.sockets[0].getsockname()[1]
        async with await asyncio.start_server(two.connection, "127.0.0.3", port):
            yield port, one, two
            async with asyncio.timeout(5):  # the tests close their pools, so every connection ends
                await asyncio.gather(*one.open, *two.open)


async def post(pool: UpstreamPool) -> bytes:
    return await send(pool, path=b"/x", connect_s=1).whole()


async def test_p28_new_requests_move_within_the_age_of_a_connection_and_old_ones_finish() -> None:
    resolver = Resolver("127.0.0.2")
    async with two_machines() as (port, one, two):
        pool = UpstreamPool(f"http://{NAME}:{port}", PoolLimits(max_age_s=0.3), ask=resolver)
        for _ in range(10):
            assert await post(pool) == b"ok"
        assert (one.requests, two.requests, resolver.asked) == (10, 0, 1)  # all on one connection
        one.slow.clear()
        old = asyncio.create_task(post(pool))
        await asyncio.sleep(0.02)
        resolver.addresses = ("127.0.0.3",)
        began_s = asyncio.get_running_loop().time()
        while two.requests == 0:  # traffic that never leaves the connection idle
            one.slow.set()
            await post(pool)
        assert asyncio.get_running_loop().time() - began_s < 2
        assert await old == b"ok"
        seen = one.requests
        for _ in range(5):
            await post(pool)
        assert one.requests == seen
        pool.close()


async def test_p28_a_failing_resolver_ejects_nobody() -> None:
    resolver = Resolver("127.0.0.2")
    async with two_machines() as (port, one, _):
        pool = UpstreamPool(f"http://{NAME}:{port}", PoolLimits(max_age_s=0.0), ask=resolver)
        await post(pool)
        resolver.error = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        for _ in range(5):
            assert await post(pool) == b"ok"
        assert one.requests == 6
        pool.close()
        fresh = UpstreamPool(f"http://{NAME}:{port}", ask=resolver)
        with pytest.raises(UpstreamError) as caught:
            await post(fresh)
        assert caught.value.fault is UpstreamFault.CONNECT
        fresh.close()


async def test_the_next_address_is_tried_where_one_refuses() -> None:
    resolver = Resolver("127.0.0.4", "127.0.0.2")
    async with two_machines() as (port, one, _):
        pool = UpstreamPool(f"http://{NAME}:{port}", ask=resolver)
        assert await post(pool) == b"ok"
        assert one.requests == 1
        pool.close()
