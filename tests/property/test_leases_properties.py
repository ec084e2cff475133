"""Leases under any interleaving: what is taken is returned, and the books never go below zero."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.fleet.leases import Books, Lease


def totals(books: Books) -> dict[str, int]:
    names = ("requests", "prefill_requests", "prefill_tokens", "decode_requests", "context_tokens")
    return {name: getattr(books, name) for name in names}


class Interleaving(RuleBasedStateMachine):
    """Any order of entering, first tokens, tokens and leaving; leaving may be by exception; calls may be repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.books = Books()
        self.fresh: list[Lease] = []
        self.open: dict[Lease, list[int]] = {}
        self.closed: list[Lease] = []

    @rule(prompt_tokens=st.integers(1, 10_000))
    def ask(self, prompt_tokens: int) -> None:
        lease = Lease(self.books, prompt_tokens)
        lease.first_token()  # before it is taken: changes nothing
        lease.generated(3)
        lease.__enter__()
        self.open[lease] = [prompt_tokens, 0, 0]

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def first_token(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(list(self.open)))
        lease.first_token()
        self.open[lease][1] = 1

    @precondition(lambda self: self.open)
    @rule(data=st.data(), tokens=st.integers(1, 50))
    def generated(self, data: st.DataObject, tokens: int) -> None:
        lease = data.draw(st.sampled_from(list(self.open)))
        lease.generated(tokens)
        self.open[lease][1] = 1
        self.open[lease][2] += tokens

    @precondition(lambda self: self.open)
    @rule(data=st.data(), failed=st.booleans())
    def leave(self, data: st.DataObject, failed: bool) -> None:
        lease = data.draw(st.sampled_from(list(self.open)))
        error = RuntimeError("broke off") if failed else None
        lease.__exit__(type(error) if error else None, error, None)
        del self.open[lease]
        self.closed.append(lease)

    @precondition(lambda self: self.closed)
    @rule(data=st.data())
    def come_late(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.closed))
        lease.first_token()
        lease.generated(7)
        lease.__exit__(None, None, None)
        with pytest.raises(RuntimeError):
            lease.__enter__()

    @invariant()
    def the_books_are_the_sum_of_open_leases(self) -> None:
        rows = list(self.open.values())
        assert totals(self.books) == {
            "requests": len(rows),
            "prefill_requests": sum(not row[1] for row in rows),
            "prefill_tokens": sum(row[0] for row in rows if not row[1]),
            "decode_requests": sum(row[1] for row in rows),
            "context_tokens": sum(row[0] + row[2] for row in rows if row[1]),
        }

    def teardown(self) -> None:
        for lease in self.open:
            lease.__exit__(None, None, None)
        assert set(totals(self.books).values()) == {0}


TestInterleaving = Interleaving.TestCase


@given(st.integers(1, 1000), st.integers(0, 5))
def test_an_exception_inside_the_block_returns_the_lease(prompt_tokens: int, tokens: int) -> None:
    books = Books()

    def fail() -> None:
        with Lease(books, prompt_tokens) as lease:
            for _ in range(tokens):
                lease.generated(1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert set(totals(books).values()) == {0}
