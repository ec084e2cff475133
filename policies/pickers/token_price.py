"""The lowest price of an input plus an output token, whatever the request, the load or the budget.

::

    price = price_per_hour / 3,600,000 · (prompt_ms + output_ms)        money, milliseconds from `pickers.capacity`

An owned card has no price per token; what a token of the reference request takes of it stands in. Among equal prices
the first by name gets everything, as in the original.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from backends.catalog.views import BackendView, FleetView
from policies.facts import RequestFacts
from policies.pickers.capacity import token_ms
from policies.policy import Priced, Rng


@dataclass(frozen=True, slots=True)
class TokenPrice:
    """The lowest price of an input and an output token together."""

    name: ClassVar[str] = "token_price"

    def __call__(
        self, facts: RequestFacts, candidates: Sequence[Priced], fleet: FleetView, now: float, rng: Rng
    ) -> tuple[Priced, str]:
        prices = [_price(c.backend) for c in candidates]
        chosen = prices.index(min(prices))
        return candidates[chosen], f"token price {prices[chosen]:.2g} of {len(candidates)}"


def _price(backend: BackendView) -> float:
    return backend.spec.price_per_hour / 3_600_000.0 * sum(token_ms(backend))
