"""Peers that remember: latencies, prefixes, and each original's quirks."""

from dataclasses import replace
from math import exp

import pytest

from backends.catalog.sample import LoadSample
from policies.attempts import FailureCause
from policies.learners.peers.latency_lists import LatencyLists
from policies.learners.peers.lifetime_means import LifetimeMeans
from policies.learners.peers.peak_ewma import DECAY_S, DEFAULT_TTFT_S, PeakEwma
from policies.learners.peers.prefix_map import PrefixMap
from policies.learners.peers.ttft_by_load import RECENT_S, SAMPLES, TtftByLoad
from policies.registry import PolicyError, PolicySpec, Registry, build_learner
from policies.spec import PartSpec, Preset
from tests.policy_fleet import A100_PAIR, NOW_S, a_backend, a_request, decoding, name_of
from tests.policy_memory import Router, serve

A, B = a_backend("a"), a_backend("b")
STREAM = a_request(stream=True)


def test_a_preset_gets_a_fresh_learner_of_its_own() -> None:
    first, second = (build_learner(PolicySpec("prequal")) for _ in range(2))
    assert isinstance(first, TtftByLoad)
    assert first is not second
    assert build_learner(PolicySpec("round_robin")).name == "none"
    with pytest.raises(PolicyError, match="did you mean 'prequal'"):
        build_learner(PolicySpec("prequel"))
    lost = Registry(presets={"lost": Preset("lost", "Nobody.", PartSpec("p2c"), learner="nobody")})
    with pytest.raises(PolicyError, match="there is no learner 'nobody'"):
        build_learner(PolicySpec("lost"), lost)


def test_a_peak_counts_at_once_and_is_forgotten_with_time() -> None:
    learner = PeakEwma()
    assert learner.ttft_s("a", NOW_S) == DEFAULT_TTFT_S
    serve(learner, A, sent_at_s=NOW_S - 0.1, ttft_s=0.1)
    serve(learner, A, sent_at_s=NOW_S - 2.0, ttft_s=2.0)
    assert learner.ttft_s("a", NOW_S) == pytest.approx(2.0)
    assert learner.ttft_s("a", NOW_S + DECAY_S) == pytest.approx(2.0 * exp(-1))
    serve(learner, A, sent_at_s=NOW_S + DECAY_S - 0.1, ttft_s=0.1)
    assert learner.ttft_s("a", NOW_S + DECAY_S) == pytest.approx(2.0 * exp(-1) + 0.1 * (1 - exp(-1)))


def test_a_failure_is_no_fast_answer() -> None:
    learner = PeakEwma()
    serve(learner, A, sent_at_s=NOW_S - 9.0, ttft_s=None, total_s=9.0, failure=FailureCause.FIRST_TOKEN_TIMEOUT)
    assert learner.ttft_s("a", NOW_S) == pytest.approx(9.0)


def test_peak_ewma_weighs_averages_by_what_is_in_flight() -> None:
    router = Router("peak_ewma")
    serve(router.learner, A, sent_at_s=NOW_S - 0.1, ttft_s=0.1)
    serve(router.learner, B, sent_at_s=NOW_S - 0.3, ttft_s=0.3)
    assert {name_of(router.decide(STREAM, A, B)) for _ in range(20)} == {"a"}
    assert {name_of(router.decide(STREAM, decoding("a", 3), B)) for _ in range(20)} == {"b"}


def test_peak_ewma_draws_every_pair() -> None:
    router, fleet = Router("peak_ewma"), [a_backend(name) for name in "abcd"]
    for name, ttft_s in zip("abcd", (0.1, 0.2, 0.3, 0.4), strict=True):
        serve(router.learner, a_backend(name), sent_at_s=NOW_S - ttft_s, ttft_s=ttft_s)
    names = [name_of(router.decide(STREAM, *fleet)) for _ in range(1200)]
    # The best wins its 3 of 6 pairs, the second 2, the third 1, the last none.
    assert [names.count(name) for name in "abcd"] == [pytest.approx(200 * wins, abs=70) for wins in (3, 2, 1, 0)]


