"""One run: two weeks of demand and jobs under one policy, until the last of the jobs is done."""

from collections.abc import Mapping
from random import Random
from statistics import mean

from allocator.events import LoanRecalled
from allocator.lending import at_stake, staying
from allocator.model.jobs import Checkpoint, Job
from allocator.model.world import World
from allocator.plan import Plan
from loadtest.sim.lending import cluster
from loadtest.sim.lending.optimum import least_loss
from loadtest.sim.lending.policies import POLICIES
from loadtest.sim.lending.router import Router
from loadtest.sim.lending.series import DAY_S, TraceJob, jobs_of_run, minutes_of_demand
from loadtest.sim.lending.serving import peak_per_s
from loadtest.sim.training.machines import Machines
from loadtest.sim.training.rows import Figures, Outcome, cumulated, quantile
from loadtest.sim.training.runs import overlap_s

DAYS = 14.0
LOAD = 1.0
"""Mean work that the jobs bring, over what the training pool's own devices can do."""
KNOWN_DAYS = 3
"""Days before the run that the router has seen."""
PORTED = 0.4
"""Share of jobs that can also run on the 910B."""
UNHURRIED = 0.2
"""Share of jobs whose checkpoint takes longer than any notice: a stop throws them back to the last one."""
ROUGHLY = 0.7
LONGEST_RUNS = 4.0
"""A run that needs this many times its days to finish its jobs is given up: the policy cannot carry them."""


class Recalls:
    """Watches recalls: how long each takes, and what the choice put at stake beside the best one."""

    def __init__(self, machines: Machines) -> None:
        self.times_s: list[float] = []
        self.count = 0
        self.lost = 0.0
        self.least = 0.0
        self.unsure = 0
        """Recalls too large for the exact optimum; in neither sum."""
        self._machines = machines
        self._open: dict[tuple[str, int], float] = {}
        machines.on_plan = self._watch

    def settle(self, now_s: float) -> None:
        """Closes those whose loan is over."""
        loans = self._machines.world.loans
        for key in [key for key in self._open if (found := loans.get(key[0])) is None or found.epoch != key[1]]:
            self.times_s.append(now_s - self._open.pop(key))

    def _watch(self, before: World, planned: Plan, now_s: float) -> None:
        by_lender: dict[tuple[str, str], list[str]] = {}
        for event in planned.events:
            if isinstance(event, LoanRecalled):
                loan = before.loans[event.loan]
                by_lender.setdefault((loan.lender, loan.card), []).append(loan.id)
                self._open.setdefault((loan.id, loan.epoch), now_s)
                self.count += 1
        for (lender, card), chosen in by_lender.items():
            self._compare(before, lender, card, chosen, now_s)

    def _compare(self, world: World, lender: str, card: str, chosen: list[str], now_s: float) -> None:
        among = staying(world, lender, card)
        by_device = {device: loan for loan in among for device in loan.devices}
        lies_on: dict[str, set[str]] = {}
        for device, run in world.holders.items():
            if device in by_device:
                lies_on.setdefault(run, set()).add(by_device[device].id)
        weights = {run: at_stake(world, world.runs[run], by_device, now_s, among) for run in lies_on}
        least = least_loss(len(chosen), [loan.id for loan in among], weights, lies_on)
        if least is None:
            self.unsure += 1
            return
        self.least += least
        self.lost += sum(weights[run] for run, on in lies_on.items() if not on.isdisjoint(chosen))


def run_policy(scenario: str, name: str, seed: int, days: float, load: float = LOAD) -> Outcome:
    """One policy on one seed."""
    policy = POLICIES[name]
    rng = Random(seed)
    before = round(KNOWN_DAYS * DAY_S / 60)
    minutes = minutes_of_demand(scenario, days + KNOWN_DAYS, peak_per_s(), rng, first_day=3 * (seed - 1))
    machines = Machines(cluster.first_world(policy.rules, dict(policy.given_nodes)), policy.planner)
    lending = policy.lending()
    for per_s in minutes[:before]:
        lending.learn(per_s)
    router = Router(machines, minutes[before:], lending)
    for number, job in enumerate(jobs_of_run(seed, days, load * cluster.own_units())):
        machines.submit(asked_job(f"j{number:04d}", job, rng), job.arrival_s, job.duration_s * job.gang)
    recalls = Recalls(machines)
    while machines.now_s < days * DAY_S or any(story.ended_s is None for story in machines.stories.values()):
        machines.step()
        recalls.settle(machines.now_s)
        if machines.now_s > LONGEST_RUNS * days * DAY_S:
            break
    return _outcome(machines, router, recalls, policy.name, days)


def asked_job(name: str, job: TraceJob, rng: Random) -> Job:
    """A job of the trace as somebody hands it in: with a rough estimate, and cards and checkpoints by dice."""
    takes_s = 180.0 if rng.random() < UNHURRIED else 10.0 + 0.5 * job.gang
    cards = ("a100", "h100", "910b") if rng.random() < PORTED else ("a100", "h100")
    return Job(
        id=name, queue=cluster.QUEUE, family=job.family, cards=cards, gang_min=job.gang, gang_max=job.gang,
        work_unit_s=max(1.0, job.duration_s * job.gang * rng.lognormvariate(0.0, ROUGHLY)),
        checkpoint=Checkpoint(every_s=1800.0, takes_s=takes_s, restart_s=60.0 + job.gang))


def _outcome(machines: Machines, router: Router, recalls: Recalls, policy: str, days: float) -> Outcome:
    until_s = days * DAY_S
    stories = list(machines.stories.values())
    ends_s = [machines.now_s if story.ended_s is None else story.ended_s for story in stories]
    jct_s = [end_s - story.submitted_s for story, end_s in zip(stories, ends_s, strict=True)]
    waits_s = [story.waited_s for story in stories]
    large = [story.waited_s for story in stories if story.gang >= 16]
    trained = sum(overlap_s(each, 0.0, until_s) * each.units_per_s for each in machines.stretches_until_now())
    served = sum(busy_s * cluster.DEVICES_A_REPLICA * cluster.coefficients().scalar(card)
                 for card, busy_s in router.busy_replica_s.items())
    lends = bool(recalls.count)
    figures = Figures(
        queue_wait_mean_s=mean(waits_s), queue_wait_p95_s=quantile(waits_s, 0.95),
        gang16_wait_mean_s=mean(large) if large else None, jct_mean_s=mean(jct_s), jct_p95_s=quantile(jct_s, 0.95),
        utilisation=(trained + served) / (cluster.all_units() * until_s),
        unit_cost=cluster.price_per_hour() * until_s / (trained + served),
        recalls=recalls.count, recall_p99_s=quantile(recalls.times_s, 0.99) if recalls.times_s else None,
        overdue=machines.overdue, lost_device_h=machines.lost_device_s / 3600.0,
        lost_over_optimum=recalls.lost / recalls.least if lends and recalls.least > 0.0 else None,
        p99_breach=router.missed / router.asked)
    return Outcome(figures, _curves(waits_s, jct_s, router))


def _curves(waits_s: list[float], jct_s: list[float], router: Router) -> Mapping[str, tuple[tuple[float, float], ...]]:
    return {"wait": cumulated(waits_s), "jct": cumulated(jct_s), "serving": tuple(router.serving_by_hour),
            "needed": tuple(router.needed_by_hour)}
