"""The load client against small real servers: what it times, what it counts, and what it calls each failure."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.openai_stream import (
    MAX_EVENT_BYTES,
    Ask,
    Endpoint,
    Patience,
    SseReader,
    StreamFault,
    StreamRecord,
    stream_chat,
)

pytestmark = pytest.mark.real_time

Script = Callable[[socket.socket], None]
HEAD = (b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
        b"x-headrace-backend: h100\r\nx-headrace-overhead-ms: 0.75\r\n\r\n")


def chunked(payload: bytes) -> bytes:
    return f"{len(payload):x}\r\n".encode() + payload + b"\r\n"


def event(content: str | None = None, **extra: object) -> bytes:
    choices = [{"index": 0, "delta": {"content": content}}] if content is not None else []
    return b"data: " + json.dumps({"choices": choices, **extra}).encode() + b"\n\n"


def usage(completion_tokens: int, prompt_tokens: int = 7) -> bytes:
    return event(usage={"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens})


DONE = b"data: [DONE]\n\n"
END = b"0\r\n\r\n"


def tokens(*numbers: int) -> list[bytes]:
    return [event(f" t{number}") for number in numbers]


@contextmanager
def served(script: Script) -> Iterator[str]:
    """A server for one connection: reads the request, then `script` has the socket."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            received = b""
            while b"\r\n\r\n" not in received:
                received += connection.recv(65536)
            head, _, body = received.partition(b"\r\n\r\n")
            headers = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
            length = int(headers[b"content-length"])
            while len(body) < length:
                body += connection.recv(65536)
            script(connection)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        thread.join(timeout=20)
        listener.close()


def say(*parts: bytes) -> Script:
    return lambda connection: connection.sendall(b"".join(parts))


def stream(*events: bytes) -> Script:
    return say(HEAD, *map(chunked, events), END)


def ask(max_tokens: int = 3, *, exact: bool = True, late_s: float = 0.0) -> Ask:
    return Ask(time.monotonic() - late_s, "m", "hello", 2, max_tokens, "interactive", exact)


def run(script: Script, request: Ask | None = None, *, late_s: float = 0.0) -> StreamRecord:
    with served(script) as url:
        return stream_chat(Endpoint.parse(url), request or ask(late_s=late_s))


def test_whole_stream_is_counted_and_names_its_backend() -> None:
    record = run(stream(event(""), *tokens(0, 1, 2), usage(3, prompt_tokens=41), DONE))
    assert record.failure is None, record
    assert (record.tokens, record.lost_tokens, record.prompt_tokens) == (3, 0, 41)
    assert (record.backend, record.overhead_ms, record.status) == ("h100", 0.75, 200)
    assert len(record.gaps_s) == 2


def test_times_count_from_the_intended_start() -> None:
    """P51: a request sent late has waited all the same."""
    record = run(stream(*tokens(0, 1, 2), usage(3), DONE), late_s=5.0)
    assert record.failure is None
    assert record.ttft_s is not None
    assert record.ttft_s >= 5.0
    assert record.e2e_s >= record.ttft_s
    assert record.lag_s >= 5.0


def test_a_stall_after_the_first_token_is_a_gap_and_not_a_fast_request() -> None:
    """P51: headers and first token at once, then nothing: TTFT alone would call this fast."""
    def script(connection: socket.socket) -> None:
        connection.sendall(HEAD + chunked(tokens(0)[0]))
        time.sleep(0.4)
        connection.sendall(b"".join(map(chunked, [*tokens(1, 2), usage(3), DONE])) + END)

    record = run(script)
    assert record.failure is None
    assert record.ttft_s is not None
    assert max(record.gaps_s) >= 0.39
    assert record.e2e_s >= record.ttft_s + 0.39


def test_an_event_split_over_reads_counts_once() -> None:
    whole = b"".join([*tokens(0, 1, 2), usage(3), DONE])

    def script(connection: socket.socket) -> None:
        connection.sendall(HEAD)
        for start in range(0, len(whole), 11):
            connection.sendall(chunked(whole[start:start + 11]))
        connection.sendall(END)

    record = run(script)
    assert (record.failure, record.tokens) == (None, 3)


