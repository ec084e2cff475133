"""The learner of the `headrace` policy: from the events of attempts to beliefs, and from beliefs to predictions."""

import json
from dataclasses import replace
from math import inf
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.catalog.views import BackendView
from policies.attempts import FailureCause
from policies.beliefs.backend import BackendBelief
from policies.chance import weighed
from policies.estimate import ASSUMED, predict
from policies.facts import Budget, RequestFacts
from policies.footing import footing
from policies.learners.ccr.learner import CcrLearner, missed, stand_in
from policies.learning import End, Sent
from policies.policy import Priced
from tests.beliefs import CHAT, CODE
from tests.policy_fleet import A100_PAIR, NOW_S, a_backend, a_request, decoding


def priced(view: BackendView, facts: RequestFacts, now: float = NOW_S, miss: float | None = 0.001) -> Priced:
    return Priced(view, 1e-4, estimate=predict(facts, view, now), miss=miss)


def on(learner: CcrLearner, view: BackendView) -> BackendView:
    return replace(view, belief=learner.belief(view.spec.name, NOW_S))


def serve(learner: CcrLearner, view: BackendView, facts: RequestFacts, ttft_s: float, pace_s: float, tokens: int,
          now: float, **end: Any) -> float:
    """One request from its decision to its last token; returns when that came."""
    sent = learner.sent(facts, priced(view, facts, now), now)
    learner.first_token(sent, now + ttft_s)
    done_s = now + ttft_s + pace_s * (tokens - 1)
    learner.ended(sent, End(tokens, **end), done_s)
    return done_s


def test_output_lengths_are_expected_by_class_and_capped() -> None:
    learner = CcrLearner()
    assert learner.expect_output(a_request(expected_output_tokens=77)) == 77
    view, now = on(learner, a_backend()), NOW_S
    for _ in range(200):
        now = serve(learner, view, CHAT, 0.1, 0.03, 300, now)
        now = serve(learner, view, CODE, 0.1, 0.03, 20, now)
    assert learner.expect_output(CHAT) == pytest.approx(300, abs=6)
    assert learner.expect_output(CODE) == pytest.approx(20, abs=4)
    assert learner.expect_output(replace(CHAT, max_output_tokens=50)) == 50


def test_a_budget_of_the_callers_own_makes_no_answer_longer() -> None:
    """Each request names another budget: lengths are learned by latency class, misses by budget."""
    learner = CcrLearner()
    view, now = on(learner, a_backend()), NOW_S
    for number in range(200):
        own = replace(CHAT, budget=Budget(ttft_s=0.3 if number % 2 else 3.0 + number))
        now = serve(learner, view, own, 0.5, 0.03, 300, now)
    never_seen = replace(CHAT, budget=Budget(ttft_s=77.0))
    assert learner.expect_output(CHAT) == learner.expect_output(never_seen) == pytest.approx(300, abs=6)
    late, in_time = (learner.pool.class_of(replace(CHAT, budget=Budget(ttft_s=ttft_s))) for ttft_s in (0.3, 3.0))
    assert late is not None
    assert in_time is not None
    assert late.weight > 3.0 > 1.0 > in_time.weight
    assert late.lengths is in_time.lengths


def test_the_predicted_p99_covers_99_percent_of_what_comes() -> None:
    """A world that is 25 % slower than calibrated, with a spread that the prior does not have."""
    learner, dice, now, covered, judged = CcrLearner(), Random(4), NOW_S, 0, 0
    view = on(learner, a_backend())
    belief: BackendBelief = view.belief
    for request in range(6000):
        estimate = predict(CHAT, view, now)
        took_s = estimate.ttft_s * 1.25 * dice.lognormvariate(0.0, 0.2)
        if request >= 1000:
            judged += 1
            covered += took_s <= estimate.ttft_s + belief.ttft.p99_z * estimate.ttft_sd_s
        now = serve(learner, view, CHAT, took_s, 0.03, 100, now) + 30.0
    assert covered / judged == pytest.approx(0.99, abs=0.005)


def follow(learner: CcrLearner, view: BackendView, slowness: float, seconds: float, now: float) -> float:
    """One long stream whose pace is reported ten times a second."""
    sent = learner.sent(CHAT, priced(view, CHAT, now), now)
    learner.first_token(sent, now + 0.1)
    gap_s = slowness * footing(replace(view, belief=None), now).pace_ms / 1000
    end_s = now + seconds
    while now < end_s:
        now += 0.1
        learner.paced(sent, view, gap_s, max(1, round(0.1 / gap_s)), now)
    return now


