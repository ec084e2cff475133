"""API keys: who gets in, who does not, and that a place among a key's requests always comes back."""

import asyncio
import gc
import json
import re
import stat
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from math import inf
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.gateway.keys import append_row, new_key
from router.keys.file import KeySection, KeysFile, load_keys, parse_keys, unique_rows
from router.keys.ring import (
    ANYONE,
    KeyRing,
    KeyRow,
    Parallel,
    Principal,
    digest_of,
    environment_rows,
    sole_authorization,
)
from router.wire.errors import ApiError
from settings.source import ConfigError

KEY = b"hr-abcdefghijklmnopqrstuvwxyz012345"
OTHER = b"hr-ABCDEFGHIJKLMNOPQRSTUVWXYZ012345"
HASH = digest_of(KEY).hex()
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "keys.md").read_text(encoding="utf-8")


def a_row(key_id: str = "search-1", key: bytes = KEY, tenant: str = "search", **given: object) -> KeyRow:
    return KeyRow(key_id, digest_of(key), tenant, **given)  # type: ignore[arg-type]


def a_ring(*rows: KeyRow, now: float = 1000.0) -> KeyRing:
    return KeyRing.of(*(rows or (a_row(max_parallel=2),)), clock=lambda: now)


# --- who gets in ---------------------------------------------------------------------------------------------------


def test_a_known_key_is_its_principal() -> None:
    ring = a_ring(a_row(max_parallel=2), a_row("batch-1", OTHER, "batch"))
    assert ring.authenticate(b"Bearer " + KEY) == Principal("search-1", "search", 2)
    assert ring.authenticate(b"Bearer " + OTHER) == Principal("batch-1", "batch", None)
    assert len(ring) == 2


@pytest.mark.parametrize("header", [
    b"Bearer  " + KEY, b"Bearer " + KEY + b" ", b"Bearer \t" + KEY, b"bearer " + KEY, b"BEARER " + KEY,
])
def test_space_around_a_key_and_the_case_of_the_scheme_do_not_matter(header: bytes) -> None:
    assert a_ring().authenticate(header) is not None


REFUSED = {
    "no header": None,
    "empty": b"",
    "the key alone": KEY,
    "another scheme": b"Basic " + KEY,
    "scheme without a key": b"Bearer",
    "scheme and a space": b"Bearer ",
    "no space between": b"Bearer" + KEY,
    "a tab between": b"Bearer\t" + KEY,
    "unknown key": b"Bearer " + OTHER,
    "one character short": b"Bearer " + KEY[:-1],
    "one character more": b"Bearer " + KEY + b"x",
    "wrong case": b"Bearer " + KEY.upper(),
    "not ASCII": "Bearer ключ".encode(),
    "not UTF-8": b"Bearer \xff\xfe" + KEY,
    "a zero byte behind": b"Bearer " + KEY + b"\x00",
    "over 512 bytes": b"Bearer " + KEY + b" " * 512,
    "huge": b"Bearer " + b"x" * 1_000_000,
    "its own hash": b"Bearer " + HASH.encode(),
    "its own digest": b"Bearer " + digest_of(KEY),
    "two keys": b"Bearer " + KEY + b", Bearer " + KEY,
}


@pytest.mark.parametrize("header", REFUSED.values(), ids=REFUSED.keys())
def test_everything_else_is_refused_without_an_exception(header: bytes | None) -> None:
    assert a_ring().authenticate(header) is None


@given(st.binary(max_size=600) | st.binary(max_size=600).map(lambda raw: b"Bearer " + raw))
def test_no_bytes_get_in_or_raise(header: bytes) -> None:
    assert a_ring().authenticate(header) is None


def test_the_whole_digest_is_compared() -> None:
    half_right = digest_of(KEY)[:16] + b"\x00" * 16
    assert a_ring(KeyRow("x", half_right)).authenticate(b"Bearer " + KEY) is None


def test_several_authorization_headers_are_nobody() -> None:
    one, two = (b"authorization", b"Bearer " + KEY), (b"authorization", b"Bearer " + OTHER)
    ring = a_ring()
    assert sole_authorization([(b"host", b"x"), one]) == b"Bearer " + KEY
    assert sole_authorization([(b"host", b"x")]) is None
    for several in ([one, two], [two, one], [one, one], [one, two, one], [one, (b"authorization", b"")]):
        assert ring.authenticate(sole_authorization(several)) is None


