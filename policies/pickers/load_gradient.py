"""The highest loaded candidate that keeps the budget of the request and of those already there.

::

    load = in_flight_requests / capacity_rps        s, work in flight were all requests the reference one

*Keeps* is by prediction: the request's own budget by the pipeline's `late_s`, hence its margin; for the streams that
decode there, the pace after this one more against the tightest inter-token budget among them. Those are known from the
learner `ccr`; without it only the request's own budget counts.

Among equal loads the largest capacity wins: an idle fleet fills from its strongest backend. Where nobody keeps both,
the one predicted least late.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import ClassVar

from backends.catalog.views import BackendView, FleetView
from policies.beliefs.backend import BackendBelief
from policies.facts import RequestFacts
from policies.pickers.capacity import capacity_rps
from policies.pickers.predicted import predicted
from policies.pickers.weighing import lowest
from policies.policy import Priced, Rng


@dataclass(frozen=True, slots=True)
class LoadGradient:
    """The highest loaded candidate that keeps all budgets there, else the least late."""

    name: ClassVar[str] = "load_gradient"

    def __call__(
        self, facts: RequestFacts, candidates: Sequence[Priced], fleet: FleetView, now: float, rng: Rng
    ) -> tuple[Priced, str]:
        within = [c for c in candidates
                  if c.late_s <= 0.0 and predicted(facts, c, now).tpot_s <= _tightest_pace_s(c.backend)]
        if not within:
            chosen = candidates[lowest([c.late_s for c in candidates], rng)]
            return chosen, f"least late {chosen.late_s:.2g}s of {len(candidates)}"
        capacities = [capacity_rps(c.backend) for c in within]
        loads = [(c.backend.in_flight_requests / rps, rps) for c, rps in zip(within, capacities, strict=True)]
        index = loads.index(max(loads))
        return within[index], f"highest load {loads[index][0]:.2g}s of {len(within)} within budget"


def _tightest_pace_s(backend: BackendView) -> float:
    """The tightest inter-token budget among the streams that decode there; infinite where none has one."""
    belief = backend.belief
    if not isinstance(belief, BackendBelief):
        return inf
    return min([of_class.budget.inter_token_s for of_class, streams in belief.streams.items()
                if streams.count > 0 and of_class.budget.inter_token_s is not None], default=inf)
