"""What an allocator, or a person, is told of capacity that can be done without: `GET /admin/lending` and its metrics.

Per model: the demand of late and its forecast, what all backends can take within the P99 budgets, and what is left of
that. Per backend: its stage, its own capacity, what would be left without it, whether it may be lent or stay away, and
how long it takes to be back. What is unknown is null, and lends nothing.
"""

from collections.abc import Callable, Iterable, Mapping
from threading import Lock
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from policies.forecast.capacity import capacity_per_s
from policies.forecast.forecaster import Step
from policies.forecast.mix import ClassMix
from policies.forecast.spare import Spare, Standing, spare
from router.config.fleet_file import FleetConfig
from router.fleet.live import Fleet, LiveBackend
from router.fleet.standing import drift_now
from router.lending.demand import Demand, ModelDemand, Tally
from router.lending.stages import Lending, Stage
from router.request.exchange import Exchange


class LendingDesk:
    """Demand, stages and what follows from both. One a process.

    Surveys may be asked for from a scrape's thread, while the event loop tells of requests: a lock keeps them apart.
    """

    def __init__(self, fleet: Fleet, config: FleetConfig, clock: Callable[[], float]) -> None:
        self._fleet = fleet
        self._clock = clock
        self._config = config
        self._lock = Lock()
        settings = config.lending
        self._demand = Demand(settings, clock, self._in_flight)
        """Of all processes: each counts what it serves, and reads what its siblings do (`router.workers.demand`)."""
        self.lending = Lending(fleet, clock, assumed_return_s=settings.assumed_return_s,
                               warmup_requests=settings.warmup_requests)

    def apply(self, config: FleetConfig) -> None:
        """Take over a configuration that the fleet has taken over."""
        with self._lock:
            self._config = config
            self._demand.resettle(config.lending)
        self.lending.assumed_return_s = config.lending.assumed_return_s
        self.lending.warmup_requests = config.lending.warmup_requests
        self.lending.follow_fleet()

    def ended(self, exchange: Exchange) -> None:
        """A request has ended."""
        with self._lock:
            self._demand.ended(exchange)

    def count_with(self, tally: Tally) -> None:
        """Count the demand there, where siblings count theirs. Before any request."""
        with self._lock:
            self._demand.tally = tally

    def export(self) -> dict[str, Any]:
        """What was learned of demand and lead times, as JSON values."""
        with self._lock:
            return {"demand": self._demand.export(), "lead_times": self.lending.export()}

    def restore(self, saved: Mapping[str, Any], age_s: float) -> None:
        """Begin with what was learned until so long ago. Raises ValueError, KeyError, TypeError: it is none of ours."""
        if not saved:
            return
        with self._lock:
            self._demand.restore(saved["demand"], age_s)
        self.lending.restore(saved["lead_times"])

    def document(self) -> dict[str, Any]:
        """The publication, as JSON values."""
        now = self._clock()
        models, backends = [], []
        for model in dict.fromkeys(live.spec.model for live in self._fleet.backends.values()):
            seen = self._survey(model, now)
            models.append(_model_document(model, seen, self._config.lending.bin_s))
            backends += [self._backend_document(live, seen, now) for live in seen.backends]
        return {"version": self.lending.version, "config_hash": self._fleet.config_hash,
                "grace_s": self._config.lending.grace_s, "models": models, "backends": backends}

    def backend_document(self, name: str) -> dict[str, Any]:
        """One backend's part of it."""
        live, now = self._fleet.backends[name], self._clock()
        return self._backend_document(live, self._survey(live.spec.model, now), now)

    def surveys(self) -> Mapping[str, "Survey"]:
        """By model."""
        now = self._clock()
        models = dict.fromkeys(live.spec.model for live in self._fleet.backends.values())
        return {model: self._survey(model, now) for model in models}

    def _in_flight(self, model: str) -> int:
        live = [one for one in (*self._fleet.backends.values(), *self._fleet.retiring) if one.spec.model == model]
        here = sum(backend.books.requests for backend in live)
        return here + self._demand.tally.in_flight_elsewhere([backend.spec for backend in live])

    def _survey(self, model: str, now: float) -> "Survey":
        with self._lock:
            return self._surveyed(model, now)

    def _surveyed(self, model: str, now: float) -> "Survey":
        settings = self._config.lending
        demand = self._demand.of(model)
        steps = demand.steps()
        budgets = {entry.name: entry.budget() for entry in self._config.latency_classes}
        classes = demand.classes(budgets)
        backends = [live for live in self._fleet.backends.values() if live.spec.model == model]
        standings = [self._standing(live, classes, now) for live in backends]
        found = spare(standings, steps, loan_horizon_s=settings.horizon_s, grace_s=settings.grace_s,
                      headroom_replicas=settings.headroom_replicas)
        return Survey(backends, {one.name: one for one in standings}, steps, demand, found)

    def _standing(self, live: LiveBackend, classes: Iterable[ClassMix], now: float) -> Standing:
        spec, place = live.spec, self.lending.place(live.spec.name)
        capacity = None
        if spec.coefficients is not None:
            capacity = capacity_per_s(spec.coefficients, spec.slots, drift_now(live.belief, live.drift, now),
                                      tuple(classes), self._config.lending.target)
        return Standing(
            name=spec.name, capacity_per_s=capacity, is_away=place.stage is not Stage.SERVING,
            serves=live.health.at(now).in_service and not live.draining, price_per_hour=spec.price_per_hour,
            return_s=place.returns.counted_on_s)

    def _backend_document(self, live: LiveBackend, seen: "Survey", now: float) -> dict[str, Any]:
        name, place = live.spec.name, self.lending.place(live.spec.name)
        standing, found = seen.standings[name], seen.spare
        without = (None if found.surplus_per_s is None or standing.capacity_per_s is None
                   else found.surplus_per_s - standing.carries_per_s)
        return {
            "name": name,
            "model": live.spec.model,
            "card_type": live.spec.card_type,
            "card_count": live.spec.card_count,
            "stage": place.stage.value,
            "for_s": round(now - place.since_s, 3),
            "detail": place.detail,
            "epoch": place.epoch,
            "in_flight": live.books.requests,
            "capacity_per_s": _rounded(standing.capacity_per_s),
            "headroom_without_per_s": _rounded(without),
            "lendable": name in found.lendable,
            "may_stay_away": name in found.may_stay_away,
            "drain_s": _rounded(place.drains.counted_on_s),
            "return_s": _rounded(place.returns.counted_on_s),
            "returns_measured": len(place.returns.seen_s),
        }


