"""The least time to drain, plus a barrier against a full KV cache: both in seconds, so that they add.

::

    score = work_tokens / tokens_per_s  +  kv_pressure_s · k / (1 - k)

    work_tokens    prompt tokens sent whose first token has not come                  tokens
    tokens_per_s   n · 1000 / step_ms(n), the rate of the n streams that decode now   tokens/s
    k              share of the KV cache in use, at most 0.999

Where a signal is missing: nobody decodes, or no coefficients → `default_tokens_per_s`; no fresh sample → `k` by the
router's own books (`pickers.engine_signals`). Ties are settled by dice.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from backends.catalog.views import BackendView, FleetView
from policies.facts import RequestFacts
from policies.pickers.engine_signals import kv_usage_ratio
from policies.pickers.weighing import lowest
from policies.policy import Priced, Rng
from policies.spec import setting


@dataclass(frozen=True, slots=True)
class LeastLoad:
    """The least prompt work ahead over the rate of decoding, with a barrier against a full KV cache."""

    name: ClassVar[str] = "least_load"
    kv_pressure_s: float = setting(0.15, "Weight of the KV barrier, in seconds.", at_least=0)
    default_tokens_per_s: float = setting(
        2000.0, "Rate of a backend that decodes nothing now or was never measured.", at_least=1)

    def __call__(
        self, facts: RequestFacts, candidates: Sequence[Priced], fleet: FleetView, now: float, rng: Rng
    ) -> tuple[Priced, str]:
        scores = [self._score_s(c.backend, now) for c in candidates]
        chosen = lowest(scores, rng)
        return candidates[chosen], f"least load {scores[chosen]:.2g}s of {len(candidates)}"

    def _score_s(self, backend: BackendView, now: float) -> float:
        used = min(0.999, kv_usage_ratio(backend, now))
        return backend.in_flight_prefill_tokens / self._tokens_per_s(backend) + self.kv_pressure_s * used / (1.0 - used)

    def _tokens_per_s(self, backend: BackendView) -> float:
        c, streams = backend.spec.coefficients, backend.in_flight_decode_requests
        if c is None or streams < 1:
            return self.default_tokens_per_s
        step_ms = (c.host_ms + c.decode_base_ms + c.decode_ms_per_seq * streams
                   + c.decode_ms_per_seq_token * backend.in_flight_context_tokens)
        return 1000.0 * streams / step_ms if step_ms > 0.0 else self.default_tokens_per_s
