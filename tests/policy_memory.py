"""Telling learners what became of requests, and decisions that see what they believe."""

from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

from backends.catalog.views import BackendView
from policies.attempts import FailureCause
from policies.facts import RequestFacts
from policies.learning import End, Learner
from policies.pipeline import decide
from policies.policy import Decision, Priced
from policies.registry import PolicySpec, build_learner, build_pipeline
from tests.policy_fleet import NOW_S, a_fleet, a_request


def serve(
    learner: Learner, backend: BackendView, facts: RequestFacts | None = None, *, sent_at_s: float = NOW_S - 10.0,
    ttft_s: float | None = 0.1, total_s: float = 1.0, output_tokens: int = 10, failure: FailureCause | None = None,
    **end: Any,
) -> None:
    """One request from decision to end; `ttft_s=None`: no first token came."""
    sent = learner.sent(facts or a_request(stream=True), Priced(backend, 0.0), sent_at_s)
    if ttft_s is not None:
        learner.first_token(sent, sent_at_s + ttft_s)
    learner.ended(sent, End(output_tokens, failure, **end), sent_at_s + total_s)


class Router:
    """A preset with its learner, deciding on pictures that carry what it believes."""

    def __init__(self, preset: str, seed: int = 0, **settings: Any) -> None:
        spec = PolicySpec(preset, settings=settings)
        self.pipeline, self.learner, self.rng = build_pipeline(spec), build_learner(spec), Random(seed)
        self.sequence = 0

    def decide(self, facts: RequestFacts, *backends: BackendView, now: float = NOW_S) -> Decision:
        """One decision, without telling the learner of it."""
        fleet = replace(a_fleet(*backends, sequence=self.sequence), belief=self.learner.pool_belief(now))
        return decide(self.pipeline, facts, fleet, now, self.rng)

    def choose(self, facts: RequestFacts, *backends: BackendView, now: float = NOW_S) -> str:
        """Decides and sends: the learner hears of it, at once as in a router."""
        decision = self.decide(facts, *backends, now=now)
        self.sequence += 1
        assert decision.chosen is not None
        priced = next(each for each in decision.candidates if each.backend is decision.chosen)
        self.learner.sent(facts, priced, now)
        return decision.chosen.spec.name

    def shares(self, facts: RequestFacts, *backends: BackendView, picks: int) -> Counter[str]:
        return Counter([self.choose(facts, *backends) for _ in range(picks)])
