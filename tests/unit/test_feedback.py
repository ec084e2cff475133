"""What a learner is told of attempts: one beginning, one end, a pace ten times a second, and no fault of a client's."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.catalog.spec import BackendSpec
from backends.catalog.views import BackendView
from policies.attempts import FailureCause
from policies.estimate import Estimate
from policies.learning import End
from policies.policy import Decision, Priced, predicted_p99_s
from router.fleet.feedback import PACE_EVERY_S, STALLED_S, Faults, Feedback, Pacing
from router.fleet.leases import Books
from router.wire.answer_members import Usage
from tests.policy_fleet import NOW_S, a_backend, a_request
from tests.told_learner import ToldLearner


class Backend:
    """As much of a live backend as feedback sees."""

    def __init__(self) -> None:
        self.view = a_backend("a")
        self.spec: BackendSpec = self.view.spec
        self.books = Books()
        self.pacing = Pacing()

    def seen(self, belief: Any) -> BackendView:
        return self.view


def a_decision(backend: Backend, estimate: Estimate | None = None) -> Decision:
    other = Priced(a_backend("b"), 2.0)
    return Decision("p", backend.view, "why", 1.0, (other, Priced(backend.view, 1.0, estimate=estimate)), (), "c")


def begun(learner: ToldLearner, backend: Backend, *, faults: Faults | None = None, choices: int = 1) -> Feedback:
    feedback = Feedback(learner, backend, faults or Faults(), choices=choices)
    backend.books.cells[2] += 1
    feedback.begin(a_request(stream=True), a_decision(backend), None, NOW_S)
    return feedback


def stream(feedbacks: list[Feedback], *, gap_s: float, until_s: float) -> int:
    """All get a token every `gap_s`, and call when they were told to. Returns how often they did."""
    calls, due = 0, [-1.0] * len(feedbacks)
    for step in range(1, round(until_s / gap_s) + 1):
        now = NOW_S + step * gap_s
        for index, feedback in enumerate(feedbacks):
            if now >= due[index]:
                due[index] = feedback.heard(step, now)
                calls += 1
    return calls


# --- beginning and end ----------------------------------------------------------------------------------------------


def test_an_attempt_begins_with_the_chosen_candidate_and_its_first_token_is_told_once() -> None:
    learner, backend = ToldLearner(), Backend()
    feedback = begun(learner, backend)
    assert learner.sents[0].priced == Priced(backend.view, 1.0)
    stream([feedback], gap_s=0.01, until_s=1.0)
    assert len(learner.firsts) == 1
    assert feedback.first_at_s == pytest.approx(NOW_S + 0.01)


@pytest.mark.parametrize(
    ("usage", "events", "expected"),
    [
        (None, 7, End(7, None)),
        (Usage(40, 12), 7, End(12, None, 40, None)),
        (Usage(40, 12, {"cached_tokens": 32}), 7, End(12, None, 40, 32)),
        (Usage(40, None, {"cached_tokens": 64}), 7, End(7, None, 40, None)),  # more cached than there was
        (Usage(40, 12, [1]), 7, End(12, None, 40, None)),
    ],
)
def test_the_end_says_what_the_engine_counted(usage: Usage | None, events: int, expected: End) -> None:
    learner, backend = ToldLearner(), Backend()
    feedback = begun(learner, backend)
    feedback.end(None, events, usage, NOW_S + 1)
    assert learner.ends == [(learner.sents[0], expected)]


def test_choices_share_the_engines_count() -> None:
    learner, backend = ToldLearner(), Backend()
    begun(learner, backend, choices=4).end(None, 38, Usage(10, 40), NOW_S + 1)
    assert learner.ends[0][1].output_tokens == 10


@given(st.lists(st.sampled_from(["token", "pause", "end", "fail"]), max_size=12))
def test_whatever_happens_there_is_one_end_and_nothing_after_it(steps: list[str]) -> None:
    learner, backend = ToldLearner(), Backend()
    feedback, now, told = begun(learner, backend), NOW_S, 0
    act: dict[str, Callable[[], object]] = {
        "token": lambda: feedback.heard(1, now), "pause": lambda: feedback.held_up(now),
        "end": lambda: feedback.end(None, 1, None, now),
        "fail": lambda: feedback.end(FailureCause.TRUNCATED, 1, None, now),
    }
    for step in (*steps, "end"):
        now += 0.2
        act[step]()
        if learner.ends:
            told = told or len(learner.paces)
            assert len(learner.paces) == told
    assert len(learner.sents) == len(learner.ends) == 1
    assert backend.pacing.holder is None


def test_a_client_that_does_not_read_is_no_news_of_the_backend() -> None:
    learner, backend = ToldLearner(), Backend()
    feedback = begun(learner, backend)
    feedback.heard(1, NOW_S + 0.1)
    feedback.held_up(NOW_S + 0.3)
    assert [end.failure for _, end in learner.ends] == [FailureCause.CLIENT_GONE]
    assert feedback.heard(50, NOW_S + 9) == float("inf")
    feedback.end(None, 50, None, NOW_S + 10)
    assert len(learner.ends) == 1
    assert learner.paces == []


# --- the pace -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streams", [1, 2, 7, 300])
def test_a_backend_is_looked_at_without_gaps_and_not_oftener_than_ten_times_a_second(streams: int) -> None:
    learner, backend = ToldLearner(), Backend()
    feedbacks = [begun(learner, backend) for _ in range(streams)]
    calls = stream(feedbacks, gap_s=0.02, until_s=10.0)
    assert 80 <= len(learner.paces) <= 100
    assert all(gap_s == pytest.approx(0.02) for _, gap_s, _, _ in learner.paces)
    assert sum(tokens for _, _, tokens, _ in learner.paces) >= 0.8 * 10.0 / 0.02
    assert calls <= 3 * streams * 10.0 / PACE_EVERY_S


def test_the_turn_passes_on() -> None:
    learner, backend = ToldLearner(), Backend()
    feedbacks = [begun(learner, backend) for _ in range(3)]
    stream(feedbacks, gap_s=0.02, until_s=6.0)
    by_stream = {id(sent): 0 for sent in learner.sents}
    for sent, *_ in learner.paces:
        by_stream[id(sent)] += 1
    assert sum(count > 5 for count in by_stream.values()) >= 2


def test_a_stream_that_stalls_loses_its_turn_and_tells_of_nothing_meanwhile() -> None:
    learner, backend = ToldLearner(), Backend()
    first, second = begun(learner, backend), begun(learner, backend)
    first.heard(1, NOW_S)
    for step in range(1, 300):
        second.heard(step, NOW_S + 0.01 * step)
    assert learner.paces
    assert {id(sent) for sent, *_ in learner.paces} == {id(learner.sents[1])}
    assert learner.paces[0][3] >= NOW_S + STALLED_S


def test_a_slow_stream_tells_of_its_long_gaps() -> None:
    learner, backend = ToldLearner(), Backend()
    stream([begun(learner, backend)], gap_s=0.7, until_s=7.0)
    assert [gap_s for _, gap_s, _, _ in learner.paces] == pytest.approx([0.7] * 9)


def test_an_engine_that_packs_tokens_into_events_is_not_taken_for_a_slow_one() -> None:
    learner, backend = ToldLearner(), Backend()
    for _ in range(60):
        feedback = begun(learner, backend)
        feedback.heard(1, NOW_S)
        feedback.end(None, 25, Usage(10, 100), NOW_S + 1)
    learner.paces.clear()
    stream([begun(learner, backend)], gap_s=0.08, until_s=4.0)
    assert all(gap_s == pytest.approx(0.02, rel=0.05) for _, gap_s, _, _ in learner.paces)


def test_choices_side_by_side_have_the_pace_of_one() -> None:
    learner, backend = ToldLearner(), Backend()
    feedback, due = begun(learner, backend, choices=2), -1.0
    for step in range(1, 100):
        now = NOW_S + 0.02 * step
        if now >= due:
            due = feedback.heard(2 * step, now)
    assert all(gap_s == pytest.approx(0.02) for _, gap_s, _, _ in learner.paces)


# --- predictions, and learners that fail ----------------------------------------------------------------------------


def test_the_predicted_p99_is_the_estimates_own_or_the_margin_over_the_mean() -> None:
    view = a_backend("a")
    with_tails = Estimate(0.0, 1.0, 0.1, 5.0, ttft_p99_s=1.5, e2e_p99_s=7.0)
    assert predicted_p99_s(Priced(view, 0.0, estimate=with_tails), 2.0) == (1.5, 7.0)
    assert predicted_p99_s(Priced(view, 0.0, estimate=Estimate(0.0, 1.0, 0.1, 5.0)), 2.0) == (2.0, 10.0)
    assert predicted_p99_s(Priced(view, 0.0, estimate=Estimate(0.0, 1.0, 0.1, 5.0)), None) == (None, None)
    assert predicted_p99_s(Priced(view, 0.0), 2.0) == (None, None)
    endless = Estimate(0.0, 1.0, 0.1, float("inf"), ttft_p99_s=1.5, e2e_p99_s=float("inf"))
    assert predicted_p99_s(Priced(view, 0.0, estimate=endless), None) == (1.5, None)


@pytest.mark.parametrize("broken", ["sent", "first_token", "paced", "ended"])
def test_no_request_fails_because_of_a_learner(broken: str, caplog: pytest.LogCaptureFixture) -> None:
    learner, backend, faults = ToldLearner(), Backend(), Faults()

    def fails(*_: object) -> None:
        raise OverflowError(broken)

    setattr(learner, broken, fails)
    feedback = begun(learner, backend, faults=faults)
    with caplog.at_level(logging.ERROR):
        stream([feedback], gap_s=0.05, until_s=1.0)
        feedback.end(None, 20, None, NOW_S + 1)
    assert faults.count >= 1
    assert feedback.first_at_s is not None
    assert len([record for record in caplog.records if record.name == "headrace.learning"]) <= 1
