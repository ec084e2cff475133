"""Worker processes on one table: health, silence, probes, samples and limits pass from one to the other."""

import os
from collections.abc import Iterator

import pytest

from backends.catalog.health import HealthRules, HealthState, OutcomeKind, Probe
from backends.catalog.sample import LoadSample
from backends.catalog.spec import BackendSpec
from router.fleet.live import Fleet
from router.keys.ring import Principal
from router.wire.errors import ApiError
from router.workers.limits import SharedInFlight, SharedParallel
from router.workers.peers import STALE_S, Peers, is_alive
from router.workers.table import CLASSES, Header, RowState, Table

RULES = HealthRules(silent_failures_to_eject=2, base_ejection_s=5.0, trial_successes=1, slow_start_s=10.0)
NAMES = ("a", "b", "c")
HASH = "0123456789ab"


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


class Worker:
    """A process's part of the picture, on a mapping of its own."""

    def __init__(self, handle: int, index: int, epoch: int, clock: Clock) -> None:
        self.told: list[tuple[str, HealthState]] = []
        self.fleet = Fleet(clock=clock, on_transition=lambda name, _, after: self.told.append((name, after.state)))
        specs = [BackendSpec(name, f"http://127.0.0.1/{name}", "openai", "m", "m", "card") for name in NAMES]
        self.fleet.apply(specs, RULES, HASH)
        self.peers = Peers(Table.attach(handle), index, clock=clock)
        self.peers.own.begin(epoch, os.getpid(), index, clock())
        self.peers.join(self.fleet)
        self.peers.own.enter(RowState.SERVING)
        self.in_flight = SharedInFlight(self.peers)
        self.parallel = SharedParallel(self.peers)

    def state(self, name: str) -> HealthState:
        """As the next decision sees it."""
        view = next(view for view in self.fleet.view().backends if view.spec.name == name)
        return view.health.at(self.peers._clock()).state

    def fail(self, name: str, times: int = 2) -> None:
        for _ in range(times):
            self.fleet.on_outcome(self.fleet.backends[name], OutcomeKind.RESET)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def table() -> Iterator[Table]:
    table = Table.create(8)
    yield table
    os.close(table.handle)


@pytest.fixture
def workers(table: Table, clock: Clock) -> list[Worker]:
    return [Worker(table.handle, index, index + 1, clock) for index in range(3)]


def test_an_ejection_holds_everywhere_from_the_next_decision_on_and_until_the_same_moment(
    workers: list[Worker], clock: Clock
) -> None:
    first, *others = workers
    first.fail("a")
    assert first.state("a") is HealthState.EJECTED
    assert [worker.state("a") for worker in others] == [HealthState.EJECTED] * 2
    assert {worker.fleet.backends["a"].health.until_s for worker in workers} == {clock.now + 5.0}
    assert [worker.state("b") for worker in workers] == [HealthState.UNKNOWN] * 3
    clock.now += 4.9
    assert others[0].state("a") is HealthState.EJECTED
    clock.now += 0.2
    assert [worker.state("a") for worker in workers] == [HealthState.HALF_OPEN] * 3


def test_who_counts_an_ejection_is_the_one_who_found_it(workers: list[Worker]) -> None:
    workers[1].fail("a")
    for worker in workers:
        worker.fleet.view()
    assert [worker.told for worker in workers] == [[], [("a", HealthState.EJECTED)], []]


def test_one_good_trial_brings_a_backend_back_for_all(workers: list[Worker], clock: Clock) -> None:
    workers[0].fail("a")
    workers[1].fleet.view(), workers[2].fleet.view()
    clock.now += 5.1
    with workers[2].fleet.backends["a"].lease(10):
        trial = [view for worker in workers for view in worker.fleet.view().backends if view.spec.name == "a"]
        assert [view.health.accepts(view.in_flight_requests, clock.now) for view in trial] == [False] * 3
    workers[2].fleet.on_outcome(workers[2].fleet.backends["a"], OutcomeKind.SUCCESS)
    assert [worker.state("a") for worker in workers] == [HealthState.SLOW_START] * 3


