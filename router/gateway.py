"""The rooms of one gateway process joined: configuration in, a fleet that serves, and the step that swaps it."""

from collections.abc import Callable
from pathlib import Path
from time import monotonic

from backends.catalog.health import Health
from backends.poller import Poller
from router.config import LoadedFleet
from router.dispatch import Dispatcher
from router.fleet import Fleet
from router.generation import Generation
from router.metrics import FleetCollector, Metrics
from router.reload import Reloader, ReloadResult


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
        self.fleet.apply(loaded.specs, loaded.config.health_rules(), loaded.config_hash)
        self.dispatcher = Dispatcher(Generation.of(loaded), self.fleet, self.metrics, clock=clock)
        self.poller = Poller(
            loaded.specs,
            interval_s=loaded.config.poll.interval_s,
            timeout_s=loaded.config.poll.timeout_s,
            on_sample=self.fleet.on_sample,
            on_probe=self.fleet.on_probe,
            clock=clock,
        )
        self.reloader = Reloader(path, self.apply, environ, self._on_reload, running=loaded)
        self.metrics.config_loaded_at.set_to_current_time()

    def apply(self, loaded: LoadedFleet) -> None:
        """Swap the configuration. Whatever can fail is built before the first assignment."""
        generation = Generation.of(loaded)
        rules = loaded.config.health_rules()
        self.fleet.apply(loaded.specs, rules, loaded.config_hash)
        self.dispatcher.generation = generation
        self.loaded = loaded
        self.poller.update(
            loaded.specs, interval_s=loaded.config.poll.interval_s, timeout_s=loaded.config.poll.timeout_s
        )
        self.metrics.config_loaded_at.set_to_current_time()

    def ready(self) -> bool:
        """Whether a load balancer should send requests here."""
        return not self.stopping and self.fleet.ready(self.clock())

    async def aclose(self) -> None:
        await self.poller.aclose()
        self.fleet.close()

    def _on_transition(self, name: str, before: Health, after: Health) -> None:
        self.metrics.transitions.labels(name, after.state.value).inc()

    def _on_reload(self, result: ReloadResult) -> None:
        self.metrics.reloads.labels("ok" if result.ok else "refused").inc()
        self.metrics.config_ok.set(result.ok)
