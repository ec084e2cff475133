"""The allocator file as a whole, checked for what single settings cannot see, and what it declares."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from allocator.execution.devices import VISIBILITY, Device
from allocator.model.declared import check_config
from allocator.model.inventory import Backend, Node, Supply
from allocator.model.pools import BadConfig, Config
from allocator.service.sections import (
    BackendSection,
    CardSection,
    ExecutionSection,
    LinkSection,
    ListenSection,
    NodeSection,
    PoolSection,
    QueueSection,
    RouterSection,
    RulesSection,
    StoreSection,
    SupplySection,
)
from allocator.units.load import load, shipped
from allocator.units.table import Coefficients
from settings.fields import Section, Text
from settings.problems import Finding, validation_error
from settings.source import Loc


class AllocatorConfig(Section):
    """A whole allocator file."""

    version: Literal[1] = Field(description="Version of this format.", examples=[1])
    listen: ListenSection = Field(default=ListenSection(), description="Where the API is.", examples=[{"port": 8082}])
    state: Text = Field(
        default=".headrace/allocator", description="Folder for the records of runs, beside this file unless absolute; "
                                                   "must survive a restart.", examples=["/var/lib/headrace"])
    store: StoreSection = Field(default=StoreSection(), description="Where the journal is kept.", examples=[{}])
    execution: ExecutionSection = Field(
        default=ExecutionSection(), description="What runs the jobs.", examples=[{"engine": "local"}])
    coefficients: Text | None = Field(
        default=None, description="File with normalised units by (card, family); left out: Gavel's table.",
        examples=["units.json"])
    currency: Text = Field(default="USD", description="Unit of every price; a name only.", examples=["USD"])
    cards: Annotated[tuple[CardSection, ...], Field(max_length=1_000)] = Field(
        default=(), strict=False, description="What cards cost.", examples=[[{"name": "v100"}]])
    nodes: Annotated[tuple[NodeSection, ...], Field(min_length=1, max_length=10_000)] = Field(
        strict=False, description="The machines.", examples=[[{"name": "gpu-07", "card": "v100", "devices": 8}]])
    pools: Annotated[tuple[PoolSection, ...], Field(min_length=1, max_length=1_000)] = Field(
        strict=False, description="What the machines are for.",
        examples=[[{"name": "training", "kind": "training", "selector": {"purpose": "training"}}]])
    queues: Annotated[tuple[QueueSection, ...], Field(max_length=10_000)] = Field(
        default=(), strict=False, description="Where jobs wait.",
        examples=[[{"name": "research", "parent": "training"}]])
    backends: Annotated[tuple[BackendSection, ...], Field(max_length=10_000)] = Field(
        default=(), strict=False, description="Inference replicas.", examples=[[{"name": "chat-0"}]])
    router: RouterSection | None = Field(
        default=None, description="The router that serves these backends; left out: `supplies` say what can be spared.",
        examples=[{"url": "http://127.0.0.1:9090"}])
    supplies: Annotated[tuple[SupplySection, ...], Field(max_length=1_000)] = Field(
        default=(), strict=False, description="What inference pools can do without.", examples=[[{"lendable": 2}]])
    rules: RulesSection = Field(default=RulesSection(), description="Times and thresholds.", examples=[{"grace_s": 60}])
    links: Annotated[tuple[LinkSection, ...], Field(max_length=10_000)] = Field(
        default=(), strict=False, description="Bandwidth between sites.", examples=[[{"gbps": 100.0}]])

    @model_validator(mode="after")
    def _fits_together(self) -> "AllocatorConfig":
        if findings := list(contradictions(self)):
            raise validation_error(findings)
        return self

    def declaration(self) -> Config:
        """What the core knows of the file."""
        return Config(
            self.content_hash(), tuple(pool.pool() for pool in self.pools),
            tuple(queue.queue() for queue in self.queues), self.rules.rules(),
            {f"{link.source}>{link.target}": link.gbps for link in self.links})

    def content_hash(self) -> str:
        """12 hex digits that name what decides: comments, layout, listeners and prices do not change them."""
        deciding = self.model_dump(mode="json", include={"pools", "queues", "rules", "links"})
        return hashlib.sha256(json.dumps(deciding, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class Declared:
    """A file that was read, checked and built: ready to be taken over."""

    config: AllocatorConfig
    folder: Path
    """Relative paths start here."""
    declaration: Config
    coefficients: Coefficients

    @property
    def nodes(self) -> tuple[Node, ...]:
        return tuple(node.node() for node in self.config.nodes)

    @property
    def backends(self) -> tuple[Backend, ...]:
        cards = self.card_of
        return tuple(backend.backend(cards[backend.devices[0]]) for backend in self.config.backends)

    @property
    def supplies(self) -> tuple[Supply, ...]:
        return tuple(supply.supply() for supply in self.config.supplies)

    @property
    def card_of(self) -> Mapping[str, str]:
        """Device → its card."""
        return {device: node.card for node in self.nodes for device in node.device_ids}

    @property
    def device_of(self) -> Mapping[str, Device]:
        """The core's name of a device → what the execution engine knows it by."""
        return {name: Device(node.vendor, vendor_id) for node in self.config.nodes
                for name, vendor_id in zip(node.node().device_ids, node.vendor_ids(), strict=True)}

    @property
    def state(self) -> Path:
        return self.folder / self.config.state

    @property
    def price_per_hour(self) -> Mapping[str, float]:
        """Card → money for one device and hour."""
        return {card.name: card.per_hour for card in self.config.cards}

    def store_url(self, environ: Mapping[str, str]) -> str:
        """Raises KeyError where the variable that holds it is not set."""
        if self.config.store.url_env is not None:
            return environ[self.config.store.url_env]
        return f"sqlite:///{self.journal_file}"

    @property
    def journal_file(self) -> Path | None:
        """The SQLite file with the journal; `None` where it is in another database."""
        given = self.config.store
        if given.url_env is not None:
            return None
        return (self.folder / given.path if given.path else self.state / "allocator.db").absolute()


