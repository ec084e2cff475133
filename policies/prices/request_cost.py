"""The machine time that a request takes, at the backend's hourly price.

::

    cost   = price_per_hour / 3600 · device_s                                        money
    device = drift / 1000 · ( b·P + a·P²/2 + (host + prefill_base) / n               s, prefill
                            + D·(d + (host + decode_base) / n) + e·(P·D + D²/2) )    s, decode

with the backend's coefficients, `P` prompt and `D` expected output tokens, and `n = min(reference_batch, slots)`: the
sequences that share the fixed part of each step. The reference batch is a setting and not the batch of the moment:
with the latter a fuller backend would look cheaper, and traffic would pile up on it.

Where a signal is missing: no coefficients → the slow `estimate.ASSUMED`; no price → the request is free.
"""

from dataclasses import dataclass
from typing import ClassVar

from backends.catalog.views import BackendView
from policies.estimate import ASSUMED, Estimate, bounded_drift
from policies.facts import RequestFacts
from policies.spec import setting


@dataclass(frozen=True, slots=True)
class RequestCost:
    """Machine time that the request takes, at the backend's price per hour."""

    name: ClassVar[str] = "request_cost"
    reference_batch: int = setting(
        16, "Sequences that share the fixed part of a step; a backend with fewer slots shares it among those.",
        at_least=1)

    def __call__(self, facts: RequestFacts, backend: BackendView, estimate: Estimate, now: float) -> float:
        key = ("request_cost", self.reference_batch)
        rates = backend.memo.get(key)
        if rates is None:
            rates = backend.memo[key] = self._rates(backend)
        once, per_prompt_token, per_pair, per_output_token, per_context_token = rates
        prompt = facts.prompt_tokens
        output = facts.expected_output_tokens if facts.expected_output_tokens > 1 else 1
        cost: float = (once + prompt * (per_prompt_token + per_pair * prompt)
                       + output * (per_output_token + per_context_token * (prompt + 0.5 * output)))
        return cost

    def _rates(self, backend: BackendView) -> tuple[float, float, float, float, float]:
        """Money: once, a prompt token, a prompt token squared, an output token, an output token and context token."""
        spec = backend.spec
        if spec.price_per_hour == 0:
            return 0.0, 0.0, 0.0, 0.0, 0.0
        c = spec.coefficients or ASSUMED
        sharing = self.reference_batch
        if spec.slots and spec.slots < sharing:
            sharing = spec.slots
        per_ms = spec.price_per_hour * bounded_drift(backend) / 3_600_000.0
        return (
            per_ms * (c.host_ms + c.prefill_base_ms) / sharing,
            per_ms * c.prefill_ms_per_token,
            per_ms * c.prefill_ms_per_pair * 0.5,
            per_ms * (c.decode_ms_per_seq + (c.host_ms + c.decode_base_ms) / sharing),
            per_ms * c.decode_ms_per_seq_token,
        )
