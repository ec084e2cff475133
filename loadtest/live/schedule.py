"""Who asks for what, and when: blocks of arrivals from a seed, and the order in which policies meet them. Pure.

A block is a stretch of a modulated Poisson stream (`loadtest.sim.arrivals`: bursts of 1.8 to 2.6 times the calm rate on
a slow sine). Every policy meets every block once, in one round; the order turns by one place from round to round
(A B C, B C A, C A B), so that no policy always follows the same one, or always has the machine's good minutes.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

from loadtest.live.classes import LiveClass
from loadtest.live.prompts import mark, prompt_body
from loadtest.sim.arrivals import draw_arrivals, modulated
from loadtest.traffic import Arrival


@dataclass(frozen=True, slots=True)
class Block:
    """Arrivals of one round, and the text of each one's prompt without its mark."""

    number: int
    """0 is the warm-up, which is not counted."""
    seconds: float
    arrivals: tuple[Arrival, ...]
    bodies: tuple[str, ...]


def lay_out(number: int, classes: Sequence[LiveClass], rate_per_s: float, seconds: float, seed: int) -> Block:
    """The block of that number, the same from the same arguments. Every block has one arrival at least."""
    rng = Random(f"{seed}/{number}")
    times = draw_arrivals(modulated(rate_per_s, seconds, rng), seconds, rng) or [seconds / 2]
    by_name = {each.name: each for each in classes}
    names, shares = list(by_name), [each.share for each in classes]
    arrivals, bodies = [], []
    for at_s in times:
        name = rng.choices(names, shares)[0]
        prompt_tokens = by_name[name].prompts.draw(rng)
        arrivals.append(Arrival(at_s, prompt_tokens, by_name[name].outputs.draw(rng), name))
        bodies.append(prompt_body(prompt_tokens, rng))
    return Block(number, seconds, tuple(arrivals), tuple(bodies))


def order(policies: Sequence[str], number: int) -> tuple[str, ...]:
    """Who goes first, second, … in the round of that number."""
    turn = number % len(policies)
    return (*policies[turn:], *policies[:turn])


def drain_s(block: Block, classes: Mapping[str, LiveClass]) -> float:
    """How long answers may take after the last arrival: half as long again as any may in budget, 10 s at least."""
    latest = max(classes[arrival.latency_class or ""].deadline_s(arrival.max_tokens) for arrival in block.arrivals)
    return max(10.0, 1.5 * latest)


def schedule_file(block: Block, policy: str, seed: int, model: str) -> str:
    """The block as the locustfile reads it, with marks that no other visit has."""
    rng = Random(f"{seed}/{block.number}/{policy}")
    asks = [{**asdict(arrival), "prompt": f"{mark(rng)} {body}"}
            for arrival, body in zip(block.arrivals, block.bodies, strict=True)]
    return json.dumps({"model": model, "asks": asks})


def parse_schedule(text: str) -> tuple[str, list[tuple[Arrival, str]]]:
    """Model and (arrival, prompt) pairs of such a file. Raises `KeyError`, `TypeError` or `ValueError` for another."""
    document: dict[str, Any] = json.loads(text)
    return document["model"], [(Arrival(**{name: ask[name] for name in Arrival.__slots__}), ask["prompt"])
                               for ask in document["asks"]]
