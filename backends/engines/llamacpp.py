"""llama.cpp's `llama-server`. Metrics need `--metrics`; without it the page is 501.

Names: ggml-org/llama.cpp `tools/server/README.md`. Builds of 2025 dropped the KV gauges; older ones still show them.
"""

from backends.catalog.sample import LoadSample
from backends.engines.dialect import Dialect
from backends.engines.exposition import as_count, read_page, share

RUNNING = "llamacpp:requests_processing"
WAITING = "llamacpp:requests_deferred"
KV_USAGE = "llamacpp:kv_cache_usage_ratio"
PROMPT = "llamacpp:prompt_tokens_total"
PROMPT_CACHED = "llamacpp:prompt_tokens_cached_total"
GENERATED = "llamacpp:tokens_predicted_total"
_WANTED = frozenset({RUNNING, WAITING, KV_USAGE, PROMPT, PROMPT_CACHED, GENERATED})


def parse_metrics(text: bytes, now: float) -> LoadSample:
    """A `llama-server` page as a sample. `prompt_tokens_total` leaves out cached tokens, so the two add to all."""
    page = read_page(text, _WANTED)
    computed, cached = page.total(PROMPT), page.total(PROMPT_CACHED)
    return LoadSample(
        taken_at_s=now,
        running_requests=as_count(page.total(RUNNING)),
        waiting_requests=as_count(page.total(WAITING)),
        kv_usage_ratio=page.mean_ratio(KV_USAGE),
        prompt_tokens_total=computed,
        generated_tokens_total=page.total(GENERATED),
        prefix_cache_hit_ratio=None if computed is None or cached is None else share(cached, computed + cached),
    )


DIALECT = Dialect(name="llamacpp", parse_metrics=parse_metrics)
