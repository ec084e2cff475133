"""`apply(world, event) -> World`: the one way in which a world changes.

Total and deterministic: an event that is late, doubled, stale or mistaken changes nothing and says why (`refusal`).
So a journal may be replayed to any prefix and gives the world of that moment, and two planners cannot book a device
twice, whatever they believed.
"""

from collections.abc import Callable, Iterable
from math import isfinite
from typing import Any, Final

from allocator.applying import inventory, jobs, loans, runs
from allocator.events import (
    BackendGone,
    BackendReported,
    CheckpointAcknowledged,
    ClaimDropped,
    ClaimMade,
    ClockRead,
    CoefficientsActivated,
    ConfigLoaded,
    DevicesJudged,
    DevicesVacated,
    Event,
    HandBackProbed,
    JobCancelled,
    JobSubmitted,
    KillOrdered,
    LoanGivenBack,
    LoanLost,
    LoanOffered,
    LoanOverdue,
    LoanRecalled,
    LoanWithdrawn,
    NodeDown,
    NodeMoved,
    NodeReported,
    NodeUp,
    PoolEnding,
    RunBroke,
    RunExited,
    RunPlaced,
    RunProgressed,
    RunReachable,
    RunStarted,
    ShrinkOrdered,
    SignalAccepted,
    StopOrdered,
    SupplyReported,
)
from allocator.model.world import World

_HANDLERS: Final[dict[type[Any], Callable[[World, Any], World | str]]] = {
    RunPlaced: jobs.run_placed,
    StopOrdered: runs.stop_ordered,
    ShrinkOrdered: runs.shrink_ordered,
    KillOrdered: runs.kill_ordered,
    ClaimMade: jobs.claim_made,
    ClaimDropped: jobs.claim_dropped,
    LoanOffered: loans.loan_offered,
    LoanWithdrawn: loans.loan_withdrawn,
    LoanRecalled: loans.loan_recalled,
    LoanGivenBack: loans.loan_given_back,
    LoanOverdue: loans.loan_overdue,
    LoanLost: loans.loan_lost,
    NodeMoved: inventory.node_moved,
    PoolEnding: inventory.pool_ending,
    ConfigLoaded: inventory.config_loaded,
    CoefficientsActivated: inventory.coefficients_activated,
    ClockRead: inventory.clock_read,
    NodeReported: inventory.node_reported,
    NodeDown: inventory.node_down,
    NodeUp: inventory.node_up,
    DevicesJudged: inventory.devices_judged,
    BackendReported: inventory.backend_reported,
    BackendGone: inventory.backend_gone,
    SupplyReported: inventory.supply_reported,
    JobSubmitted: jobs.job_submitted,
    JobCancelled: jobs.job_cancelled,
    RunStarted: runs.run_started,
    RunBroke: runs.run_broke,
    RunProgressed: runs.run_progressed,
    SignalAccepted: runs.signal_accepted,
    CheckpointAcknowledged: runs.run_progressed,
    RunExited: runs.run_exited,
    DevicesVacated: runs.devices_vacated,
    RunReachable: runs.run_reachable,
    HandBackProbed: loans.hand_back_probed,
}


def consider(world: World, event: Event) -> World | str:
    """The world after the event, or why the event changes nothing."""
    if not isfinite(event.at_s):
        return "the event has no time"
    after = _HANDLERS[type(event)](world, event)
    if isinstance(after, str):
        return after
    assert after is not world, "a handler that changes nothing says why"
    # The changed world is nobody's yet; writing its two last fields in place saves a second copy of it.
    object.__setattr__(after, "version", world.version + 1)
    object.__setattr__(after, "now_s", max(world.now_s, event.at_s))
    return after


def apply(world: World, event: Event) -> World:
    """The world after the event; the same world where it changes nothing."""
    after = consider(world, event)
    return world if isinstance(after, str) else after


def refusal(world: World, event: Event) -> str | None:
    """Why the event would change nothing, or `None` where it would."""
    after = consider(world, event)
    return after if isinstance(after, str) else None


def replay(world: World, events: Iterable[Event]) -> World:
    """The world after these events, in their order."""
    for event in events:
        world = apply(world, event)
    return world
