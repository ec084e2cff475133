"""The cluster of the lending simulation: what trains, what serves, and what each card is worth to whom.

| pool | nodes | devices |
|---|---|---|
| training | 6 of 8 A100, 2 of 8 910B | 64, its own |
| inference | 8 of 8 A100, 2 of 8 H100 | 80, as 40 replicas of Qwen3-32B on two devices each |

Coefficients for training are assumed from public peak figures, as nobody published measured ones over these cards:
families that are bound by arithmetic (ResNet, Transformer, CycleGAN) by dense bf16, the others by memory bandwidth,
both beside an A100 (312 TFLOPS, 2,039 GB/s), with 0.7 for what newer cards and other stacks do not reach of their peak
in arithmetic. Gangs are as fast as their devices together, and 0.9 of that where they stand over several nodes.
"""

from collections.abc import Iterator
from functools import cache

from allocator.apply import apply
from allocator.events import BackendReported, Event, NodeReported
from allocator.model.inventory import Backend, Node
from allocator.model.pools import Config, Pool, PoolKind, Queue, Rules
from allocator.model.world import World, new_world
from allocator.units.table import CardUnits, Coefficients, check
from loadtest.sim.training.gavel import FAMILIES

TRAINING, INFERENCE = "training", "inference"
QUEUE = "research"
DEVICES_A_NODE = 8
DEVICES_A_REPLICA = 2
OWN_NODES = {"a100": 6, "910b": 2}
SERVING_NODES = {"a100": 8, "h100": 2}
PRICE_PER_DEVICE_HOUR = {"a100": 0.70, "h100": 2.95, "910b": 0.45}
"""Half of what `loadtest.sim.pools` books for two of them, owned: assumed."""
RELOAD_S = {"a100": 90.0, "h100": 60.0}
"""Stop, load 64 GB of weights, warm up: assumed, at about 1 GB/s from the node's own disk."""
SPREAD_OUT = 0.9
_ARITHMETIC = {"a100": 1.0, "h100": 0.7 * 989 / 312, "910b": 0.7 * 353.8 / 312}
_BANDWIDTH = {"a100": 1.0, "h100": 3350 / 2039, "910b": 1600 / 2039}
_BY_ARITHMETIC = ("ResNet", "Transformer", "CycleGAN")


@cache
def coefficients() -> Coefficients:
    """The assumed table; the reference is the A100."""
    speeds = {}
    for family, _ in FAMILIES:
        of_card = _ARITHMETIC if family.startswith(_BY_ARITHMETIC) else _BANDWIDTH
        speeds[family] = {card: {1: speed} for card, speed in of_card.items()}
    spread_out = {family: {card: {2: 2.0 * SPREAD_OUT * sizes[1]} for card, sizes in cards.items()}
                  for family, cards in speeds.items()}
    cards = {card: CardUnits((_ARITHMETIC[card] * _BANDWIDTH[card]) ** 0.5,
                             max(_ARITHMETIC[card] / _BANDWIDTH[card], _BANDWIDTH[card] / _ARITHMETIC[card]))
             for card in _ARITHMETIC}
    return check(Coefficients("lending-assumed", "a100", "public peak figures", cards, speeds, spread_out))


def replicas(card: str) -> int:
    """How many replicas stand on this card."""
    return SERVING_NODES.get(card, 0) * DEVICES_A_NODE // DEVICES_A_REPLICA


def first_world(rules: Rules, given: dict[str, int]) -> World:
    """The cluster before the first job. `given`: by card, nodes of the inference pool that train for good instead."""
    pools = (Pool(TRAINING, PoolKind.TRAINING, {"pool": TRAINING}),
             Pool(INFERENCE, PoolKind.INFERENCE, {"pool": INFERENCE}))
    world = new_world(Config("lending", pools, (Queue(QUEUE, TRAINING),), rules), coefficients())
    for event in _inventory(given):
        world = apply(world, event)
    return world


def _inventory(given: dict[str, int]) -> Iterator[Event]:
    for card, count in OWN_NODES.items():
        for index in range(count):
            yield _node(f"own-{card}-{index}", card, TRAINING)
    for card, count in SERVING_NODES.items():
        for index in range(count):
            name = f"inf-{card}-{index}"
            if index >= count - given.get(card, 0):
                yield _node(name, card, TRAINING)
                continue
            yield _node(name, card, INFERENCE)
            node = Node(name, card, DEVICES_A_NODE)
            for first in range(0, DEVICES_A_NODE, DEVICES_A_REPLICA):
                devices = node.device_ids[first:first + DEVICES_A_REPLICA]
                backend = Backend(f"{name}-r{first // DEVICES_A_REPLICA}", INFERENCE, card, devices,
                                  reload_s=RELOAD_S[card])
                yield BackendReported(at_s=0.0, backend=backend)


def _node(name: str, card: str, pool: str) -> NodeReported:
    # One leaf for all: between nodes there is one network.
    node = Node(name, card, DEVICES_A_NODE, leaf="l", labels={"pool": pool})
    return NodeReported(at_s=0.0, node=node, evidence="new")


def devices_by_card() -> dict[str, int]:
    """All devices of the cluster."""
    cards = {*OWN_NODES, *SERVING_NODES}
    return {card: DEVICES_A_NODE * (OWN_NODES.get(card, 0) + SERVING_NODES.get(card, 0)) for card in sorted(cards)}


def own_units() -> float:
    """What the training pool's own devices are worth, in units."""
    return sum(DEVICES_A_NODE * count * coefficients().scalar(card) for card, count in OWN_NODES.items())


def all_units() -> float:
    """What all devices are worth, in units."""
    return sum(count * coefficients().scalar(card) for card, count in devices_by_card().items())


def price_per_hour() -> float:
    """Of all devices, busy or not."""
    return sum(count * PRICE_PER_DEVICE_HOUR[card] for card, count in devices_by_card().items())
