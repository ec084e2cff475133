"""Request bytes → what routing needs to know, or a 400 that says what is wrong.

Only the members that routing or relaying depends on are looked at; everything else, known or not, is the engine's
business and reaches it as the client spelled it.
"""

import itertools
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

import msgspec

from policies.facts import Budget, RequestFacts
from router.request.prompt_ratios import PromptRatios
from router.request.prompt_size import PromptSize, measure_prompt
from router.request.wishes import class_asked, wishes_of
from router.wire.errors import ApiError, bad_request, model_not_found, unsupported_media_type
from router.wire.json_spans import (
    MAX_MEMBERS,
    DuplicateKeyError,
    JsonObject,
    TooManyMembersError,
    lone_surrogate,
    parse_object,
)

DEFAULT_OUTPUT_TOKENS = 128
MAX_TOKENS = 2**53
"""Larger wishes count as this: integers of JSON have no bound, doubles do."""
T = TypeVar("T")
# Ids have to differ, not to be secret: a number under a prefix of this process is forty times cheaper than dice.
_ID_PREFIX = secrets.token_hex(8)
_ID_NUMBERS = itertools.count(1)
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")


class Endpoint(StrEnum):
    """The inference routes."""

    CHAT_COMPLETIONS = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    EMBEDDINGS = "/v1/embeddings"


_NOT_ASKED = (b"false", b"null")
# Made once: to decode by a type costs more than to decode.
_MEMBER_DECODERS: Mapping[type, msgspec.json.Decoder[Any]] = {
    kind: msgspec.json.Decoder(kind | None) for kind in (str, bool, int)
}
_NO_OPTIONS = parse_object(b"{}")
PROMPT_MEMBER = {
    Endpoint.CHAT_COMPLETIONS: "messages",
    Endpoint.COMPLETIONS: "prompt",
    Endpoint.EMBEDDINGS: "input",
}


@dataclass(frozen=True, slots=True)
class PhaseTimeouts:
    """How long each phase of a request may take, in seconds. Bounds on what is broken, not promises: see `Budget`."""

    connect_s: float
    first_token_s: float
    inter_token_s: float
    total_s: float
    heartbeat_s: float | None = None


@dataclass(frozen=True, slots=True)
class LatencyClass:
    """A named P99 promise."""

    name: str
    budget: Budget
    timeouts: PhaseTimeouts
    priority: int = 0
    sheddable: bool = False


def class_timeouts(latency_class: LatencyClass, budget: Budget) -> PhaseTimeouts:
    """The class's own, whatever budget a request brings."""
    return latency_class.timeouts


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What requests may name. Built from one configuration, swapped with it."""

    models: Mapping[str, str]
    """Name that clients may use → the fleet's model name; every model maps to itself."""
    latency_classes: Mapping[str, LatencyClass]
    default_latency_class: str
    timeouts_for: Callable[[LatencyClass, Budget], PhaseTimeouts] = class_timeouts
    """Timeouts of a request that brings a budget of its own to its class."""


class InferenceRequest(msgspec.Struct, frozen=True):
    """One accepted request."""

    endpoint: Endpoint
    request_id: str
    facts: RequestFacts
    client_model: str
    """The name the client used; it comes back in every chunk."""
    prompt_size: PromptSize
    """What `PromptRatios.observe` learns from."""
    usage_asked: bool
    """The client itself asked for the usage chunk of a stream."""
    choices: int
    """Answers asked for (`n`): a stream is whole once each has its `finish_reason`."""
    json: JsonObject
    stream_options: JsonObject | None
    timeouts: PhaseTimeouts
    def body_for(self, served_model_name: str) -> bytes:
        """The body for one backend: the model by the engine's name, and usage always reported on streams.

        Nothing else is touched, down to number spelling and key order.
        """
        edits: dict[str, bytes] = {}
        if served_model_name != self.client_model:
            edits["model"] = msgspec.json.encode(served_model_name)
        if self.facts.stream and not self.usage_asked and self.endpoint is not Endpoint.EMBEDDINGS:
            options = self.stream_options or _NO_OPTIONS
            edits["stream_options"] = options.replace({"include_usage": b"true"})
        return self.json.replace(edits) if edits else self.json.body

    def without_body(self) -> "InferenceRequest":
        """What is still of use once it cannot be sent again."""
        return msgspec.structs.replace(self, json=_NO_OPTIONS, stream_options=None)


