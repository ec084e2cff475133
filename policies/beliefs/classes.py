"""What is known of one kind of request: how long its answers are, and how often its budget is kept.

A class is a model, a latency class and a budget. Per class::

    expected  ← 0.998·expected + 0.002·D                   output tokens; the plain mean while there are fewer than 500
    spread²   ← the same of (D / expected - 1)²
    weight    ← clip(weight·exp(0.1·(missed - 0.01)), 0.5, 5)

`weight` is what a miss of this class costs in a decision, over what one costs by default: the multiplier of the
constraint that at most 1 % miss, found by dual ascent. It falls while promises are kept and rises with each that is
not, whatever the engines do, as alpha does in adaptive conformal inference (Gibbs and Candès, arXiv 2106.00170), whose
long-run guarantee it shares as long as the bounds are not reached.

No length predictor: in simulation an oracle of the true length gains nothing in budget and 0 to 2 % in cost.
"""

from collections.abc import Hashable
from math import exp, isfinite, sqrt

from policies.facts import Budget, RequestFacts

TARGET = 0.01
WEIGHT_STEP = 0.1
WEIGHT_RANGE = (0.5, 5.0)
MISSED_MEMORY = 500.0
LENGTH_MEMORY = 500.0
FIRST_EXPECTED_TOKENS = 128.0
FIRST_SPREAD = 0.8
"""Standard deviation over mean of output lengths; chat traces have 0.7 to 1.2."""
PRIOR_REQUESTS = 5.0
"""As many answers weigh as much as the first guess."""

ClassKey = tuple[Hashable, ...]


def class_key(facts: RequestFacts) -> ClassKey:
    """What makes requests of one kind."""
    budget = facts.budget
    return facts.model, facts.latency_class, budget.ttft_s, budget.inter_token_s, budget.e2e_s


class ClassBelief:
    """One class of requests."""

    __slots__ = ("budget", "expected_output_tokens", "judged", "key", "missed", "outputs", "spread_squared", "weight")

    def __init__(self, key: ClassKey, budget: Budget) -> None:
        self.key = key
        self.budget = budget
        self.expected_output_tokens = FIRST_EXPECTED_TOKENS
        self.spread_squared = FIRST_SPREAD**2
        self.outputs = 0.0
        """Answers that the expectation rests on."""
        self.weight = 1.0
        self.judged = 0
        """Requests whose end is known."""
        self.missed = TARGET
        """Share of the last 500 that missed."""

    @property
    def spread(self) -> float:
        """Standard deviation over mean of output lengths."""
        return sqrt(self.spread_squared)

    def answered(self, output_tokens: int) -> None:
        """A whole answer of this length came."""
        if output_tokens < 1:
            return
        self.outputs += 1.0
        weight = 1.0 / min(LENGTH_MEMORY, PRIOR_REQUESTS + self.outputs)
        relative = output_tokens / self.expected_output_tokens - 1.0
        self.expected_output_tokens += weight * (output_tokens - self.expected_output_tokens)
        self.spread_squared += weight * (min(25.0, relative * relative) - self.spread_squared)

    def judge(self, missed: bool) -> None:
        """A request of this class has ended, within its budget or not."""
        low, high = WEIGHT_RANGE
        self.weight = min(high, max(low, self.weight * exp(WEIGHT_STEP * (missed - TARGET))))
        self.judged += 1
        self.missed += (missed - self.missed) / min(MISSED_MEMORY, 100.0 + self.judged)

    def export(self) -> dict[str, float]:
        """What is worth keeping."""
        return {"expected_output_tokens": self.expected_output_tokens, "spread_squared": self.spread_squared,
                "outputs": self.outputs, "weight": self.weight}

    def restore(self, state: dict[str, float], kept: float) -> None:
        """Take over an exported state at `kept` of its weight; numbers out of range are passed over."""
        expected, spread, outputs, weight = (_number(state.get(name)) for name in (
            "expected_output_tokens", "spread_squared", "outputs", "weight"))
        if expected is not None and expected >= 1 and spread is not None and outputs is not None:
            self.expected_output_tokens, self.spread_squared = expected, min(25.0, spread)
            self.outputs = min(LENGTH_MEMORY, outputs) * kept
        if weight is not None:
            low, high = WEIGHT_RANGE
            self.weight = min(high, max(low, 1.0 + kept * (weight - 1.0)))


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and isfinite(value) and value >= 0 else None
