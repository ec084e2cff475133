"""A seeded run of decisions and what was learned between them, written down to the last bit.

`python -m tests.seeded_decisions` prints a line each, so that two builds of the same sources can be compared: floats
stand as `float.hex`, and nothing depends on a clock or on where the process runs.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from random import Random

from backends.catalog.health import Health, HealthState
from backends.catalog.sample import LoadSample
from backends.catalog.spec import BackendSpec
from backends.catalog.views import BackendView, FleetView
from loadtest.sim.pools import find_pool
from policies.attempts import FailureCause
from policies.facts import Budget, RequestFacts
from policies.learning import End, Learner, Sent
from policies.pipeline import decide
from policies.policy import Decision, Priced
from policies.registry import build_learner, build_pipeline
from policies.spec import PolicySpec

SIZES = (1, 8, 64, 200)
DECISIONS = 150
BUDGETS = (Budget(), Budget(1.0, 0.06), Budget(0.05, 0.01), Budget(3.0, None, 20.0), Budget(None, 0.05),
           Budget(e2e_s=8.0))
STATES = (HealthState.HEALTHY,) * 6 + (HealthState.SLOW_START, HealthState.UNHEALTHY)
FAILURES = (None, None, None, FailureCause.FIRST_TOKEN_TIMEOUT, FailureCause.CLIENT_GONE)


def decisions(size: int, seed: int = 1) -> Iterator[Decision]:
    """Decisions over a fleet of `size` backends whose load, health and beliefs change from one to the next."""
    spec, dice = PolicySpec("headrace"), Random(seed)
    pipeline, learner = build_pipeline(spec), build_learner(spec)
    views = [_view(place, size, learner, dice) for place in range(size)]
    opened: list[tuple[Sent, BackendView]] = []
    now = 1000.0
    for number in range(DECISIONS):
        now += dice.expovariate(20.0)
        place = dice.randrange(size)
        views[place] = _changed(views[place], now, dice)
        facts = _facts(dice)
        facts = replace(facts, expected_output_tokens=learner.expect_output(facts))
        fleet = FleetView(tuple(views), "", number, learner.pool_belief(now))
        decision = decide(pipeline, facts, fleet, now, dice)
        yield decision
        opened += [(learner.sent(facts, candidate, now), candidate.backend) for candidate in decision.candidates
                   if candidate.backend is decision.chosen]
        if len(opened) > 4 and dice.random() < 0.9:
            _goes_on(learner, *opened.pop(dice.randrange(len(opened))), now, dice)


def told(decision: Decision) -> str:
    """One decision in one line, bit for bit."""
    name = None if decision.chosen is None else decision.chosen.spec.name
    return f"{name} {decision.reason} {_hex(decision.price)} {_hex(decision.retry_after_s)} " + " ".join(
        [*map(_candidate, decision.candidates), *(f"{each.backend}:{each.reason}" for each in decision.rejected)])


def _candidate(found: Priced) -> str:
    figures = (found.price, found.late_s, found.miss, found.crowding, *(found.estimate or ()),
               *(value for _, value in found.terms))
    return f"{found.backend.spec.name}({','.join(map(_hex, figures))})"


def _hex(value: float | None) -> str:
    return "-" if value is None else float(value).hex()


def _view(place: int, size: int, learner: Learner, dice: Random) -> BackendView:
    backends = find_pool(f"site:{max(4, size)}").backends
    backend, name = backends[place], f"b{place:04d}"
    spec = BackendSpec(
        name, f"http://b{place}", "vllm", "m" if place % 9 or size < 9 else "other", "m", backend.hardware,
        slots=backend.slots, context_tokens=dice.choice((4096, 40_960)), price_per_hour=backend.price_per_hour,
        weight=dice.choice((1.0, 1.0, 0.5)), quantization=dice.choice((None, "fp8", "q4_k_m")),
        coefficients=None if place % 7 == 6 else backend.coefficients)
    served = dice.choice((0, 10, 10, 10))
    return _changed(BackendView(spec, Health(), served_requests=served, last_outcome_at_s=900.0 if served else None,
                                belief=learner.belief(name, 0.0)), 1000.0, dice)


def _changed(view: BackendView, now: float, dice: Random) -> BackendView:
    """The same backend under another load."""
    streams, waiting = dice.randrange(0, 40), dice.randrange(0, 3)
    sample = LoadSample(now - dice.choice((0.1, 9.0)), running_requests=streams + 2, waiting_requests=waiting)
    return replace(
        view, health=Health(dice.choice(STATES), since_s=now - 3.0), in_flight_requests=streams + waiting,
        in_flight_prefill_requests=waiting, in_flight_prefill_tokens=900 * waiting, in_flight_decode_requests=streams,
        in_flight_context_tokens=700 * streams, sample=dice.choice((None, sample)),
        in_flight_at_sample=dice.choice((None, streams)), backoff_until_s=now + 1.0 if dice.random() < 0.05 else 0.0,
        silence_asked_until_s=now + 1.0 if dice.random() < 0.02 else 0.0)


def _facts(dice: Random) -> RequestFacts:
    cap = dice.choice((None, None, 200))
    session = f"s{dice.randrange(6)}" if dice.random() < 0.4 else None
    return RequestFacts(
        dice.choice(("m",) * 9 + ("other",)), dice.randrange(1, 6000), max_output_tokens=cap,
        stream=dice.random() < 0.8, latency_class=dice.choice(("chat", "bulk")), budget=dice.choice(BUDGETS),
        session_key=session, prefix_keys=("p1", "p2", "p3") if dice.random() < 0.2 else (),
        waited_s=dice.choice((0.0, 0.0, 0.3)), sheddable=dice.random() < 0.3,
        quality_floor_bits=dice.choice((None, None, 8.0)), tried=("b0001",) if dice.random() < 0.1 else ())


def _goes_on(learner: Learner, sent: Sent, view: BackendView, now: float, dice: Random) -> None:
    """What becomes of one attempt."""
    failure = dice.choice(FAILURES)
    if failure is not FailureCause.FIRST_TOKEN_TIMEOUT:
        learner.first_token(sent, sent.sent_at_s + 0.1 * dice.lognormvariate(0.0, 0.5))
        learner.paced(sent, view, 0.02 * dice.lognormvariate(0.0, 0.3), dice.randrange(1, 9), now)
    cached = dice.choice((None, 0, 700))
    learner.ended(sent, End(dice.randrange(1, 300), failure, cached_tokens=cached), now)


def main() -> None:
    """Prints every decision of every fleet."""
    for size in SIZES:
        for decision in decisions(size):
            sys.stdout.write(f"{size} {told(decision)}\n")


if __name__ == "__main__":
    main()