def test_a_silently_slow_backend_is_predicted_slow_within_two_seconds() -> None:
    learner = CcrLearner()
    view = on(learner, decoding("a", 10))
    before = predict(CHAT, view, NOW_S).tpot_s
    now = follow(learner, view, 2.5, 2.0, NOW_S)
    assert predict(CHAT, view, now).tpot_s > 1.8 * before


def test_a_hung_backend_is_predicted_later_and_later() -> None:
    learner = CcrLearner()
    view = on(learner, decoding("a", 10))
    now = follow(learner, view, 1.0, 1.0, NOW_S)
    alive = predict(CHAT, view, now).tpot_s
    assert predict(CHAT, view, now + 0.15).tpot_s == pytest.approx(alive, rel=0.05)
    assert predict(CHAT, view, now + 1.0).tpot_s > 2 * alive
    assert predict(CHAT, view, now + 2.0).tpot_s > 4 * alive


def test_a_slow_backend_that_nobody_uses_becomes_attractive_again() -> None:
    learner = CcrLearner()
    view = on(learner, decoding("a", 10))
    normal = predict(CHAT, view, NOW_S).tpot_s
    sent = learner.sent(CHAT, priced(view, CHAT), NOW_S)
    learner.first_token(sent, NOW_S + 0.1)
    now = NOW_S + 0.1
    for _ in range(30):
        now += 0.1
        learner.paced(sent, view, 0.1, 1, now)
    learner.ended(sent, End(30), now)
    idle = on(learner, a_backend("a"))
    slow = predict(CHAT, idle, now).tpot_s / predict(CHAT, a_backend("a"), now).tpot_s
    later = predict(CHAT, idle, now + 60.0).tpot_s / predict(CHAT, a_backend("a"), now).tpot_s
    assert slow > 2
    assert later < 1.1
    assert normal > 0


def test_prefill_of_others_slows_and_widens_the_pace() -> None:
    learner = CcrLearner()
    view = on(learner, a_backend())
    quiet = predict(CHAT, view, NOW_S)
    for step in range(20):
        now = NOW_S + 0.2 * step
        sent = learner.sent(replace(CHAT, prompt_tokens=1500), priced(view, CHAT, now), now)
        learner.first_token(sent, now + 0.1)
        learner.ended(sent, End(1), now + 0.1)
    busy = predict(CHAT, view, NOW_S + 4.0)
    assert busy.tpot_s > 1.3 * quiet.tpot_s
    assert busy.tpot_sd_s / busy.tpot_s > 1.3 * quiet.tpot_sd_s / quiet.tpot_s
    # A short answer has fewer tokens to spread a stall over.
    short = predict(replace(CHAT, expected_output_tokens=10), view, NOW_S + 4.0)
    assert short.tpot_sd_s > 1.5 * busy.tpot_sd_s


def test_a_calibration_that_is_off_by_a_sixth_is_corrected_and_leaves_no_bias() -> None:
    """Too little for drift to follow; prefill and pace are off to different sides."""
    learner, now = CcrLearner(), NOW_S
    view = on(learner, a_backend())
    told = predict(CHAT, view, now)
    own_s = (0.125 * CHAT.prompt_tokens + 6e-6 * CHAT.prompt_tokens**2 / 2) / 1000
    ttft_s, pace_s = told.ttft_s + 0.17 * own_s, told.tpot_s / 1.17
    for _ in range(300):
        now = serve(learner, view, CHAT, ttft_s, pace_s, 128, now) + 60.0   # no prefill of others in between
    found = predict(CHAT, on(learner, a_backend()), now)
    assert view.belief.prefill.factor == pytest.approx(1.17, abs=0.02)
    assert found.ttft_s == pytest.approx(ttft_s, rel=0.02)
    assert found.tpot_s == pytest.approx(pace_s, rel=0.02)


def test_who_waits_for_a_first_token_can_be_crowded_as_well() -> None:
    """One that came before is held up by the next prompt once it decodes, whether it has begun to by then or not."""
    learner = CcrLearner()
    view = on(learner, decoding("a", 3))
    sent = [learner.sent(CODE, priced(view, CODE), NOW_S) for _ in range(3)]
    long = replace(CHAT, prompt_tokens=4000)
    before = weighed(long, Priced(view, 1e-4), long.budget, 0.8, NOW_S).crowding
    assert before is not None
    assert before > 0.2
    for each in sent:
        learner.ended(each, End(0, FailureCause.CLIENT_GONE), NOW_S)
    view = on(learner, decoding("a", 3))
    assert weighed(long, Priced(view, 1e-4), long.budget, 0.8, NOW_S).crowding == 0.0


