"""The journal, its snapshots, its history, and who may write: on SQLite here, on PostgreSQL in tests/integration."""

import sqlite3
from dataclasses import replace
from pathlib import Path
from random import Random

import msgspec
import pytest
from sqlalchemy import Engine, update

from allocator.apply import apply, replay
from allocator.clock import resumed
from allocator.events import JobSubmitted, RunPlaced
from allocator.loan.states import LoanState
from allocator.store import schema
from allocator.store.audit import faults
from allocator.store.history import JobPhase, Move, What, moves
from allocator.store.journal import Entry, Journal, subject_of
from allocator.store.leadership import Candidate, Deposed, Term, current, is_gone, renew, resign, this_process
from allocator.store.schema import StoreError, open_database
from allocator.store.snapshot import BadSnapshot, from_bytes, to_bytes
from tests.allocator_stores import a_past, a_reading, lead, write
from tests.allocator_worlds import a_job, a_node, a_stage, lent_stage


def sqlite(folder: Path, name: str = "a.db") -> Engine:
    return open_database(f"sqlite:///{folder / name}")


@pytest.mark.parametrize("seed", range(8))
def test_any_world_survives_its_snapshot(seed: int) -> None:
    for world in a_past(seed, 25).worlds:
        assert from_bytes(to_bytes(world)) == world


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x80", to_bytes(a_past(1, 1).worlds[-1])[:-7]])
def test_bytes_without_a_world_are_refused(data: bytes) -> None:
    with pytest.raises(BadSnapshot):
        from_bytes(data)


@pytest.mark.parametrize("seed", range(6))
def test_every_prefix_of_the_journal_gives_the_world_of_its_moment(tmp_path: Path, seed: int) -> None:
    past, database = a_past(seed, 20), sqlite(tmp_path)
    journal = Journal(database, snapshot_every=7)
    seqs = write(journal, lead(database), past)
    for seq, world in zip(seqs, past.worlds, strict=True):
        assert journal.world_at(seq) == world
    restored = Journal(database).restore(lead(database), lambda: pytest.fail("the journal is not new"))
    assert (restored.world, restored.seq) == (past.worlds[-1], seqs[-1])
    assert restored.reading == a_reading(past.worlds[-1].now_s)


def test_a_snapshot_that_cannot_be_read_costs_time_and_nothing_else(tmp_path: Path) -> None:
    past, database = a_past(3, 20), sqlite(tmp_path)
    write(Journal(database, snapshot_every=5), lead(database), past)
    with database.begin() as connection:
        connection.execute(update(schema.snapshots).where(schema.snapshots.c.seq > 0).values(world=b"rust"))
    assert Journal(database).restore(lead(database), lambda: past.first).world == past.worlds[-1]
    with database.begin() as connection:
        connection.execute(update(schema.snapshots).values(world=b"rust"))
    with pytest.raises(StoreError, match="use the version of Headrace that wrote it"):
        Journal(database).restore(lead(database), lambda: past.first)


def test_old_snapshots_go_and_the_first_stays(tmp_path: Path) -> None:
    past, database = a_past(5, 30), sqlite(tmp_path)
    seqs = write(Journal(database, snapshot_every=3), lead(database), past)
    with sqlite3.connect(tmp_path / "a.db") as connection:
        kept = [row[0] for row in connection.execute("select seq from headrace_snapshots order by seq")]
    connection.close()
    assert kept[0] == 0
    assert len(kept) == 4
    assert kept[-1] > seqs[-1] - 40


def test_what_a_deposed_leader_writes_is_refused_in_the_same_transaction(tmp_path: Path) -> None:
    past, database = a_past(2, 6), sqlite(tmp_path)
    journal = Journal(database)
    first = lead(database, "a")
    seqs = write(journal, first, past)
    second = lead(database, "b")
    event = JobSubmitted(at_s=1e6, job=a_job("late"))
    after = apply(past.worlds[-1], event)
    with pytest.raises(Deposed, match="b has term 2"):
        journal.append(first, seqs[-1], [Entry(event)], a_reading(), after)
    with pytest.raises(Deposed):
        journal.restore(first, lambda: past.first)
    with pytest.raises(Deposed):
        renew(database, first)
    assert journal.world_at(10**9) == past.worlds[-1]
    assert journal.append(second, seqs[-1], [Entry(event)], a_reading(), after) == seqs[-1] + 1


def test_a_writer_that_is_behind_is_refused(tmp_path: Path) -> None:
    """The same term twice would be a fault of ours; the journal does not take a second event of one number."""
    past, database = a_past(2, 6), sqlite(tmp_path)
    journal, term = Journal(database), lead(database)
    seqs = write(journal, term, past)
    event = JobSubmitted(at_s=1e6, job=a_job("late"))
    with pytest.raises(Deposed, match="is in the journal already"):
        journal.append(term, seqs[-2], [Entry(event)], a_reading(), past.worlds[-1])
    assert journal.world_at(10**9) == past.worlds[-1]


