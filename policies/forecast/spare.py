"""Which backends of a model can be done without: for as long as a loan lasts, or until they could be back.

Over a window of the forecast, with capacities within the P99 budget (`forecast.capacity`)::

    surplus = Σ capacity of all that serve or are away on loan - max q99 demand in the window - headroom

Backends are spared one after the other as long as their capacities fit into the surplus: first those that are away
already, so that the answer does not hop from one to the next, then the dearest for what it serves.

    lendable        over the whole horizon of a loan
    may stay away   over the time in which it could be back; all that is lendable, and more

The last backend at home is never spared. On backends all alike this is `ceil(demand / capacity)` replicas and the
headroom at home, the rest lendable.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

from policies.forecast.forecaster import Step, largest_until

ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Standing:
    """One backend of a model."""

    name: str
    capacity_per_s: float | None
    """`None` where unknown: such a backend carries nothing here, and is not lent."""
    is_away: bool
    """Lent, or on its way there or back: it carries again once it is recalled."""
    serves: bool
    """In service now."""
    price_per_hour: float
    return_s: float
    """How long it takes to be back."""

    @property
    def carries_per_s(self) -> float:
        return self.capacity_per_s or 0.0 if self.serves or self.is_away else 0.0


@dataclass(frozen=True, slots=True)
class Spare:
    """What can be done without, by name."""

    lendable: frozenset[str] = frozenset()
    may_stay_away: frozenset[str] = frozenset()
    capacity_per_s: float = 0.0
    """Of all that serve or are away."""
    demand_per_s: float | None = None
    """The most that is forecast over the horizon of a loan; `None` where nothing is."""
    surplus_per_s: float | None = None
    """Over that horizon, with everybody at home."""


def spare(backends: Sequence[Standing], steps: Sequence[Step], *, loan_horizon_s: float, grace_s: float,
          headroom_replicas: float) -> Spare:
    """Who can be done without. `headroom_replicas`: of the largest backend, kept beyond the demand.

    Without a forecast nobody is lendable, and who is away may stay: unknown is neither plenty nor want.
    """
    total = sum(backend.carries_per_s for backend in backends)
    away = frozenset(backend.name for backend in backends if backend.is_away)
    lead_s = grace_s + max((backend.return_s for backend in backends), default=0.0)
    over_loan, over_lead = largest_until(steps, max(loan_horizon_s, lead_s)), largest_until(steps, lead_s)
    if over_loan is None or over_lead is None:
        return Spare(may_stay_away=away, capacity_per_s=total)
    reserve = headroom_replicas * max((backend.carries_per_s for backend in backends), default=0.0)
    ordered = _in_order(backends)
    lendable = _fitting(ordered, total - over_loan - reserve, frozenset())
    may_stay_away = _fitting(ordered, total - over_lead - reserve, lendable)
    return Spare(lendable, may_stay_away, total, over_loan, total - over_loan - reserve)


def _in_order(backends: Iterable[Standing]) -> list[Standing]:
    def dearness(backend: Standing) -> float:
        return backend.price_per_hour / backend.carries_per_s if backend.carries_per_s > 0.0 else inf

    known = (backend for backend in backends if backend.capacity_per_s is not None)
    return sorted(known, key=lambda one: (not one.is_away, -dearness(one), one.name))


def _fitting(ordered: Sequence[Standing], surplus: float, first: frozenset[str]) -> frozenset[str]:
    """Those whose capacities together fit into the surplus; `first` are taken before the others."""
    chosen: set[str] = set()
    left = surplus + ROUNDING * max(1.0, abs(surplus))
    for backend in (*(one for one in ordered if one.name in first), *(one for one in ordered if one.name not in first)):
        others_serve = any(one.serves and not one.is_away and one.name not in chosen and one.name != backend.name
                           for one in ordered)
        if backend.carries_per_s <= left and (backend.is_away or (backend.serves and others_serve)):
            chosen.add(backend.name)
            left -= backend.carries_per_s
    return frozenset(chosen)
