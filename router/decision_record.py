"""One settled request as one line of JSON: what was decided, on what grounds, and what came of it.

The request's path makes a `SettledRequest`: references to frozen objects and a few numbers. `record_of` turns it into
a `DecisionRecord` later and elsewhere, since nothing it is made of changes any more. Every field is copied by name from
a noun whose content is known, so that no prompt, header or key can come along; the request's id is the one word of a
client in it.

`docs/decision-record.md` has a row for each field, which a test holds.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import NamedTuple

import msgspec

from backends.catalog.views import BackendView
from policies.estimate import ASSUMED, Estimate, predict
from policies.facts import RequestFacts
from policies.filters import Rejection
from policies.policy import Decision, Priced, Rejected

SCHEMA_VERSION = 1
MAX_LISTED = 32
"""Candidates and rejected backends that a record lists; a fleet of a thousand would fill a disk by itself."""


class Tried(NamedTuple):
    """One attempt of a request. Times are monotonic seconds."""

    decision: Decision
    """The decision that led to it."""
    cause: str | None
    """How it failed, in the words of `policies.attempts.FailureCause`; `None` where it gave the client its answer."""
    began_at_s: float
    ended_at_s: float


class SettledRequest(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One request that has ended, as its path leaves it. Times are monotonic seconds.

    Not seen by the garbage collector (`gc=False`): it holds no cycles, and thousands may wait to be written.
    """

    request_id: str
    endpoint: str
    model: str
    latency_class: str
    tenant: str
    key_id: str
    config_hash: str
    """Of the configuration that it began under."""
    status: int
    outcome: str
    began_at_s: float
    received_at_s: float
    """When the last byte of its body had come; 0 where it never did."""
    ended_at_s: float
    waited_s: float = 0.0
    overhead_s: float | None = None
    first_token_at_s: float | None = None
    last_token_at_s: float | None = None
    prompt_tokens: int | None = None
    """By the engine's count."""
    generated_tokens: int | None = None
    facts: RequestFacts | None = None
    decision: Decision | None = None
    """The last one; its own backend is that of the answer."""
    decided_at_s: float = 0.0
    """The time that decision was made with."""
    tried: tuple[Tried, ...] = ()


class BudgetRecord(msgspec.Struct, gc=False):
    """What the caller was promised."""

    ttft_s: float | None
    inter_token_s: float | None
    e2e_s: float | None


class CandidateRecord(msgspec.Struct, gc=False):
    """A backend that could have served the request, as the decision saw it."""

    backend: str
    price: float
    terms: dict[str, float]
    late_s: float
    ttft_s: float
    coefficients: str
    drift: float
    in_flight: int


class RejectedRecord(msgspec.Struct, gc=False):
    """A backend that a filter removed."""

    backend: str
    reason: str


class AttemptRecord(msgspec.Struct, gc=False):
    """One attempt."""

    backend: str | None
    reason: str
    price: float | None
    cause: str | None
    began_s: float
    took_s: float


class DecisionRecord(msgspec.Struct, gc=False):
    """The line, field by field in its order."""

    v: int
    time: str
    request_id: str
    tenant: str
    key_id: str
    endpoint: str
    model: str
    latency_class: str
    status: int
    outcome: str
    backend: str | None
    policy: str | None
    reason: str | None
    price: float | None
    coefficients: str | None
    config_hash: str
    stream: bool | None
    prompt_tokens_estimate: int | None
    max_output_tokens: int | None
    expected_output_tokens: int | None
    budget: BudgetRecord | None
    received_s: float | None
    waited_s: float
    overhead_ms: float | None
    ttft_s: float | None
    tpot_s: float | None
    total_s: float
    predicted_ttft_s: float | None
    predicted_tpot_s: float | None
    predicted_e2e_s: float | None
    prompt_tokens: int | None
    generated_tokens: int | None
    attempts: list[AttemptRecord]
    candidates: list[CandidateRecord]
    candidate_count: int
    rejected: list[RejectedRecord]
    rejected_count: int


