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

from allocator.estimate import duration_s, lost_unit_s
from allocator.events import ClaimMade, Event, StopOrdered
from allocator.model.inventory import node_name
from allocator.model.jobs import JobState, Kind, Level, Run
from allocator.model.world import Claim
from allocator.picture import Free, Ledger
from allocator.placement.topology import grouped, joined, without
from allocator.queueing.bench import Bench, memory_fits
from allocator.queueing.fitting import keep_whole, may_borrow, only_backfills, place_near_data, promise_covers
from allocator.queueing.passing import Waiting
from allocator.reasons import Reason

_Candidate = tuple[bool, int, float, str, Run]
"""(not batch, priority, lost work, id, run): who goes first among the runs of one queue."""


def reclaim(bench: Bench, blocked: list[Waiting]) -> list[Event]:
    """Stops and claims for those of the blocked jobs that have a right to devices which others use."""
    events: list[Event] = []
    spoken_for: set[str] = set()
    in_vain: set[tuple[object, ...]] = set()
    costs: dict[str, float] = {}
    stoppable: dict[str, list[Run]] = {}
    for waiting in blocked:
        if only_backfills(waiting.state):
            continue
        for card in waiting.cards:
            # Jobs that are alike fail alike: with hundreds waiting, that is most of the work saved.
            alike = _alike(bench, waiting.state, card)
            if alike in in_vain:
                continue
            if card not in stoppable:
                stoppable[card] = _stoppable(bench, card)
            candidates = _candidates(bench, waiting.state, card, stoppable[card], spoken_for)
            found = _take_back(bench, waiting.state, card, candidates, costs)
            if found is None:
                in_vain.add(alike)
                continue
            victims, devices = found
            spoken_for |= {run.id for run in victims}
            events += _orders(bench, waiting.state, card, victims, devices)
            break
    return events


def _alike(bench: Bench, state: JobState, card: str) -> tuple[object, ...]:
    """All of a job that decides whether it can take back so many devices of a card."""
    job = state.job
    has_reservation = any(found.job == job.id for found in bench.reservations.get(card, ()))
    # On lent devices it also matters how long the job takes, and whether it can save its work.
    on_loans = (duration_s(bench.world, state, card, job.gang_min), job.checkpoint, state.recalls
                ) if bench.lent.get(card) else ()
    return (card, job.queue, job.family, job.gang_min, job.priority, job.memory_gb, job.widest, job.data_site,
            has_reservation, on_loans)


def _take_back(bench: Bench, state: JobState, card: str, candidates: list[Run],
               costs: dict[str, float]) -> tuple[list[Run], tuple[str, ...]] | None:
    job = state.job
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
    ledger = bench.ledger.copied()
    victims: list[Run] = []
    devices: tuple[str, ...] | None = None
    tried, leaves = False, dict[str, list[str]]()
    # What a gang before this one waits for is not to be had by stopping whoever is still there.
    reserved = {device for other in bench.reservations.get(card, ()) if other.job != job.id for device in other.devices}
    for run in _victims(bench, ledger, job.queue, candidates, costs):
        victims.append(run)
        left = leaves[run.id] = [device for device in _left_by(bench, state, run) if device not in reserved]
        freed = grouped(left)
        free = joined(free, freed)
        ledger.use(run.queue, run.card, run.family, -len(run.devices), world.tables.get(run.coefficients))
        if not ledger.admits(job.queue, card, job.family, job.gang_min):
            continue
        # What could not be placed before can be only with what has just come free.
        if not tried or job.widest > Level.NODE or any(len(free[name]) >= job.gang_min for name in freed):
            devices = place_near_data(bench, state, free, job.gang_min)
            if devices is not None:
                break
            tried = True
    if devices is None:
        return None
    return _filled_back(bench, state, card, free, ledger, victims, leaves, devices)


