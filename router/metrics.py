"""Every Prometheus name of the gateway, in one place.

Label values come from the configuration or from closed lists, never from a client: the number of series is fixed by
the fleet file. Gauges of live state are read when a scrape asks, so that nothing has to keep them up to date.
"""

from collections.abc import Callable, Iterable
from time import monotonic

from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from backends.catalog.health import HealthState
from router.fleet import Fleet
from router.instruments import Counter, Histogram
from router.ledger import Ledger

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
TOKEN_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
MICRO_SECONDS = (10e-6, 25e-6, 50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 50e-3)


class Metrics:
    """The instruments. One instance a process, with a registry of its own so that tests stay apart."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "headrace_requests",
            "Requests answered, by how they ended.",
            ("endpoint", "model", "backend", "status", "outcome"),
            registry,
        )
        self.request_seconds = Histogram(
            "headrace_request_duration_seconds",
            "From the last byte of the request to the last byte of the answer.",
            ("endpoint", "backend"),
            SECONDS,
            registry,
        )
        self.ttft_seconds = Histogram(
            "headrace_time_to_first_token_seconds",
            "From the last byte of the request to the first generated token, streams only.",
            ("backend",),
            SECONDS,
            registry,
        )
        self.tpot_seconds = Histogram(
            "headrace_time_per_output_token_seconds",
            "Mean time between generated tokens of one stream.",
            ("backend",),
            TOKEN_SECONDS,
            registry,
        )
        self.overhead_seconds = Histogram(
            "headrace_overhead_seconds",
            "Time spent in the gateway before the answer begins, waiting for backends left out.",
            (),
            MICRO_SECONDS,
            registry,
        )
        self.decision_seconds = Histogram(
            "headrace_decision_seconds", "Time one routing decision took.", (), MICRO_SECONDS, registry
        )
        self.tokens = Counter("headrace_tokens", "Tokens by the engines' own count.", ("backend", "kind"), registry)
        self.attempts = Counter(
            "headrace_attempts", "Attempts on a backend, by how they ended.", ("backend", "outcome"), registry
        )
        self.retries = Counter(
            "headrace_retries", "Attempts after the first, by what failed before.", ("cause",), registry
        )
        self.rejections = Counter(
            "headrace_filter_rejections",
            "Backends that a filter removed from a decision that then found none.",
            ("reason",),
            registry,
        )
        self.transitions = Counter(
            "headrace_backend_health_transitions",
            "Changes of a backend's health state.",
            ("backend", "state"),
            registry,
        )
        self.reloads = Counter("headrace_config_reloads", "Reload attempts by result.", ("result",), registry)
        self.config_ok = Gauge(
            "headrace_config_last_reload_successful",
            "1 where the fleet file as it stands is in force, 0 where it is broken and the last good one serves.",
            registry=registry,
        )
        self.config_ok.set(1)
        self.config_loaded_at = Gauge(
            "headrace_config_loaded_timestamp_seconds", "When the configuration in force was taken.", registry=registry
        )


class LedgerCollector(Collector):
    """What the decision log has done with its records; nothing where none is kept."""

    def __init__(self) -> None:
        self.ledger: Ledger | None = None

    def describe(self) -> Iterable[Metric]:
        return self.collect()

    def collect(self) -> Iterable[Metric]:
        ledger = self.ledger
        records = CounterMetricFamily(
            "headrace_decision_records", "Records of the decision log, by what became of them.", labels=("fate",)
        )
        waiting = GaugeMetricFamily("headrace_decision_records_waiting", "Records that wait to be written.")
        if ledger is not None:
            for fate, count in (("written", ledger.written), ("dropped", ledger.dropped), ("failed", ledger.failed)):
                records.add_metric([fate], count)
            waiting.add_metric([], ledger.waiting)
        return [records, waiting]


class FleetCollector(Collector):
    """Reads the live fleet at scrape time. A signal that is unknown has no sample, rather than a zero."""

    def __init__(self, fleet: Fleet, clock: Callable[[], float] = monotonic) -> None:
        self._fleet = fleet
        self._clock = clock

    def describe(self) -> Iterable[Metric]:
        return self._families().values()

    def collect(self) -> Iterable[Metric]:
        families = self._families()
        now = self._clock()
        for name, live in self._fleet.backends.items():
            labels = [name]
            health = live.health.at(now)
            families["weight"].add_metric(labels, live.spec.weight)
            families["in_flight_requests"].add_metric(labels, live.books.requests)
            families["in_flight_tokens"].add_metric([name, "prefill"], live.books.prefill_tokens)
            families["in_flight_tokens"].add_metric([name, "context"], live.books.context_tokens)
            families["drift_ratio"].add_metric(labels, live.drift)
            for state in HealthState:
                families["health_state"].add_metric([name, state.value], float(health.state is state))
            sample = live.sample
            if sample is None:
                continue
            families["sample_age_seconds"].add_metric(labels, sample.age_s(now))
            for key, value in (
                ("engine_running_requests", sample.running_requests),
                ("engine_waiting_requests", sample.waiting_requests),
                ("engine_kv_usage_ratio", sample.kv_usage_ratio),
            ):
                if value is not None:
                    families[key].add_metric(labels, value)
        return families.values()

    @staticmethod
    def _families() -> dict[str, GaugeMetricFamily]:
        def family(name: str, text: str, *labels: str) -> tuple[str, GaugeMetricFamily]:
            return name, GaugeMetricFamily(f"headrace_backend_{name}", text, labels=("backend", *labels))

        return dict((
            family("weight", "Weight in the configuration in force; 0 drains."),
            family("in_flight_requests", "Requests this gateway has there now."),
            family("in_flight_tokens", "Prompt tokens before their first token; context of decoding streams.", "kind"),
            family("drift_ratio", "Observed over predicted time per token, learned online."),
            family("health_state", "1 for the state the backend is in.", "state"),
            family("sample_age_seconds", "Age of the last metrics that the engine gave."),
            family("engine_running_requests", "Requests that the engine says it runs."),
            family("engine_waiting_requests", "Requests that the engine says it queues."),
            family("engine_kv_usage_ratio", "Share of KV cache that the engine says is in use."),
        ))
