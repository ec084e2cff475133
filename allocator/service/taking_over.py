"""A file's declaration against the world as it is: the events that bring one to the other, or why they must not.

Pure. All of them are tried on the world first; where one is refused, none happens, so an edited file is taken over
whole or not at all, also in the middle of a recall (F19).
"""

from collections.abc import Iterable, Sequence

from allocator.apply import consider
from allocator.applying.inventory import idle
from allocator.events import CoefficientsActivated, ConfigLoaded, Event, NodeDown, NodeReported, NodeUp
from allocator.model.inventory import Condition, Node
from allocator.model.pools import Config
from allocator.model.world import World
from allocator.units.table import Coefficients


class Refused(Exception):
    """The file cannot be taken over now; one sentence a line says why."""


def takeover(world: World, config: Config, nodes: Sequence[Node], table: Coefficients, now_s: float,
             proven: Iterable[str] = ()) -> list[Event]:
    """The events, none where nothing has changed. `proven`: new nodes whose devices were seen to be idle.

    Raises:
        Refused: with every reason that there is.
    """
    gone = _gone(world, nodes, now_s)
    tables: list[Event] = [] if world.active == table.version and world.coefficients == table else [
        CoefficientsActivated(at_s=now_s, table=table)]
    configs: list[Event] = [] if world.config == config else [ConfigLoaded(at_s=now_s, config=config)]
    seen = set(proven)
    machines: list[Event] = [
        NodeReported(at_s=now_s, node=node, evidence="no process on its devices" if node.name in seen else "")
        for node in nodes if _differs(world, node)]
    # Selectors and labels may change together; neither order alone serves both an old label and a new one.
    fault = ""
    for order in ([*tables, *configs, *machines], [*tables, *machines, *configs], [*configs, *machines, *tables]):
        fault = _first_refusal(world, [*order, *gone])
        if not fault:
            return [*order, *gone, *_back(world, nodes, now_s)]
    raise Refused(fault)


def _differs(world: World, node: Node) -> bool:
    known = world.nodes.get(node.name)
    if known is None:
        return True
    mine = (node.card, node.devices, node.memory_gb, node.island_devices, node.leaf, node.pod, node.site, node.labels)
    return mine != (known.card, known.devices, known.memory_gb, known.island_devices, known.leaf, known.pod, known.site,
                    known.labels)


def _gone(world: World, nodes: Sequence[Node], now_s: float) -> list[Event]:
    """Nodes that are no longer declared: out of service, where nothing is left on them."""
    declared = {node.name for node in nodes}
    events: list[Event] = []
    faults = []
    for name, node in world.nodes.items():
        if name in declared or all(world.conditions.get(device) is Condition.OFFLINE for device in node.device_ids):
            continue
        if not idle(world, node):
            faults.append(f"node {name} is no longer in the file, but in use; cordon it, and take it out once it is "
                          "idle and no backend is on it")
        events.append(NodeDown(at_s=now_s, node=name, detail="no longer declared"))
    if faults:
        raise Refused("\n".join(faults))
    return events


def _back(world: World, nodes: Sequence[Node], now_s: float) -> list[Event]:
    """Nodes that are declared again. They stay in quarantine until proven idle."""
    return [NodeUp(at_s=now_s, node=node.name) for node in nodes
            if node.name in world.nodes and world.nodes[node.name].pool is None
            and all(world.conditions.get(device) is Condition.OFFLINE for device in node.device_ids)]


def _first_refusal(world: World, events: Iterable[Event]) -> str:
    for event in events:
        after = consider(world, event)
        if isinstance(after, str):
            return after
        world = after
    return ""
