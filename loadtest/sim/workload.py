"""What happens in one simulated run, fixed before anything is decided: requests, their promises, faults and loans."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random
from typing import NamedTuple

from loadtest.traffic import Lengths
from policies.facts import Budget

WARM_UP_S = 30.0
"""Requests that arrive before this are simulated and not counted: the fleet is still filling."""


@dataclass(frozen=True, slots=True)
class TrafficClass:
    """One latency class: its promise, and the sizes of its requests where they are drawn."""

    name: str
    budget: Budget
    prompts: Lengths
    outputs: Lengths
    share: float = 1.0


class SimRequest(NamedTuple):
    """One request as its client sends it. `output_tokens` is the truth, which no policy sees before the end."""

    arrival_s: float
    latency_class: str
    prompt_tokens: int
    output_tokens: int
    session_key: str | None = None
    prefix_keys: tuple[Hashable, ...] = ()
    """One key a full block of the prompt, each standing for all up to there (`Workload.prefix_block_tokens`)."""
    max_output_tokens: int | None = None
    """The client's own cap."""
    tenant: str | None = None


class EventKind(StrEnum):
    """What can befall the cards of a family."""

    SLOW = "slow"
    """Steps take `factor` times as long from now on; 1 ends it. Health checks notice nothing."""
    DIE = "die"
    """Killed: streams break off, connections are refused."""
    RETURN = "return"
    """Up again, cold."""
    DRAIN = "drain"
    """Lent: no new requests, open streams finish, and then it is gone."""
    RECALL = "recall"
    """Back from the loan, cold."""


class FleetEvent(NamedTuple):
    """Something that happens to every backend of one family."""

    at_s: float
    kind: EventKind
    family: str
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Physics:
    """How the world differs from what the coefficients say."""

    noise_sigma: float = 0.06
    """Log-normal spread of each iteration's time."""
    hiccup_share: float = 0.002
    """Iterations that take `HICCUP` times as long."""
    rtt_s: float = 0.001
    """Network time from the gateway to an engine and back."""
    told_sigma: float = 0.08
    """Log-normal error of each coefficient that the gateway is told."""
    graph_penalty: float = 0.0
    """How much longer a step takes for the empty places of the CUDA graph that its batch is padded to: this much where
    all were empty, in proportion to their share otherwise."""
    prefill_pairs_ms: float = 0.0
    """Milliseconds per attention pair of prefill beyond the card's own, which nobody tells the gateway."""
    told_chunk_ratio: float = 1.0
    """The token budget of an iteration that the gateway is told of, over the real one."""
    prefix_cache_share: float = 0.0
    """Share of the KV capacity that cached prefixes may hold; 0: no prefix cache."""


HICCUP = (3.0, 8.0)


@dataclass(frozen=True, slots=True)
class Workload:
    """All of one run. `requests` are in the order of arrival."""

    requests: tuple[SimRequest, ...]
    classes: Mapping[str, TrafficClass]
    seconds: float
    """Arrivals end here; the run ends when the last request has."""
    events: tuple[FleetEvent, ...] = ()
    gateways: int = 1
    gossip_s: float = 0.2
    """How often gateways tell each other their books: the age that this news reaches."""
    physics: Physics = Physics()
    prefix_block_tokens: int = 512
    sheddable: bool = True
    """Whether a policy may refuse requests early."""
    warm_up_s: float = WARM_UP_S
    marks: Mapping[str, float] = field(default_factory=dict)
    """Moments that a plot shows, by name."""


def dice(seed: int, *purpose: object) -> Random:
    """Dice for one purpose of one run: independent of each other, and the same on every machine."""
    return Random("/".join(["sim", str(seed), *map(str, purpose)]))
