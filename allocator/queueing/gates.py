"""What keeps a job from a pool or a card before devices come into it: the causes that waiting alone does not cure."""

from allocator.estimate import duration_s
from allocator.model.jobs import Job, JobState
from allocator.model.pools import Pool, PoolKind, pool_of_queue
from allocator.model.world import World
from allocator.picture import Free
from allocator.placement.topology import grouped, place
from allocator.queueing.bench import Bench, Verdict, memory_fits
from allocator.queueing.fitting import no_loan
from allocator.reasons import Pending


def gate_of_pool(world: World, state: JobState) -> Pool | Verdict:
    """The pool that the job waits for, or why there is none."""
    job = state.job
    roots: dict[str, Pool | Verdict] = world.memo.setdefault("roots", {})
    found = roots.get(job.queue)
    if found is None:
        found = roots[job.queue] = _root(world, job)
    return Verdict(job.id, found.code, found.facts) if isinstance(found, Verdict) else found


def _root(world: World, job: Job) -> Pool | Verdict:
    if world.config.queue(job.queue) is None:
        return Verdict(job.id, Pending.QUEUE_UNKNOWN, {"queue": job.queue})
    pool = pool_of_queue(world.config, job.queue)
    if pool is None or pool.kind is PoolKind.INFERENCE:
        return Verdict(job.id, Pending.NO_JOBS_HERE, {"queue": job.queue, "pool": pool.name if pool else "none"})
    return pool


def cards_for(bench: Bench, state: JobState) -> tuple[list[str], Verdict | None]:
    """The allowed cards on which the job can run at all, now or later; with none, why (the nearest miss).

    A card that is out of service or on paper only never stands in the way of another one (P59, P68). Jobs that are
    alike get one answer a world.
    """
    job = state.job
    alike = (tuple(bench.ledger.books), job.queue, job.cards, job.family, job.gang_min, job.memory_gb, job.widest)
    memo: dict[object, tuple[list[str], Verdict | None]] = bench.world.memo.setdefault("gates", {})
    known = memo.get(alike)
    if known is None:
        known = memo[alike] = _cards_for(bench, state)
    able, verdict = known
    if verdict is not None:
        return able, Verdict(job.id, verdict.code, verdict.facts)
    misses = {card: found for card in able if (found := _without_loans(bench, state, card)) is not None}
    able = [card for card in able if card not in misses]
    return able, None if able else next(iter(misses.values()))


def _cards_for(bench: Bench, state: JobState) -> tuple[list[str], Verdict | None]:
    job, table, pool = state.job, bench.world.coefficients, bench.pool.name
    able: list[str] = []
    misses: list[tuple[int, Pending, dict[str, object]]] = []
    for card in job.cards:
        key = (pool, card)
        facts: dict[str, object] = {"card": card, "needs": job.gang_min}
        have = bench.picture.inventory.get(key, 0) + bench.picture.borrowed_in.get(key, 0)
        lendable = _lendable_devices(bench, card)
        if not table.knows(card):
            misses.append((0, Pending.CARD_UNKNOWN, facts))
        elif table.speed(card, job.family, job.gang_min) <= 0.0:
            misses.append((1, Pending.CARD_CANNOT, facts | {"family": job.family}))
        elif have + lendable == 0:
            misses.append((2, Pending.NO_SUCH_CARD, facts | {"pool": pool}))
        elif not _memory(bench, card, job.memory_gb):
            misses.append((3, Pending.MEMORY, facts | {"memory_gb": job.memory_gb}))
        elif have + lendable < job.gang_min or not _holds(bench, state, card):
            misses.append((4, Pending.GANG_TOO_LARGE, facts | {"have": have, "lendable": lendable,
                                                               "widest": job.widest.name.lower()}))
        elif not bench.ledger.could_admit(job.queue, card, job.family, job.gang_min, _to_come(bench, healed=True)):
            misses.append((5, Pending.QUOTA_LIMIT, facts | {"queue": job.queue}))
        elif (bench.devices.get(card, 0) + lendable < job.gang_min or not bench.ledger.could_admit(
                job.queue, card, job.family, job.gang_min, _to_come(bench, healed=False))):
            misses.append((6, Pending.NOT_HEALTHY, facts | {"healthy": bench.devices.get(card, 0)}))
        else:
            able.append(card)
    if able:
        return able, None
    _, code, facts = max(misses, key=lambda miss: miss[0])
    return [], Verdict(job.id, code, facts | {"rejected": "; ".join(f"{f['card']}: {c.value}" for _, c, f in misses)})


