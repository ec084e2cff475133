"""Every Prometheus name of the gateway, in one place.

Label values come from the configuration or from closed lists, never from a client: the number of series is fixed by
the fleet file. Gauges of live state are read when a scrape asks, so that nothing has to keep them up to date.
"""

from collections.abc import Callable, Iterable, Mapping
from time import monotonic

from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from backends.catalog.health import HealthState
from policies.attempts import FailureCause
from policies.policy import Decision
from router.config.fleet_file import FleetConfig
from router.fleet.feedback import Faults
from router.fleet.live import Fleet
from router.fleet.standing import ModelState, classes, drift_now, model_state
from router.record.instruments import Counter, Histogram
from router.record.ledger import Ledger
from router.request.exchange import Exchange
from router.request.promises import Prediction, judge, within

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
TOKEN_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
STATUS_LABELS = {status: str(status) for status in range(100, 600)}
WHY = {
    "cheapest": "cheapest", "safer": "safer", "session": "session", "explore": "explore", "late": "late",
    "gives": "gives_way",
    "shed": "shed", "model": "model_fault", "only": "only_candidate", "no": "nobody",
}  # fmt: skip
"""The first word of a decision's reason, as the label of a closed list."""
MICRO_SECONDS = (10e-6, 25e-6, 50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 50e-3)


