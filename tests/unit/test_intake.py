"""What a request's bytes become: facts for routing, a body for the engine, or an error that says what is wrong."""

import json
from time import perf_counter
from typing import Any

import pytest

from policies.facts import Budget
from router.request.intake import (
    DEFAULT_OUTPUT_TOKENS,
    Endpoint,
    InferenceRequest,
    LatencyClass,
    PhaseTimeouts,
    Vocabulary,
    read_request,
    request_id_of,
)
from router.request.prompt_ratios import PromptRatios
from router.wire.errors import ApiError

CHAT = Endpoint.CHAT_COMPLETIONS
TIMEOUTS = PhaseTimeouts(connect_s=2, first_token_s=30, inter_token_s=15, total_s=600)
VOCABULARY = Vocabulary(
    models={"chat-large": "chat-large", "chat": "chat-large", "a": "a"},
    latency_classes={
        "interactive": LatencyClass("interactive", Budget(ttft_s=1.0), TIMEOUTS),
        "batch": LatencyClass("batch", Budget(), TIMEOUTS),
    },
    default_latency_class="interactive",
)
HEADERS = {b"content-type": b"application/json; charset=utf-8"}


def read(
    body: bytes | dict[str, Any], endpoint: Endpoint = CHAT, headers: dict[bytes, bytes] | None = None
) -> InferenceRequest:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return read_request(endpoint, "r1", {**HEADERS, **(headers or {})}, raw, VOCABULARY, PromptRatios())


def chat(**members: Any) -> dict[str, Any]:
    return {"model": "chat", "messages": [{"role": "user", "content": "hi"}], **members}


def refusal(body: bytes | dict[str, Any], **options: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read(body, **options)
    document = json.loads(caught.value.body())
    assert set(document) == {"error"}
    assert set(document["error"]) == {"message", "type", "param", "code"}
    assert len(caught.value.body()) < 600  # however large the body was that it speaks of
    return caught.value


# --- the body for the engine ----------------------------------------------------------------------------------------

# Every member of the chat schema, vLLM's own, an invented one; spellings that a parse and dump would lose.
EVERYTHING = rb"""
 { "model" : "chat",
   "messages":[{"role":"user","content":"caf\u00e9 \/ \ud83d\ude42 "}, {"role":"tool","tool_call_id":"x","content":[]}],
   "audio":null,"frequency_penalty":0.0,"function_call":"auto","functions":[],"logit_bias":{"50256":-1E+2},
   "logprobs":true,"max_completion_tokens":null,"max_tokens":null,"metadata":{"k":"v"},"modalities":["text"],
   "n":2,"parallel_tool_calls":false,"prediction":{},"presence_penalty":-0,"prompt_cache_key":"k",
   "reasoning_effort":"low","response_format":{"type":"json_object"},"seed":9223372036854775807,"service_tier":"auto",
   "stop":["\n\n"],"store":false,"temperature":1e-7,"tool_choice":"none","tools":[],"top_logprobs":1,"top_p":1.00,
   "user":"u","web_search_options":{},"top_k":-1,"min_p":0.05,"repetition_penalty":1.10,"ignore_eos":true,
   "guided_json":{"type":"object"},"chat_template_kwargs":{"enable_thinking":false},"priority":0,
   "made_up":{"a":[1.0,1.00,1e999,12345678901234567890123]} }
 """


def test_p20_every_member_reaches_the_engine_as_it_was_spelled() -> None:
    request = read(EVERYTHING)
    assert request.body_for("chat") == EVERYTHING
    assert request.body_for("qwen-awq") == EVERYTHING.replace(b'"chat"', b'"qwen-awq"')
    assert request.choices == 2


def test_p20_a_stream_gains_usage_at_the_end_and_changes_nowhere_else() -> None:
    body = EVERYTHING.replace(b'"made_up"', b'"stream":true,"made_up"')
    out = read(body).body_for("qwen-awq")
    edited = body.replace(b'"chat"', b'"qwen-awq"')
    close = edited.rindex(b"}")
    assert out == edited[:close] + b',"stream_options":{"include_usage":true}' + edited[close:]


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        (b"null", b'{"include_usage":true}'),
        (b"{}", b'{"include_usage":true}'),
        (b'{"include_usage":false}', b'{"include_usage":true}'),
        (b'{ "include_usage" : null }', b'{ "include_usage" : true }'),
        (b'{"x":1.00,"y":{"z":[]}}', b'{"x":1.00,"y":{"z":[]},"include_usage":true}'),
    ],
)
def test_usage_is_asked_for_in_the_options_that_stand(given: bytes, sent: bytes) -> None:
    body = b'{"model":"chat","messages":[],"stream_options":%s,"stream":true}'
    request = read(body % given)
    assert not request.usage_asked
    assert request.body_for("chat") == body % sent


