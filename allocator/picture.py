"""One world, worked out: which devices are free for whom, who uses how much, and who could do without.

Made once for a world and a time, remembered with the world. Everything in it follows from the world; nothing decides.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

from allocator.loan.states import AWAY, LoanState
from allocator.model.pools import UNITS, Pool, PoolKind, Queue, wanted_pool
from allocator.model.world import World
from allocator.quota import Books, QueueTree, amount_of, books, key_of, keys_of, share, tree_of
from allocator.units.table import Coefficients

Free = dict[str, tuple[str, ...]]
"""Node → its free devices in the order of their indices; nodes without any are left out."""


@dataclass(frozen=True, slots=True)
class Picture:
    from_s: float
    until_s: float
    """Past this time a transitional pool has opened or ended, and the picture is another."""
    open_pools: frozenset[str]
    free: Mapping[tuple[str, str], Free]
    """(pool, card) → its own devices that a run may have now."""
    lent_free: Mapping[tuple[str, str], Free]
    """(borrower, card) → devices of LENT loans that no run is on."""
    healthy: Mapping[tuple[str, str], int]
    """(pool, card) → healthy devices of its own, lent ones included."""
    inventory: Mapping[tuple[str, str], int]
    """(pool, card) → devices of its own in any condition."""
    lent_out: Mapping[tuple[str, str], int]
    borrowed_in: Mapping[tuple[str, str], int]
    offered_in: Mapping[tuple[str, str], int]
    trees: Mapping[str, QueueTree]

    def capacity(self, pool: str, card: str, *, with_offers: bool = False) -> int:
        """Healthy devices that the pool has at its disposal: own - lent + borrowed (I2)."""
        key = (pool, card)
        total = self.healthy.get(key, 0) - self.lent_out.get(key, 0) + self.borrowed_in.get(key, 0)
        return total + self.offered_in.get(key, 0) if with_offers else total

    _cards: dict[str, tuple[str, ...]] = field(default_factory=dict, compare=False, repr=False)

    def cards(self, pool: str) -> tuple[str, ...]:
        """The card types that the pool has, or has borrowed, or is offered."""
        known = self._cards.get(pool)
        if known is None:
            keys = {*self.inventory, *self.borrowed_in, *self.offered_in}
            known = self._cards[pool] = tuple(sorted(card for owner, card in keys if owner == pool))
        return known


def picture_of(world: World, now_s: float) -> Picture:
    """The picture of a world at a time."""
    known: Picture | None = world.memo.get("picture")
    if known is not None and known.from_s <= now_s < known.until_s:
        return known
    made = world.memo["picture"] = _picture(world, now_s)
    return made


def _picture(world: World, now_s: float) -> Picture:
    config, conditions = world.config, world.conditions
    wall_s = world.wall_s(now_s)
    bounds = [bound for pool in config.pools for bound in (pool.starts_wall_s, pool.ends_wall_s)
              if bound is not None and bound > wall_s]
    open_pools = frozenset(pool.name for pool in config.pools if _is_open(pool, wall_s))
    taken = {*world.holders, *world.loaned, *world.claimed}
    free: dict[tuple[str, str], Free] = defaultdict(dict)
    healthy: dict[tuple[str, str], int] = defaultdict(int)
    inventory: dict[tuple[str, str], int] = defaultdict(int)
    usable = {pool.name for pool in config.pools if pool.kind is not PoolKind.INFERENCE and pool.name in open_pools}
    until_s = now_s + (min(bounds) - wall_s) if bounds else inf
    wanted = wanted_pools(world, now_s)
    for name, node in world.nodes.items():
        if node.pool is None:
            continue
        key = (node.pool, node.card)
        inventory[key] += node.devices
        devices = node.device_ids
        if conditions:
            devices = tuple(device for device in devices if device not in conditions)
        healthy[key] += len(devices)
        # A node that its labels want elsewhere takes nothing new, so that it can go.
        if node.pool in usable and wanted[name] == node.pool:
            if taken:
                devices = tuple(device for device in devices if device not in taken)
            if devices:
                free[key][name] = devices
    lent_free, counts = _loaned(world)
    return Picture(
        from_s=now_s, until_s=until_s, open_pools=open_pools, free=free,
        lent_free=lent_free, healthy=healthy, inventory=inventory, lent_out=counts["out"], borrowed_in=counts["in"],
        offered_in=counts["offered"], trees=_trees(world))


def _is_open(pool: Pool, wall_s: float) -> bool:
    return (pool.kind is not PoolKind.TRANSITIONAL
            or (pool.starts_wall_s or 0.0) <= wall_s < (inf if pool.ends_wall_s is None else pool.ends_wall_s))


def wanted_pools(world: World, now_s: float) -> Mapping[str, str | None]:
    """Node → the pool where it belongs at this time. Nodes of one pool mostly have the same labels: looked up once."""
    known: tuple[float, float, Mapping[str, str | None]] | None = world.memo.get("wanted")
    if known is not None and known[0] <= now_s < known[1]:
        return known[2]
    wall_s = world.wall_s(now_s)
    ends = [pool.ends_wall_s for pool in world.config.pools if pool.ends_wall_s is not None]
    by_labels: dict[tuple[tuple[str, str], ...], str | None] = {}
    wanted = {}
    for name, node in world.nodes.items():
        labels = tuple(node.labels.items())
        if labels not in by_labels:
            by_labels[labels] = wanted_pool(world.config, node.labels, wall_s)
        wanted[name] = by_labels[labels]
    until_s = min((now_s + end - wall_s for end in ends if end > wall_s), default=inf)
    world.memo["wanted"] = (now_s, until_s, wanted)
    return wanted


def _loaned(world: World) -> tuple[Mapping[tuple[str, str], Free], dict[str, dict[tuple[str, str], int]]]:
    idle: dict[tuple[str, str], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    counts: dict[str, dict[tuple[str, str], int]] = {way: defaultdict(int) for way in ("out", "in", "offered")}
    holders, claimed, conditions = world.holders, world.claimed, world.conditions
    for loan in world.loans.values():
        borrower = (loan.borrower, loan.card)
        if loan.state is LoanState.OFFERED:
            counts["offered"][borrower] += len(loan.devices)
        if loan.state not in AWAY:
            continue
        healthy = [device for device in loan.devices if device not in conditions]
        counts["out"][loan.lender, loan.card] += len(healthy)
        counts["in"][borrower] += len(healthy)
        if loan.state is LoanState.LENT:
            for device in healthy:
                if device not in holders and device not in claimed:
                    idle[borrower][device.rpartition(":")[0]].append(device)
    return {key: {name: tuple(devices) for name, devices in nodes.items()} for key, nodes in idle.items()}, counts


def _trees(world: World) -> Mapping[str, QueueTree]:
    known: Mapping[str, QueueTree] | None = world.memo.get("trees")
    if known is None:
        known = world.memo["trees"] = {
            pool.name: tree_of(world.config, pool) for pool in world.config.pools
            if pool.kind is not PoolKind.INFERENCE}
    return known


@dataclass(slots=True)
class Ledger:
    """The books of one pool for one pass: how much each queue uses, may use, and owes, in the pool's currency."""

    pool: Pool
    tree: QueueTree
    table: Coefficients
    books: dict[str, Books]
    units: dict[tuple[str, str], float]
    """(queue, key) → the units of its runs there."""
    lendable_units: float
    changes: int = 0
    """How often it was changed since the pass began: whoever has worked something out from it can tell."""

    def copied(self) -> "Ledger":
        """One that can be changed without changing this one."""
        mine = {key: book.copied() for key, book in self.books.items()}
        return Ledger(self.pool, self.tree, self.table, mine, dict(self.units), self.lendable_units)

    def copied_for(self, card: str) -> "Ledger":
        """The same, for what happens on this card alone."""
        key = key_of(self.pool, card)
        mine = {**self.books, key: self.books[key].copied()}
        return Ledger(self.pool, self.tree, self.table, mine, dict(self.units), self.lendable_units)

    def counted(self, card: str, family: str, devices: int, table: Coefficients | None = None) -> tuple[float, float]:
        """What so many devices count for, in the pool's currency and in units."""
        table = table or self.table
        return amount_of(self.pool, table, card, family, devices), devices * table.coefficient(card, family)

    def use(self, queue: str, card: str, family: str, devices: int, table: Coefficients | None = None) -> None:
        """Counts so many more devices; a run is counted by the table that it is charged under."""
        key, table = key_of(self.pool, card), table or self.table
        self.changes += 1
        if key in self.books:
            self.books[key].use(queue, amount_of(self.pool, table, card, family, devices))
            self.units[queue, key] = self.units.get((queue, key), 0.0) + devices * table.coefficient(card, family)

    def grow(self, card: str, devices: int) -> None:
        """So many more devices for all to borrow: what a loan brings."""
        key = key_of(self.pool, card)
        self.changes += 1
        if key not in self.books:
            self.books[key] = books(self.tree, key, {}, 0.0)
        units = devices * self.table.scalar(card)
        amount = float(devices) if key == card else units
        root = self.books[key].subtree
        root[self.pool.name] = root.get(self.pool.name, 0.0) + amount
        self.lendable_units += units

    def borrows(self, queue: str, card: str, family: str, devices: int) -> bool:
        """Whether so many more devices would stand, wholly or in part, on what is not the queue's own."""
        book = self.books.get(key_of(self.pool, card))
        return book is None or book.borrowed(queue, amount_of(self.pool, self.table, card, family, devices)) > 0.0

    def admits(self, queue: str, card: str, family: str, devices: int) -> bool:
        key = key_of(self.pool, card)
        amount = amount_of(self.pool, self.table, card, family, devices)
        return key in self.books and amount <= self.books[key].available(queue) + 1e-9

    def within_limits(self, queue: str, card: str, family: str, devices: int) -> bool:
        """Whether the queue's borrowing limits leave room, however busy the pool is (`Books.allowed`)."""
        book = self.books.get(key_of(self.pool, card))
        amount = amount_of(self.pool, self.table, card, family, devices)
        return book is None or amount <= book.allowed(queue) + 1e-9

    def could_admit(self, queue: str, card: str, family: str, devices: int, more: Mapping[str, int]) -> bool:
        """Whether the quotas let a gang in once nobody uses anything (`Books.most`), with so many more devices by card
        at the pool's disposal."""
        key = key_of(self.pool, card)
        book = self.books.get(key) or books(self.tree, key, {}, 0.0)
        extra = (sum(count * self.table.scalar(other) for other, count in more.items()) if key == UNITS
                 else float(more.get(card, 0)))
        return amount_of(self.pool, self.table, card, family, devices) <= book.most(queue, extra) + 1e-9

    def share(self, queue: str) -> float:
        """The queue's dominant share, in units."""
        return self.share_of(queue, sum(self.borrowed_units(queue, key) for key in self.books))

    def share_of(self, queue: str, borrowed_units: float) -> float:
        """The share if the queue has borrowed so much of all keys together."""
        declared: Queue | None = self.tree.queues.get(queue)
        return share(borrowed_units, self.lendable_units, declared.weight if declared else 1.0)

    def borrowed_units(self, queue: str, key: str) -> float:
        """What the queue has borrowed of one key, in units."""
        book = self.books[key]
        used = book.own.get(queue, 0.0)
        over = min(used, book.borrowed(queue))
        return over / used * self.units.get((queue, key), 0.0) if over > 0.0 else 0.0


