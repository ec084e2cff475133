"""Claims about capacity: the highest load at which 99 of 100 are in budget, over that of peers."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import ClassVar

from loadtest.sim.capacity import RATES_PER_S, crossing, given_up
from loadtest.sim.command import TARGET
from loadtest.sim.measures import Measures
from loadtest.sim.run import Job
from loadtest.sim.scorecard.cases import Case
from loadtest.sim.scorecard.claims import Finding
from loadtest.sim.scorecard.estimates import jackknife
from loadtest.sim.scorecard.sample import Sample
from loadtest.sim.scorecard.shares import others

Curve = Sequence[tuple[float, Sequence[float]]]
"""By rising rate: the in-budget share under each seed."""


@dataclass(frozen=True, slots=True)
class Carries:
    """So many times the load of the best of these peers. A policy is given up after three rates below the target."""

    scenario: str
    pool: str
    who: str
    over: tuple[str, ...]
    at_least: float
    source: str
    rates_per_s: tuple[float, ...] = RATES_PER_S
    by_seeds: ClassVar[bool] = True

    @property
    def says(self) -> str:
        return f"{self.scenario}, {self.pool}: capacity at P99 over {self.who}'s"

    @property
    def goal(self) -> str:
        return f">= {self.at_least:g}"

    def tasks(self, sample: Sample) -> list[Job]:
        return [job for policy in (sample.subject, *others(sample, self.over)) for job in self._rungs(sample, policy)]

    def ladder(self, sample: Sample) -> list[Job]:
        """All that it may come to."""
        return [job for policy in (sample.subject, *others(sample, self.over)) for rate in self.rates_per_s
                for job in sample.jobs(self._case(rate), policy)]

    def judge(self, sample: Sample) -> Finding:
        curves = {policy: self._curve(sample, policy) for policy in (sample.subject, *others(sample, self.over))}
        ours = curves[sample.subject]
        theirs = [curve for policy, curve in curves.items() if policy != sample.subject]

        def ratio(places: Sequence[int]) -> float | None:
            best = max((carried(curve, places) or 0.0 for curve in theirs), default=0.0)
            mine = carried(ours, places)
            return None if mine is None or not best else mine / best

        everything = range(len(sample.seeds))
        loads = ", ".join(f"{policy} {_load(curve, everything)}" for policy, curve in curves.items())
        over = jackknife(len(sample.seeds), ratio)
        if over is None:
            mine = carried(ours, everything)
            return Finding(mine is not None, "never" if mine is None else "they never", None, loads)
        return Finding(over.mean >= self.at_least, over.text(1, 2), over, loads)

    def _rungs(self, sample: Sample, policy: str) -> list[Job]:
        """The rates that it was tried at, and the next one while it is not given up."""
        jobs: list[Job] = []
        shares: list[float] = []
        for rate in self.rates_per_s:
            if given_up(shares, TARGET):
                break
            rung = sample.jobs(self._case(rate), policy)
            jobs += rung
            runs = [run for job in rung if (run := sample.known(job)) is not None]
            if len(runs) < len(rung):
                break
            shares.append(_mean_share(runs))
        return jobs

    def _curve(self, sample: Sample, policy: str) -> Curve:
        by_rate: dict[float, list[float]] = {}
        for job in self._rungs(sample, policy):
            run = sample.known(job)
            assert run is not None, "every task is answered"
            by_rate.setdefault(job.rate_per_s, []).append(run.in_budget)
        return list(by_rate.items())

    def _case(self, rate_per_s: float) -> Case:
        return Case(self.scenario, self.pool, rate_per_s)


def carried(curve: Curve, places: Sequence[int]) -> float | None:
    """Requests a second, over the seeds at these places; `None` where no rate holds the target."""
    return crossing([(rate, mean([shares[place] for place in places])) for rate, shares in curve], TARGET)


def _mean_share(runs: Sequence[Measures]) -> float:
    return mean([run.in_budget for run in runs])


def _load(curve: Curve, places: Sequence[int]) -> str:
    per_s = carried(curve, places)
    if per_s is None:
        return "never"
    return f"{'>= ' if per_s == curve[-1][0] else ''}{per_s:.1f}/s"
