"""A client that leaves, in every phase of its request: the engine stops, the books close, no backend is blamed."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from backends.embedded.model_files import MODEL_NAME
from tests.e2e.conftest import LlamaFleet
from tests.processes import FakeEngine, GatewayProcess, RawStream, ask, fake_engines, gateway_process, until
from tests.scripted_backend import SSE_HEAD, Received, ScriptedBackend, delta, event

MANY_TOKENS = 20_000
FIRST_TOKEN_LATE = "slow x2000"  # the answer's head comes at once, its first token after a minute


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("client_gone")


@pytest.fixture(scope="module")
def shared_engine(folder: Path) -> Iterator[FakeEngine]:
    with fake_engines(folder, ["b0"]) as (engine,):
        yield engine


@pytest.fixture(scope="module")
def gateway(folder: Path, shared_engine: FakeEngine) -> Iterator[GatewayProcess]:
    with gateway_process(folder, [shared_engine.backend], timeouts={"first_token_s": 60}) as process:
        yield process


@pytest.fixture
def engine(shared_engine: FakeEngine) -> Iterator[FakeEngine]:
    yield shared_engine
    shared_engine.set_faults()


class Counts:
    """What the gateway has counted so far, to be held against what it counts later."""

    def __init__(self, gateway: GatewayProcess) -> None:
        self._gateway = gateway
        self._closed = self._count_closed()
        self._all = gateway.metric("headrace_requests_total")
        self._left = gateway.metric("headrace_attempts_total", outcome="client_gone")
        self._attempts = gateway.metric("headrace_attempts_total")
        self._failed = gateway.backend("b0")["failed_requests"]

    def _count_closed(self) -> float:
        return self._gateway.metric("headrace_requests_total", status="499", outcome="client_closed")

    def check_one_client_left(self, *, attempts: int = 1) -> None:
        """One request more, counted as closed by its client; nothing held, nothing booked against the backend."""
        gateway = self._gateway
        until(lambda: self._count_closed() == self._closed + 1, "the request to be counted as 499", limit_s=5)
        gateway.await_empty_books()
        assert gateway.metric("headrace_requests_total") == self._all + 1
        assert gateway.metric("headrace_attempts_total", outcome="client_gone") == self._left + attempts
        assert gateway.metric("headrace_attempts_total") == self._attempts + attempts
        assert gateway.metric("headrace_backend_in_flight_requests") == 0
        assert gateway.metric("headrace_backend_in_flight_tokens") == 0
        backend = gateway.backend("b0")
        assert backend["failed_requests"] == self._failed
        assert backend["health"]["state"] == "healthy"


@pytest.mark.parametrize("share", [0.0, 0.5], ids=["before_the_body", "within_the_body"])
def test_before_the_request_is_whole(engine: FakeEngine, gateway: GatewayProcess, share: float) -> None:
    known, counts = len(engine.requests()), Counts(gateway)
    with RawStream(gateway.url).send(share):
        until(lambda: gateway.fleet()["in_flight"] == 1, "the gateway to have begun")
    counts.check_one_client_left(attempts=0)
    assert len(engine.requests()) == known, "no engine heard of it"


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_while_the_engine_has_not_answered_at_all(engine: FakeEngine, gateway: GatewayProcess, stream: bool) -> None:
    engine.set_faults("hang")
    counts = Counts(gateway)
    with RawStream(gateway.url, stream=stream).send():
        until(lambda: engine.in_flight() == 1, "the engine to hold it")
        assert gateway.in_flight("b0") == 1
    until(lambda: engine.in_flight() == 0, "the engine to notice", limit_s=5)
    counts.check_one_client_left()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_before_the_first_token(engine: FakeEngine, gateway: GatewayProcess, path: str) -> None:
    engine.set_faults(FIRST_TOKEN_LATE)
    known, counts = len(engine.requests()), Counts(gateway)
    with RawStream(gateway.url, path=path).send():
        until(lambda: len(engine.requests()) > known, "the engine to have it")
        assert gateway.backend("b0")["in_flight"]["prefill_tokens"] > 0
    row = until(lambda: _cancelled(engine), "the engine to cancel it", limit_s=5)
    assert row["first_token_at_s"] is None
    assert row["tokens_emitted"] == 0
    counts.check_one_client_left()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_in_mid_stream(engine: FakeEngine, gateway: GatewayProcess, path: str) -> None:
    counts = Counts(gateway)
    with RawStream(gateway.url, path=path, max_tokens=MANY_TOKENS).send() as stream:
        stream.read_until(b" t20")
        assert gateway.backend("b0")["in_flight"]["context_tokens"] > 20
    row = until(lambda: _cancelled(engine), "the engine to cancel it", limit_s=5)
    assert 20 < row["tokens_emitted"] < MANY_TOKENS
    counts.check_one_client_left()


def test_while_a_whole_answer_is_made(engine: FakeEngine, gateway: GatewayProcess) -> None:
    counts = Counts(gateway)
    with RawStream(gateway.url, stream=False, max_tokens=MANY_TOKENS).send():
        until(lambda: (rows := engine.requests()) and rows[-1]["tokens_emitted"] > 5, "the engine to be at work")
    row = until(lambda: _cancelled(engine), "the engine to cancel it", limit_s=5)
    assert row["tokens_emitted"] < MANY_TOKENS
    counts.check_one_client_left()


def test_many_at_once_leave_nothing_behind(engine: FakeEngine, gateway: GatewayProcess) -> None:
    closed = gateway.metric("headrace_requests_total", outcome="client_closed")
    streams = [RawStream(gateway.url, max_tokens=MANY_TOKENS).send() for _ in range(30)]
    streams[0].read_until(b" t2")
    for stream in streams:
        stream.socket.close()
    until(lambda: gateway.metric("headrace_requests_total", outcome="client_closed") == closed + 30, "30 times 499")
    gateway.await_empty_books()
    until(lambda: engine.in_flight() == 0, "the engine to be idle", limit_s=5)
    assert all(row["cancelled_at_s"] is not None for row in engine.requests()[-30:])


@pytest.mark.anyio
async def test_between_the_last_token_and_done(tmp_path: Path) -> None:
    """No engine can be made to pause there, so a scripted one plays it."""

    async def script(request: Received) -> None:
        await request.write(SSE_HEAD)
        await request.chunk(event(delta("hel")) + event(delta("lo", finish="stop")))
        await request.until_gone()

    def leave(backend: ScriptedBackend) -> None:
        entry = {"url": backend.url, "served_model_name": backend.served_model_name}
        with gateway_process(tmp_path, [entry]) as gateway:
            counts = Counts(gateway)
            with RawStream(gateway.url).send() as stream:
                stream.read_until(b'"stop"')
                assert not backend.requests[0].gone.is_set()
            until(backend.requests[0].gone.is_set, "the engine to see its socket closed", limit_s=5)
            counts.check_one_client_left()

    async with ScriptedBackend(script).serving() as backend:
        await asyncio.to_thread(leave, backend)


def test_a_client_that_read_its_answer_to_the_end_has_not_left(engine: FakeEngine, gateway: GatewayProcess) -> None:
    """The contrary: closing right after `[DONE]`, or after the terminator, is no departure."""
    closed = gateway.metric("headrace_requests_total", outcome="client_closed")
    succeeded = gateway.metric("headrace_requests_total", outcome="ok")
    for _ in range(20):
        with RawStream(gateway.url, max_tokens=3).send() as stream:
            stream.read_until(b"data: [DONE]\n\n")
    until(lambda: gateway.metric("headrace_requests_total", outcome="ok") == succeeded + 20, "20 answers", limit_s=5)
    assert gateway.metric("headrace_requests_total", outcome="client_closed") == closed


@pytest.mark.real_engine
def test_llamacpp_stops_for_a_client_that_left(llama_fleet: LlamaFleet) -> None:
    """By the engines' own metrics: one request is processed, and within a second none is."""
    gateway = llama_fleet.gateway

    def processing() -> float:
        pages = [ask(engine.url, "/metrics")[1].decode() for engine in llama_fleet.engines]
        return sum(float(line.split()[1]) for page in pages for line in page.splitlines()
                   if line.startswith("llamacpp:requests_processing "))

    assert processing() == 0
    closed = gateway.metric("headrace_requests_total", outcome="client_closed")
    with RawStream(gateway.url, model=MODEL_NAME, max_tokens=900, ignore_eos=True).send() as stream:
        stream.read_until(b'"content":"')
        assert processing() == 1
    left_s = time.monotonic()
    until(lambda: processing() == 0, "llama.cpp to stop", limit_s=5)
    print(f"llama.cpp stopped {time.monotonic() - left_s:.2f} s after its client left")
    until(lambda: gateway.metric("headrace_requests_total", outcome="client_closed") == closed + 1, "499 to be counted")
    gateway.await_empty_books()


def _cancelled(engine: FakeEngine) -> dict[str, Any]:
    """The last request there, once it is cancelled; else nothing."""
    rows = engine.requests()
    return rows[-1] if rows and rows[-1]["cancelled_at_s"] is not None else {}
