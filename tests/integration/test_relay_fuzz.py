"""Any answer of a backend, cut anywhere, through real sockets: relayed as it is, or told as broken, not in between."""

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router.app import Running
from router.wire.relayed_headers import RELAYED_HEADERS
from tests.gateway_stack import chat, gateway
from tests.raw_client import at_rest, raw_exchange, request_bytes
from tests.scripted_backend import Received, ScriptedBackend

OWN_HEADERS = {b"date", b"x-request-id", b"x-headrace-backend", b"x-headrace-reason", b"x-headrace-overhead-ms",
               b"content-length", b"transfer-encoding", b"connection"}  # fmt: skip


class Stack:
    """A gateway and a backend on a loop of their own thread; each example is one exchange with them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._stop = asyncio.Event()
        self._up: Future[Running] = Future()
        self.pieces: list[bytes] = []

    def __enter__(self) -> "Stack":
        self._thread.start()
        self._served = asyncio.run_coroutine_threadsafe(self._serve(), self._loop)
        self._up.result(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._served.result(20)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _serve(self) -> None:
        async def script(request: Received) -> None:
            for piece in self.pieces:
                await request.write(piece)
                await asyncio.sleep(0)
            request.writer.close()

        rules = {"failures_to_eject": 10_000, "silent_failures_to_eject": 10_000, "failure_ratio_to_eject": None}
        async with (
            ScriptedBackend(script).serving() as backend,
            gateway(self._folder, [backend], health=rules, retries={"max_attempts": 1},
                    timeouts={"inter_token_s": 5}) as process,
        ):  # fmt: skip
            self._up.set_result(process)
            await self._stop.wait()

    def exchange(self, pieces: list[bytes], *, stream: bool) -> bytes:
        """What a client gets where the backend says these pieces and closes."""

        async def once() -> bytes:
            self.pieces = pieces
            process = self._up.result()
            raw = await raw_exchange(process, request_bytes(chat(stream=stream), headers="connection: close\r\n"))
            for _ in range(200):
                if at_rest(process):
                    return raw
                await asyncio.sleep(0.005)
            raise AssertionError("something is still in flight")

        return asyncio.run_coroutine_threadsafe(once(), self._loop).result(20)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("fuzz")) as running:
        yield running


def cut(data: bytes, places: list[int]) -> list[bytes]:
    """`data` in pieces; places beyond its end do not count."""
    edges = [0, *sorted({place % (len(data) + 1) for place in places}), len(data)]
    return [data[start:end] for start, end in pairwise(edges) if start < end]


def chunked(body: bytes, sizes: list[int]) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in cut(body, sizes)) + b"0\r\n\r\n"


def parsed(raw: bytes) -> tuple[int, dict[bytes, bytes], bytes]:
    """Status, headers and body; fails where the framing is not whole."""
    head, _, body = raw.partition(b"\r\n\r\n")
    fields = [line.lower().partition(b":") for line in head.split(b"\r\n")[1:]]
    headers = {name: value.strip() for name, _, value in fields}
    if headers.get(b"transfer-encoding") == b"chunked":
        parts, rest = [], body
        while size := int(rest.partition(b"\r\n")[0], 16):
            start = rest.index(b"\r\n") + 2
            parts.append(rest[start : start + size])
            rest = rest[start + size + 2 :]
        assert rest == b"0\r\n\r\n"
        body = b"".join(parts)
    else:
        assert int(headers[b"content-length"]) == len(body)
    return int(head[9:12]), headers, body


PLACES = st.lists(st.integers(0, 5000), max_size=12)
NAMES = st.sampled_from(["x-secret", "set-cookie", "server", "location", "keep-alive", "upgrade", "trailer", "via",
                         "openai-model", "retry-after", "cache-control", "content-language", "x-headrace-backend"])
VALUES = st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=20)
HEADERS = st.lists(st.tuples(NAMES, VALUES), max_size=8)
JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=20),
                    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4))
FUZZ = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])


def head_of(headers: list[tuple[str, str]], content_type: str) -> bytes:
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
    return f"HTTP/1.1 200 OK\r\ncontent-type: {content_type}\r\n{lines}".encode("latin-1")


def only_allowed(headers: dict[bytes, bytes]) -> None:
    assert set(headers) <= RELAYED_HEADERS | OWN_HEADERS
    assert headers[b"x-headrace-backend"] == b"b0"


@FUZZ
@given(st.binary(max_size=3000), HEADERS, PLACES, PLACES, st.booleans())
def test_a_whole_body_arrives_as_it_is(
    stack: Stack, body: bytes, headers: list[tuple[str, str]], places: list[int], sizes: list[int], in_chunks: bool
) -> None:
    head = head_of(headers, "application/octet-stream")
    if in_chunks:
        data = head + b"transfer-encoding: chunked\r\n\r\n" + chunked(body, sizes)
    else:
        data = head + b"content-length: %d\r\n\r\n%b" % (len(body), body)
    status, got, answer = parsed(stack.exchange(cut(data, places), stream=False))
    assert (status, answer) == (200, body)
    only_allowed(got)


@FUZZ
@given(st.lists(JSON, min_size=1, max_size=6), HEADERS, PLACES, PLACES, st.sampled_from([b"\n\n", b"\r\n\r\n"]))
def test_a_stream_arrives_as_it_is(
    stack: Stack, texts: list[Any], headers: list[tuple[str, str]], places: list[int], sizes: list[int], blank: bytes
) -> None:
    documents = [{"choices": [{"index": 0, "delta": {"content": "x", "extra": text}}]} for text in texts]
    documents.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    body = b"".join(b"data: " + json.dumps(document).encode() + blank for document in documents)
    body += b"data: [DONE]" + blank
    data = head_of(headers, "text/event-stream") + b"transfer-encoding: chunked\r\n\r\n" + chunked(body, sizes)
    status, got, answer = parsed(stack.exchange(cut(data, places), stream=True))
    assert (status, answer) == (200, body)
    only_allowed(got)


@FUZZ
@given(st.integers(0, 600), PLACES, st.booleans())
def test_a_stream_that_breaks_off_anywhere_is_never_taken_for_whole(
    stack: Stack, end: int, places: list[int], resets: bool
) -> None:
    documents = [{"choices": [{"index": 0, "delta": {"content": word}}]} for word in ("one", "two", "three")]
    documents.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    body = b"".join(b"data: " + json.dumps(document).encode() + b"\n\n" for document in documents)
    data = head_of([], "text/event-stream") + b"transfer-encoding: chunked\r\n\r\n" + chunked(body, [80])
    raw = stack.exchange(cut(data[:end], places), stream=True)
    assert raw.count(b"HTTP/1.1 ") == 1
    if raw.startswith(b"HTTP/1.1 200 "):
        whole = raw.endswith(b"0\r\n\r\n")
        assert whole == (b'"finish_reason": "stop"' in raw)
        assert whole != (b"upstream_truncated" in raw)
    else:
        assert parsed(raw)[0] == 502


@FUZZ
@given(st.binary(max_size=400), PLACES, st.booleans())
def test_any_bytes_for_an_answer_are_told_as_a_fault(
    stack: Stack, noise: bytes, places: list[int], stream: bool
) -> None:
    raw = stack.exchange(cut(noise, places), stream=stream)
    status, _, answer = parsed(raw)
    assert status in (502, 504)
    assert json.loads(answer)["error"]["code"] in ("upstream_error", "upstream_timeout")
