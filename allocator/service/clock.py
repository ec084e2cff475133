"""Reads the machine's clocks for the world's one time (`allocator.clock`)."""

from dataclasses import dataclass, field

from allocator.clock import Reading, resumed, running
from allocator.execution.local import Clocks
from allocator.execution.processes import boot_id


@dataclass(slots=True)
class WorldClock:
    """World seconds: from a journal's last reading on, or from 0. `clocks` are those of the execution engine."""

    last: Reading | None
    clocks: Clocks = field(default_factory=Clocks)
    boot: str = field(default_factory=boot_id)
    _started: Reading = field(init=False)

    def __post_init__(self) -> None:
        wall_s, boot_s = self.clocks.unix_s(), self.clocks.boot_s()
        fresh = Reading(0.0, wall_s, boot_s, self.boot)
        self._started = fresh if self.last is None else resumed(self.last, wall_s, boot_s, self.boot)

    def now_s(self) -> float:
        """World seconds."""
        return running(self._started, self.clocks.boot_s())

    def reading(self) -> Reading:
        """All clocks, for the journal."""
        boot_s = self.clocks.boot_s()
        return Reading(running(self._started, boot_s), self.clocks.unix_s(), boot_s, self.boot)

    def unix_s(self, world_s: float) -> float:
        """Where a world time stands on the wall clock as it is now: for engines, which turn it back at once."""
        return self.clocks.unix_s() + world_s - self.now_s()
