"""The choice of the `headrace` policy: money against misses, crowding, sessions, hopeless requests, large fleets."""

from dataclasses import replace
from math import sqrt
from random import Random
from typing import Any

import pytest

from backends.catalog.health import Health, HealthState
from backends.catalog.views import BackendView, FleetView
from policies.beliefs.pool import PoolBelief
from policies.beliefs.tails import PRIOR, survival
from policies.chance import miss_probability, weighed
from policies.estimate import predict
from policies.facts import Budget, RequestFacts
from policies.filters.quality_floor import weight_bits
from policies.hopeless import lateness, retry_after_s
from policies.pickers import least_score
from policies.pipeline import decide
from policies.policy import Decision, Priced
from policies.registry import PolicySpec, build_pipeline
from tests.beliefs import CHAT, CODE, a_pool, believing, fleet_of, streaming
from tests.policy_fleet import NOW_S, a_backend, a_request, decoding, name_of

HEADRACE = build_pipeline(PolicySpec())


def choose(facts: RequestFacts, *views: BackendView, pool: PoolBelief | None = None, seed: int = 0) -> Decision:
    return decide(HEADRACE, facts, FleetView(views, belief=pool), NOW_S, Random(seed))


def weigh(facts: RequestFacts, view: BackendView) -> Priced:
    return weighed(facts, Priced(view, 1e-4), facts.budget, 0.8, NOW_S)


