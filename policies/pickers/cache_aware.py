"""SGLang's rule: the backend that has the longest prefix of the prompt, unless loads are far apart.

1. *Imbalanced* is `max - min > balance_abs` and `max > balance_rel · min` in requests in flight: the fewest wins.
2. Else, where some backend is believed to have more than `cache_threshold` of the prompt, the one that has most.
3. Else the fewest in flight.

What is cached where is believed by the learner `prefix_map`; without it, or without keys, it is 1 and 3. Ties go to the
fewer in flight, then to dice.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from backends.catalog.views import FleetView
from policies.facts import RequestFacts
from policies.learners.peers.prefix_map import PrefixMap
from policies.pickers.weighing import lowest
from policies.policy import Priced, Rng
from policies.spec import setting


@dataclass(frozen=True, slots=True)
class CacheAware:
    """The longest cached prefix, or the fewest in flight where loads are far apart or little is cached."""

    name: ClassVar[str] = "cache_aware"
    cache_threshold: float = setting(
        0.5, "Share of the prompt that must be cached somewhere to be followed there.", at_least=0, at_most=1)
    balance_abs: int = setting(32, "Difference in requests in flight above which loads may be far apart.", at_least=0)
    balance_rel: float = setting(
        1.1, "Ratio of most to fewest requests in flight above which they are.", at_least=1)

    def __call__(
        self, facts: RequestFacts, candidates: Sequence[Priced], fleet: FleetView, now: float, rng: Rng
    ) -> tuple[Priced, str]:
        flying = [c.backend.in_flight_requests for c in candidates]
        most, fewest = max(flying), min(flying)
        if most - fewest > self.balance_abs and most > self.balance_rel * fewest:
            return candidates[lowest(flying, rng)], f"imbalanced, least inflight {fewest} of {len(candidates)}"
        prefixes = fleet.belief
        if isinstance(prefixes, PrefixMap):
            cached = [prefixes.cached_tokens(c.backend.spec.name, facts) for c in candidates]
            longest = max(cached)
            if longest > self.cache_threshold * facts.prompt_tokens:
                having = [index for index, tokens in enumerate(cached) if tokens == longest]
                chosen = having[lowest([flying[index] for index in having], rng)]
                return candidates[chosen], f"cached {longest} tokens of {facts.prompt_tokens}"
        return candidates[lowest(flying, rng)], f"little cached, least inflight {fewest} of {len(candidates)}"
