"""What stands outside of the allocator in a soak run: a cluster drawn by dice, its engines, its router, its people.

Replies come late, twice, for epochs long over, or never.
"""

from dataclasses import replace
from random import Random

from allocator.effects import Effect, EffectKind, outstanding
from allocator.events import (
    BackendReported,
    CheckpointAcknowledged,
    ClockRead,
    CoefficientsActivated,
    ConfigLoaded,
    DevicesJudged,
    DevicesVacated,
    Event,
    HandBackProbed,
    JobCancelled,
    JobSubmitted,
    LoanRecalled,
    NodeDown,
    NodeReported,
    NodeUp,
    RunBroke,
    RunExited,
    RunProgressed,
    RunReachable,
    RunStarted,
    SignalAccepted,
    SupplyReported,
)
from allocator.lending import recall, staying
from allocator.loan.states import LoanState
from allocator.model.inventory import Backend, BackendState, Condition, Node, Supply
from allocator.model.jobs import Checkpoint, Job, Kind, Level, Outcome, RunPhase, Window
from allocator.model.pools import UNITS, Config, Currency, Pool, PoolKind, Queue, Quota, Rules
from allocator.model.world import World, new_world
from allocator.queueing.bench import why
from allocator.reasons import Reason
from allocator.units.load import shipped

CARDS = ("v100", "p100", "k80")
FAMILIES = ("LM (batch size 10)", "ResNet-50 (batch size 128)", "Transformer", "Recommendation", "unmeasured")


