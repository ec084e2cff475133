"""What must hold in every world and over every step: I1 to I15, each checked on its own terms.

`violations` looks at one world, `step_violations` at what one event did. The soak run, the replay tool and the service
ask them; a non-empty answer is a fault of this program, never of a caller. Checks recount from the runs, loans and
nodes themselves and use no figure that the planner uses, wherever the thing can be counted.
"""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from allocator.events import (
    DECIDED,
    ClaimMade,
    Decided,
    DevicesVacated,
    Event,
    KillOrdered,
    LoanOffered,
    LoanRecalled,
    RunPlaced,
    StopOrdered,
)
from allocator.lending import away, offered, staying
from allocator.loan.states import AWAY, RECALLABLE, LoanState
from allocator.model.inventory import Condition, node_name
from allocator.model.pools import PoolKind
from allocator.model.world import World
from allocator.picture import ledger_of, picture_of
from allocator.queueing.bench import ledger_at
from allocator.reasons import Reason


class Violation(NamedTuple):
    rule: str
    detail: str


def violations(world: World) -> list[Violation]:
    """What is wrong with a world; nothing, if all is well."""
    return [*_owners(world), *_conservation(world), *_gangs(world), *_loans(world), *_ledgers(world)]


def _owners(world: World) -> Iterator[Violation]:
    """I1: each device has exactly one owner, one run, one claim. I14: who may be where."""
    for what, held in (("run", [device for run in world.runs.values() for device in run.devices]),
                       ("loan", [device for loan in world.loans.values() for device in loan.devices]),
                       ("claim", [device for claim in world.claims.values() for device in claim.devices])):
        if len(held) != len(set(held)):
            twice = [device for device, count in Counter(held).items() if count > 1]
            yield Violation("I1", f"in more than one {what}: {', '.join(twice)}")
    loan_at = {device: loan for loan in world.loans.values() for device in loan.devices}
    for run in world.runs.values():
        for device in run.devices:
            node = world.nodes.get(node_name(device))
            loan = loan_at.get(device)
            if node is None:
                yield Violation("I1", f"run {run.id} holds {device}, which is unknown")
            elif loan is None and node.pool != run.pool:
                yield Violation("I1", f"run {run.id} of {run.pool} holds {device} of {node.pool}")
            elif loan is not None and loan.borrower != run.pool:
                yield Violation("I1", f"run {run.id} of {run.pool} holds {device}, lent to {loan.borrower}")
            if node is not None and run.pool != node.pool and _kind(world, node.pool) is PoolKind.ENCLAVE:
                yield Violation("I14", f"run {run.id} of {run.pool} is in enclave {node.pool}")


def _kind(world: World, pool: str | None) -> PoolKind | None:
    declared = world.config.pool(pool)
    return declared.kind if declared else None


def _conservation(world: World) -> Iterator[Violation]:
    """I2: no device appears or vanishes, in the conditions or between the pools."""
    known = {device for node in world.nodes.values() for device in node.device_ids}
    if not world.conditions.keys() <= known:
        yield Violation("I2", "a condition is noted of a device that does not exist")
    if any(condition is Condition.HEALTHY for condition in world.conditions.values()):
        yield Violation("I2", "a healthy device is noted as an exception")
    picture = picture_of(world, world.now_s)
    owned: dict[str, set[str]] = {}
    for node in world.nodes.values():
        mine = owned.setdefault(node.card, set())
        if node.pool is not None:
            mine.update(node.device_ids)
    for card, devices in owned.items():
        healthy = len(devices - world.conditions.keys())
        pools = sum(picture.capacity(pool.name, card) for pool in world.config.pools)
        if pools != healthy:
            yield Violation("I2", f"{card}: {healthy} are healthy, the pools have {pools}")