class Metrics:
    """The instruments. One instance a process, with a registry of its own so that tests stay apart."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.watchers: list[Callable[[Exchange], None]] = []
        """Told of each request that has ended."""
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
        self.decisions = Counter(
            "headrace_decisions", "Routing decisions, by what settled them.", ("policy", "why"), registry
        )
        self.turned_away = Counter(
            "headrace_turned_away",
            "Requests refused although nothing was wrong with them, by why.",
            ("latency_class", "reason"),
            registry,
        )
        self.queue_seconds = Histogram(
            "headrace_queue_wait_seconds",
            "Time that requests waited for a backend to come up, by how it ended.",
            ("ended",),
            SECONDS,
            registry,
        )
        self.budgets = Counter(
            "headrace_budgets",
            "Budgets of requests that ended, by whether they were kept; `all` is the request as a whole.",
            ("latency_class", "budget", "result"),
            registry,
        )
        self.budget_late_seconds = Counter(
            "headrace_budget_late_seconds",
            "Seconds by which budgets were missed, summed.",
            ("latency_class", "budget"),
            registry,
        )
        self.predicted = Counter(
            "headrace_predicted",
            "Attempts that were held against their predicted P99.",
            ("backend", "latency_class", "span"),
            registry,
        )
        self.within_predicted = Counter(
            "headrace_within_predicted",
            "Attempts that stayed within their predicted P99.",
            ("backend", "latency_class", "span"),
            registry,
        )
        self.tokens = Counter("headrace_tokens", "Tokens by the engines' own count.", ("backend", "kind"), registry)
        self.attempts = Counter(
            "headrace_attempts", "Attempts on a backend, by how they ended.", ("backend", "outcome"), registry
        )
        self.retries = Counter(
            "headrace_retries", "Attempts after the first, by what failed before.", ("cause",), registry
        )
        self.hedges = Counter("headrace_hedges", "Hedges sent, by what became of them.", ("outcome",), registry)
        self.hedges_withheld = Counter(
            "headrace_hedges_withheld",
            "Requests whose first attempt was late and that were not hedged, by why.",
            ("reason",),
            registry,
        )
        self.hedge_wasted_seconds = Counter(
            "headrace_hedge_wasted_seconds",
            "Seconds of attempts that another one on the same request made useless, summed.",
            ("backend",),
            registry,
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

    def decided(self, decision: Decision, took_s: float) -> None:
        """A routing decision was taken."""
        self.decision_seconds.observe((), took_s)
        self.decisions.inc((decision.policy, WHY.get(decision.reason.partition(" ")[0], "other")))

    def ended(
        self, backend: str, latency_class: str, prediction: Prediction, cause: FailureCause | None, now: float
    ) -> None:
        """An attempt has ended: was it within what was predicted?"""
        for span, was_within in within(prediction, cause, now):
            labels = (backend, latency_class, span)
            self.predicted.inc(labels)
            self.within_predicted.inc(labels, float(was_within))

    def count(self, exchange: Exchange) -> None:
        """A request has ended. Called exactly once for each."""
        for watcher in self.watchers:
            watcher(exchange)
        for budget, kept, late_s in judge(exchange):
            latency_class = exchange.facts.latency_class  # type: ignore[union-attr]  # judged by it
            self.budgets.inc((latency_class, budget, "kept" if kept else "missed"))
            if late_s > 0.0:
                self.budget_late_seconds.inc((latency_class, budget), late_s)
        backend, endpoint, received_at_s = exchange.backend, exchange.endpoint, exchange.received_at_s
        status = STATUS_LABELS.get(exchange.status, "0")
        self.requests.inc((endpoint, exchange.model, backend, status, exchange.outcome))
        if received_at_s:
            self.request_seconds.observe((endpoint, backend), exchange.ended_at_s - received_at_s)
        if exchange.overhead_s is not None:
            self.overhead_seconds.observe((), exchange.overhead_s)
        if exchange.first_token_at_s is not None:
            self.ttft_seconds.observe((backend,), exchange.first_token_at_s - received_at_s)
            tpot_s = exchange.tpot_s()
            if tpot_s is not None:
                self.tpot_seconds.observe((backend,), tpot_s)
        usage = exchange.usage
        if usage is not None:
            self.tokens.inc((backend, "prompt"), usage.prompt_tokens or 0)
            self.tokens.inc((backend, "generated"), usage.completion_tokens or 0)


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


class ClassCollector(Collector):
    """Reads at scrape time what is believed of the configured classes, how often the learner failed, and who waits."""

    def __init__(
        self, fleet: Fleet, faults: Faults, waiting: Callable[[], Mapping[str, int]], config: Callable[[], FleetConfig]
    ) -> None:
        self._fleet = fleet
        self._waiting = waiting
        self._faults = faults
        self._config = config

    def describe(self) -> Iterable[Metric]:
        return self._families()

    def collect(self) -> Iterable[Metric]:
        weight, missed, expected, faults, waiting = families = self._families()
        config = self._config()
        budgets = {entry.name: entry.budget() for entry in config.latency_classes}
        for model, latency_class, belief in classes(
            self._fleet.pool_belief, [entry.name for entry in config.models], budgets
        ):
            labels = [model, latency_class]
            weight.add_metric(labels, belief.weight)
            missed.add_metric(labels, belief.missed)
            expected.add_metric(labels, belief.lengths.expected_output_tokens)
        faults.add_metric([], self._faults.count)
        for name, count in self._waiting().items():
            waiting.add_metric([name], count)
        return families

    @staticmethod
    def _families() -> tuple[
        GaugeMetricFamily, GaugeMetricFamily, GaugeMetricFamily, CounterMetricFamily, GaugeMetricFamily
    ]:
        by = ("model", "latency_class")
        return (
            GaugeMetricFamily("headrace_class_miss_weight",
                              "What a miss of the class weighs in decisions: 1 at first, more with each.", labels=by),
            GaugeMetricFamily("headrace_class_missed_ratio", "Share of late that missed its budget.", labels=by),
            GaugeMetricFamily("headrace_class_expected_output_tokens", "Output that decisions reckon with.", labels=by),
            CounterMetricFamily("headrace_learner_faults", "Exceptions of the policy's learner, survived."),
            GaugeMetricFamily("headrace_waiting_requests", "Requests that wait for a backend to come up.",
                              labels=("latency_class",)),
        )


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
            belief = live.belief
            families["drift_ratio"].add_metric(labels, drift_now(belief, live.drift, now))
            standing = model_state(live.spec, belief, now)
            for rung in ModelState:
                families["model_state"].add_metric([name, rung.value], float(standing is rung))
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
            family("model_state", "1 for what its predictions rest on.", "state"),
            family("health_state", "1 for the state the backend is in.", "state"),
            family("sample_age_seconds", "Age of the last metrics that the engine gave."),
            family("engine_running_requests", "Requests that the engine says it runs."),
            family("engine_waiting_requests", "Requests that the engine says it queues."),
            family("engine_kv_usage_ratio", "Share of KV cache that the engine says is in use."),
        ))