def random_config(rng: Random, version: str, devices: int) -> Config:
    """A declaration: one training pool with two or three queues, an inference pool, sometimes more."""
    currency = rng.choice((Currency.CARDS, Currency.CARDS, Currency.UNITS))
    queues = []
    for name in ("a", "b", "c")[:rng.randint(2, 3)]:
        keys = (UNITS,) if currency is Currency.UNITS else CARDS
        quotas = {key: Quota(float(rng.randint(0, devices // 4)),
                             rng.choice((None, None, float(rng.randint(0, 4)))),
                             rng.choice((None, None, float(rng.randint(0, 6))))) for key in keys}
        queues.append(Queue(name, "training", quotas, weight=rng.choice((0.0, 1.0, 1.0, 2.0))))
    pools = [
        Pool("training", PoolKind.TRAINING, {"pool": "training"}, currency, keep_whole_nodes=rng.randint(0, 1)),
        Pool("inference", PoolKind.INFERENCE, {"pool": "inference"}),
        Pool("enclave", PoolKind.ENCLAVE, {"pool": "enclave"}, reason="regulated data", review_on="2027-01-01"),
        Pool("window", PoolKind.TRANSITIONAL, {"pool": "window"}, starts_wall_s=1e6 + 600.0,
             ends_wall_s=1e6 + rng.choice((1800.0, 4000.0)), then_pool="training"),
    ]
    queues += [Queue("closed", "enclave"), Queue("moving", "window")]
    rules = Rules(
        grace_s=rng.choice((20.0, 60.0)), promised_min_s=rng.choice((300.0, 1800.0)), offer_ttl_s=120.0,
        surplus_hold_s=rng.choice((0.0, 30.0)), supply_fresh_s=600.0, idle_return_s=rng.choice((0.0, 30.0)),
        quarantine_after_s=60.0, reservations=rng.choice((0, 1, 1, 1, 3)), min_run_s=rng.choice((0.0, 60.0)),
        recall_keep_s=rng.choice((0.0, 120.0)), restart_pause_s=rng.choice((0.0, 10.0)))
    return Config(version, tuple(pools), tuple(queues), rules)


def random_world(rng: Random) -> tuple[World, list[Event]]:
    """A small cluster: the empty world, and the events that fill it."""
    nodes = [Node(f"n{index}", rng.choice(CARDS), rng.choice((2, 4)), memory_gb=rng.choice((16.0, 32.0)),
                  island_devices=rng.choice((0, 2)), leaf=f"l{index // 3}", pod=f"p{index // 6}",
                  site=rng.choice(("s1", "s1", "s2")),
                  labels={"pool": rng.choice(("training", "training", "inference", "inference", "enclave", "window"))})
             for index in range(rng.randint(5, 9))]
    world = new_world(random_config(rng, "c0", sum(node.devices for node in nodes)), shipped())
    events: list[Event] = [ClockRead(at_s=0.0, wall_s=1e6)]
    events += [NodeReported(at_s=0.0, node=node, evidence="new") for node in nodes]
    for node in nodes:
        if node.labels["pool"] == "inference":
            size = rng.choice((1, 2))
            for index in range(0, node.devices, size):
                backend = Backend(f"{node.name}-b{index}", "inference", node.card, node.device_ids[index:index + size])
                events.append(BackendReported(at_s=0.0, backend=backend))
    return world, events


def random_job(rng: Random, name: str) -> Job:
    kind = rng.choice(tuple(Kind))
    least = rng.choice((1, 1, 2, 2, 3, 4, 6))
    return Job(
        id=name, queue=rng.choice(("a", "a", "b", "b", "c", "closed", "moving", "nowhere")), kind=kind,
        family=rng.choice(FAMILIES), cards=tuple(rng.sample((*CARDS, "b200"), rng.randint(1, 3))), gang_min=least,
        gang_max=least + rng.choice((0, 0, 1, 3)), memory_gb=rng.choice((0.0, 8.0, 24.0)),
        work_unit_s=rng.choice((None, 10.0, 200.0, 2000.0)), priority=rng.choice((0, 0, 0, 1, 5)),
        checkpoint=rng.choice((None, Checkpoint(None, 5.0, 10.0), Checkpoint(60.0, 15.0, 30.0))),
        windows=(Window(0, 720),) if rng.random() < 0.1 else (),
        data_site=rng.choice((None, "s1", "s2")), data_gb=rng.choice((0.0, 100.0)),
        widest=rng.choice((Level.NODE, Level.LEAF, Level.SITE, Level.SITE)))


def replies(world: World, now_s: float, rng: Random) -> list[Event]:
    """What the outside says to the effects that it was asked for: something, sooner or later, or not at all."""
    return [event for effect in outstanding(world) if rng.random() < 0.5
            for event in _reply(world, effect, now_s, rng)]


def _reply(world: World, effect: Effect, now_s: float, rng: Random) -> list[Event]:
    run, epoch = effect.target, effect.epoch
    match effect.kind:
        case EffectKind.START if rng.random() < 0.9:
            return [RunStarted(at_s=now_s, run=run, epoch=epoch)]
        case EffectKind.START:
            return [RunBroke(at_s=now_s, run=run, epoch=epoch, detail="one member never came up")]
        case EffectKind.SIGNAL if rng.random() < 0.8:
            done = world.jobs[world.runs[run].job].done_unit_s + rng.uniform(0.0, 20.0)
            ack = [CheckpointAcknowledged(at_s=now_s, run=run, epoch=epoch, done_unit_s=done)]
            return [SignalAccepted(at_s=now_s, run=run, epoch=epoch), *(ack if rng.random() < 0.7 else [])]
        case EffectKind.PROVE if rng.random() < (0.9 if world.runs[run].killed_s is not None else 0.4):
            devices = effect.devices if rng.random() < 0.8 else effect.devices[:1]
            return [DevicesVacated(at_s=now_s, run=run, epoch=epoch, devices=devices, evidence="process group empty")]
        case EffectKind.DRAIN:
            backend = world.backends[effect.target]
            state = rng.choice((BackendState.DRAINING, BackendState.RELEASED))
            return [BackendReported(at_s=now_s, backend=replace(backend, state=state))]
        case EffectKind.SERVE:
            backend = world.backends[effect.target]
            return [BackendReported(at_s=now_s, backend=replace(backend, state=BackendState.SERVING))]
        case EffectKind.PROBE:
            return [HandBackProbed(at_s=now_s, loan=effect.target, epoch=epoch, good=rng.random() < 0.95)]
    return []


def happening(world: World, now_s: float, rng: Random, count: int) -> list[Event]:
    """One thing that happens in the world outside, drawn by dice."""
    chance = rng.random()
    runs = list(world.runs.values())
    if chance < 0.17:
        return [JobSubmitted(at_s=now_s, job=random_job(rng, f"j{count}"))]
    if chance < 0.23 and world.jobs:
        return [JobCancelled(at_s=now_s, job=rng.choice(list(world.jobs)))]
    if chance < 0.58 and runs:
        return _of_a_run(rng, rng.choice(runs), world, now_s)
    if chance < 0.76:
        return [SupplyReported(at_s=now_s, supply=Supply("inference", card, lendable := rng.randint(0, 4),
                                                         lendable + rng.randint(-1, 1))) for card in CARDS]
    if chance < 0.80:
        return _somebody_recalls(rng, world, now_s)
    if chance < 0.86:
        return _of_a_node(rng, world, now_s)
    if chance < 0.90:
        sick = [device for device, condition in world.conditions.items()
                if condition in (Condition.QUARANTINED, Condition.CORDONED)]
        return [DevicesJudged(at_s=now_s, devices=(device,), condition=Condition.HEALTHY, evidence="probe passed")
                for device in sick]
    if chance < 0.93:
        node = rng.choice(list(world.nodes.values()))
        labels = {"pool": rng.choice(("training", "inference", "enclave", "window", "none"))}
        return [NodeReported(at_s=now_s, node=replace(node, labels=labels))]
    if chance < 0.95:
        devices = sum(node.devices for node in world.nodes.values())
        return [ConfigLoaded(at_s=now_s, config=random_config(rng, f"c{count}", devices))]
    if chance < 0.97:
        table = shipped()
        return [CoefficientsActivated(at_s=now_s, table=replace(table, version=f"{table.version}-{count}"))]
    return [ClockRead(at_s=now_s, wall_s=1e6 + now_s + rng.choice((-3600.0, 0.0, 3600.0)))]


def _of_a_run(rng: Random, run: object, world: World, now_s: float) -> list[Event]:
    found = next(other for other in world.runs.values() if other is run)
    if found.phase is RunPhase.RUNNING and rng.random() < 0.5:
        outcome = rng.choice((Outcome.COMPLETED, Outcome.COMPLETED, Outcome.FAILED, Outcome.STOPPED))
        exited = RunExited(at_s=now_s, run=found.id, epoch=found.epoch, outcome=outcome)
        proof = DevicesVacated(at_s=now_s, run=found.id, epoch=found.epoch, devices=found.devices, evidence="empty")
        return [exited, proof] if rng.random() < 0.8 else [exited]
    if rng.random() < 0.2:
        return [RunReachable(at_s=now_s, run=found.id, epoch=found.epoch, reachable=found.unreachable)]
    if rng.random() < 0.1:
        return [RunBroke(at_s=now_s, run=found.id, epoch=found.epoch)]
    done = world.jobs[found.job].done_unit_s + rng.uniform(0.0, 50.0)
    return [RunProgressed(at_s=now_s, run=found.id, epoch=found.epoch, done_unit_s=done)]


def _somebody_recalls(rng: Random, world: World, now_s: float) -> list[Event]:
    loans = [loan for loan in world.loans.values() if loan.state is not LoanState.LOST]
    if not loans:
        return []
    loan = rng.choice(loans)
    if rng.random() < 0.5:
        out = staying(world, loan.lender, loan.card)
        return recall(world, now_s, out, rng.randint(1, 2), Reason.OPERATOR)
    emergency = rng.random() < 0.3
    return [LoanRecalled(at_s=now_s, loan=loan.id, epoch=loan.epoch, deadline_s=now_s + rng.choice((5.0, 60.0, 600.0)),
                         by_hand=True, why=why(world, Reason.P99_EMERGENCY if emergency else Reason.OPERATOR))]


def _of_a_node(rng: Random, world: World, now_s: float) -> list[Event]:
    name = rng.choice(list(world.nodes))
    chance = rng.random()
    if chance < 0.4:
        return [NodeDown(at_s=now_s, node=name)]
    if chance < 0.8:
        return [NodeUp(at_s=now_s, node=other) for other in world.nodes]
    device = rng.choice(world.nodes[name].device_ids)
    return [DevicesJudged(at_s=now_s, devices=(device,), condition=Condition.CORDONED)]
