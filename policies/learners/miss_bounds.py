"""How much of a miss each class accepts: adaptive conformal inference over what the learner `ccr` believes.

::

    alpha ← clip(alpha + 0.004·(0.01 - missed), 0.003, 0.05)        per class, with each end

`alpha` is the largest probability of a miss at which the picker `bounded_miss` still calls a backend safe. It rises
while promises are kept and falls with each that is not, so that in the long run one in a hundred misses, whatever the
engines do (Gibbs and Candès, arXiv 2106.00170), as long as the bounds are not reached.

Everything else is `ccr`'s and is asked of it, with one difference: no class weighs more than another, so that crowding
counts misses. As a peer's memory it is its own pool belief; what it keeps over a restart is what `ccr` does.
"""

from typing import Any, ClassVar, Self

from backends.catalog.views import BackendView
from policies.beliefs.backend import BackendBelief
from policies.beliefs.classes import TARGET, ClassBelief, ClassKey
from policies.beliefs.lengths import LengthBelief
from policies.facts import RequestFacts
from policies.learners.ccr.learner import LATE, CcrLearner, missed
from policies.learning import End, Sent
from policies.policy import Priced

STEP = 0.004
RANGE = (0.003, 0.05)


class MissBounds:
    """See the module's text."""

    name: ClassVar[str] = "miss_bounds"

    def __init__(self) -> None:
        self._ccr = CcrLearner()
        self._alphas: dict[ClassKey, float] = {}

    def class_of(self, facts: RequestFacts) -> ClassBelief | None:
        """What is known of the request's class."""
        return self._ccr.pool.class_of(facts)

    def lengths_of(self, facts: RequestFacts) -> LengthBelief | None:
        """How long answers of the request's latency class are."""
        return self._ccr.pool.lengths_of(facts)

    def alpha(self, facts: RequestFacts) -> float:
        """Probability of a miss that the request's class accepts."""
        kind = self.class_of(facts)
        return TARGET if kind is None else self._alphas.get(kind.key, TARGET)

    def mean_price(self, model: str) -> float | None:
        """What a request for the model costs; `None` before the first."""
        return self._ccr.pool.mean_price.get(model)

    def last_backend(self, facts: RequestFacts) -> str | None:
        """Where the request's session was sent last."""
        return None if facts.session_key is None else self._ccr.pool.sessions.get(facts.session_key)

    def expect_output(self, facts: RequestFacts) -> int:
        return self._ccr.expect_output(facts)

    def sent(self, facts: RequestFacts, priced: Priced, now: float) -> Sent:
        return self._ccr.sent(facts, priced, now)

    def first_token(self, sent: Sent, now: float) -> None:
        self._ccr.first_token(sent, now)

    def paced(self, sent: Sent, view: BackendView, gap_s: float, tokens: int, now: float) -> None:
        self._ccr.paced(sent, view, gap_s, tokens, now)

    def ended(self, sent: Sent, end: End, now: float) -> None:
        if end.failure is None:
            self._judge(sent.facts, missed(sent, end.output_tokens, now))
        elif end.failure in LATE and sent.first_token_at_s is None:
            self._judge(sent.facts, True)
        self._ccr.ended(sent, end, now)
        if (kind := self.class_of(sent.facts)) is not None:
            kind.weight = 1.0

    def belief(self, backend: str, now: float) -> BackendBelief:
        return self._ccr.belief(backend, now)

    def pool_belief(self, now: float) -> Self:
        return self

    def forget(self, backend: str) -> None:
        self._ccr.forget(backend)

    def export(self) -> dict[str, Any]:
        return self._ccr.export()

    def restore(self, state: dict[str, Any], age_s: float) -> None:
        self._ccr.restore(state, age_s)
        for kind in self._ccr.pool.classes.values():
            kind.weight = 1.0

    def _judge(self, facts: RequestFacts, is_missed: bool) -> None:
        """A request of this class has ended, within its budget or not."""
        kind = self.class_of(facts)
        if kind is not None:
            low, high = RANGE
            alpha = self._alphas.get(kind.key, TARGET)
            self._alphas[kind.key] = min(high, max(low, alpha + STEP * (TARGET - is_missed)))
