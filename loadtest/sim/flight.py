"""One request on its way through a simulated gateway, and what became of it."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from backends.catalog.views import BackendView
from loadtest.sim.workload import SimRequest
from policies.attempts import Failure
from policies.facts import RequestFacts
from policies.learning import Sent
from router.fleet.leases import Lease


class Fate(StrEnum):
    """How a request ends."""

    SERVED = "served"
    """Whole, in time or late."""
    SHED = "shed"
    """The policy refused it, and said when to come again."""
    LOST = "lost"
    """It broke off, or nobody could take it."""


class Outcome(NamedTuple):
    """What became of one request. Times are the client's; `None` where the moment never came."""

    request: SimRequest
    fate: Fate
    backend: int | None
    """Which backend had it last."""
    first_token_at_s: float | None
    end_s: float
    attempts: int
    cost: float
    """Accounted cost of everything that was computed for it, whether it came of use or not."""
    cached_tokens: int
    predicted_ttft_p99_s: float | None
    predicted_e2e_p99_s: float | None
    miss: float | None
    """Probability of a missed budget that the policy gave it."""
    in_budget: bool


@dataclass(slots=True, eq=False)
class Flight:
    """A request between its arrival and its end. The attempt's own fields start anew with each attempt."""

    request: SimRequest
    gateway: int
    facts: RequestFacts
    failures: tuple[Failure, ...] = ()
    spent: float = 0.0
    """Accounted cost of attempts that failed."""
    number: int = 0
    """Of the attempt, over all requests: the sequence's name at the engine."""
    backend: int = -1
    lease: Lease = field(default=None)  # type: ignore[assignment]
    sent: Sent | None = None
    decided_on: BackendView | None = None
    ttft_p99_s: float | None = None
    e2e_p99_s: float | None = None
    miss: float | None = None
    first_token_at_s: float | None = None
    joined_round: int = 0
    tokens_before: int = 1
    """Tokens that came before `joined_round`; the first is one of them."""
