"""`headrace sim capacity`: the highest load at which a policy keeps 99 of 100 budgets.

Rates go upwards; at each, the in-budget share is the mean over seeds. The capacity is where the line between the last
rate that holds the target and the next crosses it. A policy is given up after three rates below the target in a row.
"""

import json as jsonlib
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from rich.console import Console
from rich.table import Table

from loadtest.sim.command import SEEDS, SimOptions, check_length, usual_policies
from loadtest.sim.measures import Measures
from loadtest.sim.pools import find_pool
from loadtest.sim.run import Job, SimError, lay_out, parse_seeds, run_jobs, trace_dir
from loadtest.sim.scenarios import find_scenarios

RATES_PER_S = (0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 12.0)
"""For four cards."""
MISSES_TO_GIVE_UP = 3
USUAL = "burst"
WIDTH = 180


@dataclass(frozen=True, slots=True)
class Level:
    """One rate: mean and spread over seeds."""

    rate_per_s: float
    in_budget: float
    sd: float | None
    cost_per_1k_in_budget: float | None


@dataclass(frozen=True, slots=True)
class Capacity:
    """What one policy carries."""

    scenario: str
    pool: str
    policy: str
    target: float
    levels: tuple[Level, ...]

    @property
    def per_s(self) -> float | None:
        """Requests a second; `None` where no rate held the target."""
        return crossing([(level.rate_per_s, level.in_budget) for level in self.levels], self.target)

    @property
    def is_at_least(self) -> bool:
        """The target held up to the highest rate that was tried: the capacity is that or more."""
        return bool(self.levels) and self.levels[-1].in_budget >= self.target

    def as_json(self) -> dict[str, object]:
        per_s = self.per_s
        return {
            "scenario": self.scenario, "pool": self.pool, "policy": self.policy, "target": self.target,
            "capacity_per_s": None if per_s is None else round(per_s, 4), "at_least": self.is_at_least,
            "best_in_budget": round(max(level.in_budget for level in self.levels), 6),
            "levels": [{"rate_per_s": level.rate_per_s, "in_budget": round(level.in_budget, 6),
                        "sd": None if level.sd is None else round(level.sd, 6),
                        "cost_per_1k_in_budget": level.cost_per_1k_in_budget and round(level.cost_per_1k_in_budget, 6)}
                       for level in self.levels],
        }


def crossing(curve: Sequence[tuple[float, float]], target: float) -> float | None:
    """The highest rate at which the curve holds the target, between its points by straight lines.

    `curve` is (rate, share) by rising rate. `None` where no point holds it.
    """
    holding = [place for place, (_, share) in enumerate(curve) if share >= target]
    if not holding:
        return None
    last = holding[-1]
    rate, share = curve[last]
    if last + 1 == len(curve):
        return rate
    next_rate, next_share = curve[last + 1]
    return rate + (share - target) / (share - next_share) * (next_rate - rate)


def given_up(shares: Sequence[float], target: float) -> bool:
    """Whether a policy with these in-budget shares, by rising rate, need not be tried any higher."""
    tail = shares[-MISSES_TO_GIVE_UP:]
    return len(tail) == MISSES_TO_GIVE_UP and all(share < target for share in tail)


def find_capacities(options: SimOptions) -> tuple[Capacity, ...]:
    """Sweep every scenario and policy. Raises what `command.simulate` does."""
    pool = find_pool(options.pool)
    seeds, folder = parse_seeds(options.seeds or SEEDS), trace_dir(options.trace_dir)
    policies, target = usual_policies(options.policies), options.target
    check_length(options.length_s)
    ladder = parse_rates(options.rates) if options.rates else tuple(rate * pool.scale for rate in RATES_PER_S)
    if not 0.0 < target < 1.0:
        raise SimError(f"target must lie between 0 and 1, such as 0.99, got {target:g}")
    found = []
    for scenario in find_scenarios(options.scenarios or USUAL):
        levels: dict[str, list[Level]] = {policy: [] for policy in policies}
        for rate in ladder:
            alive = [policy for policy in policies
                     if not given_up([level.in_budget for level in levels[policy]], target)]
            jobs = [Job(scenario.name, options.pool, policy, seed, rate, options.length_s, folder)
                    for policy in alive for seed in seeds]
            if jobs:
                lay_out(jobs[0])
            results = run_jobs(jobs, options.jobs)
            for place, policy in enumerate(alive):
                levels[policy].append(_level(rate, results[place * len(seeds) : (place + 1) * len(seeds)]))
        found += [Capacity(scenario.name, options.pool, policy, target, tuple(levels[policy])) for policy in policies]
    return tuple(found)


def parse_rates(text: str) -> tuple[float, ...]:
    """Rates by commas, in rising order. Raises `SimError`."""
    try:
        rates = tuple(sorted({float(part) for part in text.split(",") if part.strip()}))
    except ValueError:
        raise SimError(f"rates {text!r}: numbers by commas, such as 4,6,8") from None
    if not rates or rates[0] <= 0.0:
        raise SimError(f"rates {text!r}: every rate must be over 0")
    return rates


def show(capacities: Sequence[Capacity], *, json: bool) -> None:
    """The answer on standard output."""
    if json:
        print(jsonlib.dumps({"capacities": [capacity.as_json() for capacity in capacities]}))
        return
    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, WIDTH)
    for scenario in dict.fromkeys(capacity.scenario for capacity in capacities):
        console.print(_table([capacity for capacity in capacities if capacity.scenario == scenario]))


def _table(capacities: Sequence[Capacity]) -> Table:
    first = capacities[0]
    table = Table(box=None, pad_edge=False, header_style="bold", title_justify="left", title_style="bold",
                  title=f"\n{first.scenario}, pool {first.pool}: requests/s with {first.target:.0%} in budget")
    table.add_column("policy", no_wrap=True)
    table.add_column("capacity", justify="right", no_wrap=True)
    table.add_column("in budget % by rate", no_wrap=True)
    for capacity in sorted(capacities, key=lambda one: -(one.per_s or 0.0)):
        per_s = capacity.per_s
        word = "never" if per_s is None else f"{'>= ' if capacity.is_at_least else ''}{per_s:.1f}"
        curve = "  ".join(f"{level.rate_per_s:g}: {100 * level.in_budget:.1f}" for level in capacity.levels)
        table.add_row(capacity.policy, word, curve)
    return table


def _level(rate_per_s: float, runs: Sequence[Measures]) -> Level:
    shares = [run.in_budget for run in runs]
    costs = [run.cost_per_1k_in_budget for run in runs if run.cost_per_1k_in_budget is not None]
    return Level(rate_per_s, mean(shares), stdev(shares) if len(shares) > 1 else None, mean(costs) if costs else None)