def ledger_of(world: World, pool: Pool, now_s: float) -> Ledger:
    """The books of a pool from its live runs: each is counted to its queue, wherever its devices come from (I8).

    The caller's own: the one that is remembered with the world stays as it is.
    """
    known: dict[str, Ledger] = world.memo.setdefault("ledgers", {})
    made = known.get(pool.name)
    if made is None:
        made = known[pool.name] = _ledger(world, picture_of(world, now_s), pool)
    return made.copied()


def _ledger(world: World, picture: Picture, pool: Pool) -> Ledger:
    tree, table = picture.trees[pool.name], world.coefficients
    cards = picture.cards(pool.name)
    own: dict[str, dict[str, float]] = defaultdict(dict)
    units: dict[tuple[str, str], float] = {}
    for run in world.runs.values():
        if run.pool != pool.name:
            continue
        key, devices = key_of(pool, run.card), len(run.devices)
        charged = world.tables.get(run.coefficients, table)
        queue = own[key]
        queue[run.queue] = queue.get(run.queue, 0.0) + amount_of(pool, charged, run.card, run.family, devices)
        units[run.queue, key] = (units.get((run.queue, key), 0.0)
                                 + devices * charged.coefficient(run.card, run.family))
    capacity = {card: picture.capacity(pool.name, card, with_offers=True) for card in cards}
    in_units = sum(count * table.scalar(card) for card, count in capacity.items())
    keys = {*keys_of(pool, cards), *own}
    made = {key: books(tree, key, own.get(key, {}), in_units if key == UNITS else float(capacity.get(key, 0)))
            for key in sorted(keys)}
    return Ledger(pool, tree, table, made, units, in_units)
