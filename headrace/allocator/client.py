"""Talks to a running allocator over its HTTP API."""

import os
from collections.abc import Mapping
from typing import Any

import httpx

TOKEN_VARIABLE = "HEADRACE_ALLOCATOR_TOKEN"  # noqa: S105  the name of a variable, not a secret


class AllocatorError(Exception):
    """The allocator gave no answer, or its answer is no; the message says what and what to do."""

    def __init__(self, message: str, *, answered: bool = True) -> None:
        super().__init__(message)
        self.answered = answered


class AllocatorClient:
    """One allocator. Follows one hop from an allocator that waits to the one that leads."""

    def __init__(self, url: str) -> None:
        self._url = url

    def get(self, path: str, **query: str | int) -> dict[str, Any]:
        """Raises AllocatorError."""
        return self.ask("GET", path, query={key: str(value) for key, value in query.items()})

    def ask(self, method: str, path: str, *, body: Mapping[str, Any] | None = None,
            query: Mapping[str, str] | None = None) -> dict[str, Any]:
        """The answer's body. Raises AllocatorError."""
        status, found = self._once(self._url, method, path, body, query)
        error = found.get("error") if status >= 400 else None
        if status == 503 and isinstance(error, dict) and error.get("leader"):
            status, found = self._once(str(error["leader"]), method, path, body, query)
            error = found.get("error") if status >= 400 else None
        if isinstance(error, dict):
            raise AllocatorError(str(error.get("message") or error.get("code") or f"status {status}"))
        if status >= 400 and "ok" not in found:
            raise AllocatorError(f"{method} {self._url}{path} answered {status}; is --allocator the allocator's API?")
        return found

    def _once(self, url: str, method: str, path: str, body: Mapping[str, Any] | None,
              query: Mapping[str, str] | None) -> tuple[int, dict[str, Any]]:
        token = os.environ.get(TOKEN_VARIABLE, "").strip()
        headers = {"authorization": f"Bearer {token}"} if token else {}
        try:
            with httpx.Client(base_url=url, timeout=15, trust_env=False, headers=headers) as client:
                answer = client.request(method, path, json=body, params=query or None)
        except (httpx.InvalidURL, httpx.UnsupportedProtocol):
            raise AllocatorError(f"{url!r} is not an address; for example --allocator http://127.0.0.1:8082",
                                 answered=False) from None
        except httpx.TransportError as error:
            raise AllocatorError(f"no allocator answers on {url} ({error}); is `headrace allocate` running? Another "
                                 "address: --allocator URL", answered=False) from None
        try:
            found = answer.json()
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise AllocatorError(f"{method} {url}{path} answered {answer.status_code}, but not as an allocator does; "
                                 "is --allocator right?")
        return answer.status_code, found
