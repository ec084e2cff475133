"""One request that has ended as one line of JSON: what was decided, on what grounds, and what came of it.

Every field is copied by name from a noun whose content is known, so that no prompt, header or key can come along; the
request's id is the one word of a client in it. `docs/decision-record.md` has a row for each field, which a test holds.
"""

from datetime import UTC, datetime
from functools import lru_cache
from math import isfinite

import msgspec

from router.record.grounds import grounds_of
from router.record.grounds_record import CandidateRecord, Grounds, RejectedRecord
from router.request.exchange import Exchange, Tried

SCHEMA_VERSION = 1


class BudgetRecord(msgspec.Struct, gc=False):
    """What the caller was promised."""

    ttft_s: float | None
    inter_token_s: float | None
    e2e_s: float | None


class AttemptRecord(msgspec.Struct, gc=False):
    """One attempt."""

    backend: str | None
    reason: str
    price: float | None
    cause: str | None
    hedge: bool
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
    queued_s: float
    waited_s: float
    overhead_ms: float | None
    ttft_s: float | None
    tpot_s: float | None
    total_s: float
    predicted_ttft_s: float | None
    predicted_tpot_s: float | None
    predicted_e2e_s: float | None
    predicted_ttft_p99_s: float | None
    predicted_e2e_p99_s: float | None
    predicted_miss: float | None
    miss_weight: float | None
    prompt_tokens: int | None
    generated_tokens: int | None
    hedge: str | None
    attempts: list[AttemptRecord]
    candidates: list[CandidateRecord]
    candidate_count: int
    rejected: list[RejectedRecord]
    rejected_count: int


def record_of(exchange: Exchange, wall_offset_s: float) -> DecisionRecord:
    """The record of a request that has ended; `wall_offset_s` is what makes Unix time of its monotonic times."""
    facts, principal, usage, grounds = exchange.facts, exchange.principal, exchange.usage, None
    if exchange.packed_grounds is not None:
        grounds = Grounds.unpacked(exchange.packed_grounds)
    elif exchange.decision is not None and facts is not None:
        grounds = grounds_of(exchange.decision, facts, exchange.decided_at_s)
    expected = None if grounds is None else grounds.expected
    began_at_s, received_at_s, first_at_s = exchange.began_at_s, exchange.received_at_s, exchange.first_token_at_s
    return DecisionRecord(
        v=SCHEMA_VERSION,
        time=_rfc3339(exchange.ended_at_s + wall_offset_s),
        request_id=exchange.request_id,
        tenant="" if principal is None else principal.tenant,
        key_id="" if principal is None else principal.key_id,
        endpoint=exchange.endpoint,
        model=exchange.model,
        latency_class="" if facts is None else facts.latency_class,
        status=exchange.status,
        outcome=exchange.outcome,
        backend=None if grounds is None else grounds.backend,
        policy=None if grounds is None else grounds.policy,
        reason=None if grounds is None else grounds.reason,
        price=None if grounds is None else grounds.price,
        coefficients=None if grounds is None else grounds.coefficients,
        config_hash=exchange.generation.config_hash,
        stream=None if facts is None else facts.stream,
        prompt_tokens_estimate=None if facts is None else facts.prompt_tokens,
        max_output_tokens=None if facts is None else facts.max_output_tokens,
        expected_output_tokens=None if facts is None else facts.expected_output_tokens,
        budget=None if facts is None else BudgetRecord(
            facts.budget.ttft_s, facts.budget.inter_token_s, facts.budget.e2e_s),
        received_s=_seconds(received_at_s - began_at_s) if received_at_s else None,
        queued_s=_seconds(exchange.queued_s),
        waited_s=_seconds(exchange.waited_s),
        overhead_ms=None if exchange.overhead_s is None else round(exchange.overhead_s * 1e6) / 1e3,
        ttft_s=None if first_at_s is None else _seconds(first_at_s - received_at_s),
        tpot_s=_tpot_s(exchange),
        total_s=_seconds(exchange.ended_at_s - (received_at_s or began_at_s)),
        predicted_ttft_s=None if expected is None else _seconds(expected.ttft_s),
        predicted_tpot_s=None if expected is None else _seconds(expected.tpot_s),
        predicted_e2e_s=None if expected is None else _seconds(expected.e2e_s),
        predicted_ttft_p99_s=None if expected is None or expected.ttft_p99_s is None else _seconds(expected.ttft_p99_s),
        predicted_e2e_p99_s=None if expected is None or expected.e2e_p99_s is None else _seconds(expected.e2e_p99_s),
        predicted_miss=None if grounds is None else grounds.miss,
        miss_weight=exchange.miss_weight,
        prompt_tokens=None if usage is None else usage.prompt_tokens,
        generated_tokens=_generated_tokens(exchange),
        hedge=exchange.hedge,
        attempts=[_attempt(tried, began_at_s) for tried in exchange.tried],
        candidates=[] if grounds is None else grounds.candidates,
        candidate_count=0 if grounds is None else grounds.candidate_count,
        rejected=[] if grounds is None else grounds.rejected,
        rejected_count=0 if grounds is None else grounds.rejected_count,
    )


def _attempt(tried: Tried, began_at_s: float) -> AttemptRecord:
    return AttemptRecord(tried.backend, tried.reason, tried.price, tried.cause, tried.is_hedge,
                         _seconds(tried.began_at_s - began_at_s), _seconds(tried.ended_at_s - tried.began_at_s))


def _generated_tokens(exchange: Exchange) -> int | None:
    if exchange.usage is not None:
        return exchange.usage.completion_tokens
    return None if exchange.first_token_at_s is None else exchange.generated_tokens


def _tpot_s(exchange: Exchange) -> float | None:
    tokens = _generated_tokens(exchange)
    first, last = exchange.first_token_at_s, exchange.last_token_at_s
    if first is None or last is None or tokens is None or tokens < 2 or last <= first:
        return None
    return _seconds((last - first) / (tokens - 1))


def _seconds(value: float) -> float:
    """To the microsecond. `round(value, 6)` does the same at six times the cost, and there are a dozen in a line."""
    return round(value * 1e6) / 1e6 if isfinite(value) else value


@lru_cache(maxsize=4)
def _whole_second(unix_s: int) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%S")


def _rfc3339(unix_s: float) -> str:
    whole_s = int(unix_s)
    return f"{_whole_second(whole_s)}.{int((unix_s - whole_s) * 1000):03d}Z"
