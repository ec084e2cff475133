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

from collections.abc import Iterator
from dataclasses import replace

from allocator.estimate import duration_s, lost_unit_s
from allocator.events import ClaimMade, Event, StopOrdered
from allocator.model.inventory import Condition, node_name
from allocator.model.jobs import JobState, Kind, Run
from allocator.model.world import Claim
from allocator.picture import Free, Ledger
from allocator.placement.topology import grouped, joined, without
from allocator.queueing.bench import Bench, memory_fits
from allocator.queueing.fitting import keep_whole, may_borrow, only_backfills, place_near_data, promise_covers
from allocator.queueing.passing import Waiting
from allocator.reasons import Reason


def reclaim(bench: Bench, blocked: list[Waiting]) -> list[Event]:
    """Stops and claims for those of the blocked jobs that have a right to devices which others use."""
    events: list[Event] = []
    spoken_for: set[str] = set()
    in_vain: set[tuple[object, ...]] = set()
    costs: dict[str, float] = {}
    for waiting in blocked:
        if only_backfills(waiting.state):
            continue
        for card in waiting.cards:
            job = waiting.state.job
            # Jobs that are alike fail alike: with hundreds waiting, that is most of the work saved.
            alike = (card, job.queue, job.family, job.gang_min, job.priority, job.memory_gb, job.widest, job.data_site)
            if alike in in_vain:
                continue
            found = _take_back(bench, waiting.state, card, spoken_for, costs)
            if found is None:
                in_vain.add(alike)
                continue
            victims, devices = found
            spoken_for |= {run.id for run in victims}
            events += _orders(bench, waiting.state, card, victims, devices)
            break
    return events


def _take_back(bench: Bench, state: JobState, card: str, spoken_for: set[str],
               costs: dict[str, float]) -> tuple[list[Run], tuple[str, ...]] | None:
    job = state.job
    candidates = _candidates(bench, state, card, spoken_for)
    if not candidates:
        return None
    free = _free(bench, state, card)
    if sum(map(len, free.values())) + sum(len(run.devices) for run in candidates) < job.gang_min:
        return None
    found = _attempt(bench, state, card, free, candidates, costs)
    if found is not None:
        return found
    # The cheapest victims leave fragments. Those of one node may not.
    attempts = [found for runs in _by_node(candidates, free, job.gang_min)
                if (found := _attempt(bench, state, card, free, runs, costs)) is not None]
    return min(attempts, key=lambda found: sum(costs[run.id] for run in found[0]), default=None)


def _by_node(runs: list[Run], free: Free, devices: int) -> list[list[Run]]:
    """The runs on each node that would hold so many devices if they were gone."""
    on: dict[str, dict[str, Run]] = {}
    room = {name: len(found) for name, found in free.items()}
    for run in runs:
        for device in run.devices:
            name = node_name(device)
            on.setdefault(name, {})[run.id] = run
            room[name] = room.get(name, 0) + 1
    return [list(found.values()) for name, found in sorted(on.items()) if room[name] >= devices]


def _attempt(bench: Bench, state: JobState, card: str, free: Free, candidates: list[Run],
             costs: dict[str, float]) -> tuple[list[Run], tuple[str, ...]] | None:
    job, world = state.job, bench.world
    ledger = _copy(bench.ledger)
    victims: list[Run] = []
    devices: tuple[str, ...] | None = None
    for run in _victims(bench, ledger, job.queue, candidates, costs):
        victims.append(run)
        ledger.use(run.queue, run.card, run.family, -len(run.devices), world.tables.get(run.coefficients))
        if ledger.admits(job.queue, card, job.family, job.gang_min):
            devices = place_near_data(bench, state, _with(bench, state, free, victims), job.gang_min)
            if devices is not None:
                break
    if devices is None:
        return None
    for run in reversed(victims[:-1]):
        fewer = [other for other in victims if other is not run]
        table = world.tables.get(run.coefficients)
        ledger.use(run.queue, run.card, run.family, len(run.devices), table)
        without_it = place_near_data(bench, state, _with(bench, state, free, fewer), job.gang_min)
        if without_it is not None and ledger.admits(job.queue, card, job.family, job.gang_min):
            victims, devices = fewer, without_it
        else:
            ledger.use(run.queue, run.card, run.family, -len(run.devices), table)
    return victims, devices


