"""The mock engine and the load client of `headrace bench gateway`, compiled and run; and a bench from end to end."""

import contextlib
import json
import shutil
import socket
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadtest.bench import natives
from loadtest.bench.charts import page
from loadtest.bench.figures import LoadReport
from loadtest.bench.goals import judge
from loadtest.bench.natives import Mock, NativeError, Natives, build, run_load, running_mock
from loadtest.bench.processes import available_cores
from loadtest.bench.rows import Row
from loadtest.bench.run import BenchOptions, run_bench
from loadtest.bench.workloads import FULL, NEVER_MS, LoadRun, workloads

pytestmark = pytest.mark.real_time

CORE = available_cores().load
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Natives:
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    return build(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def mock(built: Natives) -> Iterator[Mock]:
    with running_mock(built, 2, CORE) as running:
        yield running


def load(built: Natives, port: int, **values: Any) -> LoadReport:
    run = LoadRun(**{"mode": "closed", "connections": 4, "seconds": 0.5, "warm_s": 0.1, **values})
    return run_load(built, run, port, "sk-test", CORE, lambda event, pid: event == "held")


def ask(mock: Mock, **members: Any) -> httpx.Response:
    body = {"model": "bench-model", "messages": [{"role": "user", "content": "hi"}], **members}
    return httpx.post(f"http://127.0.0.1:{mock.ports[-1]}/v1/chat/completions", json=body, timeout=10)


def events(text: str) -> list[dict[str, Any]]:
    *parts, last, nothing = text.split("\n\n")
    assert (last, nothing) == ("data: [DONE]", "")
    return [json.loads(part.removeprefix("data: ")) for part in parts]


# --- building


@needs_compiler
def test_programs_are_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build(tmp_path)
    monkeypatch.setenv("CC", "no-such-compiler")
    assert build(tmp_path) == first


def test_without_a_compiler_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(NativeError, match="apt-get install gcc libc6-dev"):
        build(tmp_path)


@needs_compiler
def test_a_source_that_does_not_compile_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = tmp_path / "native"
    sources.mkdir()
    (sources / "mock.c").write_text("int main(void) { return nonsense; }")
    monkeypatch.setattr(natives, "SOURCES", sources)
    with pytest.raises(NativeError, match="nonsense"):
        build(tmp_path / "cache")


# --- the mock engine


def test_the_mock_answers_whole(mock: Mock) -> None:
    answer = ask(mock).json()
    assert answer["choices"][0]["message"]["content"]
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + answer["usage"]["completion_tokens"]


def test_the_mock_reports_prompts_in_proportion(mock: Mock) -> None:
    long = ask(mock, messages=[{"role": "user", "content": "word " * 4000}]).json()["usage"]["prompt_tokens"]
    assert 4000 < long < 6000


def test_the_mock_streams_as_many_chunks_as_asked_with_rising_stamps(mock: Mock) -> None:
    response = ask(mock, stream=True, max_tokens=7, seed=1)
    found = [choice for event in events(response.text) for choice in event["choices"]]
    stamps = [content[2:17] for choice in found if (content := choice["delta"].get("content"))]
    assert len(stamps) == 7
    assert stamps == sorted(stamps)
    assert [choice["finish_reason"] for choice in found if choice["finish_reason"]] == ["stop"]


def test_the_mock_reports_usage_of_streams_where_asked(mock: Mock) -> None:
    response = ask(mock, stream=True, max_tokens=3, seed=0, stream_options={"include_usage": True})
    last = events(response.text)[-1]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3
    assert all("usage" not in event for event in events(ask(mock, stream=True, max_tokens=3, seed=0).text))


def test_a_client_that_does_not_read_loses_nothing(mock: Mock) -> None:
    """The mock stands still while the socket is full, then goes on: it never piles up what nobody takes."""
    body = json.dumps({"stream": True, "max_tokens": 30_000, "seed": 0}).encode()
    with socket.create_connection(("127.0.0.1", mock.ports[0])) as connection:
        connection.settimeout(20)
        connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
        threading.Event().wait(0.5)
        seen = bytearray()
        while not seen.endswith(b"\r\n0\r\n\r\n"):
            seen += connection.recv(1 << 20)
    assert seen.count(b'"content":"t=0') == 30_000


def test_the_mock_takes_chunked_bodies_and_several_requests_at_once(mock: Mock) -> None:
    def chunks() -> Iterator[bytes]:
        yield b'{"stream":tr'
        yield b'ue,"max_tokens":2,"seed":0}'

    with httpx.Client(base_url=f"http://127.0.0.1:{mock.ports[0]}") as client:
        assert len(events(client.post("/v1/chat/completions", content=chunks()).text)) == 4
    with socket.create_connection(("127.0.0.1", mock.ports[0])) as connection:
        connection.settimeout(10)
        connection.sendall(b"GET /health HTTP/1.1\r\n\r\n" * 3)
        seen = b""
        while seen.count(b"200 OK") < 3:
            seen += connection.recv(4096)


def test_the_mock_has_what_gateways_ask_of_an_engine(mock: Mock) -> None:
    base = f"http://127.0.0.1:{mock.ports[0]}"
    assert httpx.get(f"{base}/health").status_code == 200
    assert httpx.get(f"{base}/v1/models").json()["data"][0]["id"] == "bench-model"
    assert "vllm:num_requests_running" in httpx.get(f"{base}/metrics").text
    assert httpx.get(f"{base}/nonsense").status_code == 404


# --- the load client


@pytest.mark.parametrize("values", [
    {"mode": "closed", "connections": 16}, {"mode": "closed", "body_bytes": 200 * 1024},
    {"mode": "open", "rate_per_s": 200.0},
])
def test_answers_are_counted_without_errors(built: Natives, mock: Mock, values: dict[str, Any]) -> None:
    found = load(built, mock.ports[0], **values)
    assert found.error_kinds == {}
    assert found.requests > 20
    assert found.latency_us.count == found.requests
    assert found.latency_us.p50 is not None
    assert found.latency_us.p99 is not None
    assert 0 < found.latency_us.p50 <= found.latency_us.p99 <= 1e6


def test_an_open_loop_keeps_its_rate(built: Natives, mock: Mock) -> None:
    found = load(built, mock.ports[0], mode="open", rate_per_s=400.0, seconds=1.0)
    assert 300 < found.requests < 500
    assert (found.unfinished, found.dropped) == (0, 0)


def test_an_open_loop_counts_what_is_never_answered(built: Natives) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as silent:
        found = load(built, silent.getsockname()[1], mode="open", rate_per_s=100.0)
    assert found.requests == 0
    assert found.unfinished > 20


def test_streams_are_whole_and_timed(built: Natives, mock: Mock) -> None:
    found = load(built, mock.ports[0], mode="stream", connections=10, chunks=10, interval_ms=5)
    assert found.error_kinds == {}
    assert found.chunks > 300
    assert found.relay_us.count == found.chunks
    assert found.gap_us.p50 is not None
    assert 3_000 < found.gap_us.p50 < 20_000


def test_held_streams_are_counted_and_let_go(built: Natives, mock: Mock) -> None:
    found = load(built, mock.ports[0], mode="hold", connections=50, interval_ms=NEVER_MS, chunks=10, seconds=20.0)
    assert found.streams_begun == 50


def test_a_port_without_a_server_is_an_error_and_no_result(built: Natives) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    found = load(built, port)
    assert found.requests == 0
    assert "Connection refused" in found.error_kinds


CONTENT = b'data: {"choices":[{"delta":{"content":"t=000000000000001"}}]}\n\n'
FINISH = b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n'
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize(("body", "problem"), [
    (CONTENT * 3 + FINISH + DONE, None),
    (CONTENT * 2 + FINISH + DONE, "lost or doubled"),
    (CONTENT * 4 + FINISH + DONE, "lost or doubled"),
    (CONTENT * 3 + FINISH, "without finish reason or [DONE]"),
    (CONTENT * 3 + DONE, "without finish reason or [DONE]"),
])
@pytest.mark.parametrize("cut", [1, 7, 4096])
def test_a_stream_that_is_not_whole_is_an_error(built: Natives, body: bytes, problem: str | None, cut: int) -> None:
    """However the body is cut into HTTP chunks."""
    framed = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in
                      (body[at:at + cut] for at in range(0, len(body), cut))) + b"0\r\n\r\n"
    answer = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + framed
    found = load_against(built, answer, mode="stream", connections=1, chunks=3)
    assert (found.requests > 0) is (problem is None)
    assert all(problem is not None and problem in kind for kind in found.error_kinds)
    assert bool(found.error_kinds) is (problem is not None)


