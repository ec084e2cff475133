"""What is known of one kind of request: how often its budget is kept, and what that makes a miss weigh.

A class is a model, a latency class and a budget. Per class::

    weight    ← clip(weight·exp(0.1·(missed - 0.01)), 0.5, 5)

`weight` is what a miss of this class costs in a decision, over what one costs by default: the multiplier of the
constraint that at most 1 % miss, found by dual ascent. It falls while promises are kept and rises with each that is
not, whatever the engines do, as alpha does in adaptive conformal inference (Gibbs and Candès, arXiv 2106.00170), whose
long-run guarantee it shares as long as the bounds are not reached.

How long its answers are is known of the latency class (`beliefs.lengths`): a caller's own budget changes no answer.
"""

from collections.abc import Hashable, Mapping
from math import exp

from policies.beliefs.lengths import LengthBelief, number
from policies.facts import Budget, RequestFacts

TARGET = 0.01
WEIGHT_STEP = 0.1
WEIGHT_RANGE = (0.5, 5.0)
MISSED_MEMORY = 500.0

ClassKey = tuple[Hashable, ...]


def class_key(facts: RequestFacts) -> ClassKey:
    """What makes requests of one kind."""
    budget = facts.budget
    return facts.model, facts.latency_class, budget.ttft_s, budget.inter_token_s, budget.e2e_s


class ClassBelief:
    """One class of requests."""

    __slots__ = ("budget", "judged", "key", "lengths", "missed", "weight")

    def __init__(self, key: ClassKey, budget: Budget, lengths: LengthBelief) -> None:
        self.key = key
        self.budget = budget
        self.lengths = lengths
        """Of its latency class: other classes may have the same."""
        self.weight = 1.0
        self.judged = 0
        """Requests whose end is known."""
        self.missed = TARGET
        """Share of the last 500 that missed."""

    def judge(self, missed: bool) -> None:
        """A request of this class has ended, within its budget or not."""
        low, high = WEIGHT_RANGE
        self.weight = min(high, max(low, self.weight * exp(WEIGHT_STEP * (missed - TARGET))))
        self.judged += 1
        self.missed += (missed - self.missed) / min(MISSED_MEMORY, 100.0 + self.judged)

    def export(self) -> dict[str, float]:
        """What is worth keeping."""
        return {"weight": self.weight}

    def restore(self, state: Mapping[str, object], kept: float) -> None:
        """Take over an exported state at `kept` of its weight; numbers out of range are passed over."""
        weight = number(state.get("weight"))
        if weight is not None:
            low, high = WEIGHT_RANGE
            self.weight = min(high, max(low, 1.0 + kept * (weight - 1.0)))
