"""What time alone brings about: kills, alarms, stops that are due, pools that end. Each pass looks at all of it."""

from collections.abc import Iterator

from allocator.applying.inventory import idle
from allocator.estimate import expected_end_s
from allocator.events import (
    ClaimDropped,
    Event,
    KillOrdered,
    LoanLost,
    LoanOverdue,
    NodeMoved,
    PoolEnding,
    ShrinkOrdered,
    StopOrdered,
)
from allocator.loan.loan import Loan
from allocator.loan.states import Facts, LoanState, Step, next_state
from allocator.model.jobs import Run, RunPhase
from allocator.model.pools import pool_of_queue
from allocator.model.world import Claim, World
from allocator.picture import picture_of, wanted_pools
from allocator.queueing.bench import why
from allocator.reasons import Reason


def deadlines(world: World, now_s: float) -> Iterator[Event]:
    """Kills shortly before a deadline, alarms at it, and writing off what stays overdue."""
    rules = world.config.rules
    for run in world.runs.values():
        by_s = run.leave_by_s if run.stop_by_s is None else run.stop_by_s
        if run.killed_s is None and by_s is not None and now_s >= by_s - rules.kill_margin_s:
            yield KillOrdered(at_s=now_s, run=run.id, epoch=run.epoch, why=why(world, Reason.KILL_MARGIN))
    for loan in world.loans.values():
        due_s = loan.recall_deadline_s
        if due_s is not None and now_s >= due_s and _applies(world, loan, Step.DUE):
            yield LoanOverdue(at_s=now_s, loan=loan.id, epoch=loan.epoch,
                              why=why(world, Reason.DEADLINE, loan.recall_reason))
        elif (loan.state is LoanState.OVERDUE and loan.overdue_s is not None
              and now_s >= loan.overdue_s + rules.quarantine_after_s and not world.is_empty(loan.devices)):
            yield LoanLost(at_s=now_s, loan=loan.id, epoch=loan.epoch, why=why(world, Reason.UNPROVABLE))


def _applies(world: World, loan: Loan, step: Step) -> bool:
    facts = Facts(loan.released, world.is_empty(loan.devices), loan.overdue_s is not None)
    return next_state(loan.state, step, facts) is not None


def stops(world: World, now_s: float) -> Iterator[Event]:
    """Orders to leave: for each run that has no right to its devices any more, and no order yet."""
    rules, wall_s = world.config.rules, world.wall_s(now_s)
    by_loan = _by_loan(world)
    for run in world.runs.values():
        reason = _stop_reason(world, run, wall_s)
        if reason is not None:
            if run.stop_by_s is None:
                yield StopOrdered(at_s=now_s, run=run.id, epoch=run.epoch, deadline_s=now_s + rules.grace_s,
                                  why=why(world, reason))
        elif run.id in by_loan:
            yield from _for_recall(world, run, by_loan[run.id], now_s)


def _by_loan(world: World) -> dict[str, list[Loan]]:
    """Run → the recalled loans that it stands on."""
    found: dict[str, list[Loan]] = {}
    for loan in world.loans.values():
        if loan.recall_deadline_s is None:
            continue
        for run in sorted({world.holders[device] for device in loan.devices if device in world.holders}):
            found.setdefault(run, []).append(loan)
    return found


def _stop_reason(world: World, run: Run, wall_s: float) -> Reason | None:
    state = world.jobs[run.job]
    if run.phase is RunPhase.EXITED:
        return Reason.LEFTOVERS
    if run.phase is RunPhase.BROKEN:
        return Reason.GANG_BROKEN
    if state.cancelled:
        return Reason.CANCELLED
    if state.job.closes_in_s(wall_s) is None:
        return Reason.WINDOW_CLOSED
    pool = world.config.pool(run.pool)
    if pool is not None and pool.ends_wall_s is not None and wall_s >= pool.ends_wall_s:
        return Reason.POOL_ENDED
    return None


