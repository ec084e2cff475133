"""What `headrace up --demo lending` plays: the times of its wave, and the allocator file of its one training job.

Everything that takes hours in a cluster takes seconds here: a season is one period of the wave, a loan is meant to last
a fifth of it. Each engine has a node and a card type of its own, so that the allocator takes just the one that the
router can spare; their coefficients are all 1, since nobody has measured a card that is a process.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INFERENCE, TRAINING, QUEUE, JOB = "inference", "training", "research", "demo-training"
CARD_PREFIX = "card-of-"


@dataclass(frozen=True, slots=True)
class Scene:
    """The times and rates of one demo. Shares are of the capacity that the router publishes."""

    period_s: float = 60.0
    begins_at: float = 0.75
    """Share of the period at which the wave begins: on the way down, so that what is known of it after one season is
    known before the trough."""
    periods: float = 2.75
    """One to learn the season in, and troughs in which a loan goes out, to be home before the crest."""
    bin_s: float = 4.0
    """Wide enough for more than a few requests: what chance makes of few is kept in reserve."""
    prelude_s: float = 10.0
    """Steady traffic at first, so that the router knows what requests are like and what they cost."""
    prelude_per_s: float = 2.0
    trough_share: float = 0.15
    peak_share: float = 0.8
    target: float = 0.7
    """`lending.target` of the fleet file."""
    prompt_tokens: int = 120
    output_tokens: int = 48
    grace_s: float = 4.0
    is_even: bool = False
    """Requests come evenly spaced instead of as a Poisson stream."""
    budget: Mapping[str, Any] | None = None
    """What is promised, where that differs from what `headrace up` promises otherwise."""
    seed: int = 1

    @property
    def loan_s(self) -> float:
        """What a loan promises."""
        return self.period_s / 5.0

    @property
    def wave_s(self) -> float:
        return self.periods * self.period_s

    def classes(self, given: tuple[Mapping[str, Any], ...]) -> tuple[Mapping[str, Any], ...]:
        """The fleet file's latency classes, of which the first is the default and that of the wave."""
        return given if self.budget is None else ({**given[0], **self.budget}, *given[1:])

    def lending(self) -> Mapping[str, Any]:
        """The fleet file's section."""
        return {"forecaster": "seasonal_naive", "bin_s": self.bin_s, "season_s": self.period_s,
                "horizon_s": self.loan_s + 2.0, "grace_s": self.grace_s, "target": self.target,
                "headroom_replicas": 0, "assumed_return_s": 3.0, "warmup_requests": 2}


SIMULATED = Scene()
LLAMACPP = Scene(period_s=100.0, periods=2.0, bin_s=10.0, prelude_s=20.0, prelude_per_s=0.3, target=0.3,
                 prompt_tokens=12, output_tokens=10, grace_s=6.0, is_even=True,
                 budget={"ttft_s": 5.0, "inter_token_s": 0.6, "e2e_s": 30.0})
"""Real engines share the machine's few cores, but were measured with all of them to themselves: a third is counted on.
What is promised is what they keep on a busy laptop."""


def write_allocator_file(folder: Path, engines: Sequence[str], scene: Scene) -> Path:
    """The allocator file and its coefficients, in `folder`; returns the file."""
    cards = {name: f"{CARD_PREFIX}{name}" for name in engines}
    (folder / "coefficients.json").write_text(json.dumps({
        "version": "demo-1", "reference": cards[engines[0]], "source": "assumed: every engine counts alike",
        "cards": {card: {"scalar": 1.0} for card in cards.values()}, "speeds": {}}, indent=1))
    document = {
        "version": 1,
        "state": "allocator",
        "coefficients": "coefficients.json",
        "execution": {"kill_margin_s": 0.5, "poll_s": 0.1},
        "rules": {"tick_s": 0.25, "grace_s": scene.grace_s, "kill_margin_s": 0.5, "promised_min_s": scene.loan_s,
                  "offer_ttl_s": 20.0, "surplus_hold_s": 2.0, "supply_fresh_s": 10.0, "idle_return_s": 5.0,
                  "min_run_s": 0.0, "max_recalls": 1000, "min_loan_worth": 0.0, "default_estimate_s": 3600.0},
        "nodes": [{"name": name, "card": card, "devices": 1, "labels": {"purpose": INFERENCE}}
                  for name, card in cards.items()],
        "pools": [{"name": INFERENCE, "kind": "inference", "selector": {"purpose": INFERENCE}},
                  {"name": TRAINING, "kind": "training", "selector": {"purpose": TRAINING}}],
        "queues": [{"name": QUEUE, "parent": TRAINING}],
        "backends": [{"name": name, "pool": INFERENCE, "devices": [f"{name}:0"], "reload_s": 5.0} for name in engines],
    }
    path = folder / "allocator.yaml"
    path.write_text(json.dumps(document, indent=1) + "\n")      # JSON is YAML
    return path


def training_job(folder: Path, engines: Sequence[str], python_path: str) -> Mapping[str, Any]:
    """The job file of a training that would take for ever: what it has done at the end is what was lent to it."""
    checkpoint = folder / "training.npz"
    return {
        "name": JOB, "queue": QUEUE, "kind": "training", "cards": [f"{CARD_PREFIX}{name}" for name in engines],
        "gang": 1, "checkpoint": {"takes_s": 1.0, "restart_s": 1.0},
        "command": [sys.executable, "-m", "loadtest.training_job", "--steps", "1000000", "--step-ms", "50",
                    "--checkpoint", str(checkpoint), "--json", "--log-every", "20"],
        "resume_args": ["--resume"], "env": {"PYTHONPATH": python_path}, "folder": str(folder),
    }
