"""The rooms of one gateway process joined: configuration in, a fleet that serves, and the step that swaps it."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from time import monotonic

from backends.catalog.health import Health, HealthState
from backends.poller import Poller
from policies.registry import build_learner
from router.config.fleet_file import LoadedFleet
from router.config.reload import Reloader, ReloadResult
from router.fleet.live import Fleet
from router.fleet.state_file import StateFile
from router.lending.report import LendingCollector, LendingDesk
from router.path.dispatch import Dispatcher
from router.record.ledger import Ledger
from router.record.metrics import ClassCollector, FleetCollector, LedgerCollector, Metrics
from router.request.generation import Generation

log = logging.getLogger("headrace.gateway")


class Gateway:
    """Everything alive in the process. `stopping` is set while it drains: it answers, but is not ready for more."""

    def __init__(
        self, path: Path, loaded: LoadedFleet, environ: dict[str, str], *, clock: Callable[[], float] = monotonic
    ) -> None:
        self.clock = clock
        self.stopping = False
        self.loaded = loaded
        self.metrics = Metrics()
        self.fleet = Fleet(clock=clock, on_transition=self._on_transition)
        self.metrics.registry.register(FleetCollector(self.fleet, clock))
        self.fleet.learner = build_learner(loaded.config.policy_spec())
        self.fleet.apply(loaded.specs, loaded.config.health_rules(), loaded.config_hash)
        self.dispatcher = Dispatcher(Generation.of(loaded), self.fleet, self.metrics, clock=clock)
        self.metrics.registry.register(
            ClassCollector(
                self.fleet, self.dispatcher.faults, self.dispatcher.waiting.by_class, lambda: self.loaded.config
            )
        )
        self.keeps_state: Callable[[], bool] = lambda: True
        """Whether it is this process that saves what was learned; among workers, the leader."""
        self.desk = LendingDesk(self.fleet, loaded.config, clock)
        self._state = _state_of(path, loaded)
        if self._state is not None:
            self._state.load(self.fleet.learner, self.dispatcher.prompt_ratios, loaded.specs, self.desk)
        self.poller = Poller(
            loaded.specs,
            interval_s=loaded.config.poll.interval_s,
            timeout_s=loaded.config.poll.timeout_s,
            on_sample=self.fleet.on_sample,
            on_probe=self.fleet.on_probe,
            clock=clock,
        )
        self._ledger = _ledger_of(path, loaded)
        self.dispatcher.ledger = self._ledger
        records = LedgerCollector()
        records.ledger = self._ledger
        self.metrics.registry.register(records)
        self.metrics.watchers.append(self.desk.ended)
        self.metrics.registry.register(LendingCollector(self.desk))
        self.reloader = Reloader(path, self.apply, environ, self._on_reload, running=loaded)
        self.metrics.config_loaded_at.set_to_current_time()

    def apply(self, loaded: LoadedFleet) -> None:
        """Swap the configuration. Whatever can fail is built before the first assignment."""
        generation = Generation.of(loaded)
        rules = loaded.config.health_rules()
        learner = build_learner(loaded.config.policy_spec())
        if learner.name != self.fleet.learner.name:
            self.fleet.learner = learner  # attempts under way tell the one that they began under
        self.fleet.apply(loaded.specs, rules, loaded.config_hash)
        self.dispatcher.generation = generation
        self.loaded = loaded
        self.desk.apply(loaded.config)
        self.poller.update(
            loaded.specs, interval_s=loaded.config.poll.interval_s, timeout_s=loaded.config.poll.timeout_s
        )
        self.metrics.config_loaded_at.set_to_current_time()

    def ready(self) -> bool:
        """Whether a load balancer should send requests here."""
        return not self.stopping and self.fleet.ready(self.clock())

    async def aclose(self) -> None:
        """Close what is open; records that wait are written first."""
        await self.desk.lending.aclose()
        await self.poller.aclose()
        self.fleet.close()
        await self._save_state()
        if self._ledger is not None and not await asyncio.to_thread(self._ledger.close):
            log.error("the decision log could not be written to its end")

    async def keep_state(self) -> None:
        """Save what was learned now and then, until cancelled."""
        if self._state is None:
            return
        while True:
            await asyncio.sleep(self.loaded.config.state.save_every_s)
            await self._save_state()

    async def _save_state(self) -> None:
        if self._state is not None and self.keeps_state():
            # In a thread: a large fleet takes tens of milliseconds to write down.
            await asyncio.to_thread(
                self._state.save, self.fleet.learner, self.dispatcher.prompt_ratios, self.loaded.specs, self.desk
            )

    def _on_transition(self, name: str, before: Health, after: Health) -> None:
        self.metrics.transitions.inc((name, after.state.value))
        is_out = after.state in (HealthState.UNHEALTHY, HealthState.EJECTED)
        level = logging.WARNING if is_out else logging.INFO
        log.log(level, "backend %s: %s (was %s)", name, after.describe(), before.state.value)

    def _on_reload(self, result: ReloadResult) -> None:
        self.metrics.reloads.inc(("ok" if result.ok else "refused",))
        self.metrics.config_ok.set(result.ok)


def _ledger_of(fleet_file: Path, loaded: LoadedFleet) -> Ledger | None:
    section = loaded.config.decision_log
    if section.path is None:
        return None
    return Ledger(
        fleet_file.parent / section.path,
        max_bytes=section.max_bytes,
        keep_files=section.keep_files,
        queue_records=section.queue_records,
        later=asyncio.get_running_loop().call_soon,
    )


def _state_of(fleet_file: Path, loaded: LoadedFleet) -> StateFile | None:
    path = loaded.config.state.path
    return None if path is None else StateFile(fleet_file.parent / path)
