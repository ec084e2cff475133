"""vLLM, V0 and V1 engines.

Names: vllm-project/vllm `vllm/v1/metrics/loggers.py` and `docs/design/metrics.md`. V1 renamed the KV gauge
(`gpu_cache_usage_perc` → `kv_cache_usage_perc`) and the prefix counters, and labels each series with its data-parallel
`engine`. Load is summed over engines, ratios are averaged.
"""

from collections.abc import Sequence

from backends.catalog.sample import LoadSample
from backends.engines.dialect import Dialect
from backends.engines.exposition import Page, as_count, read_page, share

RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
KV_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
CACHE_CONFIG = "vllm:cache_config_info"
PROMPT = "vllm:prompt_tokens_total"
GENERATED = "vllm:generation_tokens_total"
PREEMPTIONS = "vllm:num_preemptions_total"
PREFIX_HITS = ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total")
PREFIX_QUERIES = ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total")
PREFIX_HIT_RATE = "vllm:gpu_prefix_cache_hit_rate"


def read_sample(text: bytes, now: float, kv_usage: Sequence[str] = KV_USAGE) -> LoadSample:
    """A vLLM page as a sample; `kv_usage` are the names of the KV gauge, newest first."""
    page = read_page(text, {RUNNING, WAITING, CACHE_CONFIG, PROMPT, GENERATED, PREEMPTIONS, PREFIX_HIT_RATE,
                            *kv_usage, *PREFIX_HITS, *PREFIX_QUERIES})
    hit_ratio = share(page.total(*PREFIX_HITS), page.total(*PREFIX_QUERIES))
    return LoadSample(
        taken_at_s=now,
        running_requests=as_count(page.total(RUNNING)),
        waiting_requests=as_count(page.total(WAITING)),
        kv_usage_ratio=page.mean_ratio(*kv_usage),
        kv_capacity_tokens=_kv_capacity_tokens(page),
        prompt_tokens_total=page.total(PROMPT),
        generated_tokens_total=page.total(GENERATED),
        prefix_cache_hit_ratio=page.mean_ratio(PREFIX_HIT_RATE) if hit_ratio is None else hit_ratio,
        preemptions_total=page.total(PREEMPTIONS),
    )


def parse_metrics(text: bytes, now: float) -> LoadSample:
    """A vLLM page as a sample."""
    return read_sample(text, now)


def _kv_capacity_tokens(page: Page) -> int | None:
    """KV tokens over all engines, from the labels of an info series.

    Newer versions say `kv_cache_size_tokens`, which also holds for hybrid models where a block is not one group's
    `block_size`; older ones leave blocks times block size. A value is the text "None" until the engine has profiled.
    """
    engines = page.find(CACHE_CONFIG)
    sizes: list[int] = []
    for engine in engines:
        said = _whole(engine.labels.get("kv_cache_size_tokens"))
        blocks, block_size = _whole(engine.labels.get("num_gpu_blocks")), _whole(engine.labels.get("block_size"))
        size = said or (blocks * block_size if blocks and block_size else None)
        if size is None:
            return None
        sizes.append(size)
    return sum(sizes) if sizes else None


def _whole(text: str | None) -> int | None:
    return int(text) if text and text.isascii() and text.isdigit() and len(text) < 16 else None


DIALECT = Dialect(name="vllm", parse_metrics=parse_metrics)
