"""Work: what somebody asked for (`Job`), where it stands (`JobState`), and one attempt at it on devices (`Run`)."""

from dataclasses import dataclass
from enum import IntEnum, StrEnum


class Kind(StrEnum):
    TRAINING = "training"
    """Gang, whole cards, packed, stable for long."""
    FINETUNE = "finetune"
    """A few cards, fills fragments, off-peak windows, elastic."""
    BATCH = "batch"
    """Backfill only: never a reservation, never a reclaim, first to be stopped."""


class Level(IntEnum):
    """How far apart the devices of a gang stand."""

    ISLAND = 0
    NODE = 1
    LEAF = 2
    POD = 3
    SITE = 4


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a job can do when told to stop. A job without one loses all its work with its run."""

    every_s: float | None = None
    """Between checkpoints of its own accord; `None`: only when told to."""
    takes_s: float = 10.0
    restart_s: float = 60.0
    """From start to the first new step after a resume: load, compile, warm up."""


@dataclass(frozen=True, slots=True)
class Window:
    """Hours of the week in which a job may run: minutes of the local day. An end before its start is past midnight, one
    that is equal to it a whole day later."""

    opens_minute: int
    closes_minute: int
    days: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6)
    """Monday is 0; the day on which the window opens."""
    utc_offset_s: float = 0.0

    def closes_in_s(self, wall_s: float) -> float | None:
        """Seconds until it closes, `None` while it is closed."""
        local_s = wall_s + self.utc_offset_s
        day, second = divmod(local_s, 86400.0)
        length_s = ((self.closes_minute - self.opens_minute) % 1440 or 1440) * 60.0
        for days_ago in (0, 1):
            weekday = int(day - days_ago + 3) % 7  # the epoch was a Thursday
            since_open_s = second + 86400.0 * days_ago - self.opens_minute * 60.0
            if weekday in self.days and 0.0 <= since_open_s < length_s:
                return length_s - since_open_s
        return None

    def opens_in_s(self, wall_s: float) -> float:
        """Seconds until it opens next; 0 where it does so now."""
        local_s = wall_s + self.utc_offset_s
        day = local_s // 86400.0
        ahead = [(day + days) * 86400.0 + self.opens_minute * 60.0 - local_s for days in range(8)
                 if int(day + days + 3) % 7 in self.days]
        return min((left_s for left_s in ahead if left_s >= 0.0), default=float("inf"))


@dataclass(frozen=True, slots=True)
class Job:
    """A request for a gang of one card type out of `cards`."""

    id: str
    queue: str
    family: str
    cards: tuple[str, ...]
    gang_min: int
    gang_max: int
    kind: Kind = Kind.TRAINING
    memory_gb: float = 0.0
    """Per device."""
    work_unit_s: float | None = None
    """Estimated work: seconds on one reference card. `None`: no estimate."""
    priority: int = 0
    submitted_s: float = 0.0
    checkpoint: Checkpoint | None = None
    windows: tuple[Window, ...] = ()
    """Any of them; none: at any time."""
    data_site: str | None = None
    data_gb: float = 0.0
    widest: Level = Level.SITE
    """The gang may be spread this far, no further."""

    @property
    def elastic(self) -> bool:
        return self.gang_min < self.gang_max

    def closes_in_s(self, wall_s: float) -> float | None:
        """Seconds for which its windows stay open; infinite without windows, `None` while all are closed."""
        if not self.windows:
            return float("inf")
        open_s = [left for window in self.windows if (left := window.closes_in_s(wall_s)) is not None]
        return max(open_s, default=None)

    def opens_in_s(self, wall_s: float) -> float:
        """Seconds until the first of its windows opens; infinite without windows."""
        return min((window.opens_in_s(wall_s) for window in self.windows), default=float("inf"))


def job_fault(job: Job) -> str | None:
    """Why a job cannot be taken at all, or `None`."""
    if not job.id or not job.queue:
        return "a job needs an id and a queue"
    if not 1 <= job.gang_min <= job.gang_max:
        return f"gang_min {job.gang_min} and gang_max {job.gang_max} must satisfy 1 <= gang_min <= gang_max"
    if not job.cards or len(set(job.cards)) != len(job.cards):
        return "cards must name at least one card type, each once"
    numbers = (job.memory_gb, job.data_gb, job.work_unit_s or 0.0)
    if not all(0.0 <= number < float("inf") for number in numbers):
        return "memory_gb, data_gb and work_unit_s must be finite and not negative"
    return None


@dataclass(frozen=True, slots=True)
class JobState:
    """A job that is not over: waiting where `run` is `None`."""

    job: Job
    run: str | None = None
    attempts: int = 0
    recalls: int = 0
    """Times it was stopped for somebody else."""
    crashes: int = 0
    unsaved: int = 0
    """Times it was told to save and go, and ended without having saved."""
    done_unit_s: float = 0.0
    """Work that is safe in a checkpoint."""
    waiting_since_s: float = 0.0
    not_before_s: float = 0.0
    """Its next try, after a crash."""
    cancelled: bool = False


class RunPhase(StrEnum):
    STARTING = "starting"
    RUNNING = "running"
    BROKEN = "broken"
    """Not all of the gang: a part never started, or was lost with its node. The rest must go."""
    EXITED = "exited"
    """It says that it is over. Its devices are not free before somebody has looked."""


class Outcome(StrEnum):
    COMPLETED = "completed"
    FAILED = "failed"
    STOPPED = "stopped"


_UNASKED = frozenset({"", "gang_broken", "leftovers"})
"""Reasons to clear away what is left of a run that has ended by itself: there is nothing to save any more."""


@dataclass(frozen=True, slots=True)
class Run:
    """One attempt. It holds `devices` until each is proven idle, whatever the run itself says."""

    id: str
    job: str
    epoch: int
    queue: str
    pool: str
    kind: Kind
    family: str
    card: str
    devices: tuple[str, ...]
    gang_min: int
    checkpoint: Checkpoint | None
    started_s: float
    ends_s: float
    """Predicted."""
    coefficients: str
    """The version that it is charged under, to its end."""
    config: str
    phase: RunPhase = RunPhase.STARTING
    base_unit_s: float = 0.0
    """Work that was done before it began."""
    checkpointed_s: float | None = None
    """When its last checkpoint was written."""
    leaving: tuple[str, ...] = ()
    """Devices that it was told to give up while it goes on with the rest."""
    leave_by_s: float | None = None
    stop_by_s: float | None = None
    stop_reason: str = ""
    signalled: bool = False
    """The execution engine has taken the order to stop or shrink."""
    acknowledged: bool = False
    """The job says that its checkpoint is written."""
    killed_s: float | None = None
    outcome: Outcome | None = None
    said: str = ""
    """What the execution engine said of its end."""
    unreachable: bool = False
    """Its execution engine does not answer: nothing is known, so nothing is assumed."""

    @property
    def stopping(self) -> bool:
        return self.stop_by_s is not None or self.phase in (RunPhase.BROKEN, RunPhase.EXITED)

    @property
    def saved(self) -> bool | None:
        """Whether it saved when it was told to go; `None` while that is open, and where nothing was asked of it."""
        if self.checkpoint is None or self.outcome is Outcome.COMPLETED or self.stop_reason in _UNASKED:
            return None
        if self.acknowledged:
            return True
        return False if self.phase is RunPhase.EXITED or self.killed_s is not None else None

    def safe_age_s(self, now_s: float) -> float:
        """Seconds of work that would be lost if it ended now without a checkpoint."""
        since_s = self.started_s if self.checkpointed_s is None else max(self.started_s, self.checkpointed_s)
        return max(0.0, now_s - since_s)
