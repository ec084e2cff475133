"""Which prompts a backend still has in its prefix cache, as far as a router can know.

A prompt's beginning is remembered under its prefix keys and its session, with a mark: how many tokens had gone through
the backend by then. It is believed to be cached while fewer than 0.9 of the cache's capacity have gone through since.
The capacity is learned, for nobody tells it and running sequences take their part of it:

* believed, and the engine had it not, at age x:   capacity ← 0.7·capacity + 0.3·x
* the engine had it although it was older:          capacity ← x

Without that, stale beliefs cost 3 points of in-budget share on traffic with many sessions (simulation). A hit is a
price and not a rule: it makes the prompt shorter, hence cheaper and earlier, and nothing else.
"""

from collections import OrderedDict
from collections.abc import Hashable

from policies.facts import RequestFacts

BELIEVED_SHARE = 0.9
KEPT_SHARE = 2.0
"""Marks are kept past belief for as long as this many capacities, or nobody could find out that the cache is larger."""
FIRST_CAPACITY_TOKENS = 50_000.0
LARGEST_CAPACITY_TOKENS = 1e9
MAX_MARKS = 20_000


class PrefixCache:
    """One backend's prefix cache, believed."""

    __slots__ = ("_marks", "capacity_tokens", "learned", "passed_tokens")

    def __init__(self) -> None:
        self.capacity_tokens = FIRST_CAPACITY_TOKENS
        self.learned = False
        """Whether a hit or a miss has moved the capacity yet."""
        self.passed_tokens = 0.0
        """Tokens that have gone through the cache."""
        self._marks: OrderedDict[Hashable, tuple[float, int]] = OrderedDict()
        """By prefix key or session: the mark, and the tokens up to there. The oldest mark comes first."""

    def believed_tokens(self, facts: RequestFacts) -> int:
        """Tokens of this prompt that are believed to be cached; always less than the prompt."""
        return self._tokens_younger_than(facts, BELIEVED_SHARE * self.capacity_tokens)

    def known(self, facts: RequestFacts) -> tuple[int, float]:
        """Tokens of this prompt that were here once, and how many have gone through since; (0, 0) where none were."""
        tokens = self._tokens_younger_than(facts, KEPT_SHARE * self.capacity_tokens)
        if not tokens:
            return 0, 0.0
        found = [mark for mark in map(self._marks.get, _keys_of(facts)) if mark is not None]
        return tokens, self.passed_tokens - max([mark for mark, _ in found])

    def _tokens_younger_than(self, facts: RequestFacts, age_tokens: float) -> int:
        marks, since = self._marks, self.passed_tokens - age_tokens
        tokens = 0
        if facts.session_key is not None and (seen := marks.get(("session", facts.session_key))) and seen[0] > since:
            tokens = seen[1]
        keys = facts.prefix_keys
        if keys:
            # A key stands for all up to there, so those that are known come first: halve the interval.
            low, high = 0, len(keys)
            while low < high:
                middle = (low + high) // 2
                seen = marks.get(keys[middle])
                if seen is not None and seen[0] > since:
                    low = middle + 1
                else:
                    high = middle
            tokens = max(tokens, low * facts.prefix_block_tokens)
        return max(0, min(tokens, facts.prompt_tokens - 1))

    def passed(self, facts: RequestFacts, computed_tokens: int, held_tokens: int) -> None:
        """The prompt is through: `computed_tokens` of it were new, and its session now holds `held_tokens`."""
        self.passed_tokens += max(0, computed_tokens)
        marks, mark = self._marks, self.passed_tokens
        for index in range(len(facts.prefix_keys) - 1, -1, -1):
            key = facts.prefix_keys[index]
            marks[key] = (mark, (index + 1) * facts.prefix_block_tokens)
            marks.move_to_end(key)
        if facts.session_key is not None:
            key = ("session", facts.session_key)
            marks[key] = (mark, held_tokens)
            marks.move_to_end(key)
        oldest = mark - KEPT_SHARE * self.capacity_tokens
        while marks and (len(marks) > MAX_MARKS or next(iter(marks.values()))[0] < oldest):
            marks.popitem(last=False)

    def corrected(self, believed_tokens: int, known_tokens: int, age_tokens: float, cached_tokens: int) -> None:
        """The engine said how much it had; `age_tokens` had gone through since it was last known to have it."""
        if believed_tokens and cached_tokens < 0.5 * believed_tokens:
            self.capacity_tokens = max(1.0, 0.7 * self.capacity_tokens + 0.3 * age_tokens)
            self.learned = True
        elif known_tokens and cached_tokens >= 0.5 * known_tokens and age_tokens > self.capacity_tokens:
            self.capacity_tokens = min(LARGEST_CAPACITY_TOKENS, age_tokens)
            self.learned = True

    def assume(self, capacity_tokens: float) -> None:
        """A better first guess, from the size of the KV cache; what was learned stands."""
        if not self.learned and 0 < capacity_tokens < LARGEST_CAPACITY_TOKENS:
            self.capacity_tokens = float(capacity_tokens)

    def clear(self) -> None:
        """The backend has started anew."""
        self._marks.clear()


def _keys_of(facts: RequestFacts) -> list[Hashable]:
    keys: list[Hashable] = list(facts.prefix_keys)
    if facts.session_key is not None:
        keys.append(("session", facts.session_key))
    return keys
