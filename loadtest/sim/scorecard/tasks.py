"""What has to be computed for the claims: runs, bounds of traces, hindsight, decision times. Each is done once.

A task says all that its answer depends on but the code, so that its text can stand for the answer (`keeping`).
"""

from dataclasses import dataclass
from math import isfinite
from typing import NamedTuple

from loadtest.sim.bound.ratios import Trace, bounds_of
from loadtest.sim.measures import Measures
from loadtest.sim.run import Job, run_job

REQUESTS_PER_CPU_S = 3500.0
"""Simulated under a policy that predicts, four backends, one core of a Xeon at cloud speed."""
BOUND_S_PER_REQUEST = 4e-4
HINDSIGHT_S_PER_EVALUATION = 0.05


class LeastFigures(NamedTuple):
    """What no policy can beat on a trace."""

    least_cost: float | None
    """Of that number of requests in budget; `None` where so many cannot be."""
    most_good: float


class HindsightFigures(NamedTuple):
    """A policy's run over the bound, and the best assignment that search finds from there over its own."""

    policy_over_bound: float | None
    found_over_bound: float | None


class DecisionFigures(NamedTuple):
    """Processor time of one decision, which a busy machine disturbs less than real time, in microseconds: with views
    that have not changed since the last one, and with new ones.
    """

    kept_us: float
    new_us: float
    kept_p99_us: float
    new_p99_us: float


@dataclass(frozen=True, slots=True)
class Least:
    """The least that so many requests in budget could have cost on a trace."""

    trace: Trace
    good: int

    def __str__(self) -> str:
        return f"bound of {self.trace.scenario} seed {self.trace.seed}"


@dataclass(frozen=True, slots=True)
class Hindsight:
    """What knowing the future would have been worth."""

    trace: Trace
    policy: str
    evaluations: int

    def __str__(self) -> str:
        return f"hindsight on {self.trace.scenario} seed {self.trace.seed}"


@dataclass(frozen=True, slots=True)
class Decisions:
    """What a decision costs over so many backends; of this machine, now."""

    policy: str
    backends: int
    count: int

    def __str__(self) -> str:
        return f"decisions of {self.policy} over {self.backends} backends"


Task = Job | Least | Hindsight | Decisions
Answer = Measures | LeastFigures | HindsightFigures | DecisionFigures


def carry_out(task: Task) -> Answer:
    """Do it. Raises `SimError` where a run says nothing."""
    match task:
        case Job():
            return run_job(task)
        case Least():
            bound = bounds_of(task.trace, [task.good])[task.good]
            return LeastFigures(bound.least_cost if isfinite(bound.least_cost) else None, bound.most_good)
        case Hindsight():
            return _hindsight(task)
        case Decisions():
            return _decisions(task)


def answer_type(task: Task) -> type[Answer]:
    """Of what kind its answer is."""
    match task:
        case Job():
            return Measures
        case Least():
            return LeastFigures
        case Hindsight():
            return HindsightFigures
        case Decisions():
            return DecisionFigures


def cpu_s(task: Task) -> float:
    """About how long it takes on one core, in seconds."""
    match task:
        case Job():
            return task.rate_per_s * task.seconds / REQUESTS_PER_CPU_S
        case Least():
            return task.trace.rate_per_s * task.trace.seconds * BOUND_S_PER_REQUEST
        case Hindsight():
            return task.evaluations * HINDSIGHT_S_PER_EVALUATION
        case Decisions():
            return 2.0 * (task.count * 2e-4 + task.backends * 2e-3)


def _hindsight(task: Hindsight) -> HindsightFigures:
    from loadtest.sim.bound.comparison import compare

    found = compare(task.trace, task.policy, task.evaluations)
    point = found["hindsight"]
    assert isinstance(point, dict)
    return HindsightFigures(_ratio(found["cost_over_bound"]), _ratio(point["cost_over_bound"]))


def _ratio(value: object) -> float | None:
    return value if isinstance(value, float) else None


def _decisions(task: Decisions) -> DecisionFigures:
    from loadtest.bench.decide import measure

    kept, new = [measure(task.policy, task.backends, task.count, new_views=new) for new in (False, True)]
    return DecisionFigures(kept.cpu_us, new.cpu_us, kept.cpu_p99_us, new.cpu_p99_us)
