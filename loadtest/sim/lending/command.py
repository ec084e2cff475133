"""`headrace sim lending`: two weeks of an inference pool and a training queue, shared in four ways."""

from typing import NamedTuple

from loadtest.sim.command import SimOptions, known_policies, report
from loadtest.sim.lending import showing
from loadtest.sim.lending.policies import POLICIES
from loadtest.sim.lending.runs import DAYS, LOAD, run_policy
from loadtest.sim.run import SimError, parse_seeds
from loadtest.sim.spread import spread_over
from loadtest.sim.training.rows import Outcome, Row, row_of

SCENARIOS = {
    "diurnal": "28 clients of ServeGen that are always there: days and nights, three to one",
    "surges": "98 clients of ServeGen, some of which come for an hour with four times the load of all others",
}
SEEDS = "1-3"
LEAST_DAYS = 1.0


class Run(NamedTuple):
    """One run: a policy on one seed of a scenario."""

    scenario: str
    policy: str
    seed: int
    days: float
    load: float

    def __str__(self) -> str:
        return f"{self.scenario} {self.policy} seed {self.seed}"


def run_lending(options: SimOptions) -> int:
    """The command. Exit code 0; 1: the stand-in for requests is off; 2: it could not take place."""
    if options.scenarios == "validate":
        from loadtest.sim.lending import validation

        found = validation.compare()
        validation.show(found, json=options.json)
        return 0 if found.agrees() else 1
    return report(options, simulate, showing.write_page, showing.show)


def simulate(options: SimOptions) -> tuple[Row, ...]:
    """A row a scenario and policy. Raises `SimError` before anything has run."""
    seeds, policies = parse_seeds(options.seeds or SEEDS), known_policies(options.policies, POLICIES, "lending")
    scenarios = find_scenarios(options.scenarios)
    days = DAYS if options.days is None else options.days
    if days < LEAST_DAYS:
        raise SimError(f"days: a day at least, or nothing is known of demand, got {days:g}")
    load = LOAD if options.load is None else options.load
    runs = [Run(scenario, policy, seed, days, load) for scenario in scenarios for policy in policies for seed in seeds]
    outcomes = spread_over(options.jobs, _simulate, runs, "lending")
    pairs = [(scenario, policy) for scenario in scenarios for policy in policies]
    return tuple(row_of(scenario, policy, seeds, outcomes[place * len(seeds):(place + 1) * len(seeds)])
                 for place, (scenario, policy) in enumerate(pairs))


def find_scenarios(text: str) -> tuple[str, ...]:
    """Scenarios by commas, or all. Raises `SimError`."""
    names = tuple(SCENARIOS) if text == "all" else tuple(filter(None, map(str.strip, text.split(",")))) or ("diurnal",)
    for name in names:
        if name not in SCENARIOS:
            raise SimError(f"no lending scenario {name!r}: there are {', '.join(SCENARIOS)}, all, and validate")
    return names


def _simulate(run: Run) -> Outcome:
    return run_policy(run.scenario, run.policy, run.seed, run.days, run.load)
