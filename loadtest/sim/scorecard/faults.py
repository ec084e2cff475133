"""Claims about what goes wrong: slowdowns that nobody announces, and more load than can be in time."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from loadtest.sim.measures import CDF_POINTS, Measures
from loadtest.sim.run import Job
from loadtest.sim.scorecard.cases import Case
from loadtest.sim.scorecard.claims import NOTHING, Finding, OfOneCase, percent
from loadtest.sim.scorecard.estimates import Estimate, estimate
from loadtest.sim.scorecard.sample import Sample
from loadtest.sim.scorecard.shares import all_jobs, others


@dataclass(frozen=True, slots=True)
class Noticed(OfOneCase):
    """A silent slowdown is noticed within so many seconds, under every seed (`loadtest.sim.watching` says when)."""

    within_s: float
    source: str

    @property
    def says(self) -> str:
        return f"{self.case}: slowdown noticed, slowest seed"

    @property
    def goal(self) -> str:
        return f"<= {self.within_s:g} s"

    def judge(self, sample: Sample) -> Finding:
        found = [run.detection_s for run in sample.runs(self.case)]
        known = [seconds for seconds in found if seconds is not None]
        if len(known) < len(found):
            return Finding(False, f"not noticed under {len(found) - len(known)} of {len(found)} seeds")
        mean = estimate(known)
        beside = "" if mean is None else f"mean {mean.text(1, 2, ' s')}"
        return Finding(max(known) <= self.within_s, f"{max(known):.2f} s", Estimate(max(known), None), beside)


@dataclass(frozen=True, slots=True)
class Undamaged:
    """So little in-budget share is lost to what happens, against the same arrivals without it."""

    case: Case
    twin: Case
    at_most: float
    source: str
    by_seeds: ClassVar[bool] = True

    @property
    def says(self) -> str:
        return f"{self.case}: in budget lost to the fault"

    @property
    def goal(self) -> str:
        return f"<= {100 * self.at_most:g} points"

    def tasks(self, sample: Sample) -> list[Job]:
        return [*sample.jobs(self.case, sample.subject), *sample.jobs(self.twin, sample.subject)]

    def judge(self, sample: Sample) -> Finding:
        faulty, sound = sample.runs(self.case), sample.runs(self.twin)
        lost = estimate([well.in_budget - ill.in_budget for ill, well in zip(faulty, sound, strict=True)])
        assert lost is not None, "a sample has a seed"
        beside = f"{percent(sample.share(self.twin).mean, 2)} without it"
        return Finding(lost.mean <= self.at_most, lost.text(100, 2, " points"), lost, beside)


@dataclass(frozen=True, slots=True)
class OrderlyWhenHopeless:
    """Where more comes than can be in time and nothing is shed, the late do not pile up: P99 of first tokens in
    budgets.
    """

    case: Case
    at_most: float
    source: str
    peers: tuple[str, ...]
    by_seeds: ClassVar[bool] = True

    @property
    def says(self) -> str:
        return f"{self.case}: P99 of first tokens, in budgets"

    @property
    def goal(self) -> str:
        return f"<= {self.at_most:g}"

    def tasks(self, sample: Sample) -> list[Job]:
        return all_jobs(sample, [self.case], self.peers)

    def judge(self, sample: Sample) -> Finding:
        late = estimate(_late(sample.runs(self.case)))
        if late is None:
            return NOTHING
        beside = [f"ours {percent(sample.share(self.case).mean)} in budget"]
        for peer in others(sample, self.peers):
            theirs = estimate(_late(sample.runs(self.case, peer)))
            if theirs is not None:
                beside.append(f"{peer} {theirs.mean:.1f} at {percent(sample.share(self.case, peer).mean)}")
        return Finding(late.mean <= self.at_most, late.text(1, 2), late, ", ".join(beside))


def _late(runs: Sequence[Measures]) -> list[float]:
    """P99 of the first token's time over its budget."""
    return [run.ttft_cdf[round(0.99 * (CDF_POINTS - 1))] for run in runs if run.ttft_cdf]
