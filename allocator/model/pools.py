"""Pools own devices, queues own promises: the declared side of the world, checked before it is believed.

Pools are purpose first, card types inside. A queue hangs under a pool, or under another queue of it, and has quotas in
the pool's currency: devices by card (`cards`), or normalised units over all cards (`units`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

UNITS = "units"
"""The one quota key of a pool whose currency is units."""


class PoolKind(StrEnum):
    TRAINING = "training"
    INFERENCE = "inference"
    """Lends; its devices belong to the router's backends and run no job unless lent."""
    ENCLAVE = "enclave"
    """Outside of unification by declaration: its own jobs only, never lent, never borrowing."""
    TRANSITIONAL = "transitional"
    """For a migration window: usable between its dates, and its nodes go elsewhere at the end."""


class Currency(StrEnum):
    CARDS = "cards"
    UNITS = "units"


@dataclass(frozen=True, slots=True)
class Pool:
    """Devices of one purpose. A node belongs to the one pool whose `selector` its labels satisfy."""

    name: str
    kind: PoolKind
    selector: Mapping[str, str]
    currency: Currency = Currency.CARDS
    reason: str = ""
    """Of an enclave: why it stands apart."""
    review_on: str = ""
    """Of an enclave: the ISO date at which that is asked again."""
    starts_wall_s: float | None = None
    ends_wall_s: float | None = None
    then_pool: str | None = None
    """Of a transitional pool: its dates, and where its nodes go at the end."""
    keep_whole_nodes: int = 0
    """Gangs smaller than a node leave so many wholly free nodes of a card whole (HiveD's guarantee, in the small)."""


@dataclass(frozen=True, slots=True)
class Quota:
    """A queue's promise for one key. `None`: without a limit of its own."""

    nominal: float
    lending_limit: float | None = None
    """How much of the nominal others may use while it is idle."""
    borrowing_limit: float | None = None
    """How much beyond the nominal it may use."""


@dataclass(frozen=True, slots=True)
class Queue:
    """Where jobs wait. `parent` is a queue or the pool itself."""

    name: str
    parent: str
    quotas: Mapping[str, Quota] = field(default_factory=dict)
    weight: float = 1.0
    """A share twice as large for a weight twice as high; 0: only what nobody else wants."""


@dataclass(frozen=True, slots=True)
class Rules:
    """Times and thresholds of the decisions."""

    tick_s: float = 1.0
    """The planner runs at least this often; deadlines are kept to within it."""
    grace_s: float = 60.0
    """Notice that a stopped job gets. A recall without a deadline of its own ends this long after."""
    kill_margin_s: float = 10.0
    """A job that still stands this long before its deadline is killed: what a tick, tearing a process down and the
    proof that its devices are idle take together, so that the deadline holds."""
    promised_min_s: float = 1800.0
    """How long a loan is meant to last: what the lender's forecast must cover."""
    offer_ttl_s: float = 300.0
    surplus_hold_s: float = 120.0
    """A surplus is offered once it has held this long."""
    recall_keep_s: float = 1800.0
    """What was recalled by hand is not lent again for this long."""
    supply_fresh_s: float = 60.0
    """An older supply report offers nothing."""
    idle_return_s: float = 30.0
    """A loan that no run has used for this long goes home."""
    quarantine_after_s: float = 120.0
    """An overdue loan that is not proven idle by then is written off until somebody proves it."""
    reservations: int = 1
    """Waiting gangs with a reservation, by pool and card: 1 is EASY, 0 best effort, many is conservative."""
    default_estimate_s: float = 86400.0
    """Assumed for a job that gives no estimate, on the fastest of its cards."""
    min_run_s: float = 600.0
    """A run younger than this is not reclaimed for another queue's guarantee."""
    max_recalls: int = 20
    """A job recalled this often from loans waits for devices that cannot be recalled (F17). Each recall costs it a
    restart, and loans that are not worth that are refused by `min_loan_worth`. A job of days stands on many loans in
    turn; soon cut off, it would wait for good where all spare devices are lent ones."""
    min_loan_worth: float = 0.5
    """Least share of a loan's promised time that must be work and not restart (Sia's restart factor)."""
    patience: float = 1.25
    """Waiting for a faster card must be predicted to finish this many times sooner than starting at once elsewhere."""
    max_restarts: int = 3
    """Failed starts and crashes of a job before it is given up. Recalls do not count."""
    restart_pause_s: float = 10.0
    """Between a crash of a job and its next try; twice as long after each further one."""
    restart_pause_max_s: float = 600.0
    """No pause is longer."""
    warn_before_s: float = 86400.0
    """Notice before a transitional pool ends."""
    site_gbps: float = 10.0
    """Bandwidth between sites where no link is declared."""


@dataclass(frozen=True, slots=True)
class Config:
    """All that operators declare. `version` is the hash of its text; every decision names it."""

    version: str
    pools: tuple[Pool, ...]
    queues: tuple[Queue, ...] = ()
    rules: Rules = Rules()
    links_gbps: Mapping[str, float] = field(default_factory=dict)
    """`from>to` → bandwidth between two sites."""

    def pool(self, name: str | None) -> Pool | None:
        for pool in self.pools:
            if pool.name == name:
                return pool
        return None

    def queue(self, name: str) -> Queue | None:
        for queue in self.queues:
            if queue.name == name:
                return queue
        return None


class BadConfig(ValueError):
    """A declaration that must not be used; the message lists every fault in it."""


def matching_pools(pools: tuple[Pool, ...], labels: Mapping[str, str]) -> tuple[str, ...]:
    """The pools whose selector these labels satisfy. More than one is a fault that the lint refuses."""
    return tuple(pool.name for pool in pools
                 if pool.selector and all(labels.get(key) == value for key, value in pool.selector.items()))


def wanted_pool(config: Config, labels: Mapping[str, str], wall_s: float) -> str | None:
    """Where a node with these labels belongs at this time; `None` where no pool, or more than one, wants it."""
    names = matching_pools(config.pools, labels)
    pool = config.pool(names[0]) if len(names) == 1 else None
    if pool is not None and pool.ends_wall_s is not None and wall_s >= pool.ends_wall_s:
        return pool.then_pool
    return pool.name if pool else None


def pool_of_queue(config: Config, queue: str) -> Pool | None:
    """The pool at the root of a queue's tree; `None` for a queue that is not declared, or hangs in the air."""
    seen: set[str] = set()
    name = queue
    while (declared := config.queue(name)) is not None:
        if name in seen:
            return None
        seen.add(name)
        name = declared.parent
    return config.pool(name) if seen else None
