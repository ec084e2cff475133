"""What the gateway is told of a card: its coefficients, each off by a log-normal error of its own."""

from dataclasses import replace
from math import exp
from random import Random

from backends.catalog.spec import Coefficients
from loadtest.sim.pools import SimBackend
from loadtest.sim.workload import Physics

MEASURED = (
    "prefill_base_ms", "prefill_ms_per_token", "prefill_ms_per_pair", "decode_base_ms", "decode_ms_per_seq",
    "decode_ms_per_seq_token", "host_ms", "first_token_overhead_ms",
)


def told_coefficients(backend: SimBackend, physics: Physics, rng: Random) -> Coefficients:
    """A calibration that is off by about `physics.told_sigma` in each coefficient. Capacities are told as they are.

    The fixed times of a step (host, prefill and decode base) are off together: a calibration sees their sum.
    """
    chunk_tokens = round(backend.chunk_tokens * physics.told_chunk_ratio)
    true, sigma = replace(backend.coefficients, chunk_tokens=chunk_tokens), physics.told_sigma
    if sigma <= 0.0:
        return true
    fixed = exp(rng.gauss(0.0, sigma))
    errors = {name: fixed if name.endswith("base_ms") or name == "host_ms" else exp(rng.gauss(0.0, sigma))
              for name in MEASURED}
    off = {name: getattr(true, name) * error for name, error in errors.items()}
    return replace(true, version=f"{true.version} as told", source=f"{true.source}, with calibration error", **off)
