"""Worlds for the tests of the allocator, and a stage on which they are played with every invariant checked."""

from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from allocator.apply import consider, replay
from allocator.effects import EffectKind, outstanding
from allocator.events import (
    BackendReported,
    ClockRead,
    DevicesVacated,
    Event,
    HandBackProbed,
    JobSubmitted,
    NodeReported,
    RunExited,
    RunStarted,
    SignalAccepted,
    SupplyReported,
)
from allocator.invariants import step_violations, violations
from allocator.loan.loan import Loan
from allocator.model.inventory import Backend, BackendState, Node, Supply
from allocator.model.jobs import Checkpoint, Job, Outcome, Run
from allocator.model.pools import Config, Pool, PoolKind, Queue, Quota, Rules
from allocator.model.world import World, new_world
from allocator.plan import plan
from allocator.reasons import Pending
from allocator.units.load import shipped
from allocator.why import Answer, why_pending

TRAINING = Pool("training", PoolKind.TRAINING, {"pool": "training"})
INFERENCE = Pool("inference", PoolKind.INFERENCE, {"pool": "inference"})
CHECKPOINT = Checkpoint(every_s=None, takes_s=5.0, restart_s=10.0)
RULES = Rules(grace_s=60.0, kill_margin_s=5.0, surplus_hold_s=0.0, supply_fresh_s=1e9, min_run_s=0.0,
              offer_ttl_s=100.0, idle_return_s=30.0, quarantine_after_s=100.0, promised_min_s=1800.0,
              restart_pause_s=0.0, recall_keep_s=0.0)
E = TypeVar("E")


def a_config(*queues: Queue, pools: tuple[Pool, ...] = (TRAINING, INFERENCE), version: str = "c0",
             **rules: Any) -> Config:
    """Queues default to one, `q`, with no quota of its own."""
    return Config(version, pools, queues or (Queue("q", "training"),), replace(RULES, **rules))


def a_queue(name: str, weight: float = 1.0, parent: str = "training", **quotas: float | Quota) -> Queue:
    return Queue(name, parent, {card: quota if isinstance(quota, Quota) else Quota(float(quota))
                                for card, quota in quotas.items()}, weight)


def a_node(name: str, card: str = "v100", devices: int = 4, pool: str = "training", **given: Any) -> Node:
    return Node(name, card, devices, labels={"pool": pool}, **given)


def a_job(name: str, queue: str = "q", gang: int = 1, **given: Any) -> Job:
    """A job of ten minutes on one V100, that can checkpoint."""
    defaults: dict[str, Any] = {"family": "unmeasured", "cards": ("v100",), "gang_min": gang, "gang_max": gang,
                                "work_unit_s": 600.0 * gang, "checkpoint": CHECKPOINT}
    return Job(id=name, queue=queue, **(defaults | given))


