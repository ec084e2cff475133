"""What is known outside of the allocator about one job and its runs: the truth, which the allocator has only heard of.

A run trains at one speed, after the restart time that every run but the first takes::

    done(t) = done before + speed · (t - start - restart)

Work is safe up to the last checkpoint of the run's own accord, `every_s` apart, or to where the run began.
"""

from dataclasses import dataclass, field
from math import floor
from typing import NamedTuple

from allocator.model.jobs import Run


@dataclass(slots=True)
class Story:
    """What became of one job."""

    submitted_s: float
    gang: int
    work_unit_s: float
    """As it really is; the allocator knows the job's own estimate only."""
    done_unit_s: float = 0.0
    """Safe in a checkpoint."""
    waiting_since_s: float | None = None
    waited_s: float = 0.0
    """In all: before the first start, and after each stop."""
    ended_s: float | None = None
    cards: list[str] = field(default_factory=list)
    """Of its runs, in turn."""


class Stretch(NamedTuple):
    """A time in which a run brought its job forward for good."""

    from_s: float
    to_s: float
    units_per_s: float


@dataclass(slots=True)
class Attempt:
    """One run, as it really goes."""

    run: Run
    speed: float
    works_from_s: float
    base_unit_s: float
    reported: int = 0
    """Checkpoints of its own that the allocator has heard of."""
    stopped_s: float | None = None
    over: bool = False

    def done_unit_s(self, at_s: float) -> float:
        until_s = at_s if self.stopped_s is None else min(at_s, self.stopped_s)
        return self.base_unit_s + self.speed * max(0.0, until_s - self.works_from_s)

    def safe_s(self, now_s: float) -> float:
        """Until when its work is in a checkpoint of its own."""
        checkpoint = self.run.checkpoint
        if checkpoint is None or checkpoint.every_s is None or now_s <= self.works_from_s:
            return self.works_from_s
        return self.works_from_s + floor((now_s - self.works_from_s) / checkpoint.every_s) * checkpoint.every_s