class Survey:
    """One model at one time."""

    def __init__(self, backends: list[LiveBackend], standings: Mapping[str, Standing], steps: tuple[Step, ...],
                 demand: ModelDemand, found: Spare) -> None:
        self.backends = backends
        self.standings = standings
        self.steps = steps
        self.demand = demand
        self.spare = found


def _model_document(model: str, seen: Survey, bin_s: float) -> dict[str, Any]:
    return {
        "model": model,
        "bin_s": bin_s,
        "demand_per_s": _rounded(seen.demand.last_per_s),
        "forecast": [{"in_s": round(step.in_s, 3), "q99_per_s": _rounded(step.per_s)} for step in seen.steps],
        "forecast_q99_per_s": _rounded(seen.spare.demand_per_s),
        "capacity_per_s": _rounded(seen.spare.capacity_per_s),
        "surplus_per_s": _rounded(seen.spare.surplus_per_s),
        "lendable_replicas": len(seen.spare.lendable),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


class LendingCollector(Collector):
    """The figures of the publication, read when a scrape asks. What is unknown has no sample."""

    def __init__(self, desk: LendingDesk) -> None:
        self._desk = desk

    def describe(self) -> Iterable[Metric]:
        return _families().values()

    def collect(self) -> Iterable[Metric]:
        families = _families()
        for model, seen in self._desk.surveys().items():
            for key, value in (("demand", seen.demand.last_per_s), ("forecast", seen.spare.demand_per_s),
                               ("capacity", seen.spare.capacity_per_s), ("surplus", seen.spare.surplus_per_s)):
                if value is not None:
                    families[key].add_metric([model], value)
            families["lendable"].add_metric([model], len(seen.spare.lendable))
            for live in seen.backends:
                place = self._desk.lending.place(live.spec.name)
                for stage in Stage:
                    families["stage"].add_metric([live.spec.name, stage.value], float(place.stage is stage))
                families["return"].add_metric([live.spec.name], place.returns.counted_on_s)
                own = seen.standings[live.spec.name].capacity_per_s
                if own is not None:
                    families["backend"].add_metric([live.spec.name], own)
        return families.values()


def _families() -> dict[str, GaugeMetricFamily]:
    def of_model(name: str, text: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"headrace_model_{name}", text, labels=("model",))

    def of_backend(name: str, text: str, *labels: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"headrace_backend_{name}", text, labels=("backend", *labels))

    return {
        "demand": of_model("demand_requests_per_second", "Requests a second in the last whole bin."),
        "forecast": of_model("forecast_requests_per_second", "Most that is forecast (q99) while a loan would last."),
        "capacity": of_model("capacity_requests_per_second", "What all backends can take within the P99 budgets."),
        "surplus": of_model("surplus_requests_per_second", "Capacity less forecast less headroom; negative: too few."),
        "lendable": of_model("lendable_backends", "Backends that can be done without while a loan lasts."),
        "stage": of_backend("lending_stage", "1 for the stage of lending that the backend is in.", "stage"),
        "return": of_backend("return_seconds", "Load and warm-up: how long it is counted on to take.",),
        "backend": of_backend("capacity_requests_per_second", "What it can take within the P99 budgets."),
    }
