"""vLLM's OpenAI dialect: what a request asks, and the bytes of the answer.

Text stands for itself by size: four bytes of UTF-8 are one token. Generated token number `k` is the text ` tk`
(` t0 t1 t2 …`), so that a client can tell whether one was lost, doubled or swapped.
"""

import zlib
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from struct import pack
from typing import Any, Literal

import msgspec

Endpoint = Literal["chat", "completion"]
BYTES_PER_TOKEN = 4
EMBEDDING_DIMENSIONS = 16
_TOKEN_TEXTS = tuple(b" t%d" % number for number in range(4096))


class ApiError(Exception):
    """A refusal in the shape of vLLM's error bodies."""

    def __init__(self, status: int, kind: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param

    def body(self) -> bytes:
        return msgspec.json.encode(
            {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.status}}
        )


def bad_request(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, "BadRequestError", message, param)


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """What the fake engine reads of a chat or text completion; it ignores the rest."""

    model: str
    prompt: bytes
    """Everything that would be tokenized."""
    prompt_tokens: int
    max_tokens: int | None
    stream: bool
    include_usage: bool


def decode_body(body: bytes) -> dict[str, Any]:
    """The JSON object of a request.

    Raises:
        ApiError: 400 where it is not one.
    """
    try:
        document = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as problem:
        raise bad_request(f"JSON decode error: {problem}") from None
    if not isinstance(document, dict):
        raise bad_request("The request body must be a JSON object.")
    if not isinstance(document.get("model", ""), str):
        raise bad_request("`model` must be a string.", "model")
    return document


def read_inference(endpoint: Endpoint, document: Mapping[str, Any]) -> InferenceRequest:
    """Reads a completion request.

    Raises:
        ApiError: 400 where a field that matters here cannot be used.
    """
    prompt, prompt_tokens = _read_messages(document) if endpoint == "chat" else _read_prompt(document)
    if document.get("n") not in (None, 1):
        raise bad_request("`n` over 1 is not supported.", "n")
    options = document.get("stream_options") or {}
    if not isinstance(options, Mapping):
        raise bad_request("`stream_options` must be an object.", "stream_options")
    return InferenceRequest(
        model=document.get("model", ""),
        prompt=prompt,
        prompt_tokens=prompt_tokens,
        max_tokens=_read_max_tokens(endpoint, document),
        stream=bool(document.get("stream")),
        include_usage=bool(options.get("include_usage")),
    )


def read_embedding_inputs(document: Mapping[str, Any]) -> list[tuple[bytes, int]]:
    """The inputs of an embedding request with their sizes in tokens.

    Raises:
        ApiError: 400 where there are none.
    """
    given = document.get("input")
    inputs = given if isinstance(given, list) and not _is_token_list(given) else [given]
    if not inputs:
        raise bad_request("`input` must not be empty.", "input")
    return [_read_text_or_tokens(entry, "input") for entry in inputs]


