"""One simulated engine: the fake engine's iterations, stretched by noise, slowness and what the coefficients leave out.

It runs ahead: `run` carries out iterations that nobody outside can influence or see, and stops at the first that has
news. Quiet iterations therefore cost a call of `step` each and no event.
"""

from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from math import exp
from random import Random
from statistics import NormalDist
from typing import NamedTuple

from loadtest.fake_engine.step import (
    EngineLimits,
    EngineState,
    SequenceRequest,
    StepResult,
    TokenEvent,
    TokenEventKind,
    next_step_s,
    step,
    submit,
)
from loadtest.sim.pools import SimBackend
from loadtest.sim.workload import HICCUP, Physics

REPORT_EVERY_S = 0.1
"""Streams report their pace this often on each backend, as a gateway's do."""
_NOISE_POINTS = 4096


class PrefixKeys(OrderedDict[Hashable, None]):
    """A prefix cache that holds so many blocks at most, the least recently used going first."""

    def __init__(self, max_blocks: int) -> None:
        super().__init__()
        self.max_blocks = max_blocks

    def __setitem__(self, key: Hashable, value: None) -> None:
        super().__setitem__(key, value)
        if len(self) > self.max_blocks:
            self.popitem(last=False)

    def hits(self, keys: tuple[Hashable, ...]) -> int:
        """How many of these blocks, from the first on, are there."""
        hits = 0
        for key in keys:
            if key not in self:
                break
            hits += 1
        return hits


class News(NamedTuple):
    """An iteration that somebody outside will notice."""

    at_s: float
    rounds_before: int
    """Iterations with decoding before this one: each gave every decoding stream a token."""
    rounds: int
    events: tuple[TokenEvent, ...]
    life: int
    """News of an engine that has died since is void."""
    reports: bool
    """Whether streams report their pace now."""


