"""Machines: nodes with one card type each, where they stand, and what may be believed of every device.

A device is named `node:index`. Its place in the topology follows: island (NVLink domain, HCCS ring) within the node,
then node, leaf switch, pod, site.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache


class Condition(StrEnum):
    """What may be done with a device. Only HEALTHY ones are capacity, whatever the quota on paper says."""

    HEALTHY = "healthy"
    CORDONED = "cordoned"
    """An operator's hand: what runs there may end, nothing new starts."""
    QUARANTINED = "quarantined"
    """Not proven free of an earlier run; stays so until somebody proves it."""
    OFFLINE = "offline"


@dataclass(frozen=True, slots=True)
class Node:
    """One machine. `island_devices` 0: the whole node is one island."""

    name: str
    card: str
    devices: int
    memory_gb: float = 80.0
    """Per device."""
    island_devices: int = 0
    leaf: str = ""
    pod: str = ""
    site: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    pool: str | None = None
    """The pool that owns its devices. Follows the labels, once nothing of the old pool is left on the node."""

    @property
    def device_ids(self) -> tuple[str, ...]:
        return devices_of(self.name, self.devices)


@lru_cache(maxsize=65536)
def devices_of(node: str, count: int) -> tuple[str, ...]:
    """The names of a node's devices, in the order of their indices."""
    return tuple(f"{node}:{index}" for index in range(count))


def node_name(device: str) -> str:
    """The node that a device is on."""
    return device.rpartition(":")[0]


class BackendState(StrEnum):
    """Where the router has one of its backends."""

    SERVING = "serving"
    DRAINING = "draining"
    RELEASED = "released"
    """Drained, its engine stopped, its devices idle: the router's own word that they may be lent."""
    WARMING = "warming"


@dataclass(frozen=True, slots=True)
class Backend:
    """One inference replica and the devices under it: the smallest thing that is lent."""

    name: str
    pool: str
    card: str
    devices: tuple[str, ...]
    state: BackendState = BackendState.SERVING
    reload_s: float = 60.0
    """Stop + load + warm-up, measured: how long it takes to serve again once it has its devices back."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What people have called back of one pool and card stays there, whatever the surplus."""

    most_out: int
    """Replicas that may be lent or offered meanwhile: as many as the recall has left."""
    until_s: float


@dataclass(frozen=True, slots=True)
class Supply:
    """What an inference pool can do without of one card, in whole replicas, lent ones included (`lendable`)."""

    pool: str
    card: str
    lendable: int
    """Over the promised minimum of a loan and the drain: may be lent."""
    spare: int
    """Over the recall lead: may stay away. Fewer than are away → recall."""
    at_s: float = 0.0
    held_since_s: tuple[float, ...] = ()
    """Item k: since when at least k + 1 replicas were lendable without a break. Kept by `apply`."""
