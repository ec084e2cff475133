"""The clairvoyant linear programme, whose duals are the prices that `certificate` turns into a bound.

For requests `i`, or groups of `N_i` alike, backends `j` and slots `t`::

    share_ij  ≥ 0   requests of i in budget on j           Σ_j share_ij ≤ N_i
    early_ijt ≥ 0   whose prefill falls into slot t        Σ_t early_ijt = share_ij       t from arrival to TTFT budget
    later_ijt ≥ 0   whose decoding does                    Σ_t later_ijt = share_ij       t from first token to deadline
    Σ_i prefill_ij · early_ijt + decode_ij · later_ijt  ≤  capacity_jt                    its price: λ_jt

    least cost   min Σ cost_ij · share_ij   with  Σ share_ij ≥ G
    most good    max Σ share_ij

It is not solved in this form. Pieces of work with windows fit into slots exactly if, for every interval of slots, those
whose window lies within it need no more than it has (Hall's theorem for intervals; Horn 1974). So there are columns
for the shares alone, and of the many intervals only those are added, round by round, that the last solution overfills;
dual simplex goes on from there. Written out in full, the programme of 2,200 requests took HiGHS's interior point method
12 s where this takes one.

An interval's price is due from each piece whose window lies within. Laid on every slot of the interval they make
`λ_jt`: no piece then pays less, and the capacities are worth the same.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import highspy
import numpy as np
from scipy import sparse

from loadtest.sim.bound.instance import Floats
from loadtest.sim.bound.slots import SlotTable
from loadtest.sim.bound.work import Ints

_SOLVER: Any = highspy.Highs
"""Its constructor has no annotations."""

MAX_ROUNDS = 200
"""Each round's prices give a bound already; later ones improve it."""

OVERFULL_S = 1e-6
"""Seconds of work by which an interval must be overfilled to be worth a row."""

TIE_SHARE = 1e-4
"""Among ways to have as many in budget, those with less work are preferred this much: fewer intervals overfill."""


class SolverGaveUp(RuntimeError):
    """HiGHS found no usable prices; the message has its status."""


@dataclass(frozen=True, slots=True, eq=False)
class LpSolution:
    """What the solver says. Approximate; no claim rests on it."""

    value: float
    """Least cost, or most requests in budget."""
    prices: Floats
    """`λ`, shape (backends, slots): by how much `value` improves for one more second of work there."""


class _Interval(NamedTuple):
    backend: int
    first: int
    last: int


def solve_least_cost(slots: SlotTable, good_requests: float) -> LpSolution:
    """Prices for the cost of `good_requests` in budget.

    Raises:
        SolverGaveUp: among others where so many cannot be in budget.
    """
    programme = _Programme(slots)
    cost = slots.work.cost[programme.request, programme.backend]
    scale = float(cost.mean()) if cost.any() else 1.0
    value, prices = programme.solve(cost / scale, good_requests)
    return LpSolution(value * scale, prices * scale)


def solve_most_good(slots: SlotTable) -> LpSolution:
    """Prices for the number of requests in budget.

    Raises:
        SolverGaveUp: the solver failed; the programme itself always has a solution.
    """
    programme = _Programme(slots)
    work = programme.early_s + programme.later_s
    mean_s = float(work.mean()) if work.any() else 1.0
    value, prices = programme.solve(TIE_SHARE * np.minimum(work / mean_s, 10.0) - 1.0, None)
    return LpSolution(-value, prices)


