"""Spans of a JSON object against the standard library's reading of the same bytes."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.wire.json_spans import (
    MAX_MEMBERS,
    MAX_SEARCHED_BYTES,
    DuplicateKeyError,
    TooManyMembersError,
    lone_surrogate,
    parse_object,
)

# Characters that parsers trip over: quotes, backslashes, braces, control characters, astral planes.
TEXT = st.text(st.sampled_from('ab"\\/{}[]:, \n\t\x00\x7fé漢🙂'), max_size=8) | st.text(
    st.characters(exclude_categories=["Cs"]), max_size=6
)
NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(TEXT, VALUES, max_size=6)
GAPS = st.text(st.sampled_from(" \t\r\n"), max_size=2)


@st.composite
def spelled(draw: st.DrawFn, members: list[tuple[str, Any]]) -> bytes:
    """One of the many ways to write an object: gaps anywhere, each text escaped or not."""

    def gap() -> str:
        return draw(GAPS)

    def write(value: Any) -> str:
        if isinstance(value, dict):
            return write_members(list(value.items()))
        if isinstance(value, list):
            return f"[{gap()}" + f"{gap()},{gap()}".join(map(write, value)) + f"{gap()}]"
        return json.dumps(value, ensure_ascii=draw(st.booleans()))

    def write_members(pairs: list[tuple[str, Any]]) -> str:
        inner = f"{gap()},{gap()}".join(f"{write(key)}{gap()}:{gap()}{write(value)}" for key, value in pairs)
        return f"{{{gap()}{inner}{gap()}}}"

    return (gap() + write_members(members) + gap()).encode()


OBJECT_AND_SPELLING = OBJECTS.flatmap(lambda members: st.tuples(st.just(members), spelled(list(members.items()))))


@given(OBJECT_AND_SPELLING)
def test_each_member_is_found_where_it_stands(case: tuple[dict[str, Any], bytes]) -> None:
    members, body = case
    parsed = parse_object(body)
    assert parsed.body == body
    assert parsed.starts.keys() == members.keys()
    for key, value in members.items():
        start = parsed.starts[key]
        raw = body[start : start + len(bytes(parsed.values[key]))]
        assert raw == bytes(parsed.values[key])
        assert json.loads(raw) == value
    assert body[parsed.close :].strip() == b"}"
    assert parsed.replace({}) == body


@given(OBJECT_AND_SPELLING, st.data())
def test_replace_changes_the_named_members_and_no_other_byte(
    case: tuple[dict[str, Any], bytes], data: st.DataObject
) -> None:
    members, body = case
    names = st.sampled_from(sorted(members)) | TEXT if members else TEXT
    edits = data.draw(st.dictionaries(names, VALUES, min_size=1, max_size=3))
    edited = parse_object(body).replace({key: json.dumps(value).encode() for key, value in edits.items()})
    assert json.loads(edited) == {**members, **edits}

    before, after = parse_object(body), parse_object(edited)
    for key in members.keys() - edits.keys():
        assert bytes(before.values[key]) == bytes(after.values[key])  # down to number spelling and escapes
    assert list(after.starts)[: len(before.starts)] == list(before.starts)
    # Undoing the edits in place gives the old bytes back, so nothing between the members has moved.
    undone = after.replace({key: bytes(before.values[key]) for key in edits.keys() & members.keys()})
    added = edits.keys() - members.keys()
    if not added:
        assert undone == body
    else:
        assert undone.startswith(body[: before.close])


@given(OBJECTS.filter(bool), VALUES, st.data())
def test_p23_a_key_that_stands_twice_is_found_in_every_spelling(
    members: dict[str, Any], other: Any, data: st.DataObject
) -> None:
    pairs = list(members.items())
    key = data.draw(st.sampled_from(sorted(members)))
    second = data.draw(st.just(members[key]) | st.just(other))
    pairs.insert(data.draw(st.integers(0, len(pairs))), (key, second))
    with pytest.raises(DuplicateKeyError) as caught:
        parse_object(data.draw(spelled(pairs)))
    assert caught.value.key == key


@given(
    st.binary(max_size=60)
    | st.text(st.sampled_from('{}[]":,\\ue0129.-+ \n\x00\ufeffé\ud83d'), max_size=40).map(
        lambda text: text.encode("utf-8", "surrogatepass")
    )
    | OBJECTS.flatmap(lambda members: spelled(list(members.items()))).flatmap(
        lambda body: st.tuples(st.just(body), st.integers(0, len(body)), st.binary(max_size=2))
    ).map(lambda cut: cut[0][: cut[1]] + cut[2] + cut[0][cut[1] + 1 :])
)
def test_p22_no_bytes_escape_the_documented_errors(body: bytes) -> None:
    try:
        parsed = parse_object(body)
    except (DuplicateKeyError, msgspec.DecodeError, RecursionError, UnicodeDecodeError, TooManyMembersError):
        return
    # What is taken is JSON by the standard library's reading too, and the same object.
    assert json.loads(body, parse_constant=pytest.fail).keys() == parsed.values.keys()


def test_the_number_of_members_is_bounded() -> None:
    def body(members: int) -> bytes:
        return json.dumps({f"k{number}": 1 for number in range(members)}).encode()

    assert len(parse_object(body(MAX_MEMBERS)).starts) == MAX_MEMBERS
    with pytest.raises(TooManyMembersError):
        parse_object(body(MAX_MEMBERS + 1))


PIECES = st.lists(st.sampled_from([
    "a", "漢", r"\\", r"\"", r"\n", r"\u0041", r"\ud83d\ude00", r"\\ud800", r"\ud800", r"\uDfFf", r"\udc00",
]), max_size=8)  # fmt: skip


@given(PIECES)
def test_a_lone_surrogate_is_found_where_it_stands_and_nowhere_else(pieces: list[str]) -> None:
    before = '{"content":"'
    body = (before + "".join(pieces) + '"}').encode()
    text = json.loads(body)["content"]  # joins pairs, and keeps what stands alone
    found = lone_surrogate(body)
    assert (found is not None) == any("\ud800" <= character <= "\udfff" for character in text)
    if found is not None:
        escape, at = found
        assert body[at:].startswith(escape.encode())
        whole = json.loads(body[:at] + b'"}')["content"]  # up to there it is sound
        assert not any("\ud800" <= character <= "\udfff" for character in whole)
        assert text.startswith(whole)
        assert "\ud800" <= text[len(whole)] <= "\udfff"


def test_a_pair_at_the_end_of_what_is_searched_is_none_alone() -> None:
    for shift in range(14):
        body = b'"' + b"x" * (MAX_SEARCHED_BYTES - shift) + rb'\ud83d\ude00"'
        assert lone_surrogate(body) is None
