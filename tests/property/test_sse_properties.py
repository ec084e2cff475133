"""Streams cut at every place: the same bytes, counts and usage come out, whatever the network did to them."""

import json
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.wire.answer_members import Usage
from router.wire.sse import MAX_EVENT_BYTES, EventTooLargeError, ModelNameEdit, SseCutter, StreamReader
from tests.scripted_backend import delta, event

SERVED, ASKED = "qwen-awq", "chat-large"
USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
USAGE_CHUNK = {"id": "c1", "object": "chat.completion.chunk", "model": SERVED, "choices": [], "usage": USAGE}
DONE = b"data: [DONE]\n\n"


def crlf(stream: bytes) -> bytes:
    return stream.replace(b"\n", b"\r\n")


PLAIN = (
    event(delta("", model=SERVED)) + event(delta("漢🙂é", model=SERVED))
    + event(delta('say \\"model\\": "x"', model=SERVED))
    + event(delta("", model=SERVED, finish="stop")) + event(USAGE_CHUNK) + DONE
)  # fmt: skip
CORPUS = {
    "plain": PLAIN,
    "crlf": crlf(PLAIN),
    "cr": PLAIN.replace(b"\n", b"\r"),
    "comments": b": ping\n\nretry: 1000\n\n" + PLAIN.replace(DONE, b": ping\n\nid: 5\n\n" + DONE),
    "spaces": PLAIN.replace(b'":', b'" : ').replace(b"data: ", b"data:"),
    "many_lines": b'event: message\ndata: {"model": "qwen-awq",\ndata: "choices": [{"delta": {"content": "x"}}]}\n\n'
    + DONE,
    "no_blank_line_at_the_end": PLAIN[:-1],
    "half_an_event_at_the_end": PLAIN + b'data: {"choices": [{"del',
    "error": event(delta("a", model=SERVED)) + event({"error": {"message": "no", "code": 429}}),
    "old_error": event({"object": "error", "message": "no", "code": 400}),
    "null_error": event(delta("a", model=SERVED, error=None)) + DONE,
    "cr_many_lines": b'id: 5\revent: message\rdata: {"model": "qwen-awq"}\r\rid: 6\rdata: [DONE]\r\r',
    "aborted": event(delta("a", model=SERVED, finish="abort")) + DONE,
    "rare_fields": event(delta("a", model=SERVED, service_tier="flex", prompt_token_ids=[1, 2], fingerprint=None))
    + event({**delta("", model=SERVED, finish="stop"), "usage": None, "stop_reason": 7}) + DONE,
    "not_json": b"data: {broken\n\ndata: \xff\xfe\n\n" + DONE,
    "empty_events": b"\n\n\n" + PLAIN,
}  # fmt: skip


@dataclass(frozen=True)
class Seen:
    """All that a reader tells."""

    out: bytes
    content_events: int
    data_events: int
    finished_choices: int
    done: bool
    failed: bool
    aborted: bool
    usage: Usage | None


def read(pieces: list[bytes], *, edit: tuple[str, str] = (SERVED, ASKED), hide_usage: bool = False) -> Seen:
    reader = StreamReader(ModelNameEdit(*edit), hide_usage=hide_usage)
    out = b"".join([reader.feed(piece) for piece in pieces]) + reader.rest()
    return Seen(
        out, reader.content_events, reader.data_events, reader.finished_choices, reader.done, reader.failed,
        reader.aborted, reader.usage,
    )  # fmt: skip


def cut(stream: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(places), len(stream)]
    return [stream[start:end] for start, end in pairwise(edges) if end > start]


@pytest.mark.parametrize("name", CORPUS)
@pytest.mark.parametrize("hide_usage", [False, True])
def test_p03_a_cut_at_every_offset_changes_nothing(name: str, hide_usage: bool) -> None:
    stream = CORPUS[name]
    whole = read([stream], hide_usage=hide_usage)
    for place in range(1, len(stream)):
        assert read([stream[:place], stream[place:]], hide_usage=hide_usage) == whole, place


@pytest.mark.parametrize("name", CORPUS)
def test_p04_one_byte_a_read_changes_nothing(name: str) -> None:
    stream = CORPUS[name]
    dribbled = read([stream[place : place + 1] for place in range(len(stream))])
    assert dribbled == read([stream])
    assert "\ufffd" not in dribbled.out.decode("utf-8", "ignore")


@given(st.sampled_from(sorted(CORPUS)), st.booleans(), st.data())
def test_p05_any_cuts_give_the_same_bytes_and_counts(name: str, hide_usage: bool, data: st.DataObject) -> None:
    stream = CORPUS[name] * data.draw(st.integers(1, 3))
    places = data.draw(st.lists(st.integers(0, len(stream)), max_size=12))
    assert read(cut(stream, places), hide_usage=hide_usage) == read([stream], hide_usage=hide_usage)


@pytest.mark.parametrize("name", CORPUS)
def test_p03_without_an_edit_bytes_out_are_bytes_in(name: str) -> None:
    stream = CORPUS[name]
    assert read([stream], edit=(SERVED, SERVED)).out == stream


@pytest.mark.parametrize("name", ["plain", "crlf", "cr", "comments", "spaces"])
def test_p15_the_model_is_the_clients_in_each_chunk_and_in_no_text(name: str) -> None:
    stream = CORPUS[name]
    out = read([stream]).out
    assert out == stream.replace(b'"qwen-awq"', b'"chat-large"')
    assert b'"qwen-awq"' not in out


