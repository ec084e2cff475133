"""What is believed of backends and classes, for people: the words and figures of `/admin`, metrics and `explain`.

Reads beliefs and changes none, so that a scrape's thread may call it.
"""

from collections.abc import Iterator
from enum import StrEnum
from typing import Any, NamedTuple

from backends.catalog.spec import BackendSpec
from policies.beliefs.backend import BackendBelief
from policies.beliefs.classes import ClassBelief
from policies.beliefs.drift import faded
from policies.beliefs.lengths import FIRST_SPREAD
from policies.facts import Budget, RequestFacts
from policies.learning import KnowsClasses


class ModelState(StrEnum):
    """Which rung of the fallback ladder predictions for a backend stand on."""

    CALIBRATED = "calibrated"
    """Its own measured coefficients, corrected by what is learned."""
    STAND_IN = "stand_in"
    """Nobody measured it: the measured backends of its model stand in."""
    ASSUMED = "assumed"
    """Nobody measured any: a deliberately slow assumption."""
    LOST = "lost"
    """The model does not fit it: what it did lately is asked instead."""


def model_state(spec: BackendSpec, belief: Any, now: float) -> ModelState:
    """The rung that a backend stands on, by what its learner believes of it."""
    known = belief if type(belief) is BackendBelief else None
    if known is not None and known.lost(now):
        return ModelState.LOST
    if spec.coefficients is not None:
        return ModelState.CALIBRATED
    return ModelState.ASSUMED if known is None or known.stand_in is None else ModelState.STAND_IN


def drift_now(belief: Any, without: float, now: float) -> float:
    """How much slower than calibrated it is believed to be; `without` where no learner says."""
    if type(belief) is not BackendBelief:
        return without
    return faded(belief.drift.applied, belief.idle_s(now))


class ClassStanding(NamedTuple):
    """One latency class of one model."""

    model: str
    latency_class: str
    belief: ClassBelief


def _knows_classes(pool: Any) -> KnowsClasses | None:
    # By one attribute: each decision asks, and a check of the whole protocol takes longer than the answer.
    return pool if hasattr(pool, "class_of") else None


def class_belief(pool: Any, facts: RequestFacts) -> ClassBelief | None:
    """What is believed of requests of this kind; `None` where nobody learns or none was seen."""
    known = _knows_classes(pool)
    return None if known is None else known.class_of(facts)


def output_spread(pool: Any, facts: RequestFacts) -> float:
    """Standard deviation over mean of the answers' lengths that a decision on the request reckons with."""
    known = _knows_classes(pool)
    lengths = None if known is None else known.lengths_of(facts)
    return FIRST_SPREAD if lengths is None else lengths.spread


def classes(pool: Any, models: list[str], budgets: dict[str, Budget]) -> Iterator[ClassStanding]:
    """The configured classes that requests were seen of, with their own budgets; `budgets` by class name."""
    for model in models:
        for name, budget in budgets.items():
            belief = class_belief(pool, RequestFacts(model, 1, latency_class=name, budget=budget))
            if belief is not None and belief.budget == budget:
                yield ClassStanding(model, name, belief)
