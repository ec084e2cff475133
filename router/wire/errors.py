"""Every error a client can meet, in OpenAI's shape, in one table.

    ApiError ─┬─ of the request:   400 401 404 405 408 413 415 431
              ├─ of the load:      429
              └─ of the backends:  502 503 504

OpenAI's SDKs choose the exception they raise by status; `type` and `code` are what programs match on. Messages say
what, where and what to do. They name models and limits, never hosts, keys or internals.
"""

from collections.abc import Sequence

import msgspec

Headers = Sequence[tuple[bytes, bytes]]


class ApiError(Exception):
    """An answer that is an error. Raised anywhere on a request's way, rendered once at its top."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        headers: Headers = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.headers = headers

    @property
    def type(self) -> str:
        """OpenAI's coarse class of the error."""
        return ERROR_TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")

    def body(self) -> bytes:
        """The JSON body."""
        return msgspec.json.encode(
            {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}
        )

    def response_headers(self) -> list[tuple[bytes, bytes]]:
        """Headers that belong to the error itself: type, length, Retry-After in whole seconds (RFC 9110 §10.2.3)."""
        headers = [(b"content-type", b"application/json"), *self.headers]
        if self.retry_after_s is not None:
            headers.append((b"retry-after", str(max(1, round(self.retry_after_s))).encode()))
        return headers


ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    502: "upstream_error",
    503: "service_unavailable",
    504: "timeout",
}


def bad_request(message: str, *, code: str = "invalid_request", param: str | None = None) -> ApiError:
    return ApiError(400, code, message, param=param)


def unauthorized() -> ApiError:
    return ApiError(
        401,
        "invalid_api_key",
        "The API key is missing or unknown. Send it as 'Authorization: Bearer <key>'.",
        headers=[(b"www-authenticate", b"Bearer")],
    )


def model_not_found(model: str, known: Sequence[str]) -> ApiError:
    shown = model if len(model) <= 64 else model[:61] + "..."
    return ApiError(
        404,
        "model_not_found",
        f"The model {shown!a} does not exist here. Known models: {', '.join(known)}.",
        param="model",
    )


def context_too_long(model: str, prompt_tokens: int, max_output_tokens: int | None, longest_tokens: int) -> ApiError:
    """In tokens: what was asked for, the prompt as it is estimated, and the longest context there is."""
    output = "room for an answer" if max_output_tokens is None else f"an answer of up to {max_output_tokens}"
    return ApiError(
        400,
        "context_length_exceeded",
        f"The request needs about {prompt_tokens} tokens of prompt (an estimate) and {output}; the longest context of "
        f"the backends that serve {model!a} is {longest_tokens} tokens. Shorten the prompt or ask for less output.",
        param="messages",
    )


def not_found() -> ApiError:
    return ApiError(404, "unknown_url", (
        "Unknown path. Clients' API is under /v1 (see GET /v1/models); operators' is under /admin, on its own port."))


def method_not_allowed(allow: str) -> ApiError:
    return ApiError(
        405,
        "method_not_allowed",
        f"This path takes {allow} only.",
        headers=[(b"allow", allow.encode("ascii"))],
    )


def body_too_large(limit_bytes: int) -> ApiError:
    return ApiError(
        413,
        "request_too_large",
        f"The request body is over the limit of {limit_bytes} bytes.",
        headers=[(b"connection", b"close")],
    )


def request_timeout() -> ApiError:
    return ApiError(408, "request_timeout", "The request did not come whole in time.")


def headers_too_large(limit_bytes: int, limit_headers: int) -> ApiError:
    message = f"The request head is over the limit of {limit_bytes} bytes or {limit_headers} headers."
    return ApiError(431, "headers_too_large", message)


def unsupported_media_type(what: str) -> ApiError:
    return ApiError(415, "unsupported_media_type", f"{what} Send plain JSON as 'Content-Type: application/json'.")


def overloaded(message: str, retry_after_s: float) -> ApiError:
    return ApiError(429, "rate_limit_exceeded", message, retry_after_s=retry_after_s)


BUDGETS = {"ttft": "to the first token", "inter_token": "between two tokens", "e2e": "to the end of the answer"}


def budget_beyond_idle(budget: str, promised_s: float, needed_s: float, retry_after_s: float) -> ApiError:
    """No backend could keep the budget though it were idle. To wait mends nothing, and OpenAI's SDKs, which would ask
    again by themselves, are told so."""
    return ApiError(
        429,
        "rate_limit_exceeded",
        f"No backend can keep the budget of {promised_s:.3g} s {BUDGETS[budget]}, not even an idle one: the quickest "
        f"needs about {needed_s:.3g} s for this request. A larger budget or a smaller request would do.",
        retry_after_s=retry_after_s,
        headers=[(b"x-should-retry", b"false")],
    )


def bad_gateway(message: str) -> ApiError:
    return ApiError(502, "upstream_error", message)


def no_backend(message: str, retry_after_s: float) -> ApiError:
    return ApiError(503, "no_backend_available", message, retry_after_s=retry_after_s)


def gateway_timeout(phase: str) -> ApiError:
    return ApiError(504, "upstream_timeout", f"No backend answered in time (phase: {phase}).")
