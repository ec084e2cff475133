"""Time cut into slots: what each backend can do in each, which slots a window meets, alike requests merged.

Slots are rounded outward: a window meets every slot it touches. Shorter slots make the bound higher and the programme
larger; both stay valid.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, log2

import numpy as np

from loadtest.sim.bound.instance import BadInstance, BoundBackend, BoundRequest, Floats
from loadtest.sim.bound.work import QUIET, Ints, StepNoise, WorkTable


@dataclass(frozen=True, slots=True, eq=False)
class SlotTable:
    """A `WorkTable` on a grid of slots. Windows are slot numbers, both ends included."""

    work: WorkTable
    slot_s: float
    capacity_s: Floats
    """Shape (backends, slots): calibrated seconds of work."""
    prefill_from: Ints
    """Shape (requests,)."""
    prefill_until: Ints
    """Shape (requests,)."""
    decode_from: Ints
    """Shape (requests, backends): where the earliest first token falls."""
    decode_until: Ints
    """Shape (requests,)."""


def slot_table(
    table: WorkTable, backends: Sequence[BoundBackend], slot_s: float, noise: StepNoise = QUIET,
    copies: Sequence[int] | None = None,
) -> SlotTable:
    """Lays the table on slots of `slot_s` from 0 until the last deadline.

    `copies` says how many alike backends each column stands for, one by default. Their machine time may be added up:
    whatever is shared out among them is a schedule of the sum.

    Raises:
        BadInstance: `slot_s` is not over 0.
    """
    if not slot_s > 0:
        raise BadInstance(f"slot_s is {slot_s}: a slot takes time")

    def slot_of(time_s: Floats) -> Ints:
        return np.floor(time_s / slot_s).astype(np.int64)

    slots = floor(float(table.last_token_deadline_s.max()) / slot_s) + 1
    stretch = noise.capacity_factor(slots * slot_s)
    capacity_s = stretch * np.array([
        [number * backend.work_s(at * slot_s, (at + 1) * slot_s) for at in range(slots)]
        for backend, number in zip(backends, copies or [1] * len(backends), strict=True)])
    decode_until = slot_of(table.last_token_deadline_s)
    return SlotTable(
        work=table,
        slot_s=slot_s,
        capacity_s=capacity_s,
        prefill_from=slot_of(table.arrival_s),
        prefill_until=slot_of(table.ttft_deadline_s),
        decode_from=np.minimum(slot_of(table.earliest_first_token_s), decode_until[:, None]),
        decode_until=decode_until,
    )


def alike(requests: Sequence[BoundRequest], slot_s: float, buckets_per_doubling: float = 2.0) -> Ints:
    """A group number for each request: same class and budgets, same slot of arrival, sizes in the same buckets."""
    def bucket(tokens: int) -> int:
        return round(log2(tokens) * buckets_per_doubling)

    keys: dict[tuple[object, ...], int] = {}
    return np.array([
        keys.setdefault((r.class_name, r.ttft_budget_s, r.tpot_budget_s, floor(r.arrival_s / slot_s),
                         bucket(r.prompt_tokens), bucket(r.uncached_tokens), bucket(r.output_tokens)), len(keys))
        for r in requests
    ], dtype=np.int64)


def merged(table: WorkTable, groups: Ints) -> WorkTable:
    """One row a group: the least cost and work among its requests, and a window that holds all of theirs.

    Replacing each request by its group's row turns any schedule into another that is no dearer, so a bound for the
    merged table holds for the original. Its size does not grow with the length of the queue, only with the variety.
    """
    groups_count = int(groups.max()) + 1
    order = np.argsort(groups, kind="stable")
    starts = np.searchsorted(groups[order], np.arange(groups_count))

    def least(values: Floats) -> Floats:
        return np.minimum.reduceat(values[order], starts, axis=0)

    def most(values: Floats) -> Floats:
        return np.maximum.reduceat(values[order], starts, axis=0)

    def least_where_served(values: Floats) -> Floats:
        result = least(np.where(table.can_serve, values, np.inf))
        return np.where(np.isfinite(result), result, 0.0)

    return WorkTable(
        count=np.add.reduceat(table.count[order], starts),
        arrival_s=least(table.arrival_s),
        ttft_deadline_s=most(table.ttft_deadline_s),
        last_token_deadline_s=most(table.last_token_deadline_s),
        can_serve=np.logical_or.reduceat(table.can_serve[order], starts, axis=0),
        cost=least_where_served(table.cost),
        prefill_s=least_where_served(table.prefill_s),
        decode_s=least_where_served(table.decode_s),
        earliest_first_token_s=least_where_served(table.earliest_first_token_s),
    )