def test_cached_prompts_are_predicted_shorter_and_leave_room_in_the_queue() -> None:
    learner = CcrLearner()
    view = on(learner, a_backend())
    talk = replace(CHAT, prompt_tokens=6000, session_key="s")
    cold = predict(talk, view, NOW_S)
    serve(learner, view, talk, 1.0, 0.03, 100, NOW_S)
    warm = predict(replace(talk, prompt_tokens=6200), view, NOW_S + 5.0)
    assert warm.cached_tokens == 6100
    assert warm.ttft_s < 0.3 * cold.ttft_s
    learner.sent(replace(talk, prompt_tokens=6200), priced(view, replace(talk, prompt_tokens=6200)), NOW_S + 5.0)
    queued = replace(view, in_flight_requests=1, in_flight_prefill_requests=1, in_flight_prefill_tokens=6200)
    assert predict(CHAT, queued, NOW_S + 5.0).drain_s < 0.3 * predict(CHAT, replace(queued, belief=None), NOW_S).drain_s


def test_a_cache_that_proves_smaller_is_believed_less() -> None:
    learner = CcrLearner()
    view, talk = on(learner, a_backend()), replace(CHAT, prompt_tokens=6000, session_key="s")
    now = serve(learner, view, talk, 1.0, 0.03, 100, NOW_S)
    before = view.belief.cache.capacity_tokens
    serve(learner, view, talk, 1.0, 0.03, 100, now, cached_tokens=0)
    assert view.belief.cache.capacity_tokens < before


def test_a_first_token_that_never_came_counts_as_late() -> None:
    learner = CcrLearner()
    view = on(learner, a_backend())
    for turn in range(40):
        now = NOW_S + 100.0 * turn
        sent = learner.sent(CHAT, priced(view, CHAT, now), now)
        learner.ended(sent, End(0, FailureCause.FIRST_TOKEN_TIMEOUT), now + 60.0)
    assert view.belief.ttft.p99_z > 10
    kind = learner.pool.class_of(CHAT)
    assert kind is not None
    assert kind.missed > 0.2


@pytest.mark.parametrize("cause", [FailureCause.CLIENT_GONE, FailureCause.CONNECT, FailureCause.STATUS_429])
def test_what_says_nothing_about_speed_teaches_nothing(cause: FailureCause) -> None:
    learner = CcrLearner()
    view = on(learner, a_backend())
    for turn in range(40):
        learner.ended(learner.sent(CHAT, priced(view, CHAT), NOW_S + turn), End(0, cause), NOW_S + turn + 30.0)
    kind = learner.pool.class_of(CHAT)
    assert kind is not None
    assert kind.judged == 0
    assert view.belief.ttft.samples == 0


@pytest.mark.parametrize(("budget", "ttft_s", "took_s", "late"), [
    (Budget(ttft_s=1.0), 0.9, 99.0, False), (Budget(ttft_s=1.0), 1.1, 1.1, True),
    (Budget(ttft_s=1.0, inter_token_s=0.1), 0.2, 10.8, False),   # what the first token left over was spent later
    (Budget(ttft_s=1.0, inter_token_s=0.1), 0.2, 11.0, True),
    (Budget(inter_token_s=0.1), 5.0, 14.8, False), (Budget(inter_token_s=0.1), 5.0, 15.0, True),
    (Budget(e2e_s=10.0), 5.0, 9.9, False), (Budget(e2e_s=10.0), 5.0, 10.1, True), (Budget(), 500.0, 500.0, False),
])
def test_a_budget_is_kept_to_the_token_deadlines(budget: Budget, ttft_s: float, took_s: float, late: bool) -> None:
    sent = Sent("a", a_request(budget=budget), NOW_S, first_token_at_s=NOW_S + ttft_s)
    assert missed(sent, 100, NOW_S + took_s) is late


def test_time_waited_before_counts_against_the_budget() -> None:
    sent = Sent("a", a_request(budget=Budget(ttft_s=1.0), waited_s=0.5), NOW_S, first_token_at_s=NOW_S + 0.6)
    assert missed(sent, 1, NOW_S + 0.6)


