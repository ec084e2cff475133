"""The hot routes as bare ASGI callables: chat, text completions, embeddings."""

import asyncio
import base64
import struct
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from loadtest.fake_engine import wire
from loadtest.fake_engine.driver import TokenStream
from loadtest.fake_engine.engine import FakeEngine
from loadtest.fake_engine.faults import Fault, FaultKind
from loadtest.fake_engine.wire import ApiError, Endpoint, InferenceRequest

JSON_HEADERS = [(b"content-type", b"application/json")]


class InferenceRoute:
    """One hot route as a bare ASGI callable: faults, reading, refusal, then the answer of a subclass."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await _read_body(receive)
        if body is None:
            return
        self.engine.in_flight += 1
        try:
            self.engine.check_key(scope)
            if self.engine.fault(FaultKind.HANG):
                await self._hang(receive)
                return
            if refusal := self.engine.fault(FaultKind.ERROR):
                await _send_error(send, _injected_error(refusal), refusal.retry_after_s)
                return
            document = wire.decode_body(body)
            self.engine.check_model(document.get("model", ""))
            await self.answer(document, scope, receive, send)
        except ApiError as problem:
            await _send_error(send, problem)
        finally:
            self.engine.in_flight -= 1

    async def answer(self, document: dict[str, Any], scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError

    async def _hang(self, receive: Receive) -> None:
        waits = [asyncio.create_task(_wait_disconnect(receive)), asyncio.create_task(self.engine.closing.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    @asynccontextmanager
    async def cancelling(self, streams: list[TokenStream], receive: Receive) -> AsyncIterator[None]:
        """Cancels the sequences as soon as the client is gone, and in any case on the way out."""
        driver = self.engine.driver

        async def watch() -> None:
            await _wait_disconnect(receive)
            for stream in streams:
                driver.cancel(stream)

        watcher = asyncio.create_task(watch())
        try:
            yield
        finally:
            watcher.cancel()
            for stream in streams:
                driver.cancel(stream)


class CompletionRoute(InferenceRoute):
    """Chat and text completions, streamed and not."""

    def __init__(self, engine: FakeEngine, endpoint: Endpoint) -> None:
        super().__init__(engine)
        self._endpoint = endpoint
        self._id_prefix = "chatcmpl" if endpoint == "chat" else "cmpl"

    async def answer(self, document: dict[str, Any], scope: Scope, receive: Receive, send: Send) -> None:
        request = wire.read_inference(self._endpoint, document)
        output_tokens, finish_reason = self.engine.plan_output(request)
        response_id = self.engine.response_id(self._id_prefix, scope)
        stream = self.engine.submit(request, response_id, output_tokens, finish_reason)
        cut = self.engine.fault(FaultKind.CUT)
        async with self.cancelling([stream], receive):
            if request.stream:
                await self._answer_streamed(request, stream, cut, send)
            else:
                await self._answer_whole(stream, cut, send)

    async def _answer_streamed(
        self, request: InferenceRequest, stream: TokenStream, cut: Fault | None, send: Send
    ) -> None:
        await _send_head(send, 200, [(b"content-type", b"text/event-stream; charset=utf-8")])
        events = wire.EventStream(self._endpoint, stream.label, int(time.time()), self.engine.options.served_model_name)
        stop_at = stream.output_tokens if cut is None else min(cut.after_chunks, stream.output_tokens)
        sent = 0
        while sent < stop_at:
            await stream.wait_beyond(sent)
            if stream.is_abandoned:
                return
            if stream.is_aborted:
                rest = events.tokens(sent, stream.tokens) + events.abortion()
                rest += events.usage(stream.prompt_tokens, stream.tokens) if request.include_usage else b""
                await _send_chunk(send, rest + events.done(), more=False)
                return
            upto = min(stream.tokens, stop_at)
            chunk = events.opening() if sent == 0 else b""
            if upto == stream.output_tokens and cut is None:
                chunk += events.tokens(sent, upto, stream.finish_reason)
                chunk += events.usage(stream.prompt_tokens, upto) if request.include_usage else b""
                await _send_chunk(send, chunk + events.done(), more=False)
            else:
                await _send_chunk(send, chunk + events.tokens(sent, upto))
            sent = upto
        if cut is not None and cut.clean:
            await _send_chunk(send, b"", more=False)
        # An aborted cut returns with the response unfinished: the server then drops the connection.

    async def _answer_whole(self, stream: TokenStream, cut: Fault | None, send: Send) -> None:
        await stream.wait_over()
        if stream.is_abandoned:
            return
        body = wire.whole_answer(
            self._endpoint, stream.label, int(time.time()), self.engine.options.served_model_name,
            stream.prompt_tokens, stream.tokens, stream.finish_reason,
        )
        if cut is None:
            await _send_json(send, 200, body)
        else:
            half = body[: len(body) // 2]
            length = len(half) if cut.clean else len(body)
            await _send_head(send, 200, [*JSON_HEADERS, (b"content-length", b"%d" % length)])
            await _send_chunk(send, half, more=not cut.clean)


class EmbeddingRoute(InferenceRoute):
    """Embeddings: each input is one prefill."""

    async def answer(self, document: dict[str, Any], scope: Scope, receive: Receive, send: Send) -> None:
        inputs = wire.read_embedding_inputs(document)
        encoding = document.get("encoding_format") or "float"
        if encoding not in ("float", "base64"):
            raise wire.bad_request("`encoding_format` must be `float` or `base64`.", "encoding_format")
        if max(tokens for _, tokens in inputs) >= self.engine.context_tokens:
            raise wire.bad_request(
                f"This model's maximum context length is {self.engine.context_tokens} tokens.", "input"
            )
        response_id = self.engine.response_id("embd", scope)
        streams = [
            self.engine.driver.submit(response_id, tokens, 1, finish_reason="stop", each_token=False)
            for _, tokens in inputs
        ]
        async with self.cancelling(streams, receive):
            for stream in streams:
                await stream.wait_over()
            if any(stream.is_abandoned for stream in streams):
                return
            if any(stream.is_aborted for stream in streams):
                raise ApiError(500, "InternalServerError", "The engine is shutting down.")
            await _send_json(send, 200, self._body(response_id, inputs, encoding))

    def _body(self, response_id: str, inputs: list[tuple[bytes, int]], encoding: str) -> bytes:
        prompt_tokens = sum(tokens for _, tokens in inputs)
        vectors = [wire.embed(text) for text, _ in inputs]
        return msgspec.json.encode({
            "id": response_id,
            "object": "list",
            "created": int(time.time()),
            "model": self.engine.options.served_model_name,
            "data": [
                {"index": index, "object": "embedding", "embedding": _encode_vector(vector, encoding)}
                for index, vector in enumerate(vectors)
            ],
            "usage": wire.usage_of(prompt_tokens, 0),
        })


def _encode_vector(vector: list[float], encoding: str) -> list[float] | str:
    if encoding == "float":
        return vector
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


def _injected_error(fault: Fault) -> ApiError:
    kind = {429: "RateLimitError", 503: "ServiceUnavailableError"}.get(fault.status, "InternalServerError")
    return ApiError(fault.status, kind, f"injected fault: {fault}")


async def _read_body(receive: Receive) -> bytes | None:
    """The whole body, or `None` where the client left while sending it."""
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


async def _wait_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_head(send: Send, status: int, headers: list[tuple[bytes, bytes]]) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def _send_chunk(send: Send, body: bytes, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def _send_json(send: Send, status: int, body: bytes, headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
    await _send_head(send, status, [*JSON_HEADERS, (b"content-length", b"%d" % len(body)), *headers])
    await _send_chunk(send, body, more=False)


async def _send_error(send: Send, problem: ApiError, retry_after_s: int | None = None) -> None:
    headers = () if retry_after_s is None else ((b"retry-after", b"%d" % retry_after_s),)
    await _send_json(send, problem.status, problem.body(), headers)