def build(config: AllocatorConfig, folder: Path) -> tuple[Declared | None, list[Finding]]:
    """What a valid file declares, or what is wrong with the parts of it together. Reads the coefficients.

    Raises:
        BadCoefficients: the coefficients file cannot be used.
    """
    table = shipped() if config.coefficients is None else load(str(folder / config.coefficients))
    declared = Declared(config, folder, config.declaration(), table)
    try:
        check_config(declared.declaration, declared.nodes, table)
    except BadConfig as problem:
        return None, [_found(config, line[2:]) for line in str(problem).splitlines()[1:]]
    return declared, []


def _found(config: AllocatorConfig, fault: str) -> Finding:
    """A sentence of the core's lint with the place that it is about: `node x`, `pool x`, `queue x` or `rules: x`."""
    kind, _, rest = fault.partition(" ")
    if kind == "rules:":
        setting, _, said = rest.partition(" ")
        return Finding(("rules", setting), said)
    name, _, message = rest.partition(": ")
    name, _, detail = name.partition(", ")
    known: dict[str, Iterable[str]] = {
        "node": (node.name for node in config.nodes), "pool": (pool.name for pool in config.pools),
        "queue": (queue.name for queue in config.queues)}
    for index, other in enumerate(known.get(kind, ())):
        if other == name:
            return Finding((f"{kind}s", index), f"{detail}: {message}" if detail else message)
    return Finding((), fault)


def contradictions(config: AllocatorConfig) -> Iterator[Finding]:
    """All that makes the parts of a file unfit for each other, beside what the core's lint finds."""
    for section in ("nodes", "backends", "cards"):
        yield from _doubles(section, [entry.name for entry in getattr(config, section)])
    yield from _of_nodes(config)
    yield from _of_backends(config)
    pools = {pool.name: pool.kind for pool in config.pools}
    for index, supply in enumerate(config.supplies):
        if pools.get(supply.pool) != "inference":
            yield Finding(("supplies", index, "pool"), "names no inference pool of this file")
    yield from _of_router(config)
    if config.listen.token_env is None and not _is_loopback(config.listen.host):
        yield Finding(("listen", "host"), "is not loopback, and no token is asked for: anybody could run programs here",
                      "name an environment variable with a token in listen.token_env")
    if config.store.path is not None and config.store.url_env is not None:
        yield Finding(("store", "path"), "stands beside url_env: the journal is kept in one place", "keep one of them")
    if config.execution.kill_margin_s >= config.rules.grace_s:
        yield Finding(("execution", "kill_margin_s"), f"leaves nothing of rules.grace_s, {config.rules.grace_s:g}")


def _of_router(config: AllocatorConfig) -> Iterator[Finding]:
    if config.router is None:
        return
    if not config.backends:
        yield Finding(("router",), "has no backends to lend", "list them under backends, by the fleet file's names")
    for index, backend in enumerate(config.backends):
        if backend.command is None:
            yield Finding(("backends", index), "needs a command: the router lets a replica go and starts no engine",
                          "give the command that starts its engine, which the allocator then keeps")


def _doubles(section: str, names: list[str]) -> Iterator[Finding]:
    counted = Counter(names)
    for index, name in enumerate(names):
        if counted[name] > 1 and names.index(name) < index:
            yield Finding((section, index, "name"), f"is already {section}[{names.index(name)}]",
                          "names must be unique")


def _of_nodes(config: AllocatorConfig) -> Iterator[Finding]:
    taken: dict[Any, str] = {}
    for index, node in enumerate(config.nodes):
        if node.vendor not in VISIBILITY:
            yield Finding(("nodes", index, "vendor"), f"is not a known vendor: {node.vendor}",
                          f"known here: {', '.join(sorted(VISIBILITY))}")
        if node.device_ids and len(node.device_ids) != node.devices:
            yield Finding(("nodes", index, "device_ids"),
                          f"names {len(node.device_ids)} devices, the node has {node.devices}")
            continue
        for vendor_id in node.vendor_ids():
            other = taken.setdefault((node.vendor, vendor_id), node.name)
            if other != node.name or node.vendor_ids().count(vendor_id) > 1:
                yield Finding(("nodes", index, "device_ids"),
                              f"device {vendor_id} of {node.vendor} is on {other} as well",
                              "the local engine runs on one machine: give each device its own id")
                break


def _of_backends(config: AllocatorConfig) -> Iterator[Finding]:
    nodes = {device: node for node in config.nodes for device in node.node().device_ids}
    kinds = {pool.name: pool.kind for pool in config.pools}
    taken: dict[str, str] = {}
    for index, backend in enumerate(config.backends):
        if kinds.get(backend.pool) != "inference":
            yield Finding(("backends", index, "pool"), "names no inference pool of this file")
        cards = set()
        for position, device in enumerate(backend.devices):
            loc: Loc = ("backends", index, "devices", position)
            if device not in nodes:
                yield Finding(loc, f"{device} is no device of a node of this file", "devices are named node:index")
                continue
            cards.add(nodes[device].card)
            if device in taken:
                yield Finding(loc, f"{device} is under {taken[device]} already")
            taken[device] = backend.name
        if len(cards) > 1:
            yield Finding(("backends", index, "devices"), f"are of several cards: {', '.join(sorted(cards))}")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
