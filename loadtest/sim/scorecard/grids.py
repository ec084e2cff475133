"""The figures beneath the claims: a table a pool and set of seeds, policies down, cases across."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from loadtest.sim.scorecard.cases import Case
from loadtest.sim.scorecard.estimates import Estimate
from loadtest.sim.scorecard.sample import Sample


@dataclass(frozen=True, slots=True)
class Cell:
    """One policy in one case."""

    share: Estimate
    cost_per_1k_in_budget: float | None

    def __str__(self) -> str:
        cost = "-" if self.cost_per_1k_in_budget is None else f"{self.cost_per_1k_in_budget:.3f}"
        return f"{self.share.text(100, 1)} / {cost}"


@dataclass(frozen=True, slots=True)
class Grid:
    """One table."""

    pool: str
    sample: str
    cases: tuple[Case, ...]
    rows: tuple[tuple[str, tuple[Cell, ...]], ...]
    """By policy, in the order of the cases."""

    @property
    def title(self) -> str:
        return f"{self.pool}, {self.sample} seeds: in budget % ± se / cost per 1,000 in budget"

    def lines(self) -> list[tuple[str, ...]]:
        """As text, with its head."""
        head = ("policy", *(f"{case.scenario} {case.rate_per_s:g}" for case in self.cases))
        return [head, *((policy, *map(str, cells)) for policy, cells in self.rows)]

    def as_json(self) -> dict[str, object]:
        return {"pool": self.pool, "seeds": self.sample, "cases": [
            {"scenario": case.scenario, "rate_per_s": case.rate_per_s, "policies": {
                policy: {"in_budget": cells[place].share.mean, "se": cells[place].share.se,
                         "cost_per_1k_in_budget": cells[place].cost_per_1k_in_budget}
                for policy, cells in self.rows}} for place, case in enumerate(self.cases)]}


def grids(samples: Sequence[Sample], cases: Sequence[Case], policies: Sequence[str]) -> tuple[Grid, ...]:
    """All tables; every one of these runs has taken place."""
    return tuple(
        Grid(pool, sample.name, here, tuple((policy, tuple(_cell(sample, case, policy) for case in here))
                                            for policy in policies))
        for pool in dict.fromkeys(case.pool for case in cases) for sample in samples
        for here in [tuple(case for case in cases if case.pool == pool)])


def _cell(sample: Sample, case: Case, policy: str) -> Cell:
    costs = [run.cost_per_1k_in_budget for run in sample.runs(case, policy) if run.cost_per_1k_in_budget is not None]
    return Cell(sample.share(case, policy), mean(costs) if costs else None)
