"""The store on a real PostgreSQL, and two allocators on it: the leader is killed in the middle of a recall."""

import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import Engine, text

from allocator.apply import apply
from allocator.events import JobSubmitted
from allocator.store.journal import Entry, Journal
from allocator.store.leadership import Candidate, Deposed, renew
from allocator.store.schema import StoreError, open_database
from tests.allocator_processes import (
    DEAF,
    FOREVER,
    GRACE_S,
    SAVES_AND_GOES,
    AllocatorProcess,
    document,
    python,
    sweep,
)
from tests.allocator_stores import a_past, a_reading, lead, postgres, postgres_folder, write
from tests.allocator_worlds import a_job
from tests.processes import free_port, until

pytestmark = [pytest.mark.skipif(postgres_folder() is None, reason="no PostgreSQL programs (apt install postgresql)"),
              pytest.mark.skipif(sys.platform != "linux", reason="the local engine reads /proc"),
              pytest.mark.timeout(240)]
LEASE_S = 2.0


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    pytest.importorskip("psycopg", reason="needs the extra `postgres`")
    with postgres() as url:
        yield url


@pytest.fixture
def url(server: str) -> str:
    """A database of the test's own."""
    name = f"test_{time.monotonic_ns()}"
    admin = open_database(server)
    with admin.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    admin.dispose()
    return server.rpartition("/")[0] + f"/{name}"


@pytest.fixture
def database(url: str) -> Iterator[Engine]:
    engine = open_database(url)
    yield engine
    engine.dispose()


@pytest.mark.parametrize("seed", range(3))
def test_every_prefix_of_the_journal_gives_the_world_of_its_moment(database: Engine, seed: int) -> None:
    past = a_past(seed, 15)
    journal = Journal(database, snapshot_every=7)
    seqs = write(journal, lead(database), past)
    for seq, world in zip(seqs, past.worlds, strict=True):
        assert journal.world_at(seq) == world
    restored = Journal(database).restore(lead(database), lambda: past.first)
    assert (restored.world, restored.reading) == (past.worlds[-1], a_reading(past.worlds[-1].now_s))


def test_a_deposed_leader_cannot_write_even_while_its_successor_does(database: Engine) -> None:
    """The fence is in the transaction: it waits for the successor's to end, and then finds the term gone."""
    past = a_past(2, 6)
    journal, first = Journal(database), lead(database, "a")
    seqs = write(journal, first, past)
    event = JobSubmitted(at_s=1e6, job=a_job("late"))
    after = apply(past.worlds[-1], event)
    with ThreadPoolExecutor(1) as pool:
        with database.begin() as connection:
            connection.execute(text("UPDATE headrace_leader SET term = term + 1, holder = 'b'"))
            writing = pool.submit(journal.append, first, seqs[-1], [Entry(event)], a_reading(), after)
            time.sleep(0.3)
            assert not writing.done()
        with pytest.raises(Deposed, match="b has term 2"):
            writing.result(20)
    with pytest.raises(Deposed):
        renew(database, first)
    assert journal.world_at(10**9) == past.worlds[-1]


def test_two_candidates_at_once_get_one_term(database: Engine) -> None:
    candidates = [Candidate(database, name, 0.0, holder=name) for name in ("a", "b", "c", "d")]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(10):
            terms = [term.number for term in pool.map(Candidate.try_to_lead, candidates) if term is not None]
            assert len(set(terms)) == len(terms)


def test_a_server_that_is_gone_is_a_store_error() -> None:
    pytest.importorskip("psycopg", reason="needs the extra `postgres`")
    with postgres() as url:
        engine = open_database(url)
        term = lead(engine)
    with pytest.raises(StoreError):
        renew(engine, term)
    with pytest.raises(StoreError):
        Journal(engine).events()
    engine.dispose()