@pytest.mark.parametrize("value", [b"true", b'"yes"', b"1"])
def test_a_client_that_speaks_of_usage_itself_keeps_its_word(value: bytes) -> None:
    body = b'{"model":"chat","messages":[],"stream_options":{"include_usage":%s},"stream":true}' % value
    request = read(body)
    assert request.usage_asked
    assert request.body_for("chat") == body


@pytest.mark.parametrize(
    ("endpoint", "members"),
    [
        (CHAT, {"messages": []}),
        (CHAT, {"messages": [], "stream": False}),
        (CHAT, {"messages": [], "stream": None}),
        (Endpoint.EMBEDDINGS, {"input": "x", "stream": True}),
    ],
)
def test_usage_is_not_asked_for_where_no_stream_is(endpoint: Endpoint, members: dict[str, Any]) -> None:
    body = json.dumps({"model": "chat", **members}).encode()
    request = read(body, endpoint)
    assert not request.facts.stream
    assert request.body_for("chat") == body


@pytest.mark.parametrize("served", ["a", "a/very-long:name@of+some.model", "chat"])
def test_p18_the_engines_name_may_be_shorter_or_longer(served: str) -> None:
    body = json.dumps(chat()).encode()
    assert read(body).body_for(served) == body.replace(b'"chat"', json.dumps(served).encode())


def test_a_name_that_is_escaped_is_understood() -> None:
    request = read(rb'{"\u006dodel":"ch\u0061t","messages":[]}')
    assert (request.facts.model, request.client_model) == ("chat-large", "chat")
    assert request.body_for("qwen") == rb'{"\u006dodel":"qwen","messages":[]}'


# --- the facts ------------------------------------------------------------------------------------------------------


def test_facts_of_a_request() -> None:
    request = read(chat(stream=True, max_tokens=5), headers={b"x-headrace-class": b"batch"})
    facts = request.facts
    assert (facts.model, facts.stream, facts.latency_class, facts.budget) == ("chat-large", True, "batch", Budget())
    assert (facts.max_output_tokens, facts.expected_output_tokens) == (5, 5)
    assert facts.prompt_tokens == round(0.26 * len(json.dumps(chat()["messages"])))


def test_prompt_sizes_are_the_models_own() -> None:
    ratios = PromptRatios()
    body = json.dumps({**chat(), "messages": [{"role": "user", "content": "word " * 400}]}).encode()
    first = read_request(CHAT, "r1", HEADERS, body, VOCABULARY, ratios)
    for _ in range(200):
        ratios.observe("chat-large", None, first.prompt_size, 2 * first.facts.prompt_tokens)
    again = read_request(CHAT, "r1", HEADERS, body, VOCABULARY, ratios)
    assert again.facts.prompt_tokens == pytest.approx(2 * first.facts.prompt_tokens, rel=0.05)
    other = read_request(CHAT, "r1", HEADERS, body.replace(b'"chat"', b'"a"'), VOCABULARY, ratios)
    assert other.facts.prompt_tokens == first.facts.prompt_tokens


@pytest.mark.parametrize(
    ("members", "limit", "expected"),
    [
        ({}, None, DEFAULT_OUTPUT_TOKENS),
        ({"max_tokens": None}, None, DEFAULT_OUTPUT_TOKENS),
        ({"max_tokens": 0}, 0, 0),
        ({"max_tokens": 100_000}, 100_000, DEFAULT_OUTPUT_TOKENS),
        ({"max_tokens": 10**400}, 2**53, DEFAULT_OUTPUT_TOKENS),
        ({"max_tokens": 9, "max_completion_tokens": 7}, 7, 7),
        ({"max_tokens": 9, "max_completion_tokens": None}, 9, 9),
    ],
)
def test_output_limits(members: dict[str, Any], limit: int | None, expected: int) -> None:
    facts = read(chat(**members)).facts
    assert (facts.max_output_tokens, facts.expected_output_tokens) == (limit, expected)


def test_the_class_is_the_default_unless_asked_for() -> None:
    assert read(chat()).facts.latency_class == "interactive"
    error = refusal(chat(), headers={b"x-headrace-class": b"\xff\x1b[31m"})
    assert (error.status, error.code) == (400, "unknown_latency_class")
    assert "interactive, batch" in error.message


# --- refusals -------------------------------------------------------------------------------------------------------

