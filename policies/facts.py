"""What a decision knows of one request."""

from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Budget:
    """P99 promises to the caller, in seconds; `None` where none was made."""

    ttft_s: float | None = None
    inter_token_s: float | None = None
    e2e_s: float | None = None


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """The part of a request that routing needs. Text never gets here: only sizes and keys."""

    model: str
    """The fleet's model name, aliases already resolved."""
    prompt_tokens: int
    """Estimated from bytes by intake."""
    max_output_tokens: int | None = None
    """The client's cap; `None` where it gave none."""
    expected_output_tokens: int = 128
    """What the router expects, capped by `max_output_tokens`."""
    stream: bool = False
    latency_class: str = "default"
    budget: Budget = Budget()
    tenant: str | None = None
    session_key: str | None = None
    """Requests with the same key continue one conversation, so that their prompts share a prefix."""
    prefix_keys: tuple[Hashable, ...] = ()
    """One key per full block of the prompt, each standing for all up to there; empty where nobody hashed it."""
    prefix_block_tokens: int = 512
    waited_s: float = 0.0
    """Time that the request has already spent of its budget, here or in an attempt that failed."""
    priority: int = 0
    """Larger is more important; negative may be shed first."""
    sheddable: bool = False
    """Whether refusing it early is better than serving it late."""
    quality_floor_bits: float | None = None
    """Fewest bits that a weight may have (`filters.quality_floor`); `None`: whatever is there."""
    tried: tuple[str, ...] = ()
    """Backends that already failed this request; a retry goes elsewhere first."""