def test_an_old_verdict_is_no_echo(workers: list[Worker], clock: Clock) -> None:
    first, second, _ = workers
    first.fail("a")
    assert second.state("a") is HealthState.EJECTED
    clock.now += 5.1
    second.fleet.on_outcome(second.fleet.backends["a"], OutcomeKind.SUCCESS)
    assert second.state("a") is HealthState.SLOW_START
    first.fail("b")  # makes everybody look again
    assert second.state("a") is HealthState.SLOW_START
    assert second.state("b") is HealthState.EJECTED


def test_verdicts_that_cross_leave_each_worker_a_backend(workers: list[Worker]) -> None:
    workers[0].fail("a")
    workers[1].fail("b")
    workers[2].fail("c")
    for worker in workers:
        assert any(view.health.in_service for view in worker.fleet.view().backends)


def test_silence_is_kept_by_all(workers: list[Worker], clock: Clock) -> None:
    workers[2].fleet.backends["b"].backoff_until_s = clock.now + 7.0
    for worker in workers:
        view = next(view for view in worker.fleet.view().backends if view.spec.name == "b")
        assert view.backoff_until_s == clock.now + 7.0


def test_only_the_leader_probes_and_the_others_hear_of_it(workers: list[Worker], clock: Clock) -> None:
    assert [worker.peers.tick() is worker.peers.own for worker in workers] == [True, False, False]
    workers[0].peers.on_probe("a", Probe(ok=True))
    workers[0].peers.on_probe("b", Probe(ok=False, detail="refused"))
    for worker in workers:
        worker.peers.tick()
        assert worker.state("a") is HealthState.HEALTHY
        assert worker.state("b") is HealthState.UNHEALTHY
        assert worker.state("c") is HealthState.UNKNOWN
    assert workers[1].told == [], "transitions by probes are counted once"
    probed = workers[1].fleet.backends["b"].health.probe_failures
    workers[1].peers.tick()
    assert workers[1].fleet.backends["b"].health.probe_failures == probed, "each probe is heard once"


def test_samples_arrive_whole_and_unknown_stays_unknown(workers: list[Worker], clock: Clock) -> None:
    sample = LoadSample(clock.now, running_requests=3, kv_usage_ratio=0.25, prompt_tokens_total=12345.0)
    with workers[2].fleet.backends["c"].lease(5):
        workers[0].peers.on_sample("c", sample)
    for worker in workers:
        worker.peers.tick()
        assert worker.fleet.backends["c"].sample == sample
        assert worker.fleet.backends["c"].in_flight_at_sample == 1, "over all processes, as the engine counts"
        assert worker.fleet.backends["a"].sample is None


def test_the_lead_passes_on_when_the_leader_falls_silent_dies_or_drains(
    workers: list[Worker], table: Table, clock: Clock
) -> None:
    clock.now += STALE_S + 0.1
    assert workers[1].peers.tick() is workers[1].peers.own, "row 0 gives no sign of life"
    assert workers[0].peers.tick() is workers[0].peers.own, "it is back"
    assert leader_index(workers[1]) == 0
    table.clear(0)
    assert leader_index(workers[1]) == 1
    workers[1].peers.own.enter(RowState.DRAINING)
    workers[2].peers.tick()
    assert leader_index(workers[2]) == 2


def leader_index(worker: Worker) -> int:
    leader = worker.peers.tick()
    assert leader is not None
    return leader.index


def test_a_dead_row_that_nobody_cleared_is_void_once_it_is_stale(workers: list[Worker], clock: Clock) -> None:
    workers[1].fleet.backends["a"].lease(10).__enter__()
    workers[1].in_flight.admit("batch")
    assert workers[0].fleet.view().backends[0].in_flight_requests == 1
    workers[1].peers.own.header[Header.PID] = 2**22 + 1  # no such process
    clock.now += STALE_S + 0.1
    workers[0].peers.tick()
    assert workers[0].fleet.view().backends[0].in_flight_requests == 0
    assert workers[0].in_flight.by_class() == {}
    assert not is_alive(2**22 + 1)
    assert is_alive(os.getpid())


def test_a_stopped_process_still_holds_what_it_holds(workers: list[Worker], clock: Clock) -> None:
    workers[1].fleet.backends["a"].lease(10).__enter__()
    clock.now += STALE_S + 100
    workers[0].peers.tick()
    assert workers[0].fleet.view().backends[0].in_flight_requests == 1


