"""Conversations that come back with everything said so far, so that a prefix cache can spare most of the prompt.

Three requests in four continue one of 400 sessions; the others have no past and no future. Sessions are unequally busy
(Zipf: the n-th is chosen in proportion to 1/n), as people are. A turn's prompt is all that was said in the session
before, the answers included, and something new, a quarter as long as a prompt that stands alone; a session that would
grow too long begins anew.
"""

from bisect import bisect_right
from collections.abc import Hashable
from itertools import accumulate
from random import Random

from loadtest.sim.workload import SimRequest, TrafficClass
from loadtest.traffic import Lengths

SESSIONS = 400
CONTINUE_SHARE = 0.75
TURN_SHARE = 4
BLOCK_TOKENS = 128
LONGEST_TOKENS = 14_000
BEGINNINGS = Lengths(3000.0, 0.7, LONGEST_TOKENS // 2)
"""Tokens of a session's first instructions and documents."""


class Sessions:
    """Who is in the middle of a conversation, and how long it is."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._made = 0
        self._open = [self._begun() for _ in range(SESSIONS)]
        self._popularity = list(accumulate(1.0 / (rank + 1) for rank in range(SESSIONS)))

    def ask(self, at_s: float, traffic_class: TrafficClass) -> SimRequest:
        """The next request, continuing a session or standing alone."""
        rng = self._rng
        said, answer = traffic_class.prompts.draw(rng), traffic_class.outputs.draw(rng)
        turn = max(1, said // TURN_SHARE)
        goes_on = rng.random() < CONTINUE_SHARE
        place = bisect_right(self._popularity, rng.random() * self._popularity[-1])
        if not goes_on:
            return SimRequest(at_s, traffic_class.name, said, answer)
        name, before = self._open[place]
        if before + turn > LONGEST_TOKENS:
            name, before = self._begun()
        prompt = before + turn
        self._open[place] = (name, prompt + answer)
        return SimRequest(at_s, traffic_class.name, prompt, answer, name, block_keys(name, prompt))

    def _begun(self) -> tuple[str, int]:
        self._made += 1
        return f"session-{self._made}", BEGINNINGS.draw(self._rng)


def block_keys(name: str, prompt_tokens: int) -> tuple[Hashable, ...]:
    """One key a full block of a conversation: the same words stand for the same beginning."""
    return tuple([(name, block) for block in range(prompt_tokens // BLOCK_TOKENS)])
