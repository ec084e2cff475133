"""Framing: what two HTTP implementations could read differently is refused, or read in exactly one way.

Each vector goes through a bare socket, once in one piece and once in dribbles, with the number and status of the
answers it must get. Where the connection stays open,
    one more request on it shows that both sides agree on where they stand.
No vector may make the backend see a request that the gateway did not count (CWE-444), and the gateway serves on.
"""

import asyncio
import contextlib
import re
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest

from router.app import Running
from tests.gateway_stack import chat, gateway
from tests.raw_client import CHAT_PATH, at_rest, eventually, raw_client, sample
from tests.scripted_backend import ScriptedBackend

pytestmark = pytest.mark.anyio

BODY = msgspec.json.encode(chat())
LENGTH = len(BODY)
PROBE = b"GET /liveness HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n"
PATIENCE_S = 8.0


@dataclass(frozen=True)
class Vector:
    """Bytes, and the statuses they must be answered with."""

    name: str
    data: bytes
    statuses: tuple[int, ...] = (400,)
    closes: bool = True
    """Whether the connection must end behind the answers."""
    half_closes: bool = False
    """Whether the client says that it sends no more."""
    more: tuple[int, ...] = ()
    """Statuses that may follow where the gateway was done before the next bytes came; then the end may come, or not."""


