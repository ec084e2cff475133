"""The demand that several processes count together: whole, without what was before, and kept when one of them dies."""

import os
from collections.abc import Iterator

import pytest

from backends.catalog.health import HealthRules
from backends.catalog.spec import BackendSpec
from router.config.sections import LendingSection
from router.fleet.leases import DECODE_REQUESTS, PREFILL_REQUESTS
from router.fleet.live import Fleet
from router.lending.demand import Demand, Tally
from router.workers.demand import SharedTally
from router.workers.peers import Peers
from router.workers.table import MODELS, RowState, Table

SPECS = [BackendSpec(name, f"http://127.0.0.1/{name}", "openai", "m", "m", "card") for name in ("a", "b")]


class Process:
    """A process's part, on a mapping of its own."""

    def __init__(self, handle: int, index: int, epoch: int) -> None:
        self.fleet = Fleet()
        self.fleet.apply(SPECS, HealthRules(), "0123456789ab")
        self.peers = Peers(Table.attach(handle), index)
        self.peers.own.begin(epoch, os.getpid(), index, 0.0)
        self.peers.join(self.fleet)
        self.peers.own.enter(RowState.SERVING)
        self.tally = SharedTally(self.peers)


@pytest.fixture(name="table")
def a_table() -> Iterator[Table]:
    table = Table.create(4)
    yield table
    os.close(table.handle)


def test_every_process_counts_what_all_have_served(table: Table) -> None:
    one, two = Process(table.handle, 0, 1), Process(table.handle, 1, 2)
    assert one.tally.total("m") == two.tally.total("m") == 0
    for process, times in ((one, 3), (two, 5)):
        for _ in range(times):
            process.tally.add("m")
    two.tally.add("other")
    assert one.tally.total("m") == two.tally.total("m") == 8
    assert (one.tally.total("other"), two.tally.total("other")) == (1, 1)
    assert one.tally.total("nobody's") == 0


def test_a_process_that_joins_begins_at_nothing_and_sees_all_that_comes(table: Table) -> None:
    one = Process(table.handle, 0, 1)
    for _ in range(100):
        one.tally.add("m")
    late = Process(table.handle, 1, 2)
    assert late.tally.total("m") == 0, "what was before is not of its time"
    one.tally.add("m")
    assert late.tally.total("m") == 1
    late.tally.add("m")
    assert one.tally.total("m") == 102


def test_what_a_dead_process_served_stays_and_its_successor_in_the_row_is_another(table: Table) -> None:
    one, two = Process(table.handle, 0, 1), Process(table.handle, 1, 2)
    for _ in range(7):
        two.tally.add("m")
    assert one.tally.total("m") == 7
    table.clear(1)
    assert one.tally.total("m") == 7
    successor = Process(table.handle, 1, 3)
    successor.tally.add("m")
    assert one.tally.total("m") == 8
    assert successor.tally.total("m") == 1


def test_requests_that_are_open_at_siblings_are_seen(table: Table) -> None:
    one, two = Process(table.handle, 0, 1), Process(table.handle, 1, 2)
    two.fleet.backends["a"].books.cells[PREFILL_REQUESTS] = 2
    two.fleet.backends["b"].books.cells[DECODE_REQUESTS] = 3
    assert one.tally.in_flight_elsewhere(SPECS) == 5
    assert one.tally.in_flight_elsewhere(SPECS[:1]) == 2
    assert two.tally.in_flight_elsewhere(SPECS) == 0
    assert Tally().in_flight_elsewhere(SPECS) == 0


def test_more_models_than_a_row_has_room_for_are_counted_by_each_alone(table: Table) -> None:
    one, two = Process(table.handle, 0, 1), Process(table.handle, 1, 2)
    for number in range(MODELS + 1):
        one.tally.add(f"m{number}")
    assert two.tally.total(f"m{MODELS - 1}") == 1
    assert (one.tally.total(f"m{MODELS}"), two.tally.total(f"m{MODELS}")) == (1, 0)


def test_each_process_forecasts_the_whole(table: Table) -> None:
    one, two = Process(table.handle, 0, 1), Process(table.handle, 1, 2)
    now = 0.0
    settings = LendingSection(forecaster="ewma_quantile", bin_s=1.0, horizon_s=5.0)
    demands = [Demand(settings, lambda: now, lambda model: 0) for _ in range(2)]
    for demand, process in zip(demands, (one, two), strict=True):
        demand.tally = process.tally
        demand.of("m")
    for second in range(1, 60):
        for _ in range(6):
            one.tally.add("m")
        for _ in range(2):
            two.tally.add("m")
        now = float(second)
        for demand in demands:
            assert demand.of("m").last_per_s == pytest.approx(8.0)
    steps = [demand.of("m").steps() for demand in demands]
    assert steps[0] == steps[1]
    assert steps[0][0].per_s >= 8.0
