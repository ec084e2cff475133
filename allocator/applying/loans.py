"""Events about loans. Every step goes through the table of `allocator.loan.states`; there is no other way."""

from dataclasses import replace

from allocator.events import (
    HandBackProbed,
    LoanGivenBack,
    LoanLost,
    LoanOffered,
    LoanOverdue,
    LoanRecalled,
    LoanWithdrawn,
)
from allocator.loan.loan import Loan, recalled, stepped
from allocator.loan.states import TERMINAL, LoanState, Step
from allocator.model.inventory import Condition, Kept
from allocator.model.pools import PoolKind
from allocator.model.world import World
from allocator.reasons import Reason


def loan_offered(world: World, event: LoanOffered) -> World | str:
    loan = event.loan
    backend = world.backends.get(loan.id)
    if backend is None or (backend.pool, backend.card, backend.devices) != (loan.lender, loan.card, loan.devices):
        return f"loan {loan.id}: the backend is unknown or not as offered"
    if loan.id in world.loans:
        return f"loan {loan.id}: it is on loan already"
    if loan.epoch <= world.epoch:
        return f"loan {loan.id}: epoch {loan.epoch} was given out before"
    lender, borrower = world.config.pool(loan.lender), world.config.pool(loan.borrower)
    if lender is None or lender.kind is not PoolKind.INFERENCE:
        return f"loan {loan.id}: pool {loan.lender} does not lend"
    if borrower is None or borrower.kind is not PoolKind.TRAINING:
        return f"loan {loan.id}: pool {loan.borrower} does not borrow"
    if any(device in world.conditions for device in loan.devices) or not world.is_empty(loan.devices):
        return f"loan {loan.id}: a device is not healthy, or not free"
    return world.evolved(loans={**world.loans, loan.id: loan}, epoch=loan.epoch)


def loan_withdrawn(world: World, event: LoanWithdrawn) -> World | str:
    return _moved(world, event.loan, event.epoch, Step.WITHDRAWN, event.at_s)


def loan_given_back(world: World, event: LoanGivenBack) -> World | str:
    return _moved(world, event.loan, event.epoch, Step.GIVEN_BACK, event.at_s)


def loan_overdue(world: World, event: LoanOverdue) -> World | str:
    loan = world.loans.get(event.loan)
    if loan is not None and (loan.recall_deadline_s is None or event.at_s < loan.recall_deadline_s):
        return f"loan {event.loan}: its deadline is not here"
    return _moved(world, event.loan, event.epoch, Step.DUE, event.at_s)


def loan_lost(world: World, event: LoanLost) -> World | str:
    return _moved(world, event.loan, event.epoch, Step.UNPROVABLE, event.at_s)


def hand_back_probed(world: World, event: HandBackProbed) -> World | str:
    step = Step.PROBED_GOOD if event.good else Step.PROBED_BAD
    return _moved(world, event.loan, event.epoch, step, event.at_s)


def loan_recalled(world: World, event: LoanRecalled) -> World | str:
    loan = world.loans.get(event.loan)
    if loan is None or loan.epoch != event.epoch:
        return f"loan {event.loan}: epoch {event.epoch} is over or unknown"
    if event.deadline_s < event.at_s + loan.grace_s and event.why.reason is not Reason.P99_EMERGENCY:
        known_s = loan.recall_deadline_s
        if known_s is None or event.deadline_s < known_s:
            return f"loan {loan.id}: the deadline is closer than the promised grace of {loan.grace_s:g} s"
    after = recalled(loan, event.deadline_s, world.wall_offset_s, event.why.reason.value, event.at_s,
                     empty=world.is_empty(loan.devices))
    if after is None or after == loan:
        return f"loan {loan.id}: a recall changes nothing while it is {loan.state.value}"
    world = _doubted(kept(world, after), loan, event)
    return _called_back(world, loan, event.at_s) if event.by_hand else world


_FOR_WANT = frozenset({Reason.SLACK_NEGATIVE, Reason.P99_EMERGENCY})