def test_a_disabled_or_expired_key_is_refused_to_the_second() -> None:
    header = b"Bearer " + KEY
    assert a_ring(a_row(disabled=True)).authenticate(header) is None
    assert a_ring(a_row(disabled=True, expires_at_s=5000.0)).authenticate(header) is None
    assert a_ring(a_row(expires_at_s=1000.5), now=1000.0).authenticate(header) is not None
    assert a_ring(a_row(expires_at_s=1000.5), now=1000.5).authenticate(header) is None


def test_a_ring_without_keys_lets_nobody_in_and_an_open_one_everybody() -> None:
    assert KeyRing.of().authenticate(b"Bearer " + KEY) is None
    assert KeyRing.of().authenticate(None) is None
    assert not KeyRing.of().is_open
    assert KeyRing.asking_nothing().authenticate(None) is ANYONE
    assert KeyRing.asking_nothing().authenticate(b"Bearer \xff") is ANYONE


def test_a_ring_holds_no_key_and_shows_no_digest() -> None:
    ring, row = a_ring(), a_row()
    assert ring.authenticate(b"Bearer " + KEY) is not None
    held = {id(ring)}
    found, stack = [], [ring]
    while stack:
        for referent in gc.get_referents(stack.pop()):
            if isinstance(referent, bytes):
                found.append(referent)
            elif isinstance(referent, dict | tuple | list) and id(referent) not in held:
                held.add(id(referent))
                stack.append(referent)  # type: ignore[arg-type]
    assert digest_of(KEY) in found
    assert not any(KEY in held for held in found)
    assert HASH[:8] not in repr(row)
    assert repr(digest_of(KEY)) not in repr(row)


def test_ids_and_keys_are_unique_on_a_ring() -> None:
    for second in (a_row("search-1", OTHER), a_row("search-2", KEY), KeyRow("short", b"\x00" * 31)):
        with pytest.raises(ValueError, match="unique"):
            KeyRing.of(a_row(), second)


def test_the_fingerprint_names_the_content() -> None:
    first, second = a_row(), a_row("batch-1", OTHER)
    assert KeyRing.of(first, second).fingerprint == KeyRing.of(second, first).fingerprint
    rings = [KeyRing.of(first), KeyRing.of(first, second), KeyRing.of(), KeyRing.asking_nothing(),
             KeyRing.of(a_row(max_parallel=1)), KeyRing.of(a_row(disabled=True)), KeyRing.of(a_row(tenant="x")),
             KeyRing.of(a_row(key=OTHER))]
    assert len({ring.fingerprint for ring in rings}) == len(rings)


def test_keys_of_the_environment_are_rows_of_the_default_tenant() -> None:
    rows = environment_rows({"A_KEY": KEY, "B_KEY": b"short", "C_KEY": KEY})
    assert [(row.id, row.tenant) for row in rows] == [("env:A_KEY", "default"), ("env:B_KEY", "default")]
    assert KeyRing.of(*rows).authenticate(b"Bearer short") == Principal("env:B_KEY", "default", None)
    assert unique_rows("keys.yaml", (a_row("x", OTHER),), rows)[1:] == rows
    with pytest.raises(ConfigError, match="key search-1 is also in environment variable A_KEY"):
        unique_rows("keys.yaml", (a_row(),), rows)


# --- a place among a key's requests ---------------------------------------------------------------------------------


ONE = Principal("k", "t", 1)


def test_a_key_has_so_many_places_and_no_more() -> None:
    parallel = Parallel()
    two = Principal("k", "t", 2)
    with parallel.lease(two), parallel.lease(two):
        with pytest.raises(ApiError) as caught, parallel.lease(two):
            raise AssertionError("a third was let in")
        assert (caught.value.status, caught.value.code) == (429, "rate_limit_exceeded")
        assert (b"retry-after", b"1") in caught.value.response_headers()
        assert parallel.of("k") == 2  # the refused one gave nothing back
        with parallel.lease(Principal("other", "t", 1)):
            assert parallel.snapshot() == {"k": 2, "other": 1}
    assert parallel.snapshot() == {}


def test_a_key_without_a_limit_is_counted_all_the_same() -> None:
    parallel, free = Parallel(), Principal("k", "t")
    leases = [parallel.lease(free) for _ in range(100)]
    for lease in leases:
        lease.take()
    assert parallel.of("k") == 100
    # A reload gives it a limit: the hundred that run count.
    with pytest.raises(ApiError):
        parallel.lease(Principal("k", "t", 100)).take()
    for lease in leases:
        lease.release()
    with parallel.lease(Principal("k", "t", 1)):
        assert parallel.of("k") == 1


