"""What `headrace bench policies` is about to do: promises, rate, arrivals, texts, turns, fleet files."""

import json
from collections import Counter
from dataclasses import asdict
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.catalog.spec import BackendSpec, Coefficients
from loadtest.live.classes import (
    NoCoefficients,
    capacity_per_s,
    measured_coefficients,
    p90_tokens,
    shapes,
    with_promises,
)
from loadtest.live.fleet import Fleet, Probe
from loadtest.live.gateways import gateway_document
from loadtest.live.prompts import BYTES_PER_TOKEN, MARK_DIGITS, mark, prompt_body
from loadtest.live.schedule import drain_s, lay_out, order, parse_schedule, schedule_file
from loadtest.measured import unloaded_inter_token_s, unloaded_ttft_s
from router.config.fleet_file import FleetConfig

MODEL = "smollm2"


def engine(times: float, version: str = "made up") -> Coefficients:
    """One that takes `times` as long as the fastest."""
    return Coefficients(version, "made up", prefill_base_ms=10 * times, prefill_ms_per_token=2 * times,
                        prefill_ms_per_pair=0.0, decode_base_ms=8 * times, decode_ms_per_seq=1 * times,
                        decode_ms_per_seq_token=0.001 * times)


ENGINES = {"fast": engine(1), "middle": engine(2), "slow": engine(5)}
CLASSES = with_promises(shapes(1.0), ENGINES)
BY_NAME = {each.name: each for each in CLASSES}


def backend(name: str, coefficients: Coefficients | None, **more: object) -> BackendSpec:
    return BackendSpec(name, f"http://127.0.0.1/{name}", "llamacpp", MODEL, MODEL, "cpu", coefficients=coefficients,
                       **more)  # type: ignore[arg-type]


# --- promises and rate


def test_the_fastest_keeps_the_tight_class_threefold_and_the_slowest_never() -> None:
    tight = BY_NAME["tight"]
    long_prompt = p90_tokens(tight.prompts)
    assert tight.ttft_s == pytest.approx(3 * unloaded_ttft_s(ENGINES["fast"], long_prompt), rel=0.01)
    assert tight.inter_token_s == pytest.approx(
        3 * unloaded_inter_token_s(ENGINES["fast"], long_prompt + 8), rel=0.01)
    assert unloaded_ttft_s(ENGINES["slow"], long_prompt) > tight.ttft_s


def test_where_the_slowest_is_near_it_is_still_shut_out_at_the_price_of_headroom() -> None:
    cards = {"fast": engine(1), "slow": engine(3)}
    tight = with_promises(shapes(1.0), cards)[0]
    assert tight.ttft_s == pytest.approx(0.8 * unloaded_ttft_s(cards["slow"], p90_tokens(tight.prompts)), rel=0.01)


def test_every_engine_keeps_the_loose_class() -> None:
    loose = BY_NAME["loose"]
    for card in ENGINES.values():
        assert 6 * unloaded_ttft_s(card, p90_tokens(loose.prompts)) <= loose.ttft_s * 1.01
        assert unloaded_inter_token_s(card, 400) < loose.inter_token_s


def test_among_near_equals_the_fastest_keeps_half_as_much_time_again() -> None:
    """Then no promise shuts the slowest out, but one that shut out all would tell even less."""
    cards = {"fast": engine(1), "twin": engine(1.1)}
    tight = with_promises(shapes(1.0), cards)[0]
    assert tight.ttft_s == pytest.approx(1.5 * unloaded_ttft_s(cards["fast"], p90_tokens(tight.prompts)), rel=0.01)


@given(st.lists(st.floats(0.2, 50), min_size=1, max_size=6), st.floats(0.5, 20))
def test_promises_scale_with_the_engines(times: list[float], faster: float) -> None:
    cards = {str(number): engine(each) for number, each in enumerate(times)}
    quicker = {str(number): engine(each / faster) for number, each in enumerate(times)}
    for usual, quick in zip(with_promises(shapes(1.0), cards), with_promises(shapes(1.0), quicker), strict=True):
        assert quick.ttft_s * faster == pytest.approx(usual.ttft_s, rel=0.02)
        assert quick.inter_token_s * faster == pytest.approx(usual.inter_token_s, rel=0.02)