class _Programme:
    """A column for each share that can be more than 0; rows as intervals turn out to be overfull."""

    def __init__(self, slots: SlotTable) -> None:
        work = slots.work
        i, j = self.request, self.backend = np.nonzero(work.can_serve)
        self.early_s, self.later_s = work.prefill_s[i, j], work.decode_s[i, j]
        self._counts = work.count.astype(np.float64)
        self._capacity_s = slots.capacity_s
        self._early = slots.prefill_from[i], slots.prefill_until[i]
        self._later = slots.decode_from[i, j], slots.decode_until[i]

    def solve(self, objective: Floats, good_requests: float | None) -> tuple[float, Floats]:
        """Least value of objective·share, and prices."""
        solver = self._start(objective, good_requests)
        intervals: list[_Interval] = []
        for _ in range(MAX_ROUNDS):
            solver.run()
            status = solver.getModelStatus()
            if status != highspy.HighsModelStatus.kOptimal:
                raise SolverGaveUp(f"HiGHS has no prices for this trace: {solver.modelStatusToString(status)}. "
                                   f"Are so many in budget possible at all?")
            solution = solver.getSolution()
            overfull = self._overfull(np.asarray(solution.col_value))
            if not overfull:
                break
            self._add(solver, overfull)
            intervals += overfull
        duals = np.asarray(solver.getSolution().row_dual)[-len(intervals):] if intervals else ()
        prices = np.zeros_like(self._capacity_s)
        for interval, dual in zip(intervals, duals, strict=False):
            prices[interval.backend, interval.first:interval.last + 1] += max(0.0, -float(dual))
        return float(solver.getInfo().objective_function_value), prices

    def _start(self, objective: Floats, good_requests: float | None) -> Any:
        """The programme without capacities, in a silent solver."""
        columns, rows = len(objective), len(self._counts)
        matrix = sparse.csc_matrix((np.ones(columns), (self.request, np.arange(columns))), (rows, columns))
        lower, upper = np.full(rows, -highspy.kHighsInf), self._counts
        if good_requests is not None:
            matrix = sparse.vstack([matrix, np.ones((1, columns))], format="csc")
            lower, upper = np.append(lower, good_requests), np.append(upper, highspy.kHighsInf)
        model: Any = highspy.HighsLp()
        model.num_row_, model.num_col_ = matrix.shape
        model.col_cost_, model.col_lower_ = objective, np.zeros(columns)
        model.col_upper_ = np.full(columns, highspy.kHighsInf)
        model.row_lower_, model.row_upper_ = lower, upper
        model.a_matrix_.format_ = highspy.MatrixFormat.kColwise
        model.a_matrix_.start_, model.a_matrix_.index_ = matrix.indptr, matrix.indices
        model.a_matrix_.value_ = matrix.data
        solver: Any = _SOLVER()
        for option, setting in (("output_flag", False), ("solver", "simplex"), ("threads", 1)):
            solver.setOptionValue(option, setting)
        solver.passModel(model)
        return solver

    def _overfull(self, share: Floats) -> list[_Interval]:
        """For each backend the most overfilled interval, the next one that does not touch it, and so on."""
        found = []
        slot_count = self._capacity_s.shape[1]
        used = share > 1e-12
        for at, capacity_s in enumerate(self._capacity_s):
            mine = used & (self.backend == at)
            needed_s = np.zeros((slot_count, slot_count))
            for (first, last), work_s in ((self._early, self.early_s), (self._later, self.later_s)):
                np.add.at(needed_s, (first[mine], last[mine]), (share * work_s)[mine])
            needed_s = np.cumsum(np.cumsum(needed_s[::-1], axis=0)[::-1], axis=1)
            until = np.concatenate(([0.0], np.cumsum(capacity_s)))
            over_s = np.triu(needed_s - (until[1:][None, :] - until[:-1][:, None]))
            while True:
                first_slot, last_slot = divmod(int(over_s.argmax()), slot_count)
                if over_s[first_slot, last_slot] <= OVERFULL_S:
                    break
                found.append(_Interval(at, first_slot, last_slot))
                over_s[:last_slot + 1, first_slot:] = 0.0
        return found

    def _add(self, solver: Any, intervals: list[_Interval]) -> None:
        for interval in intervals:
            work_s = self._within(*self._early, interval) * self.early_s + (
                self._within(*self._later, interval) * self.later_s)
            work_s *= self.backend == interval.backend
            columns = np.nonzero(work_s)[0].astype(np.int32)
            capacity_s = float(self._capacity_s[interval.backend, interval.first:interval.last + 1].sum())
            solver.addRow(-highspy.kHighsInf, capacity_s, len(columns), columns, work_s[columns])

    @staticmethod
    def _within(first: Ints, last: Ints, interval: _Interval) -> Any:
        return (first >= interval.first) & (last <= interval.last)
