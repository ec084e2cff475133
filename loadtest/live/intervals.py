"""How sure the numbers are: 95 % intervals and paired differences by a bootstrap over blocks. Pure.

All policies meet the same blocks. So blocks are drawn with replacement, the same ones for every policy of a draw
(Efron and Tibshirani, *An Introduction to the Bootstrap*, 1993, ch. 8 and 13), and figures are quotients of sums over
the drawn blocks. What a block has of hard arrivals, or the machine of bad moments, thereby falls out of the difference
between two policies. The interval is from the 2.5th to the 97.5th percentile of the draws.

With few blocks a bootstrap knows little of the tails and its intervals are too narrow: below `FEW_BLOCKS` they are to
be read as a hint. A single block gives none.
"""

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import NamedTuple

from loadtest.live.figures import Sums
from loadtest.measured import percentile

DRAWS = 2000
FEW_BLOCKS = 6


class Interval(NamedTuple):
    """From the 2.5th to the 97.5th percentile."""

    low: float
    high: float


class Compared(NamedTuple):
    """One policy with its intervals, and beside the first policy. `None`: not to be had from these blocks."""

    in_budget_ci: Interval | None
    cost_ci: Interval | None
    in_budget_minus_ours: float
    in_budget_minus_ours_ci: Interval | None
    cost_over_ours: float | None
    cost_over_ours_ci: Interval | None


def compare(blocks: Mapping[str, Sequence[Sums]], seed: int) -> dict[str, Compared]:
    """Every policy beside the first one of `blocks`, which is ours.

    Args:
        blocks: by policy, the sums of its blocks; the n-th of each is the same block.

    Raises ValueError where policies have not met equally many blocks.
    """
    names, count = list(blocks), len(next(iter(blocks.values())))
    if any(len(of_policy) != count for of_policy in blocks.values()):
        raise ValueError("every policy must have met the same blocks")
    ours, rng = names[0], Random(seed)
    draws = [[rng.randrange(count) for _ in range(count)] for _ in range(DRAWS)] if count > 1 else []
    drawn = {name: [_total([of_policy[at] for at in draw]) for draw in draws] for name, of_policy in blocks.items()}
    whole = {name: _total(of_policy) for name, of_policy in blocks.items()}

    def interval(figure: Callable[[Sums, Sums], float | None], name: str) -> Interval | None:
        values = [figure(own, first) for own, first in zip(drawn[name], drawn[ours], strict=True)]
        known = [value for value in values if value is not None]
        low, high = percentile(known, 0.025), percentile(known, 0.975)
        # A draw without the figure is a draw that it could have any value in.
        return None if low is None or high is None or len(known) < len(values) else Interval(low, high)

    return {name: Compared(
        interval(lambda own, _: own.share_in_budget, name),
        interval(lambda own, _: own.cost_per_1k_in_budget, name),
        _difference(whole[name], whole[ours]), interval(_difference, name),
        _ratio(whole[name], whole[ours]), interval(_ratio, name),
    ) for name in names}


def _total(drawn: Sequence[Sums]) -> Sums:
    return Sums(sum(each.requests for each in drawn), sum(each.in_budget for each in drawn),
                sum(each.cost for each in drawn))


def _difference(own: Sums, first: Sums) -> float:
    return own.share_in_budget - first.share_in_budget


def _ratio(own: Sums, first: Sums) -> float | None:
    above, below = own.cost_per_1k_in_budget, first.cost_per_1k_in_budget
    return above / below if above is not None and below else None
