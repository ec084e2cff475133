"""`headrace sim training`: our allocator on Gavel's jobs, beside what Gavel's policies are published to reach."""

from typing import NamedTuple

from loadtest.sim.command import SimOptions, refuse
from loadtest.sim.run import SimError, parse_seeds
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
    try:
        rows = simulate(options)
    except SimError as error:
        return refuse(error)
    if options.html:
        showing.write_page(rows, options.html)
    showing.show(rows, json=options.json, report=str(options.html) if options.html else None)
    return 0


def simulate(options: SimOptions) -> tuple[Row, ...]:
    """A row a policy. Raises `SimError` before anything has run."""
    seeds, policies = parse_seeds(options.seeds or SEEDS), usual_policies(options.policies)
    runs = [Run(policy, seed) for policy in policies for seed in seeds]
    outcomes = spread_over(options.jobs, _simulate, runs, "training")
    return tuple(row_of(SCENARIO, policy, seeds, outcomes[place * len(seeds):(place + 1) * len(seeds)])
                 for place, policy in enumerate(policies))


def usual_policies(given: tuple[str, ...]) -> tuple[str, ...]:
    """Those given, each known; all where none is given. Raises `SimError`."""
    policies = tuple(dict.fromkeys(filter(None, (policy.strip() for policy in given)))) or tuple(POLICIES)
    for policy in policies:
        if policy not in POLICIES:
            raise SimError(f"no training policy {policy!r}: there are {', '.join(POLICIES)}")
    return policies


def _simulate(run: Run) -> Outcome:
    return run_policy(run.policy, run.seed, JOBS_PER_HOUR)
