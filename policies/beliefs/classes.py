"""What is known of one kind of request: how long its answers are, and how often its budget is kept.

A class is a model, a latency class and a budget. Per class::

    expected  ← 0.998·expected + 0.002·D             output tokens; the plain mean while there are fewer than 500
    spread²   ← the same of (D / expected - 1)²
    alpha     ← clip(alpha + 0.004·(0.01 - miss), 0.003, 0.05)

The last line is adaptive conformal inference (Gibbs and Candès, arXiv 2106.00170): `alpha`, the miss probability that
a decision accepts, rises while promises are kept and falls with each that is not, so that in the long run one request
in a hundred misses whatever the engines do. It counts requests that were accepted on that promise only.

`missed` is the share of those over the last 500; above 3 % the model is wrong in a way that alpha is too slow for, and
alpha goes to its floor at once.

No length predictor: in simulation an oracle of the true length gains nothing in budget and 0 to 2 % in cost.
"""

from collections.abc import Hashable
from math import isfinite, sqrt

from policies.facts import Budget, RequestFacts

TARGET = 0.01
ALPHA_STEP = 0.004
ALPHA_RANGE = (0.003, 0.05)
ALARM_SHARE = 3 * TARGET
ALARM_MEMORY = 500.0
ALARM_MIN_REQUESTS = 100
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

    __slots__ = ("alpha", "budget", "expected_output_tokens", "hopeless_since_s", "judged", "key", "missed",
                 "outputs", "spread_squared")  # fmt: skip

    def __init__(self, key: ClassKey, budget: Budget) -> None:
        self.key = key
        self.budget = budget
        self.expected_output_tokens = FIRST_EXPECTED_TOKENS
        self.spread_squared = FIRST_SPREAD**2
        self.outputs = 0.0
        """Answers that the expectation rests on."""
        self.alpha = TARGET
        self.judged = 0
        """Requests accepted on the promise whose end is known."""
        self.missed = TARGET
        self.hopeless_since_s: float | None = None
        """Since when no backend has had an even chance for this class; `None` where the last one sent had."""

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

    def kept(self, missed: bool) -> None:
        """The end of a request that was accepted on the promise that its budget would be kept."""
        low, high = ALPHA_RANGE
        self.alpha = min(high, max(low, self.alpha + ALPHA_STEP * (TARGET - missed)))
        self.judged += 1
        self.missed += (missed - self.missed) / min(ALARM_MEMORY, max(ALARM_MIN_REQUESTS, float(self.judged)))
        if self.missed > ALARM_SHARE and self.judged >= ALARM_MIN_REQUESTS:
            self.alpha = low

    def sent(self, miss: float | None, now: float) -> None:
        """A request of this class goes where it misses with this probability."""
        if miss is None or miss < 0.5:
            self.hopeless_since_s = None
        elif self.hopeless_since_s is None:
            self.hopeless_since_s = now

    def export(self) -> dict[str, float]:
        """What is worth keeping."""
        return {"expected_output_tokens": self.expected_output_tokens, "spread_squared": self.spread_squared,
                "outputs": self.outputs, "alpha": self.alpha}

    def restore(self, state: dict[str, float], kept: float) -> None:
        """Take over an exported state at `kept` of its weight; numbers out of range are passed over."""
        expected, spread, outputs, alpha = (_number(state.get(name)) for name in (
            "expected_output_tokens", "spread_squared", "outputs", "alpha"))
        if expected is not None and expected >= 1 and spread is not None and outputs is not None:
            self.expected_output_tokens, self.spread_squared = expected, min(25.0, spread)
            self.outputs = min(LENGTH_MEMORY, outputs) * kept
        if alpha is not None:
            low, high = ALPHA_RANGE
            self.alpha = min(high, max(low, TARGET + kept * (alpha - TARGET)))


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and isfinite(value) and value >= 0 else None
