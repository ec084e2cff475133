"""Which devices a gang gets: the lowest level of the topology with one domain that holds it, packed tightly.

Levels: island (NVLink domain, HCCS ring), node, leaf, pod, site. On the lowest level where some domain has enough free
devices, the fullest such domain is taken (best fit), so that large holes stay large. Over several nodes a gang takes
as few as it can, in equal parts where it divides (all-to-all then waits for no one), else whole nodes first and the
rest by best fit. Spread-out gangs on V100 run at a median 0.42 of the packed speed in Gavel's measurements.

Feasibility is monotone: devices added to the free ones never make a gang that fits not fit. Reservations search by
halves because of it.
"""

from collections.abc import Iterable, Mapping

from allocator.model.inventory import Node
from allocator.model.jobs import Level
from allocator.picture import Free


def place(nodes: Mapping[str, Node], free: Free, devices: int, widest: Level = Level.SITE) -> tuple[str, ...] | None:
    """Devices for a gang of that size, or `None`. All nodes of `free` must be of one card type."""
    if devices < 1 or sum(map(len, free.values())) < devices:
        return None
    fitting = [(len(found), name) for name, found in free.items() if len(found) >= devices]
    if fitting:
        return _in_one_node(nodes, free, fitting, devices, widest)
    if widest < Level.LEAF:
        return None
    for level in (Level.LEAF, Level.POD, Level.SITE):
        if level > widest:
            return None
        domains: dict[tuple[str, ...], list[str]] = {}
        for name in free:
            domains.setdefault(domain_of(nodes[name], level), []).append(name)
        sized = sorted((sum(len(free[name]) for name in names), domain) for domain, names in domains.items())
        for total, domain in sized:
            if total >= devices:
                return _over_nodes(free, domains[domain], devices)
    return None


def domain_of(node: Node, level: Level) -> tuple[str, ...]:
    """The domain of a level that a node lies in: no gang kept to that level spans more. Islands count as their node."""
    if level <= Level.NODE:
        return (node.name,)
    if level is Level.LEAF:
        return (node.site, node.pod, node.leaf)
    return (node.site, node.pod) if level is Level.POD else (node.site,)


def _in_one_node(nodes: Mapping[str, Node], free: Free, fitting: list[tuple[int, str]], devices: int,
                 widest: Level) -> tuple[str, ...] | None:
    best: tuple[int, int, str, list[str]] | None = None
    for left, name in fitting:
        if not nodes[name].island_devices:
            candidate = (left, left, name, list(free[name]))
        else:
            whole = [island for island in _islands(nodes[name], free[name]) if len(island) >= devices]
            if not whole:
                continue
            island = min(whole, key=len)
            candidate = (len(island), left, name, island)
        if best is None or candidate[:3] < best[:3]:
            best = candidate
    if best is not None:
        return tuple(best[3][:devices])
    if widest < Level.NODE:
        return None
    _, name = min(fitting)
    taken: list[str] = []
    islands = sorted(_islands(nodes[name], free[name]), key=len, reverse=True)
    while len(taken) < devices:
        needed = devices - len(taken)
        enough = [island for island in islands if len(island) >= needed]
        island = min(enough, key=len) if enough else islands[0]
        islands.remove(island)
        taken += island[:needed]
    return tuple(sorted(taken, key=free[name].index))


def _islands(node: Node, free: Iterable[str]) -> list[list[str]]:
    islands: dict[int, list[str]] = {}
    size = node.island_devices or node.devices
    for device in free:
        islands.setdefault(int(device.rpartition(":")[2]) // size, []).append(device)
    return list(islands.values())


def _over_nodes(free: Free, names: list[str], devices: int) -> tuple[str, ...]:
    """From these nodes, which together have enough: as few of them as can be."""
    names = sorted(names, key=lambda name: (-len(free[name]), name))
    count, total = 0, 0
    while total < devices:
        total += len(free[names[count]])
        count += 1
    part, rest = divmod(devices, count)
    if not rest:
        able = [name for name in reversed(names) if len(free[name]) >= part]
        if len(able) >= count:
            return tuple(device for name in sorted(able[:count]) for device in free[name][:part])
    taken: list[str] = []
    for name in names[:count - 1]:
        taken += free[name]
    needed = devices - len(taken)
    last = min((name for name in names[count - 1:] if len(free[name]) >= needed), key=lambda n: (len(free[n]), n))
    return (*taken, *free[last][:needed])


def joined(first: Free, second: Mapping[str, tuple[str, ...]] | Free) -> Free:
    """Both, node by node."""
    if not second:
        return first
    both = dict(first)
    for name, devices in second.items():
        both[name] = _ordered((*both[name], *devices)) if name in both else devices
    return both


def without(free: Free, taken: Iterable[str]) -> Free:
    """What is left when these are taken."""
    gone = frozenset(taken)
    names = {device.rpartition(":")[0] for device in gone}
    if names.isdisjoint(free):
        return free
    left = dict(free)
    for name in names & left.keys():
        devices = tuple(device for device in left[name] if device not in gone)
        if devices:
            left[name] = devices
        else:
            del left[name]
    return left


def grouped(devices: Iterable[str]) -> Free:
    """Devices by node, in the order of their indices."""
    by_node: dict[str, list[str]] = {}
    for device in devices:
        by_node.setdefault(device.rpartition(":")[0], []).append(device)
    return {name: _ordered(found) for name, found in by_node.items()}


def _ordered(devices: Iterable[str]) -> tuple[str, ...]:
    found = tuple(devices)
    return found if len(found) < 2 else tuple(sorted(found, key=lambda device: int(device.rpartition(":")[2])))
