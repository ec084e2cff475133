"""Dynamo's cost in KV blocks: prompt blocks still to be prefilled, less those cached, plus blocks in use.

::

    prefill = max(0, (prefill_tokens + P) / block - overlap_credit · cached / block)
    decode  = (prefill_tokens + context_tokens + P) / block
    cost    = prefill_load_scale · prefill + decode                                   blocks

with `P` the request's prompt tokens and the rest this router's own books, as the original keeps them too. `cached` is
believed by the learner `prefix_map`; without it, 0. A temperature above 0 draws by softmax of the costs spread over
[0, 1]; at 0 the lowest wins, ties by dice. A block counts the same on every card.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp
from typing import ClassVar

from backends.catalog.views import FleetView
from policies.facts import RequestFacts
from policies.learners.peers.prefix_map import PrefixMap
from policies.pickers.weighing import draw, lowest
from policies.policy import Priced, Rng
from policies.spec import setting


@dataclass(frozen=True, slots=True)
class BlockCost:
    """The lowest number of KV blocks, to prefill and in use, less the cached ones."""

    name: ClassVar[str] = "block_cost"
    overlap_credit: float = setting(1.0, "Blocks saved per cached block.", at_least=0)
    prefill_load_scale: float = setting(1.0, "Weight of a block to prefill against one in use.", at_least=0)
    temperature: float = setting(0.0, "Softmax temperature over costs spread to [0, 1]; 0: the lowest.", at_least=0)
    block_tokens: int = setting(16, "Tokens of a KV block.", at_least=1)

    def __call__(
        self, facts: RequestFacts, candidates: Sequence[Priced], fleet: FleetView, now: float, rng: Rng
    ) -> tuple[Priced, str]:
        costs = [self._cost(facts, c, fleet) for c in candidates]
        chosen = lowest(costs, rng)
        least, spread = costs[chosen], max(costs) - costs[chosen]
        # A temperature so small that the division overflows is as good as 0.
        scale = self.temperature * spread
        if scale > 1e-300:
            chosen = draw(costs, [exp(max(-700.0, (least - cost) / scale)) for cost in costs], rng.random())
        return candidates[chosen], f"block cost {costs[chosen]:.0f} of {len(candidates)}"

    def _cost(self, facts: RequestFacts, candidate: Priced, fleet: FleetView) -> float:
        backend, prefixes = candidate.backend, fleet.belief
        cached = prefixes.cached_tokens(backend.spec.name, facts) if isinstance(prefixes, PrefixMap) else 0
        to_prefill = backend.in_flight_prefill_tokens + facts.prompt_tokens
        prefill = max(0.0, to_prefill - self.overlap_credit * cached)
        in_use = to_prefill + backend.in_flight_context_tokens
        return (self.prefill_load_scale * prefill + in_use) / self.block_tokens
