"""The least work that a recall can put at stake: exact, to hold the greedy choice against.

Loans lie under runs, runs over loans. Whoever wants `need` loans back stops a set of runs; a loan is back when every
run on it is stopped. Parts that share no run are independent: in each, every set of runs is tried, which gives the
cheapest way to so many loans; the parts are then put together like a knapsack.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from math import inf

MOST_RUNS = 14
"""In one part; 16,384 sets are tried at most."""


def least_loss(need: int, loans: Sequence[str], weights: Mapping[str, float],
               lies_on: Mapping[str, Iterable[str]]) -> float | None:
    """The least sum of weights; `None` where a part is too large to be sure.

    `weights`: by run, what stopping it loses. `lies_on`: by run, the loans.
    """
    under: dict[str, frozenset[str]] = {loan: frozenset(run for run, on in lies_on.items() if loan in set(on))
                                        for loan in loans}
    best = [0.0] + [inf] * need
    for part in _parts(under):
        runs = sorted(frozenset().union(*(under[loan] for loan in part)))
        if len(runs) > MOST_RUNS:
            return None
        options = _options([under[loan] for loan in part], runs, weights)
        best = [min(best[max(0, count - freed)] + loss for freed, loss in options.items())
                for count in range(need + 1)]
    return best[need]


def _options(under: Sequence[frozenset[str]], runs: Sequence[str], weights: Mapping[str, float]) -> dict[int, float]:
    """Loans freed → the least loss that frees so many."""
    options: dict[int, float] = {}
    for size in range(len(runs) + 1):
        for stopped in combinations(runs, size):
            gone = frozenset(stopped)
            freed = sum(each <= gone for each in under)
            loss = sum(weights[run] for run in stopped)
            options[freed] = min(options.get(freed, inf), loss)
    return options


def _parts(under: Mapping[str, frozenset[str]]) -> list[list[str]]:
    parts: list[tuple[set[str], list[str]]] = []
    for loan, runs in under.items():
        joined_runs, joined = set(runs), [loan]
        apart = []
        for other_runs, others in parts:
            if joined_runs.isdisjoint(other_runs):
                apart.append((other_runs, others))
            else:
                joined_runs |= other_runs
                joined += others
        parts = [*apart, (joined_runs, joined)]
    return [loans for _, loans in parts]
