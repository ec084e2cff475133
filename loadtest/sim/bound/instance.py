"""What is to be bounded: the requests of a trace, the backends that could have served them, and what serving costs.

Plain frozen values, known in full: the bound is clairvoyant. A request is *in budget* when its first token comes within
`ttft_budget_s` of its arrival, and its last within `ttft_budget_s + (output_tokens - 1) · tpot_budget_s`; what an early
first token saves may be spent later (the token deadlines of PolyServe, arXiv 2507.17769, and Andes, 2404.16283).

What serving costs is not what the engine happened to do but the *accounted* cost, of a batch that is the same for all::

    cost = price_per_hour / 3600 · ( b·u + q·(P² - (P - u)²)/2  +  D·(d + (host + c)/n_ref)  +  e·(P·D + D²/2) ) / 1000

with `u` of the `P` prompt tokens to compute, `D` output tokens, `n_ref` the backend's reference batch and `b q c d e`
the times of `backends.catalog.spec.Coefficients`. A late answer costs as much as one in time; a shed one is free.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import inf
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from backends.catalog.spec import Coefficients
from loadtest.fake_engine.step import EngineLimits

Floats = NDArray[np.float64]
Tokens = TypeVar("Tokens", float, Floats)


class BadInstance(ValueError):
    """A request, backend or figure that no bound can be stated for; the message says which and why."""


@dataclass(frozen=True, slots=True)
class BoundRequest:
    """One request of the trace with all that became known of it later."""

    arrival_s: float
    prompt_tokens: int
    uncached_tokens: int
    """Prompt tokens that *any* backend would have had to compute, its prefix cache as kind as it could be
    (`least_uncached`); `prompt_tokens` where nothing is shared."""
    output_tokens: int
    ttft_budget_s: float
    tpot_budget_s: float
    """Per output token after the first."""
    class_name: str = ""

    def __post_init__(self) -> None:
        if not 1 <= self.uncached_tokens <= self.prompt_tokens:
            raise BadInstance(f"the request at {self.arrival_s} s has {self.uncached_tokens} uncached of "
                              f"{self.prompt_tokens} prompt tokens: at least one, and no more than there are")
        if self.output_tokens < 1 or self.ttft_budget_s <= 0 or self.tpot_budget_s < 0 or self.arrival_s < 0:
            raise BadInstance(f"the request at {self.arrival_s} s needs an arrival from 0 on, an output token, "
                              f"a ttft_budget_s over 0 and a tpot_budget_s from 0 on")

    @property
    def deadline_s(self) -> float:
        """When the last token is due."""
        return self.arrival_s + self.ttft_budget_s + (self.output_tokens - 1) * self.tpot_budget_s


@dataclass(frozen=True, slots=True)
class SpeedSpan:
    """From `from_s` until `until_s` the backend does `speed` calibrated seconds of work a second.

    0: it is dead, draining or lent. 0.4: every step takes 2.5 times as long as its coefficients say.
    """

    from_s: float
    until_s: float
    speed: float

    def __post_init__(self) -> None:
        if self.speed < 0 or not self.from_s < self.until_s:
            raise BadInstance(f"a span from {self.from_s} s until {self.until_s} s at speed {self.speed}: it must end "
                              f"after it begins, at a speed of 0 or more")


@dataclass(frozen=True, slots=True)
class BoundBackend:
    """One backend as it truly was, not as the gateway was told."""

    name: str
    coefficients: Coefficients
    limits: EngineLimits
    price_per_hour: float
    reference_batch: int
    """`n_ref`: sequences that share the fixed part of a step in the accounted cost."""
    spans: tuple[SpeedSpan, ...] = ()
    """Where its speed was not 1, in order of time."""
    calibrated: Coefficients | None = None
    """What the accounted cost is computed with, where the engine is not as its calibration says."""
    closed: tuple[tuple[float, float], ...] = ()
    """From, until: it took no new requests (draining, lent); those that it had went on."""

    def __post_init__(self) -> None:
        if self.price_per_hour < 0 or self.reference_batch < 1:
            raise BadInstance(f"backend {self.name!r}: its price is at least 0 and its reference_batch at least 1")
        if any(later.from_s < span.until_s for span, later in zip(self.spans, self.spans[1:], strict=False)):
            raise BadInstance(f"backend {self.name!r}: its speed spans overlap, or are out of order")
        if any(not from_s < until_s for from_s, until_s in self.closed):
            raise BadInstance(f"backend {self.name!r} is closed until before it is closed from")

    def opens_s(self, now_s: float) -> float:
        """When it next takes a request: now, or when it is open again."""
        return next((until_s for from_s, until_s in self.closed if from_s <= now_s < until_s), now_s)

    def speed_at(self, now_s: float) -> float:
        """Calibrated seconds of work a second."""
        return next((span.speed for span in self.spans if span.from_s <= now_s < span.until_s), 1.0)

    def work_s(self, from_s: float, until_s: float) -> float:
        """Calibrated seconds of work it can do between two times."""
        slowed = sum((span.speed - 1.0) * max(0.0, min(until_s, span.until_s) - max(from_s, span.from_s))
                     for span in self.spans)
        return until_s - from_s + slowed


def device_s(backend: BoundBackend, prompt_tokens: Tokens, uncached_tokens: Tokens, output_tokens: Tokens) -> Tokens:
    """Accounted seconds of the backend for a request, or for an array of them: the bracket of the module's formula."""
    c = backend.calibrated or backend.coefficients
    cached = prompt_tokens - uncached_tokens
    prefill_ms = (c.prefill_ms_per_token * uncached_tokens
                  + c.prefill_ms_per_pair * (prompt_tokens**2 - cached**2) / 2)
    decode_ms = (output_tokens * (c.decode_ms_per_seq + (c.host_ms + c.decode_base_ms) / backend.reference_batch)
                 + c.decode_ms_per_seq_token * output_tokens * (prompt_tokens + output_tokens / 2))
    return (prefill_ms + decode_ms) / 1000


