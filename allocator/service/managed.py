"""The lender without a router: replicas that the allocator itself runs, and a supply that a person states.

A backend without a command is a name for its devices and does as it is told.
"""

from collections.abc import Mapping

from allocator.execution.engine import ExecutionEngine
from allocator.execution.values import Report
from allocator.model.inventory import Backend, BackendState, Supply
from allocator.service.config import Declared
from allocator.service.lender import Seen
from allocator.service.replicas import ReplicaEngines


class ManagedLender:
    """The backends of the allocator file. `supplies` stand as declared until `tell` says otherwise."""

    def __init__(self, engine: ExecutionEngine, declared: Declared) -> None:
        self._engines = ReplicaEngines(engine, declared)
        self._declared = declared
        self._is_wanted: dict[str, bool] = {}
        self._supplies = {(supply.pool, supply.card): supply for supply in declared.supplies}

    def redeclare(self, declared: Declared) -> None:
        """Takes over an edited file. Supplies that it states anew replace what was told."""
        before = {(supply.pool, supply.card): supply for supply in self._declared.supplies}
        for supply in declared.supplies:
            if before.get((supply.pool, supply.card)) != supply:
                self.tell(supply)
        self._declared = declared
        self._engines.redeclare(declared)

    def tell(self, supply: Supply) -> None:
        """What an inference pool can do without, from now on."""
        self._supplies[supply.pool, supply.card] = supply

    def restore(self, states: Mapping[str, BackendState]) -> None:
        """See the protocol."""
        self._is_wanted = {name: state in (BackendState.SERVING, BackendState.WARMING)
                           for name, state in states.items()}

    def owns_run(self, run_id: str) -> bool:
        """See the protocol."""
        return self._engines.owns_run(run_id)

    async def drain(self, backend: str, epoch: int) -> None:
        """See the protocol."""
        self._is_wanted[backend] = False

    async def serve(self, backend: str, epoch: int) -> None:
        """See the protocol."""
        self._is_wanted[backend] = True
        await self._engines.start(backend)

    async def observe(self, reports: Mapping[str, Report]) -> Seen:
        """See the protocol. Also brings each engine to where it is wanted, level-triggered."""
        await self._engines.look(reports)
        backends = []
        for backend in self._declared.backends:
            state = await self._brought(backend)
            backends.append(Backend(backend.name, backend.pool, backend.card, backend.devices, state,
                                    backend.reload_s))
        return Seen(tuple(backends), tuple(self._supplies.values()))

    async def aclose(self) -> None:
        """See the protocol: there is nothing to close."""

    async def _brought(self, backend: Backend) -> BackendState:
        is_wanted = self._is_wanted.get(backend.name, True)
        if self._engines.command(backend.name) is None:
            return BackendState.SERVING if is_wanted else BackendState.RELEASED
        if is_wanted:
            await self._engines.start(backend.name)
            return BackendState.SERVING if self._engines.is_running(backend.name) else BackendState.WARMING
        await self._engines.stop(backend.name)
        return BackendState.RELEASED if await self._engines.is_gone(backend.name) else BackendState.DRAINING
