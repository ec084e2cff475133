"""How big a prompt is, from its bytes alone: what an average tokenizer would make of it, in a few microseconds.

    base_tokens = 0.26·ascii + 0.40·two_byte + 0.69·cjk + 0.60·three_byte + 1.6·four_byte      (characters of each kind)

The rates are means over the tokenizers of Qwen, Mistral (tekken) and DeepSeek on texts in six languages, code and
emoji (`tests/fixtures/prompts/samples.json` has text and counts). What a model's own tokenizer, its chat template and
a tenant's habits add is a factor that is learned (`router.request.prompt_ratios`), so that these need only be sensible.

Nothing counts words: Chinese, Japanese and Thai write none. What would mislead a count of bytes is seen through:

* `\\u4e2d` is six bytes of ASCII and one Chinese character; clients that escape send all of their text so.
* Token ids in place of text (`"prompt": [1, 2, 3]`) are counted as they are.
* Pictures and sound in base64 are no text: each counts as `MEDIA_TOKENS`, whatever its size.

A long prompt is judged by eight pieces of it, spread evenly.
"""

import re
from enum import StrEnum
from typing import NamedTuple

ASCII, TWO_BYTE, CJK, THREE_BYTE, FOUR_BYTE = 0.26, 0.40, 0.69, 0.60, 1.6
"""Tokens per character. CJK are U+3000 to U+D7FF and the full-width forms, with their punctuation."""
MEDIA_TOKENS = 1024
"""Of a picture: Qwen2.5-VL makes 1369 of a megapixel (28 pixels square each), LLaVA 1.5 makes 576 of any."""
PIECES, PIECE_BYTES = 8, 256
SAMPLE_BYTES = PIECES * PIECE_BYTES


class Script(StrEnum):
    """Which kind of characters makes most of a prompt's tokens; tokenizers differ from each other by it."""

    LATIN = "latin"
    CJK = "cjk"
    OTHER = "other"


class PromptSize(NamedTuple):
    """What the bytes of one prompt say of its size."""

    base_tokens: float
    """As an average tokenizer would count it; at least 1."""
    script: Script = Script.LATIN
    is_text: bool = True
    """Nothing but text. Other prompts are not scaled, and nothing is learned from them."""


def measure_prompt(body: bytes, start: int, end: int, tool_bytes: int = 0) -> PromptSize:
    """Size of the JSON value at `body[start:end]`: messages, a text, a list of texts or of token ids.

    `tool_bytes` is the length of the tools' JSON, which chat templates write into the prompt.
    """
    length = end - start
    tools = ASCII * tool_bytes
    if length <= 0:
        return PromptSize(max(1.0, tools))
    if body.startswith(b"[", start, end) and _TOKEN_IDS.match(body, start, end):
        return PromptSize(body.count(b",", start, end) + 1 + tools, is_text=False)
    if length <= SAMPLE_BYTES:
        return _text_size(body[start:end], length, tools)
    step = (length - PIECE_BYTES) // (PIECES - 1)
    pieces = [body[at : at + PIECE_BYTES] for at in range(start, start + PIECES * step, step)]
    text = [piece for piece in pieces if b" " in piece or not _may_be_base64(piece)]
    if len(text) < PIECES:
        count, media_bytes = _media(body, start, end)
        if count:
            text_size = _text_size(_joined(text), length - media_bytes, tools)
            return PromptSize(text_size.base_tokens + count * MEDIA_TOKENS, text_size.script, is_text=False)
    return _text_size(_joined(pieces), length, tools)


def _joined(pieces: list[bytes]) -> bytes:
    sample = b"".join(pieces)
    # Half an escape where a piece begins or ends would swallow what stands beside it.
    return b"".join([piece.strip(b"\\") for piece in pieces]) if b"\\" in sample else sample


_TOKEN_IDS = re.compile(rb"\[\s*(?:\[\s*)?[0-9]")


def _text_size(sample: bytes, length: int, tools: float) -> PromptSize:
    """Size of a text of `length` bytes that `sample` is a fair part of."""
    is_escaped = b"\\" in sample and b"\\u" in sample
    if not is_escaped and sample.isascii():
        return PromptSize(max(1.0, ASCII * length + tools))
    text = _unescaped(sample) if is_escaped else sample
    ascii_, latin, two, cjk, three, four = map(text.translate(_KINDS).count, (b"A", b"L", b"T", b"C", b"H", b"F"))
    in_latin = ASCII * ascii_ + TWO_BYTE * latin
    in_cjk = CJK * cjk
    in_other = TWO_BYTE * two + THREE_BYTE * three + FOUR_BYTE * four
    in_all = in_latin + in_cjk + in_other
    script = Script.LATIN if 2 * in_latin >= in_all else Script.CJK if in_cjk >= in_other else Script.OTHER
    return PromptSize(max(1.0, in_all * length / len(sample) + tools), script)


def _kinds() -> bytes:
    """For `bytes.translate`: what the first byte of a UTF-8 character says of it (RFC 3629 §3)."""
    kinds = bytearray(b"." * 256)
    for first, last, kind in ((0x00, 0x7F, "A"), (0xC2, 0xC9, "L"), (0xCA, 0xDF, "T"), (0xE0, 0xE2, "H"),
                              (0xE3, 0xED, "C"), (0xEE, 0xEE, "H"), (0xEF, 0xEF, "C"), (0xF0, 0xF4, "F")):  # fmt: skip
        kinds[first : last + 1] = kind.encode() * (last + 1 - first)
    return bytes(kinds)


_KINDS = _kinds()
_NOT_ASCII = bytes(range(0x80, 0x100))


def _unescaped(sample: bytes) -> bytes:
    """The same characters in UTF-8, in another order.

    Python's codec is ten times as fast as a regular expression; `\\/` is the one escape of JSON that it does not know.
    """
    plain = sample.replace(b"\\\\", b"  ").replace(b"\\/", b"/")
    text = plain.translate(None, _NOT_ASCII).decode("unicode_escape", "ignore")
    pairs_joined = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "ignore")
    return pairs_joined.encode() + plain.translate(None, _ASCII)


_ASCII = bytes(range(0x80))


def _may_be_base64(piece: bytes) -> bool:
    """A quarter of a kilobyte without a space or a quote, and no Chinese: neither prose nor code nor JSON."""
    return b" " not in piece and b'"' not in piece and piece.isascii() and b"\\u" not in piece


_MEDIA = re.compile(rb'"data(?::[\w.+/;=-]{1,99};base64,|"\s*:\s*")')
MIN_MEDIA_BYTES = 256


def _media(body: bytes, start: int, end: int) -> tuple[int, int]:
    """How many strings of the value are data URLs or the `data` of a sound, and how many bytes they take."""
    count = total = 0
    at = body.find(b'"data', start, end)
    while at >= 0:
        found = _MEDIA.match(body, at, end)
        after = at + 5
        if found is not None:
            after = max(found.end(), body.find(b'"', found.end(), end))
            if after - found.end() >= MIN_MEDIA_BYTES:
                count += 1
                total += after - at
        at = body.find(b'"data', after, end)
    return count, total