@pytest.mark.parametrize(("script", "failure"), [
    pytest.param(stream(*tokens(0, 1, 2), usage(3)), "truncated", id="ends cleanly without DONE"),
    pytest.param(say(HEAD, *map(chunked, tokens(0, 1))), "truncated", id="connection ends within the body"),
    pytest.param(say(HEAD), "reset", id="connection ends before the first token"),
    pytest.param(say(b""), "reset", id="connection ends before the head"),
    pytest.param(stream(*tokens(0, 2), usage(3), DONE), "disordered_tokens", id="a token is missing between"),
    pytest.param(stream(*tokens(0, 1, 1), usage(3), DONE), "disordered_tokens", id="a token comes twice"),
    pytest.param(stream(*tokens(0, 1), usage(3), DONE), "lost_tokens", id="fewer arrive than the engine made"),
    pytest.param(stream(*tokens(0, 1), usage(2), DONE), "lost_tokens", id="fewer than an exact engine owes"),
    pytest.param(stream(*tokens(0, 1, 2, 3), usage(4), DONE), "wrong_usage", id="more than asked for"),
    pytest.param(stream(*tokens(0, 1, 2), DONE), "no_usage", id="usage was asked for"),
    pytest.param(stream(usage(0), DONE), "no_tokens", id="nothing came"),
    pytest.param(stream(*tokens(0), event(error={"message": "out of memory"}), DONE), "error_in_stream", id="error"),
    pytest.param(stream(b"data: {broken\n\n"), "bad_event", id="not JSON"),
    pytest.param(stream(*tokens(0, 1, 2), usage(3), DONE, *tokens(3)), "bad_event", id="goes on after DONE"),
    pytest.param(say(b"HTTP/1.1 503 Busy\r\ncontent-length: 4\r\n\r\nbusy"), "http_503", id="status"),
    pytest.param(say(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"),
                 "not_a_stream", id="plain JSON"),
])
def test_each_failure_has_its_name(script: Script, failure: str) -> None:
    assert run(script).failure == failure


def test_lost_tokens_are_counted_also_where_the_stream_broke() -> None:
    record = run(say(HEAD, *map(chunked, tokens(0, 1))), ask(5))
    assert (record.failure, record.tokens, record.lost_tokens) == ("truncated", 2, 3)


def test_real_text_is_only_counted() -> None:
    """An engine may put several tokens into one event and stop early; neither is a loss."""
    record = run(stream(event("Hello, wor"), event("ld"), usage(5), DONE), ask(64, exact=False))
    assert (record.failure, record.tokens, record.lost_tokens) == (None, 2, 0)


@pytest.mark.parametrize(("first", "failure"), [([], "timeout_first_token"), (tokens(0), "timeout_inter_token")])
def test_silence_is_cut_off_by_phase(first: list[bytes], failure: str) -> None:
    over = threading.Event()

    def script(connection: socket.socket) -> None:
        connection.sendall(HEAD + b"".join(map(chunked, first)))
        over.wait(10)

    with served(script) as url:
        record = stream_chat(Endpoint.parse(url), ask(), patience=Patience(first_token_s=0.3, inter_token_s=0.3))
        over.set()
    assert record.failure == failure


def test_nobody_listening_is_a_connect_failure() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    record = stream_chat(Endpoint("127.0.0.1", port), ask())
    assert (record.failure, record.status, record.ttft_s) == ("connect", None, None)


@given(st.lists(st.binary(max_size=30).filter(lambda data: not set(data) & set(b"\r\n")), max_size=8), st.data())
def test_events_survive_any_split(payloads: list[bytes], data: st.DataObject) -> None:
    wire = b"".join(b": comment\r\ndata: " + payload + b"\r\n\r\n" for payload in payloads)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=12)))
    reader = SseReader()
    pieces = [wire[start:end] for start, end in pairwise([0, *cuts, len(wire)])]
    assert [event for piece in pieces for event in reader.feed(piece)] == payloads


def test_an_endless_line_is_refused() -> None:
    reader = SseReader()
    reader.feed(b"x" * MAX_EVENT_BYTES)
    with pytest.raises(StreamFault, match="bad_event"):
        reader.feed(b"x")


@pytest.mark.parametrize(("url", "endpoint"), [
    ("http://127.0.0.1:8080", Endpoint("127.0.0.1", 8080)),
    ("http://gw/base/v1/", Endpoint("gw", 80, "/base")),
    ("https://gw", Endpoint("gw", 443, "", tls=True)),
])
def test_endpoint_from_address(url: str, endpoint: Endpoint) -> None:
    assert Endpoint.parse(url) == endpoint


@pytest.mark.parametrize("url", ["127.0.0.1:8080", "ftp://gw", "http://"])
def test_other_addresses_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="not an http"):
        Endpoint.parse(url)
