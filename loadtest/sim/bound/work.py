"""The least machine time that an in-budget request can take on each backend, and the hours it must fall into.

One iteration of `loadtest.fake_engine.step` that prefills `T` tokens (`A` attention pairs) and decodes for `B`
sequences of `K` tokens of context in all takes, before noise and slowness::

    L = host + (c + d·B + e·K  if B else  a) + b·T + q·A                                                   ms

Its time is dealt out so that no more is charged than was spent: to each prompt `b` and `q` for its own tokens and
pairs, to each decoding sequence `d`, `e` for its own context and an equal share `(host + c)/B` of the fixed part. A
request of `P` prompt tokens, `u` of them to compute, and `D` output tokens is charged, whoever shares its batches::

    prefill = b·u + q·(P² - (P - u)²)/2                  exact for any chunks: Σ(chunk·done + chunk²/2) telescopes
    decode  = (D - 1)·(d + (host + c)/n) + e·(P·(D - 1) + D·(D - 1)/2)

The first token comes out of the prefill, hence `D - 1` steps; step `k` attends to `P + k` tokens. `n` stands for the
batches it sat in: the mean of `1/B` over its steps is at least `1 / mean(B)` (Jensen), and the mean of `B` is at most
what its own deadline allows. From its earliest first token it has `W` ms left for `D - 1` steps, each of at least
`host + c + e·(P + 1) + d·B + e·(B - 1)·k₀`, where `k₀` is the smallest context that any request of the trace brings::

    n = min( (W/(D - 1) - host - c - e·(P + 1 - k₀)) / (d + e·k₀),  max_num_seqs,  1 + (kv_capacity - P - 1)/k₀ )
    W = ttft_budget - ttft₀ + (D - 1)·tpot_budget
    ttft₀ = until it is open + first_token_overhead
            + ceil(u / max_num_batched_tokens)·(host + min(a, c + d + e·k₀)) + prefill

What is relaxed, and each of it only makes the bound lower: the base `a` of an iteration without decoding is free;
prompts of others never lengthen one's steps; decoding takes nothing of the token budget that chunks are cut from;
who waits for whom is the machine's choice; all is known beforehand.

A preempted sequence has one token out of its recomputed prompt instead of a decode step. That costs at least
`b·(u + 1)`, commonly far more than the step it replaces; where it is less, the charge falls back to `D - 1` times the
cheaper of the two, at the fullest batch. (One gap is left: a preempted prompt that is found whole in the prefix cache.)

Where steps are noisy or the backend fast for a while, `W` is stretched accordingly: see `StepNoise` and `SpeedSpan`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from math import exp, sqrt

import numpy as np
from numpy.typing import NDArray

from loadtest.sim.bound.instance import BadInstance, BoundBackend, BoundRequest, Floats, device_s

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]

DEVIATIONS = 4.0
"""Standard deviations of luck that are granted where noise may shorten a request's steps: one in 30,000 has more."""

BUSY_STEPS_PER_S = 10.0
"""An engine worth pricing makes more iterations a second than this; more of them average noise out better."""

NEGLIGIBLE_MS = 1e-9
"""A sequence that adds less than this to a step adds nothing: the batch is then as large as it is let."""


@dataclass(frozen=True, slots=True)
class StepNoise:
    """Each step is stretched by a factor of its own, log-normal with this sigma and median 1; hiccups come on top."""

    sigma: float = 0.0

    def luckiest_mean(self, steps: Floats) -> Floats:
        """The least that the mean factor over so many steps can be, but for one case in 30,000."""
        return np.exp(-DEVIATIONS * self.sigma / np.sqrt(np.maximum(steps, 1.0)))

    def capacity_factor(self, horizon_s: float) -> float:
        """Calibrated work that a busy engine does in a second, over the whole trace: the mean of `1/factor`, and luck.

        The whole trace, because the bound adds the slots up, each at its price.
        """
        luck = DEVIATIONS * self.sigma / sqrt(max(1.0, BUSY_STEPS_PER_S * horizon_s))
        return exp(self.sigma**2 / 2) * (1.0 + luck)


QUIET = StepNoise()


