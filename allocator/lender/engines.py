"""Who starts and stops the inference engines: a supervisor beside them, or an execution engine."""

from collections.abc import Mapping
from typing import Protocol

from allocator.execution.values import Report
from allocator.service.config import Declared


class EngineKeeper(Protocol):
    """Keeps the engines of backends, by the backends' names. Orders return at once and may come again and again."""

    async def look(self, reports: Mapping[str, Report]) -> None:
        """A round has begun. `reports` are the execution engine's, for a keeper that runs its engines there."""

    async def stop(self, backend: str) -> None:
        """End its engine, and keep it from coming back by itself."""

    async def start(self, backend: str) -> None:
        """Start its engine where it does not run, and keep it running."""

    async def is_gone(self, backend: str) -> bool:
        """Whether its engine has ended, by evidence: its devices are idle."""

    def owns_run(self, run_id: str) -> bool:
        """Whether a run on the execution engine is one of its engines."""

    def redeclare(self, declared: Declared) -> None:
        """Takes over an edited file."""
