"""The policies that stand side by side: who lends what, by which signs, and whom a recall stops."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from allocator.apply import apply
from allocator.events import Event, LoanRecalled
from allocator.lending import staying
from allocator.loan.loan import Loan
from allocator.model.pools import Rules
from allocator.model.world import World
from allocator.plan import Plan, plan
from allocator.queueing.bench import why
from allocator.reasons import Reason
from loadtest.sim.lending.router import ByForecast, Lending, Nothing, Reactive
from loadtest.sim.training.machines import Planner
from policies.forecast.forecaster import Forecaster
from policies.forecast.outlooks import SeasonalNaive

PROMISED_S = 7200.0
GRACE_S = 60.0
POD_GRACE_S = 30.0
"""Kubernetes' usual terminationGracePeriodSeconds."""
DAY_MINUTES = 1440
RULES = Rules(
    grace_s=GRACE_S, tick_s=5.0, promised_min_s=PROMISED_S, surplus_hold_s=120.0, supply_fresh_s=900.0,
    idle_return_s=300.0)


@dataclass(frozen=True, slots=True)
class LendingPolicy:
    """One way of sharing the cluster."""

    name: str
    shows: str
    lending: Callable[[], Lending]
    planner: Planner = plan
    rules: Rules = RULES
    given_nodes: Mapping[str, int] = field(default_factory=dict)
    """By card, nodes of the inference pool that train for good instead."""


def day_of_minutes() -> Forecaster:
    """The router's own forecaster, as far as a loan is promised."""
    return Forecaster(SeasonalNaive(DAY_MINUTES, 60.0), bin_s=60.0, horizon_s=PROMISED_S)


def last_admitted_first(world: World, now_s: float) -> Plan:
    """Recalls as Kueue reclaims: whoever was admitted last is stopped first. All else is the shipped planner's."""
    recalls: list[Event] = []
    for (pool, card), supply in world.supplies.items():
        out = staying(world, pool, card)
        short = len(out) - max(0, supply.spare)
        recalls += [LoanRecalled(at_s=now_s, loan=loan.id, epoch=loan.epoch, deadline_s=now_s + loan.grace_s,
                                 why=why(world, Reason.SLACK_NEGATIVE, f"{short} of {len(out)} {card} replicas"))
                    for loan in _last_admitted(world, out)[:max(0, short)]]
    for event in recalls:
        world = apply(world, event)
    rest = plan(world, now_s)
    return Plan((*recalls, *rest.events), rest.world, rest.refused)


def _last_admitted(world: World, among: list[Loan]) -> list[Loan]:
    """Free loans, and then those under the run that began last, and so on."""
    began = {loan.id: max((world.runs[world.holders[device]].started_s for device in loan.devices
                           if device in world.holders), default=float("inf")) for loan in among}
    return sorted(among, key=lambda loan: (-began[loan.id], loan.id))


POLICIES = {policy.name: policy for policy in (
    LendingPolicy("no_lending", "each pool keeps to its own", Nothing),
    LendingPolicy("static_split", "three A100 nodes of the inference pool train for good", Nothing,
                  given_nodes={"a100": 3}),
    LendingPolicy("kueue_like", "lends what an autoscaler leaves, reclaims from whoever was admitted last, 30 s grace",
                  Reactive, last_admitted_first,
                  replace(RULES, grace_s=POD_GRACE_S, surplus_hold_s=0.0, idle_return_s=60.0)),
    LendingPolicy("headrace", "lends by forecast, recalls for the least lost work, 60 s grace",
                  lambda: ByForecast(day_of_minutes(), PROMISED_S, GRACE_S + 60.0)),
)}