def test_a_place_is_taken_once_and_given_back_once() -> None:
    parallel = Parallel()
    lease = parallel.lease(ONE)
    lease.release()
    assert parallel.of("k") == 0
    lease.take()
    with pytest.raises(RuntimeError):
        lease.take()
    lease.release()
    lease.release()
    assert parallel.of("k") == 0


@pytest.mark.real_time
def test_p43_a_thousand_requests_that_end_in_every_way_leave_no_place_taken() -> None:
    """P43: a slot that only success gives back starves its key after the first cancelled stream."""
    parallel = Parallel()

    async def ok() -> None:
        with parallel.lease(ONE):
            await asyncio.sleep(0)

    async def failing() -> None:
        with parallel.lease(ONE):
            await asyncio.sleep(0)
            raise ConnectionResetError

    async def timing_out() -> None:
        async with asyncio.timeout(0.0):
            with parallel.lease(ONE):
                await asyncio.sleep(10)

    async def cancelled() -> None:
        async def request() -> None:
            with parallel.lease(ONE):
                await asyncio.sleep(10)

        task = asyncio.create_task(request())
        await asyncio.sleep(0)
        task.cancel()
        await task

    async def gone_before_start() -> None:
        async def request() -> None:
            with parallel.lease(ONE):
                await asyncio.sleep(10)

        task = asyncio.create_task(request())
        task.cancel()
        await task

    async def refused() -> None:
        with parallel.lease(ONE), parallel.lease(ONE):
            pass

    async def forgotten() -> None:
        parallel.lease(ONE).take()  # a path that never releases

    async def generator_left_open() -> None:
        async def chunks() -> AsyncGenerator[bytes, None]:
            with parallel.lease(ONE):
                yield b"a"
                yield b"b"

        stream = chunks()
        await anext(stream)
        await stream.aclose()

    ways: list[Callable[[], object]] = [
        ok, failing, timing_out, cancelled, gone_before_start, refused, forgotten, generator_left_open]
    ended: dict[str, int] = {}

    async def all_of_them() -> None:
        for number in range(1000):
            way = ways[number % len(ways)]
            try:
                await way()  # type: ignore[misc]
                kind = "ok"
            except (Exception, asyncio.CancelledError) as error:
                kind = type(error).__name__
            ended[kind] = ended.get(kind, 0) + 1
            assert parallel.of("k") == 0, way

    asyncio.run(all_of_them())
    assert set(ended) == {"ok", "ConnectionResetError", "TimeoutError", "CancelledError", "ApiError"}
    assert parallel.snapshot() == {}
    with parallel.lease(ONE):
        assert parallel.of("k") == 1


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 7), st.booleans()), max_size=60))
def test_the_books_are_the_places_held_whatever_the_order(steps: list[tuple[int, int, bool]]) -> None:
    parallel = Parallel()
    limits = (1, 3, None)
    held: dict[tuple[int, int], object] = {}
    for key, place, takes in steps:
        if takes and (key, place) not in held:
            lease = parallel.lease(Principal(f"k{key}", "t", limits[key]))
            limit, count = limits[key], sum(at == key for at, _ in held)
            if limit is not None and count >= limit:
                with pytest.raises(ApiError):
                    lease.take()
                continue
            lease.take()
            held[key, place] = lease
        elif not takes and (key, place) in held:
            held.pop((key, place)).release()  # type: ignore[attr-defined]
        for at in range(3):
            assert parallel.of(f"k{at}") == sum(other == at for other, _ in held)


# --- the keys file --------------------------------------------------------------------------------------------------


GOOD = f"""\
keys:
  - id: search-1
    sha256: "{HASH.upper()}"
    tenant: search
    max_parallel: 16
  - {{id: batch-1, sha256: {digest_of(OTHER).hex()}, disabled: true, expires: 2027-01-31}}
  - {{id: batch-2, sha256: {digest_of(b"x").hex()}, expires: "2027-01-31T18:00:00+01:00"}}
"""