def test_a_candidate_waits_for_a_silence_on_its_own_clock(tmp_path: Path) -> None:
    database = sqlite(tmp_path)
    clock_s = [0.0]
    alive = this_process()
    first = Candidate(database, "http://a", 5.0, holder=alive).try_to_lead()
    assert first == Term(1, alive)
    other = Candidate(database, "http://b", 5.0, holder="elsewhere", monotonic_s=lambda: clock_s[0])
    assert other.try_to_lead() is None
    clock_s[0] = 4.9
    assert other.try_to_lead() is None
    renew(database, first)
    clock_s[0] = 9.0        # the pulse was seen anew only now
    assert other.try_to_lead() is None
    clock_s[0] = 13.9
    assert other.try_to_lead() is None
    assert current(database).url == "http://a"
    clock_s[0] = 14.0
    assert other.try_to_lead() == Term(2, "elsewhere")
    with pytest.raises(Deposed):
        renew(database, first)


def test_who_resigned_or_is_gone_is_succeeded_at_once(tmp_path: Path) -> None:
    database = sqlite(tmp_path)
    host, boot, namespace, pid, started = this_process().split("/")
    gone = "/".join((host, boot, namespace, pid, str(int(started) - 1)))     # the same id, another process
    for holder, is_over in ((gone, True), ("/".join((host, boot, "4026", pid, "1")), False),
                            ("/".join((host, "other boot", namespace, pid, "1")), False),
                            (this_process(), False), ("nonsense", False)):
        assert is_gone(holder) is is_over, holder
    lead(database, gone)
    second = Candidate(database, "http://b", 1e9, holder="b").try_to_lead()
    assert second == Term(2, "b")
    assert Candidate(database, "http://c", 1e9, holder="c").try_to_lead() is None
    resign(database, second)
    assert current(database).holder == ""
    assert Candidate(database, "http://c", 1e9, holder="c").try_to_lead() == Term(3, "c")
    resign(database, second)        # too late to mean anything
    assert current(database).holder == "c"


def test_two_candidates_never_get_one_term(tmp_path: Path) -> None:
    database = sqlite(tmp_path)
    rng = Random(1)
    terms = []
    for _ in range(50):
        holder = rng.choice("ab")
        term = Candidate(database, holder, 0.0, holder=holder).try_to_lead()
        terms += [term.number] if term else []
    assert terms == sorted(set(terms))


def test_the_history_of_a_loan_and_its_job_is_the_moves_of_both() -> None:
    stage = lent_stage(replicas=1, gang=4)
    found: list[Move] = []
    world = stage.first
    for event in stage.journal:
        after = apply(world, event)
        found += moves(world, event, after)
        world = after
    assert [(move.was, move.became) for move in found if move.what is What.LOAN] == [
        ("", "offered"), ("offered", "lent")]
    job = [move for move in found if move.what is What.JOB]
    assert [(move.was, move.became) for move in job] == [
        ("", JobPhase.WAITING), (JobPhase.WAITING, JobPhase.STARTING), (JobPhase.STARTING, JobPhase.RUNNING)]
    assert job[1].figures["wait_s"] == 10.0
    assert job[1].figures["gang"] == 4
    assert [move.reason for move in job] == ["job_submitted", "claim_ready", "run_started"]


def test_a_recall_is_told_with_its_time_and_a_stopped_run_with_its_loss() -> None:
    stage = lent_stage(replicas=1, gang=4, checkpoint=None)
    before = stage.world
    stage.now_s = 100.0
    stage.supply(0)
    stage.tick()
    stage.now_s = 120.0
    stage.leave()
    stage.obey()
    found: list[Move] = []
    for event in stage.journal:
        if event.at_s >= 100.0:
            after = apply(before, event)
            found += moves(before, event, after)
            before = after
    loans = [move for move in found if move.what is What.LOAN]
    assert loans[0].became == LoanState.RECALL_REQUESTED
    assert loans[0].figures["recall_reason"] == "slack_negative"
    assert loans[-1].became == LoanState.RETURNED
    assert loans[-1].figures["recall_s"] == 20.0
    assert loans[-1].figures["was_overdue"] is False
    (stopped,) = [move for move in found if move.became == JobPhase.WAITING]
    assert stopped.figures["lost_unit_s"] == pytest.approx(4 * 110.0)       # four V100 for 110 s, no checkpoint
    assert stopped.figures["stopped_for"] == "loan_recalled"


def test_a_finished_job_has_a_completion_time_and_no_loss() -> None:
    stage = a_stage(a_node("n0"))
    stage.submit_and_tick(a_job("j"))
    stage.now_s = 30.0
    stage.obey()
    before = len(stage.journal)
    world = replay(stage.first, stage.journal)
    stage.now_s = 60.0
    stage.ends("j")
    found: list[Move] = []
    for event in stage.journal[before:]:
        after = apply(world, event)
        found += moves(world, event, after)
        world = after
    assert found[-1].became == JobPhase.COMPLETED
    assert found[-1].figures["jct_s"] == 60.0
    assert found[-1].figures["lost_unit_s"] == 0.0


