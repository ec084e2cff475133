"""Claims about what a decision costs, on this machine as it is now: `loadtest.bench.decide`."""

from dataclasses import dataclass
from typing import ClassVar

from loadtest.sim.scorecard.claims import Finding
from loadtest.sim.scorecard.estimates import Estimate
from loadtest.sim.scorecard.sample import Sample
from loadtest.sim.scorecard.tasks import Decisions


@dataclass(frozen=True, slots=True)
class Decides:
    """A decision takes so much processor time at most, with views that are new to it: in the mean, or 99 of 100."""

    backends: int
    at_most_us: float
    p99: bool
    source: str
    count: int = 3000
    by_seeds: ClassVar[bool] = False

    @property
    def says(self) -> str:
        return f"decision over {self.backends:,} backends, {'P99' if self.p99 else 'mean'} of processor time"

    @property
    def goal(self) -> str:
        return f"<= {self.at_most_us:g} µs"

    def tasks(self, sample: Sample) -> list[Decisions]:
        return [Decisions(sample.subject, self.backends, self.count)]

    def judge(self, sample: Sample) -> Finding:
        (task,) = self.tasks(sample)
        found = sample.decisions(task)
        new, kept = (found.new_p99_us, found.kept_p99_us) if self.p99 else (found.new_us, found.kept_us)
        return Finding(new <= self.at_most_us, f"{new:.0f} µs", Estimate(new, None), f"{kept:.0f} µs with views kept")
