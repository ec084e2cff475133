"""What is still to be done in the world outside, read off the world inside.

The order of things is: decide, journal, apply, act. Whoever is killed between any two of them starts again from the
journal, and everything decided but not yet confirmed is in this list. So acting must be idempotent (each effect carries
the epoch by which the far side tells a repetition from a novelty), and nothing else has to be remembered.
"""

from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

from allocator.loan.states import LoanState
from allocator.model.inventory import BackendState
from allocator.model.jobs import Run, RunPhase
from allocator.model.world import World


class EffectKind(StrEnum):
    START = "start"
    """Start the gang on these devices. Confirmed by RunStarted, or RunBroke."""
    SIGNAL = "signal"
    """Tell the run to checkpoint and leave these devices by the deadline. Confirmed by SignalAccepted."""
    KILL = "kill"
    """SIGKILL, to the last process."""
    PROVE = "prove"
    """Look whether anything is left of the run on these devices. Confirmed by DevicesVacated."""
    DRAIN = "drain"
    """Ask the router to drain the backend, and stop its engine. Confirmed by BackendReported, released."""
    SERVE = "serve"
    """The backend may serve again: start its engine, tell the router."""
    PROBE = "probe"
    """Check the health of devices on their way home. Confirmed by HandBackProbed."""
    ALARM = "alarm"
    """Wake somebody: the loan is overdue, or lost."""


class Effect(NamedTuple):
    kind: EffectKind
    target: str
    """A run for the first four, a backend or loan for the others."""
    epoch: int
    devices: tuple[str, ...] = ()
    deadline_s: float | None = None


def outstanding(world: World) -> tuple[Effect, ...]:
    """Everything decided that nobody has confirmed yet."""
    return (*_of_runs(world), *_of_loans(world))


def _of_runs(world: World) -> Iterator[Effect]:
    for run in world.runs.values():
        yield from _of_run(run)


def _of_run(run: Run) -> Iterator[Effect]:
    leaving = run.leaving or run.devices
    by_s = run.leave_by_s if run.stop_by_s is None else run.stop_by_s
    if run.phase is RunPhase.STARTING and by_s is None:
        yield Effect(EffectKind.START, run.id, run.epoch, run.devices)
    if by_s is not None and not run.signalled and run.killed_s is None:
        yield Effect(EffectKind.SIGNAL, run.id, run.epoch, leaving, by_s)
    if run.killed_s is not None:
        yield Effect(EffectKind.KILL, run.id, run.epoch, run.devices)
    if run.killed_s is not None or run.signalled or run.phase in (RunPhase.EXITED, RunPhase.BROKEN):
        yield Effect(EffectKind.PROVE, run.id, run.epoch, leaving)


def _of_loans(world: World) -> Iterator[Effect]:
    for loan in world.loans.values():
        if loan.state is LoanState.OFFERED and not loan.released:
            yield Effect(EffectKind.DRAIN, loan.id, loan.epoch, loan.devices)
        if loan.state is LoanState.RETURNING or (loan.state is LoanState.OVERDUE and world.is_empty(loan.devices)):
            yield Effect(EffectKind.PROBE, loan.id, loan.epoch, loan.devices)
        if loan.state in (LoanState.OVERDUE, LoanState.LOST):
            yield Effect(EffectKind.ALARM, loan.id, loan.epoch, loan.devices)
    for backend in world.backends.values():
        if backend.name not in world.loans and backend.state in (BackendState.DRAINING, BackendState.RELEASED):
            yield Effect(EffectKind.SERVE, backend.name, world.epoch, backend.devices)
