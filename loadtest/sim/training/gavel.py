"""The jobs, the cluster and the published results of Gavel (Narayanan et al., OSDI 2020).

Drawn as `scheduler/utils.py` and `scheduler/scheduler.py` of stanford-futuredata/gavel @c4fa400 (MIT) draw them, in the
same order from the same generators, so that these *are* its jobs::

    gang       1 (Gavel draws a size and drops it, unless it is asked for jobs of many cards)
    duration   60 s · 10^U[1.5, 3] in 4 of 5 cases, 60 s · 10^U[3, 4] in the fifth: seconds on one V100, alone
    family     one of 26 with equal chance, and again where it cannot be spread and should be
    arrivals   Poisson, 2 an hour; the first at 0

Seeds: jobs from `seed + 2`, arrivals from `seed + 3`. Counted are jobs 200 to 399. That they are the same is shown by
`rounds`, which replays one of Gavel's policies on them and comes to its published mean.
"""

from collections.abc import Iterator
from math import log
from random import Random
from typing import NamedTuple

CARDS = ("v100", "p100", "k80")
CARDS_EACH = 16
DEVICES_A_NODE = 4
COUNTED = range(200, 400)
JOBS_PER_HOUR = 2.0
PRICE_PER_HOUR = {"v100": 0.74, "p100": 0.43, "k80": 0.135}
"""Google's spot prices as Gavel's `read_per_instance_type_spot_prices_json` has them, in dollars."""

PUBLISHED_JCT_H = {
    "gavel fifo": (24.1, 14.2),
    "gavel max_min_fairness": (20.2, 17.7),
    "gavel max_min_fairness_perf": (13.9, 12.3),
    "gavel fifo_perf": (13.8, 11.9),
}
"""Mean hours of jobs 200 to 399 from seeds 0 and 1, by Gavel's simulator with its own measured throughputs.

These policies may move a job between card types every six minutes, at no cost in time.
"""


class GavelJob(NamedTuple):
    """One job; `work_unit_s` is its time on one V100, alone."""

    arrival_s: float
    family: str
    gang: int
    work_unit_s: float


def _families() -> Iterator[tuple[str, bool]]:
    """In the order of Gavel's `job_table.py`: the name, and whether it can be spread over cards."""
    for model, sizes, spreads in (
        ("ResNet-18", (16, 32, 64, 128, 256), True), ("ResNet-50", (16, 32, 64, 128), True),
        ("Transformer", (16, 32, 64, 128, 256), True), ("LM", (5, 10, 20, 40, 80), True),
        ("Recommendation", (512, 1024, 2048, 4096, 8192), False),
    ):
        for size in sizes:
            yield f"{model} (batch size {size})", spreads
    yield "A3C", False
    yield "CycleGAN", False


FAMILIES = tuple(_families())


def draw_jobs(seed: int, count: int, jobs_per_hour: float = JOBS_PER_HOUR) -> tuple[GavelJob, ...]:
    """The first so many jobs of a seed."""
    of_jobs, of_arrivals = Random(seed + 2), Random(seed + 3)
    jobs = []
    arrival_s = 0.0
    for _ in range(count):
        of_jobs.uniform(0, 1)  # the size that is dropped
        duration_s = 60.0 * 10 ** (of_jobs.uniform(3, 4) if of_jobs.random() >= 0.8 else of_jobs.uniform(1.5, 3))
        family, _ = of_jobs.choice(FAMILIES)
        jobs.append(GavelJob(arrival_s, family, 1, duration_s))
        arrival_s -= log(1.0 - of_arrivals.random()) * 3600.0 / jobs_per_hour
    return tuple(jobs)
