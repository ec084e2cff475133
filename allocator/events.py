"""What happens to a world. An action is an event that has not happened yet: the planner proposes it, the journal writes
it, `apply` folds it in, and then the shell does it (`allocator.effects`).

DECIDED events are the planner's and carry their reason; OBSERVED ones are reports from outside. Every report about a
run or a loan carries the epoch it is about; one of another epoch changes nothing. All are plain values that go to JSON
and back unchanged.
"""

from typing import Final, get_args

import msgspec

from allocator.loan.loan import Loan
from allocator.model.inventory import Backend, Condition, Node, Supply
from allocator.model.jobs import Job, Outcome, Run
from allocator.model.pools import Config
from allocator.model.world import Claim
from allocator.reasons import Why
from allocator.units.table import Coefficients


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event"):
    at_s: float
    """World seconds."""


# --- decided -----------------------------------------------------------------------------------------------------


class _Decided(_Event, frozen=True, kw_only=True):
    why: Why


class RunPlaced(_Decided, frozen=True, tag="run_placed"):
    """Start this gang: all of it or none."""

    run: Run


class StopOrdered(_Decided, frozen=True, tag="stop_ordered"):
    """Checkpoint and leave by the deadline."""

    run: str
    epoch: int
    deadline_s: float


class ShrinkOrdered(_Decided, frozen=True, tag="shrink_ordered"):
    """Give up these devices by the deadline and go on with the rest."""

    run: str
    epoch: int
    devices: tuple[str, ...]
    deadline_s: float


class KillOrdered(_Decided, frozen=True, tag="kill_ordered"):
    run: str
    epoch: int


class ClaimMade(_Decided, frozen=True, tag="claim_made"):
    claim: Claim


class ClaimDropped(_Decided, frozen=True, tag="claim_dropped"):
    job: str


class LoanOffered(_Decided, frozen=True, tag="loan_offered"):
    """Ask the router to drain the backend."""

    loan: Loan


class LoanWithdrawn(_Decided, frozen=True, tag="loan_withdrawn"):
    loan: str
    epoch: int


class LoanRecalled(_Decided, frozen=True, tag="loan_recalled"):
    """`by_hand`: somebody says so, and for a while no more is out than that leaves. The events of a journal from before
    that was kept do not say it, and what was offered after them is no fault."""

    loan: str
    epoch: int
    deadline_s: float
    by_hand: bool = False


class LoanGivenBack(_Decided, frozen=True, tag="loan_given_back"):
    loan: str
    epoch: int


class LoanOverdue(_Decided, frozen=True, tag="loan_overdue"):
    """The alarm."""

    loan: str
    epoch: int


class LoanLost(_Decided, frozen=True, tag="loan_lost"):
    loan: str
    epoch: int


class NodeMoved(_Decided, frozen=True, tag="node_moved"):
    node: str
    pool: str | None


class PoolEnding(_Decided, frozen=True, tag="pool_ending"):
    """Notice to people: this transitional pool ends soon."""

    pool: str


# --- observed ----------------------------------------------------------------------------------------------------


class ConfigLoaded(_Event, frozen=True, tag="config_loaded"):
    config: Config


class CoefficientsActivated(_Event, frozen=True, tag="coefficients_activated"):
    """New runs are charged under this table; those that run keep theirs."""

    table: Coefficients


class ClockRead(_Event, frozen=True, tag="clock_read"):
    """The wall clock, as read now; also the first event after a restart."""

    wall_s: float


class NodeReported(_Event, frozen=True, tag="node_reported"):
    """A new node, or new labels of a known one. Without evidence that it is idle, a new node starts in quarantine."""

    node: Node
    evidence: str = ""


class NodeDown(_Event, frozen=True, tag="node_down"):
    node: str
    detail: str = ""


class NodeUp(_Event, frozen=True, tag="node_up"):
    """It answers again. Its devices stay in quarantine until proven idle: an old process may have lived on."""

    node: str


