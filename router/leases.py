"""In-flight accounting: what this router has given a backend to do and not yet got back.

A lease is a context manager around one attempt. However the attempt ends (answer, error, timeout, client gone,
cancellation, reload), leaving the block returns exactly what entering it took. There is no other way to change the
books, no expiry, and no decrement without its increment.
"""

from types import TracebackType


class Books:
    """In-flight work of one backend, in requests and tokens."""

    __slots__ = ("context_tokens", "decode_requests", "prefill_requests", "prefill_tokens", "requests")

    def __init__(self) -> None:
        self.requests = 0
        self.prefill_requests = 0
        self.prefill_tokens = 0
        self.decode_requests = 0
        self.context_tokens = 0

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={getattr(self, name)}" for name in self.__slots__)
        return f"Books({fields})"


class Lease:
    """One attempt's share of a backend's books. Enter it once; before and afterwards it changes nothing."""

    __slots__ = ("_books", "_context_tokens", "_decoding", "_entered", "_open", "_prompt_tokens")

    def __init__(self, books: Books, prompt_tokens: int) -> None:
        self._books = books
        self._prompt_tokens = prompt_tokens
        self._context_tokens = 0
        self._decoding = False
        self._entered = False
        self._open = False

    def __enter__(self) -> "Lease":
        if self._entered:
            raise RuntimeError("a lease is taken once")
        self._entered = self._open = True
        self._books.requests += 1
        self._books.prefill_requests += 1
        self._books.prefill_tokens += self._prompt_tokens
        return self

    def first_token(self) -> None:
        """The prompt is done: its tokens move from prefill to the context of a decoding stream."""
        if self._decoding or not self._open:
            return
        self._decoding = True
        books = self._books
        books.prefill_requests -= 1
        books.prefill_tokens -= self._prompt_tokens
        books.decode_requests += 1
        self._context_tokens = self._prompt_tokens
        books.context_tokens += self._prompt_tokens

    def generated(self, tokens: int) -> None:
        """The stream grew by `tokens`; the first of them end the prompt."""
        if not self._open:
            return
        self.first_token()
        self._context_tokens += tokens
        self._books.context_tokens += tokens

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._open:
            return
        self._open = False
        books = self._books
        books.requests -= 1
        if self._decoding:
            books.decode_requests -= 1
            books.context_tokens -= self._context_tokens
        else:
            books.prefill_requests -= 1
            books.prefill_tokens -= self._prompt_tokens