def test_p15_a_name_that_the_engine_gives_itself_does_not_leak_either() -> None:
    path = "/models/qwen-7b.Q4.gguf"
    stream = event(delta("a", model=path)) + event(delta("b", model=path, finish="stop")) + DONE
    seen = read([stream])
    assert seen.out == stream.replace(path.encode(), ASKED.encode())
    assert read([stream], edit=(ASKED, ASKED)).out == seen.out


@pytest.mark.parametrize("count", [2, 3, 200])
def test_p05_many_events_in_one_read_are_all_counted(count: int) -> None:
    stream = b"".join(event(delta(f"t{number}", model=SERVED)) for number in range(count))
    half = event(delta("half", model=SERVED))
    reader = StreamReader(ModelNameEdit(SERVED, SERVED), hide_usage=True)
    assert reader.feed(stream + half[:20]) == stream
    assert reader.content_events == count
    assert reader.feed(half[20:]) == half
    assert reader.content_events == count + 1


def test_usage_is_read_where_it_stands_and_hidden_only_as_a_chunk_of_its_own() -> None:
    finish = {**delta("b", finish="stop"), "usage": USAGE}
    seen = read([event(delta("a")) + event(finish) + DONE], hide_usage=True)
    assert seen.usage == Usage(7, 3)
    assert json.loads(seen.out.split(b"\n\n")[1].removeprefix(b"data: "))["usage"] == USAGE
    without = PLAIN.replace(event(USAGE_CHUNK), b"").replace(b'"qwen-awq"', b'"chat-large"')
    assert read([PLAIN], hide_usage=True).out == without
    assert read([PLAIN], hide_usage=True).usage == read([PLAIN]).usage == Usage(7, 3)


@pytest.mark.parametrize("count", [-1, 10**30, "7", 1.5, True])
def test_a_count_that_is_none_is_not_believed(count: object) -> None:
    chunk = event({**USAGE_CHUNK, "usage": {**USAGE, "completion_tokens": count}})
    seen = read([chunk], edit=(SERVED, SERVED), hide_usage=True)
    assert seen.usage is None
    assert seen.out == chunk  # what cannot be read is not hidden


def test_an_error_beside_usage_is_not_hidden() -> None:
    failed = event({"error": {"message": "out of memory"}, "choices": [], "usage": USAGE})
    seen = read([failed], hide_usage=True)
    assert seen.failed
    assert seen.out == failed


def test_each_choice_has_to_finish() -> None:
    reader = StreamReader(ModelNameEdit(SERVED, SERVED), hide_usage=True, choices=2)
    reader.feed(event(delta("a", finish="stop")))
    assert not reader.complete
    reader.feed(event(delta("b", finish="length")))
    assert reader.complete


def test_quoted_words_of_the_protocol_in_generated_text_mean_nothing() -> None:
    text = 'data: [DONE] "finish_reason": "stop", "usage": {"x": 1}, "error": {"a": 1}, "model": "qwen-awq"'
    stream = event(delta(text, model=SERVED))
    seen = read([stream])
    assert not seen.done
    assert not seen.failed
    assert seen.finished_choices == 0
    assert json.loads(seen.out.removeprefix(b"data: "))["choices"][0]["delta"]["content"] == text


@pytest.mark.real_time
def test_p14_a_large_event_in_small_reads_takes_linear_time() -> None:
    def seconds(size: int) -> float:
        stream = event(delta("x" * size, model=SERVED))
        pieces = cut(stream, list(range(4096, len(stream), 4096)))
        best = float("inf")
        for _ in range(3):
            reader = StreamReader(ModelNameEdit(SERVED, ASKED), hide_usage=True)
            began = perf_counter()
            size_out = sum(len(reader.feed(piece)) for piece in pieces)
            best = min(best, perf_counter() - began)
            assert size_out == len(stream) + len(ASKED) - len(SERVED)
        return best

    small, large = seconds(512 * 1024), seconds(4 * 1024 * 1024)
    assert large < 8 * 4 * small + 0.02  # eight times the bytes; quadratic work would take 64 times as long
    assert large < 1.0


def test_p14_an_event_without_end_is_refused_at_the_cap() -> None:
    cutter = SseCutter()
    piece = b"x" * (1024 * 1024)
    for _ in range(MAX_EVENT_BYTES // len(piece)):
        assert cutter.feed(piece) == []
    with pytest.raises(EventTooLargeError):
        cutter.feed(b"x")


@pytest.mark.real_time
def test_many_marks_in_one_event_are_parsed_once() -> None:
    nested = json.dumps({"choices": [], "usage": USAGE, "x": [{"usage": {}}] * 40_000}).encode()
    began = perf_counter()
    reader = StreamReader(ModelNameEdit(SERVED, SERVED), hide_usage=True)
    assert reader.feed(b"data: " + nested + b"\n\n") == b""
    assert perf_counter() - began < 2.0  # a parse for each mark would take minutes


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
def test_p13_fields_before_the_data_do_not_hide_it(line_end: bytes) -> None:
    stream = b"id: 5\nretry: 10\ndata: {}\n\n: ping\n\nretry: 1\n\nevent: error\ndata: {}\n\nid: 6\ndata: [DONE]\n\n"
    seen = read([stream.replace(b"\n", line_end)])
    assert (seen.data_events, seen.failed, seen.done) == (3, True, True)