def read_request(
    endpoint: Endpoint,
    request_id: str,
    headers: Mapping[bytes, bytes],
    body: bytes,
    vocabulary: Vocabulary,
    ratios: PromptRatios,
    *,
    tenant: str | None = None,
    expect_output: Callable[[RequestFacts], int] | None = None,
) -> InferenceRequest:
    """Read a request.

    Args:
        headers: lower-case names.
        ratios: learned prompt sizes, by model, tenant and script.
        tenant: whom the request is made for.
        expect_output: what is learned of answers' lengths; else `DEFAULT_OUTPUT_TOKENS`, within the client's cap.

    Raises:
        ApiError: 400, 404 (unknown model) or 415.
    """
    _check_media_type(headers)
    request = _parse(body)
    client_model = _member(request, "model", str, "a string")
    if client_model is None:
        raise bad_request("The member 'model' is missing: name the model to use.", param="model")
    model = vocabulary.models.get(client_model)
    if model is None:
        raise model_not_found(client_model, sorted(set(vocabulary.models.values())))
    prompt_member = PROMPT_MEMBER[endpoint]
    prompt = request.values.get(prompt_member)
    if prompt is None:
        raise bad_request(f"The member '{prompt_member}' is missing.", param=prompt_member)
    stream = bool(_member(request, "stream", bool, "true or false")) and endpoint is not Endpoint.EMBEDDINGS
    options = _stream_options(request)
    max_tokens = _max_tokens(request)
    latency_class = _latency_class(headers, vocabulary)
    budget, timeouts = latency_class.budget, latency_class.timeouts
    wishes = wishes_of(headers, request.values, tenant)
    if wishes.has_budget:
        budget = wishes.over(budget)
        timeouts = vocabulary.timeouts_for(latency_class, budget)
    start = request.starts[prompt_member]
    size = measure_prompt(body, start, start + len(prompt), len(request.values.get("tools", b"")))
    prompt_tokens = ratios.tokens(model, tenant, size, prompt)
    facts = RequestFacts(
        model=model,
        prompt_tokens=prompt_tokens,
        max_output_tokens=max_tokens,
        expected_output_tokens=_expected_output(endpoint, max_tokens),
        stream=stream,
        latency_class=latency_class.name,
        budget=budget,
        tenant=tenant,
        session_key=wishes.session_key,
        priority=latency_class.priority,
        sheddable=latency_class.sheddable,
    )
    if expect_output is not None and facts.expected_output_tokens > 0:
        # Nobody has seen these facts yet, and another copy of them costs as much as a price on eight backends.
        object.__setattr__(facts, "expected_output_tokens", expect_output(facts))
    return InferenceRequest(
        endpoint=endpoint,
        request_id=request_id,
        facts=facts,
        client_model=client_model,
        prompt_size=size,
        # A value that is neither true nor false is the engine's to refuse.
        usage_asked=options is not None and bytes(options.values.get("include_usage", b"null")) not in _NOT_ASKED,
        choices=_choices(request),
        json=request,
        stream_options=options,
        timeouts=timeouts,
    )


def request_id_of(headers: Mapping[bytes, bytes]) -> str:
    """The client's `x-request-id` where it is harmless in a log line, else a fresh one."""
    given = headers.get(b"x-request-id")
    if given is not None and _REQUEST_ID.fullmatch(given):
        return given.decode("ascii")
    return f"{_ID_PREFIX}{next(_ID_NUMBERS):08x}"