def test_a_newcomer_begins_where_the_leader_stands(workers: list[Worker], table: Table, clock: Clock) -> None:
    first = workers[0]
    first.peers.on_probe("b", Probe(ok=False, detail="refused"))
    first.fail("a")
    first.fleet.backends["c"].drift = 1.7
    first.fleet.backends["c"].backoff_until_s = clock.now + 3
    first.peers.on_sample("c", LoadSample(clock.now, waiting_requests=9))
    first.peers.tick()
    newcomer = Worker(table.handle, 5, 9, clock)
    assert newcomer.state("a") is HealthState.EJECTED
    assert newcomer.state("b") is HealthState.UNHEALTHY
    live = newcomer.fleet.backends["c"]
    assert live.drift == pytest.approx(1.7)
    assert live.backoff_until_s == clock.now + 3
    assert live.sample is not None
    assert live.sample.waiting_requests == 9
    assert live.slot == first.fleet.backends["c"].slot


def test_requests_admitted_are_summed_over_all_by_class(workers: list[Worker], table: Table) -> None:
    for worker, count in zip(workers, (1, 2, 3), strict=True):
        worker.peers.tick()
        worker.in_flight.know(["chat", "batch"])
        worker.in_flight.admit("batch")
        for _ in range(count):
            worker.in_flight.admit("chat")
    assert [worker.in_flight.by_class() for worker in workers] == [{"chat": 6, "batch": 3}] * 3
    workers[2].in_flight.give_back("chat")
    table.clear(1)
    workers[0].peers.tick()
    assert workers[0].in_flight.by_class() == {"chat": 3, "batch": 2}


def test_a_class_that_only_a_sibling_has_counts_all_the_same(workers: list[Worker]) -> None:
    for worker in workers:
        worker.peers.tick()
        worker.in_flight.know(["chat"])
    workers[0].in_flight.admit("chat")
    workers[1].in_flight.admit("removed by a reload")
    counts = workers[0].in_flight.by_class()
    assert (counts["chat"], sum(counts.values())) == (1, 2)


def test_there_is_room_for_many_classes_and_none_beyond_it_is_lost_here(workers: list[Worker]) -> None:
    names = [f"class-{number}" for number in range(CLASSES + 5)]
    for worker in workers[:2]:
        worker.peers.tick()
        worker.in_flight.know(names)
    for name in names:
        workers[0].in_flight.admit(name)
    assert sum(workers[0].in_flight.by_class().values()) == CLASSES + 5
    assert sum(workers[1].in_flight.by_class().values()) == CLASSES


def test_a_keys_limit_holds_over_all(workers: list[Worker], table: Table) -> None:
    for worker in workers:
        worker.peers.tick()
    principal = Principal("search-1", "search", max_parallel=2)
    leases = [worker.parallel.lease(principal) for worker in workers]
    leases[0].take()
    leases[1].take()
    with pytest.raises(ApiError) as refused:
        leases[2].take()
    assert refused.value.status == 429
    assert workers[2].parallel.of("search-1") == 0
    other = workers[2].parallel.lease(Principal("other", "search", max_parallel=1))
    other.take()
    leases[0].release()
    leases[2].take()
    with pytest.raises(ApiError):
        workers[0].parallel.lease(principal).take()
    table.clear(1)  # its process died, and held one
    workers[0].peers.tick()
    again = workers[0].parallel.lease(principal)
    again.take()
    for lease in (leases[2], other, again):
        lease.release()
    assert [worker.parallel.elsewhere("search-1") for worker in (workers[0], workers[2])] == [0, 0]


def test_a_removed_backend_gives_its_slot_back_with_its_last_lease(workers: list[Worker]) -> None:
    worker = workers[0]
    live = worker.fleet.backends["a"]
    slot = live.slot
    with live.lease(10):
        specs = [backend.spec for name, backend in worker.fleet.backends.items() if name != "a"]
        worker.fleet.apply(specs, RULES, HASH)
        worker.peers.tick()
        assert live.slot == slot
        assert live.books.requests == 1
    worker.peers.tick()
    assert live.slot == -1
    assert [view.spec.name for view in worker.fleet.view().backends] == ["b", "c"]
