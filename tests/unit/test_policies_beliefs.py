"""What is believed: residual tails, drift, prefill arrivals, prefix caches, classes, observed waits."""

from math import exp, inf, log, nan
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.beliefs.arrivals import PrefillArrivals, PrefillsDone
from policies.beliefs.backend import BackendBelief, PoolTails
from policies.beliefs.caches import FIRST_CAPACITY_TOKENS, PrefixCache
from policies.beliefs.classes import WEIGHT_RANGE, ClassBelief, class_key
from policies.beliefs.correction import LARGEST_LOG, Correction
from policies.beliefs.drift import Drift, faded
from policies.beliefs.lengths import LengthBelief
from policies.beliefs.observed import Waits
from policies.beliefs.pool import MAX_CLASSES, PoolBelief
from policies.beliefs.tails import BINS, PRIOR, PRIOR_P99_Z, Tail, quantile, survival
from policies.beliefs.waiting import WaitingPrompts
from policies.facts import Budget, RequestFacts
from tests.beliefs import CHAT
from tests.policy_fleet import a_request


def test_the_prior_is_a_normal_with_a_wide_part() -> None:
    assert survival(PRIOR, 0.0) == pytest.approx(0.5)
    assert survival(PRIOR, 2.0) == pytest.approx(0.98 * 0.02275 + 0.02 * 0.30854, rel=0.02)
    assert 2.4 < PRIOR_P99_Z < 2.8


def test_a_backend_without_samples_reads_the_pools_table() -> None:
    pool = Tail()
    seen, unseen = Tail(pool), Tail(pool)
    for _ in range(400):
        seen.observe(4.0)
    assert unseen.table is pool.table
    assert survival(unseen.table, 3.0) > 0.5
    assert unseen.p99_z == pool.p99_z
    assert survival(seen.table, 3.0) > survival(unseen.table, 3.0)


def test_a_tail_learns_what_it_sees_and_forgets() -> None:
    dice, tail = Random(1), Tail(Tail())
    for _ in range(3000):
        tail.observe(dice.gauss(1.0, 2.0))
    assert quantile(tail.table, 0.99) == pytest.approx(1.0 + 2 * 2.326, abs=0.8)
    assert 300 < tail.samples <= 500
    for _ in range(3000):
        tail.observe(dice.gauss(0.0, 0.5))
    assert quantile(tail.table, 0.99) < 2.0


@given(st.lists(st.floats(-1e3, 1e3), max_size=100), st.lists(st.floats(-30.0, 60.0), min_size=2, max_size=20))
def test_survival_never_rises_and_is_a_probability(residuals: list[float], at: list[float]) -> None:
    tail = Tail(Tail())
    for z in residuals:
        tail.observe(z)
    tail.refresh()
    found = [survival(tail.table, z) for z in sorted(at)]
    assert found == sorted(found, reverse=True)
    assert all(0.0 <= each <= 1.0 for each in found)
    assert survival(tail.table, nan) == 1.0
    assert survival(tail.table, inf) == 0.0
    assert survival(tail.table, -inf) == 1.0


def test_a_tail_survives_export_and_no_nonsense() -> None:
    tail, other = Tail(), Tail()
    for _ in range(60):
        tail.observe(5.0)
    other.restore(tail.export(), 1.0)
    assert other.table == pytest.approx(tail.table, abs=1e-3)
    for nonsense in (None, "x", [1.0], [nan] * BINS, [-1.0] * BINS, ["a"] * BINS):
        other.restore(nonsense, 1.0)
    assert other.table == pytest.approx(tail.table, abs=1e-3)


def observe(drift: Drift, ratio: float, seconds: float, since_s: float) -> None:
    steps = round(seconds / 0.1)
    for step in range(1, steps + 1):
        drift.observe(0.02 * ratio, 0.02, 0.02, 0.1, since_s + 0.1 * step)


def test_a_silent_slowdown_is_applied_within_two_seconds_and_left_again() -> None:
    drift = Drift()
    observe(drift, 2.5, 1.0, 0.0)
    assert drift.applied > 1.5
    observe(drift, 2.5, 1.0, 1.0)
    assert drift.applied > 2.0
    observe(drift, 1.0, 4.0, 2.0)
    assert drift.applied == 1.0


def test_small_bias_is_left_to_the_residuals() -> None:
    drift = Drift()
    observe(drift, exp(0.19), 10.0, 0.0)
    assert drift.applied == 1.0
    observe(drift, exp(0.5), 10.0, 10.0)
    assert drift.applied == pytest.approx(exp(0.5), rel=0.01)