def test_prequal_sends_to_the_fastest_that_is_not_hot() -> None:
    router = Router("prequal")
    fleet = [decoding("a", 30), decoding("b", 3), decoding("c", 2), decoding("d", 1)]
    for view, ttft_s in zip(fleet, (0.1, 0.2, 0.3, 0.4), strict=True):
        serve(router.learner, view, ttft_s=ttft_s)
    # a is the fastest, but hot: only it has more in flight than the quantile of the pool.
    assert name_of(router.decide(STREAM, *fleet)) == "b"
    pure_latency = Router("prequal", rif_quantile=1.0)
    pure_latency.learner = router.learner
    assert name_of(pure_latency.decide(STREAM, *fleet)) == "a"
    pure_rif = Router("prequal", rif_quantile=0.0)
    pure_rif.learner = router.learner
    assert name_of(pure_rif.decide(STREAM, *fleet)) == "d"


def test_prequals_latency_is_the_median_at_the_nearest_load() -> None:
    learner = TtftByLoad()
    for ttft_s in (0.1, 0.2, 9.0):
        serve(learner, decoding("a", 2), ttft_s=ttft_s)
    serve(learner, decoding("a", 20), ttft_s=3.0)
    assert learner.ttft_s("a", 3, NOW_S) == pytest.approx(0.2)
    assert learner.ttft_s("a", 15, NOW_S) == pytest.approx(3.0)
    assert learner.ttft_s("a", 3, NOW_S + RECENT_S) is None
    assert learner.ttft_s("b", 3, NOW_S) is None
    for _ in range(SAMPLES):
        serve(learner, decoding("a", 20), ttft_s=1.0)
    assert learner.ttft_s("a", 2, NOW_S) == pytest.approx(1.0), "the oldest samples make room"


def test_prequal_looks_at_no_more_than_its_pool() -> None:
    router = Router("prequal", pool_size=2)
    fleet = [a_backend(f"b{index}") for index in range(20)]
    for view in fleet:
        serve(router.learner, view, ttft_s=0.1 if view.spec.name == "b7" else 0.5)
    picks = [router.decide(STREAM, *fleet) for _ in range(200)]
    assert all(each.reason.endswith("cold of 2") for each in picks)
    assert 5 <= [name_of(each) for each in picks].count("b7") <= 45, "it is seen in one pool of ten"


def test_litellms_first_nine_never_leave() -> None:
    learner = LatencyLists()
    for _ in range(10):
        serve(learner, A, ttft_s=0.1, output_tokens=10)
    for _ in range(1000):
        serve(learner, A, ttft_s=90.0, total_s=100.0, output_tokens=10)
    # After a thousand answers at 9 s a token, nine tenths of the mean are still those of the first minute.
    assert learner.latency_s("a", stream=True, now=NOW_S) == pytest.approx((9 * 0.01 + 9.0) / 10)
    assert learner.latency_s("a", stream=False, now=NOW_S) == pytest.approx((9 * 0.1 + 10.0) / 10)
    assert learner.latency_s("a", stream=True, now=NOW_S + 3600.0) == 0.0


def test_litellm_divides_first_tokens_by_the_answers_length() -> None:
    router = Router("litellm_latency")
    serve(router.learner, A, ttft_s=0.5, output_tokens=500)
    serve(router.learner, B, ttft_s=0.1, output_tokens=10)
    assert name_of(router.decide(STREAM, A, B)) == "a", "five times later, and preferred for its longer answer"


def test_litellm_counts_timeouts_and_no_other_failure() -> None:
    learner = LatencyLists()
    serve(learner, A, ttft_s=None, failure=FailureCause.STATUS_503)
    assert learner.latency_s("a", stream=False, now=NOW_S) == 0.0
    serve(learner, A, ttft_s=None, failure=FailureCause.HEAD_TIMEOUT)
    assert learner.latency_s("a", stream=False, now=NOW_S) == 1000.0
    # The penalty is in the other list, so for streams it only makes the divisor larger.
    serve(learner, A, ttft_s=0.1, output_tokens=10)
    assert learner.latency_s("a", stream=True, now=NOW_S) == pytest.approx(0.01 / 2)


def test_litellm_runs_to_one_backend_whatever_is_in_flight_there() -> None:
    router = Router("litellm_latency")
    assert {name_of(router.decide(STREAM, A, B)) for _ in range(20)} == {"a", "b"}
    serve(router.learner, A, ttft_s=0.1)
    assert {name_of(router.decide(STREAM, A, B)) for _ in range(20)} == {"b"}, "who is untried counts as 0"
    serve(router.learner, B, ttft_s=0.2)
    assert {name_of(router.decide(STREAM, decoding("a", 500), B)) for _ in range(20)} == {"a"}
    near = Router("litellm_latency", buffer=1.0)
    near.learner = router.learner
    assert {name_of(near.decide(STREAM, A, B)) for _ in range(20)} == {"a", "b"}