def test_longer_requests_are_promised_more_time() -> None:
    assert all(long.ttft_s > usual.ttft_s for usual, long in zip(
        CLASSES, with_promises(shapes(4.0), ENGINES), strict=True))


def test_engines_that_share_processors_carry_less() -> None:
    alone = [backend("a", engine(1), slots=4), backend("b", engine(2), slots=4)]
    sharing = [backend("a", engine(1), slots=4, labels={"threads": "2"}),
               backend("b", engine(2), slots=4, labels={"threads": "2"})]
    whole = capacity_per_s(alone, CLASSES, processors=2)
    assert capacity_per_s(sharing, CLASSES, processors=2) == pytest.approx(whole / 2)
    assert capacity_per_s(sharing, CLASSES, processors=16) == pytest.approx(whole)
    assert whole == pytest.approx(1.5 * capacity_per_s(alone[:1], CLASSES, processors=2))


def test_an_engine_of_which_nothing_was_measured_is_named() -> None:
    with pytest.raises(NoCoefficients, match=r"no coefficients of b: .*headrace up"):
        measured_coefficients([backend("a", engine(1)), backend("b", None)])


def test_a_probe_far_from_its_coefficients_is_seen() -> None:
    assert not Probe(0.8, 1.3).is_far_off
    assert Probe(0.4, 1.0).is_far_off
    assert Probe(1.0, 1.7).is_far_off


# --- arrivals, texts, turns


def test_a_block_is_the_same_from_the_same_seed_and_no_other_is() -> None:
    block = lay_out(3, CLASSES, 5.0, 20.0, seed=7)
    assert block == lay_out(3, CLASSES, 5.0, 20.0, seed=7)
    assert block.arrivals != lay_out(4, CLASSES, 5.0, 20.0, seed=7).arrivals
    assert block.arrivals != lay_out(3, CLASSES, 5.0, 20.0, seed=8).arrivals
    assert all(0 <= arrival.at_s < 20.0 for arrival in block.arrivals)
    assert [arrival.at_s for arrival in block.arrivals] == sorted(arrival.at_s for arrival in block.arrivals)