def record_of(settled: SettledRequest, wall_offset_s: float) -> DecisionRecord:
    """The record of one request; `wall_offset_s` is what makes Unix time of its monotonic times.

    Where the policy predicted nothing (a baseline), the prediction for each candidate is made here from what the
    decision saw: `policies.estimate.predict` is pure.
    """
    facts, decision = settled.facts, settled.decision
    chosen = decision.chosen if decision is not None else None
    candidates: list[CandidateRecord] = []
    expected: Estimate | None = None
    if decision is not None and facts is not None:
        for entry in _listed(decision):
            estimate = entry.estimate or predict(facts, entry.backend, settled.decided_at_s)
            candidates.append(_candidate(entry, estimate))
            if entry.backend is chosen:
                expected = estimate
    received_at_s, first_at_s = settled.received_at_s, settled.first_token_at_s
    return DecisionRecord(
        v=SCHEMA_VERSION,
        time=_rfc3339(settled.ended_at_s + wall_offset_s),
        request_id=settled.request_id,
        tenant=settled.tenant,
        key_id=settled.key_id,
        endpoint=settled.endpoint,
        model=settled.model,
        latency_class=settled.latency_class,
        status=settled.status,
        outcome=settled.outcome,
        backend=chosen.spec.name if chosen is not None else None,
        policy=decision.policy if decision is not None else None,
        reason=decision.reason if decision is not None else None,
        price=decision.price if decision is not None else None,
        coefficients=_version(chosen) if chosen is not None else None,
        config_hash=settled.config_hash,
        stream=facts.stream if facts is not None else None,
        prompt_tokens_estimate=facts.prompt_tokens if facts is not None else None,
        max_output_tokens=facts.max_output_tokens if facts is not None else None,
        expected_output_tokens=facts.expected_output_tokens if facts is not None else None,
        budget=None if facts is None else BudgetRecord(
            facts.budget.ttft_s, facts.budget.inter_token_s, facts.budget.e2e_s),
        received_s=_seconds(received_at_s - settled.began_at_s) if received_at_s else None,
        waited_s=_seconds(settled.waited_s),
        overhead_ms=None if settled.overhead_s is None else round(settled.overhead_s * 1e3, 3),
        ttft_s=None if first_at_s is None else _seconds(first_at_s - received_at_s),
        tpot_s=_tpot_s(settled),
        total_s=_seconds(settled.ended_at_s - (received_at_s or settled.began_at_s)),
        predicted_ttft_s=None if expected is None else _seconds(expected.ttft_s),
        predicted_tpot_s=None if expected is None else _seconds(expected.tpot_s),
        predicted_e2e_s=None if expected is None else _seconds(expected.e2e_s),
        prompt_tokens=settled.prompt_tokens,
        generated_tokens=settled.generated_tokens,
        attempts=[_attempt(tried, settled.began_at_s) for tried in settled.tried],
        candidates=candidates,
        candidate_count=len(decision.candidates) if decision is not None else 0,
        rejected=_rejected(decision.rejected) if decision is not None else [],
        rejected_count=len(decision.rejected) if decision is not None else 0,
    )


def _listed(decision: Decision) -> Sequence[Priced]:
    """The candidates that a record has room for: the chosen one, and the cheapest others."""
    if len(decision.candidates) <= MAX_LISTED:
        return decision.candidates
    return sorted(decision.candidates, key=lambda entry: (entry.backend is not decision.chosen, entry.price))[
        :MAX_LISTED]


# Runs once per candidate of each request, on the same core as the requests themselves: its numbers are copied as they
# are, since rounding them costs as much as all else here.
def _candidate(entry: Priced, estimate: Estimate) -> CandidateRecord:
    view = entry.backend
    spec = view.spec
    return CandidateRecord(spec.name, entry.price, dict(entry.terms), entry.late_s, estimate.ttft_s,
                           (spec.coefficients or ASSUMED).version, view.drift, view.in_flight_requests)


def _rejected(rejected: tuple[Rejected, ...]) -> list[RejectedRecord]:
    """Those that serve the model: that the others do not is no news."""
    serving = [entry for entry in rejected if entry.reason != Rejection.OTHER_MODEL]
    return [RejectedRecord(entry.backend, entry.reason) for entry in serving[:MAX_LISTED]]


def _attempt(tried: Tried, began_at_s: float) -> AttemptRecord:
    decision = tried.decision
    return AttemptRecord(
        decision.chosen.spec.name if decision.chosen is not None else None, decision.reason,
        decision.price, tried.cause,
        _seconds(tried.began_at_s - began_at_s), _seconds(tried.ended_at_s - tried.began_at_s),
    )


def _tpot_s(settled: SettledRequest) -> float | None:
    first, last, tokens = settled.first_token_at_s, settled.last_token_at_s, settled.generated_tokens
    if first is None or last is None or tokens is None or tokens < 2 or last <= first:
        return None
    return _seconds((last - first) / (tokens - 1))


def _version(view: BackendView) -> str:
    return (view.spec.coefficients or ASSUMED).version


def _seconds(value: float) -> float:
    return round(value, 6)


def _rfc3339(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds")[:-6] + "Z"