def _gangs(world: World) -> Iterator[Violation]:
    """I3: one card type a job, from its list. I4: gangs are whole. And each run has its job, each job its run."""
    for run in world.runs.values():
        state = world.jobs.get(run.job)
        if state is None or state.run != run.id:
            yield Violation("I4", f"run {run.id} has no job that knows of it")
            continue
        cards = {world.nodes[node_name(device)].card for device in run.devices if node_name(device) in world.nodes}
        if cards != {run.card} or run.card not in state.job.cards:
            yield Violation("I3", f"run {run.id} is on {', '.join(sorted(cards))}")
        if not run.stopping and not state.job.gang_min <= len(run.devices) - len(run.leaving) <= state.job.gang_max:
            yield Violation("I4", f"run {run.id} has {len(run.devices)} devices, {len(run.leaving)} leaving")
        if run.epoch > world.epoch:
            yield Violation("I7", f"run {run.id} has epoch {run.epoch}, the last one given out is {world.epoch}")
        memory_gb = min((world.nodes[node_name(device)].memory_gb for device in run.devices), default=0.0)
        if memory_gb < state.job.memory_gb:
            yield Violation("I3", f"run {run.id} needs {state.job.memory_gb} GB and has {memory_gb}")
    for state in world.jobs.values():
        if state.run is not None and state.run not in world.runs:
            yield Violation("I4", f"job {state.job.id} believes in run {state.run}")
        if state.run is not None and state.job.id in world.claims:
            yield Violation("I1", f"job {state.job.id} has a run and a claim")


def _loans(world: World) -> Iterator[Violation]:
    """I5: nobody is on devices that go home. I6: back, or loudly overdue. I7: epochs. I14: who lends."""
    held = {device for run in world.runs.values() for device in run.devices}
    tick_s = world.config.rules.tick_s
    for loan in world.loans.values():
        if loan.state in (LoanState.RETURNING, LoanState.OFFERED) and not held.isdisjoint(loan.devices):
            yield Violation("I5", f"loan {loan.id} is {loan.state.value} with a run on it")
        due_s = loan.recall_deadline_s
        if due_s is not None and world.now_s > due_s + tick_s and loan.overdue_s is None and loan.state in RECALLABLE:
            yield Violation("I6", f"loan {loan.id} was due at {due_s:g} and is {loan.state.value} at {world.now_s:g}")
        if loan.epoch > world.epoch:
            yield Violation("I7", f"loan {loan.id} has epoch {loan.epoch}, the last one given out is {world.epoch}")
        if due_s is not None and loan.state is LoanState.LENT:
            yield Violation("I7", f"loan {loan.id} is lent with a recall on it")
        for device in loan.devices:
            node = world.nodes.get(node_name(device))
            if node is None or node.pool != loan.lender:
                yield Violation("I1", f"loan {loan.id} of {loan.lender} has {device} of {node.pool if node else None}")
        if _kind(world, loan.borrower) is PoolKind.ENCLAVE or _kind(world, loan.lender) is PoolKind.ENCLAVE:
            yield Violation("I14", f"loan {loan.id} involves an enclave")


def _ledgers(world: World) -> Iterator[Violation]:
    """I8: a queue is charged with all its runs, wherever they stand, and nobody else is."""
    picture = picture_of(world, world.now_s)
    running: dict[tuple[str, str], dict[str, int]] = {}
    for run in world.runs.values():
        by_queue = running.setdefault((run.pool, run.card), {})
        by_queue[run.queue] = by_queue.get(run.queue, 0) + len(run.devices)
    for pool in world.config.pools:
        if pool.kind is PoolKind.INFERENCE or pool.currency.value != "cards":
            continue
        ledger = ledger_of(world, pool, world.now_s)
        for card in picture.cards(pool.name):
            counted = {queue: used for queue, used in ledger.books[card].own.items() if used}
            runs = running.get((pool.name, card), {})
            if counted != runs:
                yield Violation("I8", f"pool {pool.name}, {card}: charged {counted}, running {runs}")


