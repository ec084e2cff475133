"""Who asks for what, and when: arrivals and request sizes of a chat service, from a seed.

Arrivals are a Poisson stream, which the conversation trace of Azure's LLM inference service (2023) is close to.
Sizes are lognormal with the medians and the log-scale spread of that trace: prompts 1,020 tokens and 0.985, outputs
129 tokens and 0.859, over its 19,366 requests (Azure/AzurePublicDataset, CC-BY-4.0; Patel et al., "Splitwise", ISCA
2024). A lognormal has a longer tail than the trace, so sizes are cut at the trace's own P99: 4,142 and 601 tokens. The
trace is not shipped; the six numbers are.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from random import Random
from types import MappingProxyType

_WORDS = ("ash", "bay", "elm", "fen", "ice", "ivy", "oak", "sea", "sky", "sun", "dew", "fog")


@dataclass(frozen=True, slots=True)
class Lengths:
    """A lognormal number of tokens, cut to `[1, cap]`."""

    median_tokens: float
    spread: float
    cap_tokens: int

    def draw(self, rng: Random) -> int:
        """One length, in tokens."""
        return max(1, min(self.cap_tokens, round(rng.lognormvariate(math.log(self.median_tokens), self.spread))))


AZURE_CONV_PROMPTS = Lengths(1020.0, 0.985, 4142)
AZURE_CONV_OUTPUTS = Lengths(129.0, 0.859, 601)


@dataclass(frozen=True, slots=True)
class Traffic:
    """One stream of requests. `classes` maps latency classes to shares; they need not add up to 1."""

    rate_per_s: float
    prompts: Lengths = AZURE_CONV_PROMPTS
    outputs: Lengths = AZURE_CONV_OUTPUTS
    classes: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request to come, `at_s` seconds after the stream began."""

    at_s: float
    prompt_tokens: int
    max_tokens: int
    latency_class: str | None


def arrivals(traffic: Traffic, rng: Random, duration_s: float = math.inf) -> Iterator[Arrival]:
    """The requests that start within `duration_s`. Raises `ValueError` for a rate that is not positive."""
    if not traffic.rate_per_s > 0:
        raise ValueError(f"rate_per_s must be above 0, got {traffic.rate_per_s}")
    names, shares = list(traffic.classes), list(traffic.classes.values())
    at_s = rng.expovariate(traffic.rate_per_s)
    while at_s < duration_s:
        yield Arrival(at_s, traffic.prompts.draw(rng), traffic.outputs.draw(rng),
                      rng.choices(names, shares)[0] if names else None)
        at_s += rng.expovariate(traffic.rate_per_s)


def user_dice(seed: int, user: int) -> Random:
    """The dice of one user's schedule: the same for the user who sends and for whoever counts what is due."""
    return Random(f"{seed}/{user}")


def prompt_text(tokens: int, rng: Random) -> str:
    """Text of four bytes a token, unlike any other from its first word on, so that no prefix cache can help."""
    words = [f"{rng.getrandbits(12):03x}"] + [rng.choice(_WORDS) for _ in range(max(0, tokens - 1))]
    return " ".join(words) + " "
