"""Bytes → content: every way in which a file can be unreadable is one clear problem, never a traceback."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from settings.source import MAX_FILE_BYTES, ConfigError, Problem, parse_source, path_text, read_source

SECRET = "sk-do-not-print-me"


def refused(raw: bytes) -> Problem:
    with pytest.raises(ConfigError) as caught:
        parse_source(raw, "fleet.yaml")
    return caught.value.problems[0]


@contextmanager
def without_permission(path: Path) -> Iterator[None]:
    """Takes read permission from this process; root, whom modes do not bind, becomes another user meanwhile."""
    path.chmod(0)
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65_534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)
        path.chmod(0o600)


@pytest.mark.parametrize(("raw", "line", "column", "message"), [
    (b"", 1, 1, "is empty"),
    (b" \n\n", 1, 1, "is empty"),
    (b"# only a comment\n", 1, 1, "comments only"),
    (b"\xef\xbb\xbfversion: 1\n", 1, 1, "byte order mark"),
    ("version: 1\n".encode("utf-16"), 1, 1, "byte order mark"),
    (b"a: 1\nb: caf\xe9\n", 2, 7, "not UTF-8: byte 0xe9"),
    (b"a: 1\nb: \x00\n", 2, 4, "control character"),
    (b"a: 1\n\tb: 2\n", 2, 1, "not valid YAML"),
    (b"a: [1, 2\n", 2, 1, "not valid YAML"),
    (b"a: 'x\n", 2, 1, "not valid YAML"),
    (b"- 1\n- 2\n", 1, 1, "must be a mapping"),
    (b"just text\n", 1, 1, "must be a mapping"),
    (b"a: 1\n---\nb: 2\n", 2, 1, "not valid YAML"),
    (b"a: *nobody\n", 1, 4, "undefined alias"),
    (b"a: 1\nb: {c: 1,\n  c: 2}\n", 3, 3, "given twice, first on line 2"),
    (b"1: x\n", 1, 1, "name must be text"),
    (b"? [a]\n: x\n", 1, 3, "name must be text"),
    (b"a: !!python/object/apply:os.system ['true']\n", 1, 4, "not allowed"),
    (b"a: !mine 1\n", 1, 4, "not allowed"),
    (b"a: !!int x\n", 1, 4, "not a valid int"),
    (b"a: " + b"9" * 10_000 + b"\n", 1, 4, "not a valid int"),
    (b"a: " + b"[" * 5_000 + b"\n", 1, 1, "nested"),
    (b"a: " + b"[" * 100 + b"]" * 100 + b"\n", 1, 67, "nested"),
    (b"a: &a [*a]\n", 1, 7, "nested"),
])
def test_what_is_wrong_with_the_text_is_said_with_its_place(raw: bytes, line: int, column: int, message: str) -> None:
    problem = refused(raw)
    assert message in problem.message
    assert (problem.file, problem.line) == ("fleet.yaml", line)
    assert problem.column == column or "nested" in message


def test_every_duplicate_key_is_found() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_source(b"a: 1\na: 2\nb: {c: 1, c: 2}\n", "f")
    assert [problem.path for problem in caught.value.problems] == ["a", "b.c"]


def test_nested_aliases_that_stand_for_billions_are_refused_quickly() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)]
    assert "aliases stand for over" in refused("\n".join(lines).encode()).message


def test_a_truncated_file_is_recognised() -> None:
    assert "cut short" in (refused(b"a: 1\nb: {c: 1, d:").hint or "")


def test_a_parse_error_never_quotes_the_file() -> None:
    assert SECRET not in str(refused(f"key: {SECRET}\nkey: [{SECRET}\n".encode()))
    assert SECRET not in str(refused(f"{SECRET}: [\n".encode()))


def test_yaml_1_2_has_no_norway_problem_and_no_octal_or_date_surprises() -> None:
    content = parse_source(b"a: no\nb: 010\nc: 2026-01-02\nd: 1:30\ne: 1e3\nf: 0x10\n", "f").content
    assert content == {"a": "no", "b": 10, "c": "2026-01-02", "d": "1:30", "e": 1000.0, "f": 16}


def test_places_are_those_of_the_keys() -> None:
    document = parse_source(b"a: 1\nb:\n  - {c: 2}\n  - d: 3\n    e: 4\n", "f")
    assert document.places[("b", 1, "e")] == (5, 5)
    assert document.places[("b", 0)] == (3, 5)
    assert str(document.problem(("b", 1, "gone"), "is missing")) == "f:4:5  b[1].gone  is missing"


def test_paths_with_odd_keys_are_quoted_and_printable() -> None:
    assert path_text(("backends", 1, "weight")) == "backends[1].weight"
    assert path_text(("a", "b\x1b[31m c")) == 'a["b\\x1b[31m c"]'


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    def message(path: Path) -> str:
        with pytest.raises(ConfigError) as caught:
            read_source(path)
        (problem,) = caught.value.problems
        assert (problem.file, problem.line) == (str(path), None)
        return problem.message

    assert message(tmp_path / "gone.yaml") == "does not exist"
    assert message(tmp_path) == "is a directory"
    link = tmp_path / "link.yaml"
    link.symlink_to("nowhere.yaml")
    assert message(link) == 'is a link to "nowhere.yaml", which does not exist'
    loop = tmp_path / "loop.yaml"
    loop.symlink_to("loop.yaml")
    assert "cannot be opened" in message(loop)
    os.mkfifo(tmp_path / "pipe.yaml")
    assert message(tmp_path / "pipe.yaml") == "is not a regular file"  # and does not wait for a writer
    large = tmp_path / "large.yaml"
    large.write_bytes(b"#" * (MAX_FILE_BYTES + 1))
    assert "over 1,000,000 bytes" in message(large)
    large.write_bytes(b"#" * MAX_FILE_BYTES)
    assert len(read_source(large)) == MAX_FILE_BYTES
    with without_permission(large):
        assert "permission denied" in message(large)


@given(st.binary(max_size=200) | st.text(alphabet="ab:{}[]&*!|>-?#'\"\n \t,<%@`~1.", max_size=60).map(str.encode))
def test_any_bytes_are_either_content_or_problems(raw: bytes) -> None:
    found: tuple[Problem, ...] = ()
    try:
        document = parse_source(raw, "f")
    except ConfigError as error:
        found = error.problems
        document = None
    assert (document is None) == bool(found)
    assert all(problem.line and problem.column and str(problem).isprintable() for problem in found)
