"""The prompts that this router has at one backend without a first token yet, and since when the engine is at them.

Engines take prompts in the order of arrival. The one at the head has been under way since the engine turned to it:
since the last first token before it, or since it was sent where nothing was ahead. So of a queue only the rest is left
to wait for; without that, a first token behind a queue is predicted a third too late (decision 0015).
"""

from collections import deque


class WaitingPrompts:
    """Of one backend, the longest-waiting first."""

    __slots__ = ("_tokens", "turned_at_s")

    def __init__(self) -> None:
        self._tokens: deque[int] = deque()
        self.turned_at_s = 0.0
        """When the engine turned to the head; says nothing while no prompt waits."""

    @property
    def head_tokens(self) -> int:
        """Uncached tokens of the prompt that the engine is at; 0 where none waits."""
        return self._tokens[0] if self._tokens else 0

    def sent(self, tokens: int, now: float) -> None:
        """A prompt with so many tokens to compute is on its way."""
        if not self._tokens:
            self.turned_at_s = now
        self._tokens.append(max(1, tokens))

    def through(self, tokens: int, now: float) -> None:
        """Its first token is here: the engine goes on to the next."""
        self.gone(tokens)
        self.turned_at_s = max(self.turned_at_s, now)

    def gone(self, tokens: int) -> None:
        """It waits no longer, for whatever reason."""
        self._tokens.remove(max(1, tokens))
