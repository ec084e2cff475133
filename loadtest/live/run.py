"""`headrace bench policies`: brings up engines and gateways, drives the rounds, and says what came out.

One visit after the other: a policy has the engines alone for one block of arrivals, then the next policy for the same
block. The first round warms the gateways up and is not counted.
"""

import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

from loadtest.live import showing
from loadtest.live.classes import LiveClass, NoCoefficients, capacity_per_s, shapes, with_promises
from loadtest.live.figures import Outcome, accounted_cost, outcomes
from loadtest.live.fleet import Fleet, FleetError, Probe, probe, read_fleet, started_fleet
from loadtest.live.gateways import GatewayError, Served, gateway_document, serving
from loadtest.live.intervals import FEW_BLOCKS
from loadtest.live.machine import Machine
from loadtest.live.rows import judge, summarize
from loadtest.live.schedule import Block, drain_s, lay_out, order
from loadtest.live.visits import VisitError, visit
from loadtest.sim.run import SimError, policy_spec

DEFAULT_POLICIES = ("headrace", "round_robin", "least_inflight", "p2c", "weighted_least_request")
LOAD = 0.5
VISIT_OVERHEAD_S = 4.0
"""Locust's start and the drain of a usual block: an estimate for as long as nothing was measured."""
CLOSING_S = 5.0
QUIET = 0.05
"""Share of the processors that others may take before a reader is warned."""


@dataclass(frozen=True, slots=True)
class PoliciesOptions:
    """One run."""

    policies: tuple[str, ...] = DEFAULT_POLICIES
    """The first is the one that the others are held against."""
    fleet: Path | None = None
    """A fleet file whose engines run; `None`: start some."""
    engines: Literal["llamacpp", "simulated"] = "llamacpp"
    time_scale: float = 1.0
    """Of simulated engines: how many times faster than life."""
    minutes: float = 10.0
    rounds: int | None = None
    """Counted rounds at most; `None`: as many as the time allows."""
    block_s: float = 12.0
    """Seconds in which the requests of one visit arrive."""
    load: float = LOAD
    """Share of what the engines carry, by their coefficients."""
    rate_per_s: float | None = None
    """Requests a second instead of that."""
    scale: float = 1.0
    """Prompts and answers that many times as long as usual."""
    seed: int = 1
    report: Path | None = None
    judge: bool = False
    """Let the exit code say whether the goal is met."""
    json: bool = False


class TooShort(Exception):
    """The time does not suffice for one round; the message says what would."""


REFUSALS = (SimError, FleetError, NoCoefficients, GatewayError, VisitError, TooShort)


