"""The machine time that a request takes, at the backend's hourly price.

::

    cost   = price_per_hour / 3600 · device_s                                        money
    device = drift / 1000 · ( b·(P - h) + a·(P² - h²)/2 + (host + prefill_base) / n  s, prefill
                            + D·(d + (host + decode_base) / n) + e·(P·D + D²/2) )    s, decode

with the backend's coefficients, `P` prompt and `D` expected output tokens, and `h` prompt tokens that are believed to
be in its prefix cache: affinity is a price and not a rule. `n` sequences share the fixed part of each step: a quarter
of the backend's slots, four of them where there are few, the reference batch where they are not known. It is no
function of the batch of the moment, for then a fuller backend would look cheaper, and traffic would pile up on it.

Where a signal is missing: no coefficients → what `footing.coefficients_of` puts in their place; no price → the request
is free.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from backends.catalog.views import BackendView
from policies.estimate import NEVER, Estimate, cached_tokens, coefficients_of
from policies.facts import RequestFacts
from policies.footing import drift_of
from policies.spec import setting


@dataclass(frozen=True, slots=True)
class RequestCost:
    """Machine time that the request takes, at the backend's price per hour."""

    name: ClassVar[str] = "request_cost"
    predicts: ClassVar[bool] = False
    reference_batch: int = setting(
        32, "Sequences that share the fixed part of a step on a backend of unknown slots.", at_least=1)

    def __call__(self, facts: RequestFacts, backend: BackendView, estimate: Estimate, now: float) -> float:
        spec = backend.spec
        # What a stand-in costs changes with it, so that is kept with the view.
        memo = spec.memo if spec.coefficients is not None else backend.memo
        key = ("request_cost", self.reference_batch)
        rates = memo.get(key)
        if rates is None:
            rates = memo[key] = self._rates(backend)
        once, per_prompt_token, per_pair, per_output_token, per_context_token = rates
        prompt = facts.prompt_tokens
        output = facts.expected_output_tokens if facts.expected_output_tokens > 1 else 1
        cached = cached_tokens(facts, backend)
        cost: float = (
            once + output * per_output_token + output * (prompt + 0.5 * output) * per_context_token
            + (prompt - cached) * per_prompt_token + (prompt * prompt - cached * cached) * per_pair)
        slowness = drift_of(backend, now)
        return cost if slowness == 1.0 else cost * slowness

    def of_all(self, facts: RequestFacts, views: Sequence[BackendView], now: float) -> list[float]:
        """The same for each of `views`, in one pass."""
        if facts.session_key is not None or facts.prefix_keys:
            return [self(facts, view, NEVER, now) for view in views]
        key = ("request_cost", self.reference_batch)
        prompt = facts.prompt_tokens
        output = facts.expected_output_tokens if facts.expected_output_tokens > 1 else 1
        pairs, context = prompt * prompt, output * (prompt + 0.5 * output)
        costs = []
        for view in views:
            rates = view.spec.memo.get(key)
            if rates is None:
                costs.append(self(facts, view, NEVER, now))
                continue
            once, per_prompt_token, per_pair, per_output_token, per_context_token = rates
            cost = (once + output * per_output_token + context * per_context_token + prompt * per_prompt_token
                    + pairs * per_pair)
            slowness = drift_of(view, now)
            costs.append(cost if slowness == 1.0 else cost * slowness)
        return costs

    def _rates(self, backend: BackendView) -> tuple[float, float, float, float, float]:
        """Money: once, a prompt token, a prompt token squared, an output token, an output token and context token."""
        spec = backend.spec
        if spec.price_per_hour == 0:
            return 0.0, 0.0, 0.0, 0.0, 0.0
        c = coefficients_of(backend)
        slots = spec.slots
        sharing = self.reference_batch if not slots else max(slots / 4, min(slots, 4))
        per_ms = spec.price_per_hour / 3_600_000.0
        return (
            per_ms * (c.host_ms + c.prefill_base_ms) / sharing,
            per_ms * c.prefill_ms_per_token,
            per_ms * c.prefill_ms_per_pair * 0.5,
            per_ms * (c.decode_ms_per_seq + (c.host_ms + c.decode_base_ms) / sharing),
            per_ms * c.decode_ms_per_seq_token,
        )