def _without_loans(bench: Bench, state: JobState, card: str) -> Verdict | None:
    """Why the job cannot have this card: the pool's own do not make a gang, and lent ones are not for it."""
    job, key = state.job, (bench.pool.name, card)
    healthy = bench.picture.healthy.get(key, 0)
    if healthy >= job.gang_min:
        return None
    lengths_s = [duration_s(bench.world, state, card, devices) for devices in (job.gang_min, job.gang_max)]
    misses = [no_loan(bench, state, length_s) for length_s in lengths_s]
    if None in misses:
        return None
    facts: dict[str, object] = {"card": card, "needs": job.gang_min}
    if bench.picture.inventory.get(key, 0) >= job.gang_min:
        return Verdict(job.id, Pending.NOT_HEALTHY, facts | {"healthy": healthy})
    rules, code = bench.world.config.rules, misses[0]
    assert code is not None
    return Verdict(job.id, code, facts | {
        "have": healthy, "takes_s": lengths_s[0], "is_assumed": job.work_unit_s is None,
        "promised_s": rules.promised_min_s, "restart_s": job.checkpoint.restart_s if job.checkpoint else 0.0,
        "recalls": state.recalls})


def _to_come(bench: Bench, *, healed: bool) -> dict[str, int]:
    """Card → devices that the pool does not have and may hope for: lendable ones, and its own that are unhealthy now
    once they are `healed`."""
    pool, picture = bench.pool.name, bench.picture
    hoped = dict(_lendable(bench))
    for card in bench.devices if healed else ():
        own = picture.inventory.get((pool, card), 0) + picture.borrowed_in.get((pool, card), 0)
        hoped[card] = hoped.get(card, 0) + own - bench.devices[card]
    return hoped


def _lendable_devices(bench: Bench, card: str) -> int:
    """Devices of the card that inference pools could lend at most: what a job may hope for."""
    return _lendable(bench).get(card, 0)


def _lendable(bench: Bench) -> dict[str, int]:
    if bench.pool.kind is not PoolKind.TRAINING:
        return {}
    world = bench.world
    known: dict[str, int] | None = world.memo.get("lendable")
    if known is None:
        known = world.memo["lendable"] = {}
        for backend in world.backends.values():
            if backend.name not in world.loans:
                known[backend.card] = known.get(backend.card, 0) + len(backend.devices)
    return known


def _holds(bench: Bench, state: JobState, card: str) -> bool:
    """Whether the gang could be placed, with its memory and within its level, if every device were there and idle. No
    gang spans sites, so it makes no difference where the data is."""
    job = state.job
    known: dict[object, bool] = bench.world.memo.setdefault("holds", {})
    alike = (bench.pool.name, card, job.gang_min, job.memory_gb, job.widest)
    if alike not in known:
        free = memory_fits(bench.nodes, _everything(bench, card), job.memory_gb)
        known[alike] = place(bench.nodes, free, job.gang_min, job.widest) is not None
    return known[alike]


def _everything(bench: Bench, card: str) -> Free:
    """All devices of a card that the pool has, has borrowed or might be lent, whatever they do now."""
    world, pool = bench.world, bench.pool
    known: dict[tuple[str, str], Free] = world.memo.setdefault("everything", {})
    if (pool.name, card) not in known:
        devices = {device for node in world.nodes.values() if (node.pool, node.card) == (pool.name, card)
                   for device in node.device_ids}
        devices.update(device for loan in world.loans.values() if (loan.borrower, loan.card) == (pool.name, card)
                       for device in loan.devices)
        if pool.kind is PoolKind.TRAINING:
            devices.update(device for backend in world.backends.values() if backend.card == card
                           for device in backend.devices)
        known[pool.name, card] = grouped(sorted(devices))
    return known[pool.name, card]


def _memory(bench: Bench, card: str, memory_gb: float) -> bool:
    known: dict[str, float] | None = bench.world.memo.get("memory")
    if known is None:
        known = bench.world.memo["memory"] = {}
        for node in bench.nodes.values():
            known[node.card] = max(known.get(node.card, 0.0), node.memory_gb)
    return known.get(card, 0.0) >= memory_gb
