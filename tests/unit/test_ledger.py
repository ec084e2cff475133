"""The decision log: what a line says, what it never says, and that nothing on the disk reaches a request."""

import errno
import json
import logging
import os
import re
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import inf, isclose
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

import router.record.log_file
from backends.catalog.health import Health, HealthState
from policies.attempts import FailureCause
from policies.estimate import Estimate, predict
from policies.facts import RequestFacts
from policies.filters import Rejection
from policies.policy import Decision, Pipeline, Priced, Rejected
from policies.registry import build_pipeline
from policies.spec import PolicySpec
from router.keys.ring import Principal
from router.record.decision_record import DecisionRecord, record_of
from router.record.grounds import MAX_LISTED, grounds_of
from router.record.ledger import SLICE_RECORDS, Ledger
from router.record.log_file import LogFile
from router.request.exchange import Exchange, HedgeEnd, Outcome, Tried
from router.request.intake import Endpoint
from router.wire.answer_members import Usage
from tests.policy_fleet import NOW_S, ROOMY, a_backend, a_request, choose, decoding

pytestmark = pytest.mark.real_time

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "decision-record.md").read_text(encoding="utf-8")
CANARY = "CANARY-7f3a"
GENERATION: Any = SimpleNamespace(config_hash="c0ffee")
GENEROUS_S = 20.0


def pipeline() -> Pipeline:
    return build_pipeline(PolicySpec(name="headrace"))


def settled(decision: Decision | None = None, facts: RequestFacts | None = None, **given: Any) -> Exchange:
    """A streamed request that ended well, 2 s after its body had come."""
    fields: dict[str, Any] = {
        "endpoint": Endpoint.CHAT_COMPLETIONS, "request_id": "r1", "generation": GENERATION,
        "principal": Principal("search-1", "search"), "status": 200, "outcome": Outcome.OK,
        "began_at_s": NOW_S - 0.25, "received_at_s": NOW_S, "ended_at_s": NOW_S + 2.0, "waited_s": 0.4,
        "overhead_s": 0.00012, "first_token_at_s": NOW_S + 0.5, "last_token_at_s": NOW_S + 1.9,
        "usage": Usage(410, 15), "facts": facts,
    }
    exchange = Exchange(**{**fields, **given})
    if decision is not None:
        exchange.decided(decision, NOW_S)
    return exchange


def a_decision(*names: str, facts: RequestFacts | None = None) -> Decision:
    backends = [decoding(name, streams) for streams, name in enumerate(names, 2)]
    sick = a_backend("sick", health=Health(HealthState.UNHEALTHY))
    return choose(pipeline(), facts or a_request(budget=ROOMY), *backends, sick, a_backend("other", model="x"))


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def until(what: Any) -> None:
    """Wait for something that must come."""
    deadline = time.monotonic() + GENEROUS_S
    while not what():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.005)


@pytest.fixture(name="path")
def a_path(tmp_path: Path) -> Path:
    return tmp_path / "log" / "decisions.jsonl"


@pytest.fixture(name="ledger")
def a_ledger(path: Path) -> Iterator[Ledger]:
    ledger = Ledger(path, clock=lambda: NOW_S + 3.0, wall_clock=lambda: 1_800_000_003.0)
    yield ledger
    assert ledger.close(GENEROUS_S)


# --- what a line says -----------------------------------------------------------------------------------------------


