"""Figure T: of two backends that each stall now and then, hedging rescues the requests, within its budget.

The same traffic goes through a gateway that hedges and through one that does not. A stalled request is never answered
by its backend: without hedging it is tried elsewhere once its timeout is over, far past what was promised.
"""

import asyncio
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from loadtest.reliability.backend import ActingBackend
from loadtest.reliability.client import Answer, ask, backend_entry, chat, gateway, ready
from loadtest.reliability.measured import Measured, Size, quantile

SECONDS = {Size.CI: 8.0, Size.LONG: 120.0}
RATE_PER_S = 25.0
STALL_EVERY = 30
"""One request in so many, on each backend."""
PREFILL_S = 0.08
PROMISED_S = 1.0
TIMEOUT_S = 3.0
RATIO, FLOOR_PER_S = 0.05, 0.1
SAVED = 10
"""What the budget may have saved up."""
COEFFICIENTS = {
    "version": "t", "source": "PREFILL_S", "prefill_base_ms": PREFILL_S * 1e3, "prefill_ms_per_token": 0.01,
    "prefill_ms_per_pair": 0.0, "decode_base_ms": 1.0, "decode_ms_per_seq": 0.0, "decode_ms_per_seq_token": 0.0,
}  # fmt: skip


class StallingBackend(ActingBackend):
    """Answers after its prefill, but for some requests, of which it says nothing for as long as somebody waits."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = 0

    async def _act(
        self, writer: asyncio.StreamWriter, act: dict[str, Any], *, stream: bool, left: "asyncio.Task[None]"
    ) -> None:
        self.turns += 1
        if self.turns % STALL_EVERY == 0:
            await left
            return
        await asyncio.sleep(PREFILL_S)
        await super()._act(writer, act, stream=stream, left=left)


class Run(NamedTuple):
    """One gateway's requests."""

    answers: dict[str, Answer]
    ended_at_s: dict[str, float]
    hedges: float
    left_at_s: dict[str, float]
    """When a backend was left in mid exchange, by request."""
    blamed: int
    rest: bool

    @property
    def in_time(self) -> float:
        """Share that was answered whole within the promise."""
        kept = sum(answer.ended == "whole" and answer.took_s <= PROMISED_S for answer in self.answers.values())
        return kept / len(self.answers)


async def figure_t(size: Size) -> list[Measured]:
    """With hedging and without."""
    plain, hedged = await _run(SECONDS[size], enabled=False), await _run(SECONDS[size], enabled=True)
    # Who is left with the answer is left at once; a stalled one that was not hedged in time ends with its timeout.
    waits_s = [max(0.0, hedged.left_at_s[name] - at_s) for name, at_s in hedged.ended_at_s.items()
               if name in hedged.left_at_s and hedged.answers[name].took_s <= PROMISED_S]
    number = len(hedged.answers)
    return [
        Measured("T", "requests, one in 30 stalled", number),
        Measured("T", "answered within the promise without hedging", plain.in_time),
        Measured("T", "answered within the promise", hedged.in_time, bound=0.98, relation=">="),
        Measured("T", "hedges", hedged.hedges, bound=round(SAVED + RATIO * number + FLOOR_PER_S * SECONDS[size])),
        Measured("T", "hedges without hedging", plain.hedges, bound=0, relation="=="),
        Measured("T", "stalled attempts called back", len(waits_s), bound=1, relation=">="),
        Measured("T", "the stalled backend is left, p99", quantile(waits_s, 0.99) * 1e3, "ms", 250),
        Measured("T", "booked against a backend", hedged.blamed, bound=number // STALL_EVERY),
        Measured("T", "at rest afterwards", hedged.rest and plain.rest, bound=1, relation="=="),
    ]


async def _run(seconds: float, *, enabled: bool) -> Run:
    async with StallingBackend().serving() as one, StallingBackend().serving() as two:
        with TemporaryDirectory() as folder:
            entries = [backend_entry(name, backend.url, coefficients=COEFFICIENTS, price_per_hour=1.0)
                       for name, backend in (("b0", one), ("b1", two))]
            sections: dict[str, Any] = {
                "policy": {"name": "headrace"},
                "latency_classes": [{"name": "default", "ttft_s": PROMISED_S}],
                "timeouts": {"first_token_s": TIMEOUT_S},
                "hedging": {"enabled": enabled, "budget_ratio": RATIO, "budget_floor_per_s": FLOOR_PER_S},
            }
            with gateway(Path(folder), entries, **sections) as started:
                await ready(started)
                ended_at_s: dict[str, float] = {}

                async def one_request(name: str) -> tuple[str, Answer]:
                    answer = await ask(started, chat(), request_id=name)
                    ended_at_s[name] = time.monotonic()
                    return name, answer

                asked = []
                for turn in range(round(seconds * RATE_PER_S)):
                    asked.append(asyncio.create_task(one_request(f"t{turn}")))
                    await asyncio.sleep(1 / RATE_PER_S)
                answers = dict(await asyncio.gather(*asked))
                rest = await started.at_rest()
                hedges = await started.counter("headrace_hedges_total")
                blamed = sum(entry["failed_requests"] for entry in (await started.fleet())["backends"])
    # A connection that ends with its answer is no departure.
    left_at_s = {name: at_s for backend in (one, two) for name, at_s in backend.left_at_s.items()}
    return Run(answers, ended_at_s, hedges, left_at_s, blamed, rest)