class Pair:
    """Two allocators on one database and one execution engine; either may lead."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        base = document(folder, store={"url_env": "HEADRACE_DATABASE_URL", "lease_s": LEASE_S})
        self.all = []
        for name in ("first", "second"):
            process = AllocatorProcess(folder, {**base, "listen": {"port": free_port()}}, log=f"{name}.log")
            process.environment = {"HEADRACE_DATABASE_URL": url}
            self.all.append(process)

    def other(self, process: AllocatorProcess) -> AllocatorProcess:
        return self.all[1 - self.all.index(process)]

    def leader(self) -> AllocatorProcess:
        return next(process for process in self.all if process.is_running and process.ask("/readiness")[0] == 200)


@pytest.fixture
def pair(tmp_path: Path, url: str) -> Iterator[Pair]:
    pair = Pair(tmp_path, url)
    try:
        with contextlib.ExitStack() as running:
            for index, process in enumerate(pair.all):
                running.callback(process.close)
                process.start(is_leading=index == 0)
            yield pair
    finally:
        sweep(tmp_path / "state")


def lent(pair: Pair, name: str, program: str) -> str:
    leader = pair.leader()
    ready = pair.folder / f"{name}.ready"
    leader.submit(name, python(program, str(ready)))
    (loan,) = leader.await_running(name)["run"]["loans"]
    until(ready.exists, "the job to be ready for its signal")
    return str(loan)


def test_the_leader_is_killed_amid_a_recall_and_the_follower_keeps_it(pair: Pair, url: str) -> None:
    loan = lent(pair, "deaf", DEAF)
    leader, follower = pair.leader(), pair.other(pair.leader())
    status, found = follower.ask("/v1/jobs")
    assert status == 503
    assert found["error"]["leader"] == leader.url
    recalled_s = time.time()
    leader.recall(loan, deadline_s=8.0, emergency=True)
    until(lambda: leader.loans()[loan]["state"] == "draining", "the order to be given")
    leader.kill()
    follower.await_leading(limit_s=4.0 * LEASE_S)
    assert follower.loans()[loan]["due_in_s"] <= 8.0 - (time.time() - recalled_s) + 0.5
    began_s = follower.await_serving(loan, recalled_s)
    assert began_s - recalled_s < 10.0
    assert "overdue" not in follower.steps_of_loan(loan)
    assert follower.job("deaf")["recalls"] == 1
    with contextlib.closing(_Closing(url)) as closing:
        assert {one.term for one in closing.journal.events()} == {1, 2}


class _Closing:
    def __init__(self, url: str) -> None:
        self._engine = open_database(url)
        self.journal = Journal(self._engine)

    def close(self) -> None:
        self._engine.dispose()


def test_a_leader_that_freezes_is_succeeded_and_writes_nothing_when_it_thaws(pair: Pair, url: str) -> None:
    """SIGSTOP: its connections stay open, so only the missing pulse tells. When it goes on, it finds itself deposed."""
    loan = lent(pair, "j", SAVES_AND_GOES)
    leader, follower = pair.leader(), pair.other(pair.leader())
    leader.send_signal(signal.SIGSTOP)
    try:
        follower.await_leading(limit_s=10.0 * LEASE_S)
        recalled_s = time.time()
        follower.recall(loan)
        follower.await_serving(loan, recalled_s, limit_s=GRACE_S)
    finally:
        leader.send_signal(signal.SIGCONT)
    until(lambda: leader.ask("/readiness")[0] == 503, "the old leader to notice")
    status, found = leader.ask("/v1/recall", "POST", {"target": "inference"})
    assert (status, found["error"]["code"]) == (503, "not_leading")
    with contextlib.closing(_Closing(url)) as closing:
        terms = [one.term for one in closing.journal.events()]
    assert terms == sorted(terms)
    follower.await_running("j")


def test_a_leader_that_leaves_in_order_is_succeeded_at_once(pair: Pair) -> None:
    lent(pair, "j", SAVES_AND_GOES + FOREVER)
    leader, follower = pair.leader(), pair.other(pair.leader())
    leader.send_signal(signal.SIGTERM)
    follower.await_leading(limit_s=LEASE_S * 4.0)
    assert leader.process is not None
    assert leader.process.wait(20) == 0
    assert follower.job("j")["attempts"] == 1
