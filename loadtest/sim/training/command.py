"""`headrace sim training`: our allocator on Gavel's jobs, beside what Gavel's policies are published to reach."""

from typing import NamedTuple

from loadtest.sim.command import SimOptions, known_policies, report
from loadtest.sim.run import parse_seeds
from loadtest.sim.spread import spread_over
from loadtest.sim.training import showing
from loadtest.sim.training.gavel import JOBS_PER_HOUR
from loadtest.sim.training.rows import Outcome, Row, row_of
from loadtest.sim.training.runs import POLICIES, run_policy

SCENARIO = "gavel"
SEEDS = "0,1"


class Run(NamedTuple):
    """One run: a policy on one seed's jobs."""

    policy: str
    seed: int

    def __str__(self) -> str:
        return f"{self.policy} seed {self.seed}"


def run_training(options: SimOptions) -> int:
    """The command. Exit code 0, or 2 where it could not take place."""
    return report(options, simulate, showing.write_page, showing.show)


def simulate(options: SimOptions) -> tuple[Row, ...]:
    """A row a policy. Raises `SimError` before anything has run."""
    seeds, policies = parse_seeds(options.seeds or SEEDS), known_policies(options.policies, POLICIES, "training")
    runs = [Run(policy, seed) for policy in policies for seed in seeds]
    outcomes = spread_over(options.jobs, _simulate, runs, "training")
    return tuple(row_of(SCENARIO, policy, seeds, outcomes[place * len(seeds):(place + 1) * len(seeds)])
                 for place, policy in enumerate(policies))


def _simulate(run: Run) -> Outcome:
    return run_policy(run.policy, run.seed, JOBS_PER_HOUR)
