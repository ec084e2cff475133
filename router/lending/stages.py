"""Lets a backend go and takes it back: the router's half of a loan, as a small state machine with fenced levers.

::

    serving ──release──▶ draining ──no stream left──▶ released ──return──▶ returning ──warm──▶ serving
       ▲                     │                                                  │
       └──────return─────────┘                     draining ◀──────release──────┘

- `draining`, `released` and `returning` get no new request; streams that are open end as they would.
- `released`: no stream of this process is there. Once that is so in every process of the gateway, the engine may be
  stopped.
- `returning`: the engine is being started by whoever stopped it. It is waited for and warmed up, and then enters
  service by a slow start, whatever its health was before.

The last backend of a model that serves is not let go. An order with a lower `epoch` than one before changes nothing
and says so: a lender that was succeeded by another must not release what that one has called back.

This is beside the operator's own drain (`/admin/backends/{name}/drain`) and weight 0: whatever says no, counts.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from backends.catalog.health import Cause, HealthState
from router.fleet.live import Fleet, LiveBackend
from router.lending.warmup import warm_up
from router.wire.errors import ApiError

log = logging.getLogger("headrace.lending")

DRAIN_POLL_S = 0.02
TIMES_KEPT = 8


class Stage(StrEnum):
    """Where a backend stands between serving and lent."""

    SERVING = "serving"
    DRAINING = "draining"
    RELEASED = "released"
    RETURNING = "returning"


@dataclass(slots=True)
class LeadTimes:
    """How long things took, the latest few. What is counted on is the longest of them: a recall must not be late."""

    assumed_s: float
    seen_s: list[float] = field(default_factory=list)

    def add(self, took_s: float) -> None:
        self.seen_s = [*self.seen_s, took_s][-TIMES_KEPT:]

    @property
    def counted_on_s(self) -> float:
        return max(self.seen_s, default=self.assumed_s)


@dataclass(slots=True)
class Place:
    """One backend. Times are monotonic seconds."""

    returns: LeadTimes
    """From the order to return until it serves: load and warm-up."""
    drains: LeadTimes
    stage: Stage = Stage.SERVING
    since_s: float = 0.0
    epoch: int = 0
    """The highest that has spoken."""
    detail: str = ""
    task: "asyncio.Task[None] | None" = None


class Lending:
    """The places of all backends. Methods run on the event loop, and the levers do not wait for what they set going."""

    def __init__(self, fleet: Fleet, clock: Callable[[], float], *, assumed_return_s: float,
                 warmup_requests: int) -> None:
        self._fleet = fleet
        self._clock = clock
        self._places: dict[str, Place] = {}
        self.assumed_return_s = assumed_return_s
        self.warmup_requests = warmup_requests
        self.version = 1
        """Grows by one whenever a backend enters another stage."""
        self._changed = asyncio.Event()
        self.follow_fleet()

    def place(self, name: str) -> Place:
        """Of a backend of the fleet."""
        return self._places[name]

    def follow_fleet(self) -> None:
        """The fleet has other backends now: one that was replaced is held back like the one before, one that is gone is
        forgotten.
        """
        for name in self._places.keys() - self._fleet.backends.keys():
            _cancel(self._places.pop(name))
        for name, live in self._fleet.backends.items():
            place = self._places.get(name)
            if place is None:
                place = self._places[name] = Place(LeadTimes(self.assumed_return_s), LeadTimes(0.0),
                                                   since_s=self._clock())
            place.returns.assumed_s = self.assumed_return_s
            live.lent = place.stage is not Stage.SERVING

    def release(self, name: str, epoch: int) -> Place:
        """Let it go. Repeated, it only reports.

        Raises:
            ApiError: unknown (404), superseded or the model's last one that serves (409).
        """
        live, place = self._heard(name, epoch)
        if place.stage in (Stage.DRAINING, Stage.RELEASED):
            return place
        if not self._others_serve(live):
            raise ApiError(409, "last_backend", f"{name} is the last backend of {live.spec.model} that serves; it "
                                                "stays. Bring another into service first.")
        live.lent = True
        self._begin(name, place, Stage.DRAINING, self._drain(name, place))
        return place

    def take_back(self, name: str, epoch: int) -> Place:
        """Its engine is starting, or never stopped: bring it into service. Repeated, it only reports.

        Raises:
            ApiError: unknown (404), superseded (409).
        """
        live, place = self._heard(name, epoch)
        if place.stage is Stage.DRAINING:  # nothing was stopped yet
            live.lent = False
            self._begin(name, place, Stage.SERVING, None)
        elif place.stage is Stage.RELEASED:
            self._begin(name, place, Stage.RETURNING, self._bring_back(name, place))
        return place

    def begin_away(self, name: str, epoch: int) -> None:
        """A process that starts among siblings which have let this backend go: it holds nothing there."""
        place = self._places.get(name)
        if place is not None and place.stage is Stage.SERVING:
            place.epoch = max(place.epoch, epoch)
            self._fleet.backends[name].lent = True
            self._begin(name, place, Stage.RELEASED, None)

    def export(self) -> dict[str, Any]:
        """How long drains and returns took, as JSON values."""
        return {name: {"returns_s": place.returns.seen_s, "drains_s": place.drains.seen_s}
                for name, place in self._places.items()}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Begin with these; of backends that are still there."""
        for name, times in saved.items():
            if name in self._places:
                place = self._places[name]
                place.returns.seen_s = [float(took_s) for took_s in times["returns_s"]][-TIMES_KEPT:]
                place.drains.seen_s = [float(took_s) for took_s in times["drains_s"]][-TIMES_KEPT:]

    async def until_changed(self, version: int, timeout_s: float) -> None:
        """Return when some backend has entered another stage since `version`, at the latest after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.version <= version:
                    await self._changed.wait()
        except TimeoutError:
            return

    async def aclose(self) -> None:
        """End what is under way."""
        tasks = [place.task for place in self._places.values() if place.task is not None]
        for place in self._places.values():
            _cancel(place)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _heard(self, name: str, epoch: int) -> tuple[LiveBackend, Place]:
        live = self._fleet.backends.get(name)
        if live is None:
            known = ", ".join(self._fleet.backends)
            raise ApiError(404, "unknown_backend", f"There is no backend {name[:64]!a}. Known: {known}.")
        place = self.place(name)
        if epoch < place.epoch:
            raise ApiError(409, "stale_epoch", f"Epoch {epoch} is over; {place.epoch} has spoken on {name} since.")
        place.epoch = epoch
        return live, place

    def _others_serve(self, live: LiveBackend) -> bool:
        health = self._fleet.health_of_model(live.spec.model)
        return any(found.in_service for name, found in health.items() if name != live.spec.name)

    def _begin(self, name: str, place: Place, stage: Stage, work: Coroutine[Any, Any, None] | None) -> None:
        _cancel(place)
        place.stage, place.since_s, place.detail = stage, self._clock(), ""
        if work is not None:
            place.task = asyncio.get_running_loop().create_task(work, name=f"{stage} {name}")
        self.version += 1
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        log.info("backend %s: %s", name, stage.value)

    async def _drain(self, name: str, place: Place) -> None:
        began_s = self._clock()
        while (live := self._fleet.backends.get(name)) is not None and live.books.requests:
            place.detail = f"{live.books.requests} requests are open"
            await asyncio.sleep(DRAIN_POLL_S)
        place.drains.add(self._clock() - began_s)
        place.task = None
        self._begin(name, place, Stage.RELEASED, None)

    async def _bring_back(self, name: str, place: Place) -> None:
        began_s = self._clock()

        def tell(words: str) -> None:
            place.detail = words

        await warm_up(self._fleet.backends[name].spec, self.warmup_requests, tell)
        live = self._fleet.backends.get(name)
        if live is None:
            return
        now = self._clock()
        fresh = replace(live.health.at(now), state=HealthState.SLOW_START, since_s=now, cause=Cause.NONE, detail="",
                        held=False, failures=0, silent_failures=0, probe_failures=0, ejections=0)
        self._fleet.adopt(live, fresh)
        live.lent = False
        place.returns.add(now - began_s)
        place.task = None
        self._begin(name, place, Stage.SERVING, None)


def _cancel(place: Place) -> None:
    if place.task is not None:
        place.task.cancel()
        place.task = None
