"""The runs of one set of seeds under the policy that is judged and its peers, as the claims read them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from loadtest.sim.bound.ratios import Trace
from loadtest.sim.measures import Measures
from loadtest.sim.run import Job
from loadtest.sim.scorecard.cases import Case
from loadtest.sim.scorecard.estimates import Estimate, estimate
from loadtest.sim.scorecard.tasks import (
    Answer,
    DecisionFigures,
    Decisions,
    Hindsight,
    HindsightFigures,
    Least,
    LeastFigures,
    Task,
)


@dataclass(frozen=True, slots=True)
class Sample:
    """One set of seeds. `answers` grows while tasks are done."""

    name: str
    seeds: tuple[int, ...]
    seconds: float
    subject: str
    """The policy that is judged."""
    answers: Mapping[Task, Answer]
    folder: Path | None = None
    """Of whole traces."""

    def job(self, case: Case, policy: str, seed: int) -> Job:
        """One run."""
        return Job(case.scenario, case.pool, policy, seed, case.rate_per_s, self.seconds, self.folder)

    def jobs(self, case: Case, policy: str) -> list[Job]:
        """Its runs, in the order of the seeds."""
        return [self.job(case, policy, seed) for seed in self.seeds]

    def trace(self, case: Case, seed: int, seconds: float | None = None) -> Trace:
        """All of a run but the policy."""
        return Trace(case.scenario, case.pool, seed, case.rate_per_s, seconds or self.seconds, self.folder)

    def known(self, job: Job) -> Measures | None:
        """The run, if it has taken place."""
        found = self.answers.get(job)
        assert found is None or isinstance(found, Measures)
        return found

    def runs(self, case: Case, policy: str | None = None) -> list[Measures]:
        """Of that policy, or of the one that is judged. Raises `KeyError` where one has not taken place."""
        found = []
        for job in self.jobs(case, policy or self.subject):
            run = self.answers[job]
            assert isinstance(run, Measures)
            found.append(run)
        return found

    def least(self, task: Least) -> LeastFigures:
        found = self.answers[task]
        assert isinstance(found, LeastFigures)
        return found

    def hindsight(self, task: Hindsight) -> HindsightFigures:
        found = self.answers[task]
        assert isinstance(found, HindsightFigures)
        return found

    def decisions(self, task: Decisions) -> DecisionFigures:
        found = self.answers[task]
        assert isinstance(found, DecisionFigures)
        return found

    def share(self, case: Case, policy: str | None = None) -> Estimate:
        """In budget."""
        found = estimate([run.in_budget for run in self.runs(case, policy)])
        assert found is not None, "a sample has a seed"
        return found

    def share_gap(self, case: Case, peer: str) -> Estimate:
        """The peer's in-budget share less ours, seed by seed."""
        found = estimate([theirs.in_budget - ours.in_budget
                          for theirs, ours in zip(self.runs(case, peer), self.runs(case), strict=True)])
        assert found is not None, "a sample has a seed"
        return found

    def saving(self, case: Case, peer: str) -> Estimate | None:
        """How much less than the peer a thousand in budget cost, as a share of its cost, seed by seed.

        `None` where one of them had none in budget in every seed.
        """
        pairs = [(ours.cost_per_1k_in_budget, theirs.cost_per_1k_in_budget)
                 for ours, theirs in zip(self.runs(case), self.runs(case, peer), strict=True)]
        return estimate([1.0 - ours / theirs for ours, theirs in pairs if ours is not None and theirs])
