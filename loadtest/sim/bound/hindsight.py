"""A clairvoyant router that can be built: a fixed assignment, replayed through the engine and improved by local search.

The linear programme is what no policy can beat; this is what some policy, knowing the future, does reach. The best
possible router lies between. A policy's distance to the bound is therefore in two parts: from the policy to this point
something is to be gained by knowing more, and what lies beyond may be out of anyone's reach.

The value of an assignment is ``worth · requests in budget - accounted cost``, over all requests that are served, late
ones too. Each round proposes one change in each of several stretches of time, replays the backends concerned, keeps the
changes after which their own stretch is worth more, and goes on from there if the whole is. Changes: a request that
misses goes elsewhere or is turned away, one that arrived shortly before it makes room, one that is in budget goes where
it is cheaper. No dice but the seed's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from random import Random

from loadtest.sim.bound.instance import BadInstance, BoundBackend, BoundRequest, accounted_cost, work_at_pace_s
from loadtest.sim.bound.replay import STILL, StepDice, replay, takes

AWAY = -1
"""In an assignment: turned away."""

WORTH_RATIO = 25.0
"""Default worth of a request in budget, in mean costs of a request: the exchange rate of the routing policy."""

STRETCH_S = 20.0
"""Changes of one round are this far apart, so that each can be judged by the requests that arrive near it."""

CROWD_S = 4.0
"""A request can only have been delayed by those that arrived this shortly before."""

DRAWN = 4
"""Of so many changes drawn, the one that saves most is tried."""


@dataclass(frozen=True, slots=True)
class HindsightPoint:
    """An assignment that was replayed, and what came of it."""

    assignment: tuple[int, ...]
    """For each request the number of its backend, or `AWAY`."""
    good_requests: int
    cost: float
    """Accounted, of all that were served. Both are of the counted requests."""
    value: float
    """Of all requests."""
    evaluations: int
    """Rounds of replay until then."""


Progress = Callable[[HindsightPoint], None]


def search(
    requests: Sequence[BoundRequest], backends: Sequence[BoundBackend], start: Sequence[int], *, evaluations: int = 400,
    seed: int = 0, worth: float | None = None, dice: StepDice = STILL, counted_from_s: float = 0.0,
    progress: Progress | None = None,
) -> HindsightPoint:
    """The best assignment found from `start` on, never worse than it; `progress` hears of each improvement.

    `worth` is money for one request in budget. Requests that arrive before `counted_from_s` take part and are in
    neither figure. Start from a policy's own assignment to ask what it missed, or from
    `paced_assignment`.

    Raises:
        BadInstance: `start` does not fit the requests and backends.
    """
    if len(start) != len(requests) or any(not AWAY <= at < len(backends) for at in start):
        raise BadInstance(f"an assignment names a backend from 0 to {len(backends) - 1}, or {AWAY}, for each of "
                          f"{len(requests)} requests; this one has {len(start)}")
    trace = _Trace(requests, backends, worth, dice, counted_from_s)
    best = trace.evaluate(list(start), None, range(len(backends)))
    used = 1
    while used < evaluations:
        proposal = trace.propose(best, Random(f"{seed}/{used}"))
        if not proposal:
            break
        tried = trace.evaluate(_changed(best.assignment, proposal), best, trace.touched(best, proposal))
        used += 1
        kept = {number: at for number, at in proposal.items() if trace.gain(best, tried, number) > 0}
        if kept and len(kept) < len(proposal):
            tried = trace.evaluate(_changed(best.assignment, kept), best, trace.touched(best, kept))
            used += 1
        if kept and tried.value > best.value:
            best = tried
            if progress:
                progress(trace.point(best, used))
    return trace.point(best, used)


def paced_assignment(
    requests: Sequence[BoundRequest], backends: Sequence[BoundBackend], fill: float = 0.8
) -> list[int]:
    """A fair start: each request where it is cheapest among the backends whose work at hand does not delay it.

    Every backend has a ledger of work at the request's pace, worked off at `fill` seconds a second. A ledger may be as
    long as half the TTFT budget; where all are longer, the shortest takes the request.
    """
    ledger_s = [0.0] * len(backends)
    last_s = 0.0
    assignment = [AWAY] * len(requests)
    for number in sorted(range(len(requests)), key=lambda number: requests[number].arrival_s):
        request = requests[number]
        ledger_s = [max(0.0, work_s - fill * (request.arrival_s - last_s)) for work_s in ledger_s]
        last_s = request.arrival_s
        work_s = [work_at_pace_s(backend, request, request.tpot_budget_s) if takes(backend, request) else inf
                  for backend in backends]
        able = [at for at, work in enumerate(work_s) if work < inf]
        if not able:
            continue
        free = [at for at in able if ledger_s[at] <= request.ttft_budget_s / 2]
        at = min(free, key=lambda at: (accounted_cost(backends[at], request), ledger_s[at])) if free else min(
            able, key=lambda at: ledger_s[at])
        assignment[number] = at
        ledger_s[at] += work_s[at]
    return assignment


@dataclass(frozen=True, slots=True, eq=False)
class _State:
    assignment: list[int]
    good: tuple[frozenset[int], ...]
    """By backend."""
    is_good: list[bool]
    value: float


class _Trace:
    """The instance, and what does not change between evaluations."""

    def __init__(
        self, requests: Sequence[BoundRequest], backends: Sequence[BoundBackend], worth: float | None, dice: StepDice,
        counted_from_s: float,
    ) -> None:
        self._requests, self._backends, self._dice = requests, backends, dice
        self._counted = [number for number, request in enumerate(requests) if request.arrival_s >= counted_from_s]
        cold = [BoundRequest(r.arrival_s, r.prompt_tokens, r.prompt_tokens, r.output_tokens, r.ttft_budget_s,
                             r.tpot_budget_s, r.class_name) for r in requests]
        self._costs = [[accounted_cost(backend, request) for backend in backends] + [0.0] for request in cold]
        self._can = [[at for at, backend in enumerate(backends) if takes(backend, request)] for request in requests]
        cheapest = [min((row[at] for at in can), default=0.0)
                    for row, can in zip(self._costs, self._can, strict=True)]
        self._worth = worth if worth is not None else WORTH_RATIO * sum(cheapest) / max(1, len(cheapest))
        self._by_arrival = sorted(range(len(requests)), key=lambda number: requests[number].arrival_s)
        self._stretch_of = [int(request.arrival_s / STRETCH_S) for request in requests]
        self._stretches: dict[int, list[int]] = {}
        for number in self._by_arrival:
            self._stretches.setdefault(self._stretch_of[number], []).append(number)

    def evaluate(self, assignment: list[int], before: _State | None, touched: Sequence[int]) -> _State:
        good = list(before.good) if before else [frozenset[int]()] * len(self._backends)
        for at in touched:
            mine = [(number, self._requests[number]) for number in self._by_arrival if assignment[number] == at]
            good[at] = frozenset(replay(self._backends[at], mine, self._dice))
        is_good = [False] * len(assignment)
        for numbers in good:
            for number in numbers:
                is_good[number] = True
        cost = sum(self._costs[number][at] for number, at in enumerate(assignment))
        return _State(assignment, tuple(good), is_good, self._worth * sum(is_good) - cost)

    def propose(self, state: _State, rng: Random) -> dict[int, int]:
        """One change in about every second stretch: request number → backend."""
        changes = {}
        for numbers in self._stretches.values():
            if rng.random() < 0.5 and (change := self._change(state, numbers, rng)):
                changes[change[0]] = change[1]
        if not changes:
            change = self._change(state, self._by_arrival, rng)
            changes = dict([change]) if change else {}
        return changes

    def _change(self, state: _State, numbers: Sequence[int], rng: Random) -> tuple[int, int] | None:
        missing = [number for number in numbers if not state.is_good[number] and self._can[number]]
        if missing and rng.random() < 0.6:
            number = rng.choice(missing)
            at = state.assignment[number]
            if at != AWAY and rng.random() < 0.5:
                due_s = self._requests[number].arrival_s
                ahead = [other for other in numbers if state.assignment[other] == at and other != number
                         and due_s - CROWD_S <= self._requests[other].arrival_s <= due_s]
                number = rng.choice(ahead) if ahead else number
            return self._elsewhere(state, number, rng)
        drawn = [(number, rng.choice(self._can[number]))
                 for number in (rng.choice(numbers) for _ in range(DRAWN)) if self._can[number]]
        if not drawn:
            return None
        number, at = max(drawn, key=lambda move: self._saved(state, *move))
        if state.is_good[number] and self._saved(state, number, at) > 0:
            return number, at
        return self._elsewhere(state, number, rng)

    def _saved(self, state: _State, number: int, at: int) -> float:
        return self._costs[number][state.assignment[number]] - self._costs[number][at]

    def _elsewhere(self, state: _State, number: int, rng: Random) -> tuple[int, int] | None:
        here = state.assignment[number]
        others = [at for at in self._can[number] if at != here]
        if here != AWAY and not state.is_good[number]:
            others.append(AWAY)
        return (number, rng.choice(others)) if others else None

    def touched(self, state: _State, changes: dict[int, int]) -> list[int]:
        """Backends that have to be replayed."""
        both = {state.assignment[number] for number in changes} | set(changes.values())
        return sorted(both - {AWAY})

    def gain(self, before: _State, after: _State, number: int) -> float:
        """What the change of that request brought to its stretch and the next, where its own tokens fall."""
        first = self._stretch_of[number]
        near = self._stretches.get(first, []) + self._stretches.get(first + 1, [])
        won = sum(after.is_good[other] - before.is_good[other] for other in near)
        return self._worth * won + self._saved(before, number, after.assignment[number])

    def point(self, state: _State, evaluations: int) -> HindsightPoint:
        good = sum(state.is_good[number] for number in self._counted)
        cost = sum(self._costs[number][state.assignment[number]] for number in self._counted)
        return HindsightPoint(tuple(state.assignment), good, cost, state.value, evaluations)


def _changed(assignment: Sequence[int], changes: dict[int, int]) -> list[int]:
    result = list(assignment)
    for number, at in changes.items():
        result[number] = at
    return result
