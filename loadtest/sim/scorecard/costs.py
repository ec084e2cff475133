"""Claims about money: against the peers, and against what nobody could beat."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from loadtest.sim.bound.ratios import good_requests
from loadtest.sim.run import Job
from loadtest.sim.scorecard.cases import PREDICTING, Case
from loadtest.sim.scorecard.claims import NOTHING, Finding, percent
from loadtest.sim.scorecard.estimates import estimate
from loadtest.sim.scorecard.sample import Sample
from loadtest.sim.scorecard.shares import AtLeast, others
from loadtest.sim.scorecard.tasks import Hindsight, Least, Task

HINDSIGHT_SECONDS = 130.0
"""Some hundreds of requests after the warm-up: the search replays them hundreds of times."""


@dataclass(frozen=True, slots=True)
class Cheaper(AtLeast):
    """So much cheaper than the cheapest peer of at least our share; where there is none, than the peer that chooses by
    predicted latency and keeps most.
    """

    @property
    def says(self) -> str:
        return f"{self.case}: cost below the best peer's"

    @property
    def goal(self) -> str:
        return f">= {percent(self.at_least, 0)}"

    def judge(self, sample: Sample) -> Finding:
        found = self._against(sample)
        if found is None or (saving := sample.saving(self.case, found[0])) is None:
            return NOTHING
        return Finding(saving.mean >= self.at_least, saving.text(100, 1, " %"), saving, f"{found[1]} {found[0]}")

    def _against(self, sample: Sample) -> tuple[str, str] | None:
        peers = others(sample, self.peers)
        equals = [(saved.mean, peer) for peer in peers if sample.share_gap(self.case, peer).mean >= 0.0
                  and (saved := sample.saving(self.case, peer)) is not None]
        if equals:
            return min(equals)[1], "cheapest of at least our share:"
        predicting = [peer for peer in peers if peer in PREDICTING]
        if not predicting:
            return None
        return (max(predicting, key=lambda peer: sample.share(self.case, peer).mean),
                "none keeps as much; best by predicted latency:")


@dataclass(frozen=True, slots=True)
class OverBound:
    """The cost over the least that as many requests in budget could have cost on the same trace (docs/bound.md)."""

    case: Case
    at_most: float
    source: str
    evaluations: int = 0
    """Rounds of the search for what hindsight would have made of a shorter run of the first seed; 0 leaves it out."""
    by_seeds: ClassVar[bool] = True

    @property
    def says(self) -> str:
        return f"{self.case}: cost over the bound"

    @property
    def goal(self) -> str:
        return f"<= {self.at_most:.2f}"

    def tasks(self, sample: Sample) -> list[Task]:
        jobs = sample.jobs(self.case, sample.subject)
        hindsight: Sequence[Task] = [self._hindsight(sample)] if self.evaluations else []
        return [*jobs, *hindsight, *(least for job in jobs if (least := self._least(sample, job)) is not None)]

    def judge(self, sample: Sample) -> Finding:
        ratios = []
        for job in sample.jobs(self.case, sample.subject):
            run, least = sample.known(job), self._least(sample, job)
            if run is None or least is None or run.cost_per_1k_in_budget is None:
                continue
            if (cost := sample.least(least).least_cost) is not None and cost > 0.0:
                ratios.append(run.cost_per_1k_in_budget * least.good / 1000.0 / cost)
        over = estimate(ratios)
        if over is None:
            return NOTHING
        return Finding(over.mean <= self.at_most, over.text(1, 3), over, self._beside(sample))

    def _least(self, sample: Sample, job: Job) -> Least | None:
        run = sample.known(job)
        return None if run is None else Least(sample.trace(self.case, job.seed), good_requests(run))

    def _hindsight(self, sample: Sample) -> Hindsight:
        seconds = min(HINDSIGHT_SECONDS, sample.seconds)
        return Hindsight(sample.trace(self.case, sample.seeds[0], seconds), sample.subject, self.evaluations)

    def _beside(self, sample: Sample) -> str:
        if not self.evaluations:
            return ""
        task = self._hindsight(sample)
        found = sample.hindsight(task)
        if found.policy_over_bound is None or found.found_over_bound is None:
            return ""
        return (f"seed {task.trace.seed}, {task.trace.seconds:g} s: {found.policy_over_bound:.3f}, "
                f"with hindsight {found.found_over_bound:.3f}")
