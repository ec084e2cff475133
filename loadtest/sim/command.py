"""`headrace sim`: plans the runs, drives them, and says what came out."""

import errno
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from loadtest.sim import showing
from loadtest.sim.pools import UnknownPool, find_pool
from loadtest.sim.rows import Row, gather
from loadtest.sim.run import Job, SimError, lay_out, parse_seeds, policy_spec, run_jobs, trace_dir
from loadtest.sim.scenarios import SCENARIOS, SECONDS, Scenario, UnknownScenario, find_scenarios
from loadtest.sim.spread import progress
from loadtest.sim.traces import TraceMissing
from loadtest.sim.workload import WARM_UP_S

DEFAULT_POLICIES = ("headrace", "weighted_least_request", "p2c", "round_robin")
TARGET = 0.99
Found = TypeVar("Found")
Shown = TypeVar("Shown", contravariant=True)
SEEDS = "1-5"


@dataclass(frozen=True, slots=True)
class SimOptions:
    """One call of `headrace sim`."""

    scenarios: str
    pool: str = "site"
    policies: tuple[str, ...] = ()
    """None: a usual few."""
    seeds: str = ""
    """None: each command's usual ones."""
    rate_per_s: float | None = None
    """Of the whole pool; `None`: each scenario's own, times the pool's size over four."""
    seconds: float | None = None
    """In which requests arrive; `None`: 400, and 30 real ones for a validation."""
    days: float | None = None
    """Of a lending simulation; `None`: two weeks."""
    load: float | None = None
    """Of a lending simulation: what its jobs bring over what the training pool's own devices can do; `None`: 1."""
    jobs: int = 1
    trace_dir: Path | None = None
    html: Path | None = None
    json: bool = False
    bound: bool = False
    """Hold every run against the clairvoyant bound of its own trace."""
    timing: bool = False
    """Put decision times into the JSON, which then differs from run to run."""
    target: float = TARGET
    """Of a capacity: the in-budget share to hold."""
    rates: str = ""
    """Of a capacity: rates to try, by commas; none: the usual ladder."""
    unseen: str = ""
    """Of a scorecard: seeds that nothing was tuned on; none: the usual ones."""
    subject: str = ""
    """Of a scorecard: the policy that is judged; none: `headrace`."""
    quick: bool = False
    """Of a scorecard: a few short runs, to see that it works."""
    keep: Path | None = None
    """Of a scorecard: the folder of answers already computed."""

    @property
    def length_s(self) -> float:
        return SECONDS if self.seconds is None else self.seconds


WRONG = (SimError, UnknownScenario, UnknownPool, TraceMissing)


