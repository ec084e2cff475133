"""The probability that a budget is missed, and what one more request does to those already there.

A budget of `Bt` to the first token and `Bo` per token after it is kept where the first token comes within `Bt` and the
last within `Bt + (D - 1)·Bo`: what an early first token leaves over may be spent later, which is how a reader of a
stream feels it. Per backend, with the time `w` that the request has waited already::

    left  = Bt - w
    miss  = S_t((left - ttft) / ttft_sd)  +  S_p((max(0, left - ttft)/(D - 1) + Bo - tpot) / tpot_sd)
    end   : S_e(min((Be - w - e2e) / e2e_sd, (Be - w - ttft) / ttft_sd))         for a budget to the end
    e2e_sd = ttft_sd + (D - 1)·tpot_sd + spread·D·tpot                           the answer's length is not known

`S` are the survival tables of `beliefs.tails`, and the sum is a union bound. Token deadlines as in PolyServe (arXiv
2507.17769) and Andes (arXiv 2404.16283).

The requests of class k that decode there or wait before this one, `count` of them with `slack` seconds of their TTFT
budgets unused::

    crowding = Σ weight_k·count·( S_p(z - (0.7·stall/D_k + slower) / sd_k) - S_p(z) )      misses that this one causes
    z        = (Bo_k + 0.8·slack/D_k - pace) / sd_k
    stall    = s·b·(P - h)                         my prefill holds up each of them
    slower   = s·e·(P + D/2)                       my context makes each step longer

A miss never falls when load grows, the promises being equal. Without beliefs the tails are the prior and nobody is
known to be crowded.
"""

from math import inf, sqrt
from typing import NamedTuple

from backends.catalog.views import BackendView
from policies.beliefs.backend import BackendBelief
from policies.beliefs.tails import PRIOR, PRIOR_P99_Z, survival
from policies.estimate import SD_RATIO, Estimate, lateness_s, new_tuple, predicted
from policies.facts import Budget, RequestFacts
from policies.footing import Footing, belief_of, footing
from policies.policy import Priced

STALL_SHARE = 0.7
"""Of a stall, the part that a stream is held up for in the mean: it may end before, or overlap another."""
SLACK_SHARE = 0.8


def weighed(
    facts: RequestFacts, candidate: Priced, budget: Budget, spread: float, now: float, beyond: float = inf
) -> Priced:
    """The candidate with its estimate, its miss probability against `budget` and its crowding.

    A miss probability of more than `beyond` rules it out by itself; its crowding is then left at 0.
    """
    view, price, terms, _, known, _, _ = candidate
    belief, ground = belief_of(view), footing(view, now)
    estimate = known or predicted(facts, view, ground, now)
    crowding = 0.0
    if belief is not None and belief.lost(now):
        miss = _miss_as_seen(facts, budget, belief)
    else:
        miss = miss_probability(facts, budget, spread, estimate, belief)
        if belief is not None and belief.streams and miss <= beyond:
            crowding = crowded(facts, view, belief, estimate, ground)
    return new_tuple(Priced, (view, price, terms, lateness_s(facts, estimate, 1.0), estimate, miss, crowding))


def miss_probability(
    facts: RequestFacts, budget: Budget, spread: float, estimate: Estimate, belief: BackendBelief | None
) -> float:
    """The formula of the module's text, in [0, 1]; 0 where nothing was promised."""
    miss = slack_s = 0.0
    gaps = facts.expected_output_tokens - 1
    ttft_s, ttft_sd_s = estimate.ttft_s, estimate.ttft_sd_s
    if budget.ttft_s is not None:
        left_s = budget.ttft_s - facts.waited_s - ttft_s
        miss = survival(PRIOR if belief is None else belief.ttft.table, _over(left_s, ttft_sd_s))
        if left_s > 0.0 and gaps > 0:
            slack_s = left_s / gaps
    if budget.inter_token_s is not None and gaps > 0:
        room_s = slack_s + budget.inter_token_s - estimate.tpot_s
        miss += survival(PRIOR if belief is None else belief.pace.table, _over(room_s, estimate.tpot_sd_s))
    if budget.e2e_s is not None:
        left_s = budget.e2e_s - facts.waited_s
        z = _over(left_s - estimate.e2e_s, end_sd_s(facts, estimate, spread))
        first_z = _over(left_s - ttft_s, ttft_sd_s)
        # Once the first token alone is late, a slower pace must not look like a wider chance.
        miss += survival(PRIOR if belief is None else belief.end.table, first_z if first_z < z else z)
    return miss if miss < 1.0 else 1.0


