"""A backend as its operator declares it: one engine deployment that serves one model on one card type."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """How the engine splits the model over its cards: tensor, pipeline, data and expert parallel degrees."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1

    def __str__(self) -> str:
        degrees = (("tp", self.tp), ("pp", self.pp), ("dp", self.dp), ("ep", self.ep))
        return "·".join(f"{name}{degree}" for name, degree in degrees if degree > 1) or "tp1"


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Step-time coefficients of one backend under continuous batching, from a measurement.

    One engine iteration with `T` new prompt tokens, attention pair count `A`, `B` decoding sequences of mean
    context `ctx` takes, in milliseconds::

        step_ms = host_ms + (decode_base_ms + decode_ms_per_seq·B + decode_ms_per_seq_token·B·ctx  if B else
                             prefill_base_ms)
                  + prefill_ms_per_token·T + prefill_ms_per_pair·A

    `version` names the measurement (it is written into each decision), `source` says where it came from.
    """

    version: str
    source: str
    prefill_base_ms: float
    prefill_ms_per_token: float
    prefill_ms_per_pair: float
    decode_base_ms: float
    decode_ms_per_seq: float
    decode_ms_per_seq_token: float
    host_ms: float = 0.0
    first_token_overhead_ms: float = 0.0
    kv_capacity_tokens: int | None = None
    chunk_tokens: int | None = None
    """Tokens of one iteration, prompt and decode together (vLLM's `max_num_batched_tokens`); `None`: 2048."""


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """One backend. Everything here comes from the fleet file; nothing here changes while it serves."""

    name: str
    url: str
    engine: str
    model: str
    served_model_name: str
    card_type: str
    card_count: int = 1
    quantization: str | None = None
    parallel: ParallelLayout = ParallelLayout()
    context_tokens: int | None = None
    slots: int | None = None
    price_per_hour: float = 0.0
    weight: float = 1.0
    site: str | None = None
    labels: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    coefficients: Coefficients | None = None
    api_key: str | None = field(default=None, repr=False)
    memo: dict[Any, Any] = field(default_factory=dict, init=False, compare=False, repr=False)
    """What pure functions have worked out of this spec alone, so that the next decision need not. No part of the value:
    a copy starts with an empty one."""

    @property
    def identity(self) -> tuple[str, str, str, str, str]:
        """What makes this the same live backend across a reload; weight, price and labels may change freely."""
        return (self.name, self.url, self.engine, self.model, self.served_model_name)