def prefilling(name: str, tokens: int, **given: Any) -> BackendView:
    """A backend with so many prompt tokens in its queue, 1000 a request."""
    count = max(1, tokens // 1000)
    return a_backend(name, in_flight_requests=count, in_flight_prefill_requests=count,
                     in_flight_prefill_tokens=tokens, **given)


def test_a_miss_is_first_token_or_last_token() -> None:
    view = decoding("a", 10)
    estimate = predict(CHAT, view, NOW_S)
    slack_s = (1.0 - estimate.ttft_s) / 127
    first = survival(PRIOR, (1.0 - estimate.ttft_s) / estimate.ttft_sd_s)
    last = survival(PRIOR, (slack_s + 0.06 - estimate.tpot_s) / estimate.tpot_sd_s)
    assert miss_probability(CHAT, CHAT.budget, 0.8, estimate, None) == pytest.approx(first + last)
    assert estimate.ttft_sd_s == pytest.approx(0.12 * estimate.ttft_s + 0.004)


def test_an_early_first_token_pays_for_a_slow_pace() -> None:
    tight = replace(CHAT, budget=Budget(ttft_s=0.2, inter_token_s=0.026))
    roomy = replace(CHAT, budget=Budget(ttft_s=3.0, inter_token_s=0.026))
    assert weigh(tight, a_backend()).miss > 0.3   # type: ignore[operator]
    assert weigh(roomy, a_backend()).miss < 0.01   # type: ignore[operator]


def test_time_waited_is_gone() -> None:
    late = replace(CHAT, waited_s=0.95)
    assert weigh(CHAT, a_backend()).miss < 0.01   # type: ignore[operator]
    assert weigh(late, a_backend()).miss > 0.9   # type: ignore[operator]


def test_a_budget_to_the_end_fears_a_long_answer() -> None:
    facts = replace(CHAT, budget=Budget(e2e_s=6.0))
    found = [weighed(facts, Priced(a_backend(), 1e-4), facts.budget, spread, NOW_S).miss for spread in (0.1, 0.5, 1.0)]
    assert found == sorted(found)   # type: ignore[type-var]
    assert weigh(replace(CHAT, budget=Budget(e2e_s=1.0)), a_backend()).miss > 0.7   # type: ignore[operator]


def test_nothing_promised_is_nothing_missed() -> None:
    assert weigh(a_request(), decoding("a", 200)).miss == 0.0


def test_streams_near_their_budget_are_crowded_by_a_long_prompt() -> None:
    pool = a_pool()
    view = believing(decoding("a", 60), pool)
    streaming(view, pool, replace(CODE, budget=CODE.budget), 60)
    small, large = (weigh(replace(CHAT, prompt_tokens=tokens), view).crowding for tokens in (50, 6000))
    assert 0 <= small < large
    assert large > 1.0
    relaxed = believing(decoding("b", 60), pool)
    streaming(relaxed, pool, CODE, 60, slack_s=60 * 5.0)
    assert weigh(replace(CHAT, prompt_tokens=6000), relaxed).crowding < large


def test_a_heavier_class_is_crowded_more() -> None:
    pool = a_pool()
    view = believing(decoding("a", 60), pool)
    streaming(view, pool, CODE, 60)
    long = replace(CHAT, prompt_tokens=6000)
    before = weigh(long, view).crowding
    pool.made_class_of(CODE).weight = 3.0
    assert weigh(long, replace(view)).crowding == pytest.approx(3 * before)


def test_a_safe_cheap_backend_is_taken_and_the_dear_one_not_even_looked_at() -> None:
    decision = choose(CHAT, a_backend("cheap", price_per_hour=1.0), a_backend("dear", price_per_hour=9.0))
    assert name_of(decision) == "cheap"
    assert decision.reason.startswith("cheapest p=")
    by_name = {c.backend.spec.name: c for c in decision.candidates}
    assert by_name["cheap"].miss is not None
    assert by_name["cheap"].estimate is not None
    assert by_name["cheap"].estimate.ttft_p99_s is not None
    assert by_name["dear"].miss is None
    assert [name for name, _ in by_name["dear"].terms] == ["request_cost"]


def test_a_risk_is_worth_its_price_and_no_more() -> None:
    """A backend that saves more than V mean prices times its risk is taken, and one that saves less is not."""
    pool = a_pool(mean_price=1e-4)
    risky = believing(prefilling("risky", 6300), pool)
    found = weigh(CHAT, risky)
    assert found.miss is not None
    assert 0.02 < found.miss < 0.6
    worth = 12 * 1e-4 * found.miss
    (risky_price,) = [c.price for c in choose(CHAT, risky, pool=pool).candidates]
    safe = believing(a_backend("safe"), pool)
    (safe_price,) = [c.price for c in choose(CHAT, safe, pool=pool).candidates]
    for saving, name in ((0.8 * worth, "safe"), (1.2 * worth, "risky")):
        rate = (risky_price + saving) / safe_price * safe.spec.price_per_hour
        dearer = replace(safe, spec=replace(safe.spec, price_per_hour=rate))
        assert name_of(choose(CHAT, risky, dearer, pool=pool)) == name


def test_a_class_that_breaks_its_promise_pays_for_safety() -> None:
    pool = a_pool(mean_price=1e-4)
    risky, safe = believing(prefilling("risky", 6300), pool), believing(a_backend("safe", price_per_hour=7.0), pool)
    assert name_of(choose(CHAT, risky, safe, pool=pool)) == "risky"
    pool.made_class_of(CHAT).weight = 5.0
    decision = choose(CHAT, risky, safe, pool=pool)
    assert name_of(decision) == "safe"
    assert decision.reason.startswith("safer p=")


def test_a_session_stays_for_little_money_and_leaves_for_much() -> None:
    pool = a_pool()
    talk = replace(CHAT, session_key="s")
    pool.sessions["s"] = "last"
    for ratio, name in ((1.04, "last"), (1.2, "new")):
        last, new = a_backend("last", price_per_hour=2.0 * ratio), a_backend("new", price_per_hour=2.0)
        decision = choose(talk, last, new, pool=pool)
        assert name_of(decision) == name
    assert decision.reason.startswith("cheapest")


def test_a_session_does_not_stay_at_the_expense_of_others() -> None:
    pool = a_pool()
    pool.sessions["s"] = "last"
    talk = replace(CHAT, prompt_tokens=3000, session_key="s")
    new = believing(prefilling("new", 4000, price_per_hour=1.0), pool)
    last = believing(prefilling("last", 4000, price_per_hour=1.01), pool)
    assert name_of(choose(talk, new, last, pool=pool)) == "last"
    streaming(last, pool, CODE, 3)
    assert weigh(talk, last).crowding > 1.0
    assert name_of(choose(talk, new, last, pool=pool)) == "new"


def test_what_the_cache_holds_is_a_price() -> None:
    pool = a_pool()
    talk = replace(CHAT, prompt_tokens=6000, session_key="s")
    warm, cold = (believing(a_backend(name, price_per_hour=price), pool)
                  for name, price in (("warm", 2.4), ("cold", 2.0)))
    assert name_of(choose(talk, warm, cold, pool=pool)) == "cold"
    warm.belief.cache.passed(talk, 5500, 5500)
    assert name_of(choose(talk, warm, cold, pool=pool)) == "warm"


def hopeless_views() -> tuple[BackendView, BackendView]:
    return prefilling("cheap", 400_000, price_per_hour=1.0), prefilling("quick", 100_000, price_per_hour=2.0)


def test_the_hopeless_do_not_pile_up_on_the_cheapest() -> None:
    cheap, quick = hopeless_views()
    decision = choose(CHAT, cheap, quick, pool=a_pool())
    assert name_of(decision) == "quick"
    assert decision.reason.startswith("late ")
    even = prefilling("even", 100_000, price_per_hour=1.0)
    assert name_of(choose(CHAT, even, quick, pool=a_pool())) == "even"


def test_who_misses_for_the_sake_of_others_does_not_wait_without_end() -> None:
    pool = a_pool()
    long = replace(CHAT, prompt_tokens=3000)
    full = believing(decoding("full", 8), pool)
    streaming(full, pool, CODE, 2)
    assert weigh(long, full).crowding == pytest.approx(1.38, abs=0.1)
    waits = believing(prefilling("late", 20_000, price_per_hour=1.0), pool)
    assert name_of(choose(long, full, waits, pool=pool)) == "late"
    waits_long = believing(prefilling("late", 400_000, price_per_hour=1.0), pool)
    assert name_of(choose(long, full, waits_long, pool=pool)) == "full"


def test_a_wait_of_seventy_budgets_is_the_longest_that_counts() -> None:
    pool = a_pool()
    long = replace(CHAT, prompt_tokens=3000)
    full = believing(decoding("full", 8), pool)
    streaming(full, pool, CODE, 4)
    assert weigh(long, full).crowding > 2.5
    for tokens in (2_000_000, 200_000_000):
        waits = believing(prefilling("late", tokens, price_per_hour=1.0), pool)
        assert lateness(long, long.budget, weigh(long, waits).estimate) > least_score.LATEST
        assert name_of(choose(long, full, waits, pool=pool)) == "late"


def test_only_what_may_be_shed_is_shed_and_only_if_it_is_hopeless() -> None:
    sheddable = replace(CHAT, sheddable=True)
    assert choose(CHAT, *hopeless_views(), pool=a_pool()).chosen is not None
    decision = choose(sheddable, *hopeless_views(), pool=a_pool())
    assert decision.chosen is None
    assert decision.reason.startswith("shed p=1 late ")
    assert decision.retry_after_s is not None
    assert len(decision.candidates) == 2


    assert choose(sheddable, prefilling("a", 6_300), prefilling("b", 6_500), pool=a_pool()).chosen is not None


def test_what_others_would_miss_more_for_than_it_can_keep_is_shed_if_it_may_be() -> None:
    pool = a_pool()
    long = replace(CHAT, prompt_tokens=3000, sheddable=True)
    full, free = believing(decoding("full", 8), pool), believing(decoding("free", 2, price_per_hour=9.0), pool)
    streaming(full, pool, CODE, 8)
    found = weigh(long, full)
    assert found.miss is not None
    assert found.crowding is not None
    assert found.miss < 0.5
    assert found.crowding > 1.0
    assert name_of(choose(replace(long, sheddable=False), full, pool=pool)) == "full"
    decision = choose(long, full, pool=pool)
    assert decision.chosen is None
    assert decision.reason.startswith("shed p=")
    decision = choose(long, full, free, pool=pool)
    assert name_of(decision) == "free"
    assert decision.reason.startswith("safer p=")


def test_a_request_that_others_would_pay_for_gives_way_and_the_reason_says_so() -> None:
    pool = a_pool(mean_price=1e-7)
    long = replace(CHAT, prompt_tokens=3000)
    full, late = believing(decoding("full", 8), pool), believing(prefilling("late", 90_000), pool)
    streaming(full, pool, CODE, 8)
    decision = choose(long, full, late, pool=pool)
    by_name = {c.backend.spec.name: c for c in decision.candidates}
    assert by_name["full"].miss is not None
    assert by_name["full"].miss < 0.5
    assert name_of(decision) == "late"
    assert decision.reason.startswith("gives way p=1")


def test_no_price_is_a_reason_to_shed() -> None:
    """Where the place that would keep more than it breaks is dearer than a miss, it is taken all the same."""
    pool = a_pool(mean_price=1e-7)
    long = replace(CHAT, prompt_tokens=3000, sheddable=True)
    full, dear = believing(decoding("full", 8), pool), believing(decoding("dear", 2, price_per_hour=900.0), pool)
    streaming(full, pool, CODE, 8)
    assert name_of(choose(replace(long, sheddable=False), full, dear, pool=pool)) == "full"
    pool.sessions["s"] = "full"
    for facts in (long, replace(long, session_key="s")):
        decision = choose(facts, full, dear, pool=pool)
        assert name_of(decision) == "dear"
        assert decision.reason.startswith("safer p=")


def test_retry_after_is_when_the_queue_has_drained() -> None:
    views = hopeless_views()
    found = [weigh(CHAT, view) for view in views]
    ttft_s = predict(CHAT, views[1], NOW_S).ttft_s
    assert retry_after_s(CHAT, CHAT.budget, found) == pytest.approx(ttft_s - 1.0, abs=1.0)
    assert retry_after_s(CHAT, CHAT.budget, [weigh(CHAT, prefilling("a", 10**9))]) == 60.0


def test_lateness_is_in_budgets() -> None:
    estimate = predict(CHAT, a_backend(), NOW_S)
    assert lateness(CHAT, Budget(ttft_s=estimate.ttft_s / 3), estimate) == pytest.approx(3.0)
    assert lateness(CHAT, Budget(e2e_s=estimate.e2e_s / 2), estimate) == pytest.approx(2.0)
    assert lateness(CHAT, Budget(inter_token_s=estimate.tpot_s / 4), estimate) == pytest.approx(4.0)


def test_a_cold_backend_gets_one_request_if_that_has_an_even_chance_there() -> None:
    cold = a_backend("cold", price_per_hour=9.0, served_requests=0, last_outcome_at_s=None)
    assert choose(CHAT, a_backend("a"), cold).reason == "explore never served"
    impossible = replace(CHAT, budget=Budget(ttft_s=0.05))
    assert name_of(choose(impossible, a_backend("a"), cold)) == "a"
    unmeasured = replace(cold, spec=replace(cold.spec, coefficients=None))
    assert name_of(choose(impossible, a_backend("a"), unmeasured)) == "cold"


def test_without_a_budget_patience_ends_a_queue() -> None:
    cheap, dear = prefilling("cheap", 90_000, price_per_hour=0.5), a_backend("dear", price_per_hour=9.0)
    assert name_of(choose(a_request(), cheap, dear)) == "dear"
    assert name_of(choose(a_request(), prefilling("cheap", 9_000, price_per_hour=0.5), dear)) == "cheap"


def test_a_fault_of_the_model_never_fails_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> Priced:
        raise ZeroDivisionError

    monkeypatch.setattr(least_score, "weighed", broken)
    decision = choose(CHAT, decoding("a", 5), decoding("b", 2))
    assert name_of(decision) == "b"
    assert decision.reason == "model fault: least inflight of 2"


def test_a_lost_backend_is_judged_by_what_it_did() -> None:
    pool = a_pool()
    view = believing(a_backend("lost"), pool)
    for _ in range(60):
        view.belief.ttft.observe(9.0)
        view.belief.waits.observe(400, 0.3)
        view.belief.paces.observe(400, 0.02)
    assert weigh(CHAT, view).miss < 0.1   # type: ignore[operator]
    assert weigh(replace(CHAT, budget=Budget(ttft_s=0.2)), view).miss > 0.9   # type: ignore[operator]


def many(count: int, **given: Any) -> list[BackendView]:
    kinds = (("a100", 1.2), ("h100", 4.0), ("l40s", 0.8), ("910b", 0.9))
    return [a_backend(f"b{place:04d}", card_type=kinds[place % 4][0], price_per_hour=kinds[place % 4][1], **given)
            for place in range(count)]


def test_a_large_fleet_is_looked_at_in_part_but_every_kind_of_it() -> None:
    views = many(1000)
    decision = choose(CHAT, *views)
    assert len(decision.candidates) == 64
    assert {c.backend.spec.card_type for c in decision.candidates} == {"a100", "h100", "l40s", "910b"}
    assert decision.chosen is not None
    assert decision.chosen.spec.card_type == "l40s"
    assert name_of(choose(CHAT, *reversed(views))) == name_of(decision)
    assert len({name_of(choose(CHAT, *views, seed=seed)) for seed in range(200)}) > 50


def test_the_backend_of_a_session_is_always_looked_at() -> None:
    pool, talk = a_pool(), replace(CHAT, session_key="s")
    for seed in range(20):
        pool.sessions["s"] = "b0998"
        assert name_of(choose(talk, *many(1000), pool=pool, seed=seed)) == "b0998"


def test_nobody_in_the_sample_is_no_reason_to_refuse() -> None:
    down = [replace(view, health=Health(HealthState.UNHEALTHY)) for view in many(999)]
    assert name_of(choose(CHAT, *down, a_backend("up"))) == "up"


def test_other_models_are_not_sampled() -> None:
    others = many(900, model="other")
    decision = choose(CHAT, *others, a_backend("ours"), a_backend("z", price_per_hour=0.5))
    assert name_of(decision) == "z"
    assert len(decision.candidates) == 2


def test_of_equals_the_least_loaded_of_a_few_is_taken() -> None:
    pool = a_pool()
    busy = [believing(prefilling(f"busy{place}", 4400), pool) for place in range(20)]
    idle = [believing(a_backend(f"idle{place}"), pool) for place in range(20)]
    found = [str(name_of(choose(CHAT, *busy, *idle, pool=pool, seed=seed))) for seed in range(200)]
    assert sum(name.startswith("idle") for name in found) / 200 > 0.95
    assert len(set(found)) > 10


@pytest.mark.parametrize(("name", "bits"), [
    ("fp8", 8), ("bf16", 16), ("w8a8", 8), ("q4_k_m", 4), ("AWQ", 4), ("gptq-int4", 4), ("fp16", 16), (None, 16),
    ("mystery", 0), ("nvfp4", 4), ("int8_wo", 8),
])
def test_bits_are_read_off_the_quantization(name: str | None, bits: float) -> None:
    assert weight_bits(a_backend(quantization=name).spec) == bits


def test_a_quality_floor_keeps_coarser_weights_out() -> None:
    cheap, fine = a_backend("cheap", quantization="int4", price_per_hour=0.1), a_backend("fine", quantization="fp8")
    assert name_of(choose(CHAT, cheap, fine)) == "cheap"
    decision = choose(replace(CHAT, quality_floor_bits=8.0), cheap, fine)
    assert name_of(decision) == "fine"
    assert [(each.backend, each.reason) for each in decision.rejected] == [("cheap", "quality_too_low")]
    of_operator = build_pipeline(PolicySpec(settings={"floor_bits": 8.0}))
    assert name_of(decide(of_operator, CHAT, fleet_of(cheap, fine, pool=a_pool()), NOW_S, Random(0))) == "fine"


def test_the_pace_of_many_short_stalls_is_wider_for_short_answers() -> None:
    view = believing(decoding("a", 5), a_pool())
    for step in range(40):
        view.belief.arrivals.add(0.1, NOW_S - 8 + 0.2 * step)
    wide = predict(replace(CHAT, expected_output_tokens=10), view, NOW_S)
    long = predict(replace(CHAT, expected_output_tokens=1000), view, NOW_S)
    assert wide.tpot_sd_s > 3 * sqrt(wide.tpot_s / long.tpot_s) * long.tpot_sd_s / 2
