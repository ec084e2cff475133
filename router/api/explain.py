"""`POST /admin/explain`: where a request would go now, and why. Nothing is sent, counted or learned.

It takes what the public route takes, headers and all, and decides on the picture that the next real decision will see.
Instead of a prompt it takes a size. Dice are thrown apart, so that looking does not change what comes.

The answer shows each candidate weighed, those too that the decision could pass over unweighed: what the first token,
the pace and the end are predicted to be (mean, the middle, and the interval that 98 of 100 stay in), what the request
costs there term by term, the probability that the budget is missed, and how many others would miss theirs.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isfinite
from time import perf_counter
from typing import Any

import msgspec

from backends.catalog.views import FleetView
from policies.beliefs.classes import ClassBelief
from policies.beliefs.tails import PRIOR, Table, quantile
from policies.chance import end_sd_s, weighed
from policies.estimate import Estimate, predict
from policies.facts import Budget, RequestFacts
from policies.filters import Rejection
from policies.footing import belief_of, coefficients_of, drift_of
from policies.pipeline import decide
from policies.policy import Decision, Pipeline, Priced
from router.fleet.standing import class_belief, model_state, output_spread
from router.path.dispatch import Dispatcher
from router.request.intake import PROMPT_MEMBER, Endpoint, read_request, request_id_of
from router.wire.errors import bad_request, unauthorized

SIZE_MEMBERS = ("prompt_tokens", "expected_output_tokens")
QUANTILES = (("p01_s", 0.01), ("p50_s", 0.5), ("p99_s", 0.99))


def explained(dispatcher: Dispatcher, headers: Mapping[bytes, bytes], body: bytes) -> dict[str, Any]:
    """The decision on a request as a JSON document. What is not known, or not finite, is `None`.

    Args:
        headers: lower-case names, as of a real request. `authorization` tells the tenant, where keys are asked for.

    Raises:
        ApiError: as for a real request; 400 where neither a prompt nor its size is given.
    """
    now, generation, fleet = dispatcher.clock(), dispatcher.generation, dispatcher.fleet
    endpoint, body, sizes = _shape_of(body)
    tenant = None
    authorization = headers.get(b"authorization")
    if authorization is not None:
        principal = generation.keys.authenticate(authorization)
        if principal is None:
            raise unauthorized()
        tenant = principal.tenant
    plain = {name: value for name, value in headers.items() if name not in (b"content-encoding", b"content-type")}
    request = read_request(endpoint, request_id_of(plain), plain, body, generation.vocabulary,
                           dispatcher.prompt_ratios, tenant=tenant, expect_output=fleet.learner.expect_output)
    facts = request.facts
    if sizes:
        facts = replace(facts, prompt_tokens=sizes.get("prompt_tokens", facts.prompt_tokens),
                        expected_output_tokens=sizes.get("expected_output_tokens", facts.expected_output_tokens))
    view = fleet.preview()
    began_s = perf_counter()
    decision = decide(generation.pipeline, facts, view, now, random.Random())
    took_s = perf_counter() - began_s
    return _document(generation.pipeline, facts, decision, view, now, took_s)


def _document(
    pipeline: Pipeline, facts: RequestFacts, decision: Decision, view: FleetView, now: float, took_s: float
) -> dict[str, Any]:
    kind, spread = class_belief(view.belief, facts), output_spread(view.belief, facts)
    chosen = decision.chosen
    return {
        "backend": None if chosen is None else chosen.spec.name,
        "reason": decision.reason,
        "price": _finite(decision.price),
        "shed": chosen is None and decision.retry_after_s is not None,
        "retry_after_s": decision.retry_after_s,
        "policy": decision.policy,
        "config_hash": decision.config_hash,
        "decided_in_us": round(took_s * 1e6, 1),
        "request": _request(facts),
        "class": None if kind is None else _class(kind),
        "candidates": [
            _candidate(entry, facts, _budget(pipeline, facts), spread, now, is_chosen=entry.backend is chosen)
            for entry in sorted(decision.candidates, key=lambda entry: (entry.backend is not chosen, entry.price))
        ],
        "rejected": [
            {"backend": entry.backend, "reason": str(entry.reason)}
            for entry in decision.rejected if entry.reason != Rejection.OTHER_MODEL
        ],
    }  # fmt: skip


def _shape_of(body: bytes) -> tuple[Endpoint, bytes, dict[str, int]]:
    """Which route the body is for, the body with a prompt in it, and the sizes that replace what is read of it."""
    try:
        members = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        raise bad_request("The body must be a JSON object, as for /v1/chat/completions.", code="invalid_json") from None
    sizes: dict[str, int] = {}
    for name in SIZE_MEMBERS:
        raw = members.pop(name, None)
        if raw is not None:
            try:
                sizes[name] = msgspec.json.decode(raw, type=int)
            except msgspec.DecodeError:
                sizes[name] = 0
            if not 0 < sizes[name] <= 2**53:
                raise bad_request(f"The member '{name}' must be a whole number above 0.", param=name)
    for endpoint, member in PROMPT_MEMBER.items():
        if member in members:
            return endpoint, msgspec.json.encode(members) if sizes else body, sizes
    if "prompt_tokens" not in sizes:
        raise bad_request("Give 'messages', 'prompt' or 'input' as in a real request, or 'prompt_tokens' instead.",
                          param="messages")
    return Endpoint.COMPLETIONS, msgspec.json.encode({**members, "prompt": msgspec.Raw(b'""')}), sizes


def _request(facts: RequestFacts) -> dict[str, Any]:
    budget = facts.budget
    return {
        "model": facts.model,
        "prompt_tokens": facts.prompt_tokens,
        "expected_output_tokens": facts.expected_output_tokens,
        "max_output_tokens": facts.max_output_tokens,
        "stream": facts.stream,
        "latency_class": facts.latency_class,
        "budget": {"ttft_s": budget.ttft_s, "inter_token_s": budget.inter_token_s, "e2e_s": budget.e2e_s},
        "priority": facts.priority,
        "sheddable": facts.sheddable,
        "tenant": facts.tenant,
        "continues_a_conversation": facts.session_key is not None,
    }


def _class(kind: ClassBelief) -> dict[str, Any]:
    return {
        "miss_weight": round(kind.weight, 4),
        "missed_ratio": round(kind.missed, 5),
        "judged": kind.judged,
        "expected_output_tokens": round(kind.lengths.expected_output_tokens, 1),
        "output_spread": round(kind.lengths.spread, 3),
    }


def _budget(pipeline: Pipeline, facts: RequestFacts) -> Budget:
    """The budget that the picker holds candidates against."""
    stand_in = getattr(pipeline.picker, "budget_of", None)
    return facts.budget if stand_in is None else stand_in(facts)


def _candidate(
    entry: Priced, facts: RequestFacts, budget: Budget, spread: float, now: float, *, is_chosen: bool
) -> dict[str, Any]:
    view = entry.backend
    belief = belief_of(view)
    full = entry if entry.miss is not None else weighed(facts, entry, budget, spread, now)
    estimate = full.estimate or predict(facts, view, now)
    return {
        "backend": view.spec.name,
        "chosen": is_chosen,
        "considered": entry.estimate is not None,
        "price": _finite(entry.price),
        "terms": {name: _finite(value) for name, value in entry.terms},
        "miss_probability": _finite(full.miss),
        "crowding": _finite(full.crowding),
        "ttft": _spread_of(estimate.ttft_s, estimate.ttft_sd_s, None if belief is None else belief.ttft.table),
        "tpot": _spread_of(estimate.tpot_s, estimate.tpot_sd_s, None if belief is None else belief.pace.table),
        "e2e": _spread_of(estimate.e2e_s, end_sd_s(facts, estimate, spread),
                          None if belief is None else belief.end.table),
        "of_ttft": _parts(estimate),
        "model_state": str(model_state(view.spec, view.belief, now)),
        "coefficients": coefficients_of(view).version,
        "drift": round(drift_of(view, now), 4),
        "in_flight": {"requests": view.in_flight_requests, "prefill_tokens": view.in_flight_prefill_tokens,
                      "context_tokens": view.in_flight_context_tokens},
        "weight": view.spec.weight,
    }  # fmt: skip


def _spread_of(mean_s: float, sd_s: float, table: Table | None) -> dict[str, float | None]:
    """Mean and quantiles by the learned residuals, else by the prior."""
    survival: Sequence[float] = PRIOR if table is None else table
    figures = {name: max(0.0, mean_s + quantile(survival, share) * sd_s) for name, share in QUANTILES}
    return {name: _finite(value, 6) for name, value in {"mean_s": mean_s, **figures}.items()}


def _parts(estimate: Estimate) -> dict[str, float | int | None]:
    return {"waiting_s": _finite(estimate.drain_s, 6), "prefill_s": _finite(estimate.ttft_s - estimate.drain_s, 6),
            "cached_tokens": estimate.cached_tokens}


def _finite(value: float | None, digits: int | None = None) -> float | None:
    if value is None or not isfinite(value):
        return None
    return value if digits is None else round(value, digits)
