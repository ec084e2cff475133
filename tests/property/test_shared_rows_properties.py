"""Rows of shared memory under any interleaving of leases, deaths and new processes: every reader has the same sum.

The oracle keeps plain numbers. Each "process" is a `Peers` with a fleet of its own on its own mapping of the memory, so
that nothing but the memory connects them.
"""

import os
import tempfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from backends.catalog.health import HealthRules
from backends.catalog.spec import BackendSpec
from router.fleet.live import BackendLease, Fleet
from router.workers.peers import Peers
from router.workers.table import Header, RowState, Table

NAMES = ("a", "b", "c", "d")
ROWS = 4


def spec(name: str) -> BackendSpec:
    return BackendSpec(name, f"http://127.0.0.1/{name}", "openai", "m", "m", "card")


class Process:
    """One worker, as far as the shared picture goes."""

    def __init__(self, memory: Table, index: int, epoch: int, names: tuple[str, ...]) -> None:
        self.table = Table.attach(memory.handle)
        self.peers = Peers(self.table, index, clock=lambda: 100.0)
        self.fleet = Fleet(clock=lambda: 100.0)
        self.apply(names)
        self.peers.own.begin(epoch, 1, 0, 100.0)
        self.peers.join(self.fleet)
        self.peers.own.enter(RowState.SERVING)
        self.leases: list[tuple[str, BackendLease, list[int]]] = []

    def apply(self, names: tuple[str, ...]) -> None:
        self.names = names
        self.fleet.apply([spec(name) for name in names], HealthRules(), "abc")

    def figures(self) -> dict[str, tuple[int, int, int, int]]:
        return {
            view.spec.name: (
                view.in_flight_requests, view.in_flight_prefill_tokens, view.in_flight_decode_requests,
                view.in_flight_context_tokens,
            )
            for view in self.fleet.view().backends
        }  # fmt: skip


class Workers(RuleBasedStateMachine):
    """Processes start, take and return leases, reload to other backends, and die at any moment."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Table.create(ROWS)
        self.processes: dict[int, Process] = {}
        self.epoch = 0
        self.start(NAMES[:2])

    def teardown(self) -> None:
        for process in self.processes.values():
            process.fleet.close()
        os.close(self.table.handle)

    @precondition(lambda self: len(self.processes) < ROWS)
    @rule(names=st.permutations(NAMES).flatmap(lambda order: st.integers(1, 4).map(lambda count: tuple(order[:count]))))
    def start(self, names: tuple[str, ...]) -> None:
        self.epoch += 1
        index = next(index for index in range(ROWS) if index not in self.processes)
        self.processes[index] = Process(self.table, index, self.epoch, names)

    @precondition(lambda self: self.processes)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        index = data.draw(st.sampled_from(sorted(self.processes)))
        self.processes.pop(index).fleet.close()
        self.table.clear(index)

    @precondition(lambda self: self.processes)
    @rule(data=st.data(), tokens=st.integers(0, 100_000))
    def take(self, data: st.DataObject, tokens: int) -> None:
        process = self.processes[data.draw(st.sampled_from(sorted(self.processes)))]
        name = data.draw(st.sampled_from(process.names))
        lease = process.fleet.backends[name].lease(tokens)
        lease.__enter__()
        process.leases.append((name, lease, [tokens, -1]))

    @precondition(lambda self: any(process.leases for process in self.processes.values()))
    @rule(data=st.data(), tokens=st.integers(1, 500), ends=st.booleans())
    def go_on(self, data: st.DataObject, tokens: int, ends: bool) -> None:
        process = self.processes[data.draw(st.sampled_from([i for i, p in self.processes.items() if p.leases]))]
        number = data.draw(st.integers(0, len(process.leases) - 1))
        _, lease, counts = process.leases[number]
        if ends:
            lease.__exit__(None, None, None)
            del process.leases[number]
        else:
            lease.generated(tokens)
            counts[1] = max(0, counts[1]) + tokens

    @precondition(lambda self: self.processes)
    @rule(data=st.data(), names=st.permutations(NAMES).map(lambda order: tuple(order[:3])))
    def reload(self, data: st.DataObject, names: tuple[str, ...]) -> None:
        process = self.processes[data.draw(st.sampled_from(sorted(self.processes)))]
        process.apply(names)
        # A backend that was removed is another one when it comes back: its old leases are not on the new books.
        process.leases = [
            entry for entry in process.leases
            if entry[0] in names and entry[1]._backend is process.fleet.backends[entry[0]]
        ]  # fmt: skip

    @invariant()
    def all_see_the_same_sum(self) -> None:
        expected = {name: [0, 0, 0, 0] for name in NAMES}
        for process in self.processes.values():
            for name, _, (prompt, generated) in process.leases:
                sums = expected[name]
                sums[0] += 1
                if generated < 0:
                    sums[1] += prompt
                else:
                    sums[2] += 1
                    sums[3] += prompt + generated
        for process in self.processes.values():
            seen = process.figures()
            assert seen == {name: tuple(expected[name]) for name in process.names}

    @invariant()
    def nothing_is_negative(self) -> None:
        for process in self.processes.values():
            assert min(process.peers.loads(), default=0) >= 0


TestWorkers = Workers.TestCase
TestWorkers.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


@given(st.lists(st.tuples(*[st.integers(0, 2**40)] * 4), min_size=1, max_size=3))
@settings(max_examples=50, deadline=None)
def test_the_sum_over_rows_is_the_sum_of_their_cells(rows: list[tuple[int, int, int, int]]) -> None:
    table = Table.create(ROWS)
    try:
        processes = [Process(table, index, index + 1, ("a",)) for index in range(len(rows))]
        for process, cells in zip(processes, rows, strict=True):
            books = process.fleet.backends["a"].books
            for cell, value in enumerate(cells):
                books.cells[cell] = value
        sums = [sum(column) for column in zip(*rows, strict=True)]
        for process in processes:
            assert list(process.peers.loads()) == sums
    finally:
        os.close(table.handle)


def test_a_cleared_row_is_all_zero_and_may_be_used_again() -> None:
    table = Table.create(2)
    try:
        first = Process(table, 0, 1, ("a",))
        first.fleet.backends["a"].lease(10).__enter__()
        table.clear(0)
        row = table.rows[0]
        assert row.state is RowState.EMPTY
        assert not any([*row.loads[:64], *row.slots[:64], *row.header])
        second = Process(table, 0, 2, ("a",))
        assert second.figures()["a"] == (0, 0, 0, 0)
        assert row.header[Header.EPOCH] == 2
    finally:
        os.close(table.handle)


@pytest.mark.parametrize("rows", [0, 257])
def test_a_table_has_some_rows_and_not_too_many(rows: int) -> None:
    with pytest.raises(ValueError, match="rows"):
        Table.create(rows)


def test_what_is_no_table_is_not_attached() -> None:
    with tempfile.TemporaryFile() as file:
        file.write(bytes(64))
        file.flush()
        with pytest.raises(ValueError, match="no table"):
            Table.attach(file.fileno())
