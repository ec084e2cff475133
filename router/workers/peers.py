"""What one worker process tells its siblings, and what it makes of what they tell: the picture that they share.

Shared at once, by memory that each decision reads: requests and tokens in flight on each backend, requests held, and of
each API key with a limit; ejections and `Retry-After` silences, once a sibling has announced them. Shared within
`TICK_S`: probes and samples, which the leader alone takes, and the leadership itself.

Each process keeps a health machine of its own, fed by what became of its own requests and by the leader's probes. Two
of a sibling's verdicts it takes over: that a backend is out (until the same moment), and that its trial went well.
Only verdicts younger than its own are, so that no echo of an old one overrules what happened since.

The leader is the lowest row that serves and shows signs of life. Two leaders for a
moment probe twice, and nothing else.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from struct import Struct
from time import monotonic

from backends.catalog.health import Cause, Health, HealthState, Probe
from backends.catalog.sample import LoadSample
from router.fleet.live import Fleet, LiveBackend
from router.workers.table import (
    LOAD_BYTES,
    LOAD_CELLS,
    SAMPLE_FIELDS,
    SLOT_CELLS,
    SLOTS,
    Header,
    Row,
    RowState,
    Slot,
    Table,
    identity_of,
)

log = logging.getLogger("headrace.workers")

TICK_S = 0.05
STALE_S = 2.0
"""Without a sign of life for so long, a process does not lead; and if there is no such process, its row is void."""

STATES = tuple(HealthState)
CAUSES = tuple(Cause)
MAX_REREADS = 8


class Peers:
    """The siblings of this process, and its own row among theirs. Belongs to one event loop."""

    def __init__(self, table: Table, index: int, *, clock: Callable[[], float] = monotonic) -> None:
        self.table = table
        self.own = table.rows[index]
        self._clock = clock
        self._fleet: Fleet | None = None
        self._held: dict[int, LiveBackend] = {}
        """By slot, retired backends among them until their last lease is back."""
        self._identities: dict[int, int] = {}
        self._used = 0
        self._unpack = Struct("0q").unpack
        self._known: list[int] = []
        self.others: tuple[Row, ...] = ()
        """Rows whose figures count, the own one aside."""
        self._alike: list[memoryview] = []
        self._unlike: list[tuple[Row, list[tuple[int, int]]]] = []
        self._void: set[tuple[int, int]] = set()
        """Rows by index and epoch whose process is gone, though nobody has cleared them yet."""
        self._heard: dict[tuple[int, int, int], tuple[int, int]] = {}
        """Probes and samples heard so far, by row, epoch and identity."""
        self._layouts: dict[int, tuple[int, dict[int, int]]] = {}

    # --- Siblings, as the fleet knows them --------------------------------------------------------------------------

    def join(self, fleet: Fleet) -> None:
        """Move the fleet's books into shared memory, and begin with what the leader knows."""
        self._fleet = fleet
        fleet.siblings = self
        self.arrange(fleet.backends.values())
        leader = self.leader()
        if leader is not None and leader is not self.own:
            for live in fleet.backends.values():
                self._inherit(leader, live)
            self.follow(leader)

    def arrange(self, backends: Iterable[LiveBackend]) -> None:
        """Give backends that have none a slot: where a sibling already keeps that backend, else a free one."""
        self._forget_retired()
        self.release_retired()
        layouts = [row.identities() for row in self.table if row is not self.own and row.counts]
        taken = {slot for layout in layouts for slot in layout.values()}
        for live in backends:
            if live.slot >= 0:
                continue
            identity = identity_of(*live.spec.identity)
            wished = [layout[identity] for layout in layouts if identity in layout]
            slot = next((slot for slot in wished if slot not in self._held), None)
            if slot is None:
                slot = next((slot for slot in range(SLOTS) if slot not in self._held and slot not in taken), None)
            if slot is None:
                log.error("backend %s: no slot left to share; its load is not seen by other workers", live.spec.name)
                continue
            self._take_slot(live, slot, identity)
        self._resize()
        self.own.announce()
        self._known = []

    def loads(self) -> Sequence[int]:
        """In flight over all processes, four figures for each slot of this one."""
        generations = self.table.generations
        for _ in range(MAX_REREADS):
            if generations.tolist() != self._known:
                self._look()
            figures = self._sum()
            if generations.tolist() == self._known:
                break
        return figures

    def publish(self, live: LiveBackend) -> None:
        """Health and silence of one backend, for everybody to see before their next decision."""
        if live.slot < 0:
            return
        start, health = live.slot * SLOT_CELLS, live.health
        cells, floats = self.own.slots, self.own.slot_floats
        cells[start + Slot.HEALTH_STATE] = STATES.index(health.state)
        cells[start + Slot.HEALTH_CAUSE] = CAUSES.index(health.cause)
        floats[start + Slot.HEALTH_UNTIL_S] = health.until_s
        cells[start + Slot.EJECTIONS] = health.ejections
        floats[start + Slot.BACKOFF_UNTIL_S] = live.silent_until_s
        floats[start + Slot.HEALTH_SINCE_S] = health.since_s
        self.own.announce()

    # --- the sum ----------------------------------------------------------------------------------------------------

    def _sum(self) -> Sequence[int]:
        # A row is one number of 64-bit digits here, so that adding two of them adds every cell at once. No digit
        # carries into the next: none is negative, and no sum of tokens comes near 2⁶³.
        size = self._used * LOAD_BYTES
        number = int.from_bytes
        total = number(self.own.load_bytes[:size], "little")
        for loads in self._alike:
            total += number(loads, "little")
        figures = self._unpack(total.to_bytes(size, "little"))
        return figures if not self._unlike else self._add_unlike(list(figures))

    def _add_unlike(self, figures: list[int]) -> list[int]:
        for row, places in self._unlike:
            for own_slot, their_slot in places:
                start, theirs = own_slot * LOAD_CELLS, row.load_cells(their_slot)
                for cell in range(LOAD_CELLS):
                    figures[start + cell] += theirs[cell]
        return figures

    def _look(self) -> None:
        """Keep in mind which rows count and how their slots lie, and take over what they announce."""
        self._known = self.table.generations.tolist()
        others, alike, unlike = [], [], []
        self._layouts.clear()
        for row in self.table:
            epoch = row.header[Header.EPOCH]
            if row is self.own or not row.counts or (row.index, epoch) in self._void:
                continue
            others.append(row)
            layout = row.identities()
            self._layouts[row.index] = (epoch, layout)
            if layout == self._identities:
                alike.append(row.load_bytes[: self._used * LOAD_BYTES])
            else:
                places = [(slot, layout[name]) for name, slot in self._identities.items() if name in layout]
                unlike.append((row, places))
        self.others, self._alike, self._unlike = tuple(others), alike, unlike
        living = {(row.index, row.header[Header.EPOCH]) for row in others}
        for key in [key for key in self._heard if key[:2] not in living]:
            del self._heard[key]
        for row in others:
            self._take_over(row)

    # --- verdicts ---------------------------------------------------------------------------------------------------

    def _take_over(self, row: Row) -> None:
        _, layout = self._layouts[row.index]
        now = self._clock()
        for identity, own_slot in self._identities.items():
            their_slot = layout.get(identity)
            if their_slot is None:
                continue
            live, start = self._held[own_slot], their_slot * SLOT_CELLS
            live.silent_until_s = max(live.silent_until_s, row.slot_floats[start + Slot.BACKOFF_UNTIL_S])
            found = _verdict(live.health.at(now), _health_at(row, start), now)
            if found is not None and self._fleet is not None and not live.retired:
                self._fleet.adopt(live, found)

    def _inherit(self, row: Row, live: LiveBackend) -> None:
        """Begin where the leader stands."""
        their_slot = row.identities().get(identity_of(*live.spec.identity))
        if their_slot is None:
            return
        start, floats = their_slot * SLOT_CELLS, row.slot_floats
        found = _health_at(row, start)
        if found is not None:
            live.health = replace(found, rules=live.health.rules)
            self.publish(live)
        live.silent_until_s = floats[start + Slot.BACKOFF_UNTIL_S]
        if floats[start + Slot.DRIFT] > 0:
            live.drift = floats[start + Slot.DRIFT]

    # --- probes and samples -----------------------------------------------------------------------------------------

    def leader(self) -> Row | None:
        """Who probes and scrapes for all."""
        now = self._clock()
        for row in self.table:
            alive = row is self.own or now - row.floats[Header.HEARTBEAT_S] < STALE_S
            if alive and row.header[Header.STATE] == RowState.SERVING:
                return row
        return None

    def on_probe(self, name: str, probe: Probe) -> None:
        """The own poller has probed: book it, and publish it."""
        fleet = self._joined()
        fleet.on_probe(name, probe)
        live = fleet.backends.get(name)
        if live is None or live.slot < 0:
            return
        cells, start = self.own.slots, live.slot * SLOT_CELLS
        cells[start + Slot.PROBE_OK], cells[start + Slot.PROBE_SLOW] = probe.ok, probe.slow
        cells[start + Slot.PROBES] += 1

    def on_sample(self, name: str, sample: LoadSample) -> None:
        """The own poller has read an engine's metrics: keep them, and publish them."""
        fleet = self._joined()
        fleet.on_sample(name, sample)
        live = fleet.backends.get(name)
        if live is None or live.slot < 0:
            return
        floats, start = self.own.slot_floats, live.slot * SLOT_CELLS
        values = (*_sample_fields(sample), live.in_flight_at_sample)
        for offset, value in enumerate(values):
            floats[start + Slot.SAMPLE + offset] = math.nan if value is None else float(value)
        self.own.slots[start + Slot.SAMPLES] += 1

    def follow(self, leader: Row) -> None:
        """Take over the leader's probes and samples since the last time."""
        fleet = self._joined()
        if self.table.generations.tolist() != self._known:
            self._look()
        epoch, layout = self._layouts.get(leader.index, (0, {}))
        for identity, own_slot in list(self._identities.items()):
            their_slot, live = layout.get(identity), self._held[own_slot]
            if their_slot is None:
                continue
            start, key = their_slot * SLOT_CELLS, (leader.index, epoch, identity)
            probes, samples = leader.slots[start + Slot.PROBES], leader.slots[start + Slot.SAMPLES]
            heard_probes, heard_samples = self._heard.get(key, (0, 0))
            self._heard[key] = (probes, samples)
            if probes != heard_probes:
                ok, slow = leader.slots[start + Slot.PROBE_OK], leader.slots[start + Slot.PROBE_SLOW]
                detail = "" if ok and not slow else "by the leading worker's probe"
                fleet.on_probe(live.spec.name, Probe(bool(ok), bool(slow), detail), told=False)
            if samples != heard_samples:
                first = start + Slot.SAMPLE
                live.sample, live.in_flight_at_sample = _sample_of(
                    leader.slot_floats[first : first + SAMPLE_FIELDS].tolist()
                )

    # --- as time passes ---------------------------------------------------------------------------------------------

    def tick(self) -> Row | None:
        """Show a sign of life, tidy up, follow the leader. Returns it."""
        fleet, own = self._joined(), self.own
        own.floats[Header.HEARTBEAT_S] = self._clock()
        own.header[Header.CONFIG] = int(fleet.config_hash or "0", 16)
        for live in fleet.backends.values():
            if live.slot >= 0:
                own.slot_floats[live.slot * SLOT_CELLS + Slot.DRIFT] = live.drift
        self.release_retired()
        if self.table.generations.tolist() != self._known:
            self._look()
        self._void_the_dead()
        leader = self.leader()
        if leader is not None and leader is not own:
            self.follow(leader)
        return leader

    async def run(self, lead: Callable[[], Awaitable[None]], on_tick: Callable[[], None] = lambda: None) -> None:
        """Tick until cancelled; `lead` runs, and is cancelled, as the leadership comes and goes."""
        leading: asyncio.Task[None] | None = None
        try:
            while True:
                leads = self.tick() is self.own
                if leads and (leading is None or leading.done()):
                    log.info("worker %d leads", self.own.index)
                    leading = asyncio.ensure_future(_guarded(lead))
                elif not leads and leading is not None:
                    leading.cancel()
                    leading = None
                on_tick()
                await asyncio.sleep(TICK_S)
        finally:
            if leading is not None:
                leading.cancel()

    def _void_the_dead(self) -> None:
        """The parent clears a dead process's row. Where it does not get to that, its siblings leave the row out."""
        now = self._clock()
        for row in self.others:
            if not row.counts or now - row.floats[Header.HEARTBEAT_S] < STALE_S or is_alive(row.header[Header.PID]):
                continue
            log.warning("worker %d is gone; what it held no longer counts", row.index)
            self._void.add((row.index, row.header[Header.EPOCH]))
            self._known = []

    # --- slots ------------------------------------------------------------------------------------------------------

    def _take_slot(self, live: LiveBackend, slot: int, identity: int) -> None:
        start = slot * SLOT_CELLS
        for cell in range(start, start + SLOT_CELLS):
            self.own.slots[cell] = 0
        live.books.move_to(self.own.load_cells(slot))
        live.slot, live.siblings = slot, self
        self._held[slot] = live
        self._identities[identity] = slot
        self.own.slots[start + Slot.IDENTITY] = identity
        self.publish(live)

    def release_retired(self) -> None:
        """Free the slots of removed backends that have nothing in flight any more."""
        freed = [slot for slot, live in self._held.items() if live.retired and live.books.requests == 0]
        for slot in freed:
            live = self._held.pop(slot)
            live.slot, live.siblings = -1, None
            live.books.cells = memoryview(bytearray(LOAD_BYTES)).cast("q")
            for cell in range(LOAD_CELLS):
                self.own.loads[slot * LOAD_CELLS + cell] = 0
        if freed:
            self._resize()
            self.own.announce()
            self._known = []

    def _forget_retired(self) -> None:
        """What a removed backend still has in flight is nobody's business but its own."""
        for slot, live in self._held.items():
            if live.retired:
                self.own.slots[slot * SLOT_CELLS + Slot.IDENTITY] = 0
        self._identities = {name: slot for name, slot in self._identities.items() if not self._held[slot].retired}

    def _resize(self) -> None:
        self._used = max(self._held, default=-1) + 1
        self._unpack = Struct(f"{self._used * LOAD_CELLS}q").unpack
        self.own.header[Header.SLOTS_USED] = self._used

    def _joined(self) -> Fleet:
        assert self._fleet is not None, "join comes first"
        return self._fleet


