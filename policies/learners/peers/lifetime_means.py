"""Mean prefill and decode times of each backend over all that it served, and the sizes they were measured on.

AIBrix reads them from the engines' histograms, which count from the engine's start; here the router keeps the sums. The
time in the engine's queue cannot be told from prefill at this distance, so it is part of it.
"""

from dataclasses import dataclass

from policies.learners.peers.remembering import Remembering
from policies.learning import End, Sent

DEFAULT_PROMPT_TOKENS = 10.0
DEFAULT_OUTPUT_TOKENS = 100.0


@dataclass(slots=True)
class _Sums:
    requests: int = 0
    prefill_s: float = 0.0
    prompt_tokens: int = 0
    decode_s: float = 0.0
    output_tokens: int = 0


class LifetimeMeans(Remembering):
    """Sums by backend."""

    name = "lifetime_means"

    def __init__(self) -> None:
        self._sums: dict[str, _Sums] = {}

    def usual_sizes(self) -> tuple[float, float]:
        """Prompt and output tokens of a request: the mean over backends of each backend's mean."""
        if not self._sums:
            return DEFAULT_PROMPT_TOKENS, DEFAULT_OUTPUT_TOKENS
        count = len(self._sums)
        return (sum([sums.prompt_tokens / sums.requests for sums in self._sums.values()]) / count,
                sum([sums.output_tokens / sums.requests for sums in self._sums.values()]) / count)

    def latency_s(self, backend: str, prompt_tokens: float, output_tokens: float) -> float:
        """What a request of this size takes there in the mean; 0 where nothing was measured, as in the original."""
        sums = self._sums.get(backend)
        if sums is None:
            return 0.0
        prefill_s = sums.prefill_s / max(1, sums.prompt_tokens) * prompt_tokens
        return prefill_s + sums.decode_s / max(1, sums.output_tokens) * output_tokens

    def ended(self, sent: Sent, end: End, now: float) -> None:
        if end.failure is not None or end.output_tokens < 1:
            return
        first_s = now if sent.first_token_at_s is None else sent.first_token_at_s
        sums = self._sums.setdefault(sent.backend, _Sums())
        sums.requests += 1
        sums.prefill_s += first_s - sent.sent_at_s
        sums.prompt_tokens += sent.facts.prompt_tokens if end.prompt_tokens is None else end.prompt_tokens
        sums.decode_s += now - first_s
        sums.output_tokens += end.output_tokens

    def forget(self, backend: str) -> None:
        self._sums.pop(backend, None)