def test_a_line_says_what_was_decided_why_and_what_came_of_it(ledger: Ledger, path: Path) -> None:
    facts = a_request(budget=ROOMY, stream=True, max_output_tokens=64)
    first, last = a_decision("a", "b", "c", facts=facts), a_decision("b", "c", facts=facts)
    ledger.append(settled(last, facts, tried=[
        Tried("a", first.reason, first.price, FailureCause.CONNECT, NOW_S + 0.01, NOW_S + 0.11),
        Tried("b", last.reason, last.price, None, NOW_S + 0.12, NOW_S + 2.0)]))
    assert ledger.close(GENEROUS_S)
    (line,) = lines_of(path)

    chosen = last.chosen
    assert chosen is not None
    estimate = predict(facts, chosen, NOW_S)
    expected = {
        "v": 1, "time": "2027-01-15T08:00:02.000Z", "request_id": "r1", "tenant": "search", "key_id": "search-1",
        "endpoint": "/v1/chat/completions", "model": facts.model, "latency_class": "default", "status": 200,
        "outcome": "ok", "backend": "b", "policy": "headrace", "reason": last.reason, "price": last.price,
        "coefficients": "test", "config_hash": "c0ffee", "stream": True, "prompt_tokens_estimate": 400,
        "max_output_tokens": 64, "expected_output_tokens": 128,
        "budget": {"ttft_s": 10.0, "inter_token_s": 1.0, "e2e_s": 100.0},
        "received_s": 0.25, "waited_s": 0.4, "overhead_ms": 0.12, "ttft_s": 0.5, "tpot_s": 0.1, "total_s": 2.0,
        "prompt_tokens": 410, "generated_tokens": 15, "candidate_count": 2, "rejected_count": 2,
        "rejected": [{"backend": "sick", "reason": "unhealthy"}],
    }
    assert {name: line[name] for name in expected} == expected
    for name, value in (("ttft", estimate.ttft_s), ("tpot", estimate.tpot_s), ("e2e", estimate.e2e_s)):
        assert isclose(line[f"predicted_{name}_s"], value, abs_tol=1e-6)
    assert [entry["backend"] for entry in line["attempts"]] == ["a", "b"]
    assert line["attempts"][0] == {"backend": "a", "reason": first.reason, "price": first.price, "cause": "connect",
                                   "hedge": False, "began_s": 0.26, "took_s": 0.1}
    assert line["attempts"][1]["cause"] is None
    assert line["hedge"] is None

    assert [entry["backend"] for entry in line["candidates"]] == ["b", "c"]
    for entry, priced in zip(line["candidates"], last.candidates, strict=True):
        assert entry["price"] == priced.price
        assert entry["terms"] == dict(priced.terms)
        assert isclose(sum(entry["terms"].values()), entry["price"])
        assert entry["ttft_s"] == predict(facts, priced.backend, NOW_S).ttft_s
        assert entry["in_flight"] == priced.backend.in_flight_requests
        assert (entry["coefficients"], entry["drift"], entry["late_s"]) == ("test", 1.0, 0.0)


def test_a_hedge_and_the_attempt_that_it_made_useless_are_in_the_line(ledger: Ledger, path: Path) -> None:
    facts = a_request(budget=ROOMY)
    decision = a_decision("a", "b", facts=facts)
    ledger.append(settled(decision, facts, hedge=HedgeEnd.WON, tried=[
        Tried("a", "r", 1.0, FailureCause.SUPERSEDED, NOW_S, NOW_S + 1.5),
        Tried("b", "hedge of a", 2.0, None, NOW_S + 1.0, NOW_S + 2.0, is_hedge=True)]))
    assert ledger.close(GENEROUS_S)
    (line,) = lines_of(path)
    assert line["hedge"] == "won"
    assert [(entry["hedge"], entry["cause"], entry["took_s"]) for entry in line["attempts"]] == [
        (False, "superseded", 1.5), (True, None, 1.0)]


def test_a_request_that_was_never_decided_on_has_its_line(ledger: Ledger, path: Path) -> None:
    ledger.append(settled(status=401, outcome=Outcome.REFUSED, principal=None, received_at_s=0.0, overhead_s=None,
                          first_token_at_s=None, last_token_at_s=None, usage=None))
    ledger.close(GENEROUS_S)
    (line,) = lines_of(path)
    unknown = ("backend", "policy", "reason", "price", "coefficients", "stream", "prompt_tokens_estimate", "budget",
               "received_s", "overhead_ms", "ttft_s", "tpot_s", "predicted_ttft_s", "prompt_tokens",
               "generated_tokens")
    assert {name: line[name] for name in unknown} == dict.fromkeys(unknown)
    assert (line["candidates"], line["rejected"], line["attempts"]) == ([], [], [])
    assert line["total_s"] == 2.25  # from its head on


