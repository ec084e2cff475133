"""Hugging Face Text Generation Inference.

Names: huggingface/text-generation-inference `docs/source/reference/metrics.md`. There are no token counters, but the
sums of the per-request histograms grow by the same tokens, when a request ends. KV figures are not published.
"""

from backends.catalog.sample import LoadSample
from backends.engines.dialect import Dialect
from backends.engines.exposition import as_count, read_page

RUNNING = "tgi_batch_current_size"
WAITING = "tgi_queue_size"
PROMPT = "tgi_request_input_length_sum"
GENERATED = "tgi_request_generated_tokens_sum"
_WANTED = frozenset({RUNNING, WAITING, PROMPT, GENERATED})


def parse_metrics(text: bytes, now: float) -> LoadSample:
    """A TGI page as a sample."""
    page = read_page(text, _WANTED)
    return LoadSample(
        taken_at_s=now,
        running_requests=as_count(page.total(RUNNING)),
        waiting_requests=as_count(page.total(WAITING)),
        prompt_tokens_total=page.total(PROMPT),
        generated_tokens_total=page.total(GENERATED),
    )


DIALECT = Dialect(name="tgi", parse_metrics=parse_metrics)
