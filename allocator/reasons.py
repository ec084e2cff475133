"""Why something was decided, as a closed list: the same words in the journal, in metrics and on the command line."""

from enum import StrEnum

import msgspec


class Reason(StrEnum):
    """Of decisions."""

    PLACED = "placed"
    """It was next, and its gang fits."""
    BACKFILLED = "backfilled"
    """It fits without moving the start of a gang that waits with a reservation."""
    CLAIM_READY = "claim_ready"
    """The devices that were kept for it are free."""
    RECLAIMED = "reclaimed"
    """For the guarantee of another queue."""
    PRIORITY = "priority"
    """For a job of higher priority in the same queue."""
    LOAN_RECALLED = "loan_recalled"
    CANCELLED = "cancelled"
    GANG_BROKEN = "gang_broken"
    LEFTOVERS = "leftovers"
    """It has exited; what is left of it must go."""
    WINDOW_CLOSED = "window_closed"
    POOL_ENDED = "pool_ended"
    POOL_ENDING = "pool_ending"
    KILL_MARGIN = "kill_margin"
    """The deadline is closer than the kill margin."""
    SURPLUS = "surplus"
    """The lender can do without it, and a gang waits for it."""
    SLACK_NEGATIVE = "slack_negative"
    """The lender will need more than it has within the recall lead."""
    OPERATOR = "operator"
    P99_EMERGENCY = "p99_emergency"
    """The lender's budget is breached now: the one reason for less than the promised grace."""
    SURPLUS_GONE = "surplus_gone"
    OFFER_EXPIRED = "offer_expired"
    NOT_WANTED = "not_wanted"
    IDLE = "idle"
    DEADLINE = "deadline"
    UNPROVABLE = "unprovable"
    CLAIM_EXPIRED = "claim_expired"
    CLAIM_BROKEN = "claim_broken"
    LABELS = "labels"


class Why(msgspec.Struct, frozen=True):
    """One decision's reason, and the versions of all that it was decided by (I15)."""

    reason: Reason
    config: str
    labels: int
    coefficients: str
    detail: str = ""


class Pending(StrEnum):
    """Why a job waits: the first thing that would have to change."""

    NOT_WAITING = "not_waiting"
    QUEUE_UNKNOWN = "queue_unknown"
    NO_JOBS_HERE = "no_jobs_here"
    CARD_UNKNOWN = "card_unknown"
    CARD_CANNOT = "card_cannot"
    MEMORY = "memory"
    NO_SUCH_CARD = "no_such_card"
    GANG_TOO_LARGE = "gang_too_large"
    NOT_HEALTHY = "not_healthy"
    LOAN_TOO_SHORT = "loan_too_short"
    LOAN_NOT_WORTH = "loan_not_worth"
    RECALLED_TOO_OFTEN = "recalled_too_often"
    POOL_CLOSED = "pool_closed"
    WINDOW_CLOSED = "window_closed"
    CRASHED = "crashed"
    QUOTA_LIMIT = "quota_limit"
    QUOTA_BUSY = "quota_busy"
    QUOTA_KEPT = "quota_kept"
    CLAIM = "claim"
    DEVICES_BUSY = "devices_busy"
    NO_SURPLUS = "no_surplus"
    SURPLUS_NEW = "surplus_new"
    KEPT_BY_HAND = "kept_by_hand"
    FRAGMENTED = "fragmented"
    BEHIND_RESERVATION = "behind_reservation"
    BETTER_CARD = "better_card"
    NEXT_TICK = "next_tick"
