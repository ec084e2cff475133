"""Figure B: output bytes are the backend's bytes, however the network cut them."""

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from loadtest.reliability.backend import DONE, SERVED, ActingBackend
from loadtest.reliability.client import MODEL, Gateway, ask, backend_entry, chat, gateway, ready
from loadtest.reliability.measured import Measured, Size
from router.wire.sse import ModelNameEdit, StreamReader

SPLITS = {Size.CI: (5_000, 1_000), Size.LONG: (100_000, 20_000)}
"""Random multi-splits of the reader, and cuts through sockets."""


def corpus() -> dict[str, tuple[str, str]]:
    """Streams by name: as an engine writes them, and as a client must get them (which did not ask for usage)."""
    texts = {
        "ascii": "the quick brown fox", "CJK": "水力發電的渠道", "emoji": "🌊⚡️👩‍🔬", "escapes": 'a"b\\c\n\td/\u2028',
        "looks like SSE": "data: [DONE]\n\n: no", "looks like JSON": '{"model":"served","usage":{"x":1}}',
    }  # fmt: skip
    shapes = ("chat", "two choices", "tools", "reasoning", "logprobs", "completion")
    endings = {"plain": "\n\n", "CRLF": "\r\n\r\n"}
    streams = {}
    for (name, text), shape, (ending, blank) in itertools.product(texts.items(), shapes, endings.items()):
        key = f"{name}, {shape}, {ending}"
        streams[key] = tuple("".join(_events(text, shape, blank, model)) for model in (SERVED, MODEL))
    return streams  # type: ignore[return-value]


def _events(text: str, shape: str, blank: str, model: str) -> Iterator[str]:
    line = blank[: len(blank) // 2]
    ascii_only = len(text) % 2 == 0  # both spellings of a character occur

    def event(choices: list[object], **members: object) -> str:
        document = {"id": "c", "created": 1, "model": model, "choices": choices, **members}
        return f"data: {json.dumps(document, ensure_ascii=ascii_only)}{blank}"

    yield f": hello{blank}retry: 1000{line}id: 7{blank}"
    deltas: dict[str, object] = {
        "chat": {"delta": {"content": text}}, "two choices": {"delta": {"content": text}},
        "tools": {"delta": {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": text}}]}},
        "reasoning": {"delta": {"reasoning_content": text, "content": None}},
        "logprobs": {"delta": {"content": text}, "logprobs": {"content": [{"token": text, "bytes": [226, 130]}]}},
        "completion": {"text": text},
    }  # fmt: skip
    indices = (0, 1) if shape == "two choices" else (0,)
    for index in indices:
        yield event([{"index": index, **deltas[shape], "finish_reason": None}])  # type: ignore[dict-item]
        yield f"event: message{line}data: {{\"choices\":{line}data: [], \"model\": \"{model}\"}}{blank}"
    for index in indices:
        yield event([{"index": index, "delta": {}, "finish_reason": "stop"}], future=[1.0, 1e5, None])
    if model == SERVED:  # hidden from a client that did not ask
        yield event([], usage={"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5})
    yield DONE.decode() if blank == "\n\n" else "data: [DONE]\r\n\r\n"


def relayed(stream: bytes, cuts: tuple[int, ...], choices: int) -> bytes:
    """What the gateway's reader makes of a stream in these pieces."""
    reader = StreamReader(ModelNameEdit(SERVED, MODEL), hide_usage=True, choices=choices)
    out, start = [], 0
    for cut in (*cuts, len(stream)):
        out.append(reader.feed(stream[start:cut]))
        start = cut
    return b"".join(out) + reader.rest()


async def figure_b(size: Size) -> list[Measured]:
    """Every two-way split and random ones by the reader, and random ones through sockets."""
    multi, through = SPLITS[size]
    dice, streams = random.Random(1), [(name, a.encode(), b.encode()) for name, (a, b) in corpus().items()]
    different = two_way = 0
    for name, stream, wanted in streams:
        choices = 2 if "two choices" in name else 1
        for cut in range(1, len(stream)):
            different += relayed(stream, (cut,), choices) != wanted
            two_way += 1
        different += relayed(stream, tuple(range(1, len(stream))), choices) != wanted
    for _ in range(multi):
        name, stream, wanted = dice.choice(streams)
        cuts_at = tuple(sorted(dice.sample(range(1, len(stream)), dice.randint(2, 12))))
        different += relayed(stream, cuts_at, 2 if "two choices" in name else 1) != wanted
    with TemporaryDirectory() as folder:
        async with ActingBackend().serving() as backend:
            with gateway(Path(folder), [backend_entry("b0", backend.url)]) as started:
                await ready(started)
                wrong = sum([await _differs(started, dice, *dice.choice(streams)) for _ in range(through)])
    return [
        Measured("B", "streams in the corpus", len(streams), bound=60, relation=">="),
        Measured("B", "splits of the reader", two_way + multi + len(streams)),
        Measured("B", "of these with other bytes", different, bound=0, relation="=="),
        Measured("B", "streams through sockets, cut at random", through),
        Measured("B", "of these with other bytes", wrong, bound=0, relation="=="),
    ]


async def _differs(to: Gateway, dice: random.Random, name: str, stream: bytes, wanted: bytes) -> bool:
    cuts = sorted(dice.sample(range(1, len(stream)), dice.randint(1, 20)))
    body = chat(act={"kind": "bytes", "text": stream.decode(), "cuts": cuts}, n=2 if "two choices" in name else 1)
    answer = await ask(to, body)
    return answer.ended != "whole" or answer.body != wanted
