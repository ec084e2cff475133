"""Events about machines, declarations and what the router says of its backends."""

from dataclasses import replace
from math import isfinite

from allocator.applying.loans import lose_loans_on, repair_loans
from allocator.applying.runs import let_go
from allocator.events import (
    BackendGone,
    BackendReported,
    ClockRead,
    CoefficientsActivated,
    ConfigLoaded,
    DevicesJudged,
    NodeDown,
    NodeMoved,
    NodeReported,
    NodeUp,
    PoolEnding,
    SupplyReported,
)
from allocator.loan.loan import stepped
from allocator.loan.states import LoanState, Step
from allocator.model.declared import check_config, node_faults
from allocator.model.inventory import BackendState, Condition, Node, Supply, devices_of, node_name
from allocator.model.jobs import RunPhase
from allocator.model.pools import BadConfig, wanted_pool
from allocator.model.world import World
from allocator.units.table import BadCoefficients, check


def config_loaded(world: World, event: ConfigLoaded) -> World | str:
    try:
        config = check_config(event.config, world.nodes.values(), world.coefficients)
    except BadConfig as problem:
        return str(problem)
    return _resettled(world.evolved(config=config), event.at_s)


def coefficients_activated(world: World, event: CoefficientsActivated) -> World | str:
    version = event.table.version
    known = world.tables.get(version)
    if known is not None and known != event.table:
        return f"coefficients {version} are known with other values; a change needs a new version"
    try:
        check(event.table)
    except BadCoefficients as problem:
        return str(problem)
    missing = sorted({node.card for node in world.nodes.values() if not event.table.knows(node.card)})
    if missing:
        return f"coefficients {version} do not know {', '.join(missing)}, of which there are nodes"
    return world.evolved(tables={**world.tables, version: event.table}, active=version)


def clock_read(world: World, event: ClockRead) -> World | str:
    if not isfinite(event.wall_s):
        return "the wall clock reads no number"
    return world.evolved(wall_offset_s=event.wall_s - event.at_s)


def node_reported(world: World, event: NodeReported) -> World | str:
    node = event.node
    faults = node_faults(world.config, node, world.coefficients)
    if faults:
        return "; ".join(faults)
    known = world.nodes.get(node.name)
    wanted = wanted_pool(world.config, node.labels, world.wall_s(event.at_s))
    if known is not None:
        if replace(known, labels=node.labels, pool=None) != replace(node, pool=None) and not idle(world, known):
            return f"node {node.name} is in use; what it is made of cannot change under a run or a loan"
        pool = wanted if idle(world, known) else known.pool
    else:
        pool = wanted
    conditions, cordoned = world.conditions, world.cordoned
    if known is None or known.devices != node.devices:
        kept = {device: condition for device, condition in conditions.items() if node_name(device) != node.name}
        fresh = () if event.evidence else node.device_ids
        conditions = {**kept, **dict.fromkeys(fresh, Condition.QUARANTINED)}
        cordoned = frozenset(device for device in cordoned if node_name(device) != node.name)
    relabelled = known is None or known.labels != node.labels
    return world.evolved(nodes={**world.nodes, node.name: replace(node, pool=pool)}, conditions=conditions,
                         cordoned=cordoned, labels=world.labels + relabelled)


def idle(world: World, node: Node) -> bool:
    """Whether nothing of its pool is left on a node: no run, no loan, no claim, no backend."""
    devices = set(node.device_ids)
    return (devices.isdisjoint(world.holders) and devices.isdisjoint(world.loaned)
            and devices.isdisjoint(world.claimed)
            and all(devices.isdisjoint(backend.devices) for backend in world.backends.values()))


def _resettled(world: World, now_s: float) -> World:
    """Idle nodes go to the pool that wants them; the others wait for `NodeMoved`."""
    wall_s = world.wall_s(now_s)
    nodes = dict(world.nodes)
    for name, node in world.nodes.items():
        pool = wanted_pool(world.config, node.labels, wall_s)
        if pool != node.pool and idle(world, node):
            nodes[name] = replace(node, pool=pool)
    return world.evolved(nodes=nodes) if nodes != world.nodes else world


def node_moved(world: World, event: NodeMoved) -> World | str:
    node = world.nodes.get(event.node)
    if node is None or not idle(world, node):
        return f"node {event.node} is unknown or in use"
    if node.pool == event.pool or wanted_pool(world.config, node.labels, world.wall_s(event.at_s)) != event.pool:
        return f"node {event.node} does not belong in pool {event.pool}, or is there already"
    return world.evolved(nodes={**world.nodes, node.name: replace(node, pool=event.pool)})


def node_down(world: World, event: NodeDown) -> World | str:
    """Its devices are offline. Runs over it are broken, and let go of what is offline; its loans are lost."""
    node = world.nodes.get(event.node)
    if node is None:
        return f"node {event.node} is unknown"
    devices = frozenset(node.device_ids)
    if all(world.conditions.get(device) is Condition.OFFLINE for device in devices):
        return f"node {event.node} is down already"
    cordoned = {device for device in devices if world.conditions.get(device) is Condition.CORDONED}
    world = world.evolved(conditions={**world.conditions, **dict.fromkeys(node.device_ids, Condition.OFFLINE)},
                          cordoned=world.cordoned | cordoned)
    for run in [run for run in world.runs.values() if not devices.isdisjoint(run.devices)]:
        if run.phase in (RunPhase.STARTING, RunPhase.RUNNING):
            run = replace(run, phase=RunPhase.BROKEN)
        world = let_go(world, run, devices, event.at_s)
    return lose_loans_on(world, devices, event.at_s)


