"""Every Prometheus name of the allocator. `docs/allocator-service.md` has a heading for each.

Levels are read off the world when a scrape asks; durations come from the moves that the journal has just taken; areas
(unit-seconds, device-seconds, money) are summed once a round: a ratio of two of their rates is a mean over time.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from allocator.loan.states import LoanState
from allocator.model.pools import PoolKind
from allocator.model.world import World
from allocator.picture import picture_of
from allocator.store.history import JobPhase, Move, What, phase_of

WAITS_S = (1, 5, 15, 60, 300, 900, 3600, 4 * 3600, 12 * 3600, 24 * 3600, 72 * 3600, 7 * 24 * 3600)
RECALLS_S = (0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800)
LARGE_GANG = 16
"""Devices from which on a gang is told apart: these are the ones that starve."""


@dataclass(slots=True)
class Area:
    """Sums over time of one pool and card."""

    used_unit_s: float = 0.0
    capacity_unit_s: float = 0.0
    busy_device_s: float = 0.0
    device_s: float = 0.0
    cost: float = 0.0


@dataclass(slots=True)
class AllocatorMetrics:
    """One registry for one process."""

    world: Callable[[], tuple[World, float] | None]
    """The world and its time, while this allocator leads."""
    reloads: Callable[[], Mapping[str, int]]
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    areas: dict[tuple[str, str], Area] = field(default_factory=dict)
    _summed_s: float | None = None

    wait: Histogram = field(init=False)
    completion: Histogram = field(init=False)
    recall: Histogram = field(init=False)
    overdue: Counter = field(init=False)
    lost: Counter = field(init=False)
    unsaved: Counter = field(init=False)
    moves: Counter = field(init=False)
    _sums: dict[str, list[float]] = field(default_factory=lambda: {"wait": [0, 0], "jct": [0, 0]})

    def __post_init__(self) -> None:
        prefix, registry = "headrace_allocator_", self.registry
        self.wait = Histogram(f"{prefix}queue_wait_seconds", "From submission or stop to the start of a run.",
                              ("queue", "gang"), registry=registry, buckets=WAITS_S)
        self.completion = Histogram(f"{prefix}job_completion_seconds", "From submission to completion.", ("queue",),
                                    registry=registry, buckets=WAITS_S)
        self.recall = Histogram(f"{prefix}recall_seconds", "From a recall until the lender has its devices back.",
                                ("lender",), registry=registry, buckets=RECALLS_S)
        self.overdue = Counter(f"{prefix}overdue", "Loans that were not back by their deadline.", ("lender",),
                               registry=registry)
        self.lost = Counter(f"{prefix}lost_unit_seconds", "Work of stopped runs that no checkpoint held.",
                            ("queue", "reason"), registry=registry)
        self.unsaved = Counter(f"{prefix}unsaved", "Runs that were told to save and ended without.", ("queue",),
                               registry=registry)
        self.moves = Counter(f"{prefix}moves", "Changes of state of jobs and loans.", ("what", "became"),
                             registry=registry)
        registry.register(_Levels(self))

    def watch(self, move: Move) -> None:
        """One move that the journal has taken."""
        self.moves.labels(move.what.value, str(move.became)).inc()
        figures = move.figures
        if move.what is What.LOAN:
            if "recall_s" in figures and move.became == LoanState.RETURNED:
                self.recall.labels(figures["lender"]).observe(figures["recall_s"])
            if move.became == LoanState.OVERDUE:
                self.overdue.labels(figures["lender"]).inc()
            return
        if "wait_s" in figures:
            size = "large" if figures["gang"] >= LARGE_GANG else "small"
            self.wait.labels(figures["queue"], size).observe(figures["wait_s"])
            self._add("wait", figures["wait_s"])
        if figures.get("lost_unit_s", 0.0) > 0.0:
            self.lost.labels(figures["queue"], move.reason).inc(figures["lost_unit_s"])
        if figures.get("saved") is False:
            self.unsaved.labels(figures["queue"]).inc()
        if move.became == JobPhase.COMPLETED and "jct_s" in figures:
            self.completion.labels(figures.get("queue", "")).observe(figures["jct_s"])
            self._add("jct", figures["jct_s"])

    def _add(self, name: str, value: float) -> None:
        self._sums[name][0] += value
        self._sums[name][1] += 1

    def sum_up(self, world: World, now_s: float, price_per_hour: Mapping[str, float]) -> None:
        """Adds what was used since the last call, as it stands now. A step over a restart counts nothing."""
        passed_s = 0.0 if self._summed_s is None else max(0.0, now_s - self._summed_s)
        self._summed_s = now_s
        for key, (used_units, capacity_units, busy, devices) in levels(world, now_s).items():
            area = self.areas.setdefault(key, Area())
            area.used_unit_s += used_units * passed_s
            area.capacity_unit_s += capacity_units * passed_s
            area.busy_device_s += busy * passed_s
            area.device_s += devices * passed_s
            area.cost += devices * passed_s / 3600.0 * price_per_hour.get(key[1], 0.0)

    def figures(self) -> dict[str, Any]:
        """The four metrics since this process began, over all pools that run jobs; null where nothing is known."""
        used = sum(area.used_unit_s for area in self.areas.values())
        capacity = sum(area.capacity_unit_s for area in self.areas.values())
        busy = sum(area.busy_device_s for area in self.areas.values())
        devices = sum(area.device_s for area in self.areas.values())
        cost = sum(area.cost for area in self.areas.values())
        wait_s, waits = self._sums["wait"]
        jct_s, jobs = self._sums["jct"]
        return {"utilisation": used / capacity if capacity else None, "busy": busy / devices if devices else None,
                "queue_wait_mean_s": wait_s / waits if waits else None, "jct_mean_s": jct_s / jobs if jobs else None,
                "cost_per_unit_h": cost / used * 3600.0 if used and cost else None}


def levels(world: World, now_s: float) -> dict[tuple[str, str], tuple[float, float, int, int]]:
    """(pool, card) → units in use, units at its disposal, devices busy, devices at its disposal. Inference left out."""
    picture = picture_of(world, now_s)
    table = world.coefficients
    found = {}
    for pool in world.config.pools:
        if pool.kind is PoolKind.INFERENCE:
            continue
        for card in picture.cards(pool.name):
            runs = [run for run in world.runs.values() if (run.pool, run.card) == (pool.name, card)]
            units = sum(len(run.devices) * world.tables.get(run.coefficients, table).coefficient(card, run.family)
                        for run in runs)
            devices = picture.capacity(pool.name, card)
            found[pool.name, card] = (units, devices * table.scalar(card), sum(len(run.devices) for run in runs),
                                      devices)
    return found


class _Levels(Collector):
    """Reads the world at scrape time; an allocator that does not lead has no levels to show."""

    def __init__(self, metrics: AllocatorMetrics) -> None:
        self._metrics = metrics

    def describe(self) -> Iterable[Metric]:
        return self._families().values()

    def collect(self) -> Iterable[Metric]:
        families = self._families()
        for result, count in self._metrics.reloads().items():
            families["config_reloads"].add_metric([result], count)
        found = self._metrics.world()
        families["leading"].add_metric([], float(found is not None))
        for (pool, card), area in self._metrics.areas.items():
            for name in ("used_unit", "capacity_unit", "busy_device", "device"):
                families[f"{name}_seconds"].add_metric([pool, card], getattr(area, f"{name}_s"))
            families["cost"].add_metric([pool, card], area.cost)
        if found is not None:
            self._of_world(families, *found)
        return families.values()

    @staticmethod
    def _of_world(families: Mapping[str, Any], world: World, now_s: float) -> None:
        picture = picture_of(world, now_s)
        for pool in world.config.pools:
            for card in picture.cards(pool.name):
                key = (pool.name, card)
                used = sum(len(run.devices) for run in world.runs.values() if (run.pool, run.card) == key)
                for state, count in (
                    ("inventory", picture.inventory.get(key, 0)), ("healthy", picture.healthy.get(key, 0)),
                    ("free", sum(map(len, picture.free.get(key, {}).values()))), ("used", used),
                    ("lent", picture.lent_out.get(key, 0)), ("borrowed", picture.borrowed_in.get(key, 0)),
                ):
                    families["devices"].add_metric([pool.name, card, state], count)
        for (name, card), supply in world.supplies.items():
            families["replicas"].add_metric([name, card, "lendable"], supply.lendable)
            families["replicas"].add_metric([name, card, "spare"], supply.spare)
        for pool in world.config.pools:
            if pool.kind is PoolKind.INFERENCE:
                for state in LoanState:
                    if state not in (LoanState.RETURNED, LoanState.WITHDRAWN):
                        families["loans"].add_metric([pool.name, state.value], sum(
                            (loan.lender, loan.state) == (pool.name, state) for loan in world.loans.values()))
        for queue in world.config.queues:
            for phase in (JobPhase.WAITING, JobPhase.STARTING, JobPhase.RUNNING, JobPhase.STOPPING):
                families["jobs"].add_metric([queue.name, phase.value], sum(
                    state.job.queue == queue.name and phase_of(world, state) is phase
                    for state in world.jobs.values()))
            waits = [now_s - state.waiting_since_s for state in world.jobs.values()
                     if state.job.queue == queue.name and state.run is None]
            families["longest_wait_seconds"].add_metric([queue.name], max(waits, default=0.0))

    @staticmethod
    def _families() -> dict[str, Any]:
        prefix = "headrace_allocator_"

        def gauge(name: str, text: str, *labels: str) -> tuple[str, Any]:
            return name, GaugeMetricFamily(prefix + name, text, labels=labels)

        def counter(name: str, text: str, *labels: str) -> tuple[str, Any]:
            return name, CounterMetricFamily(prefix + name, text, labels=labels)

        return dict((
            gauge("leading", "1 where this allocator leads."),
            gauge("devices", "Devices by what they are.", "pool", "card", "state"),
            gauge("replicas", "What a lender can do without.", "pool", "card", "figure"),
            gauge("loans", "Loans that are not over, by state.", "lender", "state"),
            gauge("jobs", "Jobs that are not over, by state.", "queue", "state"),
            gauge("longest_wait_seconds", "Of the job that has waited longest.", "queue"),
            counter("used_unit_seconds", "Normalised units in use, over time.", "pool", "card"),
            counter("capacity_unit_seconds", "Normalised units at the pool's disposal, over time.", "pool", "card"),
            counter("busy_device_seconds", "Devices held by runs, over time.", "pool", "card"),
            counter("device_seconds", "Devices at the pool's disposal, over time.", "pool", "card"),
            counter("cost", "Money for the devices at the pool's disposal.", "pool", "card"),
            counter("config_reloads", "Reload attempts by result.", "result"),
        ))