def test_nobody_to_serve_is_said_with_every_reason(ledger: Ledger, path: Path) -> None:
    decision = choose(pipeline(), a_request(), a_backend("a", health=Health(HealthState.UNHEALTHY)),
                      a_backend("b", context_tokens=10))
    ledger.append(settled(decision, a_request(), status=503, outcome=Outcome.NO_BACKEND))
    ledger.close(GENEROUS_S)
    (line,) = lines_of(path)
    assert line["backend"] is None
    assert line["reason"].startswith("no backend")
    assert {entry["backend"]: entry["reason"] for entry in line["rejected"]} == {
        "a": "unhealthy", "b": "context_too_small"}


def test_a_backend_without_coefficients_is_said_to_be_assumed() -> None:
    decision = choose(pipeline(), a_request(), a_backend("a", coefficients=None))
    record = record_of(settled(decision, a_request()), 0.0)
    assert (record.coefficients, record.candidates[0].coefficients) == ("assumed", "assumed")


def test_numbers_that_json_does_not_know_are_null(ledger: Ledger, path: Path) -> None:
    view = a_backend("a")
    decision = Decision("p", view, "r", inf, (Priced(view, inf, (("x", inf),), inf),), (), "c0ffee")
    ledger.append(settled(decision, a_request()))
    ledger.close(GENEROUS_S)
    (line,) = lines_of(path)
    (entry,) = line["candidates"]
    assert (line["price"], entry["price"], entry["terms"], entry["late_s"]) == (None, None, {"x": None}, None)


def test_the_grounds_of_a_stream_are_packed_and_nothing_of_them_is_lost(ledger: Ledger, path: Path) -> None:
    facts = a_request(budget=ROOMY, stream=True)
    decision = a_decision("a", "b", "c", "d", facts=facts)
    whole, light = settled(decision, facts), settled(decision, facts)
    light.packed_grounds = grounds_of(decision, facts, NOW_S).packed()
    light.decision = None
    ledger.append(whole)
    ledger.append(light)
    ledger.close(GENEROUS_S)
    first, second = lines_of(path)
    assert first == second
    assert len(light.packed_grounds) < len(json.dumps(first["candidates"])) / 2


def test_a_candidate_that_needed_no_prediction_has_none_unless_the_policy_predicts_nothing() -> None:
    facts = a_request(budget=ROOMY)
    views = [decoding(name, 2) for name in "abc"]
    estimate = predict(facts, views[0], NOW_S)

    def ttfts(*estimates: Estimate | None) -> list[float | None]:
        priced = tuple(Priced(view, 1.0, (), 0.0, known) for view, known in zip(views, estimates, strict=True))
        grounds = grounds_of(Decision("p", views[1], "r", 1.0, priced, (), "h"), facts, NOW_S)
        assert grounds.expected is not None
        return [entry.ttft_s for entry in grounds.candidates]

    all_known = [predict(facts, view, NOW_S).ttft_s for view in views]
    assert ttfts(estimate, None, None) == [all_known[0], all_known[1], None]
    assert ttfts(None, None, None) == all_known


def test_a_large_fleet_does_not_make_a_large_line() -> None:
    views = [a_backend(f"b{number:03d}") for number in range(500)]
    candidates = tuple(Priced(view, float(500 - number)) for number, view in enumerate(views))
    rejected = (*(Rejected(f"o{n}", Rejection.OTHER_MODEL) for n in range(400)),
                *(Rejected(f"r{n}", Rejection.UNHEALTHY) for n in range(400)))
    record = record_of(settled(Decision("p", views[3], "r", 497.0, candidates, rejected, "h"), a_request()), 0.0)
    listed = [entry.backend for entry in record.candidates]
    assert (record.candidate_count, record.rejected_count) == (500, 800)
    assert listed == ["b003", *(f"b{number:03d}" for number in range(499, 499 - MAX_LISTED + 1, -1))]
    assert [entry.reason for entry in record.rejected] == ["unhealthy"] * MAX_LISTED
    assert record.predicted_ttft_s is not None


