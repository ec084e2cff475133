"""Which backend was sent which prompts: an approximate picture of the engines' prefix caches.

The memory of SGLang's router, of llm-d's prefix plug-in and of Dynamo's router without KV events: what was sent is
believed cached, until so much else was sent there that the oldest must have gone. A prompt is known by the keys of its
blocks; one without keys by its session, whose whole prompt then counts as one block.
"""

from collections import OrderedDict
from collections.abc import Hashable

from policies.facts import RequestFacts
from policies.learners.peers.remembering import Remembering
from policies.learning import Sent
from policies.pickers.engine_signals import kv_capacity_tokens
from policies.policy import Priced

CAPACITY_TOKENS = 2_000_000
"""Believed cache size where it is not known: llm-d's default of 31,250 blocks of 64 tokens."""


class PrefixMap(Remembering):
    """Prompts by backend, least recently sent first."""

    name = "prefix_map"

    def __init__(self) -> None:
        self._blocks: dict[str, OrderedDict[Hashable, int]] = {}
        self._tokens: dict[str, int] = {}

    def cached_tokens(self, backend: str, facts: RequestFacts) -> int:
        """Tokens from the front of the prompt that are believed cached there."""
        blocks = self._blocks.get(backend)
        if not blocks:
            return 0
        if not facts.prefix_keys:
            return min(facts.prompt_tokens, blocks.get(("session", facts.session_key), 0))
        cached = 0
        for key in facts.prefix_keys:
            if key not in blocks:
                break
            cached += facts.prefix_block_tokens
        return min(facts.prompt_tokens, cached)

    def sent(self, facts: RequestFacts, priced: Priced, now: float) -> Sent:
        backend = priced.backend.spec.name
        blocks = self._blocks.setdefault(backend, OrderedDict())
        # The front of the prompt goes in last and so leaves last: a tail without its front would be of no use.
        for key, tokens in reversed(_blocks_of(facts)):
            self._tokens[backend] = self._tokens.get(backend, 0) + tokens - blocks.pop(key, 0)
            blocks[key] = tokens
        room = kv_capacity_tokens(priced.backend) or CAPACITY_TOKENS
        while self._tokens.get(backend, 0) > room and blocks:
            self._tokens[backend] -= blocks.popitem(last=False)[1]
        return super().sent(facts, priced, now)

    def forget(self, backend: str) -> None:
        self._blocks.pop(backend, None)
        self._tokens.pop(backend, None)


def _blocks_of(facts: RequestFacts) -> list[tuple[Hashable, int]]:
    if facts.prefix_keys:
        return [(key, facts.prefix_block_tokens) for key in facts.prefix_keys]
    return [] if facts.session_key is None else [(("session", facts.session_key), facts.prompt_tokens)]
