"""The router's side, a minute at a time: what was asked for, what came late, and what may be lent."""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Protocol

from allocator.events import Event, SupplyReported
from allocator.lendable import Demand, supply_of
from allocator.model.inventory import BackendState, Supply
from allocator.model.world import World
from loadtest.sim.lending.cluster import INFERENCE, RELOAD_S, SERVING_NODES, replicas
from loadtest.sim.lending.serving import capacity_per_s, miss_share, pool_capacity_per_s, share_of_pool_needed
from loadtest.sim.training.machines import Machines
from policies.forecast.forecaster import Step

HEADROOM = {"a100": 1}
"""Replicas that are kept beyond the forecast's need."""
REPEAT_S = 300.0
"""A report that says nothing new is repeated this often."""


class Foresight(Protocol):
    """What `policies.forecast.forecaster.Forecaster` does for lending."""

    def learn(self, per_s: float) -> None:
        """The minute that has just passed."""
        ...

    def steps(self, quantile: Callable[[float], float]) -> Sequence[Step]:
        """What will be asked for from now on, each step at the quantile for its time; empty: nothing is known."""
        ...


class Lending(Protocol):
    """How much of the pool may be lent, by what was seen."""

    def learn(self, per_s: float) -> None:
        """The minute that has just passed."""
        ...

    def supply(self, card: str, healthy: int) -> Supply | None:
        """What may be lent of a card now; `None` where nothing is known."""
        ...


@dataclass(slots=True)
class ByForecast:
    """Ours: as far as the forecast leaves replicas over, with one A100 besides for what may break.

    For as long as a recall takes, the 0.99 quantile: nothing else stands between a surge and the budget. For the rest
    of a loan's promised time a lower one will do, since a broken promise costs a restart and no request.
    """

    forecaster: Foresight
    promised_s: float
    recall_lead_s: float
    promise_quantile: float = 0.5
    _shares: list[tuple[float, float]] = field(default_factory=list)

    def learn(self, per_s: float) -> None:
        self.forecaster.learn(per_s)
        self._shares = [(step.in_s, share_of_pool_needed(step.per_s)) for step in self.forecaster.steps(self._quantile)]

    def _quantile(self, in_s: float) -> float:
        return 0.99 if in_s <= self.recall_lead_s + max(RELOAD_S.values()) else self.promise_quantile

    def supply(self, card: str, healthy: int) -> Supply | None:
        each_per_s = capacity_per_s(card)
        # All cards carry the same load, so each is needed to the same share; as demand on this card alone.
        steps = [Demand(in_s, share * replicas(card) * each_per_s) for in_s, share in self._shares]
        return supply_of(INFERENCE, card, healthy, steps, each_per_s, HEADROOM.get(card, 0),
                         loan_horizon_s=self.promised_s, recall_lead_s=self.recall_lead_s + RELOAD_S[card])


class Reactive:
    """As an autoscaler does it: as many replicas as the last minute needed at 80 % load, fewer only after five of calm.

    The figures of Kubernetes' HorizontalPodAutoscaler: its usual target, and its window before it scales down.
    """

    TARGET = 0.8
    CALM_MINUTES = 5

    def __init__(self) -> None:
        self._wanted: deque[float] = deque(maxlen=self.CALM_MINUTES)

    def learn(self, per_s: float) -> None:
        self._wanted.append(share_of_pool_needed(per_s / self.TARGET))

    def supply(self, card: str, healthy: int) -> Supply | None:
        if not self._wanted:
            return None
        lendable = healthy - ceil(max(self._wanted) * replicas(card))
        spare = healthy - ceil(self._wanted[-1] * replicas(card))
        return Supply(INFERENCE, card, max(0, min(healthy, lendable)), spare)


class Nothing:
    """Lends nothing."""

    def learn(self, per_s: float) -> None:
        pass

    def supply(self, card: str, healthy: int) -> Supply | None:
        return None


class Router:
    """Counts requests and misses, and reports to the allocator every minute."""

    def __init__(self, machines: Machines, minutes: Sequence[float], lending: Lending) -> None:
        self.machines = machines
        self.minutes = minutes
        self.lending = lending
        self.asked = 0.0
        self.missed = 0.0
        self.busy_replica_s: Counter[str] = Counter()
        self.serving_by_hour: list[tuple[float, float]] = []
        self.needed_by_hour: list[tuple[float, float]] = []
        self._serving = serving(machines.world)
        self._said: dict[str, tuple[int, int]] = {}
        self._said_s = 0.0
        self._minute = 0
        machines.at(60.0, self._each_minute)

    def _each_minute(self, now_s: float) -> Iterable[Event] | None:
        self.machines.at(now_s + 60.0, self._each_minute)
        per_s = self.minutes[self._minute % len(self.minutes)]
        here = serving(self.machines.world)
        if self._minute < len(self.minutes):
            # What drained within the minute did not carry all of it, what came back neither.
            self._count(per_s, {card: min(count, self._serving[card]) for card, count in here.items()}, now_s)
        self._serving = here
        self._minute += 1
        self.lending.learn(per_s)
        return self._reports(now_s) or None

    def _count(self, per_s: float, carrying: dict[str, int], now_s: float) -> None:
        capacity = pool_capacity_per_s(carrying)
        load = per_s / capacity if capacity > 0.0 else 2.0
        self.asked += 60.0 * per_s
        self.missed += 60.0 * per_s * miss_share(load, sum(carrying.values()))
        for card, count in carrying.items():
            self.busy_replica_s[card] += 60.0 * count * min(1.0, load)  # type: ignore[assignment]
        if self._minute % 60 == 0:
            whole = sum(self._serving.values())
            self.serving_by_hour.append((now_s / 3600.0, float(whole)))
            self.needed_by_hour.append((now_s / 3600.0, share_of_pool_needed(per_s) * sum(map(replicas, carrying))))

    def _reports(self, now_s: float) -> list[Event]:
        events: list[Event] = []
        again = now_s - self._said_s >= REPEAT_S
        counts = Counter(backend.card for backend in self.machines.world.backends.values())
        for card in SERVING_NODES:
            supply = self.lending.supply(card, counts[card])
            if supply is None:
                continue
            said = (supply.lendable, supply.spare)
            if again or self._said.get(card) != said:
                self._said[card] = said
                events.append(SupplyReported(at_s=now_s, supply=supply))
        if events:
            self._said_s = now_s
        return events


def serving(world: World) -> dict[str, int]:
    """Replicas that carry traffic, by card."""
    counts = Counter(backend.card for backend in world.backends.values() if backend.state is BackendState.SERVING)
    return {card: counts[card] for card in SERVING_NODES}