def test_the_page_has_one_row_for_each_field_and_none_that_is_gone(ledger: Ledger, path: Path) -> None:
    facts = a_request(budget=ROOMY)
    decision = a_decision("a", "b", facts=facts)
    ledger.append(settled(decision, facts, tried=[Tried("a", "r", 1.0, None, NOW_S, NOW_S + 1.0)]))
    ledger.close(GENEROUS_S)
    (line,) = lines_of(path)

    def fields(value: dict[str, Any], prefix: str = "") -> Iterator[str]:
        for name, inner in value.items():
            yield prefix + name
            if isinstance(inner, list) and inner and isinstance(inner[0], dict):
                yield from fields(inner[0], f"{prefix}{name}[].")
            elif isinstance(inner, dict) and name != "terms":
                yield from fields(inner, f"{prefix}{name}.")

    written = list(fields(line))
    assert written == re.findall(r"^\| `([\w.\[\]]+)` \|", PAGE, re.MULTILINE)
    assert [name for name in written if "." not in name] == list(DecisionRecord.__struct_fields__)


def test_no_line_holds_a_key_an_address_a_label_or_anything_of_the_request(ledger: Ledger, path: Path) -> None:
    """Everything that a decision refers to is filled with canaries, but for what a record is meant to name."""
    view = a_backend("a", api_key=CANARY, url=f"http://{CANARY}", served_model_name=CANARY, site=CANARY,
                     labels={CANARY: CANARY}, engine=CANARY, card_type=CANARY, quantization=CANARY,
                     health=Health(HealthState.HEALTHY, detail=CANARY))
    facts = replace(a_request(budget=ROOMY), session_key=CANARY, tried=(CANARY,))
    decision = choose(pipeline(), facts, view)
    ledger.append(settled(decision, facts, tried=[Tried("a", decision.reason, 1.0, "connect", 1.0, 2.0)]))
    ledger.close(GENEROUS_S)
    assert decision.chosen is view
    text = path.read_text()
    assert '"backend":"a"' in text
    assert CANARY not in text


# --- the queue ------------------------------------------------------------------------------------------------------


def test_every_record_is_written_once_and_in_order(path: Path) -> None:
    ledger = Ledger(path, queue_records=100_000)
    for number in range(5000):
        ledger.append(settled(request_id=f"r{number}"))
    assert ledger.close(GENEROUS_S)
    assert [line["request_id"] for line in lines_of(path)] == [f"r{number}" for number in range(5000)]
    assert (ledger.written, ledger.dropped, ledger.failed, ledger.waiting) == (5000, 0, 0, 0)


def test_records_are_written_without_waiting_for_the_end(ledger: Ledger, path: Path) -> None:
    ledger.append(settled())
    until(lambda: ledger.written == 1)
    assert len(lines_of(path)) == 1


