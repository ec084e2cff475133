"""The world as far as it is known: one frozen value, changed by events only.

Nothing is stored that can be worked out (usage, free devices, shares, who is away): books that do not exist cannot
drift. What is worked out is remembered in `memo`, which dies with the value it belongs to.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any

from allocator.loan.loan import Loan
from allocator.model.inventory import Backend, Condition, Kept, Node, Supply
from allocator.model.jobs import JobState, Run
from allocator.model.pools import Config
from allocator.units.table import Coefficients


@dataclass(frozen=True, slots=True)
class Claim:
    """Devices kept for one waiting job until all of them are free: after a reclaim, or while backends drain."""

    job: str
    pool: str
    card: str
    devices: tuple[str, ...]
    made_s: float
    until_s: float
    """Dropped then, if it could not be used."""
    loans: tuple[str, ...] = ()
    """Offers that it waits for."""


@dataclass(frozen=True, slots=True)
class World:
    """`version` grows by one with every event that changed something."""

    config: Config
    tables: Mapping[str, Coefficients]
    active: str
    """The version of coefficients that new runs are charged under."""
    nodes: Mapping[str, Node] = field(default_factory=dict)
    conditions: Mapping[str, Condition] = field(default_factory=dict)
    """Devices that are not HEALTHY."""
    cordoned: frozenset[str] = frozenset()
    """Devices out of service for a stricter reason than the cordon that they have besides, which outlasts it."""
    jobs: Mapping[str, JobState] = field(default_factory=dict)
    runs: Mapping[str, Run] = field(default_factory=dict)
    loans: Mapping[str, Loan] = field(default_factory=dict)
    """By id, which is the backend's name: those that are not over, and the lost ones."""
    claims: Mapping[str, Claim] = field(default_factory=dict)
    """By job."""
    backends: Mapping[str, Backend] = field(default_factory=dict)
    supplies: Mapping[tuple[str, str], Supply] = field(default_factory=dict)
    """By (pool, card)."""
    kept: Mapping[tuple[str, str], Kept] = field(default_factory=dict)
    """By (pool, card): after recalls by hand. One that is over has no effect, and is left until the next."""
    served_ms: Mapping[tuple[str, str, str, str], int] = field(default_factory=dict)
    """(queue, card, family, coefficients) → device-milliseconds of what is over. Whole numbers: they add up exactly."""
    warned: frozenset[str] = frozenset()
    """Transitional pools whose end was announced."""
    version: int = 0
    epoch: int = 0
    """The last one given out."""
    labels: int = 0
    """Version of the nodes' labels."""
    now_s: float = 0.0
    """World time of the last event."""
    wall_offset_s: float = 0.0
    """Wall clock minus world time, as last read."""
    memo: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def coefficients(self) -> Coefficients:
        return self.tables[self.active]

    def wall_s(self, now_s: float) -> float:
        return now_s + self.wall_offset_s

    @property
    def holders(self) -> Mapping[str, str]:
        """Device → the run that holds it, until it is proven idle."""
        known: Mapping[str, str] | None = self.memo.get("holders")
        if known is None:
            known = self.memo["holders"] = {device: run.id for run in self.runs.values() for device in run.devices}
        return known

    @property
    def loaned(self) -> Mapping[str, str]:
        """Device → the loan that it is in, lost ones included."""
        known: Mapping[str, str] | None = self.memo.get("loaned")
        if known is None:
            known = self.memo["loaned"] = {device: loan.id for loan in self.loans.values() for device in loan.devices}
        return known

    @property
    def claimed(self) -> Mapping[str, str]:
        """Device → the job that it is kept for."""
        known: Mapping[str, str] | None = self.memo.get("claimed")
        if known is None:
            known = self.memo["claimed"] = {
                device: claim.job for claim in self.claims.values() for device in claim.devices}
        return known

    def is_empty(self, devices: Iterable[str]) -> bool:
        """Whether no run holds any of them. Belief does not come into it: a run lets go by proof only."""
        holders = self.holders
        return not any(device in holders for device in devices)

    def evolved(self, **changes: Any) -> "World":
        """A changed copy. What was worked out stays remembered where nothing that it depends on has changed."""
        memo = {key: value for key, value in self.memo.items()
                if key in _DEPENDS_ON and _DEPENDS_ON[key].isdisjoint(changes)}
        # `dataclasses.replace` in effect, at a fraction of its price: this runs for each event.
        after = object.__new__(World)
        for write, value in zip(_WRITERS, _READ(self), strict=True):
            write(after, value)
        for name, value in changes.items():
            object.__setattr__(after, name, value)
        object.__setattr__(after, "memo", memo)
        return after

    def with_runs_as_held(self, runs: Mapping[str, Run]) -> "World":
        """A copy in which runs are otherwise than before, but hold the same devices: what follows from who holds what
        need not be worked out again."""
        after = self.evolved(runs=runs)
        for key in _FOLLOWS_FROM_HOLDING & self.memo.keys():
            after.memo[key] = self.memo[key]
        return after


_FIELDS = tuple(each.name for each in fields(World) if each.name != "memo")
_READ = attrgetter(*_FIELDS)
_WRITERS = tuple(World.__dict__[name].__set__ for name in _FIELDS)
_DEPENDS_ON = {
    "holders": frozenset({"runs"}),
    "loaned": frozenset({"loans"}),
    "claimed": frozenset({"claims"}),
    "out": frozenset({"loans"}),
    "trees": frozenset({"config"}),
    "roots": frozenset({"config"}),
    "wanted": frozenset({"config", "nodes", "wall_offset_s"}),
    "picture": frozenset({"config", "nodes", "conditions", "runs", "loans", "claims", "wall_offset_s"}),
    "ledgers": frozenset({"config", "nodes", "conditions", "runs", "loans", "tables", "active"}),
    "gates": frozenset({"config", "nodes", "conditions", "loans", "backends", "tables", "active"}),
    "lendable": frozenset({"backends", "loans"}),
    "everything": frozenset({"config", "nodes", "loans", "backends"}),
    "holds": frozenset({"config", "nodes", "loans", "backends"}),
    "memory": frozenset({"nodes"}),
    "speeds": frozenset({"tables", "active"}),
}
"""What is remembered → the fields that it follows from. All else is forgotten with any change."""
_FOLLOWS_FROM_HOLDING = frozenset({"holders", "picture", "ledgers"})
"""What follows from `runs` only by which devices they hold."""


def new_world(config: Config, coefficients: Coefficients) -> World:
    """An empty world under a declaration that `check_config` has passed."""
    return World(config, {coefficients.version: coefficients}, coefficients.version)