@pytest.mark.parametrize(("answer", "problem"), [
    (b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n", "status 503"),
    (b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\nconnection: close\r\n\r\nshort", "ended inside an answer"),
])
def test_answers_that_are_wrong_are_errors(built: Natives, answer: bytes, problem: str) -> None:
    found = load_against(built, answer, connections=1)
    assert found.requests == 0
    assert any(problem in kind for kind in found.error_kinds)


def load_against(built: Natives, answer: bytes, **values: Any) -> LoadReport:
    """The client against a server that says the same to every request; it hangs up where the answer says so."""

    def serve(connection: socket.socket) -> None:
        # The client is killed at its end, and resets what it has open.
        with connection, contextlib.suppress(ConnectionError):
            while connection.recv(65536):
                connection.sendall(answer)
                if b"connection: close" in answer:
                    return

    def accept(server: socket.socket) -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            worker = threading.Thread(target=serve, args=(connection,))
            worker.start()
            workers.append(worker)

    workers: list[threading.Thread] = []
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        acceptor = threading.Thread(target=accept, args=(server,))
        acceptor.start()
        found = load(built, server.getsockname()[1], seconds=0.2, warm_s=0.05, **values)
        server.shutdown(socket.SHUT_RDWR)
    for worker in (acceptor, *workers):
        worker.join(timeout=10)
    return found


# --- the whole


@needs_compiler
def test_a_bench_against_the_mock_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = BenchOptions(targets=("direct",), workloads=("W1", "W4"), quick=True, repeat=1, seconds=1.0, json=True,
                           report=tmp_path / "report")
    assert run_bench(options) == 0
    said = json.loads(capsys.readouterr().out)
    w1 = [row for row in said["rows"] if row["workload"] == "W1"]
    assert [row["connections"] for row in w1] == [16, 64]
    for row in w1:
        assert row["rps"] > 500
        assert row["us_per_request"] > 0
        assert row["trusted"]
    (w4,) = [row for row in said["rows"] if row["workload"] == "W4"]
    assert w4["kb_per_stream"] > 0
    assert all(goal["met"] is None for goal in said["goals"])
    assert json.loads((tmp_path / "report/rows.json").read_text()) == said


def test_unknown_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_bench(BenchOptions(targets=("apache",))) == 2
    assert run_bench(BenchOptions(workloads=("W9",))) == 2
    assert capsys.readouterr().err.count("headrace bench: no ") == 2


class _Tags(HTMLParser):
    """Fails on a tag that is closed without having been opened, or never closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.seen.append(tag)
        if tag not in ("meta", "br", "rect"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag == "rect":
            return
        while self.open and self.open[-1] == "p" and tag != "p":
            self.open.pop()
        assert self.open.pop() == tag


def test_the_report_is_one_whole_page_with_charts() -> None:
    given = [Row("direct", "W1", 64, rps=100_000.0), Row("headrace", "W1", 64, rps=40_000.0, version="<1>"),
             Row("nginx", "W1", 64, rps=90_000.0, trusted=False, doubt="90% of direct"),
             Row("envoy", "", absent="not <installed>")]
    text = page(given, judge(given), workloads(FULL), {"machine": "a & b"})
    tags = _Tags()
    tags.feed(text)
    assert tags.open == []
    assert tags.seen.count("rect") == 3
    assert "<1>" not in text
    assert "a &amp; b" in text
    assert "90,000?" in text
    assert "not &lt;installed&gt;" in text
    assert "http" not in text
    assert "<script" not in text
