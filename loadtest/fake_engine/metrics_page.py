"""The engine's books and their page in vLLM's names."""

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from loadtest.fake_engine.step import EngineState

TTFT_BUCKETS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)
INTER_TOKEN_BUCKETS_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)
LATENCY_BUCKETS_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
)
ITERATION_BUCKETS_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
FINISH_REASONS = ("stop", "length", "abort")


class Histogram:
    """Counts by bucket. Takes many equal observations at once: a batch has one gap between tokens for all."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative, as the exposition format wants them."""
        names = [str(float(bound)) for bound in self._bounds] + ["+Inf"]
        return [(name, float(count)) for name, count in zip(names, accumulate(self._counts), strict=True)]

    @property
    def sum(self) -> float:
        return self._sum


class EngineMetrics:
    """What the engine counted since it started. Durations are seconds of the clock, as a client would measure them."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.finished_requests = dict.fromkeys(FINISH_REASONS, 0)
        self.ttft_s = Histogram(TTFT_BUCKETS_S)
        self.inter_token_s = Histogram(INTER_TOKEN_BUCKETS_S)
        self.latency_s = Histogram(LATENCY_BUCKETS_S)
        self.iteration_tokens = Histogram(ITERATION_BUCKETS_TOKENS)

    def stepped(self, tokens: int) -> None:
        self.iteration_tokens.observe(tokens)

    def decoded(self, sequences: int, gap_s: float) -> None:
        self.generation_tokens += sequences
        self.inter_token_s.observe(gap_s, sequences)

    def first_token(self, prompt_tokens: int, ttft_s: float) -> None:
        self.prompt_tokens += prompt_tokens
        self.generation_tokens += 1
        self.ttft_s.observe(ttft_s)

    def finished(self, reason: str, latency_s: float) -> None:
        self.finished_requests[reason] += 1
        self.latency_s.observe(latency_s)


def render_page(state: EngineState, metrics: EngineMetrics, model_name: str, *, lie_idle: bool = False) -> bytes:
    """The /metrics page. `lie_idle` says that nothing runs, waits or fills memory, whatever is true."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Page(state, metrics, model_name, lie_idle))
    return generate_latest(registry)


class _Page(Collector):
    def __init__(self, state: EngineState, metrics: EngineMetrics, model_name: str, lie_idle: bool) -> None:
        self._state = state
        self._metrics = metrics
        self._names = ["model_name", "engine"]
        self._labels = [model_name, "0"]
        self._load = (0, 0, 0.0) if lie_idle else (state.running_seqs, state.waiting_seqs, state.kv_usage_ratio)

    def collect(self) -> Iterator[Metric]:
        yield from self._gauges()
        yield from self._counters()
        metrics = self._metrics
        for name, text, histogram in (
            ("time_to_first_token_seconds", "Time to first token.", metrics.ttft_s),
            ("inter_token_latency_seconds", "Gap between tokens.", metrics.inter_token_s),
            ("e2e_request_latency_seconds", "Latency of whole requests.", metrics.latency_s),
            ("iteration_tokens_total", "Tokens per engine step.", metrics.iteration_tokens),
        ):
            family = HistogramMetricFamily(f"vllm:{name}", text, labels=self._names)
            family.add_metric(self._labels, histogram.buckets(), histogram.sum)
            yield family

    def _gauges(self) -> Iterator[Metric]:
        running, waiting, kv_usage = self._load
        for name, text, value in (
            ("num_requests_running", "Requests in execution batches.", running),
            ("num_requests_waiting", "Requests waiting to be processed.", waiting),
            ("kv_cache_usage_perc", "KV cache in use, 0 to 1.", kv_usage),
        ):
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=self._names)
            gauge.add_metric(self._labels, value)
            yield gauge
        limits = self._state.limits
        config = GaugeMetricFamily(
            "vllm:cache_config_info", "The cache's configuration.", labels=["block_size", "engine", "num_gpu_blocks"]
        )
        blocks = limits.kv_capacity_tokens // limits.prefix_block_tokens
        config.add_metric([str(limits.prefix_block_tokens), "0", str(blocks)], 1)
        yield config

    def _counters(self) -> Iterator[Metric]:
        state, metrics = self._state, self._metrics
        for name, text, value in (
            ("prompt_tokens", "Prompt tokens processed.", metrics.prompt_tokens),
            ("generation_tokens", "Tokens generated.", metrics.generation_tokens),
            ("num_preemptions", "Sequences thrown out for lack of memory.", state.preemptions),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", state.prefix_queried_tokens),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", state.prefix_hit_tokens),
        ):
            counter = CounterMetricFamily(f"vllm:{name}", text, labels=self._names)
            counter.add_metric(self._labels, value)
            yield counter
        success = CounterMetricFamily(
            "vllm:request_success", "Requests that ran to their end.", labels=[*self._names, "finished_reason"]
        )
        for reason, count in metrics.finished_requests.items():
            success.add_metric([*self._labels, reason], count)
        yield success