def test_aibrix_expects_the_usual_request_by_lifetime_means() -> None:
    learner = LifetimeMeans()
    assert learner.usual_sizes() == (10.0, 100.0)
    serve(learner, A, a_request(prompt_tokens=1000), ttft_s=1.0, total_s=3.0, output_tokens=100)
    serve(learner, B, a_request(prompt_tokens=100), ttft_s=0.2, total_s=2.2, output_tokens=50, prompt_tokens=200)
    assert learner.usual_sizes() == (600.0, 75.0)
    assert learner.latency_s("a", 600.0, 75.0) == pytest.approx(0.6 + 1.5)
    assert learner.latency_s("b", 600.0, 75.0) == pytest.approx(0.6 + 3.0)
    assert learner.latency_s("c", 600.0, 75.0) == 0.0
    serve(learner, A, ttft_s=90.0, failure=FailureCause.TRUNCATED)
    assert learner.latency_s("a", 600.0, 75.0) == pytest.approx(2.1), "failures count for nothing"


def test_aibrix_ignores_the_request_and_what_is_in_flight() -> None:
    router = Router("aibrix_least_latency")
    serve(router.learner, A, ttft_s=0.1)
    serve(router.learner, B, ttft_s=0.2, total_s=2.0)
    for prompt_tokens in (1, 100_000):
        assert name_of(router.decide(a_request(prompt_tokens=prompt_tokens), decoding("a", 500), B)) == "a"


def blocks(count: int, start: int = 0) -> tuple[int, ...]:
    return tuple(range(start, start + count))


def test_a_prefix_is_cached_where_it_was_sent_up_to_the_first_difference() -> None:
    learner = PrefixMap()
    serve(learner, A, a_request(prompt_tokens=4096, prefix_keys=blocks(8)))
    longer = a_request(prompt_tokens=6000, prefix_keys=(*blocks(4), 100, 5, 6, 7))
    assert learner.cached_tokens("a", longer) == 4 * 512
    assert learner.cached_tokens("b", longer) == 0
    assert learner.cached_tokens("a", a_request(prompt_tokens=700, prefix_keys=blocks(2))) == 700
    learner.forget("a")
    assert learner.cached_tokens("a", longer) == 0


def test_a_session_without_keys_counts_as_one_block() -> None:
    learner = PrefixMap()
    serve(learner, A, a_request(prompt_tokens=900, session_key="s"))
    assert learner.cached_tokens("a", a_request(prompt_tokens=1500, session_key="s")) == 900
    assert learner.cached_tokens("a", a_request(prompt_tokens=1500, session_key="t")) == 0
    assert learner.cached_tokens("a", a_request(prompt_tokens=1500)) == 0


def test_the_tail_of_the_oldest_prompt_goes_first() -> None:
    small = a_backend("a", coefficients=replace(A100_PAIR, kv_capacity_tokens=10 * 512))
    learner = PrefixMap()
    serve(learner, small, a_request(prompt_tokens=4096, prefix_keys=blocks(8)))
    serve(learner, small, a_request(prompt_tokens=2048, prefix_keys=blocks(4, start=50)))
    assert learner.cached_tokens("a", a_request(prompt_tokens=4096, prefix_keys=blocks(8))) == 6 * 512
    assert learner.cached_tokens("a", a_request(prompt_tokens=2048, prefix_keys=blocks(4, start=50))) == 4 * 512


def test_sglang_follows_the_cache_until_loads_are_far_apart() -> None:
    router = Router("sglang_cache_aware")
    known = a_request(prompt_tokens=4096, prefix_keys=blocks(8))
    serve(router.learner, A, known)
    assert name_of(router.decide(known, decoding("a", 30), B)) == "a"
    assert router.decide(known, decoding("a", 33), B).reason.startswith("imbalanced")
    assert name_of(router.decide(known, decoding("a", 33), B)) == "b"
    assert name_of(router.decide(known, decoding("a", 433), decoding("b", 400))) == "a", "33 more, but not 1.1 times"
    half = a_request(prompt_tokens=4096, prefix_keys=(*blocks(4), *blocks(4, start=90)))
    assert name_of(router.decide(half, decoding("a", 2), B)) == "b", "half of the prompt is not more than half"


