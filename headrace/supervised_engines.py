"""The engines of `headrace up` as the allocator's lender sees them: its supervisor stops and starts them."""

from collections.abc import Mapping

from allocator.execution.values import Report
from backends.embedded.supervisor import ChildState, Supervisor


class SupervisedEngines:
    """Keeps `allocator.lender.engines.EngineKeeper`. A child that was waited for is gone: that is the evidence."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

    async def look(self, reports: Mapping[str, Report]) -> None:
        """Nothing to do: the supervisor looks by itself."""

    async def stop(self, backend: str) -> None:
        """See the protocol."""
        self._supervisor.pause(backend)

    async def start(self, backend: str) -> None:
        """See the protocol."""
        self._supervisor.resume(backend)

    async def is_gone(self, backend: str) -> bool:
        """See the protocol."""
        return any(status.name == backend and status.state is ChildState.PAUSED
                   for status in self._supervisor.status())
