"""Replicas whose engines the allocator itself runs, on the same execution engine as the jobs.

So the engine of a replica and the job on its devices can never meet: each waits for the proof that the other is gone.
There is no router in this; a backend without a command is a name for its devices and does as it is told.

A replica's run is called `serve-<backend>-<number>`; the numbers only grow.
"""

import logging
import time
from collections.abc import Mapping

from allocator.execution.devices import Device
from allocator.execution.engine import ExecutionEngine, ExecutionError
from allocator.execution.values import Launch, Member, Report, RunState
from allocator.model.inventory import Backend, BackendState, Supply
from allocator.service.config import Declared
from allocator.service.lender import Seen

log = logging.getLogger("headrace.allocator.replicas")

PREFIX = "serve-"
STOP_GRACE_S = 10.0
"""A replica's engine that ignores SIGTERM is killed then."""
RETRY_S = 2.0
"""Between two starts of an engine that does not stay up."""


class ManagedLender:
    """The backends of the allocator file. `supplies` stand as declared until `tell` says otherwise."""

    def __init__(self, engine: ExecutionEngine, declared: Declared) -> None:
        self._engine = engine
        self._declared = declared
        self._is_wanted: dict[str, bool] = {}
        self._supplies = {(supply.pool, supply.card): supply for supply in declared.supplies}
        self._reports: Mapping[str, Report] = {}
        self._tried_s: dict[str, float] = {}
        self._stopping: set[str] = set()
        self._starting: set[str] = set()

    def redeclare(self, declared: Declared) -> None:
        """Takes over an edited file. Supplies that it states anew replace what was told."""
        before = {(supply.pool, supply.card): supply for supply in self._declared.supplies}
        for supply in declared.supplies:
            if before.get((supply.pool, supply.card)) != supply:
                self.tell(supply)
        self._declared = declared

    def tell(self, supply: Supply) -> None:
        """What an inference pool can do without, from now on."""
        self._supplies[supply.pool, supply.card] = supply

    def restore(self, states: Mapping[str, BackendState]) -> None:
        """See the protocol."""
        self._is_wanted = {name: state in (BackendState.SERVING, BackendState.WARMING)
                           for name, state in states.items()}

    def owns_run(self, run_id: str) -> bool:
        """See the protocol."""
        return run_id.startswith(PREFIX)

    async def drain(self, backend: str, epoch: int) -> None:
        """See the protocol."""
        self._is_wanted[backend] = False

    async def serve(self, backend: str, epoch: int) -> None:
        """See the protocol. Starts at once: every second of this is a replica that does not serve."""
        self._is_wanted[backend] = True
        found = next((one for one in self._declared.backends if one.name == backend), None)
        if found is not None and self._live(backend) is None:
            await self._start(found)

    async def observe(self, reports: Mapping[str, Report]) -> Seen:
        """See the protocol. Also brings each engine to where it is wanted, level-triggered."""
        self._reports = reports
        backends = []
        for backend in self._declared.backends:
            state = await self._brought(backend)
            backends.append(Backend(backend.name, backend.pool, backend.card, backend.devices, state,
                                    backend.reload_s))
        return Seen(tuple(backends), tuple(self._supplies.values()))

    async def _brought(self, backend: Backend) -> BackendState:
        is_wanted = self._is_wanted.get(backend.name, True)
        if self._command(backend.name) is None:
            return BackendState.SERVING if is_wanted else BackendState.RELEASED
        live = self._live(backend.name)
        if is_wanted:
            if live is None and time.monotonic() - self._tried_s.get(backend.name, 0.0) >= RETRY_S:
                await self._start(backend)
            return BackendState.SERVING if live is not None and live.state is RunState.RUNNING else BackendState.WARMING
        if live is not None:
            if live.run_id not in self._stopping:
                await self._engine.stop(live.run_id, 1, time.time() + STOP_GRACE_S)
                self._stopping.add(live.run_id)
            return BackendState.DRAINING
        proof = await self._engine.prove_released(self._devices(backend))
        return BackendState.RELEASED if proof.released else BackendState.DRAINING

    async def _start(self, backend: Backend) -> None:
        command = self._command(backend.name)
        if command is None or backend.name in self._starting:
            return
        self._starting.add(backend.name)
        self._tried_s[backend.name] = time.monotonic()
        member = Member(command, self._devices(backend), {"HEADRACE_BACKEND": backend.name})
        launch = Launch(f"{PREFIX}{backend.name}-{self._next_number(backend.name)}", 1, (member,),
                        folder=str(self._declared.folder.absolute()))
        try:
            report = await self._engine.start(launch)
        except ExecutionError as problem:
            log.warning("the engine of %s is not started: %s", backend.name, problem)
            return
        finally:
            self._starting.discard(backend.name)
        self._reports = {**self._reports, report.run_id: report}
        log.info("the engine of %s is started as %s", backend.name, report.run_id)

    def _live(self, backend: str) -> Report | None:
        return next((report for report in self._of(backend) if not report.ended), None)

    def _of(self, backend: str) -> list[Report]:
        return [report for report in self._reports.values()
                if report.run_id.rpartition("-")[0] == f"{PREFIX}{backend}"]

    def _next_number(self, backend: str) -> int:
        # Wall seconds stand in where the records of earlier runs were cleared away.
        return max([int(time.time()), *(int(report.run_id.rpartition("-")[2]) + 1 for report in self._of(backend))])

    def _command(self, backend: str) -> tuple[str, ...] | None:
        return next((entry.command for entry in self._declared.config.backends if entry.name == backend), None)

    def _devices(self, backend: Backend) -> tuple[Device, ...]:
        known = self._declared.device_of
        return tuple(known[device] for device in backend.devices)