def _for_recall(world: World, run: Run, loans: list[Loan], now_s: float) -> Iterator[Event]:
    """Gives the run notice for its earliest recall, unless it will be gone by then, as long as that can be believed."""
    by_s = min(loan.recall_deadline_s for loan in loans if loan.recall_deadline_s is not None)
    if run.stop_by_s is not None:
        if run.stop_by_s > by_s:
            yield StopOrdered(at_s=now_s, run=run.id, epoch=run.epoch, deadline_s=by_s,
                              why=why(world, Reason.LOAN_RECALLED, "earlier than before"))
        return
    margin_s = world.config.rules.kill_margin_s
    takes_s = run.checkpoint.takes_s if run.checkpoint else 0.0
    last_chance = now_s >= by_s - margin_s - takes_s - world.config.rules.tick_s
    if not last_chance and expected_end_s(run, now_s) <= by_s - margin_s:
        return
    recalled = {device for loan in loans for device in loan.devices}
    leaving = tuple(device for device in run.devices if device in recalled or device in run.leaving)
    detail = ", ".join(loan.id for loan in loans)
    if len(run.devices) - len(leaving) >= run.gang_min:
        if leaving != run.leaving or run.leave_by_s is None or run.leave_by_s > by_s:
            yield ShrinkOrdered(at_s=now_s, run=run.id, epoch=run.epoch, devices=leaving, deadline_s=by_s,
                                why=why(world, Reason.LOAN_RECALLED, detail))
    else:
        yield StopOrdered(at_s=now_s, run=run.id, epoch=run.epoch, deadline_s=by_s,
                          why=why(world, Reason.LOAN_RECALLED, detail))


def claims(world: World, now_s: float) -> Iterator[Event]:
    """Claims that cannot come true any more, or not in time."""
    for claim in world.claims.values():
        reason = _broken(world, claim, now_s) or (Reason.CLAIM_EXPIRED if now_s >= claim.until_s else None)
        if reason is not None:
            yield ClaimDropped(at_s=now_s, job=claim.job, why=why(world, reason))


def _broken(world: World, claim: Claim, now_s: float) -> Reason | None:
    pool = pool_of_queue(world.config, world.jobs[claim.job].job.queue)
    if pool is None or pool.name != claim.pool or pool.name not in picture_of(world, now_s).open_pools:
        return Reason.CLAIM_BROKEN
    for name in claim.loans:
        loan = world.loans.get(name)
        if loan is None or loan.state is not LoanState.OFFERED:
            return Reason.CLAIM_BROKEN
    loaned = world.loaned
    for device in claim.devices:
        if device in world.conditions:
            return Reason.CLAIM_BROKEN
        holder = world.holders.get(device)
        if holder is not None and not world.runs[holder].stopping:
            return Reason.CLAIM_BROKEN
        loan = world.loans.get(loaned[device]) if device in loaned else None
        if loan is not None and (loan.state not in (LoanState.OFFERED, LoanState.LENT) or
                                 loan.recall_deadline_s is not None):
            return Reason.CLAIM_BROKEN
    return None


def moves(world: World, now_s: float) -> Iterator[Event]:
    """Idle nodes go to the pool that wants them, and people hear of pools that end before they do."""
    wall_s = world.wall_s(now_s)
    wanted = wanted_pools(world, now_s)
    for node in world.nodes.values():
        pool = wanted[node.name]
        if pool != node.pool and idle(world, node):
            ended = world.config.pool(node.pool)
            over = ended is not None and ended.ends_wall_s is not None and wall_s >= ended.ends_wall_s
            yield NodeMoved(at_s=now_s, node=node.name, pool=pool,
                            why=why(world, Reason.POOL_ENDED if over else Reason.LABELS))
    for ending in world.config.pools:
        if (ending.ends_wall_s is not None and ending.name not in world.warned
                and wall_s >= ending.ends_wall_s - world.config.rules.warn_before_s):
            yield PoolEnding(at_s=now_s, pool=ending.name, why=why(world, Reason.POOL_ENDING, ending.then_pool or ""))
