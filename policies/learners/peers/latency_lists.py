"""LiteLLM's two lists of latencies for each deployment, with their quirks.

Read in `litellm/router_strategy/lowest_latency.py` @015b9454:

- Both latencies are divided by the answer's tokens, the time to first token too: short answers look slow.
- A full list becomes `list[:9] + [new]`: the first nine samples never leave, and only the tenth is ever new.
- Failures count only where they are timeouts, as 1000 s in the list of whole-answer latencies.
- The sum of first-token times is divided by the length of the *other* list.
- The lists are dropped after an hour.
"""

from policies.attempts import FailureCause
from policies.learners.peers.remembering import Remembering
from policies.learning import End, Sent

LIST_SIZE = 10
TTL_S = 3600.0
TIMEOUT_PENALTY_S = 1000.0
TIMEOUTS = frozenset({
    FailureCause.HEAD_TIMEOUT, FailureCause.FIRST_TOKEN_TIMEOUT, FailureCause.INTER_TOKEN_TIMEOUT,
})


class _Lists:
    """Seconds per completion token of one deployment."""

    __slots__ = ("since_s", "total_s", "ttft_s")

    def __init__(self, since_s: float) -> None:
        self.since_s = since_s
        self.total_s: list[float] = []
        self.ttft_s: list[float] = []


class LatencyLists(Remembering):
    """The lists by backend."""

    name = "latency_lists"

    def __init__(self) -> None:
        self._lists: dict[str, _Lists] = {}

    def latency_s(self, backend: str, stream: bool, now: float) -> float:
        """Mean seconds per completion token: of first tokens for a stream, of whole answers else; 0 where untried."""
        lists = self._lists.get(backend)
        if lists is None or now - lists.since_s > TTL_S:
            return 0.0
        seen = lists.ttft_s if stream and lists.ttft_s else lists.total_s
        return sum(seen) / len(lists.total_s)

    def ended(self, sent: Sent, end: End, now: float) -> None:
        if end.failure in TIMEOUTS:
            total = self._of(sent.backend, now)
            total.total_s = _with(total.total_s, TIMEOUT_PENALTY_S)
        elif end.failure is None and end.output_tokens > 0:
            lists = self._of(sent.backend, now)
            lists.total_s = _with(lists.total_s, (now - sent.sent_at_s) / end.output_tokens)
            if sent.facts.stream and sent.first_token_at_s is not None:
                lists.ttft_s = _with(lists.ttft_s, (sent.first_token_at_s - sent.sent_at_s) / end.output_tokens)

    def forget(self, backend: str) -> None:
        self._lists.pop(backend, None)

    def _of(self, backend: str, now: float) -> _Lists:
        lists = self._lists.get(backend)
        if lists is None or now - lists.since_s > TTL_S:
            lists = self._lists[backend] = _Lists(now)
        return lists


def _with(seen: list[float], new: float) -> list[float]:
    """The quirk that this file is about."""
    return [*seen, new] if len(seen) < LIST_SIZE else [*seen[: LIST_SIZE - 1], new]