PARSER_EDGES = {
    "deep": b"[" * 100_000,
    "deep_inside": b'{"model":"chat","messages":' + b"[" * 100_000,
    "deep_and_closed": b'{"model":"chat","messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep_options": b'{"model":"chat","messages":[],"stream_options":{"a":' + b"[" * 5000 + b"]" * 5000 + b"}}",
    "nan": b'{"model":"chat","messages":[],"temperature":NaN}',
    "infinity": b'{"model":"chat","messages":[],"temperature":-Infinity}',
    "utf16": json.dumps(chat()).encode("utf-16-le"),
    "utf16_bom": json.dumps(chat()).encode("utf-16"),
    "bom": b"\xef\xbb\xbf" + json.dumps(chat()).encode(),
    "invalid_utf8": b'{"model":"chat","messages":["\xff"]}',
    "overlong_utf8": b'{"model":"chat","messages":["\xc0\xaf"]}',
    "surrogate_utf8": b'{"model":"chat","messages":["\xed\xa0\x80"]}',
    "trailing_brace": json.dumps(chat()).encode() + b"}",
    "two_objects": json.dumps(chat()).encode() * 2,
    "trailing_comma": b'{"model":"chat","messages":[],}',
    "list": b"[]",
    "string": b'"model"',
    "number": b"1",
    "null": b"null",
    "empty": b"",
    "white": b" \n",
    "cut": json.dumps(chat()).encode()[:-4],
    "raw_newline": b'{"model":"chat","messages":["a\nb"]}',
    "raw_nul": b'{"model":"chat\x00","messages":[]}',
    "single_quotes": b"{'model':'chat'}",
    "comment": b'{"model":"chat",/* x */"messages":[]}',
    "hex": b'{"model":"chat","messages":[0x10]}',
    "leading_zero": b'{"model":"chat","messages":[010]}',
    "form": b"model=chat&messages=hi",
}


@pytest.mark.parametrize("name", PARSER_EDGES)
def test_p22_what_is_no_json_object_is_a_400(name: str) -> None:
    error = refusal(PARSER_EDGES[name])
    assert (error.status, error.code) == (400, "invalid_json")


@pytest.mark.parametrize(("body", "words"), [
    (b"", "The body is empty."), (b" \n", "The body is empty."), (b'{"model":', "The body is not JSON: ")])
def test_no_body_at_all_is_said_to_be_none(body: bytes, words: str) -> None:
    assert refusal(body).message.startswith(words)


@pytest.mark.parametrize("number", [b"9" * 5000, b"-" + b"9" * 5000, b"1e999", b"0." + b"0" * 5000 + b"1"])
def test_p22_numbers_of_any_size_pass_where_nothing_reads_them(number: bytes) -> None:
    body = b'{"model":"chat","messages":[],"seed":%s,"n":%s}' % (number, number)
    request = read(body)
    assert request.body_for("chat") == body
    assert request.choices == 1
    assert refusal(b'{"model":"chat","messages":[],"max_tokens":%s}' % number).param == "max_tokens"


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"chat","messages":[' + b"[]," * 4_000_000 + b"[]]}",
        b'{"model":"chat","messages":[],"stream_options":{"a":[' + b"[]," * 4_000_000 + b"[]]}}",
        b'{"model":"chat","messages":[],"x":{' + b",".join(b'"%d":0' % n for n in range(1_000_000)) + b"}}",
    ],
    ids=["messages", "stream_options", "inner_members"],
)
@pytest.mark.real_time
def test_p22_twelve_megabytes_of_structure_do_not_hold_the_loop(body: bytes) -> None:
    began = perf_counter()
    json.loads(body)
    parsed_s = perf_counter() - began
    best_s = float("inf")
    for _ in range(3):
        began = perf_counter()
        request = read(body)
        best_s = min(best_s, perf_counter() - began)
    assert request.facts.prompt_tokens >= 1
    assert best_s < parsed_s / 4  # no value is built that routing does not need


def test_p22_a_body_of_members_alone_is_refused() -> None:
    members = b",".join(b'"k%d":0' % number for number in range(5000))
    assert refusal(b'{"model":"chat","messages":[],' + members + b"}").status == 400
    assert refusal(b'{"model":"chat","messages":[],"stream_options":{' + members + b"}}").status == 400


@pytest.mark.parametrize(
    ("body", "key"),
    [
        (b'{"model":"chat","model":"a","messages":[]}', "model"),
        (b'{"model":"a","model":"chat","messages":[]}', "model"),
        (b'{"model":"chat","messages":[],"model":"chat"}', "model"),
        (rb'{"model":"chat","\u006dodel":"a","messages":[]}', "model"),
        (b'{"model":"chat","messages":[],"stream":true,"stream":false}', "stream"),
        (b'{"model":"chat","messages":[],"max_tokens":1,"max_tokens":9}', "max_tokens"),
        (b'{"model":"chat","messages":[],"x":1,"x":1}', "x"),
        (b'{"model":"chat","messages":[],"messages":[1]}', "messages"),
        (b'{"model":"chat","messages":[],"stream_options":{"include_usage":true,"include_usage":false}}',
         "include_usage"),
        (b'{"model":"chat","messages":[],"' + b"k" * 100_000 + b'":1,"' + b"k" * 100_000 + b'":1}', "k" * 64),
    ],
)  # fmt: skip
def test_p23_a_key_that_stands_twice_is_a_400(body: bytes, key: str) -> None:
    error = refusal(body)
    assert (error.status, error.param) == (400, key)


@pytest.mark.parametrize(
    "body",
    [
        rb'{"model":"chat","messages":[{"role":"user","content":"\ud83d"}]}',
        rb'{"model":"chat","messages":[],"\ud83d":1}',
        rb'{"model":"\ud83d","messages":[]}',
        rb'{"model":"\udc00\ud800","messages":[]}',
        b'{"model":"chat\\u0000","messages":[]}',
        b'{"model":"chat\\r\\nx: y","messages":[]}',
    ],
)
def test_p21_half_a_surrogate_and_nul_are_passed_on_or_refused(body: bytes) -> None:
    try:
        request = read(body)
    except ApiError as refused:
        error = refused
    else:
        assert request.body_for("chat") == body
        return
    assert error.status in (400, 404)
    assert error.body().decode().isprintable()


@pytest.mark.parametrize(
    ("members", "param"),
    [
        ({"model": 5}, "model"),
        ({"model": None}, "model"),
        ({"model": ["chat"]}, "model"),
        ({"stream": "true"}, "stream"),
        ({"stream": 1}, "stream"),
        ({"stream_options": []}, "stream_options"),
        ({"stream_options": "x"}, "stream_options"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_completion_tokens": True}, "max_completion_tokens"),
    ],
)
def test_members_that_routing_reads_must_be_of_their_kind(members: dict[str, Any], param: str) -> None:
    error = refusal(chat(**members))
    assert (error.status, error.param) == (400, param)


@pytest.mark.parametrize(
    ("endpoint", "param"),
    [(CHAT, "messages"), (Endpoint.COMPLETIONS, "prompt"), (Endpoint.EMBEDDINGS, "input")],
)
def test_the_prompt_must_be_there(endpoint: Endpoint, param: str) -> None:
    assert refusal({"model": "chat"}, endpoint=endpoint).param == param
    assert read({"model": "chat", param: "x"}, endpoint).facts.prompt_tokens == 1


@pytest.mark.parametrize(
    "name", ["", "CHAT", "chat ", "x#", "a/../../admin", "@evil", "?api_base=x", "m" * 100_000, "é\x1b[31m"]
)
def test_p53_an_unknown_model_is_a_404_that_names_the_known_ones(name: str) -> None:
    error = refusal(chat(model=name))
    assert (error.status, error.code, error.param) == (404, "model_not_found", "model")
    assert error.message.endswith("Known models: a, chat-large.")
    assert error.message.isprintable()


@pytest.mark.parametrize(
    "headers",
    [
        {b"content-type": b"text/plain"},
        {b"content-type": b"application/x-www-form-urlencoded"},
        {b"content-type": b"multipart/form-data; boundary=x"},
        {b"content-type": b""},
        {b"content-encoding": b"gzip"},
        {b"content-encoding": b"identity, br"},
    ],
)
def test_p19_other_media_types_are_a_415(headers: dict[bytes, bytes]) -> None:
    assert refusal(chat(), headers=headers).status == 415


@pytest.mark.parametrize("media_type", [b"application/json", b"Application/JSON;charset=UTF-8", b" application/json "])
def test_json_is_read_however_it_is_announced(media_type: bytes) -> None:
    assert read(chat(), headers={b"content-type": media_type}).facts.model == "chat-large"


# --- request ids ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [b"a", b"A-b_c.9", b"x" * 64])
def test_p56_a_harmless_request_id_is_kept(given: bytes) -> None:
    assert request_id_of({b"x-request-id": given}) == given.decode()


@pytest.mark.parametrize(
    "given",
    [b"", b"a\nb", b"a\r\nb: c", b"a%0ab c", b"\x1b[31m", b"x" * 65, b"x" * 10_240, "ünïcode".encode(), b"a b", b"a\n"],
)
def test_p56_any_other_request_id_is_replaced(given: bytes) -> None:
    fresh = request_id_of({b"x-request-id": given})
    assert len(fresh) == 24
    assert int(fresh, 16) >= 0
    assert fresh != request_id_of({b"x-request-id": given})
