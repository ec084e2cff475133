"""The loan itself, and the one function that moves it.

`epoch` fences: it is drawn from one counter of the world, each command and each report about the loan carries it, and
one that carries another is about another life of the same devices. The deadline is in world seconds
(`allocator.clock`), which only grow and which a wall clock cannot hold back; the wall time beside it is for people. No
step lengthens it.
"""

from dataclasses import dataclass, replace

from allocator.loan.states import Facts, LoanState, Step, next_state


@dataclass(frozen=True, slots=True)
class Loan:
    id: str
    """The backend's name: it is lent at most once at a time. With the epoch it names one loan of all."""
    epoch: int
    lender: str
    borrower: str
    """Pools."""
    card: str
    devices: tuple[str, ...]
    promised_min_s: float
    grace_s: float
    coefficients: str
    offered_s: float
    state: LoanState = LoanState.OFFERED
    released: bool = False
    lent_s: float | None = None
    idle_since_s: float | None = None
    """Since when no run has been on it, while it is LENT."""
    recall_deadline_s: float | None = None
    recall_deadline_wall_s: float | None = None
    recalled_s: float | None = None
    recall_reason: str = ""
    overdue_s: float | None = None
    """When the alarm was raised; it is never taken back."""

    @property
    def promised_until_s(self) -> float:
        """Before this the lender does not mean to recall."""
        return (self.offered_s if self.lent_s is None else self.lent_s) + self.promised_min_s


def stepped(loan: Loan, step: Step, now_s: float, *, empty: bool, epoch: int | None = None) -> Loan | None:
    """The loan after a step, or `None` where the table has no row for it.

    `empty`: no run holds a device of it. `epoch`: of a repaired loan, its new one.
    """
    state = next_state(loan.state, step, Facts(loan.released, empty, loan.overdue_s is not None))
    if state is None:
        return None
    match step:
        case Step.RELEASED:
            return replace(loan, released=True)
        case Step.ACCEPTED:
            return replace(loan, state=state, lent_s=now_s)
        case Step.DUE:
            return replace(loan, state=state, overdue_s=now_s)
        case Step.REPAIRED:
            return replace(loan, state=state, epoch=loan.epoch if epoch is None else epoch)
        case _:
            return replace(loan, state=state)


def recalled(loan: Loan, deadline_s: float, wall_offset_s: float, reason: str, now_s: float, *,
             empty: bool) -> Loan | None:
    """The loan after a recall: of two deadlines the earlier stands, with its reason."""
    after = stepped(loan, Step.RECALLED, now_s, empty=empty)
    if after is None:
        return None
    if loan.recall_deadline_s is not None and loan.recall_deadline_s <= deadline_s:
        return after
    return replace(after, recall_deadline_s=deadline_s, recall_deadline_wall_s=deadline_s + wall_offset_s,
                   recall_reason=reason, recalled_s=now_s if loan.recalled_s is None else loan.recalled_s)
