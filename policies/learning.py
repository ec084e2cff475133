"""What a policy learns from the traffic it routes, and the one door through which it does.

`decide` is a function of frozen views; what it believes about speed, tails and caches must therefore be on the views.
A learner makes those beliefs. The shell that routes (gateway, simulator, replay) owns one learner, tells it what
became of each attempt, and puts what it believes on the views of the next decision:

1. `expect_output` fills in `RequestFacts.expected_output_tokens`, before the decision.
2. `belief` goes on `BackendView.belief`, `pool_belief` on `FleetView.belief`.
3. `sent`, at once when a request has been decided on: two requests never see the same picture.
4. `first_token`, `paced` (now and then while the stream runs) and `ended`, as they happen.

A learner reads no clock and throws no dice: time comes with each call, and the same calls in the same order leave the
same beliefs, in whatever world they were made. All calls are O(1) in the number of requests and backends.

A belief is a frozen value, or a read-only look at the learner's memory that nothing changes while a decision runs. Its
type is the learner's own business; parts that read it are named in the same preset.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

from backends.catalog.views import BackendView
from policies.attempts import FailureCause
from policies.beliefs.classes import ClassBelief
from policies.beliefs.lengths import LengthBelief
from policies.facts import RequestFacts
from policies.policy import Priced


@dataclass(slots=True, eq=False)
class Sent:
    """One attempt as its learner follows it, from the decision to its end. The shell keeps it and hands it back."""

    backend: str
    facts: RequestFacts
    sent_at_s: float
    priced: Priced | None = None
    """What the decision predicted for it there."""
    first_token_at_s: float | None = None
    paced_tokens: int = 0
    """Tokens after the first that `paced` has been told of."""
    notes: Any = field(default=None)
    """The learner's own."""


@dataclass(frozen=True, slots=True)
class End:
    """How an attempt ended, as far as there is something to learn from it."""

    output_tokens: int
    """Generated, the first included; 0 where nothing came."""
    failure: FailureCause | None = None
    """`None`: the whole answer came. `CLIENT_GONE` says nothing about the backend's speed."""
    prompt_tokens: int | None = None
    """As the engine counted them, where it said so."""
    cached_tokens: int | None = None
    """Prompt tokens that the engine says it had in its prefix cache (`usage.prompt_tokens_details.cached_tokens`)."""


class Learner(Protocol):
    """See the module's text. Backends and classes appear by name when they are first spoken of."""

    @property
    def name(self) -> str: ...

    def expect_output(self, facts: RequestFacts) -> int:
        """Output tokens to expect of this request, at least 1 and at most its cap."""

    def sent(self, facts: RequestFacts, priced: Priced, now: float) -> Sent:
        """The request has been decided on; `priced` is the chosen candidate with the view that it was chosen on."""

    def first_token(self, sent: Sent, now: float) -> None:
        """The first token is here."""

    def paced(self, sent: Sent, view: BackendView, gap_s: float, tokens: int, now: float) -> None:
        """The stream got `tokens` tokens, `gap_s` apart in the mean, up to `now`, under the load that `view` shows.

        A shell calls it for some streams at some times, about ten times a second and backend, never for each token.
        """

    def ended(self, sent: Sent, end: End, now: float) -> None:
        """The attempt is over, well or badly. Each `sent` gets exactly one."""

    def belief(self, backend: str, now: float) -> Any:
        """What to put on `BackendView.belief`. The same object as long as nothing has changed."""

    def pool_belief(self, now: float) -> Any:
        """What to put on `FleetView.belief`; has the shape of `KnowsClasses` where classes are told apart."""

    def forget(self, backend: str) -> None:
        """The backend is gone, or came back as another one."""

    def export(self) -> dict[str, Any]:
        """All that is worth keeping over a restart, as JSON values."""

    def restore(self, state: dict[str, Any], age_s: float) -> None:
        """Take over an exported state that is `age_s` old; entries that make no sense are passed over."""


class KnowsClasses(Protocol):
    """A pool belief that tells classes of requests apart. Metrics and `explain` show what any of this shape knows."""

    def class_of(self, facts: RequestFacts) -> ClassBelief | None:
        """What is believed of the request's class; `None` where none like it was seen."""

    def lengths_of(self, facts: RequestFacts) -> LengthBelief | None:
        """How long answers of the request's latency class are; `None` where none like it was seen."""


class NoLearner:
    """For policies that learn nothing: believes nothing and only keeps the attempts' dates."""

    name = "none"

    def expect_output(self, facts: RequestFacts) -> int:
        return facts.expected_output_tokens

    def sent(self, facts: RequestFacts, priced: Priced, now: float) -> Sent:
        return Sent(priced.backend.spec.name, facts, now, priced)

    def first_token(self, sent: Sent, now: float) -> None:
        sent.first_token_at_s = now

    def paced(self, sent: Sent, view: BackendView, gap_s: float, tokens: int, now: float) -> None:
        sent.paced_tokens += tokens

    def ended(self, sent: Sent, end: End, now: float) -> None:
        """Nothing to learn."""

    def belief(self, backend: str, now: float) -> Any:
        return None

    def pool_belief(self, now: float) -> Any:
        return None

    def forget(self, backend: str) -> None:
        """Nothing was known."""

    def export(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any], age_s: float) -> None:
        """Nothing to take over."""
