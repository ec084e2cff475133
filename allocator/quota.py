"""Who may use how much: Kueue's arithmetic of quotas that are lent and borrowed along a tree, and shares in units.

For one key (a card counted in devices, or `units`), at each node of a pool's tree of queues::

    local(q)     = max(0, subtree(q) - lending_limit(q))         never visible to the parent; 0 without a limit
    subtree(q)   = nominal(q) + Σ_children (subtree - local)
    usage(q)     = own runs + Σ_children max(0, usage - local)
    available(q) = max(0, local - usage)
                   + min(available(parent), (subtree - local) - max(0, usage - local) + borrowing_limit)
    available(pool) = subtree(pool) - usage(pool)

after Kueue's `pkg/cache/scheduler/resource_node.go`. A pool's own nominal is what it has beyond the promises to its
queues: healthy devices, less what it lent, plus what it borrowed. So a loan adds to what all may borrow and to
nobody's guarantee. `available` may be negative, where quotas were cut or devices died under running work; it is
shown and admits nothing.

The dominant share of a queue is in units, never in cards, for 12 borrowed K80 are less than 6 borrowed V100::

    borrowed(q) = Σ_card max(0, usage - nominal) · mean coefficient of the queue's runs on the card
    share(q)    = borrowed(q) / units that the pool can lend / weight
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf

from allocator.model.pools import UNITS, Config, Currency, Pool, Queue, Quota
from allocator.units.table import Coefficients

SLIVER = 1e-9
"""Units are floating point; a request this much over what is available is not over it."""

_NO_QUOTA = Quota(0.0)


@dataclass(frozen=True, slots=True)
class QueueTree:
    """The queues under one pool."""

    pool: Pool
    queues: Mapping[str, Queue]
    children: Mapping[str, tuple[str, ...]]
    bottom_up: tuple[str, ...] = ()
    """The queues, each after all that hang under it."""
    _promises: dict[str, tuple[dict[str, float], dict[str, float]]] = field(
        default_factory=dict, compare=False, repr=False)

    def promises(self, key: str) -> tuple[dict[str, float], dict[str, float]]:
        """`subtree` and `local` of every queue and the pool, from the declaration alone."""
        known = self._promises.get(key)
        if known is None:
            known = self._promises[key] = _promises(self, key)
        return known

    def path(self, name: str) -> list[str]:
        """The queue, and those that it hangs under, without the pool."""
        found = []
        while name in self.queues:
            found.append(name)
            name = self.queues[name].parent
        return found

    def quota(self, name: str, key: str) -> Quota:
        queue = self.queues.get(name)
        return queue.quotas.get(key, _NO_QUOTA) if queue else _NO_QUOTA


def tree_of(config: Config, pool: Pool) -> QueueTree:
    """The tree of a pool; queues that do not lead to it are not in it."""
    queues: dict[str, Queue] = {}
    children: dict[str, tuple[str, ...]] = {}
    frontier = [pool.name]
    while frontier:
        parent = frontier.pop()
        below = tuple(queue.name for queue in config.queues if queue.parent == parent and queue.name not in queues)
        children[parent] = below
        queues |= {queue.name: queue for queue in config.queues if queue.name in below}
        frontier += below
    return QueueTree(pool, queues, children, _bottom_up(children, pool.name))


def _bottom_up(children: Mapping[str, tuple[str, ...]], name: str) -> tuple[str, ...]:
    return tuple(found for child in children.get(name, ()) for found in (*_bottom_up(children, child), child))


def _promises(tree: QueueTree, key: str) -> tuple[dict[str, float], dict[str, float]]:
    subtree: dict[str, float] = {}
    local: dict[str, float] = {}
    for name in (*tree.bottom_up, tree.pool.name):
        quota = tree.quota(name, key)
        total = 0.0
        for child in tree.children.get(name, ()):
            total += subtree[child] - local[child]
        subtree[name] = total + quota.nominal
        local[name] = 0.0 if quota.lending_limit is None else max(0.0, subtree[name] - quota.lending_limit)
    return subtree, local


@dataclass(slots=True)
class Books:
    """One key of one tree at one moment: `own` usage by queue, `capacity` of the pool. `use` adds to it.

    Not frozen: a planning pass adds what it places. It is made from the runs for each pass and never kept.
    """

    tree: QueueTree
    key: str
    own: dict[str, float]
    subtree: dict[str, float]
    local: dict[str, float]
    usage: dict[str, float]

    def copied(self) -> "Books":
        """One that can be changed without changing this one."""
        return Books(self.tree, self.key, dict(self.own), dict(self.subtree), self.local, dict(self.usage))

    def use(self, name: str, amount: float) -> None:
        """Adds to a queue's own usage and to what its parents see of it; a negative amount takes away."""
        self.own[name] = self.own.get(name, 0.0) + amount
        usage, queues = self.usage, self.tree.queues
        while True:
            before = usage.get(name, 0.0)
            after = usage[name] = before + amount
            queue = queues.get(name)
            if queue is None:
                return
            local = self.local.get(name, 0.0)
            amount = (after - local if after > local else 0.0) - (before - local if before > local else 0.0)
            name = queue.parent

    def available(self, name: str) -> float:
        """What the queue may still take, borrowed included. May be negative."""
        queue = self.tree.queues.get(name)
        usage, subtree = self.usage.get(name, 0.0), self.subtree.get(name, 0.0)
        if queue is None:
            return subtree - usage
        local = self.local[name]
        above = self.available(queue.parent)
        limit = self.tree.quota(name, self.key).borrowing_limit
        if limit is not None:
            above = min(above, (subtree - local) - max(0.0, usage - local) + limit)
        return max(0.0, local - usage) + above

    def allowed(self, name: str) -> float:
        """What the borrowing limits alone still let the queue take, however little the pool has. What is over it waits
        for the queue's own jobs and not for devices."""
        queue = self.tree.queues.get(name)
        if queue is None:
            return inf
        usage, local, subtree = self.usage.get(name, 0.0), self.local[name], self.subtree[name]
        above = self.allowed(queue.parent)
        limit = self.tree.quota(name, self.key).borrowing_limit
        if limit is not None:
            above = min(above, (subtree - local) - max(0.0, usage - local) + limit)
        return max(0.0, local - usage) + above

    def most(self, name: str, more: float = 0.0) -> float:
        """What would be `available` if nobody used anything, of a pool with so much more. What is over it never
        comes, whoever ends: limits keep it away, or what other queues lend to nobody."""
        queue = self.tree.queues.get(name)
        if queue is None:
            return self.subtree.get(name, 0.0) + more
        local, above = self.local[name], self.most(queue.parent, more)
        limit = self.tree.quota(name, self.key).borrowing_limit
        return local + (above if limit is None else min(above, self.subtree[name] - local + limit))

    def borrowed(self, name: str, more: float = 0.0) -> float:
        """How far the queue's usage, with so much more, is over its guarantee. The one definition of a surplus."""
        over = self.usage.get(name, 0.0) + more - self.subtree.get(name, 0.0)
        return over if over > SLIVER else 0.0


