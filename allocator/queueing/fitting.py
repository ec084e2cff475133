"""Whether and how a waiting job could start now on one card type, and what it would be like to wait for it.

Sizes of an elastic gang are tried from large to small. Own devices come before lent ones, which can be recalled; a job
may stand on lent ones where it can checkpoint or will be done within the promise, where the promise is worth a restart,
and where it was not recalled too often already. Devices of a reservation may be used by what will be gone by then.
"""

from collections.abc import Iterator, Set
from math import inf
from typing import NamedTuple

from allocator.estimate import duration_s, loan_worth, move_s
from allocator.model.inventory import node_name
from allocator.model.jobs import JobState, Kind
from allocator.picture import Free
from allocator.placement.topology import joined, place, without
from allocator.queueing.bench import Bench, memory_fits
from allocator.reasons import Pending


class Start(NamedTuple):
    """A gang that could start now."""

    card: str
    devices: tuple[str, ...]
    ends_s: float
    """Predicted."""


def start_now(bench: Bench, state: JobState, card: str) -> Start | None:
    """The best start on this card now, or `None`. Quota is respected, windows are, and so are reservations."""
    if not bench.free.get(card) and not bench.lent.get(card):
        return None
    job = state.job
    own = memory_fits(bench.nodes, bench.free.get(card, {}), job.memory_gb)
    lent = memory_fits(bench.nodes, bench.lent.get(card, {}), job.memory_gb)
    count = sum(map(len, own.values())) + sum(map(len, lent.values()))
    for size in _sizes(job.gang_min, min(job.gang_max, count), own):
        if not bench.ledger.admits(job.queue, card, job.family, size):
            continue
        length_s = duration_s(bench.world, state, card, size)
        if length_s == inf or not fits_in_time(bench, state, length_s):
            continue
        for free in _choices(bench, state, card, size, length_s, own, lent):
            start = _placed(bench, state, card, size, free)
            if start is not None:
                return start
    return None


def _placed(bench: Bench, state: JobState, card: str, size: int, free: Free) -> Start | None:
    """The start on these devices. Spread out, or far from its data, it takes longer than was thought: then it is
    placed again on those that are not reserved meanwhile, and not at all where that is not enough.
    """
    for _ in range(2):
        devices = place_near_data(bench, state, free, size)
        if devices is None:
            return None
        site = bench.nodes[node_name(devices[0])].site
        spread = len({node_name(device) for device in devices}) > 1
        length_s = duration_s(bench.world, state, card, size, spread_out=spread, site=site)
        if length_s == inf:
            return None
        reserved = reserved_for_others(bench, state, card, length_s)
        if reserved.isdisjoint(devices):
            return Start(card, devices, bench.now_s + length_s)
        free = without(free, reserved)
    return None


def reserved_for_others(bench: Bench, state: JobState, card: str, length_s: float) -> Set[str]:
    """Devices on which another gang has a reservation that begins within that time."""
    return {device for reservation in bench.reservations.get(card, ())
            if reservation.job != state.job.id and reservation.at_s < bench.now_s + length_s
            and bench.now_s < reservation.until_s for device in reservation.devices}


def _sizes(least: int, most: int, own: Free) -> Iterator[int]:
    """Sizes worth trying, large ones first: as many as there are, one node's worth, the least."""
    if most < least:
        return
    node = max(map(len, own.values()), default=least)
    yield from sorted({size for size in (most, node, least) if least <= size <= most}, reverse=True)


def fits_in_time(bench: Bench, state: JobState, length_s: float) -> bool:
    """Whether the job may start, given its windows and its pool's end: one that cannot save its work must be done."""
    left_s = state.job.closes_in_s(bench.world.wall_s(bench.now_s))
    if left_s is None:
        return False
    if bench.pool.ends_wall_s is not None:
        left_s = min(left_s, bench.pool.ends_wall_s - bench.world.wall_s(bench.now_s))
    return length_s <= left_s or (state.job.checkpoint is not None and state.job.checkpoint.restart_s < left_s)


