"""Several planners on one world, without locks: optimistic versions after Omega (Schwarzkopf et al., EuroSys 2013).

A planner reads a world, plans at its leisure, and proposes. If the world has not moved, the proposal is taken as it is.
If it has, each group of events that belong together (a gang's start; a reclaim with its claim; the offers of a gang)
is tried against the world of now: it goes in whole, or it is refused whole and planned again. What is tried is what
`apply` tries, plus the quotas and the invariants of every step, so nothing is booked twice, lent beyond what can be
spared or taken from a guarantee, whatever anyone believed.

The service plans off its loop by this: what arrives while it thinks makes parts of its plan conflicts, and no more.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import msgspec

from allocator.apply import consider
from allocator.events import DECIDED, ClaimMade, Event, LoanOffered, RunPlaced, StopOrdered
from allocator.invariants import step_violations
from allocator.model.world import World
from allocator.queueing.bench import ledger_at
from allocator.reasons import Reason


@dataclass(frozen=True, slots=True)
class Proposal:
    """What one planner wants, on the world that it saw."""

    planner: str
    version: int
    """Of the world that it was planned on."""
    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class Commit:
    """What became of a proposal."""

    world: World
    taken: tuple[Event, ...]
    """As they go to the journal: with the epochs that they got."""
    conflicts: tuple[tuple[Event, str], ...]
    """What was refused, and why: to be planned again on `world`."""


def commit(world: World, proposal: Proposal) -> Commit:
    """Takes of a proposal what the world of now allows."""
    taken: list[Event] = []
    conflicts: list[tuple[Event, str]] = []
    for group in _groups(proposal.events):
        result = _try(world, group, fresh=world.version == proposal.version and not conflicts)
        if isinstance(result, str):
            conflicts.append((group[0], result))
        else:
            world, stamped = result
            taken += stamped
            proposal = replace(proposal, version=proposal.version + len(stamped))
    return Commit(world, tuple(taken), tuple(conflicts))


def _groups(events: Iterable[Event]) -> list[list[Event]]:
    """Events that only make sense together: stops or offers, and the claim which they are for."""
    groups: list[list[Event]] = []
    open_group: list[Event] = []
    for event in events:
        for_claim = isinstance(event, LoanOffered) or (
            isinstance(event, StopOrdered) and event.why.reason in (Reason.RECLAIMED, Reason.PRIORITY))
        if for_claim:
            open_group.append(event)
        elif isinstance(event, ClaimMade):
            groups.append([*open_group, event])
            open_group = []
        else:
            groups.append([event])
    return [*groups, open_group] if open_group else groups


def _try(world: World, group: list[Event], *, fresh: bool) -> tuple[World, list[Event]] | str:
    stamped: list[Event] = []
    for event in group:
        if not fresh:
            event = _restamped(world, event)
            refusal = _outdated(world, event) or _over_quota(world, event)
            if refusal is not None:
                return refusal
        after = consider(world, event)
        if isinstance(after, str):
            return after
        if not fresh and (found := step_violations(world, event, after)):
            return "; ".join(f"{fault.rule}: {fault.detail}" for fault in found)
        world = after
        stamped.append(event)
    return world, stamped


def _restamped(world: World, event: Event) -> Event:
    """The event with the next epoch: somebody else may have drawn the one that it was planned with."""
    epoch = world.epoch + 1
    if isinstance(event, RunPlaced):
        run = replace(event.run, epoch=epoch, id=f"{event.run.job}.{epoch}")
        return msgspec.structs.replace(event, run=run)
    if isinstance(event, LoanOffered):
        return msgspec.structs.replace(event, loan=replace(event.loan, epoch=epoch))
    return event


def _outdated(world: World, event: Event) -> str | None:
    """A decision names what it was decided by (I15); under another declaration it has to be thought over."""
    if not isinstance(event, DECIDED):
        return None
    for what, planned, now in (("config", event.why.config, world.config.version),
                               ("labels", event.why.labels, world.labels),
                               ("coefficients", event.why.coefficients, world.active)):
        if planned != now:
            return f"planned under {what} {planned}, {now} is in force"
    return None


def _over_quota(world: World, event: Event) -> str | None:
    """Two gangs, each within the quota, may together be over it (F13): asked again on the world of now."""
    if isinstance(event, RunPlaced) and event.why.reason is not Reason.CLAIM_READY:
        run = event.run
        queue, card, family, pool_name, count = run.queue, run.card, run.family, run.pool, len(run.devices)
    elif isinstance(event, ClaimMade):
        claim = event.claim
        state = world.jobs.get(claim.job)
        if state is None:
            return f"job {claim.job} is gone"
        queue, card, family = state.job.queue, claim.card, state.job.family
        pool_name, count = claim.pool, len(claim.devices)
    else:
        return None
    pool = world.config.pool(pool_name)
    if pool is None:
        return f"pool {pool_name} is gone"
    if not ledger_at(world, pool, event.at_s).admits(queue, card, family, count):
        return f"queue {queue}: {count} x {card} are over its quota by now"
    return None
