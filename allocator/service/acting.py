"""Does what the world says is still to be done (`allocator.effects`), and reports what came of it.

Each effect is one task at a time; one that failed is tried again after a pause. Nothing here is believed: a start is
over when the engine says that the gang is up, a stop when the process table is empty, a drain when the lender says so.
All of it may be interrupted at any point and done again: names are used once, epochs fence, deadlines only shrink.
"""

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from allocator.effects import Effect, EffectKind, outstanding
from allocator.events import (
    DevicesJudged,
    DevicesVacated,
    HandBackProbed,
    RunBroke,
    RunStarted,
    SignalAccepted,
    StopOrdered,
)
from allocator.execution.devices import Device
from allocator.execution.engine import (
    BadLaunch,
    DevicesBusy,
    EngineUnreachable,
    ExecutionEngine,
    GangNotStarted,
    StaleEpoch,
)
from allocator.execution.values import Evidence, Receipt, Released, ReleaseProof, Verdict
from allocator.loan.states import LoanState
from allocator.model.inventory import Condition
from allocator.queueing.bench import why
from allocator.reasons import Reason
from allocator.service.job_request import launch_of, saved_text
from allocator.service.keeper import Keeper, Note
from allocator.service.lender import Lender, LenderUnreachable
from allocator.service.probing import Probe
from allocator.service.reports import Observed, evidence_of, is_last_word, of_run
from allocator.store.leadership import Deposed
from allocator.store.schema import StoreError

log = logging.getLogger("headrace.allocator")

RETRY_S = 1.0
_TOLD = frozenset({Verdict.ACCEPTED, Verdict.REPEATED, Verdict.ENDED, Verdict.UNKNOWN_RUN})
Key = tuple[EffectKind, str, int, float | None]


