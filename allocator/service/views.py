"""Documents about a world for people and programs: what is unknown is null, times are seconds with their unit."""

from collections.abc import Iterable, Mapping
from typing import Any

from allocator.accounting import statement
from allocator.estimate import expected_end_s
from allocator.lending import keeps
from allocator.loan.loan import Loan
from allocator.loan.states import OWNER
from allocator.model.inventory import Condition
from allocator.model.jobs import JobState
from allocator.model.pools import Pool, PoolKind, Quota, pool_of_queue
from allocator.model.world import World
from allocator.picture import Ledger, ledger_of, picture_of
from allocator.queueing.bench import Verdict
from allocator.reasons import Pending
from allocator.store.history import phase_of
from allocator.store.journal import PastMove
from allocator.why import Answer, answer, verdicts

Document = dict[str, Any]


def jobs_document(world: World, now_s: float) -> list[Document]:
    """Every job that is not over, with why it waits where it does."""
    found = verdicts(world, now_s)
    return [job_document(world, state, now_s, found) for state in world.jobs.values()]


def job_document(world: World, state: JobState, now_s: float, why: Mapping[str, Verdict]) -> Document:
    job = state.job
    run = world.runs.get(state.run) if state.run else None
    found: Document = {
        "job": job.id, "state": phase_of(world, state).value, "queue": job.queue, "kind": job.kind.value,
        "family": job.family, "cards": list(job.cards), "gang": [job.gang_min, job.gang_max],
        "priority": job.priority, "submitted_s_ago": now_s - job.submitted_s, "attempts": state.attempts,
        "recalls": state.recalls, "crashes": state.crashes,
        "unsaved": state.unsaved, "cancelled": state.cancelled,
        "work_unit_s": job.work_unit_s, "done_unit_s": state.done_unit_s, "run": None, "why": None,
    }
    if run is None:
        found["waiting_s"] = now_s - state.waiting_since_s
        verdict = why.get(job.id, Verdict(job.id, Pending.NEXT_TICK))
        found["why"] = answer_document(answer(verdict, now_s))
    else:
        loans = sorted({world.loaned[device] for device in run.devices if device in world.loaned})
        found["run"] = {
            "run": run.id, "epoch": run.epoch, "pool": run.pool, "card": run.card, "devices": list(run.devices),
            "phase": run.phase.value, "for_s": now_s - run.started_s, "ends_in_s": expected_end_s(run, now_s) - now_s,
            "checkpoint_age_s": run.safe_age_s(now_s), "loans": loans, "acknowledged": run.acknowledged,
            "stop_in_s": None if run.stop_by_s is None else run.stop_by_s - now_s,
            "stop_reason": run.stop_reason or None, "reachable": not run.unreachable, "config": run.config,
            "coefficients": run.coefficients,
        }
    return found


def answer_document(found: Answer) -> Document:
    facts = {key: value for key, value in found.facts.items() if isinstance(value, str | int | float | bool)}
    return {"code": found.code.value, "sentence": found.sentence, "facts": facts}


def pools_document(world: World, now_s: float) -> list[Document]:
    """Every pool with its cards: what it has, what of it is free, lent, borrowed, offered."""
    picture = picture_of(world, now_s)
    found = []
    for pool in world.config.pools:
        cards = [_card_document(world, pool, card, now_s) for card in picture.cards(pool.name)]
        running = [run for run in world.runs.values() if run.pool == pool.name]
        queues = {queue for queue, root in _roots(world).items() if root == pool.name}
        found.append({
            "pool": pool.name, "kind": pool.kind.value, "currency": pool.currency.value,
            "open": pool.name in picture.open_pools, "cards": cards, "running": len({run.job for run in running}),
            "waiting": sum(state.run is None and state.job.queue in queues for state in world.jobs.values()),
        })
    return found


def _roots(world: World) -> dict[str, str]:
    return {queue.name: pool.name for queue in world.config.queues
            if (pool := pool_of_queue(world.config, queue.name)) is not None}