def test_an_unmeasured_backend_gets_a_stand_in_made_of_its_pool() -> None:
    learner = CcrLearner()
    unmeasured = on(learner, a_backend("new", coefficients=None))
    assert predict(CHAT, unmeasured, NOW_S).tpot_s == predict(CHAT, a_backend(coefficients=ASSUMED), NOW_S).tpot_s
    serve(learner, on(learner, a_backend("known")), CHAT, 0.1, 0.03, 10, NOW_S)
    serve(learner, unmeasured, CHAT, 0.2, 0.05, 10, NOW_S)
    found, known = predict(CHAT, unmeasured, NOW_S), predict(CHAT, a_backend("known"), NOW_S)
    assert found.tpot_s / known.tpot_s == pytest.approx(1.5, rel=0.1)
    assert stand_in([A100_PAIR]).decode_base_ms == 1.5 * A100_PAIR.decode_base_ms


def test_what_was_learned_outlives_a_restart() -> None:
    learner, now = CcrLearner(), NOW_S
    view = on(learner, a_backend())
    for _ in range(200):
        now = serve(learner, view, CHAT, 0.4, 0.05, 250, now)
    view.belief.drift.set(0.8)
    state = json.loads(json.dumps(learner.export()))
    again = CcrLearner()
    again.restore(state, 0.0)
    assert again.expect_output(CHAT) == learner.expect_output(CHAT)
    known, kept = learner.pool.lengths_of(CHAT), again.pool.lengths_of(CHAT)
    assert known is not None
    assert kept is not None
    assert (kept.outputs, kept.spread) == (known.outputs, known.spread)
    assert again.backends["a"].drift.applied == pytest.approx(view.belief.drift.applied)
    assert view.belief.prefill.factor > 1.5
    assert again.backends["a"].prefill.factor == pytest.approx(view.belief.prefill.factor)
    assert again.backends["a"].decode.factor == pytest.approx(view.belief.decode.factor)
    assert again.backends["a"].ttft.p99_z == pytest.approx(view.belief.ttft.p99_z, abs=0.2)
    aged = CcrLearner()
    aged.restore(state, 3600.0)
    assert aged.backends["a"].drift.applied == pytest.approx(1.0, abs=1e-6)
    assert aged.backends["a"].prefill.factor == pytest.approx(view.belief.prefill.factor ** 0.5)
    assert aged.backends["a"].ttft.samples == pytest.approx(view.belief.ttft.samples / 2, rel=0.05)


json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(
        ["v", "pool", "classes", "backends", "a", "ttft", "drift", "key", "budget", "cache_tokens", "weight", "lengths",
         "outputs"]), inner),
    max_leaves=12)


@given(json_values, st.floats())
def test_a_state_that_makes_no_sense_is_passed_over(value: Any, age_s: float) -> None:
    learner = CcrLearner()
    learner.restore(value, age_s)
    learner.restore({"v": 1, "pool": value, "classes": value, "backends": {"a": value}}, age_s)
    learner.restore({"v": 1, "classes": [value], "lengths": [value], "backends": value}, age_s)
    learner.restore({"v": 1, "lengths": value}, age_s)
    assert predict(CHAT, on(learner, a_backend()), NOW_S).ttft_s < inf


events = st.lists(st.tuples(st.sampled_from(["sent", "first", "paced", "ended"]), st.integers(0, 7),
                            st.floats(0.0, 1.0)), max_size=80)


@settings(deadline=None)
@given(events, st.sampled_from([None, "s"]))
def test_whatever_happens_in_whatever_order_nothing_leaks(
    order: list[tuple[str, int, float]], key: str | None
) -> None:
    learner, now = CcrLearner(), NOW_S
    views = [on(learner, a_backend(name)) for name in "ab"]
    under_way: dict[int, Sent] = {}
    for what, number, pause_s in order:
        now += pause_s
        view = views[number % 2]
        facts = replace(CHAT if number % 3 else CODE, session_key=key)
        if what == "sent" and number not in under_way:
            under_way[number] = learner.sent(facts, priced(view, facts, now), now)
        elif number in under_way:
            sent = under_way[number]
            if what == "first":
                learner.first_token(sent, now)
            elif what == "paced" and sent.first_token_at_s is not None:
                learner.paced(sent, view, 0.03, 5, now)
            elif what == "ended":
                failure = None if sent.first_token_at_s is not None else FailureCause.RESET_BEFORE_BYTE
                learner.ended(under_way.pop(number), End(20, failure), now)
    for sent in under_way.values():
        learner.ended(sent, End(0, FailureCause.CLIENT_GONE), now)
    for belief in learner.backends.values():
        assert belief.open_requests == 0
        assert belief.cached_ahead_tokens == 0
        assert belief.waiting.head_tokens == 0
        assert all(streams.count == 0 and streams.slack_s == 0 for streams in belief.streams.values())
