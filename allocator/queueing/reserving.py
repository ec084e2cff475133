"""The shadow of a waiting gang: when it will start, and on which devices, if all goes as predicted.

EASY backfill (Lifka 1995) with exact devices: the runs of a card are let end one after the other until the gang can be
*placed*, topology and all, and it keeps those very devices from that moment. A later job may start before only where it
is gone by then or stands elsewhere, so it cannot move the start (I12), fragments included. The number of gangs with a
reservation is `Rules.reservations`: one is EASY, many is conservative backfill, none is best effort.

A lent device counts only where the loan's promise covers the gang's whole time.
"""

from bisect import bisect_left
from math import inf

from allocator.estimate import duration_s
from allocator.model.jobs import JobState
from allocator.picture import Free
from allocator.placement.topology import grouped, joined, without
from allocator.queueing.bench import Bench, Reservation, memory_fits
from allocator.queueing.fitting import keep_whole, may_borrow, place_near_data


def reserve(bench: Bench, state: JobState, card: str) -> Reservation | None:
    """The earliest start of the gang, behind the reservations made before; `None` where it never fits."""
    job = state.job
    length_s = duration_s(bench.world, state, card, job.gang_min)
    if length_s == inf:
        return None
    ends = bench.ends.get(card, [])
    now_free = _free_now(bench, state, card, length_s)
    # Nodes that are whole now are kept for gangs as large as they are, and one may come and take them any time.
    whole_now = frozenset(name for name, devices in now_free.items()
                          if bench.pool.keep_whole_nodes and len(devices) == bench.nodes[name].devices > job.gang_min)
    times = sorted({bench.now_s, *(end_s for end_s, _ in ends),
                    *(earlier.until_s for earlier in bench.reservations.get(card, ()))})

    def at(time_s: float) -> frozenset[str] | None:
        gone = [device for end_s, devices in ends if end_s <= time_s for device in devices
                if _usable(bench, device, time_s + length_s)]
        free = memory_fits(bench.nodes, joined(now_free, grouped(gone)), job.memory_gb)
        busy = [device for earlier in bench.reservations.get(card, ())
                if earlier.at_s < time_s + length_s and time_s < earlier.until_s for device in earlier.devices]
        free = {name: found for name, found in free.items() if name not in whole_now} if whole_now else free
        devices = place_near_data(bench, state, without(keep_whole(bench, free, job.gang_min), busy), job.gang_min)
        return frozenset(devices) if devices is not None else None

    if bench.reservations.get(card) or bench.pool.keep_whole_nodes:
        # With earlier reservations or nodes to be kept whole, later is not always better: go through all times.
        index = next((index for index, time_s in enumerate(times) if at(time_s) is not None), len(times))
    else:
        index = bisect_left(times, True, key=lambda time_s: at(time_s) is not None)
    if index == len(times):
        return None
    devices = at(times[index])
    assert devices is not None  # the search has just placed it there
    return Reservation(job.id, card, times[index], times[index] + length_s, devices)


def _free_now(bench: Bench, state: JobState, card: str, length_s: float) -> Free:
    free = bench.free.get(card, {})
    lent = bench.lent.get(card, {})
    if lent and may_borrow(bench, state, length_s):
        kept = [device for devices in lent.values() for device in devices
                if _usable(bench, device, bench.now_s + length_s)]
        free = joined(free, grouped(kept))
    return free


def _usable(bench: Bench, device: str, until_s: float) -> bool:
    loan = bench.world.loans.get(bench.world.loaned.get(device, ""))
    return loan is None or loan.promised_until_s >= until_s
