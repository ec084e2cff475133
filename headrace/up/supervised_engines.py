"""The engines of `headrace up` as the allocator's lender sees them: its supervisor stops and starts them."""

from collections.abc import Mapping

from allocator.execution.values import Report
from allocator.service.config import Declared
from backends.embedded.supervisor import ChildState, Supervisor


class SupervisedEngines:
    """Keeps `allocator.lender.engines.EngineKeeper`. A child that was waited for is gone: that is the evidence."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._resting: set[str] = set()

    async def look(self, reports: Mapping[str, Report]) -> None:
        """Nothing to do: the supervisor looks by itself."""

    async def stop(self, backend: str) -> None:
        """See the protocol."""
        self._resting.add(backend)
        self._supervisor.pause(backend)

    async def start(self, backend: str) -> None:
        """See the protocol."""
        # To resume one that never rested would cut its own wait before another try short.
        if backend in self._resting:
            self._resting.discard(backend)
            self._supervisor.resume(backend)

    def owns_run(self, run_id: str) -> bool:
        """See the protocol: its engines are no runs of an execution engine."""
        return False

    def redeclare(self, declared: Declared) -> None:
        """Nothing to do: the supervisor has the commands."""

    async def is_gone(self, backend: str) -> bool:
        """See the protocol."""
        return any(status.name == backend and status.state is ChildState.PAUSED
                   for status in self._supervisor.status())