def test_a_gap_that_the_belief_explains_moves_nothing() -> None:
    drift = Drift()
    for step in range(50):
        drift.observe(0.05, 0.02, 0.08, 0.1, 0.1 * step)   # some prefill was in it, nobody knows how much
    assert drift.log_ratio == 0.0
    observe(drift, 3.0, 3.0, 5.0)
    slow = drift.log_ratio
    for step in range(5):
        drift.observe(0.06, 0.02, 0.08, 0.1, 8.1 + 0.1 * step)   # explained by the slowness too
    assert drift.log_ratio == slow


def test_streams_side_by_side_count_once() -> None:
    one, ten = Drift(), Drift()
    observe(one, 2.5, 0.5, 0.0)
    for step in range(1, 6):
        for _ in range(10):
            ten.observe(0.05, 0.02, 0.02, 0.1, 0.1 * step)
    assert ten.log_ratio == pytest.approx(one.log_ratio, rel=0.01)


def test_a_belief_fades_without_news() -> None:
    assert faded(2.5, 3.0) == 2.5
    assert faded(2.5, 18.0) == pytest.approx(1 + 1.5 / exp(1))
    assert faded(0.5, 200.0) == pytest.approx(1.0, abs=1e-4)


def test_arrivals_are_a_rate_and_its_variance() -> None:
    arrivals = PrefillArrivals()
    for step in range(1000):
        arrivals.add(0.05, step * 0.2)
    share, burst_s = arrivals.at(200.0)
    assert share == pytest.approx(0.25, rel=0.05)
    assert burst_s == pytest.approx(0.05 * 0.25, rel=0.05)
    assert arrivals.at(208.0)[0] == pytest.approx(share / exp(1), rel=0.01)


def test_the_largest_of_the_prompts_that_are_through_may_have_begun_before() -> None:
    done = PrefillsDone()
    for at_s, tokens in ((1.0, 4000), (2.0, 300), (2.1, 700)):
        done.add(tokens, at_s)
    assert done.since(1.5) == (300, 1000)
    assert done.since(3.0) == (0, 0)


def session(key: str = "s", prompt: int = 1000, blocks: int = 0) -> RequestFacts:
    keys = tuple((key, index) for index in range(blocks))
    return a_request(prompt_tokens=prompt, session_key=None if blocks else key, prefix_keys=keys,
                     prefix_block_tokens=100)


def test_a_session_is_believed_cached_until_enough_has_gone_through() -> None:
    cache = PrefixCache()
    cache.assume(10_000)
    cache.passed(session(prompt=600), 600, 600)
    assert cache.believed_tokens(session()) == 600
    assert cache.believed_tokens(session("other")) == 0
    cache.passed(session("other"), 8_900, 8_900)
    assert cache.believed_tokens(session()) == 600
    cache.passed(session("third"), 200, 200)
    assert cache.believed_tokens(session()) == 0
    assert cache.known(session()) == (600, 9_100)


def test_a_hit_is_always_shorter_than_the_prompt() -> None:
    cache = PrefixCache()
    cache.passed(session(prompt=600), 600, 600)
    assert cache.believed_tokens(session(prompt=600)) == 599
    assert cache.believed_tokens(session(prompt=1)) == 0


def test_prefix_keys_count_as_far_as_they_are_known() -> None:
    cache = PrefixCache()
    cache.passed(session(blocks=5), 500, 500)
    assert cache.believed_tokens(session(blocks=9)) == 500
    assert cache.believed_tokens(session(blocks=3, prompt=350)) == 300
    assert cache.believed_tokens(session("other", blocks=3)) == 0


def test_the_capacity_is_learned_from_hits_and_misses() -> None:
    cache = PrefixCache()
    cache.corrected(500, 500, 1000.0, 0)
    assert cache.capacity_tokens == pytest.approx(0.7 * FIRST_CAPACITY_TOKENS + 300)
    cache.corrected(0, 500, 80_000.0, 500)
    assert cache.capacity_tokens == 80_000
    cache.assume(1)   # what was learned stands
    assert cache.capacity_tokens == 80_000
    cache.corrected(500, 500, 10.0, 500)
    assert cache.capacity_tokens == 80_000


def test_marks_that_are_too_old_to_matter_are_dropped() -> None:
    cache = PrefixCache()
    cache.assume(100)
    for index in range(500):
        cache.passed(session(str(index)), 50, 50)
    assert len(cache._marks) < 10


def test_a_class_learns_how_long_its_answers_are() -> None:
    lengths, dice = LengthBelief(), Random(2)
    for _ in range(2000):
        lengths.answered(max(1, round(dice.lognormvariate(log(200), 0.5))))
    assert lengths.expected_output_tokens == pytest.approx(200 * exp(0.125), rel=0.1)
    assert lengths.spread == pytest.approx((exp(0.25) - 1) ** 0.5, rel=0.2)


