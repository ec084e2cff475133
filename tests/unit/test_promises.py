"""Which budgets a request kept, and which predictions its attempts were within."""

from types import SimpleNamespace
from typing import Any

import pytest

from policies.attempts import FailureCause
from policies.facts import Budget
from router.request.exchange import Exchange, Outcome
from router.request.intake import Endpoint
from router.request.promises import Judged, Prediction, judge, within
from router.wire.answer_members import Usage
from tests.policy_fleet import a_request

GENERATION: Any = SimpleNamespace(config_hash="c")


def ended(budget: Budget, **given: Any) -> list[Judged]:
    """A stream of 11 tokens: first after 1 s, last after 3 s."""
    fields: dict[str, Any] = {
        "endpoint": Endpoint.CHAT_COMPLETIONS, "request_id": "r", "generation": GENERATION, "began_at_s": 99.0,
        "received_at_s": 100.0, "ended_at_s": 103.5, "first_token_at_s": 101.0, "last_token_at_s": 103.0,
        "generated_tokens": 11, "outcome": Outcome.OK, "facts": a_request(stream=True, budget=budget),
    }
    return judge(Exchange(**{**fields, **given}))


@pytest.mark.parametrize(
    ("budget", "kept"),
    [
        (Budget(ttft_s=1.0), {"ttft": True}),
        (Budget(ttft_s=0.9), {"ttft": False}),
        (Budget(ttft_s=1.0, inter_token_s=0.2), {"ttft": True, "inter_token": True}),
        (Budget(ttft_s=2.0, inter_token_s=0.1), {"ttft": True, "inter_token": True}),  # an early first token is credit
        (Budget(ttft_s=1.5, inter_token_s=0.1), {"ttft": True, "inter_token": False}),
        (Budget(inter_token_s=0.2), {"inter_token": True}),
        (Budget(inter_token_s=0.19), {"inter_token": False}),
        (Budget(e2e_s=3.0), {"e2e": True}),
        (Budget(e2e_s=2.9), {"e2e": False}),
        (Budget(), {}),
    ],
)
def test_each_budget_is_judged_and_all_of_them_together(budget: Budget, kept: dict[str, bool]) -> None:
    judged = ended(budget)
    expected = {**kept, "all": all(kept.values())} if kept else {}
    assert {entry.budget: entry.kept for entry in judged} == expected


def test_lateness_is_in_seconds() -> None:
    (ttft, _) = ended(Budget(ttft_s=0.25))
    assert ttft.late_s == pytest.approx(0.75)


def test_the_engines_count_of_tokens_goes_before_our_own() -> None:
    budget = Budget(ttft_s=1.0, inter_token_s=0.1)
    assert [entry.kept for entry in ended(budget, usage=Usage(5, 11))] == [True, False, False]
    assert [entry.kept for entry in ended(budget, usage=Usage(5, 21))] == [True, True, True]


def test_an_answer_that_is_no_stream_has_no_first_token_to_judge() -> None:
    whole = {"first_token_at_s": None, "generated_tokens": 21, "facts": a_request(budget=Budget(0.5, 0.2, 3.0))}
    assert [entry.budget for entry in ended(Budget(), **whole)] == ["inter_token", "e2e", "all"]
    assert ended(Budget(), **{**whole, "facts": a_request(budget=Budget(0.5))}) == []


@pytest.mark.parametrize("outcome", Outcome)
def test_only_what_the_gateway_owed_is_a_miss(outcome: Outcome) -> None:
    judged = ended(Budget(ttft_s=5.0), outcome=outcome)
    if outcome is Outcome.OK:
        assert [entry.kept for entry in judged] == [True, True]
    elif outcome in (Outcome.CLIENT_CLOSED, Outcome.CLIENT_ERROR, Outcome.REFUSED):
        assert judged == []
    else:
        assert judged == [Judged("all", False)]


def test_a_prediction_is_judged_by_what_came() -> None:
    predicted = Prediction(sent_at_s=10.0, ttft_p99_s=1.0, e2e_p99_s=5.0, first_at_s=11.0)
    assert within(predicted, None, 15.0) == [("ttft", True), ("e2e", True)]
    assert within(predicted, None, 15.1) == [("ttft", True), ("e2e", False)]
    assert within(predicted._replace(first_at_s=11.1), FailureCause.TRUNCATED, 12.0) == [("ttft", False)]
    unheard = predicted._replace(first_at_s=None)
    assert within(unheard, FailureCause.FIRST_TOKEN_TIMEOUT, 40.0) == [("ttft", False)]
    assert within(unheard, FailureCause.CONNECT, 10.0) == []
    assert within(unheard, None, 14.0) == [("e2e", True)]  # no stream
    assert within(Prediction(10.0, None, None, 11.0), None, 15.0) == []
