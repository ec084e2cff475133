"""The life of a loan, as data: (state, step, guard) → state. `docs/allocator.md` shows this table; a test compares.

Rows of one state and step are tried in order; the first whose guard holds is taken. Where none is, the step does not
apply, and whoever announced it is late or mistaken. Going back from a recall to LENT is not in the table: a recalled
loan ends, and what follows is another loan with another epoch.
"""

from enum import StrEnum
from typing import NamedTuple


class LoanState(StrEnum):
    OFFERED = "offered"
    LENT = "lent"
    RECALL_REQUESTED = "recall_requested"
    DRAINING = "draining"
    OVERDUE = "overdue"
    RETURNING = "returning"
    RETURNED = "returned"
    WITHDRAWN = "withdrawn"
    LOST = "lost"


class Owner(StrEnum):
    """Whose the devices are while the loan is in a state."""

    LENDER = "lender"
    BORROWER = "borrower"
    HANDOVER = "hand-over"
    QUARANTINE = "quarantine"


class Step(StrEnum):
    """What can happen to a loan."""

    RELEASED = "released"
    """The router: the backend is drained, its engine stopped."""
    ACCEPTED = "accepted"
    """A gang is placed on it."""
    WITHDRAWN = "withdrawn"
    """The offer's time is over, the surplus is gone, or nobody wants it any more."""
    RECALLED = "recalled"
    SIGNALLED = "signalled"
    """The execution engine has taken the order to stop for every run on it."""
    VACATED = "vacated"
    """The last device is proven idle."""
    GIVEN_BACK = "given_back"
    """The borrower has no use for it."""
    DUE = "due"
    """The deadline is here."""
    UNPROVABLE = "unprovable"
    """Overdue for so long that nobody believes in a proof any more."""
    NODE_LOST = "node_lost"
    PROBED_GOOD = "probed_good"
    PROBED_BAD = "probed_bad"
    REPAIRED = "repaired"
    """All of its devices are proven idle and sound after all; the loan gets a new epoch."""


class Guard(StrEnum):
    ALWAYS = ""
    RELEASED = "the backend is released"
    EMPTY = "no run is on it"
    NOT_ALARMED = "it has not been overdue before"


class Row(NamedTuple):
    state: LoanState
    step: Step
    guard: Guard
    to: LoanState


OWNER = {
    LoanState.OFFERED: Owner.LENDER,
    LoanState.LENT: Owner.BORROWER,
    LoanState.RECALL_REQUESTED: Owner.BORROWER,
    LoanState.DRAINING: Owner.BORROWER,
    LoanState.OVERDUE: Owner.BORROWER,
    LoanState.RETURNING: Owner.HANDOVER,
    LoanState.RETURNED: Owner.LENDER,
    LoanState.WITHDRAWN: Owner.LENDER,
    LoanState.LOST: Owner.QUARANTINE,
}

TERMINAL = frozenset({LoanState.RETURNED, LoanState.WITHDRAWN})
AWAY = frozenset({LoanState.LENT, LoanState.RECALL_REQUESTED, LoanState.DRAINING, LoanState.OVERDUE,
                  LoanState.RETURNING})
"""States in which the lender does without the devices and the borrower is charged with them."""
RECALLABLE = frozenset({LoanState.LENT, LoanState.RECALL_REQUESTED, LoanState.DRAINING, LoanState.RETURNING})

