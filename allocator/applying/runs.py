"""Events about runs: told to leave, reported on, and let go of, device by device."""

from dataclasses import replace

from allocator.applying.loans import settle_loans
from allocator.events import (
    CheckpointAcknowledged,
    DevicesVacated,
    KillOrdered,
    RunBroke,
    RunExited,
    RunProgressed,
    RunReachable,
    RunStarted,
    ShrinkOrdered,
    SignalAccepted,
    StopOrdered,
)
from allocator.model.jobs import JobState, Outcome, Run, RunPhase
from allocator.model.pools import Rules
from allocator.model.world import World
from allocator.reasons import Reason


def without_job(world: World, name: str) -> World:
    """The world when a job is over; a claim of it ends with it."""
    jobs = {other: state for other, state in world.jobs.items() if other != name}
    claims = {other: claim for other, claim in world.claims.items() if other != name}
    return world.evolved(jobs=jobs, **({"claims": claims} if len(claims) < len(world.claims) else {}))


def _with_run(world: World, run: Run) -> World:
    """The same devices in the same hands, so nothing that follows from who holds what has to be worked out again."""
    return world.with_runs_as_held({**world.runs, run.id: run})


def _live(world: World, name: str, epoch: int) -> Run | str:
    run = world.runs.get(name)
    if run is None or run.epoch != epoch:
        return f"run {name}: epoch {epoch} is over or unknown"
    return run


def stop_ordered(world: World, event: StopOrdered) -> World | str:
    run = _live(world, event.run, event.epoch)
    if isinstance(run, str):
        return run
    if run.stop_by_s is not None and run.stop_by_s <= event.deadline_s:
        return f"run {run.id} leaves by an earlier deadline already"
    first = run.stop_by_s is None
    return _with_run(world, replace(
        run, stop_by_s=event.deadline_s, stop_reason=event.why.reason.value if first else run.stop_reason,
        leaving=(), leave_by_s=None, signalled=False))


def shrink_ordered(world: World, event: ShrinkOrdered) -> World | str:
    run = _live(world, event.run, event.epoch)
    if isinstance(run, str):
        return run
    if run.stopping or not set(event.devices) <= set(run.devices):
        return f"run {run.id} is leaving, or does not hold these devices"
    leaving = tuple(device for device in run.devices if device in {*run.leaving, *event.devices})
    if len(run.devices) - len(leaving) < run.gang_min:
        return f"run {run.id} needs {run.gang_min} devices"
    by_s = event.deadline_s if run.leave_by_s is None else min(run.leave_by_s, event.deadline_s)
    if leaving == run.leaving and by_s == run.leave_by_s:
        return f"run {run.id} gives these up already"
    return _with_run(world, replace(run, leaving=leaving, leave_by_s=by_s, signalled=False))


def kill_ordered(world: World, event: KillOrdered) -> World | str:
    run = _live(world, event.run, event.epoch)
    if isinstance(run, str):
        return run
    if run.killed_s is not None:
        return f"run {run.id} was ordered killed before"
    by_s = event.at_s if run.stop_by_s is None else run.stop_by_s
    reason = run.stop_reason or event.why.reason.value
    return _with_run(world, replace(run, killed_s=event.at_s, stop_by_s=by_s, stop_reason=reason,
                                    leaving=(), leave_by_s=None))


def run_started(world: World, event: RunStarted) -> World | str:
    run = _live(world, event.run, event.epoch)
    if isinstance(run, str):
        return run
    if run.phase is not RunPhase.STARTING:
        return f"run {run.id} is {run.phase.value}"
    return _with_run(world, replace(run, phase=RunPhase.RUNNING))


def run_broke(world: World, event: RunBroke) -> World | str:
    run = _live(world, event.run, event.epoch)
    if isinstance(run, str):
        return run
    if run.phase not in (RunPhase.STARTING, RunPhase.RUNNING):
        return f"run {run.id} is {run.phase.value}"
    return _with_run(world, replace(run, phase=RunPhase.BROKEN, outcome=Outcome.FAILED, said=event.detail))


def run_progressed(world: World, event: RunProgressed | CheckpointAcknowledged) -> World | str:
    run = _live(world, event.run, event.epoch)
    if isinstance(run, str):
        return run
    state = world.jobs[run.job]
    done_unit_s = max(state.done_unit_s, event.done_unit_s)
    run = replace(run, checkpointed_s=event.at_s,
                  acknowledged=run.acknowledged or isinstance(event, CheckpointAcknowledged))
    return _with_run(world, run).evolved(
        jobs={**world.jobs, run.job: replace(state, done_unit_s=done_unit_s)})


