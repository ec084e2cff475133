"""A learner that writes down what it is told, in front of another that learns from it."""

from typing import Any

from backends.catalog.views import BackendView
from policies.facts import RequestFacts
from policies.learning import End, Learner, NoLearner, Sent
from policies.policy import Priced


class ToldLearner:
    """See the module's text. Believes what the learner behind it believes."""

    def __init__(self, behind: Learner | None = None) -> None:
        self.behind = behind or NoLearner()
        self.sents: list[Sent] = []
        self.firsts: list[Sent] = []
        self.paces: list[tuple[Sent, float, int, float]] = []
        """Which, gap in seconds, tokens, when."""
        self.ends: list[tuple[Sent, End]] = []

    @property
    def name(self) -> str:
        return self.behind.name

    def expect_output(self, facts: RequestFacts) -> int:
        return self.behind.expect_output(facts)

    def sent(self, facts: RequestFacts, priced: Priced, now: float) -> Sent:
        self.sents.append(self.behind.sent(facts, priced, now))
        return self.sents[-1]

    def first_token(self, sent: Sent, now: float) -> None:
        self.firsts.append(sent)
        self.behind.first_token(sent, now)

    def paced(self, sent: Sent, view: BackendView, gap_s: float, tokens: int, now: float) -> None:
        self.paces.append((sent, gap_s, tokens, now))
        self.behind.paced(sent, view, gap_s, tokens, now)

    def ended(self, sent: Sent, end: End, now: float) -> None:
        self.ends.append((sent, end))
        self.behind.ended(sent, end, now)

    def belief(self, backend: str, now: float) -> Any:
        return self.behind.belief(backend, now)

    def pool_belief(self, now: float) -> Any:
        return self.behind.pool_belief(now)

    def forget(self, backend: str) -> None:
        self.behind.forget(backend)

    def export(self) -> dict[str, Any]:
        return self.behind.export()

    def restore(self, state: dict[str, Any], age_s: float) -> None:
        self.behind.restore(state, age_s)

    def is_even(self) -> bool:
        """Each attempt that began has ended, and ended once."""
        return sorted(map(id, self.sents)) == sorted(id(sent) for sent, _ in self.ends)