def _doubted(world: World, loan: Loan, event: LoanRecalled) -> World:
    """A lender that runs short of one card has seen no surplus of any: what is left of it has to hold anew. Replicas of
    other cards serve the same demand, and who is called back from one would only be called back from the next. Who
    takes one back by hand speaks of its card alone."""
    cards = {key for key in world.supplies if key[0] == loan.lender
             and (event.why.reason in _FOR_WANT or key[1] == loan.card)}
    return world.evolved(supplies={
        key: replace(supply, held_since_s=(event.at_s,) * len(supply.held_since_s)) if key in cards else supply
        for key, supply in world.supplies.items()})


def _called_back(world: World, loan: Loan, now_s: float) -> World:
    """Who takes back by hand says that the capacity is needed, and knows more than the figures do: for a while no more
    is out than this recall leaves out. A recall meanwhile begins that time anew, with the lower of the two numbers."""
    key = (loan.lender, loan.card)
    out = sum((other.lender, other.card) == key and other.recall_deadline_s is None
              and other.state in (LoanState.OFFERED, LoanState.LENT) for other in world.loans.values())
    known = world.kept.get(key)
    if known is not None and now_s < known.until_s:
        out = min(out, known.most_out)
    return world.evolved(kept={**world.kept, key: Kept(out, now_s + world.config.rules.recall_keep_s)})


def _moved(world: World, name: str, epoch: int, step: Step, now_s: float) -> World | str:
    loan = world.loans.get(name)
    if loan is None or loan.epoch != epoch:
        return f"loan {name}: epoch {epoch} is over or unknown"
    after = stepped(loan, step, now_s, empty=world.is_empty(loan.devices))
    if after is None:
        return f"loan {name}: {step.value} does not apply while it is {loan.state.value}"
    if after.state is LoanState.LOST:
        return _quarantined(kept(world, after), after)
    return kept(world, after)


def kept(world: World, loan: Loan) -> World:
    """The world with this loan as it is now; one that is over leaves it."""
    if loan.state in TERMINAL:
        return world.evolved(loans={name: other for name, other in world.loans.items() if name != loan.id})
    return world.evolved(loans={**world.loans, loan.id: loan})


def _quarantined(world: World, loan: Loan) -> World:
    fresh = {device: Condition.QUARANTINED for device in loan.devices if device not in world.conditions}
    return world.evolved(conditions={**world.conditions, **fresh})


def lose_loans_on(world: World, devices: frozenset[str], now_s: float) -> World:
    """The loans on a node that is gone. What is left of such a loan elsewhere goes into quarantine with it."""
    for loan in world.loans.values():
        if devices.isdisjoint(loan.devices):
            continue
        after = stepped(loan, Step.NODE_LOST, now_s, empty=world.is_empty(loan.devices))
        if after is not None:
            world = kept(world, after)
            if after.state is LoanState.LOST:
                world = _quarantined(world, after)
    return world


def repair_loans(world: World, now_s: float) -> World:
    """Lost loans of which all devices are sound again go home, under a new epoch."""
    for loan in world.loans.values():
        if loan.state is LoanState.LOST and not any(device in world.conditions for device in loan.devices):
            epoch = world.epoch + 1
            after = stepped(loan, Step.REPAIRED, now_s, empty=world.is_empty(loan.devices), epoch=epoch)
            if after is not None:
                world = kept(world, after).evolved(epoch=epoch)
    return world


def settle_loans(world: World, devices: tuple[str, ...], now_s: float) -> World:
    """After devices were let go or runs were told to leave: what that means for the loans they are in."""
    for name in sorted({world.loaned[device] for device in devices if device in world.loaned}):
        loan = world.loans[name]
        empty = world.is_empty(loan.devices)
        if empty and loan.state is LoanState.LENT:
            world = kept(world, replace(loan, idle_since_s=now_s))
            continue
        after = stepped(loan, Step.VACATED, now_s, empty=True) if empty else None
        if after is None and not empty and _all_told(world, loan):
            after = stepped(loan, Step.SIGNALLED, now_s, empty=False)
        if after is not None:
            world = kept(world, after)
    return world


def _all_told(world: World, loan: Loan) -> bool:
    """Whether every run on the loan has been told to leave it, and the telling has been confirmed."""
    holders = world.holders
    runs = {holders[device] for device in loan.devices if device in holders}
    return all(world.runs[run].signalled for run in runs)