def problems(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_keys(text.encode(), "keys.yaml")
    return [str(problem) for problem in caught.value.problems]


def test_a_keys_file_becomes_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(GOOD)
    first, second, third = load_keys(path)
    assert first == KeyRow("search-1", digest_of(KEY), "search", 16, False, inf)
    assert (second.tenant, second.disabled, second.expires_at_s) == ("default", True, 1801353600.0)
    assert third.expires_at_s == 1801353600.0 + 17 * 3600
    assert KeyRing.of(first, second, third).authenticate(b"Bearer " + KEY) == Principal("search-1", "search", 16)


def test_json_and_an_empty_list_are_keys_files() -> None:
    assert parse_keys(b'{"keys": []}', "keys.json") == ()
    assert parse_keys(json.dumps({"version": 1, "keys": [{"id": "a", "sha256": HASH}]}).encode(), "k.json")[0].id == "a"


@pytest.mark.parametrize(("change", "message"), [
    (("id: search-1", "id: batch-1"), r"keys.yaml:6:6  keys\[1\].id  is that of keys\[0\] too"),
    ((digest_of(OTHER).hex(), HASH), r"keys.yaml:6:19  keys\[1\].sha256  is that of keys\[0\] too \(key batch-1\)"),
    ((HASH.upper(), "abc"), r"keys.yaml:3:5  keys\[0\].sha256  must be a SHA-256: 64 hex.* \(key search-1\)"),
    ((HASH.upper(), digest_of(b"").hex()), r"keys\[0\].sha256  is the hash of no text at all"),
    (("max_parallel: 16", "max_parallel: 0"), r"keys.yaml:5:5  keys\[0\].max_parallel  must be ≥ 1"),
    (("max_parallel: 16", "max_paralel: 16"), r"keys\[0\].max_paralel  unknown setting"),
    (("expires: 2027-01-31}", "expires: soon}"), r"keys\[1\].expires  must be a date or a time with its zone"),
    (("expires: 2027-01-31}", "expires: 2027-01-31T10:00}"), r"keys\[1\].expires  must be a date or a time with"),
    (("disabled: true", "disabled: 1"), r"keys\[1\].disabled  must be true or false"),
    (("tenant: search", "tenant: a b"), r"keys\[0\].tenant  must be 1 to 64 letters"),
    (("    tenant: search\n", "    tenant: search\n    tenant: x\n"), r"keys\[0\].tenant  is given twice"),
    (("keys:", "key:"), r"keys  is missing"),
])
def test_each_mistake_is_named_with_its_file_line_and_row(change: tuple[str, str], message: str) -> None:
    assert change[0] in GOOD
    found = problems(GOOD.replace(*change, 1))
    assert any(re.search(message, problem) for problem in found), found


@pytest.mark.parametrize("text", ["", "\n# nothing\n", "keys", "keys: [", "[]", "keys: {a: b}", "version: 2\nkeys: []"])
def test_what_is_no_keys_file_is_refused_in_its_own_words(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_keys(text.encode(), "keys.yaml")
    assert not any("fleet" in f"{problem} {problem.hint}" for problem in caught.value.problems)


def test_every_mistake_is_found_at_once_and_none_quotes_a_key() -> None:
    key = KEY.decode()
    for line in (f"id: {key}", f"sha256: {key}", f"tenant: {key}", f"expires: {key}", f"max_parallel: {key}",
                 f"disabled: {key}", f"key: {key}", f"{key}: true", f"id: 'Bearer {key}'", f"id: [{key}]"):
        found = problems(f"keys:\n  - sha256: {HASH}\n    {line}\n")
        assert found
        assert key not in "\n".join(found)
    assert len(problems("keys:\n  - {id: a b, sha256: x}\n  - {}\n")) == 4


def test_a_missing_file_is_a_problem_not_a_crash(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_keys(tmp_path / "keys.yaml")


# --- headrace keys new ----------------------------------------------------------------------------------------------


def test_a_new_key_opens_with_the_row_that_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert new_key("search", max_parallel=3, expires="2999-01-31") == 0
    said = capsys.readouterr()
    key, _, row = said.out.partition("\n")
    assert re.fullmatch(r"hr-[A-Za-z0-9_-]{32}", key)
    ring = KeyRing.of(*parse_keys(b"keys:\n" + row.encode(), "keys.yaml"))
    principal = ring.authenticate(b"Bearer " + key.encode())
    assert principal is not None
    assert (principal.tenant, principal.max_parallel) == ("search", 3)
    assert re.fullmatch(r"search-[0-9a-f]{6}", principal.key_id)
    assert key not in said.err
    assert "once" in said.err


def test_two_keys_are_never_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(50):
        new_key("t", json=True)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len({row["key"] for row in rows}) == 50


@pytest.mark.parametrize(("before", "kept"), [
    (None, "# Who may ask"),
    ("", "# Who may ask"),
    ("# ours\nkeys:\n- id: a  # first\n  sha256: " + HASH, "- id: a  # first"),
    ("keys:\n    - {id: a, sha256: " + HASH + "}  # wide\n\n# the end\n", "}  # wide"),
    ("version: 1\nkeys:\n  -\n    id: a\n    sha256: " + HASH + "\n", "version: 1"),
    (json.dumps({"keys": [{"id": "a", "sha256": HASH}]}), '"id": "a"'),
    (json.dumps({"keys": []}, indent=1), '"keys"'),
])
def test_append_adds_one_row_and_keeps_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], before: str | None, kept: str
) -> None:
    path = tmp_path / "keys.yaml"
    if before is not None:
        path.write_text(before)
    rows = len(parse_keys(before.encode(), "x")) if before else 0
    for number in (1, 2):
        assert new_key("team", append=path) == 0
        said = capsys.readouterr()
        key = said.out.strip()
        assert re.fullmatch(r"hr-\S{32}", key), "the key alone goes to standard output"
        after = load_keys(path)
        assert len(after) == rows + number
        assert KeyRing.of(*after).authenticate(b"Bearer " + key.encode()) is not None
        assert after[-1].id in said.err
        assert key not in path.read_text()
    assert kept in path.read_text()
    assert [entry.name for entry in tmp_path.iterdir()] == ["keys.yaml"]


@pytest.mark.parametrize("before", [
    "keys: [{id: a, sha256: " + HASH + "}]\n",
    "keys:\n  - id: a\n    sha256: " + HASH + "\nversion: 1\n",
    "keys:\n  - id: a\n    sha256: wrong\n",
    "{keys: []}",
    "not a keys file",
])
def test_append_that_cannot_be_changes_nothing_and_prints_no_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], before: str
) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(before)
    assert new_key("team", append=path) == 1
    said = capsys.readouterr()
    assert (said.out, path.read_text()) == ("", before)
    assert str(path) in said.err


