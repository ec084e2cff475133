"""The latency classes of the scenarios: promises, and the sizes that their requests are drawn from.

Sizes are log-normal (median, sigma of the logarithm), cut where a context of 32,768 tokens ends.
"""

from collections.abc import Mapping
from random import Random

from loadtest.sim.workload import TrafficClass
from loadtest.traffic import Lengths
from policies.facts import Budget

MAX_PROMPT_TOKENS = 28_000
MAX_OUTPUT_TOKENS = 4_000


def _class(name: str, share: float, ttft_s: float, inter_token_s: float, prompt: tuple[float, float],
           output: tuple[float, float]) -> TrafficClass:
    return TrafficClass(name, Budget(ttft_s=ttft_s, inter_token_s=inter_token_s),
                        Lengths(*prompt, MAX_PROMPT_TOKENS), Lengths(*output, MAX_OUTPUT_TOKENS), share)


CHAT = _class("chat", 0.58, 1.0, 0.060, (600.0, 1.0), (150.0, 0.8))
CODE = _class("code", 0.22, 0.4, 0.035, (1400.0, 0.6), (28.0, 0.7))
RAG = _class("rag", 0.15, 3.0, 0.080, (3500.0, 0.5), (200.0, 0.6))
BULK = _class("bulk", 0.05, 15.0, 0.200, (2000.0, 0.7), (400.0, 0.6))
LONG = _class("long", 0.15, 8.0, 0.120, (14_000.0, 0.6), (250.0, 0.6))

STANDARD = (CHAT, CODE, RAG, BULK)
LONG_CONTEXT = (*STANDARD, LONG)
MIXED_BUDGETS = (
    _class("tight", 0.40, 0.4, 0.025, (500.0, 0.8), (120.0, 0.7)),
    _class("usual", 0.30, 1.0, 0.060, (900.0, 1.0), (150.0, 0.7)),
    _class("loose", 0.30, 10.0, 0.150, (2500.0, 0.7), (300.0, 0.7)),
)


def by_name(classes: tuple[TrafficClass, ...]) -> Mapping[str, TrafficClass]:
    return {each.name: each for each in classes}


def shares(classes: tuple[TrafficClass, ...], fixed: TrafficClass | None = None) -> list[float]:
    """Shares that add up to 1. Where `fixed` is one of the classes its share is exact, and the others give way."""
    if fixed is None:
        total = sum(each.share for each in classes)
        return [each.share / total for each in classes]
    rest = sum(each.share for each in classes if each is not fixed)
    return [each.share if each is fixed else each.share * (1.0 - fixed.share) / rest for each in classes]


def draw_sizes(traffic_class: TrafficClass, rng: Random) -> tuple[int, int]:
    """Prompt and output tokens of one request."""
    return traffic_class.prompts.draw(rng), traffic_class.outputs.draw(rng)