def test_arrivals_come_at_the_rate_with_the_shares_and_sizes_of_the_classes() -> None:
    arrivals = [arrival for number in range(60) for arrival in lay_out(number, CLASSES, 4.0, 30.0, seed=1).arrivals]
    assert len(arrivals) == pytest.approx(60 * 30 * 4, rel=0.08)
    counts = Counter(arrival.latency_class for arrival in arrivals)
    for each in CLASSES:
        assert counts[each.name] / len(arrivals) == pytest.approx(each.share, abs=0.03)
        of_class = sorted(arrival.prompt_tokens for arrival in arrivals if arrival.latency_class == each.name)
        assert of_class[len(of_class) // 2] == pytest.approx(each.prompts.median_tokens, rel=0.1)
        assert of_class[-1] <= each.prompts.cap_tokens


def test_arrivals_are_burstier_than_poisson() -> None:
    counts = []
    for number in range(80):
        block = lay_out(number, CLASSES, 6.0, 24.0, seed=2)
        for start in range(0, 24, 3):
            counts.append(sum(start <= arrival.at_s < start + 3 for arrival in block.arrivals))  # noqa: PERF401
    mean = sum(counts) / len(counts)
    variance = sum((count - mean) ** 2 for count in counts) / len(counts)
    assert variance > 1.3 * mean


def test_a_block_has_an_arrival_even_where_hardly_any_comes() -> None:
    assert all(lay_out(number, CLASSES, 0.01, 5.0, seed=1).arrivals for number in range(20))


def test_policies_get_the_same_requests_but_for_a_mark_that_no_other_visit_has() -> None:
    block = lay_out(1, CLASSES, 8.0, 20.0, seed=1)
    sent = {policy: parse_schedule(schedule_file(block, policy, 1, MODEL)) for policy in ("headrace", "p2c")}
    marks: list[str] = []
    for model, asks in sent.values():
        assert model == MODEL
        assert tuple(arrival for arrival, _ in asks) == block.arrivals
        for (_, prompt), body in zip(asks, block.bodies, strict=True):
            assert prompt[MARK_DIGITS:] == f" {body}"
            assert prompt[:MARK_DIGITS].isdecimal()
            marks.append(prompt[:MARK_DIGITS])
    assert len(set(marks)) > 0.99 * len(marks)


@given(st.integers(1, 2000), st.integers(0, 2**32))
def test_prompts_are_as_long_as_asked_and_mostly_text(tokens: int, seed: int) -> None:
    body = prompt_body(tokens, Random(seed))
    size = len(body.encode())
    assert size <= max(tokens * BYTES_PER_TOKEN + 4, 80)
    assert size >= tokens * BYTES_PER_TOKEN - 8
    assert "\ufffd" not in body
    assert len(mark(Random(seed))) == MARK_DIGITS


def test_texts_are_of_many_kinds() -> None:
    bodies = [prompt_body(150, Random(seed)) for seed in range(60)]
    assert len(set(bodies)) > 30
    assert any("def settle" in body for body in bodies)
    assert any("茶" in body for body in bodies)


def test_everybody_is_first_once_in_as_many_rounds_and_nobody_is_left_out() -> None:
    policies = ("a", "b", "c")
    turns = [order(policies, number) for number in range(1, 4)]
    assert turns == [("b", "c", "a"), ("c", "a", "b"), ("a", "b", "c")]


def test_the_drain_outlasts_every_deadline() -> None:
    block = lay_out(1, CLASSES, 8.0, 20.0, seed=1)
    last_s = max(BY_NAME[arrival.latency_class or ""].deadline_s(arrival.max_tokens) for arrival in block.arrivals)
    assert drain_s(block, BY_NAME) >= max(10.0, 1.5 * last_s)


# --- the fleet files of the gateways


FLEET = Fleet(MODEL, (), {
    "version": 1, "listen": {"host": "0.0.0.0", "port": 8080}, "models": [{"name": MODEL}],
    "auth": {"api_keys_env": ["SECRET"]}, "state": {"path": "state.json"}, "decision_log": {"path": "d.jsonl"},
    "latency_classes": [{"name": "old"}], "default_latency_class": "old", "policy": {"name": "p2c"},
    "backends": [{"name": "a", "url": "http://127.0.0.1:1", "engine": "llamacpp", "model": MODEL,
                  "card": {"type": "cpu"}, "price_per_hour": 0.5}],
}, started_here=False)


def test_gateways_differ_in_their_policy_alone() -> None:
    ours = gateway_document(FLEET, CLASSES, "headrace", None)
    theirs = gateway_document(FLEET, CLASSES, "round_robin", None)
    assert {name for name in ours if ours[name] != theirs[name]} == {"policy"}
    assert theirs["policy"]["name"] == "round_robin"


def test_a_gateways_file_is_valid_and_carries_prices_promises_and_no_past() -> None:
    document = json.loads(json.dumps(gateway_document(FLEET, CLASSES, "cheapest_feasible:margin=1.5", "log.jsonl")))
    config = FleetConfig.model_validate(document)
    assert config.backends[0].price_per_hour == 0.5
    assert config.policy.settings == {"margin": 1.5}
    assert (config.listen.host, config.listen.port, config.admin.port) == ("127.0.0.1", 0, 0)
    assert not config.auth.api_keys_env
    assert config.state.path is None
    assert config.decision_log.path == "log.jsonl"
    for each in CLASSES:
        promised = asdict(config.budget_of(each.name))
        assert (promised["ttft_s"], promised["inter_token_s"]) == (each.ttft_s, each.inter_token_s)
    assert config.default_latency_class == "tight"