def run(what: str, options: SimOptions) -> int:
    """The command: `what` is `list`, `capacity`, `validate`, `scorecard`, `training`, `lending`, or else the scenarios.

    Exit code 0: done; 1: the simulator and the real gateway do not agree, or a claim does not hold; 2: it could not
    take place.
    """
    if options.html is not None:
        # Before the run: it may take an hour, and what it found would be lost with the page.
        try:
            options.html.parent.mkdir(parents=True, exist_ok=True)
            if not os.access(options.html.parent, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            return refuse(SimError(f"no page can be written at {options.html}: {error.strerror or error}"))
    match what:
        case "list":
            return list_scenarios(json=options.json)
        case "capacity":
            return run_capacity(options)
        case "validate":
            return run_validation(options)
        case "scorecard":
            from loadtest.sim.scorecard.command import run_scorecard

            return run_scorecard(options)
        case "training":
            from loadtest.sim.training.command import run_training

            return run_training(options)
        case "lending":
            from loadtest.sim.lending.command import run_lending

            return run_lending(options)
        case _:
            return run_sim(options)


def run_sim(options: SimOptions) -> int:
    """Run scenarios and report."""
    from loadtest.sim import charts

    return report(options, simulate, charts.write, partial(showing.show, timing=options.timing))


class Show(Protocol[Shown]):
    """Prints what came out, as a table or as JSON, and says where the page is."""

    def __call__(self, rows: Shown, /, *, json: bool, report: str | None) -> None: ...


def report(options: SimOptions, find: Callable[[SimOptions], Found], write_page: Callable[[Found, Path], None],
           show: Show[Found]) -> int:
    """Find the rows, write the page where one is asked for, print. Exit code 0, or 2 where it could not take place."""
    try:
        rows = find(options)
    except WRONG as error:
        return refuse(error)
    if options.html:
        write_page(rows, options.html)
    show(rows, json=options.json, report=str(options.html) if options.html else None)
    return 0


def run_capacity(options: SimOptions) -> int:
    """Sweep rates and report."""
    from loadtest.sim import capacity

    try:
        found = capacity.find_capacities(options)
    except WRONG as error:
        return refuse(error)
    capacity.show(found, json=options.json)
    return 0


def run_validation(options: SimOptions) -> int:
    """Put the simulator beside the real gateway and report."""
    from loadtest.run import LoadTestError
    from loadtest.sim import validation
    from loadtest.stack import StackError

    asked = validation.ValidationOptions()
    asked = replace(asked, duration_s=options.seconds or asked.duration_s,
                    rate_per_s=options.rate_per_s or asked.rate_per_s)
    try:
        found = [validation.compare(replace(asked, policy=policy))
                 for policy in usual_policies(options.policies or (asked.policy,))]
    except (*WRONG, StackError, LoadTestError) as error:
        return refuse(error)
    validation.show(found, json=options.json)
    return 0 if all(one.agrees() for one in found) else 1


def list_scenarios(*, json: bool) -> int:
    """What can be simulated."""
    showing.show_scenarios(tuple(SCENARIOS.values()), json=json)
    return 0


def refuse(error: Exception) -> int:
    """Say what is wrong, in a line."""
    print(f"headrace sim: {error.args[0]}", file=sys.stderr)
    return 2


def simulate(options: SimOptions) -> tuple[Row, ...]:
    """All rows. Raises `SimError`, `UnknownScenario`, `UnknownPool` or `TraceMissing` before anything has run."""
    scenarios, pool = find_scenarios(options.scenarios), find_pool(options.pool)
    seeds, folder = parse_seeds(options.seeds or SEEDS), trace_dir(options.trace_dir)
    policies = usual_policies(options.policies)
    check_length(options.length_s)
    rows = []
    jobs: list[Job] = []
    for scenario in scenarios:
        rate = usual_rate(scenario, pool.scale) if options.rate_per_s is None else options.rate_per_s
        for policy in policies:
            rows.append((scenario.name, policy, options.pool, rate, options.length_s, seeds))
            jobs += [Job(scenario.name, options.pool, policy, seed, rate, options.length_s, folder) for seed in seeds]
    # Laid out once here, so that a missing trace is told at once and not by a process in the middle of the work.
    events: dict[str, Mapping[str, float]] = {}
    for job in jobs:
        if job.scenario not in events:
            events[job.scenario] = lay_out(job).marks
    found = gather(rows, run_jobs(jobs, options.jobs), events)
    return _with_bounds(found, folder) if options.bound else found


def _with_bounds(rows: tuple[Row, ...], folder: Path | None) -> tuple[Row, ...]:
    try:
        from loadtest.sim.bound.ratios import with_bounds
    except ImportError as error:
        raise SimError(f"--bound needs {error.name}: pip install 'headrace[bound]'") from None
    with progress(len({(row.scenario, seed) for row in rows for seed in row.seeds}), "bound") as advance:
        return with_bounds(rows, folder, advance)


def check_length(seconds: float) -> None:
    """Raises `SimError` where a run would count nothing."""
    if seconds <= WARM_UP_S:
        raise SimError(f"seconds must be over the {WARM_UP_S:g} s of warm-up that are not counted, got {seconds:g}")


def usual_policies(given: Sequence[str]) -> tuple[str, ...]:
    """The policies without doubles, each known to be one; the usual few where none is given. Raises `SimError`."""
    policies = without_doubles(given) or DEFAULT_POLICIES
    for policy in policies:
        policy_spec(policy)
    return policies


def known_policies(given: Sequence[str], known: Collection[str], of: str) -> tuple[str, ...]:
    """Those given, without doubles; all where none is given. Raises `SimError` for one that is not known."""
    policies = without_doubles(given) or tuple(known)
    for policy in policies:
        if policy not in known:
            raise SimError(f"no {of} policy {policy!r}: there are {', '.join(known)}")
    return policies


def without_doubles(given: Sequence[str]) -> tuple[str, ...]:
    """Names in the order given, each once and without spaces around it."""
    return tuple(dict.fromkeys(filter(None, map(str.strip, given))))


def usual_rate(scenario: Scenario, scale: float) -> float:
    """The scenario's rate for a pool that many times the size of four cards."""
    return scenario.rate_per_s * scale
