"""The inference routes as one bare ASGI callable: body in, dispatch, answer out, and an eye on the client throughout.

No framework stands between the socket and the relay. A client that leaves is noticed in every phase, since one task
waits for nothing else; it cancels the request, and everything the request holds is returned by the blocks it leaves.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from router.dispatch import Dispatcher
from router.errors import ApiError, bad_request, body_too_large, method_not_allowed, no_backend
from router.exchange import Exchange
from router.intake import Endpoint, request_id_of

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

log = logging.getLogger("headrace.hotpath")
ENDPOINTS = {endpoint.value: endpoint for endpoint in Endpoint}
STALL_GRACE_S = 1.0
"""Past its deadline an answer ends by itself, unless the client does not take it."""


class ClientGoneError(Exception):
    """The client closed its connection, or has stopped reading its answer."""


class AsgiClient:
    """Writes an answer through ASGI `send`."""

    __slots__ = ("_send", "ended", "started")

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False
        self.ended = False
        """Nothing more will be written; a disconnect from here on is none."""

    async def start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def finish(self, data: bytes = b"") -> None:
        self.ended = True
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def abort(self) -> None:
        # Returning without the final message makes the server close the socket in mid body.
        self.ended = True

    async def answer(self, error: ApiError, request_id: str) -> None:
        """Send an error as the whole answer."""
        body = error.body()
        headers = [
            *error.response_headers(),
            (b"content-length", b"%d" % len(body)),
            (b"x-request-id", request_id.encode("ascii")),
        ]
        await self.start(error.status, headers)
        await self.finish(body)


class HotPath:
    """ASGI application for `router.intake.Endpoint`."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        client = AsgiClient(send)
        exchange = self._dispatcher.begin(ENDPOINTS[scope["path"]], request_id_of(headers))
        try:
            if scope["method"] != "POST":
                raise method_not_allowed("POST")
            self._dispatcher.authorize(headers)
            self._dispatcher.admit()
            body = await _read_body(receive, headers, self._dispatcher.max_body_bytes)
            request = self._dispatcher.read(exchange, headers, body)
            deadline_s = exchange.deadline_s + STALL_GRACE_S
            await _while_connected(self._dispatcher.run(exchange, request, client), client, receive, deadline_s)
        except ApiError as error:
            exchange.refused(error)
            await client.answer(error, exchange.request_id)
        except ClientGoneError:
            exchange.client_gone()
        except asyncio.CancelledError:
            # The server's drain time is over. It is told by ending, since it takes the exception for a crash.
            await _cut_off(exchange, client)
        except Exception:
            log.exception("request %s failed in the gateway", exchange.request_id)
            exchange.status = exchange.status or 500
            if client.started:
                await client.abort()
            else:
                await client.answer(ApiError(500, "internal_error", "The gateway failed."), exchange.request_id)
        finally:
            self._dispatcher.end(exchange)


async def _read_body(receive: Receive, headers: dict[bytes, bytes], limit_bytes: int) -> bytes:
    declared = headers.get(b"content-length", b"0")
    if not declared.isdigit():
        raise bad_request("The Content-Length header is not a number.")
    if int(declared) > limit_bytes:
        raise body_too_large(limit_bytes)
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        part = message.get("body", b"")
        size += len(part)
        if size > limit_bytes:
            raise body_too_large(limit_bytes)
        parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


async def _cut_off(exchange: Exchange, client: AsgiClient) -> None:
    if client.ended:
        return
    if client.started:
        exchange.cut_off()
        await client.abort()
    else:
        error = no_backend("The gateway is stopping. Try again shortly.", 1.0)
        exchange.refused(error)
        await client.answer(error, exchange.request_id)


async def _while_connected(work: Awaitable[None], client: AsgiClient, receive: Receive, deadline_s: float) -> None:
    """Run `work` in this task; cancel it when the client goes, or at `deadline_s` (loop time).

    Raises:
        ClientGoneError: the client went, or did not take what there was, before the answer had ended.
    """
    task = asyncio.current_task()
    assert task is not None
    gone = False

    def leave() -> None:
        nonlocal gone
        if not client.ended:
            gone = True
            task.cancel()

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        leave()

    watcher = asyncio.create_task(watch())
    timer = asyncio.get_running_loop().call_at(deadline_s, leave)
    try:
        await work
    except asyncio.CancelledError:
        if gone and task.uncancel() == 0:
            raise ClientGoneError from None
        raise
    finally:
        timer.cancel()
        watcher.cancel()