def run_policies(options: PoliciesOptions) -> int:
    """Run and report. Exit code 0: done; 1: with `judge`, the goal is missed; 2: the run could not take place."""
    options = replace(options, policies=tuple(dict.fromkeys(options.policies)))
    try:
        with ExitStack() as running:
            if options.report:
                folder = options.report
                folder.mkdir(parents=True, exist_ok=True)
            else:
                folder = Path(running.enter_context(tempfile.TemporaryDirectory(prefix="headrace-policies-")))
            # Relative paths mean something else to children that run elsewhere.
            run = _Run(options, folder.absolute())
            run.measure(running)
    except REFUSALS as error:
        print(f"headrace bench policies: {error}", file=sys.stderr)
        return 2
    rows = summarize(run.counted, [spec.name for spec in run.fleet.specs], [each.name for each in run.classes],
                     options.seed)
    verdict = judge(rows)
    if options.report:
        document = showing.as_json(rows, verdict, run.classes, run.setting)
        (options.report / "rows.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        run.write_outcomes(options.report / "outcomes.jsonl")
    showing.show(rows, verdict, run.classes, run.setting, json=options.json, report=options.report)
    return 1 if options.judge and verdict is not None and not verdict.met else 0


@dataclass(slots=True)
class _Run:
    """One run as it goes on."""

    options: PoliciesOptions
    folder: Path
    fleet: Fleet = field(init=False)
    classes: tuple[LiveClass, ...] = field(init=False)
    counted: dict[str, list[tuple[Outcome, ...]]] = field(init=False)
    """By policy, its blocks."""
    blocks: list[Block] = field(default_factory=list)
    setting: dict[str, object] = field(default_factory=dict)
    longest_visit_s: float = 0.0
    began_s: float = field(default_factory=time.monotonic)

    def measure(self, running: ExitStack) -> None:
        """Everything, until the time is over. Raises any of `REFUSALS`."""
        options = self.options
        if not options.policies:
            raise SimError("name one policy at least: the first is what the others are held against")
        for policy in options.policies:
            policy_spec(policy)
        self.counted = {policy: [] for policy in options.policies}
        self.longest_visit_s = options.block_s + VISIT_OVERHEAD_S
        self._demand_time_for(rounds=2)
        self.fleet = self._fleet(running)
        say("asking each engine a few times, alone")
        probes = probe(self.fleet, options.seed)
        self.classes = with_promises(shapes(options.scale), {
            spec.name: spec.coefficients for spec in self.fleet.specs if spec.coefficients})
        processors = len(os.sched_getaffinity(0))
        rate_per_s = options.rate_per_s or options.load * capacity_per_s(self.fleet.specs, self.classes, processors)
        gateways = [self._gateway(running, number, policy) for number, policy in enumerate(options.policies)]
        for each in gateways:
            each.await_backends()
        machine = Machine.now()
        self._rounds(gateways, rate_per_s)
        self.setting = self._describe(probes, rate_per_s, machine.others_since())

    def _fleet(self, running: ExitStack) -> Fleet:
        if self.options.fleet:
            return read_fleet(self.options.fleet, os.environ)
        say(f"starting engines ({self.options.engines}); their first start on a machine takes a minute")
        return running.enter_context(started_fleet(self.folder, self.options.engines, self.options.time_scale))

    def _gateway(self, running: ExitStack, number: int, policy: str) -> Served:
        log = f"decisions-{number}.jsonl" if self.options.report else None
        document = gateway_document(self.fleet, self.classes, policy, log)
        return running.enter_context(serving(self.folder, number, policy, document))

    def _rounds(self, gateways: Sequence[Served], rate_per_s: float) -> None:
        """The warm-up, and as many rounds as the time allows."""
        options = self.options
        self._round(gateways, lay_out(0, self.classes, rate_per_s, options.block_s, options.seed))
        self._demand_time_for(rounds=1)
        while len(self.blocks) != options.rounds and self._has_time_for(rounds=1):
            block = lay_out(len(self.blocks) + 1, self.classes, rate_per_s, options.block_s, options.seed)
            for policy, of_block in self._round(gateways, block).items():
                self.counted[policy].append(of_block)
            self.blocks.append(block)

    def _round(self, gateways: Sequence[Served], block: Block) -> dict[str, tuple[Outcome, ...]]:
        """Each gateway in its turn with the same block."""
        by_name = {each.name: each for each in self.classes}
        cost_of, served = accounted_cost(self.fleet.specs), {each.policy: each for each in gateways}
        found: dict[str, tuple[Outcome, ...]] = {}
        for place, policy in enumerate(order(self.options.policies, block.number)):
            name = f"round {block.number}" if block.number else "warm-up"
            say(f"{name}, {policy}: {len(block.arrivals)} requests; {max(0.0, self._left_s()) / 60:.1f} min left")
            began_s = time.monotonic()
            done = visit(served[policy], block, model=self.fleet.model, seed=self.options.seed,
                         drain_s=drain_s(block, by_name), folder=self.folder / f"visit-{block.number}-{place}")
            if not done.left_idle:
                say(f"{name}, {policy}: engines are still at work after the drain; the next visit inherits that")
            self.longest_visit_s = max(self.longest_visit_s, time.monotonic() - began_s)
            found[policy] = outcomes(block, done.records, by_name, cost_of)
        return found

    def _left_s(self) -> float:
        return self.began_s + 60.0 * self.options.minutes - CLOSING_S - time.monotonic()

    def _has_time_for(self, rounds: int) -> bool:
        return self._left_s() >= rounds * len(self.options.policies) * self.longest_visit_s

    def _demand_time_for(self, rounds: int) -> None:
        if not self._has_time_for(rounds):
            needed_s = 60.0 * self.options.minutes - self._left_s() + rounds * len(
                self.options.policies) * self.longest_visit_s
            raise TooShort(f"{self.options.minutes:g} minutes are too short for one round after the warm-up: give "
                           f"--minutes {needed_s / 60 + 0.1:.1f}, a shorter --block-s, or fewer --policies")

    def _describe(self, probes: dict[str, Probe], rate_per_s: float, others: float | None) -> dict[str, object]:
        """Under what circumstances the numbers came about, and what a reader must know."""
        found: dict[str, object] = {
            "machine": f"{os.cpu_count()} processors, {platform.machine()}, {platform.system()} {platform.release()}",
            "model": self.fleet.model, "rate_per_s": round(rate_per_s, 4), "block_s": self.options.block_s,
            "blocks": len(self.blocks), "seed": self.options.seed,
            "minutes": round((time.monotonic() - self.began_s) / 60, 2),
            "ttft_over_card": {name: round(each.ttft_over_card, 2) for name, each in probes.items()},
            "inter_token_over_card": {name: round(each.inter_token_over_card, 2) for name, each in probes.items()},
            "others": None if others is None else round(others, 3),
        }
        warnings = []
        if self.fleet.started_here and others is not None and others > QUIET:
            warnings.append(f"other processes took {others:.0%} of the processors; only figures from a quiet machine "
                            "are to be quoted")
        if off := [name for name, each in probes.items() if each.is_far_off]:
            warnings.append(f"{', '.join(off)}: idle, far from what the coefficients say; measure anew on a quiet "
                            "machine (docs/real-engines.md)")
        if len(self.blocks) < FEW_BLOCKS:
            warnings.append(f"only {len(self.blocks)} blocks: intervals are a hint")
        return found | ({"warnings": warnings} if warnings else {})

    def write_outcomes(self, path: Path) -> None:
        """One line an arrival and policy."""
        with path.open("w", encoding="utf-8") as file:
            for policy, of_policy in self.counted.items():
                for block, of_block in zip(self.blocks, of_policy, strict=True):
                    for number, (arrival, outcome) in enumerate(zip(block.arrivals, of_block, strict=True)):
                        line = {"policy": policy, "block": block.number, "number": number, "at_s": arrival.at_s,
                                "max_tokens": arrival.max_tokens, **asdict(outcome)}
                        file.write(json.dumps(line) + "\n")


def say(text: str) -> None:
    """A line on standard error."""
    print(f"bench policies: {text}", file=sys.stderr, flush=True)