def _candidates(bench: Bench, state: JobState, card: str, spoken_for: set[str]) -> list[Run]:
    job, world, ledger = state.job, bench.world, bench.ledger
    guaranteed = not ledger.borrows(job.queue, card, job.family, job.gang_min)
    youngest_s = bench.now_s - world.config.rules.min_run_s
    return [run for run in world.runs.values()
            if run.card == card and run.pool == bench.pool.name and not run.stopping and not run.leaving
            and run.id not in spoken_for and run.started_s <= youngest_s and run.started_s < bench.now_s
            and (world.jobs[run.job].job.priority < job.priority if run.queue == job.queue
                 else guaranteed)]


def _victims(bench: Bench, ledger: Ledger, own_queue: str, candidates: list[Run],
             costs: dict[str, float]) -> Iterator[Run]:
    """The candidates, next one first, as the ledger stands after those before; the caller takes each off it."""
    by_queue: dict[str, list[tuple[bool, int, float, str, Run]]] = {}
    for run in candidates:
        if run.id not in costs:
            costs[run.id] = lost_unit_s(bench.world, run, bench.now_s)
        priority = bench.world.jobs[run.job].job.priority
        by_queue.setdefault(run.queue, []).append((run.kind is not Kind.BATCH, priority, costs[run.id], run.id, run))
    for found in by_queue.values():
        found.sort(key=lambda item: item[:4])
    while by_queue:
        best: tuple[bool, bool, float, int, float, str, Run] | None = None
        for queue, found in list(by_queue.items()):
            card, family = found[0][4].card, found[0][4].family
            if not found or (queue != own_queue and not ledger.borrows(queue, card, family, 0)):
                del by_queue[queue]
                continue
            # A run that can go without taking its queue below the guarantee goes before one that cannot.
            fits = next((item for item in found if _within_surplus(ledger, item[4])), None)
            item = fits or found[0]
            key = (item[0], fits is None, -ledger.share(queue), *item[1:])
            if best is None or key[:6] < best[:6]:
                best = key
        if best is None:
            return
        run = best[6]
        by_queue[run.queue] = [item for item in by_queue[run.queue] if item[4] is not run]
        if not by_queue[run.queue]:
            del by_queue[run.queue]
        yield run


def _within_surplus(ledger: Ledger, run: Run) -> bool:
    return ledger.borrows(run.queue, run.card, run.family, 1 - len(run.devices))


def _copy(ledger: Ledger) -> Ledger:
    books = {key: replace(book, own=dict(book.own), usage=dict(book.usage)) for key, book in ledger.books.items()}
    return replace(ledger, books=books, units=dict(ledger.units))


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


def _with(bench: Bench, state: JobState, free: Free, victims: list[Run]) -> Free:
    """The free devices and those that the victims leave; of these only healthy, own and unclaimed ones."""
    world = bench.world
    left = [device for run in victims for device in run.devices
            if world.conditions.get(device, Condition.HEALTHY) is Condition.HEALTHY
            and device not in world.loaned and device not in world.claimed]
    return joined(free, memory_fits(bench.nodes, grouped(left), state.job.memory_gb))


def _orders(bench: Bench, state: JobState, card: str, victims: list[Run], devices: tuple[str, ...]) -> list[Event]:
    rules, job = bench.world.config.rules, state.job
    deadline_s = bench.now_s + rules.grace_s
    events: list[Event] = []
    for run in victims:
        reason = Reason.PRIORITY if run.queue == job.queue else Reason.RECLAIMED
        events.append(StopOrdered(at_s=bench.now_s, run=run.id, epoch=run.epoch, deadline_s=deadline_s,
                                  why=bench.why(reason, f"for {job.id}")))
        bench.ledger.use(run.queue, run.card, run.family, -len(run.devices),
                         bench.world.tables.get(run.coefficients))
    claim = Claim(job.id, bench.pool.name, card, devices, bench.now_s, deadline_s + rules.quarantine_after_s)
    foreign = any(run.queue != job.queue for run in victims)
    events.append(ClaimMade(at_s=bench.now_s, claim=claim,
                            why=bench.why(Reason.RECLAIMED if foreign else Reason.PRIORITY)))
    bench.take(card, devices, None)
    bench.ledger.use(job.queue, card, job.family, len(devices))
    return events