class StalledDisk:
    """Takes the first write and says nothing until `answer`; that write is lost, later ones are real."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = threading.Event()
        self._answered = threading.Event()
        self._write_all = router.record.log_file._write_all
        monkeypatch.setattr(router.record.log_file, "_write_all", self._stall)

    def answer(self) -> None:
        self._answered.set()

    def _stall(self, handle: int, data: bytes) -> None:
        if self.asked.is_set():
            self._write_all(handle, data)
        self.asked.set()
        self._answered.wait(GENEROUS_S)


def test_a_full_queue_drops_the_new_and_counts_them(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = StalledDisk(monkeypatch)
    ledger = Ledger(path, queue_records=10)
    ledger.append(settled(request_id="first"))
    assert disk.asked.wait(GENEROUS_S)
    began = time.monotonic()
    for number in range(1000):
        ledger.append(settled(request_id=f"r{number}"))
    assert time.monotonic() - began < GENEROUS_S / 2, "appending waited for the disk"
    assert (ledger.waiting, ledger.dropped) == (10, 990)
    disk.answer()
    assert ledger.close(GENEROUS_S)
    assert [line["request_id"] for line in lines_of(path)] == [f"r{number}" for number in range(10)]


def test_closing_is_bounded_even_where_the_disk_never_answers(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = StalledDisk(monkeypatch)
    ledger = Ledger(path)
    ledger.append(settled())
    assert disk.asked.wait(GENEROUS_S)
    began = time.monotonic()
    assert not ledger.close(0.1)
    assert time.monotonic() - began < GENEROUS_S / 2
    ledger.append(settled())
    assert ledger.dropped == 1
    disk.answer()
    assert ledger.close(GENEROUS_S)


def test_a_record_that_cannot_be_encoded_costs_only_itself(
    ledger: Ledger, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for request_id in ("a", "\ud800", "b", "\udfff", "c"):
        ledger.append(settled(request_id=request_id))
    ledger.append(settled(request_id="d", facts=object()))  # type: ignore[arg-type]  # a bug
    ledger.append(settled(request_id="e"))
    assert ledger.close(GENEROUS_S)
    assert [line["request_id"] for line in lines_of(path)] == ["a", "b", "c", "e"]
    assert (ledger.written, ledger.failed) == (4, 2 + 1)
    assert len(caplog.records) == 1


class Loop:
    """The turns of an event loop, taken by hand."""

    def __init__(self) -> None:
        self.asked: list[Callable[[], None]] = []

    def later(self, what: Callable[[], None]) -> None:
        self.asked.append(what)

    def turn(self) -> None:
        asked, self.asked = self.asked, []
        for what in asked:
            what()


def test_appending_makes_no_line_and_a_turn_of_the_loop_makes_a_slice(path: Path) -> None:
    loop = Loop()
    ledger = Ledger(path, later=loop.later)
    for number in range(3 * SLICE_RECORDS + 1):
        ledger.append(settled(request_id=f"r{number}"))
    assert len(loop.asked) == 1
    assert len(ledger._queue) == ledger.waiting == 3 * SLICE_RECORDS + 1
    turns = 0
    while loop.asked:
        before = len(ledger._queue)
        loop.turn()
        turns += 1
        assert before - len(ledger._queue) <= SLICE_RECORDS
    assert turns == 4
    until(lambda: ledger.written == 3 * SLICE_RECORDS + 1)
    ledger.append(settled(request_id="last"))
    assert ledger.close(GENEROUS_S)  # whose turn never came
    assert [line["request_id"] for line in lines_of(path)] == [
        *(f"r{number}" for number in range(3 * SLICE_RECORDS + 1)), "last"]


def test_appending_is_cheaper_than_making_a_line(path: Path) -> None:
    decision, facts = a_decision(*(f"b{number}" for number in range(8))), a_request(budget=ROOMY)
    ledger = Ledger(path, queue_records=100_000, later=Loop().later)
    exchange = settled(decision, facts)
    encode = msgspec.json.Encoder().encode

    def seconds(work: Any) -> float:
        best = inf
        for _ in range(5):
            began = time.perf_counter()
            for _ in range(300):
                work()
            best = min(best, time.perf_counter() - began)
        return best

    assert seconds(lambda: ledger.append(exchange)) * 5 < seconds(lambda: encode(record_of(exchange, 0.0)))
    assert ledger.close(GENEROUS_S)


# --- the file -------------------------------------------------------------------------------------------------------


def test_the_file_moves_aside_by_size_and_so_many_are_kept(tmp_path: Path) -> None:
    file = LogFile(tmp_path / "d.jsonl", max_bytes=100, keep_files=2)
    for number in range(12):
        file.write(b"%039d\n" % number)  # two to a file
    file.close()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["d.jsonl", "d.jsonl.1", "d.jsonl.2"]
    lines = [(tmp_path / name).read_text().split() for name in ("d.jsonl.2", "d.jsonl.1", "d.jsonl")]
    assert [[int(line) for line in held] for held in lines] == [[6, 7], [8, 9], [10, 11]]
    assert all(entry.stat().st_size <= 100 for entry in tmp_path.iterdir())


def test_without_kept_files_the_old_one_goes(tmp_path: Path) -> None:
    file = LogFile(tmp_path / "d.jsonl", max_bytes=100, keep_files=0)
    for number in range(5):
        file.write(b"%039d\n" % number)
    file.close()
    assert [entry.name for entry in tmp_path.iterdir()] == ["d.jsonl"]
    assert int((tmp_path / "d.jsonl").read_text()) == 4


def test_a_file_that_is_there_is_continued_and_is_not_for_everybody(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    for line in (b"a\n", b"b\n"):
        file = LogFile(path, max_bytes=100, keep_files=1)
        file.write(line)
        file.close()
    assert path.read_bytes() == b"a\nb\n"
    assert path.stat().st_mode & 0o007 == 0


def test_whoever_moves_or_empties_the_file_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    file = LogFile(path, max_bytes=1000, keep_files=1)
    file.write(b"a\n")
    path.rename(tmp_path / "moved")
    file.write(b"b\n")
    assert (path.read_bytes(), (tmp_path / "moved").read_bytes()) == (b"b\n", b"a\n")
    path.unlink()
    file.write(b"c\n")
    assert path.read_bytes() == b"c\n"
    os.truncate(path, 0)
    file.write(b"d\n")
    assert path.read_bytes() == b"d\n"
    file.close()


def test_writers_of_one_path_lose_and_tear_no_line(tmp_path: Path) -> None:
    """As the worker processes of one gateway do: each has the file open for itself, and each may be the one to move
    it aside."""
    path = tmp_path / "d.jsonl"

    def write(writer: int) -> None:
        file = LogFile(path, max_bytes=100, keep_files=200)
        for number in range(100):
            file.write(b"%d %d %s\n" % (writer, number, b"x" * 20))
        file.close()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    files = list(tmp_path.iterdir())
    lines = [line for file in files for line in file.read_bytes().splitlines()]
    assert len(files) > 50
    assert all(re.fullmatch(rb"\d+ \d+ x{20}", line) for line in lines)
    assert sorted((int(line.split()[0]), int(line.split()[1])) for line in lines) == [
        (writer, number) for writer in range(4) for number in range(100)]


def test_a_full_disk_tears_no_line_and_is_forgotten_once_there_is_room(tmp_path: Path) -> None:
    """A real refusal of the kernel, in mid line: the limit on the size of files, which fails as a full disk does."""
    path = tmp_path / "d.jsonl"
    file = LogFile(path, max_bytes=10**6, keep_files=1)
    file.write(b"first\n")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50, limits[1]))
        with pytest.raises(OSError, match="too large") as caught:
            file.write(b"x" * 100 + b"\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert caught.value.errno == errno.EFBIG
    assert path.read_bytes() == b"first\n"
    file.write(b"second\n")
    file.close()
    assert path.read_bytes() == b"first\nsecond\n"


def test_what_the_disk_refuses_is_counted_said_once_a_minute_and_tried_again(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.mkdir(parents=True)  # a folder where the file belongs: nothing can be written, by root neither
    now = [0.0]
    caplog.set_level(logging.INFO)
    ledger = Ledger(path, clock=lambda: now[0])

    def refused() -> list[str]:
        return [record.message for record in caplog.records if record.levelno == logging.ERROR]

    for number in range(1, 4):
        ledger.append(settled())
        until(lambda count=number: ledger.failed == count)
    assert len(refused()) == 1
    assert str(path) in refused()[0]
    now[0] = 61.0
    ledger.append(settled())
    until(lambda: ledger.failed == 4)
    assert len(refused()) == 2
    assert "3 records are lost" in refused()[1]
    path.rmdir()
    ledger.append(settled(request_id="at last"))
    assert ledger.close(GENEROUS_S)
    assert [line["request_id"] for line in lines_of(path)] == ["at last"]
    assert (ledger.written, ledger.failed, ledger.dropped) == (1, 4, 0)
    assert any("written again" in record.message for record in caplog.records)


def test_reopen_lets_go_of_the_file(ledger: Ledger, path: Path) -> None:
    ledger.append(settled())
    until(lambda: ledger.written == 1)
    held = f"/proc/self/fd/{ledger._file._handle}"
    assert Path(held).resolve() == path
    ledger.reopen()
    until(lambda: ledger._file._handle is None)
    ledger.append(settled())
    until(lambda: ledger.written == 2)
    assert len(lines_of(path)) == 2


def test_two_ledgers_may_share_a_path(path: Path) -> None:
    """As the old and the new process of a rolling restart do."""
    ledgers = [Ledger(path, max_bytes=20_000, keep_files=100) for _ in range(2)]
    for number in range(400):
        for writer, ledger in enumerate(ledgers):
            ledger.append(settled(request_id=f"{writer}-{number}"))
    assert all(ledger.close(GENEROUS_S) for ledger in ledgers)
    found = [line["request_id"] for file in path.parent.iterdir() for line in lines_of(file)]
    assert sorted(found) == sorted(f"{writer}-{number}" for writer in range(2) for number in range(400))