def _filled_back(bench: Bench, state: JobState, card: str, free: Free, ledger: Ledger, victims: list[Run],
                 leaves: dict[str, list[str]], devices: tuple[str, ...]) -> tuple[list[Run], tuple[str, ...]] | None:
    """The victims without those that are not needed, the last chosen first, and the devices that the gang then gets.

    The gang fits on `devices`: as long as these are there it fits (`place` is monotone), and nothing need be searched.
    """
    job, world = state.job, bench.world
    needed = [victims[-1]]
    let_off: list[str] = []
    for run in reversed(victims[:-1]):
        table = world.tables.get(run.coefficients)
        ledger.use(run.queue, run.card, run.family, len(run.devices), table)
        left = leaves[run.id]
        fits: tuple[str, ...] | None = devices
        if not ledger.admits(job.queue, card, job.family, job.gang_min):
            fits = None
        elif any(device in devices for device in left):
            fits = place_near_data(bench, state, without(free, (*let_off, *left)), job.gang_min)
        if fits is not None:
            let_off += left
            devices = fits
        else:
            needed.append(run)
            ledger.use(run.queue, run.card, run.family, -len(run.devices), table)
    placed = place_near_data(bench, state, without(free, let_off), job.gang_min)
    return (needed[::-1], placed) if placed is not None else None


def _stoppable(bench: Bench, card: str) -> list[Run]:
    """The runs on a card that may be stopped for somebody at all."""
    youngest_s = bench.now_s - bench.world.config.rules.min_run_s
    return [run for run in bench.world.runs.values()
            if run.card == card and run.pool == bench.pool.name and not run.stopping and not run.leaving
            and run.started_s <= youngest_s and run.started_s < bench.now_s]


def _candidates(bench: Bench, state: JobState, card: str, runs: list[Run], spoken_for: set[str]) -> list[Run]:
    """Those of these runs that may be stopped for this job."""
    job, world, ledger = state.job, bench.world, bench.ledger
    guaranteed = not ledger.borrows(job.queue, card, job.family, job.gang_min)
    return [run for run in runs if run.id not in spoken_for
            and (world.jobs[run.job].job.priority < job.priority if run.queue == job.queue else guaranteed)]


def _victims(bench: Bench, ledger: Ledger, own_queue: str, candidates: list[Run],
             costs: dict[str, float]) -> Iterator[Run]:
    """The candidates, next one first, as the ledger stands after those before; the caller takes each off it."""
    by_queue: dict[str, list[_Candidate]] = {}
    for run in candidates:
        if run.id not in costs:
            costs[run.id] = lost_unit_s(bench.world, run, bench.now_s)
        priority = bench.world.jobs[run.job].job.priority
        by_queue.setdefault(run.queue, []).append((run.kind is not Kind.BATCH, priority, costs[run.id], run.id, run))
    for found in by_queue.values():
        found.sort(key=lambda item: item[:4])
    ranks: dict[str, _VictimRank] = {}
    changed = set(by_queue)
    while by_queue:
        for queue in changed & by_queue.keys():
            found = by_queue[queue]
            card, family = found[0][4].card, found[0][4].family
            if queue == own_queue or ledger.borrows(queue, card, family, 0):
                ranks[queue] = _victim_rank(ledger, queue, found)
            else:
                del by_queue[queue]
        if not by_queue:
            return
        queue = min(by_queue, key=ranks.__getitem__)
        found = by_queue[queue]
        run = found.pop(ranks[queue][-1])[4]
        if not found:
            del by_queue[queue]
        yield run
        # The caller has taken it off its queue, and so off those above; nobody else's books have changed.
        changed = set(ledger.tree.path(queue))


_VictimRank = tuple[bool, bool, float, int, float, str, int]


def _victim_rank(ledger: Ledger, queue: str, found: list[_Candidate]) -> _VictimRank:
    """Whom the queue would give next, the last being its index: one that can go without taking its queue below the
    guarantee before one that cannot."""
    fits = _first_within_surplus(ledger, found)
    item = found[fits or 0]
    return (item[0], fits is None, -ledger.share(queue), *item[1:4], fits or 0)


def _first_within_surplus(ledger: Ledger, found: list[_Candidate]) -> int | None:
    known: dict[tuple[str, int], bool] = {}
    for index, (*_, run) in enumerate(found):
        size = (run.family, len(run.devices))
        if size not in known:
            known[size] = ledger.borrows(run.queue, run.card, run.family, 1 - len(run.devices))
        if known[size]:
            return index
    return None


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


def _left_by(bench: Bench, state: JobState, victim: Run) -> list[str]:
    """The devices that the job could have if this run went: only healthy, own and unclaimed ones, with the memory."""
    world, nodes = bench.world, bench.nodes
    conditions, loaned, claimed = world.conditions, world.loaned, world.claimed
    return [device for device in victim.devices
            if device not in conditions and device not in loaned and device not in claimed
            and nodes[node_name(device)].memory_gb >= state.job.memory_gb]


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