class DevicesJudged(_Event, frozen=True, tag="devices_judged"):
    """Devices cordoned, quarantined, or proven idle and sound; leaving quarantine takes evidence."""

    devices: tuple[str, ...]
    condition: Condition
    evidence: str = ""


class BackendReported(_Event, frozen=True, tag="backend_reported"):
    backend: Backend


class BackendGone(_Event, frozen=True, tag="backend_gone"):
    backend: str


class SupplyReported(_Event, frozen=True, tag="supply_reported"):
    """`by_hand`: somebody says so, which ends what an earlier recall by hand keeps back."""

    supply: Supply
    by_hand: bool = False


class JobSubmitted(_Event, frozen=True, tag="job_submitted"):
    job: Job


class JobCancelled(_Event, frozen=True, tag="job_cancelled"):
    job: str


class RunStarted(_Event, frozen=True, tag="run_started"):
    """All members of the gang are up."""

    run: str
    epoch: int


class RunBroke(_Event, frozen=True, tag="run_broke"):
    """Part of the gang did not start, or is gone."""

    run: str
    epoch: int
    detail: str = ""


class RunProgressed(_Event, frozen=True, tag="run_progressed"):
    """A checkpoint is written: so much of the job's work is safe."""

    run: str
    epoch: int
    done_unit_s: float


class SignalAccepted(_Event, frozen=True, tag="signal_accepted"):
    """The execution engine has taken the order to stop or shrink and told the processes."""

    run: str
    epoch: int


class CheckpointAcknowledged(_Event, frozen=True, tag="checkpoint_acknowledged"):
    """The job says that its last checkpoint is written. That its processes are gone is another matter."""

    run: str
    epoch: int
    done_unit_s: float


class RunExited(_Event, frozen=True, tag="run_exited"):
    run: str
    epoch: int
    outcome: Outcome
    detail: str = ""


class DevicesVacated(_Event, frozen=True, tag="devices_vacated"):
    """Proof that no process of the run is left on these devices; `evidence` says what was looked at."""

    run: str
    epoch: int
    devices: tuple[str, ...]
    evidence: str


class RunReachable(_Event, frozen=True, tag="run_reachable"):
    """Whether the execution engine of the run answers. While it does not, nothing about the run is assumed."""

    run: str
    epoch: int
    reachable: bool


class HandBackProbed(_Event, frozen=True, tag="hand_back_probed"):
    """The health probe of devices on their way home."""

    loan: str
    epoch: int
    good: bool
    detail: str = ""


Decided = (RunPlaced | StopOrdered | ShrinkOrdered | KillOrdered | ClaimMade | ClaimDropped | LoanOffered
           | LoanWithdrawn | LoanRecalled | LoanGivenBack | LoanOverdue | LoanLost | NodeMoved | PoolEnding)
Observed = (ConfigLoaded | CoefficientsActivated | ClockRead | NodeReported | NodeDown | NodeUp | DevicesJudged
            | BackendReported | BackendGone | SupplyReported | JobSubmitted | JobCancelled | RunStarted | RunBroke
            | RunProgressed | SignalAccepted | CheckpointAcknowledged | RunExited | DevicesVacated | RunReachable
            | HandBackProbed)
Event = Decided | Observed
DECIDED = get_args(Decided)
"""For `isinstance`."""

_ENCODER: Final = msgspec.json.Encoder()
_DECODER: Final[msgspec.json.Decoder[Event]] = msgspec.json.Decoder(Event)


class BadEvent(ValueError):
    """Text that is no event."""


def to_json(event: Event) -> bytes:
    return _ENCODER.encode(event)


def from_json(text: bytes | str) -> Event:
    """The event in JSON text.

    Raises:
        BadEvent: the text is no event of this version of the program.
    """
    try:
        return _DECODER.decode(text)
    except (msgspec.DecodeError, msgspec.ValidationError) as problem:
        raise BadEvent(f"not an event: {problem}") from problem
