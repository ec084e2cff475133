"""What a request's machine time costs: the arithmetic of `prices.request_cost`, whose text has the formula.

Worked out for every candidate of each decision, so it stands apart from the part with the setting: this much of it can
be compiled (`compiled`). What does not depend on the request is kept with the spec, or with the view where a stand-in
takes the place of coefficients, since it changes with that.
"""

from collections.abc import Sequence

from backends.catalog.views import BackendView
from policies.beliefs.backend import BackendBelief
from policies.estimate import cached_tokens, coefficients_of
from policies.facts import RequestFacts
from policies.footing import belief_of, drift_of

Rates = tuple[float, float, float, float, float]
"""Money: once, a prompt token, a prompt token squared, an output token, an output token and context token."""


def cost(facts: RequestFacts, backend: BackendView, reference_batch: int, now: float) -> float:
    """Of one request on one backend, in the fleet's currency."""
    spec = backend.spec
    memo = spec.memo if spec.coefficients is not None else backend.memo
    known: tuple[int, Rates] | None = memo.get("request_cost")
    if known is None or known[0] != reference_batch:
        known = memo["request_cost"] = (reference_batch, _rates(backend, reference_batch))
    once, per_prompt_token, per_pair, per_output_token, per_context_token = known[1]
    prompt = facts.prompt_tokens
    output = facts.expected_output_tokens if facts.expected_output_tokens > 1 else 1
    cached = cached_tokens(facts, backend)
    prefill = once + (prompt - cached) * per_prompt_token + (prompt * prompt - cached * cached) * per_pair
    decode = output * per_output_token + output * (prompt + 0.5 * output) * per_context_token
    # A stand-in is no calibration to be corrected. Who has served would be known to be cheaper than the stand-in, and
    # whoever has not would stay unknown at its price, whatever weight an operator gives it.
    belief = belief_of(backend) if spec.coefficients is not None else None
    money = prefill + decode if belief is None else belief.prefill.priced * prefill + belief.decode.priced * decode
    slowness = drift_of(backend, now)
    return money if slowness == 1.0 else money * slowness


def costs(facts: RequestFacts, views: Sequence[BackendView], reference_batch: int, now: float) -> list[float]:
    """The same for each of `views`, in one pass."""
    if facts.session_key is not None or facts.prefix_keys:
        return [cost(facts, view, reference_batch, now) for view in views]
    prompt = facts.prompt_tokens
    output = facts.expected_output_tokens if facts.expected_output_tokens > 1 else 1
    pairs, context = prompt * prompt, output * (prompt + 0.5 * output)
    found = []
    for view in views:
        known: tuple[int, Rates] | None = view.spec.memo.get("request_cost")
        if known is None or known[0] != reference_batch:
            found.append(cost(facts, view, reference_batch, now))
            continue
        once, per_prompt_token, per_pair, per_output_token, per_context_token = known[1]
        prefill = once + prompt * per_prompt_token + pairs * per_pair
        decode = output * per_output_token + context * per_context_token
        belief = view.belief
        # Most do not drift, and then no call is worth it.
        if type(belief) is BackendBelief:
            money = belief.prefill.priced * prefill + belief.decode.priced * decode
            if belief.drift.applied != 1.0:
                money *= drift_of(view, now)
        else:
            money = (prefill + decode) * drift_of(view, now)
        found.append(money)
    return found


def _rates(backend: BackendView, reference_batch: int) -> Rates:
    spec = backend.spec
    if spec.price_per_hour == 0:
        return 0.0, 0.0, 0.0, 0.0, 0.0
    c = coefficients_of(backend)
    slots = spec.slots
    sharing = reference_batch if not slots else max(slots / 4, min(slots, 4))
    per_ms = spec.price_per_hour / 3_600_000.0
    return (
        per_ms * (c.host_ms + c.prefill_base_ms) / sharing,
        per_ms * c.prefill_ms_per_token,
        per_ms * c.prefill_ms_per_pair * 0.5,
        per_ms * (c.decode_ms_per_seq + (c.host_ms + c.decode_base_ms) / sharing),
        per_ms * c.decode_ms_per_seq_token,
    )