def node_up(world: World, event: NodeUp) -> World | str:
    node = world.nodes.get(event.node)
    if node is None:
        return f"node {event.node} is unknown"
    back = [device for device in node.device_ids if world.conditions.get(device) is Condition.OFFLINE]
    if not back:
        return f"node {event.node} was not down"
    return world.evolved(conditions={**world.conditions, **dict.fromkeys(back, Condition.QUARANTINED)})


def devices_judged(world: World, event: DevicesJudged) -> World | str:
    conditions, cordoned = dict(world.conditions), set(world.cordoned)
    for device in event.devices:
        node = world.nodes.get(node_name(device))
        if node is None or device not in devices_of(node.name, node.devices):
            return f"device {device} is unknown"
        was = conditions.get(device, Condition.HEALTHY)
        is_stricter = was not in (Condition.HEALTHY, Condition.CORDONED)
        if event.condition is Condition.CORDONED and is_stricter:
            cordoned.add(device)    # only a cordon is lifted without evidence: what is stricter stays, and ends first
        elif event.condition is not Condition.HEALTHY:
            if was is Condition.CORDONED and event.condition is not Condition.CORDONED:
                cordoned.add(device)
            conditions[device] = event.condition
        elif not is_stricter:
            conditions.pop(device, None)
        elif not event.evidence:
            if device not in cordoned:
                return f"device {device}: leaving quarantine takes evidence that it is idle"
            cordoned.discard(device)
        elif device in world.holders:
            return f"device {device} is held by run {world.holders[device]}; prove that run gone first"
        elif device in cordoned:
            cordoned.discard(device)
            conditions[device] = Condition.CORDONED
        else:
            del conditions[device]
    if conditions == world.conditions and cordoned == world.cordoned:
        return "nothing changes"
    return repair_loans(world.evolved(conditions=conditions, cordoned=frozenset(cordoned)), event.at_s)


def backend_reported(world: World, event: BackendReported) -> World | str:
    """The router's word on a backend. RELEASED moves its offer on; serving again without being asked ends the offer."""
    backend = event.backend
    faults = _backend_fault(world, event)
    if faults:
        return faults
    world = world.evolved(backends={**world.backends, backend.name: backend})
    loan = world.loans.get(backend.name)
    if loan is None or loan.state is not LoanState.OFFERED:
        return world
    if backend.state is BackendState.RELEASED and not loan.released:
        after = stepped(loan, Step.RELEASED, event.at_s, empty=True)
        assert after is not None  # the table has the row
        return world.evolved(loans={**world.loans, loan.id: after})
    return world


def _backend_fault(world: World, event: BackendReported) -> str | None:
    backend = event.backend
    known = world.backends.get(backend.name)
    if known is not None and known.devices != backend.devices and backend.name in world.loans:
        return f"backend {backend.name} is on loan; its devices cannot change meanwhile"
    if not backend.devices or len(set(backend.devices)) != len(backend.devices):
        return f"backend {backend.name} needs devices, each once"
    for device in backend.devices:
        node = world.nodes.get(node_name(device))
        if node is None or device not in devices_of(node.name, node.devices):
            return f"backend {backend.name}: device {device} is unknown"
        if node.card != backend.card or node.pool != backend.pool:
            return (f"backend {backend.name}: device {device} is a {node.card} of pool {node.pool}, "
                    f"not a {backend.card} of {backend.pool}")
        if world.loaned.get(device, backend.name) != backend.name:
            return f"backend {backend.name}: device {device} is on loan as part of {world.loaned[device]}"
    others = {device: other.name for other in world.backends.values() if other.name != backend.name
              for device in other.devices}
    shared = next((device for device in backend.devices if device in others), None)
    return f"backend {backend.name}: device {shared} is under {others[shared]} too" if shared else None


def backend_gone(world: World, event: BackendGone) -> World | str:
    if event.backend not in world.backends:
        return f"backend {event.backend} is unknown"
    if event.backend in world.loans:
        return f"backend {event.backend} is on loan; it can go when its loan is over"
    return world.evolved(backends={name: backend for name, backend in world.backends.items() if name != event.backend})


def supply_reported(world: World, event: SupplyReported) -> World | str:
    supply = event.supply
    if supply.lendable < 0:
        return f"supply of {supply.pool}: lendable {supply.lendable} must not be negative"
    key = (supply.pool, supply.card)
    known = world.supplies.get(key)
    held = known.held_since_s[:supply.lendable] if known else ()
    held += (event.at_s,) * (supply.lendable - len(held))
    taken = Supply(supply.pool, supply.card, supply.lendable, supply.spare, event.at_s, held)
    changes: dict[str, object] = {"supplies": {**world.supplies, key: taken}}
    if event.by_hand and key in world.kept:
        changes["kept"] = {other: kept for other, kept in world.kept.items() if other != key}
    return world.evolved(**changes)


def pool_ending(world: World, event: PoolEnding) -> World | str:
    if event.pool in world.warned:
        return f"the end of pool {event.pool} was announced before"
    return world.evolved(warned=world.warned | {event.pool})
