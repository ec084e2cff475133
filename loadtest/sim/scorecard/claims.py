"""What a claim is, and what is found of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from loadtest.sim.measures import Tally
from loadtest.sim.run import Job
from loadtest.sim.scorecard.cases import Case
from loadtest.sim.scorecard.estimates import Estimate
from loadtest.sim.scorecard.sample import Sample
from loadtest.sim.scorecard.tasks import Task


@dataclass(frozen=True, slots=True)
class Finding:
    """One claim on one set of seeds."""

    holds: bool
    measured: str
    estimate: Estimate | None = None
    """In the claim's own unit; shares are 0 to 1."""
    beside: str = ""
    """What the same runs say that belongs to it."""
    cells: Mapping[str, Mapping[str, Tally]] = field(default_factory=dict)
    """By backend and class, where the claim is about these."""

    def as_json(self) -> dict[str, object]:
        return {
            "holds": self.holds, "measured": self.measured,
            "mean": None if self.estimate is None else self.estimate.mean,
            "se": None if self.estimate is None else self.estimate.se, "beside": self.beside,
            **({"cells": {backend: {name: list(tally) for name, tally in row.items()}
                          for backend, row in self.cells.items()}} if self.cells else {}),
        }


class Claim(Protocol):
    """One line of the scorecard. Claims are frozen dataclasses; `table` lists them."""

    @property
    def says(self) -> str:
        """What is claimed of what."""

    @property
    def goal(self) -> str:
        """The figure that it has to reach."""

    @property
    def source(self) -> str:
        """Where the goal comes from."""

    @property
    def by_seeds(self) -> bool:
        """Whether each set of seeds is judged apart; else the first alone."""

    def tasks(self, sample: Sample) -> Sequence[Task]:
        """What it needs, as far as that is known: more may follow once these are answered."""

    def judge(self, sample: Sample) -> Finding:
        """What came of it. Every task is answered."""


@dataclass(frozen=True, slots=True)
class OfOneCase:
    """A claim that rests on the runs of one case under the policy that is judged."""

    case: Case
    by_seeds: ClassVar[bool] = True

    def tasks(self, sample: Sample) -> list[Job]:
        return sample.jobs(self.case, sample.subject)


def percent(share: float, digits: int = 1) -> str:
    """`99.5 %`."""
    return f"{100 * share:.{digits}f} %"


NOTHING = Finding(holds=False, measured="nothing to judge")
"""Such as the coverage of a policy that predicts nothing."""
