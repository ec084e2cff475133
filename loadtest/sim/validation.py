"""The simulator beside the real thing: the same arrivals through a real gateway before real fake engines.

The gateway and the engines run as processes (`loadtest.stack`) under locust; the world is given the same requests, the
same coefficients and the same policy. What is compared is the time to first token as the client feels it.

A policy that settles ties by dice sends the same requests elsewhere each time, and with a few hundred of them a P99 is
the third slowest. So the world runs several times with other dice: the real figure must lie within 10 % of what they
span. Round robin throws none, and is held to the 10 % alone.
"""

import json as jsonlib
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

from backends.catalog.spec import BackendSpec, Coefficients
from loadtest.fake_engine.cards import find_card
from loadtest.measured import percentile
from loadtest.run import CLASS_SHARES, CLASSES, LoadOptions, load
from loadtest.sim.flight import Fate
from loadtest.sim.pools import Pool, SimBackend
from loadtest.sim.run import policy_spec
from loadtest.sim.workload import Physics, SimRequest, TrafficClass, Workload
from loadtest.sim.world import World
from loadtest.stack import at_time_scale, simulated_stack
from loadtest.traffic import Traffic, arrivals, user_dice
from policies.facts import Budget
from policies.registry import build_learner, build_pipeline

LOOPBACK_S = 0.006
"""What a request and its first token spend outside the engine on loopback: client, gateway, both HTTP servers."""
POINTS = (0.5, 0.9, 0.99)
TOLERANCE = 0.10
WORLDS = 8


@dataclass(frozen=True, slots=True)
class ValidationOptions:
    """One comparison. Times are the wall clock's; the cards run `time_scale` times faster than life."""

    policy: str = "round_robin"
    cards: tuple[str, ...] = ("a100x2-bf16", "h100x2-fp8", "l40sx2-fp8")
    rate_per_s: float = 8.0
    duration_s: float = 30.0
    time_scale: float = 1.0
    seed: int = 1
    """Of arrivals and sizes."""
    dice: int = 0
    """Of noise and ties in the simulated world."""


class Span(NamedTuple):
    """One percentile over the simulated worlds, in seconds."""

    low: float
    middle: float
    high: float

    def missed_by(self, real: float) -> float:
        """How far the real figure lies outside, as a share of it; 0 inside."""
        nearest = min(self.high, max(self.low, real))
        return abs(nearest / real - 1.0)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Times to first token, in seconds by percentile."""

    policy: str
    requests: int
    failed: int
    """Requests that the real gateway did not answer whole."""
    real: Mapping[float, float]
    simulated: Mapping[float, Span]

    def agrees(self) -> bool:
        """P50 and P99 within `TOLERANCE`."""
        return all(self.simulated[point].missed_by(self.real[point]) <= TOLERANCE for point in (0.5, 0.99))

    def as_json(self) -> dict[str, object]:
        return {
            "policy": self.policy, "requests": self.requests, "failed": self.failed, "agrees": self.agrees(),
            "ttft_s": {
                f"p{100 * point:g}": {
                    "real": round(real, 5), "error": round(self.simulated[point].middle / real - 1.0, 4),
                    "simulated": {name: round(value, 5) for name, value in self.simulated[point]._asdict().items()},
                } for point, real in self.real.items()},
        }


def compare(options: ValidationOptions) -> Comparison:
    """Run both. Raises `StackError` or `LoadTestError` where the real side does not run, `UnknownCard`."""
    shape = LoadOptions(cards=options.cards, rate_per_s=options.rate_per_s, duration_s=options.duration_s,
                        time_scale=options.time_scale, policy=options.policy, seed=options.seed)
    with tempfile.TemporaryDirectory(prefix="headrace-validate-") as folder, simulated_stack(
            Path(folder), cards=options.cards, time_scale=options.time_scale, policy=options.policy, classes=CLASSES,
            seed=options.seed) as stack:
        records = load(shape, stack.url, stack.model, Path(folder), exact_tokens=True, classes=CLASS_SHARES)
    real = [record.ttft_s for record in records if record.failure is None and record.ttft_s is not None]
    worlds = [_points(first_tokens_s(simulate(replace(options, dice=number), shape))) for number in range(WORLDS)]
    spans = {point: Span(min(values), median(values), max(values))
             for point in POINTS if (values := [world[point] for world in worlds])}
    return Comparison(options.policy, len(records), len(records) - len(real), _points(real), spans)


def first_tokens_s(world: World) -> list[float]:
    """Times to first token of what was served, in seconds."""
    return [outcome.first_token_at_s - outcome.request.arrival_s for outcome in world.outcomes
            if outcome.fate is Fate.SERVED and outcome.first_token_at_s is not None]


def simulate(options: ValidationOptions, shape: LoadOptions) -> World:
    """The simulated side, with the arrivals that locust's users are going to make."""
    traffic = Traffic(shape.rate_per_s / shape.users, shape.prompts, shape.outputs, CLASS_SHARES)
    requests = sorted(
        SimRequest(arrival.at_s, arrival.latency_class or "", arrival.prompt_tokens, arrival.max_tokens,
                   max_output_tokens=arrival.max_tokens)
        for number in range(shape.users) for arrival in arrivals(traffic, user_dice(shape.seed, number),
                                                                  shape.duration_s))
    classes = {name: TrafficClass(name, Budget(promise.ttft_s, promise.inter_token_s, promise.e2e_s), shape.prompts,
                                  shape.outputs) for name, promise in CLASSES.items()}
    physics = Physics(noise_sigma=0.03, hiccup_share=0.0, rtt_s=LOOPBACK_S, told_sigma=0.0)
    workload = Workload(tuple(requests), classes, shape.duration_s, physics=physics, warm_up_s=0.0, sheddable=False)
    spec = policy_spec(options.policy)
    pool = Pool("validation", tuple(_backend(card, options.time_scale) for card in options.cards))
    return World(pool, workload, [build_pipeline(spec)], [build_learner(spec)], options.dice).run()


class _AsServed(SimBackend):
    """A card as the stack's fleet file tells of it: without slots."""

    __slots__ = ()

    def told(self, coefficients: Coefficients, context_tokens: int | None = None) -> BackendSpec:
        return replace(SimBackend.told(self, coefficients, context_tokens), slots=None)


def _backend(card_id: str, time_scale: float) -> SimBackend:
    card = find_card(card_id)
    return _AsServed(card.id, card.id, card.hardware, card.quantization,
                     at_time_scale(card.coefficients, time_scale), 256, 2048, card.price_per_hour, 16)


def _points(values: Sequence[float]) -> dict[float, float]:
    return {point: value for point in POINTS if (value := percentile(values, point)) is not None}


def show(comparisons: Sequence[Comparison], *, json: bool) -> None:
    """The answer on standard output."""
    if json:
        print(jsonlib.dumps({"comparisons": [one.as_json() for one in comparisons]}))
        return
    for one in comparisons:
        print(f"{one.policy}: {one.requests} requests, {one.failed} failed on the real side")
        for point, real in one.real.items():
            low, middle, high = one.simulated[point]
            print(f"  TTFT p{100 * point:g}: real {1000 * real:.1f} ms, simulated {1000 * middle:.1f} ms "
                  f"({1000 * low:.0f} to {1000 * high:.0f} over {WORLDS} worlds), {middle / real - 1.0:+.1%}")
        print("  agrees" if one.agrees() else f"  does NOT agree within {TOLERANCE:.0%}")
