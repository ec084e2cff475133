"""One pass over the waiting jobs of every pool: claims that are ready, starts in order, backfill, reclaims, offers.

1. A claim whose devices are all free starts.
2. Jobs in order: the allowed card on which it would be done soonest. Where that one is free, it starts; where a slower
   one is free, it starts there unless waiting is predicted to be worth it (`Rules.patience`).
3. The first that cannot start gets a reservation; those behind it start only where they do not move it.
4. Those that wait within their guarantee take it back from borrowers (`reclaiming`).
5. For those that still wait, replicas that inference can do without are offered (`lending`).

A job that can never start, or not at this time (of the week, or after a crash), is set aside with the reason before
anybody is put in order: it stands in nobody's way (P58, P64), also not at the head of its queue, where it would rank
those behind it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from allocator.estimate import duration_s
from allocator.events import ClaimMade, Event, RunPlaced
from allocator.loan.states import LoanState
from allocator.model.inventory import node_name
from allocator.model.jobs import JobState, Kind, Run
from allocator.model.pools import Pool, PoolKind
from allocator.model.world import World
from allocator.picture import picture_of
from allocator.queueing.bench import Bench, Reservation, Verdict, bench_of, memory_fits
from allocator.queueing.fitting import Start, finish_if_waiting_s, only_backfills, start_now
from allocator.queueing.gates import cards_for, gate_of_pool
from allocator.queueing.order import in_order
from allocator.queueing.reserving import reserve
from allocator.quota import key_of
from allocator.reasons import Pending, Reason


@dataclass(frozen=True, slots=True)
class Passed:
    """What a pass found: events to happen, why each job that still waits does, and the reservations."""

    events: tuple[Event, ...]
    verdicts: dict[str, Verdict]
    reservations: tuple[Reservation, ...]


@dataclass(frozen=True, slots=True)
class Waiting:
    """A job that could not start, and the cards that it could have, best one first."""

    state: JobState
    cards: tuple[str, ...]


MakeRoom = Callable[[Bench, list[Waiting]], list[Event]]


def pass_over(world: World, now_s: float, kinds: frozenset[Kind], make_room: tuple[MakeRoom, ...]) -> Passed:
    """One pass; `make_room` are the ways of finding devices for those that could not start, tried in turn."""
    events: list[Event] = []
    verdicts: dict[str, Verdict] = {}
    reservations: list[Reservation] = []
    epoch = world.epoch
    open_pools = picture_of(world, now_s).open_pools
    for pool, waiting in _by_pool(world, kinds, verdicts):
        if pool.name not in open_pools:
            verdicts |= {state.job.id: Verdict(state.job.id, Pending.POOL_CLOSED, {"pool": pool.name})
                         for state in waiting}
            continue
        bench = bench_of(world, pool, now_s)
        bench.epoch = epoch
        events += _ready_claims(bench, kinds)
        started, blocked = _start_in_order(bench, waiting)
        events += started
        for way in make_room:
            made = way(bench, blocked)
            claimed = {event.claim.job for event in made if isinstance(event, ClaimMade)}
            blocked = [other for other in blocked if other.state.job.id not in claimed]
            events += made
        epoch = bench.epoch
        verdicts |= bench.verdicts
        reservations += [found for made_ones in bench.reservations.values() for found in made_ones]
    return Passed(tuple(events), verdicts, tuple(reservations))


def _by_pool(world: World, kinds: frozenset[Kind],
             verdicts: dict[str, Verdict]) -> list[tuple[Pool, list[JobState]]]:
    """The pools that have something to do, each with the jobs that wait for it."""
    waiting: dict[str, list[JobState]] = {}
    pools: dict[str, Pool | Verdict] = {}
    for state in world.jobs.values():
        job = state.job
        if state.run is not None or job.kind not in kinds:
            continue
        found = pools.get(job.queue)
        if found is None:
            found = pools[job.queue] = gate_of_pool(world, state)
        if isinstance(found, Verdict):
            verdicts[job.id] = Verdict(job.id, found.code, found.facts)
        elif job.id in world.claims:
            claim = world.claims[job.id]
            verdicts[job.id] = Verdict(job.id, Pending.CLAIM, {"devices": len(claim.devices), "card": claim.card,
                                                               "until_s": claim.until_s})
        else:
            waiting.setdefault(found.name, []).append(state)
    claims = {claim.pool for claim in world.claims.values()}
    return [(pool, waiting.get(pool.name, [])) for pool in world.config.pools
            if pool.kind is not PoolKind.INFERENCE and (pool.name in waiting or pool.name in claims)]


def _ready_claims(bench: Bench, kinds: frozenset[Kind]) -> list[Event]:
    """Claims of which every device is free, and every offer released, start exactly there."""
    events: list[Event] = []
    world = bench.world
    for claim in world.claims.values():
        state = world.jobs[claim.job]
        offers = [world.loans[name] for name in claim.loans if name in world.loans]
        if (claim.pool != bench.pool.name or state.job.kind not in kinds or not world.is_empty(claim.devices)
                or len(offers) < len(claim.loans)
                or any(not loan.released or loan.state not in _USABLE for loan in offers)
                or any(device in world.conditions for device in claim.devices)):
            continue
        ends_s = finish_s(bench, state, claim.card, claim.devices)
        events.append(_placed(bench, state, Start(claim.card, claim.devices, ends_s), Reason.CLAIM_READY))
        bench.take(claim.card, claim.devices, ends_s)
    return events


_USABLE = frozenset({LoanState.OFFERED, LoanState.LENT})


def _start_in_order(bench: Bench, waiting: list[JobState]) -> tuple[list[Event], list[Waiting]]:
    events: list[Event] = []
    blocked: list[Waiting] = []
    able = _able(bench, waiting)
    for state in in_order(bench.ledger, [state for state in waiting if state.job.id in able]):
        start = _choose(bench, state, able[state.job.id])
        if isinstance(start, Start):
            reason = Reason.BACKFILLED if bench.reservations.get(start.card) else Reason.PLACED
            events.append(_placed(bench, state, start, reason))
            bench.take(start.card, start.devices, start.ends_s)
            bench.ledger.use(state.job.queue, start.card, state.job.family, len(start.devices))
        else:
            blocked.append(start)
    return events, blocked


def _able(bench: Bench, waiting: list[JobState]) -> dict[str, list[str]]:
    """Job → the cards that it could start on at this time. The others are set aside, each with the reason."""
    able: dict[str, list[str]] = {}
    for state in waiting:
        cards, verdict = cards_for(bench, state)
        if verdict is not None:
            bench.verdicts[state.job.id] = verdict
        elif state.job.closes_in_s(bench.world.wall_s(bench.now_s)) is None:
            opens_in_s = state.job.opens_in_s(bench.world.wall_s(bench.now_s))
            bench.wait(state, Pending.WINDOW_CLOSED, at_s=bench.now_s + opens_in_s)
        elif bench.now_s < state.not_before_s:
            bench.wait(state, Pending.CRASHED, crashes=state.crashes, at_s=state.not_before_s,
                       tries=bench.world.config.rules.max_restarts + 1)
        else:
            able[state.job.id] = cards
    return able


def _choose(bench: Bench, state: JobState, cards: list[str]) -> Start | Waiting:
    """Where the job starts now, or where it waits. Ties go to the order in which the job names its cards."""
    job = state.job
    starts = [start for card in cards if (start := start_now(bench, state, card)) is not None]
    best = min(starts, key=lambda start: start.ends_s, default=None)
    if best is not None and (len(cards) == 1 or only_backfills(state)):
        return best
    if len(cards) == 1:
        return _block(bench, state, tuple(cards))
    later = {card: finish_if_waiting_s(bench, state, card) for card in cards}
    order = tuple(sorted(cards, key=later.__getitem__))
    if best is not None:
        soonest = order[0]
        waiting_s = later[soonest] - bench.now_s
        patience = bench.world.config.rules.patience
        if (any(start.card == soonest for start in starts) or best.ends_s - bench.now_s <= patience * waiting_s
                or not bench.ledger.within_limits(job.queue, soonest, job.family, job.gang_min)):
            return best
        bench.wait(state, Pending.BETTER_CARD, card=soonest, instead_of=best.card, in_s=waiting_s)
        _queue_up(bench, state, soonest)
        return Waiting(state, ())
    return _block(bench, state, order)


def _block(bench: Bench, state: JobState, order: tuple[str, ...]) -> Waiting:
    job, ledger = state.job, bench.ledger
    admitted = tuple(card for card in order if ledger.within_limits(job.queue, card, job.family, job.gang_min))
    if not admitted:
        card = order[0]
        book = ledger.books.get(key_of(bench.pool, card))
        bench.wait(state, Pending.QUOTA_BUSY, card=card, queue=job.queue, needs=job.gang_min,
                   available=book.allowed(job.queue) if book else 0.0)
        return Waiting(state, order)
    card = admitted[0]
    free = sum(map(len, memory_fits(bench.nodes, bench.free.get(card, {}), job.memory_gb).values()))
    if any(found.job != job.id for found in bench.reservations.get(card, ())) and free >= job.gang_min:
        ahead = bench.reservations[card][0]
        bench.wait(state, Pending.BEHIND_RESERVATION, card=card, job=ahead.job, at_s=ahead.at_s)
    elif free >= job.gang_min and not ledger.admits(job.queue, card, job.family, job.gang_min):
        bench.wait(state, Pending.QUOTA_KEPT, card=card, queue=job.queue, free=free)
    elif free >= job.gang_min:
        bench.wait(state, Pending.FRAGMENTED, card=card, needs=job.gang_min, free=free, widest=job.widest.name.lower())
    else:
        bench.wait(state, Pending.DEVICES_BUSY, card=card, needs=job.gang_min, free=free,
                   at_s=bench.earliest_s(card, job.gang_min))
    _queue_up(bench, state, card)
    return Waiting(state, order)


def _queue_up(bench: Bench, state: JobState, card: str) -> None:
    """The job waits for this card: with a reservation where it is among the first, else as a figure in the outlook."""
    if only_backfills(state):
        return
    made = bench.reservations.setdefault(card, [])
    if len(made) < bench.world.config.rules.reservations:
        reservation = reserve(bench, state, card)
        # A gang that could be placed now waits for something else than devices: to keep them for it would waste them.
        if reservation is not None and reservation.at_s > bench.now_s:
            made.append(reservation)
    length_s = duration_s(bench.world, state, card, state.job.gang_min)
    if length_s < inf:
        bench.ahead_s[card] = bench.ahead_s.get(card, 0.0) + length_s * state.job.gang_min


def finish_s(bench: Bench, state: JobState, card: str, devices: tuple[str, ...]) -> float:
    """When the job is predicted to be done if it starts on these devices now."""
    spread = len({node_name(device) for device in devices}) > 1
    site = bench.nodes[node_name(devices[0])].site
    length_s = duration_s(bench.world, state, card, len(devices), spread_out=spread, site=site)
    return bench.now_s + min(length_s, LONGEST_S)


LONGEST_S = 1e9
"""A prediction is a finite number: this is thirty years."""


def _placed(bench: Bench, state: JobState, start: Start, reason: Reason) -> Event:
    job, world = state.job, bench.world
    bench.epoch += 1
    run = Run(
        id=f"{job.id}.{bench.epoch}", job=job.id, epoch=bench.epoch, queue=job.queue, pool=bench.pool.name,
        kind=job.kind, family=job.family, card=start.card, devices=start.devices, gang_min=job.gang_min,
        checkpoint=job.checkpoint, started_s=bench.now_s, ends_s=start.ends_s, coefficients=world.active,
        config=world.config.version, base_unit_s=state.done_unit_s)
    return RunPlaced(at_s=bench.now_s, run=run, why=bench.why(reason))
