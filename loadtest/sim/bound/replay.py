"""One backend's share of a trace, run through the fake engine's iterations: which of it came in budget.

Backends do not see each other, so once it is settled who goes where each can be replayed alone. Prefix caches stay
cold: what is reached without them can be reached.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from math import exp, inf
from random import Random

from loadtest.fake_engine.step import SequenceRequest, TokenEventKind, new_engine, next_step_s, step, submit
from loadtest.sim.bound.instance import BoundBackend, BoundRequest


@dataclass(frozen=True, slots=True)
class StepDice:
    """What stretches single iterations: log-normal noise of median 1, and rare hiccups."""

    sigma: float = 0.0
    hiccup_share: float = 0.0
    hiccup_factors: tuple[float, float] = (3.0, 8.0)
    seed: int = 0

    def factors(self, backend: str) -> "_Factors":
        """An endless row of factors, the same each time for the same backend."""
        return _Factors(self, Random(f"{self.seed}/{backend}"))


class _Factors:
    """Draws one factor a call."""

    def __init__(self, dice: StepDice, rng: Random) -> None:
        self._dice, self._rng = dice, rng

    def __call__(self) -> float:
        dice, rng = self._dice, self._rng
        factor = exp(rng.gauss(0.0, dice.sigma)) if dice.sigma else 1.0
        if dice.hiccup_share and rng.random() < dice.hiccup_share:
            factor *= rng.uniform(*dice.hiccup_factors)
        return factor


STILL = StepDice()


def lives_of(backend: BoundBackend) -> list[tuple[float, float]]:
    """From, until: the stretches of time that it is up; at the end of each it loses what it holds."""
    dead = [(span.from_s, span.until_s) for span in backend.spans if span.speed == 0]
    edges = [0.0, *chain.from_iterable(dead), inf]
    return [(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if start < end]


def takes(backend: BoundBackend, request: BoundRequest) -> bool:
    """Whether it is up and open when the request arrives, and the request fits."""
    needed = request.prompt_tokens + request.output_tokens
    limits = backend.limits
    fits = needed <= limits.kv_capacity_tokens and (limits.chunked_prefill or needed <= limits.max_num_batched_tokens)
    return (fits and backend.speed_at(request.arrival_s) > 0
            and backend.opens_s(request.arrival_s) == request.arrival_s)


def replay(
    backend: BoundBackend, requests: Sequence[tuple[int, BoundRequest]], dice: StepDice = STILL
) -> set[int]:
    """Numbers of those requests, given in order of arrival, that were in budget. What it cannot take is not.

    Whoever is late is served to the end all the same, as an engine does that nobody told of budgets.
    """
    good: set[int] = set()
    factor = dice.factors(backend.name)
    for from_s, until_s in lives_of(backend):
        mine = {number: request for number, request in requests
                if from_s <= request.arrival_s < until_s and takes(backend, request)}
        good |= _replay_life(backend, mine, until_s, factor)
    return good


def _replay_life(
    backend: BoundBackend, requests: dict[int, BoundRequest], until_s: float, factor: _Factors
) -> set[int]:
    state = new_engine(backend.coefficients, backend.limits)
    for number, request in requests.items():
        submit(state, SequenceRequest(number, request.prompt_tokens, request.output_tokens, request.arrival_s))
    began: set[int] = set()
    good: set[int] = set()
    while (start_s := next_step_s(state)) is not None and start_s < until_s:
        speed = backend.speed_at(start_s) if backend.spans else 1.0
        _, result = step(state, start_s, factor() / speed)
        if result.ended_at_s > until_s:
            break
        for event in result.events:
            assert isinstance(event.id, int)
            number, request = event.id, requests[event.id]
            if event.kind is TokenEventKind.FIRST_TOKEN and event.at_s <= request.arrival_s + request.ttft_budget_s:
                began.add(number)
            elif event.kind is TokenEventKind.FINISHED and number in began and event.at_s <= request.deadline_s:
                good.add(number)
    return good
