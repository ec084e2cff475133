"""Backends, requests and fleets for the tests of routing decisions; every field can be set."""

from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

from backends.catalog.health import Health, HealthState
from backends.catalog.spec import BackendSpec, Coefficients
from backends.catalog.views import BackendView, FleetView
from policies.facts import Budget, RequestFacts
from policies.pipeline import decide
from policies.policy import Decision, Pipeline

NOW_S = 1000.0

A100_PAIR = Coefficients(
    version="test", source="the size of a 32B model on two A100", prefill_base_ms=20.0, prefill_ms_per_token=0.125,
    prefill_ms_per_pair=6e-6, decode_base_ms=24.0, decode_ms_per_seq=0.09, decode_ms_per_seq_token=8.6e-5, host_ms=2.0,
    first_token_overhead_ms=30.0, kv_capacity_tokens=300_000,
)

_SPEC_FIELDS = frozenset(BackendSpec.__dataclass_fields__)


def a_backend(name: str = "a", **given: Any) -> BackendView:
    """A measured, healthy, idle backend that has served before; fields of spec and view alike by keyword."""
    spec = BackendSpec(name=name, url=f"http://{name}", engine="vllm", model="m", served_model_name="m",
                       card_type="a100", price_per_hour=2.0, coefficients=A100_PAIR)
    spec = replace(spec, **{key: value for key, value in given.items() if key in _SPEC_FIELDS})
    view = BackendView(spec, Health(HealthState.HEALTHY), served_requests=10, last_outcome_at_s=NOW_S - 1.0)
    return replace(view, **{key: value for key, value in given.items() if key not in _SPEC_FIELDS})


def decoding(name: str, streams: int, **given: Any) -> BackendView:
    """A backend with so many streams of 500 tokens under way."""
    return a_backend(name, in_flight_requests=streams, in_flight_decode_requests=streams,
                     in_flight_context_tokens=500 * streams, **given)


def a_request(**given: Any) -> RequestFacts:
    """A chat request of 400 prompt tokens, expected to answer with 128, without a budget."""
    facts = RequestFacts(model="m", prompt_tokens=400)
    return replace(facts, **given)


ROOMY = Budget(ttft_s=10.0, inter_token_s=1.0, e2e_s=100.0)


def a_fleet(*backends: BackendView, sequence: int = 0) -> FleetView:
    return FleetView(backends, config_hash="c0ffee", sequence=sequence)


def choose(pipeline: Pipeline, facts: RequestFacts, *backends: BackendView, seed: int = 0) -> Decision:
    return decide(pipeline, facts, a_fleet(*backends), NOW_S, Random(seed))


def name_of(decision: Decision) -> str | None:
    return decision.chosen.spec.name if decision.chosen else None


def shares(pipeline: Pipeline, facts: RequestFacts, *backends: BackendView, picks: int, seed: int = 0) -> Counter[str]:
    """How often each backend is chosen when the same picture is decided on again and again."""
    rng, counts = Random(seed), Counter[str]()
    for sequence in range(picks):
        chosen = decide(pipeline, facts, a_fleet(*backends, sequence=sequence), NOW_S, rng).chosen
        assert chosen is not None
        counts[chosen.spec.name] += 1
    return counts