def step_violations(before: World, event: Event, after: World) -> list[Violation]:
    """What is wrong with a step: an event, the world before it and the one after."""
    found = [*_time_and_epochs(before, after), *_loan_steps(before, event, after), *_charges(before, event, after)]
    if isinstance(event, DECIDED):
        found += _reasons(before, event)
        found += _decisions(before, event, after)
    return found


def _time_and_epochs(before: World, after: World) -> Iterator[Violation]:
    if after.epoch < before.epoch:
        yield Violation("I7", f"the epoch fell from {before.epoch} to {after.epoch}")
    if after.now_s < before.now_s or after.version < before.version:
        yield Violation("I7", "time or version went back")


def _loan_steps(before: World, event: Event, after: World) -> Iterator[Violation]:
    if after.loans is before.loans:
        return
    for name, loan in before.loans.items():
        then = after.loans.get(name)
        if then is None:
            held = {device for run in after.runs.values() for device in run.devices}
            if not held.isdisjoint(loan.devices):
                yield Violation("I5", f"loan {name} ended with a run on its devices")
            continue
        if then.epoch < loan.epoch:
            yield Violation("I7", f"loan {name}: its epoch fell")
        if then.epoch != loan.epoch:
            continue
        if then.state is LoanState.LENT and loan.state not in (LoanState.OFFERED, LoanState.LENT):
            yield Violation("I7", f"loan {name} went from {loan.state.value} back to lent")
        if loan.recall_deadline_s is not None and (
                then.recall_deadline_s is None or then.recall_deadline_s > loan.recall_deadline_s):
            yield Violation("I6", f"loan {name}: its deadline was lengthened by {type(event).__name__}")
        if loan.overdue_s is not None and then.overdue_s != loan.overdue_s:
            yield Violation("I6", f"loan {name}: its alarm was taken back")


def _charges(before: World, event: Event, after: World) -> Iterator[Violation]:
    """I10: charged is what was let go, for as long as it was held. I5: devices are let go by proof only."""
    if after.runs is before.runs and after.served_ms is before.served_ms:
        return
    owed: Counter[tuple[str, str, str, str]] = Counter()
    for name, run in before.runs.items():
        if after.runs.get(name) is run:
            continue
        left = set(after.runs[name].devices) if name in after.runs else set()
        gone = [device for device in run.devices if device not in left]
        if gone:
            owed[run.queue, run.card, run.family, run.coefficients] += len(gone) * max(
                0, round((event.at_s - run.started_s) * 1000.0))
            if isinstance(event, DevicesVacated):
                if not event.evidence or not set(gone) <= set(event.devices):
                    yield Violation("I5", f"run {name} let go of devices without proof")
            elif any(after.conditions.get(device) is not Condition.OFFLINE for device in gone):
                yield Violation("I5", f"{type(event).__name__} took devices from run {name}")
    charged = {key: total - before.served_ms.get(key, 0) for key, total in after.served_ms.items()
               if total != before.served_ms.get(key, 0)}
    if charged != {key: total for key, total in owed.items() if total}:
        yield Violation("I10", f"charged {charged}, owed {dict(owed)}")


def _reasons(before: World, event: Decided) -> Iterator[Violation]:
    why = event.why
    if (why.config, why.labels, why.coefficients) != (before.config.version, before.labels, before.active):
        yield Violation("I15", f"{type(event).__name__} names other versions than those in force")
    if not isinstance(why.reason, Reason):
        yield Violation("I15", f"{type(event).__name__} has no reason")


