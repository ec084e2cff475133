"""The world outside of the allocator on a virtual clock: execution engines, devices, jobs that train, backends.

It does what `allocator.effects` asks for, takes as long as that takes, and reports it as events; the allocator's core
is the shipped one. A job trains at the speed that the coefficients say (`speed(card, family, devices)`, the slower one
where its gang stands apart). Told to stop, it stops training, writes its checkpoint for `takes_s` and is gone. Killed
before that is written, it falls back to an earlier one (`attempts`).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import heappop, heappush
from math import floor

from allocator.apply import consider
from allocator.effects import Effect, EffectKind, outstanding
from allocator.events import (
    CheckpointAcknowledged,
    DevicesVacated,
    Event,
    HandBackProbed,
    JobSubmitted,
    LoanOverdue,
    LoanRecalled,
    RunExited,
    RunPlaced,
    RunProgressed,
    RunStarted,
    SignalAccepted,
    StopOrdered,
)
from allocator.model.inventory import node_name
from allocator.model.jobs import Job, Outcome, Run
from allocator.model.world import World
from allocator.plan import Plan
from loadtest.sim.training.attempts import Attempt, Story, Stretch
from loadtest.sim.training.replicas import Backends

Planner = Callable[[World, float], Plan]
News = Callable[[float], Iterable[Event] | None]
"""What happens then; empty: nothing, but the allocator should look; `None`: not even that."""


@dataclass(frozen=True, slots=True)
class Delays:
    """How long the outside takes, in seconds."""

    drain_s: float = 20.0
    """A backend's last requests, and its engine's end."""
    kill_s: float = 1.0
    probe_s: float = 5.0


class PlannerFault(AssertionError):
    """The allocator proposed what it refuses itself: no figure of this run can be believed."""


class Machines:
    """The loop: what is due happens, the allocator plans, and what it orders is begun."""

    def __init__(self, world: World, planner: Planner, delays: Delays | None = None) -> None:
        self.world = world
        self.planner = planner
        self.delays = delays or Delays()
        self.now_s = 0.0
        self.stories: dict[str, Story] = {}
        self.stretches: list[Stretch] = []
        self.lost_device_s = 0.0
        """Devices · seconds that stops for others cost: work undone, checkpoints written, restarts."""
        self.overdue = 0
        self.plans = 0
        self.on_plan: Callable[[World, Plan, float], None] | None = None
        """Called with the world before each plan that decides something."""
        self._due: list[tuple[float, int, News]] = []
        self._count = 0
        self._attempts: dict[str, Attempt] = {}
        self._backends = Backends(self)
        self._looks: set[float] = set()
        self._begun: set[tuple[EffectKind, str, int, float | None]] = set()

    def at(self, at_s: float, news: News) -> None:
        """Something will happen; what it is, is asked when it does."""
        self._count += 1
        heappush(self._due, (at_s, self._count, news))

    def submit(self, job: Job, at_s: float, work_unit_s: float) -> None:
        """Somebody will hand in this job; `work_unit_s` is what it really takes."""
        self.stories[job.id] = Story(at_s, job.gang_min, work_unit_s, waiting_since_s=at_s)
        self.at(at_s, lambda now_s: [JobSubmitted(at_s=now_s, job=job)])

    def run(self, until: Callable[[], bool]) -> None:
        """Go on until that holds, or nothing is left to happen. Raises `PlannerFault`."""
        while self._due and not until():
            self.step()

    def step(self) -> None:
        """All that happens at the next moment, and what the allocator makes of it."""
        now_s = self.now_s = self._due[0][0]
        anything = False
        while self._due and self._due[0][0] <= now_s:
            _, _, news = heappop(self._due)
            happened = news(now_s)
            anything |= happened is not None
            for event in happened or ():
                self.take(event)
        if anything:
            self._plan(now_s)

    def _plan(self, now_s: float) -> None:
        self._report_checkpoints(now_s)
        planned = self.planner(self.world, now_s)
        self.plans += 1
        if planned.refused:
            event, why = planned.refused[0]
            raise PlannerFault(f"{type(event).__name__} at {now_s:.0f} s: {why}")
        if planned.events and self.on_plan is not None:
            self.on_plan(self.world, planned, now_s)
        self.world = planned.world
        for event in planned.events:
            self._heed(event, now_s)
        for effect in outstanding(self.world):
            self._begin(effect, now_s)

    def take(self, event: Event) -> None:
        """An event happens. One that comes too late changes nothing, as in life."""
        after = consider(self.world, event)
        if isinstance(after, World):
            self.world = after

    def stretches_until_now(self) -> list[Stretch]:
        """All stretches, those of runs that still go on until now."""
        going = [Stretch(attempt.works_from_s, self.now_s, attempt.speed)
                 for attempt in self._attempts.values() if not attempt.over and attempt.stopped_s is None]
        return [*self.stretches, *going]

    # --- runs --------------------------------------------------------------------------------------------------------

    def _heed(self, event: Event, now_s: float) -> None:
        if isinstance(event, RunPlaced):
            self._start(event.run, now_s)
        elif isinstance(event, LoanOverdue):
            self.overdue += 1
        elif isinstance(event, StopOrdered | LoanRecalled):
            self._look_until(event.deadline_s, now_s)

    def _look_until(self, deadline_s: float, now_s: float) -> None:
        """The allocator looks every tick while a deadline stands, as its service does."""
        rules = self.world.config.rules
        tick = floor(now_s / rules.tick_s) + 1
        times_s = {deadline_s - rules.kill_margin_s, deadline_s}
        while (at_s := tick * rules.tick_s) < deadline_s:
            times_s.add(at_s)
            tick += 1
        for at_s in sorted(times_s - self._looks):
            if at_s > now_s:
                self._looks.add(at_s)
                self.at(at_s, lambda _: [])

    def _start(self, run: Run, now_s: float) -> None:
        story = self.stories[run.job]
        again = bool(story.cards)
        restart_s = run.checkpoint.restart_s if run.checkpoint and again else 0.0
        apart = len({node_name(device) for device in run.devices}) > 1
        speed = self.world.tables[run.coefficients].speed(run.card, run.family, len(run.devices), spread_out=apart)
        attempt = self._attempts[run.id] = Attempt(run, speed, now_s + restart_s, story.done_unit_s)
        story.cards.append(run.card)
        if story.waiting_since_s is not None:
            story.waited_s += now_s - story.waiting_since_s
            story.waiting_since_s = None
        self.lost_device_s += restart_s * len(run.devices)
        ends_s = attempt.works_from_s + (story.work_unit_s - story.done_unit_s) / speed
        self.at(ends_s, lambda now_s: self._complete(attempt, now_s))

    def _complete(self, attempt: Attempt, now_s: float) -> Iterable[Event] | None:
        if attempt.over or attempt.stopped_s is not None:
            return None
        self._leave(attempt, now_s, now_s, ended=True)
        return self._gone(attempt.run, Outcome.COMPLETED, now_s)

    def _stop(self, attempt: Attempt, now_s: float) -> None:
        """It is told to stop: it trains no more and writes, if it can."""
        run = attempt.run
        attempt.stopped_s = now_s
        takes_s = run.checkpoint.takes_s if run.checkpoint else 0.0
        self.at(now_s + takes_s, lambda now_s: self._stopped(attempt, now_s))

    def _stopped(self, attempt: Attempt, now_s: float) -> Iterable[Event]:
        if attempt.over:
            return []
        run, stopped_s = attempt.run, attempt.stopped_s or now_s
        if run.checkpoint is None:
            self._leave(attempt, now_s, attempt.works_from_s)
            return self._gone(run, Outcome.STOPPED, now_s)
        self._leave(attempt, now_s, stopped_s)
        acknowledged = CheckpointAcknowledged(
            at_s=now_s, run=run.id, epoch=run.epoch, done_unit_s=self.stories[run.job].done_unit_s)
        return [acknowledged, *self._gone(run, Outcome.STOPPED, now_s)]

    def _killed(self, attempt: Attempt, now_s: float) -> Iterable[Event]:
        if attempt.over:
            return []
        self._leave(attempt, now_s, min(attempt.safe_s(now_s), attempt.stopped_s or now_s))
        return self._gone(attempt.run, Outcome.STOPPED, now_s)

    def _leave(self, attempt: Attempt, now_s: float, safe_s: float, *, ended: bool = False) -> None:
        """The run is off its devices; work since `safe_s` is undone."""
        run, story = attempt.run, self.stories[attempt.run.job]
        attempt.over = True
        if safe_s > attempt.works_from_s:
            self.stretches.append(Stretch(attempt.works_from_s, safe_s, attempt.speed))
        story.done_unit_s = max(story.done_unit_s, attempt.done_unit_s(safe_s))
        if ended:
            story.ended_s = now_s
        else:
            self.lost_device_s += len(run.devices) * (now_s - max(safe_s, min(attempt.works_from_s, now_s)))
            story.waiting_since_s = now_s

    def _gone(self, run: Run, outcome: Outcome, now_s: float) -> list[Event]:
        return [RunExited(at_s=now_s, run=run.id, epoch=run.epoch, outcome=outcome),
                DevicesVacated(at_s=now_s, run=run.id, epoch=run.epoch, devices=run.devices, evidence="simulated")]

    def _report_checkpoints(self, now_s: float) -> None:
        for run in self.world.runs.values():
            if run.checkpoint is None or run.checkpoint.every_s is None:
                continue
            attempt = self._attempts[run.id]
            safe_s = attempt.safe_s(now_s if attempt.stopped_s is None else attempt.stopped_s)
            written = round((safe_s - attempt.works_from_s) / run.checkpoint.every_s)
            if written > attempt.reported:
                attempt.reported = written
                self.take(RunProgressed(at_s=safe_s, run=run.id, epoch=run.epoch,
                                        done_unit_s=attempt.done_unit_s(safe_s)))

    # --- effects -----------------------------------------------------------------------------------------------------

    def _begin(self, effect: Effect, now_s: float) -> None:
        """Begin what is asked for, once: effects are listed until they are confirmed."""
        key = (effect.kind, effect.target, effect.epoch, effect.deadline_s)
        if key in self._begun:
            return
        self._begun.add(key)
        epoch = effect.epoch
        match effect.kind:
            case EffectKind.START:
                self.take(RunStarted(at_s=now_s, run=effect.target, epoch=epoch))
            case EffectKind.SIGNAL:
                attempt = self._attempts[effect.target]
                if attempt.stopped_s is None and not attempt.over:
                    self._stop(attempt, now_s)
                self.take(SignalAccepted(at_s=now_s, run=effect.target, epoch=epoch))
            case EffectKind.KILL:
                attempt = self._attempts[effect.target]
                self.at(now_s + self.delays.kill_s, lambda now_s: self._killed(attempt, now_s))
            case EffectKind.DRAIN:
                self._backends.drain(effect, now_s)
            case EffectKind.PROBE:
                self.at(now_s + self.delays.probe_s,
                        lambda now_s: [HandBackProbed(at_s=now_s, loan=effect.target, epoch=epoch, good=True)])
            case EffectKind.SERVE:
                self._begun.discard(key)  # a backend is asked to serve as often as it comes home
                self._backends.serve(effect.target, now_s)
            case _:
                pass  # proofs come with the exit; alarms are counted as they are decided