@dataclass(slots=True)
class Acting:
    """The hands of one leader's term."""

    keeper: Keeper
    engine: ExecutionEngine
    lender: Lender
    probe: Probe
    device_of: Mapping[str, Device]
    failure: BaseException | None = None
    """Why this term is over: a task found itself deposed, or the store gone."""
    _tasks: dict[Key, "asyncio.Task[None]"] = field(default_factory=dict)
    _not_before_s: dict[Key, float] = field(default_factory=dict)
    _alarmed: set[tuple[str, int, str]] = field(default_factory=set)

    @property
    def busy(self) -> bool:
        """Whether something is on its way that is worth looking at often."""
        return bool(self._tasks) or any(
            effect.kind is not EffectKind.ALARM for effect in outstanding(self.keeper.world))

    @property
    def starting(self) -> set[str]:
        """Runs whose start is under way."""
        return {key[1] for key in self._tasks if key[0] is EffectKind.START}

    def begin(self) -> None:
        """Starts a task for each effect that has none."""
        now_s = time.monotonic()
        wanted: dict[Key, Effect] = {}
        for effect in outstanding(self.keeper.world):
            if effect.kind is EffectKind.ALARM:
                self._sound(effect)
            elif effect.kind is not EffectKind.PROVE:
                wanted[effect.kind, effect.target, effect.epoch, effect.deadline_s] = effect
        for key, effect in wanted.items():
            if key not in self._tasks and self._not_before_s.get(key, 0.0) <= now_s:
                self._tasks[key] = asyncio.create_task(self._do(key, effect))
        self._not_before_s = {key: at_s for key, at_s in self._not_before_s.items() if key in wanted}

    async def close(self) -> None:
        """Ends what is under way here; what was begun outside goes on, and is found again."""
        for task in list(self._tasks.values()):
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def look(self, extra: Iterable[str] = ()) -> None:
        """Proves devices free: those that runs must leave, and these besides, which are in quarantine."""
        proving = [effect for effect in outstanding(self.keeper.world) if effect.kind is EffectKind.PROVE]
        quarantined = list(extra)
        names = sorted({device for effect in proving for device in effect.devices} | set(quarantined))
        names = [name for name in names if name in self.device_of]
        if not names:
            return
        proof = await self.engine.prove_released([self.device_of[name] for name in names])
        free = {name for name, evidence in zip(names, proof.devices, strict=True)
                if evidence.verdict is Released.RELEASED}
        await self._vacated(proving, free, proof)
        holders = self.keeper.world.holders
        found = dict(zip(names, proof.devices, strict=True))
        sound = [name for name in quarantined
                 if name in found and name not in holders and self._is_owners(found[name])]
        if sound and (await self.probe.judge(sound)).good:
            now_s = self.keeper.clock.now_s()
            await self.keeper.record(
                DevicesJudged(at_s=now_s, devices=(name,), condition=Condition.HEALTHY,
                              evidence=evidence_of(proof, [name], found[name])) for name in sound)

    def _is_owners(self, evidence: Evidence) -> bool:
        """Whether nothing is on a device but, at most, the engine of its own replica."""
        return evidence.verdict is Released.RELEASED or (
            evidence.verdict is Released.HELD
            and all(self.lender.owns_run(holder.run_id) for holder in evidence.holders))

    async def _vacated(self, proving: list[Effect], free: set[str], proof: ReleaseProof) -> None:
        """Lets go of what is proven free; of a run's last devices, once its last word is heard.

        The proof may be newer than the run's last report: a checkpoint that was acknowledged in between would be lost.
        """
        now_s = self.keeper.clock.now_s()
        notes: list[Note] = []
        for effect in proving:
            run = self.keeper.world.runs.get(effect.target)
            devices = tuple(device for device in effect.devices if device in free)
            if run is None or not devices:
                continue
            if len(devices) == len(run.devices):
                report = await self.engine.status(run.id)
                if not is_last_word(report, run, now_s):
                    continue
                steps = await self.keeper.steps_of(run.job)
                notes += [noted(one) for one in of_run(self.keeper.world, run, report, now_s, steps)]
            # Where its start is still under way: the order behind this effect has closed the door to it (StaleEpoch).
            notes.append(Note(DevicesVacated(at_s=now_s, run=effect.target, epoch=effect.epoch, devices=devices,
                                             evidence=evidence_of(proof, devices))))
        if notes:
            await self.keeper.record(notes)

    def _sound(self, effect: Effect) -> None:
        loan = self.keeper.world.loans[effect.target]
        alarm = (loan.id, loan.epoch, loan.state.value)
        if alarm not in self._alarmed:
            self._alarmed.add(alarm)
            if loan.state is LoanState.OVERDUE and self.keeper.world.is_empty(loan.devices):
                log.error("loan %s of %s is overdue; %s are proven idle and go home once they are probed", loan.id,
                          loan.lender, ", ".join(loan.devices))
                return
            log.error("ALARM: loan %s of %s is %s; %s must come back by hand if nothing else does", loan.id,
                      loan.lender, loan.state.value, ", ".join(loan.devices))

    async def _do(self, key: Key, effect: Effect) -> None:
        try:
            await self._act(effect)
        except (Deposed, StoreError) as problem:
            self.failure = problem
        except (EngineUnreachable, LenderUnreachable) as problem:
            log.warning("%s of %s: %s", effect.kind.value, effect.target, problem)
        except Exception:
            log.exception("%s of %s failed; it is tried again", effect.kind.value, effect.target)
        finally:
            self._not_before_s[key] = time.monotonic() + RETRY_S
            del self._tasks[key]
            self.keeper.changed.set()

    async def _act(self, effect: Effect) -> None:
        match effect.kind:
            case EffectKind.START:
                await self._start(effect)
            case EffectKind.SIGNAL:
                await self._signal(effect)
            case EffectKind.KILL:
                await self.engine.kill(effect.target, effect.epoch)
            case EffectKind.DRAIN:
                await self.lender.drain(effect.target, effect.epoch)
            case EffectKind.SERVE:
                await self.lender.serve(effect.target, effect.epoch)
            case EffectKind.PROBE:
                await self._probe(effect)
            case _:
                raise AssertionError(effect)

    async def _start(self, effect: Effect) -> None:
        run = self.keeper.world.runs.get(effect.target)
        if run is None:
            return
        request, saved = await self.keeper.request_of(run.job)
        try:
            if request is None:
                raise BadLaunch(f"job {run.job} was submitted without a command")
            await self.engine.start(launch_of(request, run, saved, self.device_of))
        except (BadLaunch, GangNotStarted, StaleEpoch, DevicesBusy) as problem:
            log.warning("run %s is not started: %s", run.id, problem)
            now_s = self.keeper.clock.now_s()
            broke = RunBroke(at_s=now_s, run=run.id, epoch=run.epoch, detail=str(problem))
            busy = await self._occupied(run.devices) if isinstance(problem, DevicesBusy) else ()
            judged = [DevicesJudged(at_s=now_s, devices=busy, condition=Condition.QUARANTINED)] if busy else []
            await self.keeper.record([broke, *judged])
            return
        await self.keeper.record([RunStarted(at_s=self.keeper.clock.now_s(), run=run.id, epoch=run.epoch)])

    async def _occupied(self, devices: tuple[str, ...]) -> tuple[str, ...]:
        """Those that are not idle, though the world believes them to be."""
        proof = await self.engine.prove_released([self.device_of[name] for name in devices])
        return tuple(name for name, evidence in zip(devices, proof.devices, strict=True)
                     if evidence.verdict is Released.HELD)

    async def _signal(self, effect: Effect) -> None:
        run = self.keeper.world.runs.get(effect.target)
        if run is None or effect.deadline_s is None:
            return
        if effect.devices != run.devices and run.stop_by_s is None:
            # No engine that is known here can take devices from a running gang: it saves, and starts again smaller.
            await self.keeper.decide(lambda world: [StopOrdered(
                at_s=self.keeper.clock.now_s(), run=run.id, epoch=run.epoch, deadline_s=effect.deadline_s or 0.0,
                why=why(world, Reason.LOAN_RECALLED, f"{self.engine.name} cannot shrink a gang"))])
            return
        ask = self.engine.stop if run.checkpoint is None else self.engine.request_checkpoint
        receipt: Receipt = await ask(run.id, run.epoch, self.keeper.clock.unix_s(effect.deadline_s))
        if receipt.verdict in _TOLD:
            await self.keeper.record([SignalAccepted(at_s=self.keeper.clock.now_s(), run=run.id, epoch=run.epoch)])
        else:
            log.error("run %s ignores its order: %s, %s", run.id, receipt.verdict.value, receipt.note)

    async def _probe(self, effect: Effect) -> None:
        finding = await self.probe.hand_back(effect.devices)
        await self.keeper.record([HandBackProbed(at_s=self.keeper.clock.now_s(), loan=effect.target,
                                                 epoch=effect.epoch, good=finding.good, detail=finding.detail)])


def noted(one: Observed) -> Note:
    """An observation for the journal, with the checkpoint that it tells of."""
    return Note(one.event, saved_text(one.saved) if one.saved is not None and one.saved.resume_from else None)
