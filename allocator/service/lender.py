"""Who lends: the protocol between the allocator and whatever holds the inference replicas.

The allocator never believes that a command has worked: it asks for a drain, and takes the backend once `observe` shows
it as released. Both commands may come again and again; the second time they do nothing.
"""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from allocator.execution.values import Report
from allocator.model.inventory import Backend, BackendState, Supply
from allocator.service.config import Declared


class Seen(NamedTuple):
    """What a lender has and can do without, now. A backend that is not named is gone."""

    backends: tuple[Backend, ...]
    supplies: tuple[Supply, ...]


class LenderUnreachable(Exception):
    """The lender does not answer; the text says what came. What was asked for is asked again."""


class Lender(Protocol):
    """The holder of inference replicas: the router, or the allocator itself."""

    async def observe(self, reports: Mapping[str, Report]) -> Seen | None:
        """How things stand; `None` where that cannot be told. `reports` are the execution engine's, by run."""

    async def drain(self, backend: str, epoch: int) -> None:
        """Let it end what it serves, then stop its engine. Raises LenderUnreachable."""

    async def serve(self, backend: str, epoch: int) -> None:
        """It has its devices back: start its engine, warm it up, take traffic. Raises LenderUnreachable."""

    def restore(self, states: Mapping[str, BackendState]) -> None:
        """After a restart: how the allocator last knew the backends."""

    def redeclare(self, declared: Declared) -> None:
        """Takes over an edited file."""

    def tell(self, supply: Supply) -> None:
        """What somebody says that an inference pool can do without, until it is said anew."""

    def owns_run(self, run_id: str) -> bool:
        """Whether a run on the execution engine is a replica's engine and not a job."""

    async def aclose(self) -> None:
        """The term is over: lets connections go. What runs stays."""