def test_append_refuses_an_id_that_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys.yaml"
    assert new_key("team", key_id="mine", append=path) == 0
    assert new_key("team", key_id="mine", append=path) == 1
    assert "is that of keys[0] too" in capsys.readouterr().err
    assert len(load_keys(path)) == 1


def test_append_follows_a_link_and_keeps_the_mode(tmp_path: Path) -> None:
    real, link = tmp_path / "real.yaml", tmp_path / "keys.yaml"
    real.write_text("keys:\n  - {id: a, sha256: " + HASH + "}\n")
    real.chmod(0o600)
    link.symlink_to(real)
    assert new_key("team", append=link) == 0
    assert link.is_symlink()
    assert len(load_keys(real)) == 2
    assert stat.S_IMODE(real.stat().st_mode) == 0o600


def test_appends_at_once_take_turns(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"

    def append(number: int) -> None:
        append_row(path, KeySection(id=f"k{number}", sha256=digest_of(b"%d" % number).hex()))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(append, range(24)))
    assert {row.id for row in load_keys(path)} == {f"k{number}" for number in range(24)}


def test_wrong_options_are_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert new_key("a b", expires="soon") == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert "tenant" in said.err
    assert "expires" in said.err


@pytest.mark.real_time
def test_the_command_needs_no_gateway_to_be_imported() -> None:
    code = "import sys, headrace.gateway.keys; print([m for m in ('uvicorn', 'starlette') if m in sys.modules])"
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- the page -------------------------------------------------------------------------------------------------------


def test_the_page_has_one_row_for_each_setting_of_a_key() -> None:
    documented = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", PAGE, re.MULTILINE))
    expected = {}
    for name, info in KeySection.model_fields.items():
        default = info.default
        expected[name] = "required" if info.is_required() else (
            "–" if default is None else f"`{str(default).lower()}`")
    assert {name: text.strip() for name, text in documented.items()} == expected
    assert set(KeysFile.model_fields) == {"version", "keys"}


def test_the_example_of_the_page_is_right() -> None:
    example = re.search(r"```yaml\n(keys:.*?)```", PAGE, re.DOTALL)
    assert example is not None
    rows = parse_keys(example[1].encode(), "keys.yaml")
    assert [row.id for row in rows] == ["search-1", "night-batch"]