class SimEngine:
    """The live state of one engine. Times are the engine's own; the network is the world's business."""

    def __init__(self, backend: SimBackend, physics: Physics, rng: Random, prefix_block_tokens: int) -> None:
        self.backend = backend
        self.physics = physics
        self.alive = True
        self.slow_factor = 1.0
        self.scheduled = False
        """Whether the world has an event for its next iteration."""
        self.rounds = 0
        self.last_end_s = 0.0
        self.last_decoded = 0
        self.busy_s = 0.0
        self.life = 0
        self.cached_tokens: dict[Hashable, int] = {}
        """Prompt tokens found in the prefix cache, by sequence, until somebody takes note (`take_cached`)."""
        self._rng = rng
        self._noise = _noise_table(physics.noise_sigma)
        self._report_due_s = 0.0
        self._block = prefix_block_tokens
        self._unadmitted: deque[SequenceRequest] = deque()
        self._preempted = 0
        self._coefficients = backend.coefficients
        if physics.prefill_pairs_ms:
            pairs = backend.coefficients.prefill_ms_per_pair + physics.prefill_pairs_ms
            self._coefficients = replace(backend.coefficients, prefill_ms_per_pair=pairs)
        self._limits = EngineLimits(
            backend.kv_capacity_tokens, backend.slots, backend.chunk_tokens, True, prefix_block_tokens)
        self.state = self._new_state()

    def submit(self, request: SequenceRequest) -> None:
        """Queue a sequence; it may be dated into the future, in the order of arrival. Raises what the step's does."""
        submit(self.state, request)
        if self.physics.prefix_cache_share:
            self._unadmitted.append(request)

    def next_start_s(self) -> float | None:
        """When the next iteration can start."""
        return next_step_s(self.state) if self.alive else None

    def die(self) -> None:
        """Everything that it held is gone; a later `revive` starts cold."""
        self.alive = self.scheduled = False
        self.life += 1
        self.state = self._new_state()
        self._unadmitted.clear()
        self._preempted = 0
        self.cached_tokens.clear()
        self.last_decoded = 0

    def revive(self, now: float) -> None:
        self.alive = True
        self.state.busy_until_s = now

    def visible_rounds(self, engine_now: float) -> int:
        """Iterations with decoding that are over by then, where it has not run past the next iteration after that."""
        return self.rounds - (1 if self.last_decoded and self.last_end_s > engine_now else 0)

    def take_cached(self, sequence: Hashable) -> int:
        """Prompt tokens that this sequence did not have to compute."""
        return self.cached_tokens.pop(sequence, 0)

    def run(self, horizon_s: float) -> News | float | None:
        """Run iterations that start before `horizon_s`, up to the first that has news.

        Returns the news, or the start of the next iteration where the horizon came first, or `None`: nothing to do.
        """
        state, rng, noise = self.state, self._rng, self._noise
        hiccup_share, penalty, slow = self.physics.hiccup_share, self.physics.graph_penalty, self.slow_factor
        caches = bool(self.physics.prefix_cache_share)
        start_s = next_step_s(state)
        while start_s is not None and start_s < horizon_s:
            factor = slow * noise[int(rng.random() * _NOISE_POINTS)]
            if rng.random() < hiccup_share:
                factor *= rng.uniform(*HICCUP)
            if penalty:
                factor *= _graph_factor(state.decoding_seqs, penalty)
            result = self._step_and_note(start_s, factor) if caches else step(state, start_s, factor)[1]
            end_s, decoded = result.ended_at_s, result.decode_seqs
            before = self.rounds
            self.busy_s += end_s - start_s
            self.last_end_s, self.last_decoded = end_s, decoded
            if decoded:
                self.rounds = before + 1
            reports = decoded > 0 and end_s >= self._report_due_s
            if reports:
                self._report_due_s = end_s + REPORT_EVERY_S
            if reports or result.events:
                return News(end_s, before, self.rounds, result.events, self.life, reports)
            start_s = next_step_s(state)
        return start_s

    def _step_and_note(self, start_s: float, factor: float) -> StepResult:
        """One iteration, with a note of what each admitted sequence found in the prefix cache."""
        state = self.state
        waiting = state.waiting_seqs
        found = []
        if self._unadmitted and isinstance(state._prefix_lru, PrefixKeys):
            # No more than the batch can take will be admitted now.
            for request in islice(self._unadmitted, 32):
                hit = state._prefix_lru.hits(request.prefix_keys) * self._block
                found.append((request.id, min(hit, request.prompt_tokens - 1)))
        _, result = step(state, start_s, factor)
        preempted = sum(event.kind is TokenEventKind.PREEMPTED for event in result.events)
        admitted = waiting + preempted - state.waiting_seqs
        # Preempted sequences wait at the head of the queue and come back before any that is new.
        returned = min(admitted, self._preempted + preempted)
        self._preempted += preempted - returned
        for place in range(min(admitted - returned, len(self._unadmitted))):
            self._unadmitted.popleft()
            if place < len(found):
                sequence, cached = found[place]
                self.cached_tokens[sequence] = cached
        return result

    def _new_state(self) -> EngineState:
        share = self.physics.prefix_cache_share
        blocks = int(share * self.backend.kv_capacity_tokens / self._block)
        return EngineState(self._coefficients, self._limits, _prefix_lru=PrefixKeys(blocks))


@lru_cache
def _noise_table(sigma: float) -> tuple[float, ...]:
    """Equally likely values of log-normal noise: one look-up instead of a logarithm and a square root a step."""
    if sigma <= 0.0:
        return (1.0,) * _NOISE_POINTS
    normal = NormalDist()
    return tuple([exp(sigma * normal.inv_cdf((i + 0.5) / _NOISE_POINTS)) for i in range(_NOISE_POINTS)])


def _graph_factor(decoding: int, penalty: float) -> float:
    """What a batch pays for the CUDA graph that it is padded to: `penalty` times the share of empty places.

    Graphs are captured for 1, 2, 4 and every multiple of 8 sequences, as vLLM does.
    """
    if decoding <= 2:
        return 1.0
    padded = 4 if decoding <= 4 else -(-decoding // 8) * 8
    return 1.0 + penalty * (padded - decoding) / padded
