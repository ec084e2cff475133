"""The shapes that a routing pipeline is made of.

A pipeline is filters, then prices, then one picker. A filter says why a backend may not serve a request. A price is
money: what sending this request to this backend costs, directly or through the delay it meets, at an exchange rate
with a meaning. Prices add because they have one unit. A picker chooses among priced candidates and knows nothing of
what the prices are made of.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, NamedTuple, Protocol

from backends.catalog.views import BackendView, FleetView
from policies.estimate import Estimate
from policies.facts import RequestFacts


class Rng(Protocol):
    """The dice: `random.Random` fits. Passed in, so that a decision can be replayed."""

    def random(self) -> float: ...
    def randrange(self, stop: int, /) -> int: ...


class Priced(NamedTuple):
    """A candidate with its price, split into its terms (all in the money unit of the fleet file).

    A tuple, since a decision makes one of each candidate: a quarter of a frozen dataclass's cost.
    """

    backend: BackendView
    price: float
    terms: tuple[tuple[str, float], ...] = ()
    late_s: float = 0.0
    """Predicted seconds over the caller's budget; 0 where it is kept or none was given."""
    estimate: Estimate | None = None
    """What late and price rest on; `None` where the pipeline predicts nothing."""
    miss: float | None = None
    """Probability that the caller's budget is missed there; `None` where the pipeline knows no tails."""
    crowding: float = 0.0
    """Expected misses among requests already there because of this one, each with the weight of its class; 0 where the
    candidate's own miss ruled it out before anybody asked."""


class Choice(NamedTuple):
    """What a picker that weighs its candidates itself comes back with."""

    chosen: Priced | None
    """`None`: the request is shed."""
    reason: str
    candidates: Sequence[Priced]
    """The candidates as they were weighed; those that did not need to be are as they came."""
    retry_after_s: float | None = None
    """Set with a shed request: see `Decision`."""


def predicted_p99_s(priced: Priced, margin: float | None) -> tuple[float | None, float | None]:
    """What the policy gave as P99 of first token and end; `None` where it predicts nothing.

    An estimate that knows tails says so itself. A pipeline with a margin believes that a budget is kept where `margin`
    times the mean keeps it, so that is its P99.
    """
    estimate = priced.estimate
    if estimate is None:
        return None, None
    ttft_s, e2e_s = estimate.ttft_p99_s, estimate.e2e_p99_s
    if ttft_s is None and margin is not None:
        ttft_s, e2e_s = margin * estimate.ttft_s, margin * estimate.e2e_s
    return (ttft_s if ttft_s is not None and isfinite(ttft_s) else None,
            e2e_s if e2e_s is not None and isfinite(e2e_s) else None)


class Filter(Protocol):
    """Says why a backend may not serve this request, or `None`. The word is one of a closed list (`filters`).

    A filter may have a second method, `passing(facts, views, now)`: the list of those that it has nothing to say
    about, in one pass. Decisions ask that first, since mostly all pass.
    """

    @property
    def name(self) -> str: ...
    def __call__(self, facts: RequestFacts, backend: BackendView, fleet: FleetView, now: float) -> str | None: ...


class Price(Protocol):
    """Money that this request costs on this backend. More load never makes it less.

    The estimate is made once for each candidate, and shared by its prices and its budget. A price with a class
    variable `predicts = False` looks at none and has a second method, `of_all(facts, views, now)`.
    """

    @property
    def name(self) -> str: ...
    def __call__(self, facts: RequestFacts, backend: BackendView, estimate: Estimate, now: float) -> float: ...


class Picker(Protocol):
    """Chooses among candidates (never empty, ordered by name); returns the choice and a word that says why.

    One with a class variable `weighs = True` gets them priced but not predicted, predicts as far as it must, and
    returns a `Choice`.
    """

    @property
    def name(self) -> str: ...
    def __call__(
        self, facts: RequestFacts, candidates: Sequence[Priced], fleet: FleetView, now: float, rng: Rng
    ) -> "tuple[Priced, str] | Choice": ...


@dataclass(frozen=True, slots=True)
class Pipeline:
    """One routing policy, ready to run."""

    name: str
    filters: tuple[Filter, ...]
    prices: tuple[Price, ...]
    picker: Picker
    margin: float | None = None
    """A backend keeps a budget where `margin` times the predicted mean does; `None`: nothing is predicted, and no
    candidate is ever late."""
    weighs: bool = False
    """The picker weighs its candidates itself."""
    lazy: bool = False
    """It does, and no price looks at an estimate either: nothing is predicted before it."""
    sample: int | None = None
    """Backends that a decision looks at in a larger fleet; `None`: all of them."""
    memo: dict[Any, Any] = field(default_factory=dict, init=False, compare=False, repr=False)
    """What was worked out of the fleet's specs. No part of the value."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """A backend that may not serve the request, and which filter said so."""

    backend: str
    reason: str


@dataclass(frozen=True, slots=True)
class Decision:
    """Where a request goes and why; `chosen` is `None` where no backend may serve it."""

    policy: str
    chosen: BackendView | None
    reason: str
    price: float | None
    candidates: tuple[Priced, ...]
    rejected: tuple[Rejected, ...]
    config_hash: str
    retry_after_s: float | None = None
    """Set where the request is refused although backends are up: when one is predicted to have room for it. With
    `chosen` being `None` that is a shed request; without `retry_after_s` nobody could serve it at all."""
