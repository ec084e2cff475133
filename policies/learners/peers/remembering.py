"""What all peers' learners have in common: they are their own pool belief, and keep nothing over a restart."""

from typing import Any, Self

from backends.catalog.views import BackendView
from policies.facts import RequestFacts
from policies.learning import End, Sent
from policies.policy import Priced


class Remembering:
    """Keeps the dates of attempts. A peer's learner says what else it takes from what it is told."""

    def expect_output(self, facts: RequestFacts) -> int:
        return facts.expected_output_tokens

    def sent(self, facts: RequestFacts, priced: Priced, now: float) -> Sent:
        return Sent(priced.backend.spec.name, facts, now, priced)

    def first_token(self, sent: Sent, now: float) -> None:
        sent.first_token_at_s = now

    def paced(self, sent: Sent, view: BackendView, gap_s: float, tokens: int, now: float) -> None:
        sent.paced_tokens += tokens

    def ended(self, sent: Sent, end: End, now: float) -> None:
        """Nothing to learn from it."""

    def belief(self, backend: str, now: float) -> Any:
        return None

    def pool_belief(self, now: float) -> Self:
        return self

    def forget(self, backend: str) -> None:
        """Nothing was known."""

    def export(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any], age_s: float) -> None:
        """Nothing to take over."""