def post(*headers: bytes, body: bytes = BODY, start: bytes = b"POST %b HTTP/1.1", host: bytes = b"host: h") -> bytes:
    line = start % CHAT_PATH.encode() if b"%b" in start else start
    lines = [line, *([host] if host else []), *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def sized(*headers: bytes, start: bytes = b"POST %b HTTP/1.1", host: bytes = b"host: h") -> bytes:
    return post(b"content-length: %d" % LENGTH, *headers, start=start, host=host)


def get(*headers: bytes, start: bytes = b"GET /v1/models HTTP/1.1") -> bytes:
    return b"\r\n".join([start, b"host: h", *headers]) + b"\r\n\r\n"


def chunked(body: bytes, *headers: bytes) -> bytes:
    return post(b"transfer-encoding: chunked", *headers, body=body)


CHUNK = b"%x\r\n%b\r\n" % (LENGTH, BODY)
WHOLE = CHUNK + b"0\r\n\r\n"
SMUGGLED_BODY = msgspec.json.encode(chat(user="smuggled"))
SMUGGLED = post(b"content-length: %d" % len(SMUGGLED_BODY), body=SMUGGLED_BODY)


def served(name: str, data: bytes, *, times: int = 1) -> Vector:
    return Vector(name, data, (200,) * times, closes=False)


def lengths() -> Iterator[Vector]:
    def of(value: bytes) -> bytes:
        return post(b"content-length: " + value, body=BODY + SMUGGLED)

    yield served("exact", sized())
    yield served("leading zeros", post(b"content-length: 000%d" % LENGTH))
    yield served("spaces around", post(b"content-length: \t %d \t " % LENGTH))
    yield Vector("with transfer-encoding", post(b"content-length: 5", b"transfer-encoding: chunked",
                                                body=b"0\r\n\r\n" + SMUGGLED))
    yield Vector("after transfer-encoding", post(b"transfer-encoding: chunked", b"content-length: 5",
                                                 body=b"0\r\n\r\n" + SMUGGLED))
    yield Vector("twice, different", post(b"content-length: %d" % LENGTH, b"content-length: 0", body=BODY + SMUGGLED))
    yield Vector("twice, the same", post(b"content-length: %d" % LENGTH, b"content-length: %d" % LENGTH))
    values = {
        "list": b"%d, %d", "list of different": b"%d, 0", "plus": b"+%d", "minus": b"-%d", "point": b"%d.0",
        "exponent": b"%de0", "semicolon": b"%d;q=1", "quoted": b'"%d"', "underscore": b"%d_0", "NUL behind": b"%d\0",
        "vertical tab": b"\x0b%d", "form feed": b"%d\x0c",
    }  # fmt: skip
    for name, value in values.items():
        yield Vector(name, of(value.replace(b"%d", b"%d" % LENGTH)))
    yield Vector("hexadecimal", of(b"0x%x" % LENGTH))
    yield Vector("two numbers", of(b"1 %d" % LENGTH))
    yield Vector("empty", of(b""))
    yield Vector("words", of(b"many"))
    yield Vector("Arabic digits", of("٦٦".encode()))
    yield Vector("fullwidth digits", of("６６".encode()))
    yield Vector("over 64 bits", of(b"18446744073709551617"))
    yield Vector("5000 digits", of(b"9" * 5000))
    yield Vector("fits in 64 bits only", of(b"18446744073709551615"), (413,))
    yield Vector("too short", post(b"content-length: %d" % (LENGTH - 1)), more=(400,))
    yield Vector("none, with a body", post(), more=(400,))


def transfer_encodings() -> Iterator[Vector]:
    def of(value: bytes) -> bytes:
        return post(b"transfer-encoding:" + value, body=WHOLE + SMUGGLED)

    yield served("chunked", chunked(WHOLE))
    yield served("upper case", post(b"Transfer-Encoding: CHUNKED", body=WHOLE))
    yield served("tab before", post(b"transfer-encoding:\tchunked", body=WHOLE))
    yield served("no space", post(b"transfer-encoding:chunked", body=WHOLE))
    values = {
        "xchunked": b" xchunked", "chunkedx": b" chunkedx", "identity": b" identity", "empty": b"", "cow": b" cow",
        "chunked, identity": b" chunked, identity", "identity, chunked": b" identity, chunked",
        "gzip, chunked": b" gzip, chunked", "chunked twice in one": b" chunked, chunked", "comma behind": b" chunked,",
        "comma before": b" ,chunked", "vertical tab": b" \x0bchunked", "vertical tab behind": b" chunked\x0b",
        "tab behind": b" chunked\t",
        "quoted": b' "chunked"', "parameter": b" chunked;q=1", "NUL behind": b" chunked\0", "NUL before": b" \0chunked",
        "no-break space": b" \xa0chunked", "folded": b"\r\n chunked", "folded, something before": b" x\r\n chunked",
        "inner space": b" chun ked", "next line character": b" chunked\x85",
    }  # fmt: skip
    for name, value in values.items():
        yield Vector(name, of(value))
    yield Vector("twice", post(b"transfer-encoding: chunked", b"transfer-encoding: chunked", body=WHOLE))
    yield Vector("twice, unlike", post(b"transfer-encoding: chunked", b"transfer-encoding: cow", body=WHOLE))
    yield Vector("space before colon", post(b"transfer-encoding : chunked", body=WHOLE))
    yield Vector("tab before colon", post(b"transfer-encoding\t: chunked", body=WHOLE))
    yield Vector("underscore in its name", post(b"transfer_encoding: chunked", body=WHOLE), more=(400,))
    yield Vector("in HTTP/1.0", post(b"transfer-encoding: chunked", body=WHOLE, start=b"POST %b HTTP/1.0"))
    yield Vector("on a GET, unlike", get(b"transfer-encoding: identity, chunked") + b"0\r\n\r\n")


def chunks() -> Iterator[Vector]:
    half = LENGTH // 2
    in_two = b"%x\r\n%b\r\n%x\r\n%b\r\n" % (half, BODY[:half], LENGTH - half, BODY[half:])
    yield served("in two", chunked(in_two + b"0\r\n\r\n"))
    yield served("upper-case size", chunked(b"%X\r\n%b\r\n0\r\n\r\n" % (LENGTH, BODY)))
    yield served("leading zeros", chunked(b"0000%x\r\n%b\r\n000\r\n\r\n" % (LENGTH, BODY)))
    yield served("extension", chunked(b'%x;a=b;c="d"\r\n%b\r\n0;x\r\n\r\n' % (LENGTH, BODY)))
    yield served("trailer", chunked(CHUNK + b"0\r\nx-sum: 1\r\n\r\n"))
    yield served("trailers that must not count", chunked(CHUNK + b"0\r\nhost: evil\r\nx-request-id: late\r\n\r\n"))
    yield Vector("length in a trailer", chunked(CHUNK + b"0\r\ncontent-length: 999\r\n\r\n"))
    yield Vector("transfer-encoding in a trailer", chunked(CHUNK + b"0\r\ntransfer-encoding: cow\r\n\r\n"))
    sizes = {
        "size of no digit": b"zz", "empty size": b"", "negative size": b"-%x", "plus size": b"+%x", "0x size": b"0x%x",
        "space before size": b" %x", "space behind size": b"%x ", "tab behind size": b"%x\t", "size in quotes": b'"%x"',
        "underscore in size": b"0_%x", "NUL behind size": b"%x\0", "over 64 bits": b"10000000000000000%x",
        "17 zeros would be fine, 17 fs are not": b"fffffffffffffffff", "point": b"%x.0", "comma": b"%x,%x",
        "line feed in the extension": b"%x;a\nb", "carriage return in the extension": b"%x;a\rb",
        "NUL in the extension": b"%x;a\0", "open quote": b'%x;a="b',
    }  # fmt: skip
    for name, size in sizes.items():
        yield Vector(name, chunked(size.replace(b"%x", b"%x" % LENGTH) + b"\r\n" + BODY + b"\r\n0\r\n\r\n" + SMUGGLED))
    yield Vector("bare line feed behind size", chunked(b"%x\n%b\r\n0\r\n\r\n" % (LENGTH, BODY)))
    yield Vector("bare carriage return behind size", chunked(b"%x\r%b\r\n0\r\n\r\n" % (LENGTH, BODY)))
    yield Vector("no end of data", chunked(b"%x\r\n%b0\r\n\r\n" % (LENGTH, BODY)))
    yield Vector("bare line feed behind data", chunked(b"%x\r\n%b\n0\r\n\r\n" % (LENGTH, BODY)))
    yield Vector("longer than it says", chunked(b"%x\r\n%bxx\r\n0\r\n\r\n" % (LENGTH, BODY)))
    yield Vector("bare line feeds at the end", chunked(CHUNK + b"0\n\n" + SMUGGLED))
    yield Vector("garbage for the end", chunked(CHUNK + b"0\r\nGARBAGE\r\n\r\n"))
    yield Vector("folded trailer", chunked(CHUNK + b"0\r\nx: 1\r\n y\r\n\r\n"))
    yield Vector("extension of 2 MB", chunked(b"%x;" % LENGTH + b"a" * 2_000_000 + b"\r\n" + BODY + b"\r\n0\r\n\r\n"))
    yield Vector("trailers without end", chunked(CHUNK + b"0\r\n" + b"x-y: z\r\n" * 30_000 + b"\r\n"), (431,))
    yield Vector("cut off", chunked(CHUNK), (), half_closes=True)


def heads() -> Iterator[Vector]:
    yield served("any order and case", sized(b"X-Odd: \xfc\x80", b"ACCEPT:*/*"))
    yield served("odd but legal name", sized(b"!#$%&'*+-.^_`|~: x"))
    yield served("empty value", sized(b"x-empty:"))
    yield served("blank lines before", b"\r\n\r\n" + sized())
    lines = {
        "folded": b"x: a\r\n b", "folded by tab": b"x: a\r\n\tb", "space before colon": b"x : a", "no colon": b"x",
        "no name": b": a", "space in the name": b"x y: a", "NUL in the name": b"x\0: a", "NUL in the value": b"x: a\0b",
        "bare carriage return": b"x: a\rcontent-length: 0", "high byte in the name": b"x\x80: a",
        "parenthesis in the name": b"(x): a", "control byte in the value": b"x: a\x01",
        "delete in the value": b"x: \x7f",
        "second host": b"host: h", "second host, unlike": b"Host: evil", "line feed only": b"x: a\ny: b",
        "at sign in the name": b"a@b: c", "slash in the name": b"a/b: c",
        "line feed, then a length": b"x: a\ncontent-length: 0",
    }  # fmt: skip
    for name, line in lines.items():
        yield Vector(name, sized(line) + SMUGGLED)
    yield Vector("space before the first header", b"POST %b HTTP/1.1\r\n host: h\r\n\r\n" % CHAT_PATH.encode())
    yield Vector("no host", sized(host=b""))
    yield Vector("no host, cold", b"GET /liveness HTTP/1.1\r\n\r\n")
    yield Vector("line feeds only", sized().replace(b"\r\n", b"\n"))
    yield Vector("carriage returns only", sized().replace(b"\r\n", b"\r"))
    hosts = {"space": b"a b", "slash": b"a/b", "user": b"u@h", "comma": b"a,b", "high byte": b"h\xe9"}
    for name, host in hosts.items():
        yield Vector(f"host with {name}", sized(host=b"host: " + host))
    yield served("host with port", sized(host=b"host: [::1]:8080"))
    yield served("empty host", sized(host=b"host:"))


def start_lines() -> Iterator[Vector]:
    yield served("query", sized(start=b"POST %b?a=b HTTP/1.1"))
    yield Vector("HTTP/1.0", sized(start=b"POST %b HTTP/1.0"), (200,))
    yield Vector("HTTP/1.0 without host", sized(start=b"POST %b HTTP/1.0", host=b""), (200,))
    yield Vector("HTTP/1.0 that would stay", sized(b"connection: keep-alive", start=b"POST %b HTTP/1.0"), (200,))
    starts = {
        "absolute form": b"POST http://h%b HTTP/1.1", "authority form": b"POST h:80 HTTP/1.1",
        "asterisk form": b"POST * HTTP/1.1", "asterisk form of OPTIONS": b"OPTIONS * HTTP/1.1",
        "CONNECT": b"CONNECT h:80 HTTP/1.1", "no target": b"POST HTTP/1.1", "no version": b"POST %b",
        "HTTP/0.9": b"GET /liveness", "HTTP/1.2": b"POST %b HTTP/1.2", "HTTP/2.0": b"POST %b HTTP/2.0",
        "HTTP/1.10": b"POST %b HTTP/1.10", "HTTP/01.1": b"POST %b HTTP/01.1", "HTTP/1": b"POST %b HTTP/1",
        "lower-case version": b"POST %b http/1.1", "space behind version": b"POST %b HTTP/1.1 ",
        "FTP": b"POST %b FTP/1.1",
        "lower-case method": b"post %b HTTP/1.1", "unknown method": b"BREW %b HTTP/1.1",
        "NUL in method": b"PO\0ST %b HTTP/1.1",
        "no method": b" %b HTTP/1.1", "tab": b"POST\t%b HTTP/1.1",
        "space in target": b"POST %b /x HTTP/1.1", "NUL in target": b"POST %b\0 HTTP/1.1",
        "tab in target": b"POST %b\t HTTP/1.1",
        "high byte in target": b"POST %b\xff HTTP/1.1",
        "line feed in target": b"POST /\nx HTTP/1.1", "bare carriage return in target": b"POST /\rx HTTP/1.1",
    }  # fmt: skip
    for name, start in starts.items():
        yield Vector(name, sized(start=start) + SMUGGLED)
    yield served("two spaces", sized(start=b"POST  %b HTTP/1.1"))
    yield Vector("ICE", sized(start=b"SOURCE %b ICE/1.0"), (405,))
    yield Vector("RTSP", sized(start=b"SETUP %b RTSP/1.0"), (405,))
    yield Vector("HTTP/2 preface", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")
    yield Vector("TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100))
    yield Vector("SSH", b"SSH-2.0-OpenSSH_9.2\r\n")
    yield Vector("PROXY protocol", b"PROXY TCP4 1.2.3.4 5.6.7.8 1 2\r\n" + sized())
    yield Vector("byte order mark", b"\xef\xbb\xbf" + sized())
    yield Vector("other method", sized(start=b"PUT %b HTTP/1.1"), (405,), closes=False)
    yield Vector("TRACE", get(start=b"TRACE / HTTP/1.1"), (404,), closes=False)


def sizes() -> Iterator[Vector]:
    yield served("96 headers", sized(*[b"x-%d: y" % n for n in range(96)]))
    yield served("48 KB of header", sized(b"x: " + b"y" * 48_000))
    yield Vector("101 headers", sized(*[b"x-%d: y" % n for n in range(101)]), (431,))
    yield Vector("10,000 headers", sized(*[b"x: y"] * 10_000), (431,))
    yield Vector("200 KB in one header", sized(b"x: " + b"y" * 200_000), (431,))
    yield Vector("200 KB of a name", sized(b"x" * 200_000 + b": y"), (431,))
    yield Vector("200 KB of target", sized(start=b"POST %b?" + b"y" * 200_000 + b" HTTP/1.1"), (431,))
    yield Vector("200 KB of target, without end", b"POST /" + b"y" * 200_000, (431,))
    yield Vector("200 KB of value, without end", b"POST / HTTP/1.1\r\nhost: h\r\nx: " + b"y" * 200_000, (431,))
    yield Vector("200 KB of a name, without end", b"POST / HTTP/1.1\r\nhost: h\r\n" + b"y" * 200_000, (431,))
    yield served("20 KB of blank lines", b"\r\n" * 10_000 + sized())


def switching() -> Iterator[Vector]:
    for name, headers in {
        "h2c": (b"connection: Upgrade, HTTP2-Settings", b"upgrade: h2c", b"http2-settings: AAMAAABkAAQAoAAAAAIAAAAA"),
        "websocket": (b"connection: upgrade", b"upgrade: websocket", b"sec-websocket-version: 13"),
        "TLS": (b"connection: upgrade", b"upgrade: TLS/1.3"),
        "nothing": (b"connection: upgrade",),
    }.items():
        # A server may ignore the field (RFC 9110 §7.8), and Java's and curl's clients offer h2c with each request.
        yield served(f"upgrade to {name} is not taken", sized(*headers))
        yield served(f"upgrade to {name} is not taken, chunked", chunked(WHOLE, *headers))
        yield served(f"upgrade to {name} is not taken, cold", get(*headers))
        yield Vector(f"bytes behind an upgrade to {name}", sized(*headers) + sized(), (200,), more=(200,))
        yield Vector(f"a request for the body of an upgrade to {name}",
                     post(b"content-length: %d" % len(SMUGGLED), *headers, body=SMUGGLED), closes=False)
    yield served("upgrade without connection", sized(b"upgrade: h2c"))
    yield served("expect on a cold path", get(b"expect: 100-continue"))
    yield served("expectation that nobody knows", sized(b"expect: tea"))
    yield Vector("expect in HTTP/1.0", sized(b"expect: 100-continue", start=b"POST %b HTTP/1.0"), (200,))
    yield served("body of a GET", get(b"content-length: 5") + b"abcde")
    yield served("chunked body of a GET", get(b"transfer-encoding: chunked") + b"5\r\nabcde\r\n0\r\n\r\n")
    yield Vector("close", sized(b"connection: close"), (200,))
    yield Vector("close among others", sized(b"connection: keep-alive, close"), (200,))
    yield Vector("a request behind close", sized(b"connection: close") + SMUGGLED, (200,))
    yield Vector("a request behind close, cold", get(b"connection: close") + SMUGGLED, (200,))
    yield Vector("a request behind a refused one that closes",
                 sized(b"connection: close", b"content-type: text/plain") + SMUGGLED, (415,))
    yield Vector("garbage behind", sized() + b"GARBAGE", (200,), more=(400,))
    yield Vector("zeros behind", sized() + bytes(10), (200,), more=(400,))
    yield Vector("too long a body", sized() + b"x", (200,), more=(400,))
    yield served("blank line behind", sized() + b"\r\n")
    yield Vector("two at once", sized() + sized(), (200,), more=(200,))
    yield Vector("hot, then cold", sized() + get(), (200,), more=(200,))
    yield Vector("three at once, cold", get() * 3, (200,), more=(200, 200))
    yield Vector("cold, then hot", get() + sized(), (200,), more=(200,))


GROUPS = {
    group.__name__: group
    for group in (lengths, transfer_encodings, chunks, heads, start_lines, sizes, switching)
}


def test_there_are_many_and_their_names_tell_them_apart() -> None:
    for group in GROUPS.values():
        names = [vector.name for vector in group()]
        assert len(names) == len(set(names))
    assert sum(1 for group in GROUPS.values() for vector in group() if vector.statuses[:1] != (200,)) >= 60


# --- the conversation


def answers_in(raw: bytes) -> list[tuple[int, bytes]]:
    """Status and head of each whole answer in `raw`, interim ones left out.

    Raises:
        ValueError: `raw` is not a sequence of answers, as far as it goes.
    """
    answers = []
    while raw:
        if (found := re.match(rb"HTTP/1\.1 (\d{3}) [^\r\n]*\r\n((?:[^\r\n]+\r\n)*)\r\n", raw)) is None:
            if b"\r\n\r\n" in raw:
                raise ValueError(f"no answer: {raw[:200]!r}")
            break
        status, head, raw = int(found[1]), found[2].lower(), raw[found.end() :]
        if (length := re.search(rb"content-length: (\d+)\r\n", head)) is not None:
            whole, raw = len(raw) >= int(length[1]), raw[int(length[1]) :]
            if not whole:
                break
        elif status >= 200:
            raise ValueError(f"an answer without length: {head!r}")
        if status >= 200:
            answers.append((status, head))
    return answers


def pieces(data: bytes, how: str) -> Iterable[bytes]:
    if how == "whole":
        return [data]
    step = 1 if len(data) < 2000 else 991
    return [data[start : start + step] for start in range(0, len(data), step)]


async def talk(process: Running, vector: Vector, how: str) -> tuple[bytes, bool]:
    """Everything that the gateway says to a vector, and whether it was asked once more on the same connection."""
    parts, loop = urlsplit(process.url), asyncio.get_running_loop()
    raw, probed = bytearray(), False
    with socket.socket() as own:
        own.setblocking(False)
        await loop.sock_connect(own, (parts.hostname, parts.port))

        async def send(data: bytes) -> None:
            with contextlib.suppress(ConnectionError):
                for piece in pieces(data, how):
                    await loop.sock_sendall(own, piece)
                    if how == "dribble":
                        await asyncio.sleep(0)

        async def receive() -> None:
            with contextlib.suppress(ConnectionError):  # what came before a reset counts
                while data := await loop.sock_recv(own, 65536):
                    raw.extend(data)

        receiving = asyncio.create_task(receive())
        try:
            async with asyncio.timeout(PATIENCE_S):
                await send(vector.data)
                if vector.half_closes:
                    own.shutdown(socket.SHUT_WR)
                if vector.more or not vector.closes:
                    expected = len(vector.statuses)
                    await eventually(lambda: len(answers_in(bytes(raw))) >= expected or receiving.done())
                    if vector.more:
                        await asyncio.wait([receiving], timeout=0.2)
                    probed = not receiving.done()
                    await send(PROBE)
                await receiving
        finally:
            receiving.cancel()
            await asyncio.gather(receiving, return_exceptions=True)
    return bytes(raw), probed


async def converse(process: Running, vector: Vector, how: str) -> str | None:
    """What is wrong with how the gateway takes a vector, if anything."""
    try:
        raw, probed = await talk(process, vector, how)
        answers = answers_in(raw)
    except (TimeoutError, ValueError) as error:
        return f"{error!r}"
    statuses = tuple(status for status, _ in answers)
    wanted = [(*vector.statuses, *vector.more[:number]) for number in range(len(vector.more) + 1)]
    if probed:
        wanted = [*(wanted if vector.more else []), *[(*those, 200) for those in wanted]]
    if statuses not in wanted:
        return f"answered {statuses}, wanted one of {wanted}: {raw[:300]!r}"
    if statuses and not probed and not vector.more and b"connection: close\r\n" not in answers[-1][1]:
        return f"the connection ended unannounced: {answers[-1][1]!r}"
    return None


@pytest.mark.parametrize("how", ["whole", "dribble"])
@pytest.mark.parametrize("group", GROUPS)
async def test_each_vector_is_refused_or_read_in_exactly_one_way(tmp_path: Path, group: str, how: str) -> None:
    vectors = list(GROUPS[group]())
    async with ScriptedBackend().serving() as backend, gateway(tmp_path, [backend]) as process:
        found = await asyncio.gather(*[converse(process, vector, how) for vector in vectors])
        wrong = {vector.name: what for vector, what in zip(vectors, found, strict=True) if what is not None}
        assert wrong == {}
        await eventually(lambda: at_rest(process))
        assert [request.body for request in backend.requests if b"smuggled" in request.body] == []
        assert {request.path for request in backend.requests} <= {CHAT_PATH}
        assert len(backend.requests) == sample(process, "headrace_requests_total", outcome="ok")
        assert len(backend.requests) == sample(process, "headrace_attempts_total")
        assert sample(process, "headrace_requests_total", outcome="internal_error") == 0
        assert await converse(process, served("afterwards", sized()), "whole") is None


@pytest.mark.parametrize("how", ["whole", "dribble"])
async def test_a_cold_request_is_answered_once_though_its_body_is_broken(tmp_path: Path, how: str) -> None:
    """By its path where the answer came first, else by the fault."""
    async with ScriptedBackend().serving() as backend, gateway(tmp_path, [backend]) as process:
        broken = get(b"transfer-encoding: chunked") + b"zz\r\n"
        for _ in range(5):
            raw, _ = await talk(process, Vector("broken", broken), how)
            assert [status for status, _ in answers_in(raw)] in ([200], [400])


async def test_100_continue_comes_once_and_before_the_body(tmp_path: Path) -> None:
    head, body = sized(b"expect: 100-continue", b"connection: close").split(b"\r\n\r\n", 1)
    async with ScriptedBackend().serving() as backend, gateway(tmp_path, [backend]) as process:
        async with raw_client(process) as client:
            await client.send(head + b"\r\n\r\n")
            assert await client.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            assert backend.requests == []
            await client.send(body)
            raw = await client.to_end()
        assert raw.startswith(b"HTTP/1.1 200 ")
        assert raw.count(b"HTTP/1.1 ") == 1
        too_long = head.replace(b"content-length: %d" % LENGTH, b"content-length: 99999999999")
        async with raw_client(process) as client:
            await client.send(too_long + b"\r\n\r\n")
            assert (await client.to_end()).startswith(b"HTTP/1.1 413 ")  # and no body was asked for
        assert len(backend.requests) == 1
