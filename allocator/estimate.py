"""How long a job will take on so many devices of a card, in seconds::

    duration = move + restart + remaining / speed(card, family, devices)
    move     = data_gb · 8 / bandwidth(data site → site)        0 where the data is, or where that is not declared
    restart  = the checkpoint's restart time                    from the second attempt on

Without an estimate of the work, a job is taken to need `Rules.default_estimate_s` on the fastest of its cards, and as
much longer on each other one as that is slower: what was measured counts, also where nothing was estimated. A run that
outlives its prediction is expected to go on for a tenth of its age, and at least a minute: it is never expected in the
past (F16).
"""

from math import inf

from allocator.model.jobs import Job, JobState, Run
from allocator.model.world import World

LEFT_AT_LEAST = 0.05
"""Share of the estimated work that a waiting job always has before it: one that is past its estimate is not over."""
OVERRUN_SHARE = 0.1
OVERRUN_LEAST_S = 60.0


def duration_s(world: World, state: JobState, card: str, devices: int, *, spread_out: bool = False,
               site: str = "") -> float:
    """The formula above; infinite where the card is unknown or was measured not to run the family."""
    job = state.job
    speed = _speed(world, card, job.family, devices, spread_out)
    if speed <= 0.0:
        return inf
    if job.work_unit_s is None:
        fastest = max(_speed(world, other, job.family, devices, False) for other in job.cards)
        work_s = world.config.rules.default_estimate_s * max(fastest / speed, 1.0)
    else:
        left_unit_s = max(job.work_unit_s - state.done_unit_s, LEFT_AT_LEAST * job.work_unit_s)
        work_s = max(left_unit_s / speed, 1.0)
    restart_s = job.checkpoint.restart_s if job.checkpoint and state.attempts else 0.0
    return move_s(world, job, site) + restart_s + work_s


def _speed(world: World, card: str, family: str, devices: int, spread_out: bool) -> float:
    """`Coefficients.speed`, remembered: a pass asks for the same few again and again."""
    known: dict[tuple[str, str, int, bool], float] = world.memo.setdefault("speeds", {})
    key = (card, family, devices, spread_out)
    speed = known.get(key)
    if speed is None:
        speed = known[key] = world.coefficients.speed(card, family, devices, spread_out=spread_out)
    return speed


def move_s(world: World, job: Job, site: str) -> float:
    """Time to bring the job's data to a site."""
    if not job.data_site or not job.data_gb or site == job.data_site or not site:
        return 0.0
    config = world.config
    gbps = config.links_gbps.get(f"{job.data_site}>{site}", config.rules.site_gbps)
    return job.data_gb * 8.0 / gbps if gbps > 0.0 else inf


def expected_end_s(run: Run, now_s: float) -> float:
    """When the run is expected to be gone; always after now."""
    least_s = now_s + max(OVERRUN_LEAST_S, OVERRUN_SHARE * (now_s - run.started_s))
    end_s = run.ends_s if run.ends_s > now_s else least_s
    if run.stop_by_s is not None:
        end_s = min(end_s, run.stop_by_s if run.stop_by_s > now_s else least_s)
    return end_s


def loan_worth(promised_s: float, restarts: int, restart_s: float) -> float:
    """Share of the promised time that would be work: Sia's factor `(age - restarts·cost) / (age + cost)`."""
    return (promised_s - restarts * restart_s) / (promised_s + restart_s) if promised_s + restart_s > 0.0 else 0.0


def lost_unit_s(world: World, run: Run, now_s: float) -> float:
    """What stopping a run costs: its restart, and the work that no checkpoint holds, in units · seconds.

    A run that can checkpoint on a signal is weighed with all that it would have to write or lose; so one that has just
    checkpointed goes before one that has much at stake.
    """
    table = world.tables.get(run.coefficients, world.coefficients)
    units = len(run.devices) * table.coefficient(run.card, run.family)
    restart_s = run.checkpoint.restart_s if run.checkpoint else 0.0
    age_s = run.safe_age_s(now_s)
    if run.checkpoint is None:
        age_s = now_s - run.started_s
    return units * (restart_s + max(0.0, age_s))
