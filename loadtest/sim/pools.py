"""The pools that a simulation can stand on: unlike cards that serve one model, by name.

``site`` is plausible rather than measured: roofline figures for four single cards in eight-bit precision, at prices
that a site would book for them. ``fitted-owned`` and ``fitted-list`` are Qwen3-32B on the measured cards of
`loadtest.fake_engine.cards`, with 3 ms of host time a step and without the time of the engine's own front. They differ
in prices: assumed ones of owned machines, and public cloud lists (`cards.SOURCES.md`; the 910B's is assumed in both).
Capacities, chunks and the reference batch of each card stand beside it.

``site:64`` is the same pool with 64 backends, its cards repeated in turn.
"""

from dataclasses import dataclass, replace

from backends.catalog.spec import BackendSpec, Coefficients
from loadtest.fake_engine.cards import find_card

MODEL = "simulated"
MAX_BACKENDS = 1000
FITTED_HOST_MS = 3.0
"""Host time of a step that kernel tables leave out; fitted to 300 logged vLLM requests (2.75 there)."""


@dataclass(frozen=True, slots=True)
class SimBackend:
    """One engine of a pool as it really is. What the gateway is told of it, `told` says."""

    name: str
    family: str
    """Which of the pool's cards it is; faults and loans name cards by this."""
    hardware: str
    quantization: str
    coefficients: Coefficients
    slots: int
    """Sequences that it runs at once."""
    chunk_tokens: int
    """Tokens of one iteration, decoding and prefill together."""
    price_per_hour: float
    reference_batch: int
    """Sequences that share a step's fixed part in accounted cost."""

    @property
    def kv_capacity_tokens(self) -> int:
        capacity = self.coefficients.kv_capacity_tokens
        assert capacity is not None, "every pool states its KV capacities"
        return capacity

    def told(self, coefficients: Coefficients, context_tokens: int | None = None) -> BackendSpec:
        """What the fleet file would say, with these coefficients in place of the true ones."""
        return BackendSpec(
            name=self.name, url=f"http://{self.name}.sim", engine="vllm", model=MODEL, served_model_name=MODEL,
            card_type=self.hardware, quantization=self.quantization, context_tokens=context_tokens, slots=self.slots,
            price_per_hour=self.price_per_hour, coefficients=coefficients,
        )

    def cost(self, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> float:
        """Accounted cost of a request: the price of the machine time it takes in a reference batch, in money.

        With `u` uncached of `P` prompt tokens and `D` output tokens, `b·u + q·(P² - c²)/2` for the prefill and
        `D·(d + a/n) + e·(P·D + D²/2)` for the decode, `a` being the fixed part of a decode step and `n` the reference
        batch. It does not depend on the load of the moment, so that a policy is not charged for its neighbours.
        """
        c = self.coefficients
        p, d = prompt_tokens, output_tokens
        ms = (
            c.prefill_ms_per_token * (p - cached_tokens)
            + c.prefill_ms_per_pair * 0.5 * (p * p - cached_tokens * cached_tokens)
            + d * (c.decode_ms_per_seq + (c.host_ms + c.decode_base_ms) / self.reference_batch)
            + c.decode_ms_per_seq_token * (p * d + 0.5 * d * d)
        )
        return self.price_per_hour * ms / 3_600_000.0


@dataclass(frozen=True, slots=True)
class Pool:
    """Backends of one model, and how many times the four-card pool they are."""

    name: str
    backends: tuple[SimBackend, ...]
    scale: float = 1.0
    """Default rates of scenarios are multiplied by this."""


class UnknownPool(LookupError):
    """No such pool; the message lists what there is."""


def _site(name: str, hardware: str, a: float, b_p: float, b_d: float, b_k: float, kv_capacity_tokens: int, slots: int,
          chunk_tokens: int, reference_batch: int, price_per_hour: float) -> SimBackend:
    """A card of the plausible pool: `a`, `b_p`, `b_d` and `b_k` in milliseconds."""
    coefficients = Coefficients(
        version=f"site/{name}", source="plausible roofline figures, not measured",
        prefill_base_ms=a, prefill_ms_per_token=b_p, prefill_ms_per_pair=0.0, decode_base_ms=a, decode_ms_per_seq=b_d,
        decode_ms_per_seq_token=b_k, kv_capacity_tokens=kv_capacity_tokens)
    return SimBackend(name, name.partition("-")[0], hardware, name.partition("-")[2], coefficients, slots, chunk_tokens,
                      price_per_hour, reference_batch)


def _fitted(name: str, card_id: str, slots: int, chunk_tokens: int, reference_batch: int,
            price_per_hour: float) -> SimBackend:
    card = find_card(card_id)
    coefficients = replace(card.coefficients, host_ms=FITTED_HOST_MS, first_token_overhead_ms=0.0)
    return SimBackend(name, name.partition("-")[0], card.hardware, card.quantization, coefficients, slots, chunk_tokens,
                      price_per_hour, reference_batch)


def _fitted_pool(prices: tuple[float, float, float, float]) -> tuple[SimBackend, ...]:
    return (
        _fitted("h100-fp8", "h100x2-fp8", 256, 2048, 64, prices[0]),
        _fitted("a100-int8", "a100x2-int8wo", 192, 1024, 36, prices[1]),
        _fitted("l40s-fp8", "l40sx2-fp8", 96, 512, 24, prices[2]),
        _fitted("910b-bf16", "ascend910b2x2-bf16", 64, 512, 24, prices[3]),
    )


def _backends(name: str) -> tuple[SimBackend, ...]:
    match name:
        case "site":
            return (
                _site("h100-fp8", "h100", 8.5, 0.040, 0.060, 84e-6, 275_000, 256, 2048, 64, 4.0),
                _site("a100-w8a8", "a100", 13.0, 0.110, 0.070, 130e-6, 275_000, 192, 1024, 48, 1.2),
                _site("l40s-fp8", "l40s", 23.0, 0.125, 0.090, 300e-6, 130_000, 96, 512, 32, 0.8),
                _site("910b-w8a8", "910b", 20.0, 0.140, 0.100, 200e-6, 200_000, 128, 1024, 32, 0.8),
            )
        case "fitted-owned":
            return _fitted_pool((5.90, 1.40, 1.00, 0.90))
        case "fitted-list":
            return _fitted_pool((5.90, 2.78, 1.80, 1.80))
        case _:
            raise UnknownPool(f"no pool {name!r}; there are {', '.join(POOLS)}, each also as NAME:BACKENDS")


POOLS = ("site", "fitted-owned", "fitted-list")


def find_pool(text: str) -> Pool:
    """The pool of that name, or as many backends of it as the text asks for (`site:64`).

    Raises:
        UnknownPool: no such pool, or a number of backends that makes no sense.
    """
    name, colon, number = text.partition(":")
    backends = _backends(name)
    if not colon:
        return Pool(name, backends)
    if not number.isdecimal() or not 1 <= int(number) <= MAX_BACKENDS:
        raise UnknownPool(f"pool {text!r}: the number of backends must be 1 to {MAX_BACKENDS}")
    count = int(number)
    cloned = tuple([replace(backends[i % len(backends)], name=f"{backends[i % len(backends)].name}-{i:03d}")
                    for i in range(count)])
    return Pool(text, cloned, count / len(backends))