@dataclass
class Stage:
    """A world over time. Each event must be taken (unless said otherwise) and keep all invariants."""

    world: World
    now_s: float = 0.0
    first: World = field(init=False)
    journal: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.first = self.world

    def happens(self, *events: Event) -> "Stage":
        for event in events:
            after = consider(self.world, event)
            assert not isinstance(after, str), after
            assert step_violations(self.world, event, after) == []
            self.world = after
            self.journal.append(event)
        return self

    def refused(self, event: Event) -> str:
        """Why the event changes nothing."""
        after = consider(self.world, event)
        assert isinstance(after, str), f"taken: {event}"
        return after

    def tick(self, now_s: float | None = None) -> list[Event]:
        """Plans at a time, takes what was planned, and makes sure that planning again adds nothing."""
        self.now_s = self.now_s if now_s is None else now_s
        planned = plan(self.world, self.now_s)
        assert planned.refused == ()
        self.happens(*planned.events)
        assert violations(self.world) == []
        assert plan(self.world, self.now_s).events == ()
        return list(planned.events)

    def submit(self, *jobs: Job) -> "Stage":
        return self.happens(*(JobSubmitted(at_s=self.now_s, job=job) for job in jobs))

    def submit_and_tick(self, *jobs: Job) -> list[Event]:
        return self.submit(*jobs).tick()

    def obey(self, *kinds: EffectKind) -> "Stage":
        """Everyone outside does at once what is outstanding, or only these kinds of it."""
        for effect in outstanding(self.world):
            if kinds and effect.kind not in kinds:
                continue
            match effect.kind:
                case EffectKind.START:
                    self.happens(RunStarted(at_s=self.now_s, run=effect.target, epoch=effect.epoch))
                case EffectKind.SIGNAL:
                    self.happens(SignalAccepted(at_s=self.now_s, run=effect.target, epoch=effect.epoch))
                case EffectKind.PROVE:
                    self.vacate(effect.target, *effect.devices)
                case EffectKind.DRAIN | EffectKind.SERVE:
                    state = BackendState.RELEASED if effect.kind is EffectKind.DRAIN else BackendState.SERVING
                    backend = replace(self.world.backends[effect.target], state=state)
                    self.happens(BackendReported(at_s=self.now_s, backend=backend))
                case EffectKind.PROBE:
                    self.happens(HandBackProbed(at_s=self.now_s, loan=effect.target, epoch=effect.epoch, good=True))
                case _:
                    pass
        return self

    def vacate(self, run: str, *devices: str) -> "Stage":
        found = self.world.runs[run]
        return self.happens(DevicesVacated(at_s=self.now_s, run=run, epoch=found.epoch,
                                           devices=devices or found.devices, evidence="process group empty"))

    def ends(self, job: str, outcome: Outcome = Outcome.COMPLETED) -> "Stage":
        """The job's run exits and its devices are proven idle."""
        run = self.run_of(job)
        self.happens(RunExited(at_s=self.now_s, run=run.id, epoch=run.epoch, outcome=outcome))
        return self.vacate(run.id)

    def leave(self) -> "Stage":
        """Who was told to stop does: signal and proof, one after the other."""
        return self.obey(EffectKind.START, EffectKind.SIGNAL).obey(EffectKind.PROVE)

    def supply(self, lendable: int, spare: int | None = None, card: str = "v100") -> "Stage":
        figures = Supply("inference", card, lendable, lendable if spare is None else spare)
        return self.happens(SupplyReported(at_s=self.now_s, supply=figures))

    def run_of(self, job: str) -> Run:
        run = self.world.jobs[job].run
        assert run is not None, f"{job} waits: {self.why(job).sentence}"
        return self.world.runs[run]

    def runs(self) -> dict[str, str]:
        """Job → card of those that run."""
        return {run.job: run.card for run in self.world.runs.values()}

    def why(self, job: str) -> Answer:
        found = why_pending(self.world, job, self.now_s)
        assert found is not None
        return found

    def pending(self, job: str) -> Pending:
        return self.why(job).code

    def loan(self, name: str = "") -> Loan:
        return self.world.loans[name] if name else next(iter(self.world.loans.values()))

    def replays(self) -> None:
        """Every prefix of the journal gives a world without faults; the whole of it gives this one."""
        world = self.first
        for event in self.journal:
            world = replay(world, [event])
            assert violations(world) == []
        assert world == self.world


def a_stage(*nodes: Node, config: Config | None = None, backends: int = 0) -> Stage:
    """A stage with these nodes. `backends`: devices under each backend of the inference nodes, 0 for none."""
    stage = Stage(new_world(config or a_config(), shipped()))
    stage.happens(ClockRead(at_s=0.0, wall_s=1_000_000.0))
    stage.happens(*(NodeReported(at_s=0.0, node=node, evidence="new") for node in nodes))
    for node in nodes:
        if backends and node.labels["pool"] == "inference":
            for index in range(0, node.devices, backends):
                backend = Backend(f"{node.name}-{index}", "inference", node.card, node.device_ids[index:][:backends])
                stage.happens(BackendReported(at_s=0.0, backend=backend))
    return stage


def only(kind: type[E], events: list[Event]) -> list[E]:
    """The events of one kind."""
    return [event for event in events if isinstance(event, kind)]


def lent_stage(replicas: int = 2, gang: int = 8, max_recalls: int = RULES.max_recalls, **job: Any) -> Stage:
    """One job `j` that runs on so many lent replicas of four V100 each, started at 10 s."""
    stage = a_stage(a_node("t0", "k80"), *(a_node(f"i{index}", pool="inference") for index in range(replicas)),
                    backends=4, config=a_config(max_recalls=max_recalls))
    stage.supply(replicas)
    stage.submit_and_tick(a_job("j", gang=gang, **job))
    stage.now_s = 10.0
    stage.obey()
    stage.tick()
    stage.obey(EffectKind.START)
    assert len(stage.run_of("j").devices) == gang
    return stage
