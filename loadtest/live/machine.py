"""How much of the processors strangers take while a run measures: Linux, from /proc; `None` elsewhere."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from loadtest.bench.processes import core_taken_s, cpu_s, family


@dataclass(frozen=True, slots=True)
class Machine:
    """CPU time up to a moment, in seconds: of all processors that we may use, and of us and our children."""

    at_s: float
    taken_s: float
    ours_s: float
    processors: int

    @classmethod
    def now(cls) -> "Machine":
        """The meters. Children that have ended count by what the kernel added to ours when they did."""
        cores = sorted(os.sched_getaffinity(0))
        ended = os.times()
        return cls(time.monotonic(), sum(core_taken_s(core) for core in cores),
                   cpu_s(family(os.getpid())) + ended.children_user + ended.children_system, len(cores))

    def others_since(self) -> float | None:
        """Share of the processors, 0 to 1, that neither we nor our children have taken since this reading."""
        if not Path("/proc/stat").exists():
            return None
        now = Machine.now()
        foreign_s = (now.taken_s - self.taken_s) - (now.ours_s - self.ours_s)
        return max(0.0, foreign_s) / max(1e-9, (now.at_s - self.at_s) * self.processors)