def signal_accepted(world: World, event: SignalAccepted) -> World | str:
    run = _live(world, event.run, event.epoch)
    if isinstance(run, str):
        return run
    if run.signalled or (run.stop_by_s is None and not run.leaving):
        return f"run {run.id} has no order that waits for a signal"
    return settle_loans(_with_run(world, replace(run, signalled=True)), run.leaving or run.devices, event.at_s)


def run_exited(world: World, event: RunExited) -> World | str:
    run = _live(world, event.run, event.epoch)
    if isinstance(run, str):
        return run
    if run.phase is RunPhase.EXITED:
        return f"run {run.id} has exited before"
    return _with_run(world, replace(run, phase=RunPhase.EXITED, outcome=event.outcome,
                                    said=event.detail or run.said))


def run_reachable(world: World, event: RunReachable) -> World | str:
    run = _live(world, event.run, event.epoch)
    if isinstance(run, str):
        return run
    if run.unreachable is not event.reachable:
        return f"run {run.id}: nothing new"
    return _with_run(world, replace(run, unreachable=not event.reachable))


def devices_vacated(world: World, event: DevicesVacated) -> World | str:
    run = _live(world, event.run, event.epoch)
    if isinstance(run, str):
        return run
    devices = frozenset(event.devices) & frozenset(run.devices)
    if not devices or not event.evidence:
        return f"run {run.id}: no device of it, or no evidence"
    if not run.stopping and not devices <= set(run.leaving):
        # A device that lies idle under a run that should be working on it: a member is gone, so the gang is.
        run = replace(run, phase=RunPhase.BROKEN, outcome=Outcome.FAILED)
    return let_go(world, run, devices, event.at_s)


def let_go(world: World, run: Run, devices: frozenset[str], now_s: float) -> World:
    """The run without these devices, charged for them. One without any is over; its job waits again, or is done."""
    gone = tuple(device for device in run.devices if device in devices)
    left = tuple(device for device in run.devices if device not in devices)
    state = world.jobs[run.job]
    key = (run.queue, run.card, run.family, run.coefficients)
    held_ms = len(gone) * max(0, round((now_s - run.started_s) * 1000.0))
    served = {**world.served_ms, key: world.served_ms.get(key, 0) + held_ms}
    if left:
        leaving = tuple(device for device in run.leaving if device not in devices)
        # Where a stop and a shrink met, or a member was lost, what is left may be no gang any more.
        ends_s = now_s + max(0.0, run.ends_s - now_s) * len(run.devices) / len(left)
        run = replace(run, devices=left, leaving=leaving, ends_s=ends_s, leave_by_s=run.leave_by_s if leaving else None,
                      signalled=run.signalled and (bool(leaving) or run.stop_by_s is not None))
        world = world.evolved(runs={**world.runs, run.id: run}, served_ms=served)
        return settle_loans(world, gone, now_s)
    runs = {name: other for name, other in world.runs.items() if name != run.id}
    world = _job_after(world.evolved(runs=runs, served_ms=served), state, run, now_s)
    return settle_loans(world, gone, now_s)


_FOR_OTHERS = frozenset({Reason.LOAN_RECALLED, Reason.RECLAIMED, Reason.PRIORITY})


def _pause_s(rules: Rules, crashes: int) -> float:
    """How long a job waits after so many crashes: what fails at once would else use up its tries in seconds."""
    doublings = min(crashes - 1, 60)      # more of them are beyond any bound, and beyond a float in the end
    return float(min(rules.restart_pause_max_s, rules.restart_pause_s * 2.0 ** doublings))


def _job_after(world: World, state: JobState, run: Run, now_s: float) -> World:
    # A lost node is nobody's fault, and whoever is told to stop may well exit with an error.
    failed = run.outcome is Outcome.FAILED or (run.outcome is Outcome.STOPPED and not run.stop_reason)
    crashed = failed and run.stop_reason in ("", Reason.GANG_BROKEN, Reason.LEFTOVERS)
    crashes = state.crashes + crashed
    if run.outcome is Outcome.COMPLETED or state.cancelled or crashes > world.config.rules.max_restarts:
        return without_job(world, run.job)
    recalls = state.recalls + (run.stop_reason in _FOR_OTHERS)
    not_before_s = now_s + _pause_s(world.config.rules, crashes) if crashed else 0.0
    waiting = replace(state, run=None, crashes=crashes, recalls=recalls, unsaved=state.unsaved + (run.saved is False),
                      waiting_since_s=now_s, not_before_s=not_before_s)
    return world.evolved(jobs={**world.jobs, run.job: waiting})


