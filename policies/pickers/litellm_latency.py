"""LiteLLM's latency rule: the lowest mean of the lists that the learner `latency_lists` keeps.

Everyone within `1 + buffer` times the lowest mean has the same chance. Untried deployments count as 0, so each is tried
first. What is in flight plays no part. Where the learner is missing, everyone counts as 0 and dice decide.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from backends.catalog.views import FleetView
from policies.facts import RequestFacts
from policies.learners.peers.latency_lists import LatencyLists
from policies.policy import Priced, Rng
from policies.spec import setting


@dataclass(frozen=True, slots=True)
class LiteLlmLatency:
    """The lowest mean latency per completion token, over lists whose first nine entries never leave."""

    name: ClassVar[str] = "litellm_latency"
    buffer: float = setting(0.0, "Share above the lowest latency within which dice decide.", at_least=0)

    def __call__(
        self, facts: RequestFacts, candidates: Sequence[Priced], fleet: FleetView, now: float, rng: Rng
    ) -> tuple[Priced, str]:
        lists = fleet.belief
        if isinstance(lists, LatencyLists):
            means = [lists.latency_s(c.backend.spec.name, facts.stream, now) for c in candidates]
        else:
            means = [0.0] * len(candidates)
        limit_s = min(means) * (1.0 + self.buffer)
        near = [index for index, mean in enumerate(means) if mean <= limit_s]
        chosen = near[rng.randrange(len(near))]
        return candidates[chosen], f"latency {means[chosen]:.2g}s per token, {len(near)} near of {len(candidates)}"
