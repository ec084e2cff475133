"""How much of a reference request a backend serves, from its measured coefficients; the static weight of a card.

::

    device_ms = b·P + a·P²/2 + (host + prefill_base) / n + D·(d + (host + decode_base) / n + e·(P + D/2))
    capacity  = 1000 / device_ms                                            requests/s

with `P` prompt and `D` output tokens of the reference request; `n`, the sequences that share the fixed part of a step,
and the other letters as in `policies.prices.request_cost`. Neither load nor drift nor cache enters: this is the weight
that an operator would write down after a measurement.

Where a signal is missing: no coefficients → those of `estimate.ASSUMED`, a slow card.
"""

from backends.catalog.views import BackendView
from policies.estimate import ASSUMED
from policies.pickers.weighing import WEIGHT_RANGE, pull

# A chat turn between the means of the Azure 2023 traces of conversation and code.
REFERENCE_PROMPT_TOKENS = 1024
REFERENCE_OUTPUT_TOKENS = 128
REFERENCE_BATCH = 32
"""Where slots are not known."""


def capacity_rps(backend: BackendView) -> float:
    """Reference requests per second; finite and positive, remembered with the spec."""
    memo = backend.spec.memo
    known: float | None = memo.get("capacity_rps")
    if known is None:
        prompt_ms, output_ms = token_ms(backend)
        device_ms = REFERENCE_PROMPT_TOKENS * prompt_ms + REFERENCE_OUTPUT_TOKENS * output_ms
        known = memo["capacity_rps"] = 1000.0 / device_ms if 1e-6 < device_ms < 1e12 else 1e-9
    return known


def token_ms(backend: BackendView) -> tuple[float, float]:
    """Machine time of a prompt token and of an output token of the reference request, in milliseconds."""
    c = backend.spec.coefficients or ASSUMED
    slots = backend.spec.slots
    sharing = max(slots / 4, min(slots, 4)) if slots else REFERENCE_BATCH
    prompt, output = REFERENCE_PROMPT_TOKENS, REFERENCE_OUTPUT_TOKENS
    prompt_ms = (c.prefill_ms_per_token + 0.5 * c.prefill_ms_per_pair * prompt
                 + (c.host_ms + c.prefill_base_ms) / sharing / prompt)
    output_ms = (c.decode_ms_per_seq + (c.host_ms + c.decode_base_ms) / sharing
                 + c.decode_ms_per_seq_token * (prompt + 0.5 * output))
    return prompt_ms, output_ms


def measured_pull(backend: BackendView, now: float) -> float:
    """The operator's weight times the measured capacity: what the share of a weighted balancer is proportional to."""
    low, high = WEIGHT_RANGE
    return min(high, max(low, pull(backend, now) * capacity_rps(backend)))
