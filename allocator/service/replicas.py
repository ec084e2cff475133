"""The engines of replicas, run by the allocator on the same execution engine as the jobs.

So the engine of a replica and the job on its devices can never meet: each waits for the proof that the other is gone.

A replica's run is called `serve-<backend>-<number>`; the numbers only grow. A job's run ends with a dot and a number:
it is never taken for one.
"""

import logging
import re
import time
from collections.abc import Mapping

from allocator.execution.devices import Device
from allocator.execution.engine import ExecutionEngine, ExecutionError
from allocator.execution.values import Launch, Member, Report, RunState
from allocator.service.config import Declared

log = logging.getLogger("headrace.allocator.replicas")

PREFIX = "serve-"
_RUN = re.compile(re.escape(PREFIX) + r"(?P<backend>.+)-(?P<number>[0-9]+)")
STOP_GRACE_S = 10.0
"""A replica's engine that ignores SIGTERM is killed then."""
RETRY_S = 2.0
"""Between two starts of an engine that does not stay up."""


class ReplicaEngines:
    """Keeps `allocator.lender.engines.EngineKeeper`, for the backends of the file that have a command."""

    def __init__(self, engine: ExecutionEngine, declared: Declared) -> None:
        self._engine = engine
        self._declared = declared
        self._reports: Mapping[str, Report] = {}
        self._kept: set[str] = set()
        self._tried_s: dict[str, float] = {}
        self._stopping: set[str] = set()
        self._starting: set[str] = set()

    def redeclare(self, declared: Declared) -> None:
        """See the protocol. What runs is left as it is until it is started anew."""
        self._declared = declared

    def owns_run(self, run_id: str) -> bool:
        """See the protocol."""
        return _RUN.fullmatch(run_id) is not None

    def command(self, backend: str) -> tuple[str, ...] | None:
        """What starts its engine; `None` where the file leaves that to somebody else."""
        return next((entry.command for entry in self._declared.config.backends if entry.name == backend), None)

    def is_running(self, backend: str) -> bool:
        """Whether its engine was up when it was last looked at."""
        live = self._live(backend)
        return live is not None and live.state is RunState.RUNNING

    async def look(self, reports: Mapping[str, Report]) -> None:
        """See the protocol. An engine that went down by itself is started again."""
        self._reports = reports
        for backend in sorted(self._kept):
            if self._live(backend) is None and time.monotonic() - self._tried_s.get(backend, 0.0) >= RETRY_S:
                self._say_how_it_ended(backend)
                await self._start(backend)

    async def start(self, backend: str) -> None:
        """See the protocol. At once where it was not kept before: every second of that is a replica that serves not."""
        if backend not in self._kept:
            self._kept.add(backend)
            if self._live(backend) is None:
                await self._start(backend)

    async def stop(self, backend: str) -> None:
        """See the protocol."""
        self._kept.discard(backend)
        live = self._live(backend)
        if live is not None and live.run_id not in self._stopping:
            await self._engine.stop(live.run_id, 1, time.time() + STOP_GRACE_S)
            self._stopping.add(live.run_id)

    async def is_gone(self, backend: str) -> bool:
        """See the protocol."""
        if self._live(backend) is not None:
            return False
        return (await self._engine.prove_released(self._devices(backend))).released

    async def _start(self, backend: str) -> None:
        command = self.command(backend)
        if command is None or backend in self._starting:
            return
        self._starting.add(backend)
        self._tried_s[backend] = time.monotonic()
        member = Member(command, self._devices(backend), {"HEADRACE_BACKEND": backend})
        launch = Launch(f"{PREFIX}{backend}-{self._next_number(backend)}", 1, (member,),
                        folder=str(self._declared.folder.absolute()))
        try:
            report = await self._engine.start(launch)
        except ExecutionError as problem:
            log.warning("the engine of %s is not started: %s", backend, problem)
            return
        finally:
            self._starting.discard(backend)
        self._reports = {**self._reports, report.run_id: report}
        log.info("the engine of %s is started as %s", backend, report.run_id)

    def _say_how_it_ended(self, backend: str) -> None:
        last = max(self._of(backend), key=_number, default=None)
        if last is not None:
            log.warning("the engine of %s ended by itself: %s; its output is in %s/log-0", backend,
                        last.note or last.state.value, self._declared.state / "runs" / last.run_id)

    def _live(self, backend: str) -> Report | None:
        return next((report for report in self._of(backend) if not report.ended), None)

    def _of(self, backend: str) -> list[Report]:
        return [report for report in self._reports.values()
                if (named := _RUN.fullmatch(report.run_id)) is not None and named["backend"] == backend]

    def _next_number(self, backend: str) -> int:
        # Wall seconds stand in where the records of earlier runs were cleared away.
        return max([int(time.time()), *(_number(report) + 1 for report in self._of(backend))])

    def _devices(self, backend: str) -> tuple[Device, ...]:
        known = self._declared.device_of
        names = next((entry.devices for entry in self._declared.config.backends if entry.name == backend), ())
        return tuple(known[device] for device in names)


def _number(report: Report) -> int:
    return int(report.run_id.rpartition("-")[2])
