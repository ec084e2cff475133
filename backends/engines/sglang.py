"""SGLang. Metrics need `--enable-metrics`; without it the page is 404.

Names: sgl-project/sglang `docs/references/production_metrics.md` and `python/sglang/srt/observability/
metrics_collector.py`. Gauges carry `dp_rank` and `tp_rank`: data-parallel ranks hold different requests and add up,
while tensor-parallel ranks of one group all report the same ones (`--enable-metrics-for-all-schedulers`), so within a
`dp_rank` the largest counts. The same rule takes the total over its breakdown by `priority`.
"""

from backends.catalog.sample import LoadSample
from backends.engines.dialect import Dialect
from backends.engines.exposition import as_count, as_ratio, mean, over_ranks, read_page

RUNNING = "sglang:num_running_reqs"
WAITING = "sglang:num_queue_reqs"
KV_USAGE = "sglang:token_usage"
KV_CAPACITY = "sglang:max_total_num_tokens"
PROMPT = "sglang:prompt_tokens_total"
GENERATED = "sglang:generation_tokens_total"
CACHE_HIT_RATE = "sglang:cache_hit_rate"
RETRACTED = "sglang:num_retracted_requests_total"
_WANTED = frozenset({RUNNING, WAITING, KV_USAGE, KV_CAPACITY, PROMPT, GENERATED, CACHE_HIT_RATE, RETRACTED})


def parse_metrics(text: bytes, now: float) -> LoadSample:
    """An SGLang page as a sample."""
    page = read_page(text, _WANTED)
    return LoadSample(
        taken_at_s=now,
        running_requests=as_count(over_ranks(page.per_rank("dp_rank", RUNNING))),
        waiting_requests=as_count(over_ranks(page.per_rank("dp_rank", WAITING))),
        kv_usage_ratio=as_ratio(over_ranks(page.per_rank("dp_rank", KV_USAGE), mean)),
        kv_capacity_tokens=as_count(over_ranks(page.per_rank("dp_rank", KV_CAPACITY))),
        prompt_tokens_total=page.total(PROMPT),
        generated_tokens_total=page.total(GENERATED),
        prefix_cache_hit_ratio=as_ratio(over_ranks(page.per_rank("dp_rank", CACHE_HIT_RATE), mean)),
        preemptions_total=over_ranks(page.per_rank("dp_rank", RETRACTED)),
    )


DIALECT = Dialect(name="sglang", parse_metrics=parse_metrics)