TABLE: tuple[Row, ...] = (
    Row(LoanState.OFFERED, Step.RELEASED, Guard.ALWAYS, LoanState.OFFERED),
    Row(LoanState.OFFERED, Step.ACCEPTED, Guard.RELEASED, LoanState.LENT),
    Row(LoanState.OFFERED, Step.WITHDRAWN, Guard.ALWAYS, LoanState.WITHDRAWN),
    Row(LoanState.OFFERED, Step.RECALLED, Guard.ALWAYS, LoanState.WITHDRAWN),
    Row(LoanState.OFFERED, Step.NODE_LOST, Guard.ALWAYS, LoanState.WITHDRAWN),
    Row(LoanState.LENT, Step.RECALLED, Guard.EMPTY, LoanState.RETURNING),
    Row(LoanState.LENT, Step.RECALLED, Guard.ALWAYS, LoanState.RECALL_REQUESTED),
    Row(LoanState.LENT, Step.GIVEN_BACK, Guard.EMPTY, LoanState.RETURNING),
    Row(LoanState.LENT, Step.NODE_LOST, Guard.ALWAYS, LoanState.LOST),
    Row(LoanState.RECALL_REQUESTED, Step.RECALLED, Guard.ALWAYS, LoanState.RECALL_REQUESTED),
    Row(LoanState.RECALL_REQUESTED, Step.SIGNALLED, Guard.ALWAYS, LoanState.DRAINING),
    Row(LoanState.RECALL_REQUESTED, Step.VACATED, Guard.EMPTY, LoanState.RETURNING),
    Row(LoanState.RECALL_REQUESTED, Step.DUE, Guard.ALWAYS, LoanState.OVERDUE),
    Row(LoanState.RECALL_REQUESTED, Step.NODE_LOST, Guard.ALWAYS, LoanState.LOST),
    Row(LoanState.DRAINING, Step.RECALLED, Guard.ALWAYS, LoanState.DRAINING),
    Row(LoanState.DRAINING, Step.VACATED, Guard.EMPTY, LoanState.RETURNING),
    Row(LoanState.DRAINING, Step.DUE, Guard.ALWAYS, LoanState.OVERDUE),
    Row(LoanState.DRAINING, Step.NODE_LOST, Guard.ALWAYS, LoanState.LOST),
    Row(LoanState.OVERDUE, Step.VACATED, Guard.EMPTY, LoanState.RETURNING),
    Row(LoanState.OVERDUE, Step.PROBED_GOOD, Guard.EMPTY, LoanState.RETURNED),
    Row(LoanState.OVERDUE, Step.PROBED_BAD, Guard.EMPTY, LoanState.LOST),
    Row(LoanState.OVERDUE, Step.UNPROVABLE, Guard.ALWAYS, LoanState.LOST),
    Row(LoanState.OVERDUE, Step.NODE_LOST, Guard.ALWAYS, LoanState.LOST),
    Row(LoanState.RETURNING, Step.RECALLED, Guard.ALWAYS, LoanState.RETURNING),
    Row(LoanState.RETURNING, Step.DUE, Guard.NOT_ALARMED, LoanState.OVERDUE),
    Row(LoanState.RETURNING, Step.PROBED_GOOD, Guard.EMPTY, LoanState.RETURNED),
    Row(LoanState.RETURNING, Step.PROBED_BAD, Guard.ALWAYS, LoanState.LOST),
    Row(LoanState.RETURNING, Step.NODE_LOST, Guard.ALWAYS, LoanState.LOST),
    Row(LoanState.LOST, Step.REPAIRED, Guard.EMPTY, LoanState.RETURNED),
)

_ROWS: dict[tuple[LoanState, Step], tuple[Row, ...]] = {}
for _row in TABLE:
    _ROWS[_row.state, _row.step] = (*_ROWS.get((_row.state, _row.step), ()), _row)


class Facts(NamedTuple):
    """What the guards look at."""

    released: bool
    empty: bool
    alarmed: bool


def next_state(state: LoanState, step: Step, facts: Facts) -> LoanState | None:
    """The state after a step, or `None` where the step does not apply. Total."""
    for row in _ROWS.get((state, step), ()):
        if _holds(row.guard, facts):
            return row.to
    return None


def _holds(guard: Guard, facts: Facts) -> bool:
    match guard:
        case Guard.ALWAYS:
            return True
        case Guard.RELEASED:
            return facts.released
        case Guard.EMPTY:
            return facts.empty
        case Guard.NOT_ALARMED:
            return not facts.alarmed