def _decisions(before: World, event: Decided, after: World) -> Iterator[Violation]:
    match event:
        case LoanOffered():
            yield from _floor(after, event.loan.lender, event.loan.card, "offered")
            yield from _kept(after, event)
            if any(_kind(before, before.nodes[node_name(device)].pool) is not PoolKind.INFERENCE
                   for device in event.loan.devices):
                yield Violation("I14", f"loan {event.loan.id} offers what is not the inference pool's")
        case RunPlaced():
            yield from _placement(before, event, after)
        case StopOrdered() if event.why.reason is Reason.RECLAIMED:
            yield from _reclaim(before, event)
        case ClaimMade() if event.why.reason is Reason.RECLAIMED:
            claim, job = event.claim, after.jobs[event.claim.job].job
            pool = after.config.pool(claim.pool)
            if pool is not None and ledger_at(after, pool, event.at_s).borrows(job.queue, claim.card, "", 0):
                yield Violation("I13", f"job {job.id} takes back more than its queue is owed")
        case LoanRecalled():
            loan = after.loans.get(event.loan)
            if (loan is not None and loan.recall_deadline_s == event.deadline_s
                    and event.why.reason is not Reason.P99_EMERGENCY
                    and event.deadline_s < event.at_s + loan.grace_s - 1e-6):
                yield Violation("I6", f"loan {loan.id}: less than the promised grace, without an emergency")
        case KillOrdered():
            run = before.runs[event.run]
            by_s = run.leave_by_s if run.stop_by_s is None else run.stop_by_s
            if by_s is None or event.at_s < by_s - before.config.rules.kill_margin_s - 1e-6:
                yield Violation("I6", f"run {run.id} is killed before its time")


def _kept(world: World, event: LoanOffered) -> Iterator[Violation]:
    """I11: nor than people have left out when they called back."""
    key = (event.loan.lender, event.loan.card)
    kept = world.kept.get(key)
    out = len(staying(world, *key)) + len(offered(world, *key))
    if kept is not None and event.at_s < kept.until_s and out > kept.most_out:
        yield Violation("I11", f"{out} {key[1]} of {key[0]} are out, {kept.most_out} may be after a recall by hand")


def _floor(world: World, pool: str, card: str, what: str) -> Iterator[Violation]:
    """I11: never more away than the router says can be."""
    supply = world.supplies.get((pool, card))
    out = away(world, pool, card) + (len(offered(world, pool, card)) if what == "offered" else 0)
    if supply is None or out > supply.lendable:
        yield Violation("I11", f"{out} {card} of {pool} are {what} or away, {supply.lendable if supply else 0} may be")


def _placement(before: World, event: RunPlaced, after: World) -> Iterator[Violation]:
    run = event.run
    for device in run.devices:
        if device in before.conditions:
            yield Violation("I14", f"run {run.id} is placed on {device}, which is {before.conditions[device].value}")
        if device in {other for claim in before.claims.values() if claim.job != run.job for other in claim.devices}:
            yield Violation("I1", f"run {run.id} is placed on {device}, which is kept for another")
        loan = before.loans.get(before.loaned.get(device, ""))
        if loan is not None:
            if loan.state in AWAY and loan.state is not LoanState.LENT:
                yield Violation("I7", f"run {run.id} is placed on loan {loan.id}, which is {loan.state.value}")
            if loan.state is LoanState.OFFERED:
                yield from _floor(after, loan.lender, loan.card, "lent")
    pool = after.config.pool(run.pool)
    if pool is None or pool.name not in picture_of(before, event.at_s).open_pools:
        yield Violation("I14", f"run {run.id} is placed in pool {run.pool}, which is closed")
    elif event.why.reason is not Reason.CLAIM_READY and not ledger_at(before, pool, event.at_s).admits(
            run.queue, run.card, run.family, len(run.devices)):
        yield Violation("I8", f"run {run.id} is over the quota of {run.queue}")


def _reclaim(before: World, event: StopOrdered) -> Iterator[Violation]:
    run = before.runs[event.run]
    pool = before.config.pool(run.pool)
    if pool is not None and not ledger_at(before, pool, event.at_s).borrows(run.queue, run.card, run.family, 0):
        yield Violation("I9", f"run {run.id} is reclaimed from {run.queue}, which keeps to its guarantee")