def accounted_cost(backend: BoundBackend, request: BoundRequest) -> float:
    """Money for one request served there, in budget or not."""
    seconds = device_s(backend, request.prompt_tokens, request.uncached_tokens, request.output_tokens)
    return backend.price_per_hour / 3600 * seconds


def work_at_pace_s(backend: BoundBackend, request: BoundRequest, pace_s: float) -> float:
    """Machine time of one request on a backend that is kept at `pace_s` per output token; infinite where it cannot be.

    ``(prefill + D·d + e·(P·D + D²/2)) / (1 - (host + c)/pace)``, from `pace ≥ (host + c + d·n + e·K) / (1 - busy with
    prefill)` over `pace`: of each second, what the fixed part of the steps leaves.
    """
    c = backend.coefficients
    free_share = 1.0 - (c.host_ms + c.decode_base_ms) / 1000 / pace_s if pace_s > 0 else 0.0
    if free_share <= 0:
        return inf
    prompt, output = request.prompt_tokens, request.output_tokens
    cached = prompt - request.uncached_tokens
    work_ms = (c.prefill_ms_per_token * request.uncached_tokens + c.prefill_ms_per_pair * (prompt**2 - cached**2) / 2
               + c.decode_ms_per_seq * output + c.decode_ms_per_seq_token * output * (prompt + output / 2))
    return work_ms / 1000 / free_share


def least_uncached(
    prompts: Sequence[tuple[int, Sequence[Hashable]]], block_tokens: int
) -> list[int]:
    """For each `(prompt_tokens, prefix_keys)` in order of arrival, the prompt tokens that no cache could have held.

    A block can only be cached where an earlier request brought it. Every backend is granted every such block, as if
    all requests had gone there and nothing had been evicted. The last prompt token is always computed.
    """
    seen: set[Hashable] = set()
    uncached = []
    for prompt_tokens, keys in prompts:
        hits = next((at for at, key in enumerate(keys) if key not in seen), len(keys))
        uncached.append(max(1, prompt_tokens - hits * block_tokens))
        seen.update(keys)
    return uncached
