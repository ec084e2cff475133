"""A simulated run as an instance to be bounded: the pool and workload of `headrace sim`, seen with hindsight.

What the gateway was told does not matter, only what the engines did: coefficients with the workload's own deviations,
speeds as the fleet's events set them, a network round trip on every answer. Requests of the warm-up are part of the
trace and not of the count, as in the figures of the policies. Prefixes: every block that any earlier request brought
is granted to every backend, so with much sharing the bound is far below what any cache can do.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from loadtest.fake_engine.step import EngineLimits
from loadtest.sim.bound.clairvoyant import SLOT_S, Clairvoyant
from loadtest.sim.bound.instance import BadInstance, BoundBackend, BoundRequest, SpeedSpan, least_uncached
from loadtest.sim.bound.replay import StepDice
from loadtest.sim.bound.work import StepNoise
from loadtest.sim.pools import Pool, SimBackend
from loadtest.sim.workload import HICCUP, EventKind, FleetEvent, Physics, Workload
from policies.facts import Budget


@dataclass(frozen=True, slots=True)
class SimulatedInstance:
    """One run, ready for `Clairvoyant`, `fluid_plan` and `search`."""

    requests: tuple[BoundRequest, ...]
    backends: tuple[BoundBackend, ...]
    noise: StepNoise
    dice: StepDice
    counted_from_s: float

    def clairvoyant(self, slot_s: float = SLOT_S) -> Clairvoyant:
        """The bounds of the run."""
        return Clairvoyant(self.requests, self.backends, counted_from_s=self.counted_from_s, slot_s=slot_s,
                           noise=self.noise)


def instance_of(pool: Pool, workload: Workload, seed: int = 0) -> SimulatedInstance:
    """The run of that workload on that pool; `seed` is for the replay's own dice.

    Raises:
        BadInstance: a request whose class promises nothing, so that it could not be late.
    """
    physics = workload.physics
    if physics.prefix_cache_share:
        uncached = least_uncached([(request.prompt_tokens, request.prefix_keys) for request in workload.requests],
                                  workload.prefix_block_tokens)
    else:
        uncached = [request.prompt_tokens for request in workload.requests]
    requests = []
    for request, uncached_tokens in zip(workload.requests, uncached, strict=True):
        budget = workload.classes[request.latency_class].budget
        ttft_s, tpot_s = _token_deadlines(budget, request.output_tokens, request.latency_class)
        requests.append(BoundRequest(request.arrival_s, request.prompt_tokens, uncached_tokens, request.output_tokens,
                                     ttft_s, tpot_s, request.latency_class))
    return SimulatedInstance(
        tuple(requests),
        tuple([_backend(backend, physics, workload.events) for backend in pool.backends]),
        StepNoise(physics.noise_sigma),
        StepDice(physics.noise_sigma, physics.hiccup_share, HICCUP, seed),
        workload.warm_up_s,
    )


def _token_deadlines(budget: Budget, output_tokens: int, class_name: str) -> tuple[float, float]:
    """TTFT and TPOT budgets that say the same for a request of that length."""
    if budget.ttft_s is None:
        if budget.e2e_s is None:
            raise BadInstance(f"class {class_name!r} promises neither a first token nor an end: nothing can be late")
        return budget.e2e_s, 0.0
    if budget.inter_token_s is None and budget.e2e_s is None:
        raise BadInstance(f"class {class_name!r} promises a first token and nothing after it: give it an inter-token "
                          f"or an end-to-end budget")
    gaps = output_tokens - 1
    end_s = budget.e2e_s if budget.e2e_s is not None else inf
    if budget.inter_token_s is not None:
        end_s = min(end_s, budget.ttft_s + gaps * budget.inter_token_s)
    ttft_s = min(budget.ttft_s, end_s)
    return ttft_s, (end_s - ttft_s) / gaps if gaps else 0.0


def _backend(backend: SimBackend, physics: Physics, events: Sequence[FleetEvent]) -> BoundBackend:
    calibrated = backend.coefficients
    true = replace(
        calibrated,
        prefill_ms_per_pair=calibrated.prefill_ms_per_pair + physics.prefill_pairs_ms,
        first_token_overhead_ms=calibrated.first_token_overhead_ms + physics.rtt_s * 1000,
    )
    limits = EngineLimits(backend.kv_capacity_tokens, backend.slots, max(backend.slots, backend.chunk_tokens))
    mine = [event for event in events if event.family == backend.family]
    unmoved = BoundBackend(backend.name, true, limits, backend.price_per_hour, backend.reference_batch,
                           calibrated=calibrated, closed=_closed(mine))
    return replace(unmoved, spans=_spans(mine, _longest_step_s(unmoved)))


def _closed(events: Sequence[FleetEvent]) -> tuple[tuple[float, float], ...]:
    """Lent: from the drain until the recall."""
    closed, from_s = [], None
    for event in events:
        if event.kind is EventKind.DRAIN and from_s is None:
            from_s = event.at_s
        elif event.kind is EventKind.RECALL and from_s is not None:
            closed.append((from_s, event.at_s))
            from_s = None
    return (*closed, (from_s, inf)) if from_s is not None else tuple(closed)


def _spans(events: Sequence[FleetEvent], longest_step_s: float) -> tuple[SpeedSpan, ...]:
    """Where the speed was not 1. An iteration under way keeps its pace, so a slowdown is granted one step's delay."""
    changes: list[tuple[float, float]] = [(0.0, 1.0)]
    factor, alive = 1.0, True
    for event in events:
        match event.kind:
            case EventKind.SLOW:
                at_s = event.at_s + (longest_step_s if alive and event.factor > factor else 0.0)
                factor = event.factor
            case EventKind.DIE:
                at_s, alive = event.at_s, False
            case EventKind.RETURN:
                at_s, alive = event.at_s, True
            case _:
                continue
        changes.append((max(at_s, changes[-1][0]), 1.0 / factor if alive else 0.0))
    ends_s = [at_s for at_s, _ in changes[1:]] + [inf]
    return tuple([SpeedSpan(from_s, until_s, speed) for (from_s, speed), until_s in zip(changes, ends_s, strict=True)
                  if speed != 1.0 and from_s < until_s])


def _longest_step_s(backend: BoundBackend) -> float:
    """An iteration with all that can be in it, its prompt at the end of a context that fills the memory."""
    c, limits = backend.coefficients, backend.limits
    tokens, context = limits.max_num_batched_tokens, limits.kv_capacity_tokens
    return (c.host_ms + max(c.prefill_base_ms, c.decode_base_ms + c.decode_ms_per_seq * limits.max_num_seqs
                            + c.decode_ms_per_seq_token * context)
            + c.prefill_ms_per_token * tokens + c.prefill_ms_per_pair * tokens * context) / 1000