def test_dynamo_counts_blocks_to_prefill_and_in_use_less_the_cached() -> None:
    router = Router("dynamo_block_cost")
    known = a_request(prompt_tokens=4096, prefix_keys=blocks(8))
    serve(router.learner, A, known)
    busy = replace(decoding("a", 1), in_flight_context_tokens=4000)
    assert name_of(router.decide(known, busy, B)) == "a", "4096 tokens less to prefill for 4000 more in use"
    busy = replace(busy, in_flight_context_tokens=4200)
    assert name_of(router.decide(known, busy, B)) == "b"
    # What is not prefilled yet counts twice: as prompt and as cache in use.
    waiting = a_backend("a", in_flight_requests=1, in_flight_prefill_requests=1, in_flight_prefill_tokens=2000)
    in_use = replace(busy, spec=B.spec, in_flight_context_tokens=3990)
    assert name_of(router.decide(a_request(), waiting, in_use)) == "b"
    assert router.decide(a_request(prompt_tokens=1600), A, A).reason == "block cost 200 of 2"


def test_dynamos_temperature_turns_the_lowest_into_dice() -> None:
    router = Router("dynamo_block_cost", temperature=1.0)
    names = [name_of(router.decide(a_request(), A, decoding("b", 20))) for _ in range(2000)]
    # Costs are spread to 0 and 1, so the odds are 1 to e^-1.
    assert names.count("b") / 2000 == pytest.approx(exp(-1) / (1 + exp(-1)), abs=0.04)


def test_llmd_adds_weighted_scores_of_what_engines_say() -> None:
    router = Router("llmd_default")
    short = a_backend("a", sample=LoadSample(NOW_S, waiting_requests=0, kv_usage_ratio=0.9))
    long = a_backend("b", sample=LoadSample(NOW_S, waiting_requests=4, kv_usage_ratio=0.1))
    # Queue 2·(1 - 0) against cache 2·(0.9 - 0.1): the queue wins. A cached prefix, 3, wins over both.
    assert router.decide(STREAM, short, long).reason == "score 2.20 of 2"
    assert name_of(router.decide(STREAM, short, long)) == "a"
    known = a_request(prompt_tokens=4096, prefix_keys=blocks(8))
    serve(router.learner, long, known)
    assert name_of(router.decide(known, short, long)) == "b"


def test_llmd_falls_back_to_our_books_where_the_engine_says_nothing() -> None:
    router = Router("llmd_default")
    queued = a_backend("a", in_flight_requests=3, in_flight_prefill_requests=3, in_flight_prefill_tokens=30)
    assert name_of(router.decide(STREAM, queued, decoding("b", 40))) == "b"
    stale = LoadSample(NOW_S - 60.0, waiting_requests=99, kv_usage_ratio=1.0)
    assert name_of(router.decide(STREAM, queued, decoding("b", 40, sample=stale))) == "b"


def test_what_we_have_in_flight_counts_before_the_engine_says_so() -> None:
    router = Router("llmd_default")
    news = LoadSample(NOW_S, waiting_requests=0, kv_usage_ratio=0.1)
    filled = replace(decoding("a", 400), sample=news)
    assert name_of(router.decide(STREAM, filled, replace(B, sample=replace(news, kv_usage_ratio=0.2)))) == "b"


def test_least_load_weighs_prompt_work_in_seconds_and_fears_a_full_cache() -> None:
    router = Router("smg_least_load")
    ahead = a_backend("a", in_flight_requests=1, in_flight_prefill_requests=1, in_flight_prefill_tokens=1000)
    more = replace(ahead, spec=B.spec, in_flight_prefill_tokens=1100)
    assert name_of(router.decide(STREAM, ahead, more)) == "a"
    assert router.decide(STREAM, ahead, more).reason == "least load 0.5s of 2", "1000 tokens at 2000 a second"
    full = replace(ahead, sample=LoadSample(NOW_S, kv_usage_ratio=0.95))
    assert name_of(router.decide(STREAM, full, more)) == "b"
    # Streams that decode give a rate of their own: 20 of them at 28.7 ms a step are 698 tokens a second.
    slow = replace(decoding("a", 20), in_flight_prefill_tokens=1000)
    assert router.decide(STREAM, slow, slow).reason == "least load 1.4s of 2"
