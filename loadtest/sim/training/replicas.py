"""Backends outside: they drain when they are asked for, load their model when they come home, and say so."""

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from allocator.effects import Effect
from allocator.events import BackendReported, Event
from allocator.model.inventory import BackendState

if TYPE_CHECKING:
    from loadtest.sim.training.machines import Machines


class Backends:
    """The router's answers to the allocator's wishes."""

    def __init__(self, machines: "Machines") -> None:
        self._machines = machines

    def drain(self, effect: Effect, now_s: float) -> None:
        """No new requests; released once the open ones are through."""
        self._machines.take(self._report(effect.target, BackendState.DRAINING, now_s))
        self._machines.at(now_s + self._machines.delays.drain_s, lambda now_s: self._released(effect, now_s))

    def serve(self, name: str, now_s: float) -> None:
        """Back to work. One that was only draining has its engine still; one that was away loads the model first."""
        backend = self._machines.world.backends[name]
        if backend.state is BackendState.WARMING:
            return
        self._machines.take(self._report(name, BackendState.WARMING, now_s))
        reload_s = backend.reload_s if backend.state is BackendState.RELEASED else 0.0
        self._machines.at(now_s + reload_s, lambda now_s: self._serving(name, now_s))

    def _released(self, effect: Effect, now_s: float) -> Iterable[Event]:
        loan = self._machines.world.loans.get(effect.target)
        if loan is None or loan.epoch != effect.epoch:
            return []  # withdrawn meanwhile: it serves again by another effect
        return [self._report(effect.target, BackendState.RELEASED, now_s)]

    def _serving(self, name: str, now_s: float) -> Iterable[Event]:
        if self._machines.world.backends[name].state is not BackendState.WARMING:
            return []
        return [self._report(name, BackendState.SERVING, now_s)]

    def _report(self, name: str, state: BackendState, now_s: float) -> BackendReported:
        return BackendReported(at_s=now_s, backend=replace(self._machines.world.backends[name], state=state))