async def _guarded(lead: Callable[[], Awaitable[None]]) -> None:
    try:
        await lead()
    except Exception:
        log.exception("leading failed")


def is_alive(pid: int) -> bool:
    """Whether a process runs under that number, be it stopped; one that waits to be reaped does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def _health_at(row: Row, start: int) -> Health | None:
    """What a row says of a backend's health; `None` where that makes no sense."""
    cells, floats = row.slots, row.slot_floats
    state, cause = cells[start + Slot.HEALTH_STATE], cells[start + Slot.HEALTH_CAUSE]
    if not (0 <= state < len(STATES) and 0 <= cause < len(CAUSES)):
        return None
    return Health(
        state=STATES[state], cause=CAUSES[cause], detail="by another worker" if cause else "",
        since_s=floats[start + Slot.HEALTH_SINCE_S], until_s=floats[start + Slot.HEALTH_UNTIL_S],
        ejections=cells[start + Slot.EJECTIONS],
    )  # fmt: skip


def _verdict(own: Health, theirs: Health | None, now: float) -> Health | None:
    """The own health after a sibling's verdict; `None` where that changes nothing."""
    if theirs is None or theirs.since_s < own.since_s:
        return None
    if theirs.state is HealthState.EJECTED and theirs.until_s > now:
        if own.state is HealthState.UNHEALTHY or (own.state is HealthState.EJECTED and own.until_s >= theirs.until_s):
            return None
        return replace(
            own, state=HealthState.EJECTED, since_s=theirs.since_s, until_s=theirs.until_s, cause=theirs.cause,
            detail=theirs.detail, ejections=max(theirs.ejections, own.ejections), held=False, trial_successes=0,
            probe_successes=0, last_success_s=None,
        )  # fmt: skip
    if theirs.state is HealthState.SLOW_START and own.state is HealthState.HALF_OPEN:
        return replace(own, state=HealthState.SLOW_START, since_s=theirs.since_s, trial_successes=0, failures=0,
                       silent_failures=0)
    return None


def _sample_fields(sample: LoadSample) -> tuple[float | None, ...]:
    return (
        sample.taken_at_s, sample.running_requests, sample.waiting_requests, sample.kv_usage_ratio,
        sample.kv_capacity_tokens, sample.prompt_tokens_total, sample.generated_tokens_total,
        sample.prefix_cache_hit_ratio, sample.preemptions_total,
    )  # fmt: skip


def _sample_of(values: Sequence[float]) -> tuple[LoadSample, int | None]:
    taken_at_s, *rest = values
    running, waiting, kv_usage, kv_capacity, prompt, generated, prefix, preemptions, ours = (
        None if math.isnan(value) else value for value in rest
    )
    sample = LoadSample(taken_at_s, _whole(running), _whole(waiting), kv_usage, _whole(kv_capacity), prompt, generated,
                        prefix, preemptions)
    return sample, _whole(ours)


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
