"""Figure F at the size of a test: every fault of a backend we know of, streamed and whole, beside a backend that works.

Whatever the fault, a request has one ending, and one that no client can mistake: the whole answer of one backend, an
error with its status, or an answer that visibly broke off. The faulty backend's bytes never mix with another's, the
counters agree with what the client and the backends saw, and nothing stays behind.
"""

import asyncio
import contextlib
import json
import re
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from loadtest.fault_proxy import Accept, FaultProxy, Faults
from router.app import Running
from tests.gateway_stack import chat, gateway
from tests.raw_client import at_rest, eventually, raw_exchange, request_bytes, sample
from tests.scripted_backend import SSE_HEAD, Received, Script, ScriptedBackend, completion, delta, event
from tests.told_learner import ToldLearner

pytestmark = pytest.mark.anyio
REQUESTS = 4
"""Of each mode, all at once."""
PATIENT = {"connect_s": 10.0, "first_token_s": 10.0, "inter_token_s": 10.0, "total_s": 20.0}
SHORT = {"connect_s": 1.0, "first_token_s": 1.0, "inter_token_s": 1.0, "total_s": 2.5}
"""For faults that only a timeout ends."""
JSON_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"


@dataclass(frozen=True)
class Fault:
    """How a backend fails, and what its clients may see of it: `ok`, an error's status, or `cut`."""

    break_it: Script | Faults | str
    stream: set[str]
    whole: set[str]


def says(stream: bytes, whole: bytes | None = None, *, then: str = "close") -> Script:
    """A backend that says this and then closes, resets or hangs."""

    async def script(request: Received) -> None:
        text = stream if whole is None or request.json.get("stream") else whole
        await request.write(text)
        if then == "close":
            request.writer.close()
        elif then == "reset":
            request.reset()
        elif then == "hang":
            await request.until_gone()

    return script


def answers(status: int, body: Any, **headers: str) -> Script:
    async def script(request: Received) -> None:
        await request.answer(status, body, **headers)

    return script


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


BAD = delta("bad")
ONE = SSE_HEAD + chunk(event(BAD))
WHOLE = json.dumps(completion("bad")).encode()
STREAM = event(BAD) + event(delta("", finish="stop")) + b"data: [DONE]\n\n"
SIZED = JSON_HEAD + b"content-length: %d\r\n\r\n" % len(WHOLE)
ERROR = {"error": {"message": "no", "type": "server_error", "param": None, "code": None}}

