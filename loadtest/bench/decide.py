"""What one decision costs: `python -m loadtest.bench.decide`, over fleets of 8, 64 and 1,000 backends.

The fleet is four kinds of cards in turn, with load on each and a learner that has seen requests of four classes go by.
Twice: with views that have not changed since the last decision, and with all of them new, so that nothing of a view is
remembered; a gateway lies between. Mean and quantiles are of real time; `cpu` is the process's own time, mean and P99,
which a busy machine disturbs less.
"""

import argparse
import gc
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from random import Random
from time import perf_counter, process_time

from backends.catalog.health import Health, HealthState
from backends.catalog.spec import BackendSpec
from backends.catalog.views import BackendView, FleetView
from compiled import form
from loadtest.sim.pools import find_pool
from policies.facts import Budget, RequestFacts
from policies.learning import End, Learner
from policies.pipeline import decide
from policies.policy import Pipeline, Priced
from policies.registry import build_learner, build_pipeline
from policies.spec import PolicySpec

SIZES = (8, 64, 1000)
NOW_S = 1000.0
CLASSES = (
    RequestFacts("m", 600, stream=True, latency_class="chat", budget=Budget(1.0, 0.06), expected_output_tokens=150),
    RequestFacts("m", 1400, stream=True, latency_class="code", budget=Budget(0.4, 0.035), expected_output_tokens=28),
    RequestFacts("m", 3500, stream=True, latency_class="rag", budget=Budget(3.0, 0.08), expected_output_tokens=200),
    RequestFacts("m", 2000, stream=True, latency_class="bulk", budget=Budget(15.0, 0.2), expected_output_tokens=400),
)


@dataclass(frozen=True, slots=True)
class DecisionCost:
    """Microseconds a decision."""

    policy: str
    form: str
    """`interpreted`, or `compiled` and of which sources."""
    backends: int
    views: str
    """`kept` or `new`."""
    mean_us: float
    p50_us: float
    p99_us: float
    cpu_us: float
    cpu_p99_us: float
    weighed: float
    """Candidates that were predicted, in the mean."""


def measure(policy: str, size: int, decisions: int, *, new_views: bool) -> DecisionCost:
    """Decides `decisions` times over a loaded fleet of `size` backends."""
    spec, dice = PolicySpec(policy), Random(1)
    pipeline, learner = build_pipeline(spec), build_learner(spec)
    views = _fleet(size, learner, dice)
    _taught(pipeline, learner, views, dice)
    requests = [replace(dice.choice(CLASSES), prompt_tokens=dice.randrange(50, 4000)) for _ in range(decisions)]
    took: list[float] = []
    cpu: list[float] = []
    weighed = 0
    gc.collect()
    gc.freeze()   # as the gateway does
    for number, facts in enumerate(requests):
        now = NOW_S + 60.0 + 0.002 * number
        if new_views:
            for view in views:
                view.memo.clear()
        fleet = FleetView(tuple(views), "", number, learner.pool_belief(now))
        cpu_began, began = process_time(), perf_counter()
        decision = decide(pipeline, facts, fleet, now, dice)
        took.append(perf_counter() - began)
        cpu.append(process_time() - cpu_began)
        weighed += sum(candidate.estimate is not None for candidate in decision.candidates)
    gc.unfreeze()
    took.sort()
    cpu.sort()
    last = int(0.99 * decisions)
    return DecisionCost(
        policy, form(), size, "new" if new_views else "kept", 1e6 * sum(took) / decisions, 1e6 * took[decisions // 2],
        1e6 * took[last], 1e6 * sum(cpu) / decisions, 1e6 * cpu[last], weighed / decisions)


def _fleet(size: int, learner: Learner, dice: Random) -> list[BackendView]:
    views = []
    for place, backend in enumerate(find_pool(f"site:{size}").backends):
        spec = BackendSpec(
            f"b{place:04d}", f"http://b{place}", "vllm", "m", "m", backend.hardware, slots=backend.slots,
            context_tokens=40_960, price_per_hour=backend.price_per_hour,
            coefficients=replace(backend.coefficients, chunk_tokens=backend.chunk_tokens))
        streams = dice.randrange(2, 30)
        waiting = dice.randrange(0, 3)
        views.append(BackendView(
            spec, Health(HealthState.HEALTHY), in_flight_requests=streams + waiting,
            in_flight_prefill_requests=waiting, in_flight_prefill_tokens=900 * waiting,
            in_flight_decode_requests=streams, in_flight_context_tokens=900 * streams, served_requests=10,
            last_outcome_at_s=NOW_S, belief=learner.belief(spec.name, NOW_S)))
    return views


def _taught(pipeline: Pipeline, learner: Learner, views: Sequence[BackendView], dice: Random) -> None:
    """A minute of traffic: some requests have ended, some streams of each class are open everywhere."""
    for number in range(40 * len(views)):
        view, facts, now = views[number % len(views)], dice.choice(CLASSES), NOW_S + 60.0 * number / (40 * len(views))
        sent = learner.sent(facts, Priced(view, 1e-4), now)
        learner.first_token(sent, now + 0.1 * dice.lognormvariate(0.0, 0.3))
        if number % 8:
            learner.ended(sent, End(facts.expected_output_tokens), now + 0.02 * facts.expected_output_tokens)


def main(given: Sequence[str] | None = None) -> None:
    """Prints a line a fleet, or JSON."""
    parser = argparse.ArgumentParser(description="What one decision costs.")
    parser.add_argument("--policy", default="headrace", help="a preset (default: headrace)")
    parser.add_argument("--decisions", type=int, default=3000, help="of each fleet (default: 3000)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(given)
    costs = [measure(options.policy, size, options.decisions, new_views=new) for size in SIZES for new in (False, True)]
    if options.json:
        json.dump([asdict(cost) for cost in costs], sys.stdout)
        sys.stdout.write("\n")
        return
    for cost in costs:
        print(f"{cost.policy:12} {cost.form}, {cost.backends:5} backends, views {cost.views:4}: "
              f"mean {cost.mean_us:6.1f} µs, p50 {cost.p50_us:6.1f}, p99 {cost.p99_us:6.1f}, cpu {cost.cpu_us:6.1f} "
              f"and its p99 {cost.cpu_p99_us:6.1f}; {cost.weighed:.1f} candidates weighed")


if __name__ == "__main__":
    main()
