"""Taking back: a job within its queue's guarantee stops runs of those who borrow; a more urgent one, its own queue's.

Who may be stopped: a run of a queue that uses more than its guarantee (`Books.borrowed`, the one definition of a
surplus: P62), or a run of lower priority in the job's own queue; never one younger than `Rules.min_run_s`. Batch goes
first, then the queue with the largest share in units, then lower priority, then the least lost work. A gang that stands
partly on borrowed quota is borrowed as a whole, and queues that keep to their guarantee lose nothing (I9).

Victims are added until the gang can be *placed* on what they leave (fragments do not count, P63), then let off again in
reverse where it still can; where it never can, the same with the runs of one node at a time, and else nobody is
stopped. Whoever takes back stands within its
guarantee afterwards and whoever lost would be borrowing again, so it cannot take back in turn (I13).
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from allocator.estimate import duration_s, lost_unit_s
from allocator.events import ClaimMade, Event, StopOrdered
from allocator.model.inventory import node_name
from allocator.model.jobs import JobState, Kind, Run
from allocator.model.world import Claim
from allocator.picture import Free
from allocator.placement.topology import domain_of, grouped, joined, without
from allocator.queueing.bench import Bench, memory_fits
from allocator.queueing.fitting import (
    could_fit_in_time,
    keep_whole,
    may_borrow,
    only_backfills,
    place_near_data,
    promise_covers,
)
from allocator.queueing.passing import Waiting
from allocator.queueing.stopping import Candidate, Stopping
from allocator.quota import amount_of
from allocator.reasons import Reason


@dataclass(slots=True)
class _Search:
    """What one pass has found out about whom it may stop, by card: worked out once, for all who ask."""

    bench: Bench
    spoken_for: set[str] = field(default_factory=set)
    in_vain: set[tuple[object, ...]] = field(default_factory=set)
    _runs: dict[str, list[Run]] = field(default_factory=dict)
    _stoppable: dict[str, list[Candidate]] = field(default_factory=dict)
    _priorities: dict[tuple[str, str], list[int]] = field(default_factory=dict)

    def stoppable(self, card: str) -> list[Candidate]:
        """The runs on a card that may be stopped for somebody at all, in the order in which a queue gives them."""
        if card not in self._stoppable:
            self._stoppable[card] = sorted((_candidate(self.bench, run) for run in self.runs(card)), key=Candidate.rank)
        return self._stoppable[card]

    def runs(self, card: str) -> list[Run]:
        """The same, in no order."""
        if card not in self._runs:
            self._runs[card] = _stoppable(self.bench, card)
        return self._runs[card]

    def less_urgent(self, card: str, queue: str, priority: int) -> int:
        """How many runs of a queue may be stopped for a job of it."""
        if (card, queue) not in self._priorities:
            jobs = self.bench.world.jobs
            self._priorities[card, queue] = sorted(jobs[run.job].job.priority for run in self.runs(card)
                                                   if run.queue == queue)
        return bisect_left(self._priorities[card, queue], priority)


def reclaim(bench: Bench, blocked: list[Waiting]) -> list[Event]:
    """Stops and claims for those of the blocked jobs that have a right to devices which others use."""
    events: list[Event] = []
    search = _Search(bench)
    for waiting in blocked:
        if only_backfills(waiting.state):
            continue
        for card in waiting.cards:
            if not could_fit_in_time(bench, waiting.state, card):
                continue
            # Jobs that are alike fail alike: with hundreds waiting, that is most of the work saved.
            alike = _alike(search, waiting.state, card)
            if alike in search.in_vain:
                continue
            found = _take_back(search, waiting.state, card)
            if found is None:
                search.in_vain.add(alike)
                continue
            search.spoken_for |= {victim.run.id for victim in found.victims}
            events += _orders(bench, waiting.state, card, found)
            break
    return events


def _alike(search: _Search, state: JobState, card: str) -> tuple[object, ...]:
    """All of a job that decides whether it can take back so many devices of a card."""
    job, bench = state.job, search.bench
    has_reservation = any(found.job == job.id for found in bench.reservations.get(card, ()))
    # On lent devices it also matters how long the job takes, and whether it can save its work.
    on_loans = (duration_s(bench.world, state, card, job.gang_min), job.checkpoint, state.recalls
                ) if bench.lent.get(card) else ()
    amount = amount_of(bench.pool, bench.world.coefficients, card, job.family, job.gang_min)
    return (card, job.queue, amount, job.gang_min, search.less_urgent(card, job.queue, job.priority), job.memory_gb,
            job.widest, job.data_site, has_reservation, on_loans)


def _take_back(search: _Search, state: JobState, card: str) -> "_Found | None":
    job, bench = state.job, search.bench
    candidates = _candidates(search, state, card)
    if not candidates:
        return None
    free = _free(bench, state, card)
    if sum(map(len, free.values())) + sum(len(found.run.devices) for found in candidates) < job.gang_min:
        return None
    found = _attempt(bench, state, card, free, candidates)
    if found is None:
        # The cheapest victims leave fragments. Those of one node may not.
        attempts = [found for runs in _by_node(candidates, free, job.gang_min)
                    if (found := _attempt(bench, state, card, free, runs)) is not None]
        found = min(attempts, key=lambda found: sum(victim.lost for victim in found.victims), default=None)
    return found


def _by_node(candidates: list[Candidate], free: Free, devices: int) -> list[list[Candidate]]:
    """The candidates on each node that would hold so many devices if they were gone."""
    on: dict[str, dict[str, Candidate]] = {}
    room = {name: len(found) for name, found in free.items()}
    for candidate in candidates:
        for device in candidate.run.devices:
            name = node_name(device)
            on.setdefault(name, {})[candidate.run.id] = candidate
            room[name] = room.get(name, 0) + 1
    return [list(found.values()) for name, found in sorted(on.items()) if room[name] >= devices]


class _Room:
    """Free devices by the domains that a gang must keep within: where none has enough, nothing need be searched."""

    def __init__(self, bench: Bench, state: JobState, free: Free) -> None:
        self._bench, self._widest = bench, state.job.widest
        self._devices = state.job.gang_min
        self._counts: dict[tuple[str, ...], int] = {}
        self._domains: dict[str, tuple[str, ...]] = {}
        self._enough: set[tuple[str, ...]] = set()
        self.give(free)

    def give(self, free: Free) -> bool:
        """These as well. Whether a domain of them has enough now."""
        is_enough = False
        for name, devices in free.items():
            is_enough |= self._add(name, len(devices))
        return is_enough

    def take(self, free: Free) -> None:
        """These are no longer there."""
        for name, devices in free.items():
            self._add(name, -len(devices))

    @property
    def is_enough(self) -> bool:
        return bool(self._enough)

    def _add(self, name: str, devices: int) -> bool:
        domain = self._domains.get(name)
        if domain is None:
            domain = self._domains[name] = domain_of(self._bench.nodes[name], self._widest)
        count = self._counts[domain] = self._counts.get(domain, 0) + devices
        (self._enough.add if count >= self._devices else self._enough.discard)(domain)
        return count >= self._devices


class _Found(NamedTuple):
    """Whom to stop, where the gang then stands, and all that it could stand on."""

    victims: list[Candidate]
    devices: tuple[str, ...]
    room: Free


def _attempt(bench: Bench, state: JobState, card: str, free: Free, candidates: list[Candidate]) -> _Found | None:
    job = state.job
    stopping = Stopping(bench.ledger, card, job.queue, candidates)
    # What a gang before this one waits for is not to be had by stopping whoever is still there.
    reserved = {device for other in bench.reservations.get(card, ()) if other.job != job.id for device in other.devices}
    reserved_on = {node_name(device) for device in reserved}
    room, left = _Room(bench, state, free), dict[str, Free]()
    victims: list[Candidate] = []
    may_fit, gone = room.is_enough, list[str]()
    amount = amount_of(bench.pool, bench.world.coefficients, card, job.family, job.gang_min)
    for victim in stopping:
        victims.append(victim)
        leaves = memory_fits(bench.nodes, victim.leaves, job.memory_gb) if job.memory_gb > 0.0 else victim.leaves
        if not reserved_on.isdisjoint(leaves):
            leaves = without(leaves, reserved)
        left[victim.run.id] = leaves
        for freed in leaves.values():
            gone += freed
        may_fit |= room.give(leaves)
        # What could not be placed before can be only with what has just come free: a domain is tried when it fills.
        if may_fit and stopping.admits(amount):
            together = joined(free, grouped(gone))
            devices = place_near_data(bench, state, together, job.gang_min)
            if devices is not None:
                return _filled_back(bench, state, together, stopping, amount, victims, left, devices)
            may_fit = False
    return None


def _filled_back(bench: Bench, state: JobState, free: Free, stopping: Stopping, amount: float,
                 victims: list[Candidate], left: dict[str, Free], devices: tuple[str, ...]) -> _Found | None:
    """The victims without those that are not needed, the last chosen first, and the devices that the gang then gets."""
    needed, let_off = _needed(bench, state, free, victims, left, devices, lambda victim: True)
    # Whoever is let off leaves less of the quotas. What they admit at the end they have admitted all the time.
    if not stopping.admits_with(let_off, amount):
        def admits_back(victim: Candidate) -> bool:
            stopping.back(victim)
            return stopping.admits(amount)

        needed, let_off = _needed(bench, state, free, victims, left, devices, admits_back, stopping.stop)
    still = without(free, [device for victim in let_off for found in left[victim.run.id].values() for device in found])
    placed = place_near_data(bench, state, still, state.job.gang_min)
    return _Found(needed, placed, still) if placed is not None else None


def _needed(bench: Bench, state: JobState, free: Free, victims: list[Candidate], left: dict[str, Free],
            devices: tuple[str, ...], admits_back: Callable[[Candidate], bool],
            keep: Callable[[Candidate], None] = lambda victim: None) -> tuple[list[Candidate], list[Candidate]]:
    """Of the victims those that are needed, and those that are not.

    The gang fits on `devices`: as long as these are there it fits (`place` is monotone), and nothing need be searched.
    `admits_back`: whether the quotas let the gang in with this one running as well; `keep` hears of it if it is needed.
    """
    needed, let_off, gone = [victims[-1]], list[Candidate](), list[str]()
    room = _Room(bench, state, free)
    for victim in reversed(victims[:-1]):
        leaves = left[victim.run.id]
        mine = [device for found in leaves.values() for device in found]
        fits: tuple[str, ...] | None = None
        if admits_back(victim):
            room.take(leaves)
            fits = devices
            if not frozenset(devices).isdisjoint(mine):
                fits = (place_near_data(bench, state, without(free, (*gone, *mine)), state.job.gang_min)
                        if room.is_enough else None)
            if fits is None:
                room.give(leaves)
        if fits is None:
            needed.append(victim)
            keep(victim)
        else:
            let_off.append(victim)
            gone += mine
            devices = fits
    return needed[::-1], let_off


def _stoppable(bench: Bench, card: str) -> list[Run]:
    youngest_s = bench.now_s - bench.world.config.rules.min_run_s
    return [run for run in bench.world.runs.values()
            if run.card == card and run.pool == bench.pool.name and not run.stopping and not run.leaving
            and run.started_s <= youngest_s and run.started_s < bench.now_s]


def _candidate(bench: Bench, run: Run) -> Candidate:
    world, devices = bench.world, len(run.devices)
    # To be had are only healthy, own and unclaimed ones.
    leaves = grouped(device for device in run.devices if device not in world.conditions
                     and device not in world.loaned and device not in world.claimed)
    amount, units = bench.ledger.counted(run.card, run.family, devices, world.tables.get(run.coefficients))
    all_but_one, _ = bench.ledger.counted(run.card, run.family, devices - 1)
    return Candidate(run, run.kind is not Kind.BATCH, world.jobs[run.job].job.priority,
                     lost_unit_s(world, run, bench.now_s), amount, units, all_but_one, leaves)


def _candidates(search: _Search, state: JobState, card: str) -> list[Candidate]:
    """Those of the runs on a card that may be stopped for this job."""
    job, spoken_for = state.job, search.spoken_for
    guaranteed = not search.bench.ledger.borrows(job.queue, card, job.family, job.gang_min)
    if not guaranteed and not search.less_urgent(card, job.queue, job.priority):
        return []
    return [found for found in search.stoppable(card) if found.run.id not in spoken_for
            and (found.priority < job.priority if found.run.queue == job.queue else guaranteed)]


def _free(bench: Bench, state: JobState, card: str) -> Free:
    """What is free now and not reserved by somebody before this job."""
    length_s = duration_s(bench.world, state, card, state.job.gang_min)
    free = memory_fits(bench.nodes, bench.free.get(card, {}), state.job.memory_gb)
    free = keep_whole(bench, free, state.job.gang_min)
    lent = memory_fits(bench.nodes, bench.lent.get(card, {}), state.job.memory_gb)
    if lent and may_borrow(bench, state, length_s):
        free = joined(free, {name: devices for name, devices in lent.items()
                             if state.job.checkpoint is not None or promise_covers(bench, devices, length_s)})
    return without(free, [device for other in bench.reservations.get(card, ()) if other.job != state.job.id
                          for device in other.devices])


def _orders(bench: Bench, state: JobState, card: str, found: _Found) -> list[Event]:
    rules, job, victims = bench.world.config.rules, state.job, [victim.run for victim in found.victims]
    deadline_s = bench.now_s + rules.grace_s
    events: list[Event] = []
    for run in victims:
        reason = Reason.PRIORITY if run.queue == job.queue else Reason.RECLAIMED
        events.append(StopOrdered(at_s=bench.now_s, run=run.id, epoch=run.epoch, deadline_s=deadline_s,
                                  why=bench.why(reason, f"for {job.id}")))
        bench.ledger.use(run.queue, run.card, run.family, -len(run.devices),
                         bench.world.tables.get(run.coefficients))
    foreign = any(run.queue != job.queue for run in victims)
    devices = _as_large_as_can_be(bench, state, card, found, guaranteed=foreign)
    claim = Claim(job.id, bench.pool.name, card, devices, bench.now_s, deadline_s + rules.quarantine_after_s)
    events.append(ClaimMade(at_s=bench.now_s, claim=claim,
                            why=bench.why(Reason.RECLAIMED if foreign else Reason.PRIORITY)))
    bench.take(card, devices, None)
    bench.ledger.use(job.queue, card, job.family, len(devices))
    return events


def _as_large_as_can_be(bench: Bench, state: JobState, card: str, found: _Found, *,
                        guaranteed: bool) -> tuple[str, ...]:
    """An elastic gang takes all that the runs leave that it has stopped anyway, as far as its quota goes: what others
    lose for it stays within its guarantee (I13)."""
    job, ledger = state.job, bench.ledger
    for size in range(min(job.gang_max, sum(map(len, found.room.values()))), len(found.devices), -1):
        is_ours = (not ledger.borrows(job.queue, card, job.family, size) if guaranteed
                   else ledger.admits(job.queue, card, job.family, size))
        devices = place_near_data(bench, state, found.room, size) if is_ours else None
        if devices is not None:
            return devices
    return found.devices