def _check_media_type(headers: Mapping[bytes, bytes]) -> None:
    if headers.get(b"content-type") == b"application/json" and b"content-encoding" not in headers:
        return
    media_type = headers.get(b"content-type", b"application/json").partition(b";")[0].strip().lower()
    if media_type != b"application/json":
        raise unsupported_media_type("This path reads JSON.")
    if headers.get(b"content-encoding", b"identity").strip().lower() != b"identity":
        raise unsupported_media_type("Compressed request bodies are not read.")


def _parse(body: bytes) -> JsonObject:
    try:
        return parse_object(body)
    except DuplicateKeyError as error:
        key = error.key[:64]
        raise bad_request(f"The key {key!a} stands twice in the body.", param=key) from None
    except TooManyMembersError:
        raise bad_request(f"An object of the body has more than {MAX_MEMBERS} members.") from None
    except msgspec.ValidationError:
        raise bad_request("The body must be a JSON object.", code="invalid_json") from None
    except UnicodeDecodeError as error:
        raise bad_request(f"The body is not UTF-8 (byte {error.start}).", code="invalid_json") from None
    except RecursionError:
        raise bad_request("The body is nested too deeply.", code="invalid_json") from None
    except msgspec.DecodeError as error:
        why = f"is not JSON: {error}" if body.strip() else "is empty"
        if (half := lone_surrogate(body)) is not None:
            why = f"has {half[0]} at byte {half[1]}: half of a surrogate pair, which is no character by itself"
        raise bad_request(f"The body {why}.", code="invalid_json") from None


def _member(request: JsonObject, name: str, kind: type[T], what: str) -> T | None:
    raw = request.values.get(name)
    if raw is None:
        return None
    try:
        return _MEMBER_DECODERS[kind].decode(raw)  # type: ignore[no-any-return]
    except (msgspec.DecodeError, RecursionError):
        raise bad_request(f"The member '{name}' must be {what}.", param=name) from None


def _stream_options(request: JsonObject) -> JsonObject | None:
    raw = request.values.get("stream_options")
    if raw is None or bytes(raw) == b"null":
        return None
    if not bytes(raw).startswith(b"{"):
        raise bad_request("The member 'stream_options' must be an object.", param="stream_options")
    return _parse(bytes(raw))


def _choices(request: JsonObject) -> int:
    raw = request.values.get("n")
    if raw is None:
        return 1
    try:
        return max(1, msgspec.json.decode(raw, type=int))
    except msgspec.DecodeError:
        return 1  # the engine's to refuse


def _max_tokens(request: JsonObject) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        value = _member(request, name, int, "a whole number")
        if value is not None:
            if value < 0:
                raise bad_request(f"The member '{name}' must not be negative.", param=name)
            return min(value, MAX_TOKENS)
    return None


def _expected_output(endpoint: Endpoint, max_tokens: int | None) -> int:
    if endpoint is Endpoint.EMBEDDINGS:
        return 0
    return DEFAULT_OUTPUT_TOKENS if max_tokens is None else min(DEFAULT_OUTPUT_TOKENS, max_tokens)


def class_name(headers: Mapping[bytes, bytes], vocabulary: Vocabulary) -> str:
    """The latency class that a request counts under, by its head alone; the default where it names none that exists."""
    name, _ = class_asked(headers)
    return name if name is not None and name in vocabulary.latency_classes else vocabulary.default_latency_class


def _latency_class(headers: Mapping[bytes, bytes], vocabulary: Vocabulary) -> LatencyClass:
    name, must_exist = class_asked(headers)
    latency_class = None if name is None else vocabulary.latency_classes.get(name)
    if latency_class is not None:
        return latency_class
    if must_exist:
        known = ", ".join(vocabulary.latency_classes)
        raise ApiError(400, "unknown_latency_class", f"x-headrace-class must be one of: {known}.",
                       param="x-headrace-class")
    return vocabulary.latency_classes[vocabulary.default_latency_class]
