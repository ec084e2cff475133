"""From what a router can spare, by name, to how many replicas of a card may be lent, whichever they are.

A router names the backends that it can do without. The allocator takes any of the same pool and card, so a number is
safe only if *whichever* that many are away, no more capacity is missing than the router has agreed to. Those that are
away already are known; of the others the largest are assumed to go::

    count = largest n with  (n largest: away first, then by capacity)  ≤  capacity of all that are named

For replicas all alike that is the number of names.

`Steady` takes out what comes and goes between two looks: a surplus counts once it has lasted, a want once it has. It
stands before `Rules.surplus_hold_s` and the gap between lendable and spare (`allocator.lendable`), which together keep
loans from flapping over minutes.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from allocator.lender.publication import Published

ROUNDING = 1e-6


class Figures(NamedTuple):
    """Replicas of one pool and card: as in `allocator.model.inventory.Supply`."""

    lendable: int
    spare: int


def figures(backends: Sequence[Published]) -> Figures:
    """Of backends of one pool and card, those that are away among them."""
    return Figures(_whichever(backends, [one for one in backends if one.lendable]),
                   _whichever(backends, [one for one in backends if one.may_stay_away]))


def _whichever(backends: Sequence[Published], named: Sequence[Published]) -> int:
    agreed = sum(one.capacity_per_s or 0.0 for one in named) + ROUNDING
    count, missing = 0, 0.0
    for one in sorted(backends, key=lambda one: (one.stage == "serving", -(one.capacity_per_s or 0.0))):
        missing += one.capacity_per_s or 0.0
        if missing > agreed or count == len(named):
            break
        count += 1
    return count


class Steady:
    """Figures over the last `hold_s` seconds: the fewest that were lendable, the most that were spare."""

    def __init__(self, hold_s: float) -> None:
        self._hold_s = hold_s
        self._seen: deque[tuple[float, Figures]] = deque()

    def after(self, found: Figures, now: float) -> Figures:
        """What counts, with what was found now."""
        self._seen.append((now, found))
        while self._seen[0][0] < now - self._hold_s:
            self._seen.popleft()
        return Figures(min(each.lendable for _, each in self._seen), max(each.spare for _, each in self._seen))
