"""Runs of scenarios under policies: one process a run, the same answer whatever order they finish in."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from loadtest.sim.measures import Measures, NothingCounted, measure
from loadtest.sim.pools import find_pool
from loadtest.sim.scenarios import SCENARIOS, SECONDS, Setting
from loadtest.sim.spread import spread_over
from loadtest.sim.workload import Workload
from loadtest.sim.world import World
from policies.registry import build_learner, build_pipeline
from policies.spec import PolicyError, PolicySpec

MAX_SEEDS = 1000


class SimError(Exception):
    """The simulation cannot take place; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Job:
    """One run: a scenario on a pool under a policy, from one seed."""

    scenario: str
    pool: str
    policy: str
    """A preset, with settings where some are given: `cheapest_feasible:margin=1.5`."""
    seed: int
    rate_per_s: float
    seconds: float = SECONDS
    trace_dir: Path | None = None

    def __str__(self) -> str:
        return f"{self.scenario} {self.policy} seed {self.seed} at {self.rate_per_s:g}/s"


def policy_spec(text: str) -> PolicySpec:
    """A preset by name, with settings: `NAME` or `NAME:SETTING=VALUE;SETTING=VALUE`. Raises `SimError`."""
    name, _, given = text.partition(":")
    settings: dict[str, float | int | str | bool] = {}
    for pair in filter(None, given.split(";")):
        key, equals, value = pair.partition("=")
        if not equals:
            raise SimError(f"policy {text!r}: needs NAME:SETTING=VALUE, got {pair!r}")
        settings[key.strip()] = _value(value.strip())
    spec = PolicySpec(name, settings=settings)
    try:
        build_pipeline(spec)
    except PolicyError as error:
        raise SimError(f"policy {text!r}: {error.message}") from None
    return spec


def _value(text: str) -> float | int | str | bool:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def lay_out(job: Job) -> Workload:
    """What happens in that run. Raises `SimError` where its trace is missing."""
    return SCENARIOS[job.scenario].lay_out(
        Setting(find_pool(job.pool), job.seed, job.rate_per_s, job.seconds, job.trace_dir))


def run_world(job: Job) -> World:
    """That run, to its end."""
    workload = lay_out(job)
    spec = policy_spec(job.policy)
    gateways = range(workload.gateways)
    return World(find_pool(job.pool), workload, [build_pipeline(spec) for _ in gateways],
                 [build_learner(spec) for _ in gateways], job.seed).run()


def run_job(job: Job) -> Measures:
    """That run's numbers. Raises `SimError` where it says nothing."""
    world = run_world(job)
    try:
        return measure(world)
    except NothingCounted as error:
        raise SimError(f"{job.scenario}, seed {job.seed}: {error}") from error


def run_jobs(jobs: Sequence[Job], processes: int = 1) -> list[Measures]:
    """The numbers of all, in the order of the jobs; progress goes to standard error."""
    return spread_over(processes, run_job, jobs, "sim")


def parse_seeds(text: str) -> tuple[int, ...]:
    """`1-5`, `7` or `1-3,11`. Raises `SimError`."""
    seeds: list[int] = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise SimError(f"seeds {text!r}: whole numbers such as 1-5 or 1,2,7")
        low, high = int(first), int(last) if dash else int(first)
        if high < low or high - low >= MAX_SEEDS:
            raise SimError(f"seeds {text!r}: a range goes upwards, over {MAX_SEEDS} seeds at most")
        seeds.extend(range(low, high + 1))
    if not seeds:
        raise SimError("seeds: name one at least, such as 1-5")
    return tuple(dict.fromkeys(seeds))


def trace_dir(given: Path | None) -> Path | None:
    """The folder of whole traces: the one given, or the environment's. Raises `SimError` where it is none."""
    folder = given or (Path(text) if (text := os.environ.get("HEADRACE_TRACE_DIR")) else None)
    if folder is not None and not folder.is_dir():
        raise SimError(f"{folder} is no folder: name the one that holds the traces, or leave it out for the extracts "
                       "that come with Headrace")
    return folder


def say(text: str) -> None:
    """A line on standard error."""
    print(f"sim: {text}", file=sys.stderr, flush=True)
