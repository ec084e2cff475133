"""llm-d's default: three scores between 0 and 1, weighted and added; the highest sum wins, ties by dice.

::

    queue  = (longest - waiting) / (longest - shortest)     1 where all queues are equal
    kv     = 1 - share of the KV cache in use
    prefix = cached tokens / prompt tokens
    score  = queue_weight · queue + kv_weight · kv + prefix_weight · prefix

The queue is what the engine last said, the cache that or what we know to be in it (`pickers.engine_signals`). `cached`
is believed by the learner `prefix_map`; without it, 0. The queue's score is relative to the other candidates, as in the
original.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from backends.catalog.views import FleetView
from policies.facts import RequestFacts
from policies.learners.peers.prefix_map import PrefixMap
from policies.pickers.engine_signals import kv_usage_ratio, waiting_requests
from policies.pickers.weighing import lowest
from policies.policy import Priced, Rng
from policies.spec import setting


@dataclass(frozen=True, slots=True)
class WeightedScores:
    """The highest weighted sum of short queue, free KV cache and cached prefix."""

    name: ClassVar[str] = "weighted_scores"
    queue_weight: float = setting(2.0, "Weight of the score for a short queue.", at_least=0)
    kv_weight: float = setting(2.0, "Weight of the score for a free KV cache.", at_least=0)
    prefix_weight: float = setting(3.0, "Weight of the score for a cached prefix.", at_least=0)

    def __call__(
        self, facts: RequestFacts, candidates: Sequence[Priced], fleet: FleetView, now: float, rng: Rng
    ) -> tuple[Priced, str]:
        waiting = [waiting_requests(c.backend, now) for c in candidates]
        longest, spread = max(waiting), max(waiting) - min(waiting)
        prefixes = fleet.belief if isinstance(fleet.belief, PrefixMap) else None
        costs = []
        for candidate, queued in zip(candidates, waiting, strict=True):
            queue = (longest - queued) / spread if spread else 1.0
            cached = prefixes.cached_tokens(candidate.backend.spec.name, facts) if prefixes else 0
            score = (self.queue_weight * queue + self.kv_weight * (1.0 - kv_usage_ratio(candidate.backend, now))
                     + self.prefix_weight * cached / max(1, facts.prompt_tokens))
            costs.append(-score)
        chosen = lowest(costs, rng)
        return candidates[chosen], f"score {-costs[chosen]:.2f} of {len(candidates)}"