@dataclass(frozen=True, slots=True, eq=False)
class WorkTable:
    """Requests × backends: cost, work and windows. Rows of alike requests may be merged, `count` says how many.

    Every array but `count`, `arrival_s` and the deadlines has shape (requests, backends).
    """

    count: Ints
    arrival_s: Floats
    ttft_deadline_s: Floats
    last_token_deadline_s: Floats
    can_serve: Mask
    """False: not even alone on an idle backend would it be in budget."""
    cost: Floats
    prefill_s: Floats
    decode_s: Floats
    earliest_first_token_s: Floats

    @property
    def requests(self) -> int:
        return int(self.count.sum())

    def rows(self, chosen: Mask) -> "WorkTable":
        """The table of those rows alone."""
        return WorkTable(*[getattr(self, column.name)[chosen] for column in fields(self)])

    def servable(self) -> int:
        """Requests that at least one backend could serve in budget."""
        return int(self.count[self.can_serve.any(axis=1)].sum())


@dataclass(frozen=True, slots=True, eq=False)
class _Columns:
    """The requests as arrays of shape (requests,)."""

    arrival_s: Floats
    prompt: Floats
    uncached: Floats
    output: Floats
    ttft_s: Floats
    tpot_s: Floats

    @classmethod
    def of(cls, requests: Sequence[BoundRequest]) -> "_Columns":
        rows = np.array([
            (r.arrival_s, r.prompt_tokens, r.uncached_tokens, r.output_tokens, r.ttft_budget_s, r.tpot_budget_s)
            for r in requests
        ], dtype=np.float64).reshape(-1, 6)
        return cls(*rows.T)

    @property
    def deadline_s(self) -> Floats:
        return self.arrival_s + self.ttft_s + (self.output - 1) * self.tpot_s


def work_table(
    requests: Sequence[BoundRequest], backends: Sequence[BoundBackend], noise: StepNoise = QUIET
) -> WorkTable:
    """The table of the module's formulas, one row a request.

    Raises:
        BadInstance: no request, no backend, or two backends of one name.
    """
    if not requests or not backends:
        raise BadInstance("a bound needs at least one request and one backend")
    if len({backend.name for backend in backends}) < len(backends):
        raise BadInstance(f"backend names repeat: {', '.join(backend.name for backend in backends)}")
    trace = _Columns.of(requests)
    columns = [_column(trace, backend, noise) for backend in backends]
    can_serve, cost, prefill_s, decode_s, first_s = (np.stack(part, axis=1) for part in zip(*columns, strict=True))
    return WorkTable(
        count=np.ones(len(requests), dtype=np.int64),
        arrival_s=trace.arrival_s,
        ttft_deadline_s=trace.arrival_s + trace.ttft_s,
        last_token_deadline_s=trace.deadline_s,
        can_serve=can_serve.astype(np.bool_),
        cost=cost,
        prefill_s=prefill_s,
        decode_s=decode_s,
        earliest_first_token_s=first_s,
    )


def _column(trace: _Columns, backend: BoundBackend, noise: StepNoise) -> tuple[Floats | Mask, ...]:
    """One backend's column: can_serve, cost, prefill_s, decode_s, earliest_first_token_s."""
    c, limits = backend.coefficients, backend.limits
    prompt, uncached, output = trace.prompt, trace.uncached, trace.output
    smallest_context = float(prompt.min()) + 1.0
    speed = _fastest(backend, trace.arrival_s, trace.deadline_s)
    wait_ms = (np.array([backend.opens_s(at) for at in trace.arrival_s.tolist()]) - trace.arrival_s) * 1000
    moving = speed > 0

    prefill_ms = (c.prefill_ms_per_token * uncached
                  + c.prefill_ms_per_pair * (prompt**2 - (prompt - uncached) ** 2) / 2)
    chunks = np.ceil(uncached / limits.max_num_batched_tokens) if limits.chunked_prefill else np.ones_like(prompt)
    least_base_ms = min(c.prefill_base_ms,
                        c.decode_base_ms + c.decode_ms_per_seq + c.decode_ms_per_seq_token * smallest_context)
    prefill_took_ms = (chunks * (c.host_ms + least_base_ms) + prefill_ms) * noise.luckiest_mean(chunks)
    ttft_ms = wait_ms + c.first_token_overhead_ms + prefill_took_ms / np.where(moving, speed, 1.0)

    steps = output - 1
    left_ms = (trace.ttft_s * 1000 - ttft_ms + steps * trace.tpot_s * 1000) * speed / noise.luckiest_mean(steps)
    batch = _largest_batch(backend, left_ms / np.maximum(steps, 1.0), prompt, smallest_context)
    decode_ms = _decode_ms(backend, trace, left_ms, batch, smallest_context)

    can_serve = (moving & (ttft_ms <= trace.ttft_s * 1000) & ((batch >= 1.0) | (steps == 0))
                 & (prompt + output <= limits.kv_capacity_tokens))
    if not limits.chunked_prefill:
        can_serve &= prompt + output <= limits.max_num_batched_tokens
    cost = backend.price_per_hour / 3600 * device_s(backend, prompt, uncached, output)
    return can_serve, cost, prefill_ms / 1000, decode_ms / 1000, trace.arrival_s + ttft_ms / 1000


