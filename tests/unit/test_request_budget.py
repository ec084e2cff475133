"""What a request asks for beyond its class: whose wish counts, which are refused, and what follows from them."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.facts import Budget
from router.config.sections import TimeoutsSection
from router.request.generation import lengthened_timeouts, phase_timeouts
from router.request.intake import Endpoint, InferenceRequest, LatencyClass, PhaseTimeouts, Vocabulary, read_request
from router.request.prompt_ratios import PromptRatios
from router.wire.errors import ApiError

TIMEOUTS = TimeoutsSection()


def of_class(name: str, budget: Budget, priority: int = 0, *, sheddable: bool = False) -> LatencyClass:
    return LatencyClass(name, budget, phase_timeouts(TIMEOUTS, budget), priority, sheddable)


INTERACTIVE = Budget(ttft_s=1.0, inter_token_s=0.05, e2e_s=30.0)
VOCABULARY = Vocabulary(
    models={"m": "m"},
    latency_classes={
        "interactive": of_class("interactive", INTERACTIVE, priority=10),
        "batch": of_class("batch", Budget(), priority=-5, sheddable=True),
    },
    default_latency_class="interactive",
    timeouts_for=lambda latency_class, budget: lengthened_timeouts(TIMEOUTS, latency_class, budget),
)


def read(
    headers: dict[str, str] | None = None, *, tenant: str | None = None, body: bytes | None = None, **members: Any
) -> InferenceRequest:
    raw_headers = {name.encode(): value.encode("latin-1") for name, value in (headers or {}).items()}
    body = body or json.dumps({"model": "m", "messages": [], **members}).encode()
    return read_request(Endpoint.CHAT_COMPLETIONS, "r", raw_headers, body, VOCABULARY, PromptRatios(), tenant=tenant)


def refusal(headers: dict[str, str] | None = None, **members: Any) -> dict[str, Any]:
    with pytest.raises(ApiError) as caught:
        read(headers, **members)
    assert caught.value.status == 400
    error = json.loads(caught.value.body())["error"]
    assert error["type"] == "invalid_request_error"
    return dict(error)


# --- budgets --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("headers", "members", "expected"), [
    ({}, {}, INTERACTIVE),
    ({"x-slo-ttft-ms": "250"}, {}, Budget(0.25, 0.05, 30.0)),
    ({"x-slo-tpot-ms": " 12.5 "}, {}, Budget(1.0, 0.0125, 30.0)),
    ({"x-llm-d-slo-ttft-ms": "300", "x-slo-ttft-ms": "9"}, {}, Budget(0.3, 0.05, 30.0)),
    ({"x-llm-d-slo-tpot-ms": "30", "x-slo-tpot-ms": "9"}, {}, Budget(1.0, 0.03, 30.0)),
    ({}, {"provider": {"preferred_max_latency": 2}}, Budget(2.0, 0.05, 30.0)),
    ({}, {"provider": {"preferred_max_latency": {"p50": 1, "p99": 3.5}}}, Budget(3.5, 0.05, 30.0)),
    ({}, {"provider": {"preferred_max_latency": {"p50": 1, "p90": 2, "p99": None}}}, Budget(2.0, 0.05, 30.0)),
    ({"x-slo-ttft-ms": "250"}, {"provider": {"preferred_max_latency": 2}}, Budget(0.25, 0.05, 30.0)),
    ({"x-headrace-class": "batch", "x-slo-ttft-ms": "86400000"}, {}, Budget(86_400.0, None, None)),
    ({}, {"provider": {"order": ["a"], "preferred_max_latency": None}}, INTERACTIVE),
    ({}, {"provider": {"preferred_max_latency": {}}}, INTERACTIVE),
    ({}, {"provider": "somebody else's"}, INTERACTIVE),
    ({}, {"provider": None}, INTERACTIVE),
])  # fmt: skip
def test_each_wish_overrides_its_own_member(
    headers: dict[str, str], members: dict[str, Any], expected: Budget
) -> None:
    request = read(headers, **members)
    assert request.facts.budget == expected
    assert request.facts.latency_class == headers.get("x-headrace-class", "interactive")


@pytest.mark.parametrize("header", ["x-slo-ttft-ms", "x-slo-tpot-ms", "x-llm-d-slo-ttft-ms", "x-llm-d-slo-tpot-ms"])
@pytest.mark.parametrize("value", ["", "0", "0.0", "-5", "1e3", "NaN", "inf", "abc", "86400001", "9" * 400, "5 ms",
                                   "٥", "1_000", "+5", "0x10", ".5", "5."])
def test_a_bad_header_is_a_400_that_names_it(header: str, value: str) -> None:
    error = refusal({header: value.encode().decode("latin-1")})
    assert (error["code"], error["param"]) == ("invalid_budget", header)
    assert error["message"] == f"The header '{header}' must be a number of milliseconds above 0 and at most 86400000."


@pytest.mark.parametrize("given", [0, -1, 86_401, True, "2", [], {"p99": 0}, {"p50": -1, "p99": 2}, {"p90": "2"}])
def test_a_bad_preferred_max_latency_is_a_400_that_names_it(given: Any) -> None:
    error = refusal(provider={"preferred_max_latency": given})
    assert (error["code"], error["param"]) == ("invalid_budget", "provider.preferred_max_latency")
    assert "seconds" in error["message"]


@pytest.mark.parametrize("number", [b"1e999", b"9" * 400, b"-0.0", b"[[1]]"])
def test_numbers_that_no_double_holds_are_refused_too(number: bytes) -> None:
    body = b'{"model":"m","messages":[],"provider":{"preferred_max_latency":%s}}' % number
    with pytest.raises(ApiError) as caught:
        read(body=body)
    assert (caught.value.status, caught.value.param) == (400, "provider.preferred_max_latency")


@given(st.dictionaries(st.sampled_from(["x-slo-ttft-ms", "x-llm-d-slo-ttft-ms", "x-slo-tpot-ms"]),
                       st.text(st.characters(max_codepoint=255), max_size=12)))
def test_any_header_gives_a_bounded_budget_or_a_400(headers: dict[str, str]) -> None:
    try:
        budget = read(headers).facts.budget
    except ApiError as refused:
        found = (refused.status, refused.param in headers)
        assert found == (400, True)
    else:
        assert budget.ttft_s is not None
        assert 0 < budget.ttft_s <= 86_400
        assert budget.inter_token_s is not None
        assert 0 < budget.inter_token_s <= 86_400


# --- timeouts -------------------------------------------------------------------------------------------------------


def timeouts(**headers: str) -> PhaseTimeouts:
    return read({f"x-slo-{name}-ms": value for name, value in headers.items()}).timeouts


def test_timeouts_grow_with_a_request_budget_and_never_shrink() -> None:
    own = VOCABULARY.latency_classes["interactive"].timeouts
    assert (own.first_token_s, own.inter_token_s, own.total_s) == (10, 5, 300)
    assert read().timeouts is own
    assert timeouts(ttft="100", tpot="1") == own  # no caller's impatience takes a backend out
    assert timeouts(ttft="4000").first_token_s == 40
    assert timeouts(ttft="86400000").first_token_s == 120  # nor does a caller's patience hold a place for a day
    assert timeouts(tpot="500") == PhaseTimeouts(own.connect_s, 10, 25, 300)


def test_timeouts_of_the_fleet_file_stand_whatever_a_request_wishes() -> None:
    given = TimeoutsSection(first_token_s=3.0, inter_token_s=2.0)
    latency_class = LatencyClass("c", INTERACTIVE, phase_timeouts(given, INTERACTIVE))
    assert lengthened_timeouts(given, latency_class, Budget(60.0, 60.0)) == latency_class.timeouts


def test_without_a_rule_for_it_the_class_timeouts_stand() -> None:
    plain = Vocabulary(VOCABULARY.models, VOCABULARY.latency_classes, "interactive")
    body = b'{"model":"m","messages":[]}'
    request = read_request(Endpoint.CHAT_COMPLETIONS, "r", {b"x-slo-ttft-ms": b"60000"}, body, plain, PromptRatios())
    assert request.timeouts is VOCABULARY.latency_classes["interactive"].timeouts


# --- classes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("headers", "expected"), [
    ({}, "interactive"),
    ({"x-headrace-class": "batch"}, "batch"),
    ({"x-llm-d-inference-objective": "batch"}, "batch"),
    ({"x-gateway-inference-objective": "batch"}, "batch"),
    ({"x-headrace-class": "interactive", "x-llm-d-inference-objective": "batch"}, "interactive"),
    ({"x-llm-d-inference-objective": "interactive", "x-gateway-inference-objective": "batch"}, "interactive"),
    ({"x-llm-d-inference-objective": "premium-traffic"}, "interactive"),
])  # fmt: skip
def test_a_class_may_be_named_as_an_objective(headers: dict[str, str], expected: str) -> None:
    facts = read(headers).facts
    latency_class = VOCABULARY.latency_classes[expected]
    assert facts.latency_class == expected
    assert (facts.priority, facts.sheddable) == (latency_class.priority, latency_class.sheddable)


def test_an_unknown_class_is_still_a_400() -> None:
    assert refusal({"x-headrace-class": "gold"})["param"] == "x-headrace-class"


# --- conversations --------------------------------------------------------------------------------------------------


def key(headers: dict[str, str] | None = None, tenant: str | None = "acme", **members: Any) -> str | None:
    return read(headers, tenant=tenant, **members).facts.session_key


def test_the_most_explicit_name_of_a_conversation_counts() -> None:
    everything: dict[str, Any] = {"session_id": "s", "prompt_cache_key": "p", "user": "u"}
    assert key() is None
    assert key({"x-session-id": "h", "x-session-affinity": "a"}, **everything) == key({"x-session-id": "h"})
    assert key({"x-session-affinity": "a"}, **everything) == key({"x-session-id": "a"})
    assert key(**everything) == key(session_id="s") == key({"x-session-id": "s"})
    del everything["session_id"]
    assert key(**everything) == key(prompt_cache_key="p") == key({"x-session-id": "p"})
    assert key(user="u") == key({"x-session-id": "u"}) != key(user="v")


def test_tenants_do_not_share_conversations() -> None:
    assert len({key(user="u"), key(user="u", tenant="other"), key(user="u", tenant=None)}) == 3


@pytest.mark.parametrize("members", [{"user": None}, {"user": ""}, {"user": 7}, {"user": ["u"]}, {"user": "u" * 257}])
def test_what_is_no_id_is_passed_over(members: dict[str, Any]) -> None:
    assert key(**members) is None
    assert key({"x-session-id": ""}, **members) is None
    assert key({"x-session-id": "h" * 257}, **members) is None


def test_the_id_itself_is_nowhere_to_be_seen() -> None:
    request = read({"x-session-id": "jane.doe@example.org"}, tenant="acme")
    assert request.facts.session_key is not None
    assert len(request.facts.session_key) == 16
    assert "jane" not in repr(request.facts)
    assert request.facts.tenant == "acme"


def test_the_body_goes_on_as_it_came() -> None:
    body = b'{"model":"m", "messages":[], "provider":{"preferred_max_latency":2.50}, "user":"u"}'
    assert read(body=body).body_for("m") == body
