"""What is said to an execution engine and what it answers: plain values, the same for every engine.

Two kinds of time occur. A deadline is a wall-clock time (`_unix_s`), because it crosses machines; an engine turns it
into a monotonic one the moment it hears of it, and from then on the wall clock may jump as it likes.
"""

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from allocator.execution.devices import Device


class Acknowledgement(StrEnum):
    """How a job says that its checkpoint is safe."""

    FILE = "file"
    """Each member writes the file that `HEADRACE_CHECKPOINT_ACK` names."""
    EXIT = "exit"
    """Each member exits with 0."""


@dataclass(frozen=True, slots=True)
class CheckpointContract:
    """What a job promises to do when it is asked to go.

    On `signal` each member saves, acknowledges, and exits; the signal may come more than once. The acknowledgement
    means that nothing is left to save: what still runs `linger_s` later is killed, however much of the grace is left.
    """

    signal: int = signal.SIGUSR1
    acknowledgement: Acknowledgement = Acknowledgement.FILE
    linger_s: float = 2.0


@dataclass(frozen=True, slots=True)
class Member:
    """One process of a gang, with the devices that are its own."""

    argv: tuple[str, ...]
    devices: tuple[Device, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    """Set beside what the engine sets; wins over it."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A gang to start: all of its members or none."""

    run_id: str
    """The caller's name for this run, used once: a retry after a crash finds what the first try made."""
    epoch: int
    """Fencing token of the loan behind the run. Commands with a lower one are ignored."""
    members: tuple[Member, ...]
    checkpoint: CheckpointContract = CheckpointContract()
    folder: str = "."
    """Working directory of the members."""

    @property
    def devices(self) -> tuple[Device, ...]:
        return tuple(device for member in self.members for device in member.devices)


class RunState(StrEnum):
    """Where a run is. `ENDED` holds the final ones."""

    STARTING = "starting"
    RUNNING = "running"
    BROKEN = "broken"
    """A member is gone while others still run: the gang does no work and holds its devices."""
    ENDING = "ending"
    """All members are gone; what they left is cleared away, and the result written down."""
    DRAINING = "draining"
    """Asked to save or to stop; processes are left."""
    KILLING = "killing"
    """SIGKILL is sent; processes are left."""
    COMPLETED = "completed"
    """All members exited with 0, and acknowledged no checkpoint: the work is done, even if they were asked to save."""
    CHECKPOINTED = "checkpointed"
    """Asked to save, and all members acknowledged."""
    STOPPED = "stopped"
    """Asked to stop without saving, and gone without force."""
    KILLED = "killed"
    """Ended by force with nothing saved."""
    FAILED = "failed"
    """A member ended otherwise, or nobody saw how. Where a deadline was set, that is lost work, not the job's fault."""
    NOT_STARTED = "not_started"
    """The start failed, and left nothing behind."""
    ABSENT = "absent"
    """The engine knows for certain that it has no such run."""
    UNKNOWN = "unknown"
    """The engine cannot tell, so nothing may be concluded: its devices must not be lent again."""


ENDED = frozenset({RunState.COMPLETED, RunState.CHECKPOINTED, RunState.STOPPED, RunState.KILLED, RunState.FAILED,
                   RunState.NOT_STARTED})


@dataclass(frozen=True, slots=True)
class MemberReport:
    """One member as it is now."""

    rank: int
    alive: bool
    exit_code: int | None = None
    """Negative for a signal; `None` while it runs, and where nobody was there to see how it ended."""
    acknowledged: bool = False
    resume_from: str | None = None
    """What the acknowledgement names: where the next run finds the checkpoint."""
    step: int | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """A run as the engine sees it. `note` says in words what the state does not."""

    run_id: str
    state: RunState
    epoch: int | None = None
    members: tuple[MemberReport, ...] = ()
    deadline_unix_s: float | None = None
    """The earliest that was ever set; after a jump of the wall clock, where that deadline now stands on it."""
    overdue: bool = False
    """Processes are left beyond the deadline."""
    forced: bool = False
    """SIGKILL was used, be it only on what a saved job left behind."""
    processes: int = 0
    """All that were found, children and escaped ones included."""
    note: str = ""

    @property
    def ended(self) -> bool:
        """True when the run is over for good. That its devices are free is for `prove_released` to say."""
        return self.state in ENDED


class Verdict(StrEnum):
    """What became of a command."""

    ACCEPTED = "accepted"
    REPEATED = "repeated"
    """It changes nothing: an order at least as strict was there before."""
    STALE_EPOCH = "stale_epoch"
    """Ignored: a higher epoch has spoken."""
    ENDED = "ended"
    """The run is over already."""
    UNKNOWN_RUN = "unknown_run"
    """No such run. The command leaves a fence: a start that comes late with that epoch or a lower one is refused."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """The answer to a command. `epoch` is the one that rules now, `deadline_unix_s` the deadline that holds now."""

    run_id: str
    verdict: Verdict
    epoch: int
    deadline_unix_s: float | None = None
    note: str = ""


class Released(StrEnum):
    """What the evidence says of a device."""

    RELEASED = "released"
    HELD = "held"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that holds a device, or a run about to have one (`pid` 0)."""

    run_id: str
    pid: int
    command: str
    state: str
    """The kernel's letter: `D` is a process that not even SIGKILL ends until its driver lets go."""
    how: str
    """What ties it to the run: its environment, its descent, its session, its cgroup."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What was found about one device."""

    device: Device
    verdict: Released
    holders: tuple[Holder, ...] = ()


@dataclass(frozen=True, slots=True)
class ReleaseProof:
    """Evidence that devices carry no process of any run, or which ones they carry."""

    devices: tuple[Evidence, ...]
    method: str
    """How the evidence was gathered, for the record."""
    observed_unix_s: float
    note: str = ""

    @property
    def released(self) -> bool:
        """True only where every device is proven free."""
        return all(evidence.verdict is Released.RELEASED for evidence in self.devices)