def count_tokens(text: bytes) -> int:
    return max(1, -(-len(text) // BYTES_PER_TOKEN))


def prefix_keys(prompt: bytes, block_tokens: int) -> tuple[Hashable, ...]:
    """One key per full block of the prompt; each depends on all that comes before it."""
    size = block_tokens * BYTES_PER_TOKEN
    keys, checksum = [], 0
    for start in range(0, len(prompt) - size + 1, size):
        checksum = zlib.crc32(prompt[start:start + size], checksum)
        keys.append((start, checksum))
    return tuple(keys)


def _read_messages(document: Mapping[str, Any]) -> tuple[bytes, int]:
    messages = document.get("messages")
    if not isinstance(messages, list) or not messages:
        raise bad_request("`messages` must be a list with at least one message.", "messages")
    texts: list[str] = []
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise bad_request("Each message must be an object with a `role`.", "messages")
        content = message.get("content")
        if isinstance(content, str):
            texts.append(content)
        elif isinstance(content, list):
            texts.extend(part["text"] for part in content if isinstance(part, Mapping) and _has_text(part))
        elif content is not None:
            raise bad_request("`content` must be a string or a list of parts.", "messages")
    prompt = "".join(texts).encode()
    return prompt, count_tokens(prompt)


def _has_text(part: Mapping[str, Any]) -> bool:
    return isinstance(part.get("text"), str)


def _read_prompt(document: Mapping[str, Any]) -> tuple[bytes, int]:
    prompt = document.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and not _is_token_list(prompt):
        prompt = prompt[0]
    return _read_text_or_tokens(prompt, "prompt")


def _read_text_or_tokens(given: Any, param: str) -> tuple[bytes, int]:
    if isinstance(given, str):
        text = given.encode()
        return text, count_tokens(text)
    if _is_token_list(given):
        return pack(f"<{len(given)}q", *given), len(given)
    raise bad_request(f"`{param}` must be one string or one list of token ids.", param)


def _is_token_list(given: Any) -> bool:
    if not isinstance(given, list) or not given:
        return False
    return all(type(entry) is int and 0 <= entry < 1 << 31 for entry in given)


def _read_max_tokens(endpoint: Endpoint, document: Mapping[str, Any]) -> int | None:
    names = ("max_completion_tokens", "max_tokens") if endpoint == "chat" else ("max_tokens",)
    for name in names:
        value = document.get(name)
        if value is None:
            continue
        if type(value) is not int or value < 1:
            raise bad_request(f"{name} must be at least 1, got {value}.", name)
        return value
    return None


def token_text(number: int) -> bytes:
    return _TOKEN_TEXTS[number] if number < len(_TOKEN_TEXTS) else b" t%d" % number


def usage_of(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
    }


class EventStream:
    """The server-sent events of one streamed answer, cut once and filled with each token."""

    def __init__(self, endpoint: Endpoint, response_id: str, created: int, model: str) -> None:
        self._head = {
            "id": response_id,
            "object": "chat.completion.chunk" if endpoint == "chat" else "text_completion",
            "created": created,
            "model": model,
        }
        self._is_chat = endpoint == "chat"
        self._before, self._after = self._event(self._choice("\0", None)).split(b"\\u0000")

    def opening(self) -> bytes:
        """What comes with the first token, before it: the role, in chat."""
        if not self._is_chat:
            return b""
        delta = {"role": "assistant", "content": ""}
        return self._event([{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}])

    def tokens(self, start: int, stop: int, finish_reason: str | None = None) -> bytes:
        """One event for each token of `[start, stop)`; the last one carries the finish reason, where one is given."""
        plain_stop = stop if finish_reason is None else stop - 1
        before, after = self._before, self._after
        events = b"".join([before + token_text(number) + after for number in range(start, plain_stop)])
        if finish_reason is None:
            return events
        return events + self._event(self._choice(token_text(stop - 1).decode(), finish_reason))

    def abortion(self) -> bytes:
        """The event that ends a stream before its time: no token, and `abort` for a finish reason."""
        return self._event(self._choice("", "abort"))

    def usage(self, prompt_tokens: int, completion_tokens: int) -> bytes:
        head = msgspec.json.encode({**self._head, "choices": [], "usage": usage_of(prompt_tokens, completion_tokens)})
        return b"data: " + head + b"\n\n"

    @staticmethod
    def done() -> bytes:
        return b"data: [DONE]\n\n"

    def _choice(self, text: str, finish_reason: str | None) -> list[dict[str, object]]:
        content: dict[str, object] = {"delta": {"content": text}} if self._is_chat else {"text": text}
        return [{"index": 0, **content, "logprobs": None, "finish_reason": finish_reason}]

    def _event(self, choices: list[dict[str, object]]) -> bytes:
        return b"data: " + msgspec.json.encode({**self._head, "choices": choices}) + b"\n\n"


def whole_answer(
    endpoint: Endpoint, response_id: str, created: int, model: str, prompt_tokens: int, completion_tokens: int,
    finish_reason: str,
) -> bytes:
    """The body of an answer that is not streamed."""
    text = b"".join([token_text(number) for number in range(completion_tokens)]).decode()
    content: dict[str, object] = (
        {"message": {"role": "assistant", "content": text}} if endpoint == "chat" else {"text": text}
    )
    return msgspec.json.encode({
        "id": response_id,
        "object": "chat.completion" if endpoint == "chat" else "text_completion",
        "created": created,
        "model": model,
        "choices": [{"index": 0, **content, "logprobs": None, "finish_reason": finish_reason}],
        "usage": usage_of(prompt_tokens, completion_tokens),
    })


def embed(text: bytes) -> list[float]:
    """A vector that depends on the text and on nothing else; it has no meaning."""
    return [zlib.crc32(text, dimension) / 2**31 - 1.0 for dimension in range(EMBEDDING_DIMENSIONS)]