def could_fit_in_time(bench: Bench, state: JobState, card: str) -> bool:
    """Whether devices of this card would be of use to the job if it had them now, in any number that it takes: nobody
    is to give any for a run that its window or its pool's end stops before it has saved anything."""
    return any(fits_in_time(bench, state, duration_s(bench.world, state, card, size))
               for size in {state.job.gang_min, state.job.gang_max})


def _choices(bench: Bench, state: JobState, card: str, size: int, length_s: float, own: Free,
             lent: Free) -> Iterator[Free]:
    reserved = reserved_for_others(bench, state, card, length_s)
    # In this order: a wholly free node of which a part is reserved is kept whole all the same.
    own = without(keep_whole(bench, own, size), reserved)
    if sum(map(len, own.values())) >= size:
        yield own
    if lent and may_borrow(bench, state, length_s):
        fitting = {name: devices for name, devices in without(lent, reserved).items()
                   if state.job.checkpoint is not None or promise_covers(bench, devices, length_s)}
        if fitting:
            yield joined(own, fitting)


def keep_whole(bench: Bench, free: Free, size: int) -> Free:
    """Without the last wholly free nodes that the pool keeps for gangs as large as a node."""
    keep = bench.pool.keep_whole_nodes
    if not keep or not free:
        return free
    whole = sorted(name for name, devices in free.items() if len(devices) == bench.nodes[name].devices > size)
    if not whole:
        return free
    kept = frozenset(whole[:keep])
    return {name: devices for name, devices in free.items() if name not in kept}


def may_borrow(bench: Bench, state: JobState, length_s: float) -> bool:
    """Whether a loan is worth starting for this job."""
    return no_loan(bench, state, length_s) is None


def no_loan(bench: Bench, state: JobState, length_s: float) -> Pending | None:
    """Why lent devices are not for this job; `None` where they are."""
    rules, checkpoint = bench.world.config.rules, state.job.checkpoint
    if state.recalls >= rules.max_recalls:
        return Pending.RECALLED_TOO_OFTEN
    if checkpoint is None:
        return None if length_s <= rules.promised_min_s else Pending.LOAN_TOO_SHORT
    lasts_s = min(rules.promised_min_s, length_s)
    # One restart is sure to come with the recall.
    is_worth = loan_worth(lasts_s, 1, checkpoint.restart_s) >= rules.min_loan_worth
    return None if is_worth else Pending.LOAN_NOT_WORTH


def promise_covers(bench: Bench, devices: tuple[str, ...], length_s: float) -> bool:
    """Whether none of the loans under these devices is meant to be recalled within that time."""
    world = bench.world
    return all(world.loans[world.loaned[device]].promised_until_s >= bench.now_s + length_s for device in devices)


def place_near_data(bench: Bench, state: JobState, free: Free, size: int) -> tuple[str, ...] | None:
    """Devices in the site to which the job's data moves soonest."""
    job = state.job
    if not job.data_site or not job.data_gb:
        return place(bench.nodes, free, size, job.widest)
    sites: dict[str, Free] = {}
    for name, devices in free.items():
        sites.setdefault(bench.nodes[name].site, {})[name] = devices
    for site in sorted(sites, key=lambda name: (move_s(bench.world, job, name), name)):
        found = place(bench.nodes, sites[site], size, job.widest)
        if found is not None:
            return found
    return None


def finish_if_waiting_s(bench: Bench, state: JobState, card: str) -> float:
    """When the job would be done if it waited for this card: the outlook by count, and its time there."""
    job = state.job
    size = max(job.gang_min, min(job.gang_max, bench.devices.get(card, 0)))
    if not bench.ledger.admits(job.queue, card, job.family, size):
        size = job.gang_min
    return bench.earliest_s(card, size) + duration_s(bench.world, state, card, size)


def only_backfills(state: JobState) -> bool:
    return state.job.kind is Kind.BATCH
