"""What one pass over a pool works on: free devices, books, reservations and outlook, as they are after each placement.

Made from the picture at the start of a pass, changed by it, dropped at its end. Nothing outlives the pass but events.
"""

from bisect import insort
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from types import MappingProxyType
from typing import NamedTuple

from allocator.estimate import expected_end_s
from allocator.model.inventory import Node
from allocator.model.jobs import JobState
from allocator.model.pools import Pool
from allocator.model.world import World
from allocator.picture import Free, Ledger, Picture, ledger_of, picture_of
from allocator.placement.topology import without
from allocator.reasons import Pending, Reason, Why


@dataclass(frozen=True, slots=True)
class Reservation:
    """The devices with which a waiting gang is expected to start. Whoever is still there at that time is in its way."""

    job: str
    card: str
    at_s: float
    until_s: float
    devices: frozenset[str]


class Verdict(NamedTuple):
    """Why a job waits. `facts` are the figures of the sentence."""

    job: str
    code: Pending
    facts: Mapping[str, object] = MappingProxyType({})


@dataclass(slots=True)
class Bench:
    world: World
    now_s: float
    pool: Pool
    picture: Picture
    ledger: Ledger
    free: dict[str, Free]
    """Card → free devices of the pool's own; `lent`: those of loans. What is taken makes a new one."""
    lent: dict[str, Free]
    ends: dict[str, list[tuple[float, tuple[str, ...]]]]
    """Card → (expected end, devices) of what runs, soonest first."""
    devices: dict[str, int]
    """Card → healthy devices at the pool's disposal."""
    epoch: int
    reservations: dict[str, list[Reservation]] = field(default_factory=dict)
    ahead_s: dict[str, float] = field(default_factory=dict)
    """Card → device-seconds that wait before whoever comes next."""
    verdicts: dict[str, Verdict] = field(default_factory=dict)

    @property
    def nodes(self) -> Mapping[str, Node]:
        return self.world.nodes

    def take(self, card: str, devices: tuple[str, ...], until_s: float | None) -> None:
        """These devices are somebody's from now on, until a time where that is known."""
        self.free[card] = without(self.free.get(card, {}), devices)
        self.lent[card] = without(self.lent.get(card, {}), devices)
        if until_s is not None:
            insort(self.ends.setdefault(card, []), (until_s, devices))

    def earliest_s(self, card: str, devices: int) -> float:
        """When so many devices of the card are expected to be free, by count, behind those that wait already."""
        total = self.devices.get(card, 0)
        if devices > total:
            return inf
        count = sum(map(len, self.free.get(card, {}).values())) + sum(map(len, self.lent.get(card, {}).values()))
        at_s = self.now_s
        for end_s, gone in self.ends.get(card, ()):
            if count >= devices:
                break
            count += len(gone)
            at_s = end_s
        return (at_s if count >= devices else inf) + self.ahead_s.get(card, 0.0) / total

    def wait(self, state: JobState, code: Pending, **facts: object) -> None:
        self.verdicts[state.job.id] = Verdict(state.job.id, code, facts)

    def why(self, reason: Reason, detail: str = "") -> Why:
        return why(self.world, reason, detail)


def why(world: World, reason: Reason, detail: str = "") -> Why:
    """A reason with the versions that this world decides by."""
    return Why(reason, world.config.version, world.labels, world.active, detail)


def ledger_at(world: World, pool: Pool, now_s: float) -> Ledger:
    """The books of a pool as a pass finds them.

    Runs that leave for a claim no longer count against their queue, and the claim counts against its own: so a second
    pass finds the shares that the first one left.
    """
    ledger = ledger_of(world, pool, now_s)
    for run in world.runs.values():
        if run.stop_reason in _FOR_A_CLAIM and run.pool == pool.name:
            ledger.use(run.queue, run.card, run.family, -len(run.devices), world.tables.get(run.coefficients))
    for claim in world.claims.values():
        if claim.pool == pool.name:
            job = world.jobs[claim.job].job
            ledger.use(job.queue, claim.card, job.family, len(claim.devices))
    return ledger


_FOR_A_CLAIM = frozenset({Reason.RECLAIMED, Reason.PRIORITY})


def bench_of(world: World, pool: Pool, now_s: float) -> Bench:
    """The bench of a pool at the start of a pass."""
    picture = picture_of(world, now_s)
    ends: dict[str, list[tuple[float, tuple[str, ...]]]] = {}
    claimed, conditions, loaned = world.claimed, world.conditions, world.loaned
    for run in world.runs.values():
        if run.pool != pool.name:
            continue
        devices = run.devices
        if claimed or conditions:
            devices = tuple(device for device in devices if device not in claimed and device not in conditions)
        if loaned and not loaned.keys().isdisjoint(devices):
            devices = tuple(device for device in devices if _stays(world, device, now_s))
        if devices:
            ends.setdefault(run.card, []).append((expected_end_s(run, now_s), devices))
    for found in ends.values():
        found.sort()
    cards = picture.cards(pool.name)
    return Bench(
        world=world, now_s=now_s, pool=pool, picture=picture, ledger=ledger_at(world, pool, now_s),
        free={card: picture.free.get((pool.name, card), {}) for card in cards},
        lent={card: picture.lent_free.get((pool.name, card), {}) for card in cards},
        ends=ends, devices={card: picture.capacity(pool.name, card) for card in cards}, epoch=world.epoch)


def _stays(world: World, device: str, now_s: float) -> bool:
    """Whether a device can be counted on once its run is gone: an own one, or lent and not on its way home."""
    loan = world.loans.get(world.loaned.get(device, ""))
    return loan is None or (loan.recall_deadline_s is None and loan.promised_until_s > now_s)


def memory_fits(nodes: Mapping[str, Node], free: Free, memory_gb: float) -> Free:
    """Only nodes whose devices have the memory: it is never oversubscribed."""
    if all(nodes[name].memory_gb >= memory_gb for name in free):
        return free
    return {name: devices for name, devices in free.items() if nodes[name].memory_gb >= memory_gb}


