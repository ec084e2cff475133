"""Small instances for the tests of the bound: cards in round figures, and a trace that is drawn from a seed."""

from dataclasses import replace
from random import Random

from backends.catalog.spec import Coefficients
from loadtest.fake_engine.step import EngineLimits
from loadtest.sim.bound.instance import BoundBackend, BoundRequest


def backend(name: str, step_ms: float, prefill_us: float, decode_us: float, price: float, *, kv: int = 100_000,
            seqs: int = 64, chunk: int = 512) -> BoundBackend:
    """A card with a fixed step time, microseconds per prompt token and per decoding sequence, and 0.1 µs of context."""
    coefficients = Coefficients(
        version="test", source="test", prefill_base_ms=step_ms, prefill_ms_per_token=prefill_us / 1000,
        prefill_ms_per_pair=0.0, decode_base_ms=step_ms, decode_ms_per_seq=decode_us / 1000,
        decode_ms_per_seq_token=1e-4)
    return BoundBackend(name, coefficients, EngineLimits(kv, seqs, chunk), price, 16)


FAST = backend("fast", 8.0, 40.0, 60.0, 4.0)
SLOW = backend("slow", 20.0, 140.0, 100.0, 0.8)
POOL = (FAST, SLOW)


def crippled(spec: BoundBackend, factor: float) -> BoundBackend:
    """The same card with all of its work so many times as long."""
    c = spec.coefficients
    return replace(spec, coefficients=replace(
        c, prefill_ms_per_token=c.prefill_ms_per_token * factor, decode_base_ms=c.decode_base_ms * factor,
        prefill_base_ms=c.prefill_base_ms * factor, decode_ms_per_seq=c.decode_ms_per_seq * factor))


def request(arrival_s: float = 0.0, prompt: int = 500, output: int = 50, ttft_s: float = 1.0, tpot_s: float = 0.06,
            uncached: int | None = None, class_name: str = "chat") -> BoundRequest:
    return BoundRequest(arrival_s, prompt, uncached or prompt, output, ttft_s, tpot_s, class_name)


def trace(seed: int, rate_per_s: float, seconds: float) -> list[BoundRequest]:
    """Poisson arrivals of two classes."""
    rng = Random(seed)
    requests, now = [], rng.expovariate(rate_per_s)
    while now < seconds:
        if rng.random() < 0.7:
            requests.append(request(now, rng.randint(50, 2000), rng.randint(10, 200)))
        else:
            requests.append(request(now, rng.randint(500, 3000), rng.randint(2, 40), 0.4, 0.03, class_name="code"))
        now += rng.expovariate(rate_per_s)
    return requests
