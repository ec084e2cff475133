"""How long answers are: per model and latency class, whatever budget a request names.

::

    expected  ← 0.998·expected + 0.002·D                   output tokens; the plain mean while there are fewer than 500
    spread²   ← the same of (D / expected - 1)²

No predictor of a single answer's length: in simulation an oracle of the true length gains nothing in budget and 0 to
2 % in cost.
"""

from collections.abc import Hashable, Mapping
from math import isfinite, sqrt

from policies.facts import RequestFacts

MEMORY = 500.0
FIRST_EXPECTED_TOKENS = 128.0
FIRST_SPREAD = 0.8
"""Standard deviation over mean of output lengths; chat traces have 0.7 to 1.2."""
PRIOR_REQUESTS = 5.0
"""As many answers weigh as much as the first guess."""

LengthKey = tuple[Hashable, ...]


def length_key(facts: RequestFacts) -> LengthKey:
    """What makes answers of one kind of length."""
    return facts.model, facts.latency_class


class LengthBelief:
    """The answers of one latency class of a model."""

    __slots__ = ("expected_output_tokens", "outputs", "spread_squared")

    def __init__(self) -> None:
        self.expected_output_tokens = FIRST_EXPECTED_TOKENS
        self.spread_squared = FIRST_SPREAD**2
        self.outputs = 0.0
        """Answers that the expectation rests on."""

    @property
    def spread(self) -> float:
        """Standard deviation over mean of output lengths."""
        return sqrt(self.spread_squared)

    def answered(self, output_tokens: int) -> None:
        """A whole answer of this length came."""
        if output_tokens < 1:
            return
        self.outputs += 1.0
        weight = 1.0 / min(MEMORY, PRIOR_REQUESTS + self.outputs)
        relative = output_tokens / self.expected_output_tokens - 1.0
        self.expected_output_tokens += weight * (output_tokens - self.expected_output_tokens)
        self.spread_squared += weight * (min(25.0, relative * relative) - self.spread_squared)

    def export(self) -> dict[str, float]:
        """What is worth keeping."""
        return {"expected_output_tokens": self.expected_output_tokens, "spread_squared": self.spread_squared,
                "outputs": self.outputs}

    def restore(self, state: Mapping[str, object], kept: float) -> None:
        """Take over an exported state at `kept` of its weight; numbers out of range are passed over."""
        expected, spread, outputs = (
            number(state.get(name)) for name in ("expected_output_tokens", "spread_squared", "outputs"))
        if expected is not None and expected >= 1 and spread is not None and outputs is not None:
            self.expected_output_tokens, self.spread_squared = expected, min(25.0, spread)
            self.outputs = min(MEMORY, outputs) * kept


def number(value: object) -> float | None:
    """A finite number of at least 0, as a state file has it; `None` for anything else."""
    return float(value) if isinstance(value, int | float) and isfinite(value) and value >= 0 else None
