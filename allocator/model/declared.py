"""The lint of a declaration: every fault at once, in words that say what, where and what to do."""

from collections import Counter
from collections.abc import Iterable

from allocator.model.inventory import Node
from allocator.model.pools import (
    UNITS,
    BadConfig,
    Config,
    Currency,
    Pool,
    PoolKind,
    Quota,
    matching_pools,
    pool_of_queue,
)
from allocator.units.table import Coefficients


def check_config(config: Config, nodes: Iterable[Node] = (), coefficients: Coefficients | None = None) -> Config:
    """The declaration itself where it may be used with these nodes.

    Raises:
        BadConfig: see the message; one line a fault.
    """
    faults = [*_doubles(config), *_pool_faults(config), *_queue_faults(config), *_rule_faults(config)]
    for node in nodes:
        faults += node_faults(config, node, coefficients)
    if faults:
        raise BadConfig(f"config {config.version!r} cannot be used:\n" + "\n".join(f"- {fault}" for fault in faults))
    return config


def oddities(config: Config, nodes: Iterable[Node], coefficients: Coefficients) -> list[str]:
    """What may be meant so, and probably is not: guarantees for which a pool has not the devices."""
    have: dict[tuple[str, str], float] = {}
    for node in nodes:
        for name in matching_pools(config.pools, node.labels):
            pool = config.pool(name)
            key = UNITS if pool is not None and pool.currency is Currency.UNITS else node.card
            amount = node.devices * (coefficients.scalar(node.card) if key == UNITS else 1.0)
            have[name, key] = have.get((name, key), 0.0) + amount
    promised: dict[tuple[str, str], float] = {}
    for queue in config.queues:
        pool = pool_of_queue(config, queue.name)
        if pool is None:
            continue
        for key, quota in queue.quotas.items():
            promised[pool.name, key] = promised.get((pool.name, key), 0.0) + quota.nominal
    return [f"pool {name}: its queues are promised {total:g} {key} in all, and it has {have.get((name, key), 0.0):g}; "
            "the rest of the guarantee can only come from loans"
            for (name, key), total in promised.items() if total > have.get((name, key), 0.0) + 1e-9]


def node_faults(config: Config, node: Node, coefficients: Coefficients | None) -> list[str]:
    """What is wrong with a node under this declaration."""
    faults = []
    pools = matching_pools(config.pools, node.labels)
    if len(pools) > 1:
        faults.append(f"node {node.name}: its labels put it in two pools, {' and '.join(pools)}; change a selector")
    if coefficients is not None and not coefficients.knows(node.card):
        faults.append(f"node {node.name}: card {node.card!r} is not in the coefficients {coefficients.version}; "
                      f"measure it, or use its name there ({', '.join(sorted(coefficients.cards))})")
    if node.devices < 1 or node.memory_gb <= 0:
        faults.append(f"node {node.name}: needs at least one device, with memory")
    if node.island_devices < 0 or (node.island_devices and node.devices % node.island_devices):
        faults.append(f"node {node.name}: {node.devices} devices do not divide into islands of {node.island_devices}")
    return faults


def _doubles(config: Config) -> list[str]:
    names = Counter([pool.name for pool in config.pools] + [queue.name for queue in config.queues])
    return [f"{name!r} is declared {count} times; pools and queues share one namespace"
            for name, count in names.items() if count > 1]


def _pool_faults(config: Config) -> list[str]:
    faults = []
    for pool in config.pools:
        if not pool.selector:
            faults.append(f"pool {pool.name}: an empty selector would take every node")
        if pool.kind is PoolKind.ENCLAVE and not (pool.reason and pool.review_on):
            faults.append(f"pool {pool.name}: an enclave needs a reason and a review_on date")
        if pool.kind is PoolKind.TRANSITIONAL:
            faults += _transitional_faults(config, pool)
    return faults


def _transitional_faults(config: Config, pool: Pool) -> list[str]:
    start, end = pool.starts_wall_s, pool.ends_wall_s
    if start is None or end is None or not start < end:
        return [f"pool {pool.name}: a transitional pool needs a start and a later end"]
    if config.pool(pool.then_pool) is None or pool.then_pool == pool.name:
        return [f"pool {pool.name}: then_pool must name another pool, for its nodes at the end"]
    return []


def _queue_faults(config: Config) -> list[str]:
    faults = []
    for queue in config.queues:
        pool = pool_of_queue(config, queue.name)
        if pool is None:
            faults.append(f"queue {queue.name}: its parents do not lead to a pool")
            continue
        if pool.kind is PoolKind.INFERENCE:
            faults.append(f"queue {queue.name}: pool {pool.name} is for inference and runs no jobs; "
                          "hang it under a training pool, which borrows")
        if not 0 <= queue.weight < float("inf"):
            faults.append(f"queue {queue.name}: weight {queue.weight} must be finite and not negative")
        for key, quota in queue.quotas.items():
            if (key == UNITS) != (pool.currency is Currency.UNITS):
                faults.append(f"queue {queue.name}: quota for {key!r}, but pool {pool.name} counts in {pool.currency}")
            faults += _quota_faults(f"queue {queue.name}, quota {key}", quota)
    return faults


def _quota_faults(where: str, quota: Quota) -> list[str]:
    limits = {"nominal": quota.nominal, "lending_limit": quota.lending_limit, "borrowing_limit": quota.borrowing_limit}
    return [f"{where}: {name} {value} must be finite and not negative" for name, value in limits.items()
            if value is not None and not 0 <= value < float("inf")]


def _rule_faults(config: Config) -> list[str]:
    rules = config.rules
    faults = [f"rules: {name} {getattr(rules, name)} must not be negative" for name in rules.__dataclass_fields__
              if not getattr(rules, name) >= 0]
    if rules.kill_margin_s >= rules.grace_s:
        faults.append(f"rules: kill_margin_s {rules.kill_margin_s} leaves nothing of grace_s {rules.grace_s}")
    if rules.patience < 1:
        faults.append(f"rules: patience {rules.patience} must be at least 1")
    if rules.site_gbps == 0:
        faults.append("rules: site_gbps must be above 0")
    return faults