def _card_document(world: World, pool: Pool, card: str, now_s: float) -> Document:
    picture = picture_of(world, now_s)
    key = (pool.name, card)
    used = sum(len(run.devices) for run in world.runs.values() if (run.pool, run.card) == key)
    table = world.coefficients
    units = sum(len(run.devices) * world.tables.get(run.coefficients, table).coefficient(run.card, run.family)
                for run in world.runs.values() if (run.pool, run.card) == key)
    supply = world.supplies.get(key)
    kept = keeps(world, *key, now_s)
    replicas = [backend for backend in world.backends.values() if (backend.pool, backend.card) == key]
    return {
        "card": card, "devices": picture.inventory.get(key, 0), "healthy": picture.healthy.get(key, 0),
        "free": sum(map(len, picture.free.get(key, {}).values())), "used": used, "used_units": units,
        "lent": picture.lent_out.get(key, 0), "borrowed": picture.borrowed_in.get(key, 0),
        "offered": picture.offered_in.get(key, 0), "capacity": picture.capacity(*key),
        "capacity_units": picture.capacity(*key) * table.scalar(card),
        "replicas": len(replicas) if pool.kind is PoolKind.INFERENCE else None,
        "serving": sum(backend.state.value == "serving" for backend in replicas) if replicas else None,
        "lendable": supply.lendable if supply else None, "spare": supply.spare if supply else None,
        "supply_age_s": now_s - supply.at_s if supply else None,
        "most_out": kept.most_out if kept else None, "kept_for_s": kept.until_s - now_s if kept else None,
    }


def loans_document(world: World, now_s: float) -> list[Document]:
    """The loans that are not over, and the lost ones."""
    return [_loan_document(world, loan, now_s) for loan in world.loans.values()]


def _loan_document(world: World, loan: Loan, now_s: float) -> Document:
    runs = sorted({world.holders[device] for device in loan.devices if device in world.holders})
    due_s = loan.recall_deadline_s
    return {
        "loan": loan.id, "epoch": loan.epoch, "state": loan.state.value, "owner": OWNER[loan.state].value,
        "lender": loan.lender, "borrower": loan.borrower, "card": loan.card, "devices": list(loan.devices),
        "jobs": [world.runs[run].job for run in runs], "offered_s_ago": now_s - loan.offered_s,
        "lent_s_ago": None if loan.lent_s is None else now_s - loan.lent_s,
        "promised_for_s": loan.promised_until_s - now_s, "grace_s": loan.grace_s,
        "recalled_s_ago": None if loan.recalled_s is None else now_s - loan.recalled_s,
        "due_in_s": None if due_s is None else due_s - now_s, "recall_reason": loan.recall_reason or None,
        "overdue": loan.overdue_s is not None, "coefficients": loan.coefficients,
    }


def quota_document(world: World, now_s: float) -> list[Document]:
    """Every queue with its promises and what it uses of them, by key; `available` may be negative."""
    found = []
    for pool in world.config.pools:
        if pool.kind is PoolKind.INFERENCE:
            continue
        ledger = ledger_of(world, pool, now_s)
        found += [_queue_document(ledger, pool, name) for name in ledger.tree.queues]
    used: dict[str, float] = {}
    for line in statement(world, now_s):
        used[line.queue] = used.get(line.queue, 0.0) + line.unit_s
    for document in found:
        document["charged_unit_s"] = used.get(document["queue"], 0.0)
    return found


def _queue_document(ledger: Ledger, pool: Pool, name: str) -> Document:
    queue = ledger.tree.queues[name]
    share = ledger.share(name)
    keys = []
    for key, book in ledger.books.items():
        quota = queue.quotas.get(key, Quota(0.0))
        keys.append({
            "key": key, "nominal": quota.nominal, "lending_limit": quota.lending_limit,
            "borrowing_limit": quota.borrowing_limit, "used": book.usage.get(name, 0.0),
            "borrowed": book.borrowed(name), "available": book.available(name)})
    return {"queue": name, "parent": queue.parent, "pool": pool.name, "currency": pool.currency.value,
            "weight": queue.weight, "share": share if share < float("inf") else None, "keys": keys}


def nodes_document(world: World) -> list[Document]:
    """Every machine, and what may be believed of its devices."""
    return [{
        "node": node.name, "card": node.card, "pool": node.pool, "labels": dict(node.labels),
        "devices": [{"device": device, "condition": world.conditions.get(device, Condition.HEALTHY).value,
                     "run": world.holders.get(device), "loan": world.loaned.get(device)}
                    for device in node.device_ids],
    } for node in world.nodes.values()]


def moves_document(moves: Iterable[PastMove], name: str) -> list[Document]:
    """Rows of the history; `name` says what they are about: `job` or `loan`."""
    return [{name: move.name, "epoch": move.epoch, "was": move.was or None, "became": move.became,
             "at_unix_s": move.wall_s, "at_s": move.at_s, "reason": move.reason, **move.figures} for move in moves]