def _largest_batch(backend: BoundBackend, step_ms: Floats, prompt: Floats, smallest_context: float) -> Floats:
    """`n`: sequences that decode on average, at most, where steps may take `step_ms` on average."""
    c, limits = backend.coefficients, backend.limits
    room_ms = (step_ms - c.host_ms - c.decode_base_ms
               - c.decode_ms_per_seq_token * (prompt + 1.0 - smallest_context))
    per_seq_ms = c.decode_ms_per_seq + c.decode_ms_per_seq_token * smallest_context
    by_pace = room_ms / per_seq_ms if per_seq_ms > NEGLIGIBLE_MS else np.where(room_ms >= 0, np.inf, 0.0)
    by_memory = 1.0 + np.maximum(0.0, limits.kv_capacity_tokens - prompt - 1.0) / smallest_context
    return np.minimum(np.minimum(by_pace, by_memory), float(limits.max_num_seqs))


def _decode_ms(
    backend: BoundBackend, trace: _Columns, left_ms: Floats, batch: Floats, smallest_context: float
) -> Floats:
    """Least decode charge; see the module's text for what a preemption may replace."""
    c = backend.coefficients
    steps = trace.output - 1
    shared_ms = c.host_ms + c.decode_base_ms
    own_ms = c.decode_ms_per_seq_token * (trace.prompt * steps + trace.output * steps / 2)
    full = steps * (c.decode_ms_per_seq + shared_ms / np.maximum(batch, 1.0)) + own_ms

    # One step fewer: by how much does `full` fall? It is convex in the steps, so its slope at the end is the most.
    per_seq_ms = c.decode_ms_per_seq + c.decode_ms_per_seq_token * smallest_context
    own_step_ms = shared_ms + c.decode_ms_per_seq_token * (trace.prompt + 1.0 - smallest_context)
    room_ms = np.maximum(left_ms - own_step_ms * steps, 1e-9)
    by_pace = shared_ms * per_seq_ms * steps * (2 * left_ms - own_step_ms * steps) / room_ms**2
    last_step_ms = (c.decode_ms_per_seq + c.decode_ms_per_seq_token * (trace.prompt + trace.output)
                    + np.maximum(by_pace, shared_ms / np.maximum(batch, 1.0)))
    recompute_ms = c.prefill_ms_per_token * (trace.uncached + 1)
    fullest = float(backend.limits.max_num_seqs)
    cheapest_step_ms = c.decode_ms_per_seq + c.decode_ms_per_seq_token * trace.prompt + shared_ms / fullest
    charge: Floats = np.where(recompute_ms >= last_step_ms, full, steps * np.minimum(cheapest_step_ms, recompute_ms))
    return charge


def _fastest(backend: BoundBackend, from_s: Floats, until_s: Floats) -> Floats:
    """The highest speed that the backend has at some time within each window."""
    edges = [0.0, *(edge for span in backend.spans for edge in (span.from_s, span.until_s)), np.inf]
    fastest = np.zeros_like(from_s)
    for start, end in pairwise(edges):
        if start < end:
            meets = (from_s < end) & (until_s >= start)
            fastest = np.maximum(fastest, np.where(meets, backend.speed_at(start), 0.0))
    return fastest