def end_sd_s(facts: RequestFacts, estimate: Estimate, spread: float) -> float:
    """Standard deviation of the end, added up as if all went wrong together."""
    output = facts.expected_output_tokens if facts.expected_output_tokens > 1 else 1
    return estimate.ttft_sd_s + (output - 1) * estimate.tpot_sd_s + spread * output * estimate.tpot_s


def _over(room_s: float, sd_s: float) -> float:
    if sd_s > 0.0:
        return room_s / sd_s
    return inf if room_s >= 0.0 else -inf


def _miss_as_seen(facts: RequestFacts, budget: Budget, belief: BackendBelief) -> float:
    """From what the backend did lately, where the latency model does not fit it."""
    prompt, miss = facts.prompt_tokens, 0.0
    if budget.ttft_s is not None:
        miss = belief.waits.share_over(prompt, budget.ttft_s - facts.waited_s)
    if budget.inter_token_s is not None:
        miss += belief.paces.share_over(prompt, budget.inter_token_s)
    if budget.e2e_s is not None:
        per_token_s = (budget.e2e_s - facts.waited_s) / max(1, facts.expected_output_tokens)
        miss += belief.paces.share_over(prompt, per_token_s)
    return min(1.0, miss)


class _Crowd(NamedTuple):
    """One class of streams that decode on a backend."""

    streams: float
    """How many, times the weight of a miss of that class."""
    z: float
    missing: float
    """Survival at z: those that miss anyway."""
    z_per_stall_s: float
    z_per_slower_s: float


def crowded(
    facts: RequestFacts, view: BackendView, belief: BackendBelief, estimate: Estimate, ground: Footing
) -> float:
    """Expected number of streams there that miss their budgets because of this request."""
    known: tuple[Footing, list[_Crowd]] | None = view.memo.get("crowd")
    if known is None or known[0] is not ground:
        known = view.memo["crowd"] = (ground, _crowd(belief, ground))
    table = belief.pace.table
    prompt, cached = facts.prompt_tokens, estimate.cached_tokens
    stall_s = ground.slow_s * (prompt - cached) * (
        ground.prefill_ms_per_token + ground.half_ms_per_pair * (prompt + cached))
    slower_s = ground.slow_s * ground.ms_per_context_token * (prompt + 0.5 * facts.expected_output_tokens)
    more = 0.0
    for streams, z, missing, z_per_stall_s, z_per_slower_s in known[1]:
        after = survival(table, z - stall_s * z_per_stall_s - slower_s * z_per_slower_s)
        if after > missing:
            more += streams * (after - missing)
    return more


def _crowd(belief: BackendBelief, ground: Footing) -> list[_Crowd]:
    pace_s = ground.slow_s * (ground.pace_ms + ground.ms_per_context_token * ground.occupied_tokens)
    rows = []
    for kind, streams in belief.streams.items():
        promised_s = kind.budget.inter_token_s
        if streams.count <= 0 or promised_s is None:
            continue
        length = kind.lengths.expected_output_tokens
        spread_s = SD_RATIO * pace_s
        sd_s = sqrt(max(1e-18, spread_s * spread_s + ground.burst_s * pace_s / length))
        z = (promised_s + SLACK_SHARE * streams.slack_s / streams.count / length - pace_s) / sd_s
        rows.append(_Crowd(kind.weight * streams.count, z, survival(belief.pace.table, z),
                           STALL_SHARE / (length * sd_s), 1.0 / sd_s))
    return rows




def with_p99(facts: RequestFacts, view: BackendView, estimate: Estimate, spread: float) -> Estimate:
    """The estimate with what 99 of 100 such requests are predicted to stay within."""
    belief = belief_of(view)
    first_z, end_z = (PRIOR_P99_Z, PRIOR_P99_Z) if belief is None else (belief.ttft.p99_z, belief.end.p99_z)
    drain_s, mean_s, tpot_s, end_s, ttft_sd_s, tpot_sd_s, cached, _, _ = estimate
    ttft_s = mean_s + first_z * ttft_sd_s
    e2e_s = end_s + end_z * end_sd_s(facts, estimate, spread)
    return new_tuple(Estimate, (drain_s, mean_s, tpot_s, end_s, ttft_sd_s, tpot_sd_s, cached,
                                ttft_s if ttft_s > 0.0 else 0.0, e2e_s if e2e_s > 0.0 else 0.0))
