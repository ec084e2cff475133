"""In-flight accounting: what this router has given a backend to do and not yet got back.

A lease belongs to one attempt. However the attempt ends (answer, error, timeout, client gone, reload), settling the
lease returns exactly what taking it took, once. There is no other way to change the books, no expiry, and no decrement
without its increment.

Books are four cells of memory: the process's own, or those of its row in the table that worker processes share. What a
process writes there, the others read at once, and nobody else writes it.
"""

from collections.abc import Callable, Mapping
from types import TracebackType

PREFILL_REQUESTS, PREFILL_TOKENS, DECODE_REQUESTS, CONTEXT_TOKENS = range(4)


def private_cells() -> memoryview:
    """Cells that no other process sees."""
    return memoryview(bytearray(4 * 8)).cast("q")


class Books:
    """In-flight work of one backend, in requests and tokens."""

    __slots__ = ("cells",)

    def __init__(self, cells: memoryview | None = None) -> None:
        self.cells = private_cells() if cells is None else cells
        """Prefilling requests and their prompt tokens, decoding requests and the tokens of their context."""

    def move_to(self, cells: memoryview) -> None:
        """Keep the books there from now on; the old cells are left empty."""
        before, self.cells = self.cells, cells
        for index, value in enumerate(before.tolist()):
            cells[index] = value
            before[index] = 0

    @property
    def requests(self) -> int:
        return int(self.cells[PREFILL_REQUESTS] + self.cells[DECODE_REQUESTS])

    @property
    def prefill_requests(self) -> int:
        return int(self.cells[PREFILL_REQUESTS])

    @property
    def prefill_tokens(self) -> int:
        return int(self.cells[PREFILL_TOKENS])

    @property
    def decode_requests(self) -> int:
        return int(self.cells[DECODE_REQUESTS])

    @property
    def context_tokens(self) -> int:
        return int(self.cells[CONTEXT_TOKENS])

    def __repr__(self) -> str:
        names = ("requests", "prefill_requests", "prefill_tokens", "decode_requests", "context_tokens")
        return f"Books({', '.join(f'{name}={getattr(self, name)}' for name in names)})"


class InFlight:
    """Client requests that the gateway holds: this process's own, and where it has siblings, theirs."""

    __slots__ = ("admitted", "own")

    def __init__(self) -> None:
        self.own = 0
        """Those too that are about to be refused."""
        self.admitted: dict[str, int] = {}
        """By latency class."""

    def enter(self) -> None:
        self.own += 1

    def leave(self) -> None:
        self.own -= 1

    def admit(self, latency_class: str) -> None:
        """One more of a class counts from now on."""
        self.admitted[latency_class] = self.admitted.get(latency_class, 0) + 1

    def give_back(self, latency_class: str) -> None:
        """One of a class counts no longer."""
        self.admitted[latency_class] -= 1

    def by_class(self) -> Mapping[str, int]:
        """Admitted, over all processes."""
        return self.admitted



class Rate:
    """How many of something happen in a second, by the last second or longer that was looked at."""

    __slots__ = ("_clock", "_counted", "_known", "_since_s")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._counted = 0
        self._known: float | None = None
        self._since_s = clock()

    def count(self) -> None:
        """One more."""
        self._counted += 1

    @property
    def per_s(self) -> float | None:
        """`None` where nobody knows yet."""
        now = self._clock()
        passed_s = now - self._since_s
        if passed_s >= 1.0:
            self._known, self._counted, self._since_s = self._counted / passed_s, 0, now
        return self._known


class Lease:
    """One attempt's share of a backend's books: taken once, by `take` or by entering, and given back once, by `settle`
    or by leaving. Before and afterwards it changes nothing."""

    __slots__ = ("_books", "_context_tokens", "_decoding", "_open", "_prompt_tokens", "_taken")

    def __init__(self, books: Books, prompt_tokens: int) -> None:
        self._books = books
        self._prompt_tokens = prompt_tokens
        self._context_tokens = 0
        self._decoding = self._open = self._taken = False

    def take(self) -> None:
        """Book the prompt.

        Raises:
            RuntimeError: it was taken before.
        """
        if self._taken:
            raise RuntimeError("a lease is taken once")
        self._taken = self._open = True
        cells = self._books.cells
        cells[PREFILL_REQUESTS] += 1
        cells[PREFILL_TOKENS] += self._prompt_tokens

    def first_token(self) -> None:
        """The prompt is done: its tokens move from prefill to the context of a decoding stream."""
        if self._decoding or not self._open:
            return
        self._decoding = True
        cells, tokens = self._books.cells, self._prompt_tokens
        self._context_tokens = tokens
        # Up first: who reads in between sees the request twice rather than not at all.
        cells[DECODE_REQUESTS] += 1
        cells[CONTEXT_TOKENS] += tokens
        cells[PREFILL_REQUESTS] -= 1
        cells[PREFILL_TOKENS] -= tokens

    def generated(self, tokens: int) -> None:
        """The stream grew by `tokens`; the first of them end the prompt."""
        if not self._open:
            return
        if not self._decoding:
            self.first_token()
        self._context_tokens += tokens
        self._books.cells[CONTEXT_TOKENS] += tokens

    def settle(self) -> None:
        """Give back what is booked."""
        if not self._open:
            return
        self._open = False
        cells = self._books.cells
        if self._decoding:
            cells[DECODE_REQUESTS] -= 1
            cells[CONTEXT_TOKENS] -= self._context_tokens
        else:
            cells[PREFILL_REQUESTS] -= 1
            cells[PREFILL_TOKENS] -= self._prompt_tokens

    def __enter__(self) -> "Lease":
        self.take()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.settle()
