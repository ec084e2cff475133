"""What an engine last said of its queue and its KV cache, for pickers whose originals live on that.

A scrape is up to a second old, where the originals' are a twentieth of that, and a cache fills faster. So of the cache
the larger counts of what the engine said and what this router has in flight there over the measured capacity: it never
falls when we send more, and it is exact where nobody else sends. Taken from the scrape alone, `llmd_default` would lose
ten points of requests in budget in the simulator, for a reason that is not its own.

Where the sample is missing, older than `SAMPLE_FRESH_S` or lacks the series, this router's own books stand alone:
requests without a first token for the queue, tokens in flight for the cache (0 where its capacity is not known).
"""

from backends.catalog.views import BackendView
from policies.estimate import SAMPLE_FRESH_S


def waiting_requests(backend: BackendView, now: float) -> int:
    """Requests in the engine's queue."""
    sample = backend.sample
    if sample is not None and sample.waiting_requests is not None and sample.age_s(now) <= SAMPLE_FRESH_S:
        return sample.waiting_requests
    return backend.in_flight_prefill_requests


def kv_usage_ratio(backend: BackendView, now: float) -> float:
    """Share of the KV cache in use, 0 to 1."""
    capacity_tokens, sample = kv_capacity_tokens(backend), backend.sample
    in_flight_tokens = backend.in_flight_context_tokens + backend.in_flight_prefill_tokens
    ratio = in_flight_tokens / capacity_tokens if capacity_tokens else 0.0
    if sample is not None and sample.kv_usage_ratio is not None and sample.age_s(now) <= SAMPLE_FRESH_S:
        ratio = max(ratio, sample.kv_usage_ratio)
    return min(1.0, max(0.0, ratio))


def kv_capacity_tokens(backend: BackendView) -> int | None:
    """Tokens that the KV cache holds: as measured, else as the engine says."""
    coefficients, sample = backend.spec.coefficients, backend.sample
    if coefficients is not None and coefficients.kv_capacity_tokens:
        return coefficients.kv_capacity_tokens
    return sample.kv_capacity_tokens if sample is not None and sample.kv_capacity_tokens else None
