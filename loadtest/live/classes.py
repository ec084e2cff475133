"""Latency classes and a rate to suit the engines at hand, derived from their coefficients. Pure.

Promises that every engine keeps, or none, would tell policies apart by price alone, or not at all. So the classes are
made to the fleet's measure: engines are ordered by the time that they need, alone, for the class's P90 prompt, and with
`t` that time and `g` one decode step at the class's typical context::

    tight    B_t = 3·t, B_o = 3·g   of the fastest; B_t at most 0.8·t of the slowest, but never below 1.5·t
    usual    B_t = 3·t, B_o = 3·g   of the middle one
    loose    B_t = 6·t, B_o = 4·g   of the slowest

The rate is a share of what the engines would carry with all slots busy::

    capacity_b = 1 / (prefill(P) + D · step(n) / n)        P, D class means; n slots, at most 16

added up over engines. Engines that share processors (label `threads`, as `headrace up` writes it) carry less than the
sum: times processors over threads.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, inf

from backends.catalog.spec import BackendSpec, Coefficients
from loadtest.fake_engine.step import step_ms
from loadtest.measured import unloaded_inter_token_s, unloaded_ttft_s
from loadtest.traffic import Lengths

P90_SIGMAS = 1.2816
MAX_BATCH = 16


class NoCoefficients(ValueError):
    """An engine of which nothing was measured; the message says which and what to do."""


@dataclass(frozen=True, slots=True)
class LiveClass:
    """One kind of caller: its share of the requests, their sizes, and what it is promised (`inf`: nothing)."""

    name: str
    share: float
    prompts: Lengths
    outputs: Lengths
    ttft_s: float = inf
    inter_token_s: float = inf

    def deadline_s(self, tokens: int) -> float:
        """When the last of so many tokens is due, in seconds after the start."""
        return self.ttft_s + max(0, tokens - 1) * self.inter_token_s


SHAPES = (
    LiveClass("tight", 0.45, Lengths(32, 0.5, 96), Lengths(16, 0.4, 40)),
    LiveClass("usual", 0.35, Lengths(80, 0.6, 240), Lengths(24, 0.5, 64)),
    LiveClass("loose", 0.20, Lengths(160, 0.5, 400), Lengths(40, 0.4, 96)),
)
"""Sizes at scale 1: what engines on two processor cores can answer in a second or two."""
HEADROOM = {"tight": (3.0, 3.0), "usual": (3.0, 3.0), "loose": (6.0, 4.0)}


def shapes(scale: float) -> tuple[LiveClass, ...]:
    """The classes with prompts and answers that many times as long; nothing is promised yet."""
    def scaled(lengths: Lengths) -> Lengths:
        return Lengths(lengths.median_tokens * scale, lengths.spread, max(1, round(lengths.cap_tokens * scale)))

    return tuple(replace(each, prompts=scaled(each.prompts), outputs=scaled(each.outputs)) for each in SHAPES)


def measured_coefficients(specs: Sequence[BackendSpec]) -> dict[str, Coefficients]:
    """Coefficients by backend name. Raises `NoCoefficients`."""
    if missing := [spec.name for spec in specs if spec.coefficients is None]:
        raise NoCoefficients(
            f"no coefficients of {', '.join(missing)}: promises are derived from them; measure them with "
            "`headrace up`, or write them into the fleet file")
    return {spec.name: spec.coefficients for spec in specs if spec.coefficients is not None}


def with_promises(classes: Sequence[LiveClass], coefficients: Mapping[str, Coefficients]) -> tuple[LiveClass, ...]:
    """The classes with promises to the measure of these engines, to three digits."""
    return tuple(_promised(each, list(coefficients.values())) for each in classes)


def _promised(shape: LiveClass, cards: Sequence[Coefficients]) -> LiveClass:
    long_prompt = p90_tokens(shape.prompts)
    ordered = sorted(cards, key=lambda card: unloaded_ttft_s(card, long_prompt))
    chosen = {"tight": ordered[0], "usual": ordered[len(ordered) // 2], "loose": ordered[-1]}[shape.name]
    of_first, of_gap = HEADROOM[shape.name]
    alone_s = unloaded_ttft_s(chosen, long_prompt)
    ttft_s = of_first * alone_s
    if shape.name == "tight":
        ttft_s = max(1.5 * alone_s, min(ttft_s, 0.8 * unloaded_ttft_s(ordered[-1], long_prompt)))
    gap_s = of_gap * unloaded_inter_token_s(chosen, long_prompt + round(shape.outputs.median_tokens / 2))
    return replace(shape, ttft_s=_three_digits(ttft_s), inter_token_s=_three_digits(gap_s))


def p90_tokens(lengths: Lengths) -> int:
    """The length that nine of ten do not exceed."""
    return min(lengths.cap_tokens, round(lengths.median_tokens * exp(P90_SIGMAS * lengths.spread)))


def capacity_per_s(specs: Sequence[BackendSpec], classes: Sequence[LiveClass], processors: int) -> float:
    """Requests a second of this mix with all slots of all engines busy. Raises `NoCoefficients`."""
    coefficients = measured_coefficients(specs)
    total = sum(each.share for each in classes)
    prompt = sum(each.share * _mean_tokens(each.prompts) for each in classes) / total
    output = sum(each.share * _mean_tokens(each.outputs) for each in classes) / total
    together = sum(1.0 / _device_s(coefficients[spec.name], spec.slots, prompt, output) for spec in specs)
    threads = sum(int(spec.labels.get("threads", 0)) for spec in specs)
    return together * (min(1.0, processors / threads) if threads else 1.0)


def _device_s(card: Coefficients, slots: int | None, prompt: float, output: float) -> float:
    """Seconds of the engine that a request takes for itself in a full batch."""
    batch = min(slots or MAX_BATCH, MAX_BATCH)
    decode_ms = step_ms(card, 0, 0.0, batch, round(batch * (prompt + output / 2))) / batch
    return unloaded_ttft_s(card, round(prompt)) + output * decode_ms / 1000.0


def _mean_tokens(lengths: Lengths) -> float:
    return min(float(lengths.cap_tokens), lengths.median_tokens * exp(lengths.spread**2 / 2))


def _three_digits(value: float) -> float:
    return float(f"{value:.3g}")
