"""The order of the waiting: first those that stand on their own guarantee, then borrowers by share, priority, age.

Holders of claims have their devices already and stand in no queue. Each queue's own order is fixed (priority, then
age); between queues the next head is drawn anew after each placement, since that changes the shares: the head with the
lowest ``(borrows, share, -priority, submitted, id)``.
"""

from collections.abc import Iterable, Iterator

from allocator.model.jobs import JobState, Kind
from allocator.picture import Ledger

Rank = tuple[bool, float, int, float, str]


def in_queue_order(states: Iterable[JobState]) -> list[JobState]:
    """One queue's own order. Batch stands behind all else of its queue: it only fills what is left."""
    return sorted(states, key=lambda state: (state.job.kind is Kind.BATCH, -state.job.priority,
                                             state.job.submitted_s, state.job.id))


def in_order(ledger: Ledger, waiting: Iterable[JobState]) -> Iterator[JobState]:
    """The waiting jobs of a pool, next one first. What the caller places in between counts."""
    by_queue: dict[str, list[JobState]] = {}
    for state in waiting:
        by_queue.setdefault(state.job.queue, []).append(state)
    heads = {queue: iter(in_queue_order(states)) for queue, states in by_queue.items()}
    current = {queue: next(head) for queue, head in heads.items()}
    ranks: dict[str, Rank] = {}
    ranked_at = ledger.changes
    while current:
        if ledger.changes != ranked_at:
            ranks.clear()
            ranked_at = ledger.changes
        queue = _first(ledger, current, ranks)
        yield current[queue]
        ranks.pop(queue, None)
        after = next(heads[queue], None)
        if after is None:
            del current[queue]
        else:
            current[queue] = after


def _first(ledger: Ledger, current: dict[str, JobState], ranks: dict[str, Rank]) -> str:
    """The queue whose head is next; `ranks` are those known from before."""
    if len(current) == 1:
        return next(iter(current))
    for queue, state in current.items():
        if queue not in ranks:
            ranks[queue] = _rank(ledger, state)
    return min(current, key=ranks.__getitem__)


def _rank(ledger: Ledger, state: JobState) -> Rank:
    job = state.job
    borrows = all(ledger.borrows(job.queue, card, job.family, job.gang_min) for card in job.cards)
    share = ledger.share(job.queue) if borrows else 0.0
    return (borrows, share, -job.priority, job.submitted_s, job.id)