def test_history_and_attachments_come_back_from_the_database(tmp_path: Path) -> None:
    database = sqlite(tmp_path)
    journal, term = Journal(database), lead(database)
    stage = a_stage(a_node("n0"))
    seq = journal.restore(term, lambda: stage.world).seq
    for number in range(3):
        event = JobSubmitted(at_s=float(number), job=a_job(f"j{number}"))
        after = apply(stage.world, event)
        entry = Entry(event, tuple(moves(stage.world, event, after)), f"text {number}")
        seq = journal.append(term, seq, [entry], a_reading(float(number)), after)
        stage.world = after
    assert journal.attached("j1") == [("job_submitted", "text 1")]
    assert journal.attached("nobody") == []
    assert [move.name for move in journal.history(What.JOB)] == ["j0", "j1", "j2"]
    assert [move.name for move in journal.history(What.JOB, limit=2)] == ["j1", "j2"]
    (one,) = journal.history(What.JOB, name="j2")
    assert (one.became, one.wall_s) == ("waiting", 1e9 + 2.0)
    assert journal.history(What.LOAN) == []
    assert [one.attached for one in journal.events(1)] == ["text 1", "text 2"]


def test_each_event_is_filed_under_the_job_or_loan_that_it_is_about() -> None:
    stage = lent_stage(replicas=1, gang=4)
    subjects = {type(event).__name__: subject_of(event) for event in stage.journal}
    assert subjects["JobSubmitted"] == "j"
    assert subjects["RunPlaced"] == "j"
    assert subjects["RunStarted"] == "j"
    assert subjects["ClaimMade"] == "j"
    assert subjects["LoanOffered"] == "i0-0"
    assert subjects["ClockRead"] == ""


@pytest.mark.parametrize(("url", "said"), [
    ("nonsense", "is not a URL such as"), ("mysql://root:secret@host/x", "mysql database cannot be the store"),
    ("sqlite:////proc/none/a.db", "unable to open database file"),
    ("postgresql://u:secret@127.0.0.1:9/x", "127.0.0.1"), ("", "is not a URL such as"),
])
def test_a_database_that_cannot_be_had_is_said_plainly_and_without_its_password(url: str, said: str) -> None:
    with pytest.raises(StoreError, match=said) as failed:
        open_database(url)
    assert "secret" not in str(failed.value)


def test_tables_of_another_format_are_left_alone(tmp_path: Path) -> None:
    with sqlite(tmp_path).begin() as connection:
        connection.execute(update(schema.leader).values(format=99))
    with pytest.raises(StoreError, match="format 99, this program writes format 1"):
        sqlite(tmp_path)


def test_commits_of_sqlite_are_on_the_disk(tmp_path: Path) -> None:
    with sqlite(tmp_path).connect() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar_one() == "wal"
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar_one() == 2


def test_the_file_is_for_its_owner_alone(tmp_path: Path) -> None:
    past, database = a_past(1, 3), sqlite(tmp_path)
    write(Journal(database), lead(database), past)
    assert {path.name: path.stat().st_mode & 0o077 for path in tmp_path.iterdir()} == {
        "a.db": 0, "a.db-wal": 0, "a.db-shm": 0}


def test_world_time_goes_on_from_the_last_write(tmp_path: Path) -> None:
    """A wall clock set back by an hour lengthens no deadline; within one boot the even clock stands."""
    past, database = a_past(1, 5), sqlite(tmp_path)
    write(Journal(database), lead(database), past)
    last = Journal(database).restore(lead(database), lambda: past.first).reading
    assert last is not None
    assert resumed(last, last.wall_s - 3600.0, last.boot_s + 7.0, "this boot").world_s == last.world_s + 7.0
    assert resumed(last, last.wall_s + 3600.0, 3.0, "another boot").world_s == last.world_s + 3600.0


def test_an_audit_finds_nothing_in_a_sound_journal_and_names_what_is_wrong(tmp_path: Path) -> None:
    stage, database = lent_stage(), sqlite(tmp_path)
    journal, term = Journal(database), lead(database)
    seq = journal.restore(term, lambda: stage.first).seq
    entries = [Entry(event) for event in stage.journal]
    seq = journal.append(term, seq, entries, a_reading(), stage.world)
    assert list(faults(journal)) == []

    (placed,) = [event for event in stage.journal if isinstance(event, RunPlaced)]
    twice = JobSubmitted(at_s=20.0, job=stage.world.jobs["j"].job)
    other = JobSubmitted(at_s=20.0, job=a_job("other", cards=("k80",)))
    world = apply(stage.world, other)
    run = replace(placed.run, id="other.99", job="other", epoch=world.epoch + 1, card="k80", devices=("t0:0",),
                  gang_min=1)
    unfounded = RunPlaced(at_s=20.0, run=run, why=msgspec.structs.replace(placed.why, config="another"))
    journal.append(term, seq, [Entry(twice), Entry(other), Entry(unfounded)], a_reading(20.0), world)
    found = [str(fault) for fault in faults(journal)]
    assert len(found) == 2
    assert "JobSubmitted: is written, but changes nothing: job j is there already" in found[0]
    assert "RunPlaced: I15 RunPlaced names other versions than those in force" in found[1]