def test_the_weight_of_a_miss_finds_the_level_that_keeps_the_promise() -> None:
    """A world in which a heavier weight means fewer misses: the weight settles where one in a hundred misses."""
    kind, dice, late = ClassBelief(class_key(CHAT), CHAT.budget, LengthBelief()), Random(3), 0
    for request in range(60_000):
        missed = dice.random() < 0.02 / kind.weight
        kind.judge(missed)
        late += missed and request >= 20_000
    assert late / 40_000 == pytest.approx(0.01, rel=0.1)
    assert kind.missed == pytest.approx(0.01, abs=0.015)


@given(st.lists(st.booleans(), max_size=300))
def test_the_weight_keeps_its_bounds(misses: list[bool]) -> None:
    kind = ClassBelief(class_key(CHAT), CHAT.budget, LengthBelief())
    for missed in misses:
        kind.judge(missed)
    assert WEIGHT_RANGE[0] <= kind.weight <= WEIGHT_RANGE[1]


def test_callers_with_budgets_of_their_own_cannot_make_endless_classes() -> None:
    pool = PoolBelief()
    for index in range(10 * MAX_CLASSES):
        pool.made_class_of(a_request(budget=Budget(ttft_s=1.0 + index)))
    assert len(pool.classes) == MAX_CLASSES + 1
    assert pool.class_of(a_request(budget=Budget(ttft_s=1e6))) is not None
    assert len(pool.lengths) == 1, "their answers are as long as those of anybody else in the latency class"


def test_waits_are_shares_by_size_of_the_prompt() -> None:
    waits = Waits()
    for _ in range(300):
        waits.observe(1000, 0.5)
        waits.observe(20_000, 5.0)
    assert waits.share_over(1000, 0.2) > 0.95
    assert waits.share_over(1000, 1.0) < 0.05
    assert waits.share_over(20_000, 1.0) > 0.95
    assert waits.share_over(10, 1.0) == 0.5      # nobody knows
    assert waits.share_over(1000, -1.0) == 1.0


def test_a_backend_whose_residuals_are_all_far_out_is_lost() -> None:
    belief = BackendBelief(PoolTails())
    assert not belief.lost(0.0)
    for _ in range(60):
        belief.ttft.observe(9.0)
    assert belief.lost(0.0)


def test_a_backend_whose_drift_stays_implausible_is_lost_until_it_comes_back() -> None:
    belief = BackendBelief(PoolTails())
    belief.drift.set(log(5.0))
    belief.heard(100.0)
    assert not belief.lost(105.0)
    assert belief.lost(110.0)
    belief.drift.set(0.0)
    belief.heard(111.0)
    assert not belief.lost(200.0)


def test_a_correction_finds_the_median_of_what_is_off() -> None:
    correction, dice = Correction(0.05), Random(2)
    for _ in range(1000):
        hiccup = 20.0 if dice.random() < 0.02 else 1.0
        correction.observe(1.3 * dice.lognormvariate(0.0, 0.1) * hiccup, correction.factor, 1.0)
    assert correction.factor == pytest.approx(1.3, rel=0.06)


@given(st.lists(st.tuples(st.floats(), st.floats(), st.floats()), max_size=40))
def test_a_correction_stays_within_a_factor_of_four_and_its_price_beside_it(seen: list[tuple[float, ...]]) -> None:
    correction = Correction(0.5)
    for observed_s, predicted_s, part in seen:
        correction.observe(observed_s, predicted_s, part)
    assert exp(-LARGEST_LOG) * 0.999 <= correction.factor <= exp(LARGEST_LOG) * 1.001
    assert correction.priced / correction.factor == pytest.approx(1.0, abs=2.0 ** (1 / 16) - 1.0 + 1e-9)


def test_what_is_a_small_part_of_a_prediction_is_corrected_little() -> None:
    whole, tenth = Correction(0.05), Correction(0.05)
    whole.observe(2.0, 1.0, 1.0)
    tenth.observe(2.0, 1.0, 0.1)
    assert log(whole.factor) == pytest.approx(10 * log(tenth.factor))
    assert whole.log_factor == pytest.approx(0.05 * log(2.0))


def test_the_engine_turns_to_the_next_prompt_when_the_one_before_has_its_first_token() -> None:
    waiting = WaitingPrompts()
    for tokens, at_s in ((700, 1.0), (30, 1.5), (0, 2.0)):
        waiting.sent(tokens, at_s)
    assert (waiting.head_tokens, waiting.turned_at_s) == (700, 1.0)
    waiting.through(700, 3.0)
    assert (waiting.head_tokens, waiting.turned_at_s) == (30, 3.0)
    waiting.gone(30)   # its client left; the engine was at it since 3.0 all the same
    assert (waiting.head_tokens, waiting.turned_at_s) == (1, 3.0)
    waiting.through(0, 3.2)
    assert waiting.head_tokens == 0
    waiting.sent(50, 9.0)
    assert (waiting.head_tokens, waiting.turned_at_s) == (50, 9.0)
