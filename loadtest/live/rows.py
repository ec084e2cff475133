"""One row a policy, and whether the goal is met. Pure.

Columns that `headrace sim` has too have the same names and mean the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from loadtest.live.figures import Figures, Outcome, figures, sums
from loadtest.live.intervals import Compared, Interval, compare


@dataclass(frozen=True, slots=True)
class Row:
    """All counted blocks of one policy."""

    policy: str
    blocks: int
    figures: Figures
    compared: Compared

    def as_json(self) -> dict[str, object]:
        """For `--json`; numbers to six significant digits, `null` for what is not known."""
        document = {"policy": self.policy, "blocks": self.blocks, **asdict(self.figures), **self.compared._asdict()}
        return {name: _rounded(value) for name, value in document.items()}


def summarize(
    outcomes: Mapping[str, Sequence[Sequence[Outcome]]], backends: Sequence[str], classes: Sequence[str], seed: int
) -> tuple[Row, ...]:
    """Rows in the order of `outcomes`, which has each policy's blocks; the first policy is the one that others are held
    against. Raises `ValueError` where there is no block, or policies have not met the same ones.
    """
    compared = compare({policy: [sums(block) for block in blocks] for policy, blocks in outcomes.items()}, seed)
    return tuple(Row(policy, len(blocks), figures(blocks, backends, classes), compared[policy])
                 for policy, blocks in outcomes.items())


@dataclass(frozen=True, slots=True)
class Verdict:
    """The first policy beside the best of the others: the one with most requests in budget, then the cheapest."""

    best_other: str
    ahead: float
    """In-budget share, ours minus theirs."""
    ahead_ci: Interval | None
    cost_ratio: float | None
    """Cost per 1,000 requests in budget, ours over theirs."""
    cost_ratio_ci: Interval | None

    @property
    def met(self) -> bool | None:
        """The goal: at least their in-budget share at lower cost. `None` where the costs are not known."""
        return None if self.cost_ratio is None else self.ahead >= 0 and self.cost_ratio < 1

    def as_json(self) -> dict[str, object]:
        """For `--json`."""
        return {"met": self.met, **{name: _rounded(value) for name, value in asdict(self).items()}}


def judge(rows: Sequence[Row]) -> Verdict | None:
    """`None` where there is nobody to be held against."""
    if len(rows) < 2:
        return None

    def rank(row: Row) -> tuple[float, float]:
        cost = row.figures.cost_per_1k_in_budget
        return row.figures.in_budget, -cost if cost is not None else float("-inf")

    best = max(rows[1:], key=rank)
    theirs = best.compared
    apart, ratio = theirs.in_budget_minus_ours_ci, theirs.cost_over_ours_ci
    return Verdict(
        best.policy, 0.0 - theirs.in_budget_minus_ours, Interval(0.0 - apart.high, 0.0 - apart.low) if apart else None,
        1.0 / theirs.cost_over_ours if theirs.cost_over_ours else None,
        Interval(1.0 / ratio.high, 1.0 / ratio.low) if ratio and ratio.low > 0 else None)


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: _rounded(inner) for name, inner in value.items()}
    return [_rounded(inner) for inner in value] if isinstance(value, tuple) else value
