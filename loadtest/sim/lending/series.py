"""What is asked of the two sides: requests by the minute, and jobs. Reading the extracts (`extracts/SOURCES.md`)."""

import csv
import gzip
from collections.abc import Iterator
from functools import lru_cache
from importlib.resources import files
from math import sqrt
from random import Random
from typing import NamedTuple

STEP_S = 600.0
MINUTE_S = 60.0
DAY_S = 86_400.0
DISPERSION = 2.5
"""Variance over mean of the requests in a minute: busier than Poisson, as ServeGen's clients are."""
LONGEST_S = 3 * DAY_S
"""Jobs are cut there, so that a run of two weeks sees most of them end; one in nine of the trace is longer."""

QUIET_S = 10 * DAY_S
"""Before this the trace has a job a day."""


class TraceJob(NamedTuple):
    """One job of the trace; `arrival_s` counts from the start of a run."""

    arrival_s: float
    family: str
    gang: int
    duration_s: float
    """On its gang of reference cards, alone."""


@lru_cache
def demand_rates(scenario: str) -> tuple[float, ...]:
    """Requests a second of each ten minutes for 14 days: `diurnal` or `surges`."""
    return tuple(float(row[f"{scenario}_rps"]) for row in _rows("servegen_language_m-mid_demand.csv.gz"))


@lru_cache
def trace_jobs() -> tuple[TraceJob, ...]:
    """All jobs of the trace, in order of arrival."""
    return tuple(TraceJob(float(row["arrival_s"]), row["family"], int(row["gang"]), float(row["duration_s"]))
                 for row in _rows("gavel_philly_derived_ee9e8c_jobs.csv.gz"))


def minutes_of_demand(scenario: str, days: float, peak_per_s: float, rng: Random,
                      first_day: int = 0) -> tuple[float, ...]:
    """Requests a second in each minute, scaled so that the busiest ten minutes of the whole series ask for the peak.

    A rate holds for its ten minutes and jumps to the next, which is the hardest way to read it. After the fourteenth
    day comes the first again.
    """
    rates = demand_rates(scenario)
    scale = peak_per_s / max(rates)
    minutes = []
    first = first_day * round(DAY_S / STEP_S)
    for minute in range(round(days * DAY_S / MINUTE_S)):
        mean = rates[(first + int(minute * MINUTE_S / STEP_S)) % len(rates)] * scale * MINUTE_S
        minutes.append(max(0.0, rng.gauss(mean, sqrt(DISPERSION * mean))) / MINUTE_S)
    return tuple(minutes)


def jobs_of_run(seed: int, days: float, reference_devices: float) -> tuple[TraceJob, ...]:
    """Jobs of the trace in their order, as many as keep so many devices busy for so long, spread over the days.

    Seeds 1 to 5 begin at five places that lie evenly over the trace, others at random; the end goes on at the
    beginning. Arrivals keep their pattern and are drawn apart or together, so that all seeds bring the same work.
    """
    jobs = [job for job in trace_jobs() if job.arrival_s >= QUIET_S]
    length_s = jobs[-1].arrival_s + STEP_S - QUIET_S
    first_s = QUIET_S + ((seed - 1) * length_s / 5 if 1 <= seed <= 5 else Random(seed).uniform(0.0, length_s))
    work_s = reference_devices * days * DAY_S
    found: list[TraceJob] = []
    for at_s, job in sorted(((job.arrival_s - first_s) % length_s, job) for job in jobs):
        if work_s <= 0.0:
            break
        cut = job._replace(arrival_s=at_s, duration_s=min(job.duration_s, LONGEST_S))
        found.append(cut)
        work_s -= cut.gang * cut.duration_s
    stretch = days * DAY_S / (found[-1].arrival_s + 1.0)
    return tuple(job._replace(arrival_s=job.arrival_s * stretch) for job in found)


def _rows(name: str) -> Iterator[dict[str, str]]:
    with (files("loadtest.sim.lending").joinpath("extracts", name).open("rb") as raw,
          gzip.open(raw, "rt", encoding="utf-8", newline="") as text):
        yield from csv.DictReader(text)