HIDDEN = {"ok"}
CUT = {"ok", "cut"}
FAULTS: dict[str, Fault] = {
    # no connection, or one that says nothing
    "refused": Fault("refused", HIDDEN, HIDDEN),
    "full backlog": Fault("full backlog", HIDDEN, HIDDEN),
    "accepted and closed": Fault(Faults(accept=Accept.CLOSE), HIDDEN, HIDDEN),
    "accepted and reset": Fault(Faults(accept=Accept.RESET), HIDDEN, HIDDEN),
    "accepted and ignored": Fault(Faults(accept=Accept.IGNORE), HIDDEN, {"504"}),
    "closed before the head": Fault(says(b""), HIDDEN, HIDDEN),
    "reset before the head": Fault(says(b"", then="reset"), HIDDEN, HIDDEN),
    "silent before the head": Fault(says(b"", then="hang"), HIDDEN, {"504"}),
    "black hole": Fault(Faults(black_hole_after=0), HIDDEN, {"504"}),
    # no HTTP
    "half a status line": Fault(says(b"HTTP/1.1 20"), HIDDEN, HIDDEN),
    "half a head": Fault(says(b"HTTP/1.1 200 OK\r\ncontent-ty"), HIDDEN, HIDDEN),
    "half a head, then silence": Fault(says(b"HTTP/1.1 200 OK\r\ncontent-ty", then="hang"), HIDDEN, {"504"}),
    "garbage": Fault(says(b"\x00\xff nonsense\r\n\r\n"), HIDDEN, HIDDEN),
    "bare body": Fault(says(WHOLE), HIDDEN, HIDDEN),
    "another protocol": Fault(says(b"SSH-2.0-OpenSSH_9.2\r\n"), HIDDEN, HIDDEN),
    "endless head": Fault(says(b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 50_000), HIDDEN, HIDDEN),
    "one long header": Fault(says(b"HTTP/1.1 200 OK\r\nx: " + b"y" * 300_000), HIDDEN, HIDDEN),
    "bad length": Fault(says(JSON_HEAD + b"content-length: x\r\n\r\n" + WHOLE), HIDDEN, HIDDEN),
    "two lengths": Fault(says(JSON_HEAD + b"content-length: 1\r\ncontent-length: 2\r\n\r\n" + WHOLE), HIDDEN, HIDDEN),
    "length and chunks": Fault(
        says(JSON_HEAD + b"content-length: 1\r\ntransfer-encoding: chunked\r\n\r\n" + WHOLE), HIDDEN, HIDDEN),
    "switches protocols": Fault(
        says(b"HTTP/1.1 101 Switching\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n", then="hang"), HIDDEN, HIDDEN),
    "continues for ever": Fault(says(b"HTTP/1.1 100 Continue\r\n\r\n" * 1000, then="hang"), HIDDEN, {"504"}),
    # statuses
    "500": Fault(answers(500, ERROR), {"ok", "500"}, {"ok", "500"}),
    "500 without JSON": Fault(answers(500, b"<html>", content_type="text/html"), {"ok", "500"}, {"ok", "500"}),
    "502": Fault(answers(502, ERROR), HIDDEN, HIDDEN),
    "503": Fault(answers(503, ERROR), HIDDEN, HIDDEN),
    "504": Fault(answers(504, ERROR), HIDDEN, HIDDEN),
    "429": Fault(answers(429, ERROR), HIDDEN, HIDDEN),
    "429 with Retry-After": Fault(answers(429, ERROR, retry_after="30"), HIDDEN, HIDDEN),
    "503 with half its body": Fault(
        says(b"HTTP/1.1 503 No\r\ncontent-length: 99\r\n\r\n{"), HIDDEN, HIDDEN),
    "400": Fault(answers(400, ERROR), {"ok", "400"}, {"ok", "400"}),
    "404": Fault(answers(404, ERROR), {"ok", "404"}, {"ok", "404"}),
    "401": Fault(answers(401, ERROR), HIDDEN, HIDDEN),
    "redirect": Fault(answers(302, b"", location="http://127.0.0.1:1/"), {"ok", "502"}, {"ok", "502"}),
    "status 999": Fault(answers(999, ERROR), {"ok", "502"}, {"ok", "502"}),
    # bodies
    "closed in mid answer": Fault(says(ONE, SIZED + WHOLE[:20]), CUT, HIDDEN),
    "reset in mid answer": Fault(says(ONE, SIZED + WHOLE[:20], then="reset"), CUT, HIDDEN),
    "silent in mid answer": Fault(says(ONE, SIZED + WHOLE[:20], then="hang"), CUT, {"504"}),
    "closed behind the head": Fault(says(SSE_HEAD, SIZED), HIDDEN, HIDDEN),
    "silent behind the head": Fault(says(SSE_HEAD, SIZED, then="hang"), HIDDEN, {"504"}),
    "comments only": Fault(says(SSE_HEAD + chunk(b": ping\n\n") * 5, SIZED, then="hang"), HIDDEN, {"504"}),
    "half an event": Fault(says(SSE_HEAD + chunk(b'data: {"choi'), SIZED), HIDDEN, HIDDEN),
    "bad chunk": Fault(says(ONE + b"zz\r\n", JSON_HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n"), CUT, HIDDEN),
    "no last chunk": Fault(
        says(ONE, JSON_HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunk(WHOLE)), CUT, HIDDEN),
    "no finish": Fault(says(ONE + b"0\r\n\r\n", SIZED + WHOLE), CUT, HIDDEN),
    "no done": Fault(
        says(ONE + chunk(event(delta("", finish="stop"))) + b"0\r\n\r\n", SIZED + WHOLE), HIDDEN, HIDDEN),
    "done, and then silence": Fault(says(SSE_HEAD + chunk(STREAM), SIZED + WHOLE, then="hang"), HIDDEN, HIDDEN),
    "finish, and then a reset": Fault(
        says(ONE + chunk(event(delta("", finish="stop"))), SIZED + WHOLE, then="reset"), {"ok", "cut"}, {"ok"}),
    "error event": Fault(says(ONE + chunk(event(ERROR)) + b"0\r\n\r\n", SIZED + WHOLE), {"ok", "told"}, HIDDEN),
    "error event, then silence": Fault(
        says(ONE + chunk(event(ERROR)), SIZED + WHOLE, then="hang"), {"ok", "told", "cut"}, HIDDEN),
    "gives the request up": Fault(
        says(ONE + chunk(event(delta("", finish="abort"))) + b"0\r\n\r\n", SIZED + WHOLE), CUT, HIDDEN),
    "invalid UTF-8": Fault(
        says(SSE_HEAD + chunk(b"data: \xff\xfe\n\n" + STREAM) + b"0\r\n\r\n", SIZED + WHOLE), HIDDEN, HIDDEN),
    "NULs": Fault(says(SSE_HEAD + chunk(b"data: \0\n\n" + STREAM) + b"0\r\n\r\n", SIZED + WHOLE), HIDDEN, HIDDEN),
    "a second answer behind the first": Fault(
        says(SSE_HEAD + chunk(STREAM) + b"0\r\n\r\n" + SIZED + WHOLE, (SIZED + WHOLE) * 2), HIDDEN, HIDDEN),
    "a body longer than its length": Fault(
        says(SSE_HEAD + chunk(STREAM) + b"0\r\n\r\nrest", SIZED + WHOLE + b"rest"), HIDDEN, HIDDEN),
    # the network
    "segments of three bytes": Fault(Faults(piece_bytes=3), HIDDEN, HIDDEN),
    "late": Fault(Faults(latency_s=0.05), HIDDEN, HIDDEN),
    "a slow link": Fault(Faults(bytes_per_s=4000), HIDDEN, HIDDEN),
    "reset after 20 bytes": Fault(Faults(reset_after=20), HIDDEN, HIDDEN),
    "reset after 150 bytes": Fault(Faults(reset_after=150), CUT, HIDDEN),
    "closed after 300 bytes": Fault(Faults(close_after=300), CUT, HIDDEN),
    "half closed after 300 bytes": Fault(Faults(half_close_after=300), CUT, HIDDEN),
    "black hole after 300 bytes": Fault(Faults(black_hole_after=300), CUT, {"504"}),
    "black hole after 60 bytes": Fault(Faults(black_hole_after=60), HIDDEN, {"504"}),
}  # fmt: skip


def test_there_are_enough() -> None:
    assert len(FAULTS) >= 40
    assert FAULTS.keys() > WAITED_FOR


def named(name: str) -> Script:
    async def script(request: Received) -> None:
        if request.json.get("stream"):
            await request.events(*[delta(name)] * 3, delta("", finish="stop"))
        else:
            await request.answer(200, completion(name))

    return script


@contextlib.asynccontextmanager
async def broken(fault: Fault) -> AsyncIterator[tuple[dict[str, Any], ScriptedBackend | None]]:
    """An entry for the fleet file, and the backend that keeps count where one is reached."""
    how = fault.break_it
    if isinstance(how, str):
        with socket.socket() as listener, contextlib.ExitStack() as fillers:
            listener.bind(("127.0.0.1", 0))
            if how == "full backlog":
                listener.listen(0)
                for _ in range(4):
                    filler = fillers.enter_context(socket.socket())
                    filler.setblocking(False)
                    filler.connect_ex(listener.getsockname())
            yield {"url": f"http://127.0.0.1:{listener.getsockname()[1]}"}, None
        return
    async with ScriptedBackend(named("bad") if isinstance(how, Faults) else how).serving() as backend:
        if not isinstance(how, Faults):
            yield {"url": backend.url, "served_model_name": "served"}, backend
            return
        async with FaultProxy(backend.url, how).serving() as proxy:
            yield {"url": proxy.url, "served_model_name": "served"}, backend


def ending(raw: bytes, *, stream: bool) -> str:
    """How one exchange ended for its client: `ok`, `cut`, `told`, or the status of an error. Fails on anything else."""
    assert len(re.findall(rb"HTTP/1\.1 \d{3} ", raw)) == 1, raw
    head, _, body = raw.partition(b"\r\n\r\n")
    status = head[9:12].decode()
    if status != "200":
        assert json.loads(body)["error"]["code"] is not None or int(status) < 500 or b"no" in body
        return status
    assert not (b"bad" in body and b"good" in body), "two backends in one answer"
    if not stream:
        assert int(re.search(rb"content-length: (\d+)", head)[1]) == len(body)  # type: ignore[index]
        assert json.loads(body)["choices"]
        return "ok"
    whole, errors = body.endswith(b"0\r\n\r\n"), body.count(b'data: {"error"')
    assert errors <= 1
    if not whole:
        assert errors == 1, "cut off without a word"
        assert b"[DONE]" not in body
        return "cut"
    if errors:
        return "told"
    assert b'"finish_reason": "stop"' in body
    return "ok"


WAITED_FOR = {
    "full backlog", "accepted and ignored", "silent before the head", "black hole", "half a head, then silence",
    "continues for ever", "silent in mid answer", "silent behind the head", "comments only",
    "black hole after 300 bytes", "black hole after 60 bytes",
}  # fmt: skip
AT_ONCE = 6
IN_ORDER = sorted(FAULTS, key=WAITED_FOR.__contains__)
GROUPS = [IN_ORDER[start : start + AT_ONCE] for start in range(0, len(FAULTS), AT_ONCE)]


@pytest.mark.parametrize("names", GROUPS, ids=lambda names: f"{names[0]} to {names[-1]}")
async def test_a_fault_has_one_ending(tmp_path: Path, names: list[str]) -> None:
    found = await asyncio.gather(*[one_fault(tmp_path, name) for name in names])
    assert {name: what for name, what in zip(names, found, strict=True) if what is not None} == {}


async def one_fault(folder: Path, name: str) -> str | None:
    """What is wrong with how a gateway bears a fault, if anything; it meets streamed and whole requests at once."""
    fault, rare = FAULTS[name], {"interval_s": 300, "timeout_s": 1}
    (own := folder / name).mkdir()
    async with (
        broken(fault) as (entry, backend),
        ScriptedBackend(named("good")).serving() as good,
        gateway(own, [entry, good], timeouts=SHORT if name in WAITED_FOR else PATIENT, poll=rare) as process,
    ):
        process.gateway.fleet.learner = learner = ToldLearner(process.gateway.fleet.learner)
        modes = (True, False) * REQUESTS
        raws = await asyncio.gather(*[
            raw_exchange(process, request_bytes(chat(stream=stream), headers="connection: close\r\n"))
            for stream in modes
        ])
        try:
            endings = [ending(raw, stream=stream) for raw, stream in zip(raws, modes, strict=True)]
            for of_mode, allowed in ((endings[::2], fault.stream), (endings[1::2], fault.whole)):
                assert set(of_mode) <= allowed | {"ok"}, "another ending"
            assert "ok" in endings  # what the good backend was asked first
            await eventually(lambda: at_rest(process))
            balanced(process, endings, backend, good)
            assert learner.is_even(), "an attempt without its one end"
            assert len(learner.sents) == sample(process, "headrace_attempts_total")
            if backend is not None:
                await eventually(lambda: backend.open_connections <= idle_connections(process))
        except (AssertionError, TimeoutError) as error:
            return f"{error!r}"
    return None


def idle_connections(process: Running) -> int:
    """Connections to the faulty backend that are kept for reuse, which is right after a whole answer."""
    return process.gateway.fleet.backends["b0"].pool.idle_connections


def balanced(process: Running, endings: list[str], backend: ScriptedBackend | None, good: ScriptedBackend) -> None:
    """The counters say what clients and backends saw."""
    assert sample(process, "headrace_requests_total") == len(endings)
    counted = {
        "ok": sample(process, "headrace_requests_total", outcome="ok"),
        "cut": sample(process, "headrace_requests_total", outcome="truncated", status="200")
        + sample(process, "headrace_requests_total", outcome="timeout", status="200")
        + sample(process, "headrace_requests_total", outcome="backend_error", status="200"),
    }
    assert counted["ok"] == endings.count("ok")
    assert counted["cut"] == endings.count("cut") + endings.count("told")
    for status in {ending for ending in endings if ending.isdigit()}:
        assert sample(process, "headrace_requests_total", status=status) == endings.count(status)
    attempts = sample(process, "headrace_attempts_total")
    assert attempts == len(endings) + sample(process, "headrace_retries_total")
    assert sample(process, "headrace_attempts_total", backend="b1") == len(good.requests)
    assert sample(process, "headrace_attempts_total", backend="b1", outcome="success") == len(good.requests)
    if backend is not None:  # one on a kept connection that breaks is sent again on a fresh one
        assert len(backend.requests) <= 2 * sample(process, "headrace_attempts_total", backend="b0")
    assert sample(process, "headrace_requests_total", outcome="internal_error") == 0