def books(tree: QueueTree, key: str, own: Mapping[str, float], capacity: float) -> Books:
    """The books of one key, from the runs' usage by queue and what the pool has in all."""
    promised, local = tree.promises(key)
    root = tree.pool.name
    usage = {name: own.get(name, 0.0) for name in (*tree.bottom_up, root)}
    for name in tree.bottom_up:
        visible = usage[name] - local[name]
        if visible > 0.0:
            usage[tree.queues[name].parent] += visible
    kept = sum(promised[child] for child in tree.children.get(root, ()))
    subtree = {**promised, root: promised[root] + max(0.0, capacity - kept)}
    return Books(tree, key, dict(own), subtree, local, usage)


def keys_of(pool: Pool, cards: Iterable[str]) -> tuple[str, ...]:
    """The quota keys of a pool with these cards."""
    return (UNITS,) if pool.currency is Currency.UNITS else tuple(cards)


def key_of(pool: Pool, card: str) -> str:
    """The quota key that a run on this card counts against."""
    return UNITS if pool.currency is Currency.UNITS else card


def amount_of(pool: Pool, table: Coefficients, card: str, family: str, devices: int) -> float:
    """What a gang counts for in the pool's currency."""
    if pool.currency is Currency.CARDS:
        return float(devices)
    return devices * table.coefficient(card, family)


def share(borrowed_units: float, lendable_units: float, weight: float) -> float:
    """The dominant share: 0 where nothing is borrowed; infinite for a weight of 0, or where nothing is to lend."""
    if borrowed_units <= 0.0:
        return 0.0
    if weight <= 0.0 or lendable_units <= 0.0:
        return inf
    return borrowed_units / lendable_units / weight
