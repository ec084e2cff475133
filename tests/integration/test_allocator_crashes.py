"""F1: the allocator is killed by SIGKILL at every write of a recall, and the recall is kept all the same.

The write is before the deed. So a kill before a write loses what was about to be decided, or what was seen; a kill
after it loses the deed. Both are done again: the jobs and the replicas must not be able to tell.
"""

import asyncio
import contextlib
import http.client
import os
import sys
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import pytest

from allocator.events import JobSubmitted, LoanRecalled, RunPlaced
from allocator.execution.local import Clocks
from tests.allocator_processes import (
    DEAF,
    FOREVER,
    GRACE_S,
    SAVES_AND_GOES,
    AllocatorProcess,
    allocator,
    document,
    python,
    sweep,
)
from tests.processes import ask, until

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="the local engine reads /proc"),
              pytest.mark.timeout(400)]
EVERY_MOMENT = "HEADRACE_TEST_EVERY_MOMENT"
"""Set: kills both before and after each write of a recall, twice the time."""
MOST_WRITES = 20
"""Of a recall, with some to spare: the test ends at the first number that is not reached."""


@pytest.fixture
def running(tmp_path: Path) -> Iterator[AllocatorProcess]:
    with allocator(tmp_path) as process:
        yield process
        process.check_journal()


def ready_again(path: Path) -> None:
    until(path.exists, "the job to be ready for its signal")
    path.unlink()


def leads(running: AllocatorProcess) -> bool:
    return running.ask("/readiness")[0] == 200


def ask_quietly(running: AllocatorProcess, path: str, body: Mapping[str, object]) -> None:
    """A request whose answer may never come."""
    with contextlib.suppress(OSError, http.client.HTTPException):
        running.ask(path, "POST", body)


@pytest.mark.parametrize("turn", (0, 1) if os.environ.get(EVERY_MOMENT) else (0,))
def test_killed_at_any_write_of_a_recall_the_recall_is_kept(running: AllocatorProcess, tmp_path: Path, turn: int
                                                            ) -> None:
    """Before one write, after the next; the other turn has the other moment of each."""
    ready = tmp_path / "ready"
    running.submit("j", python(SAVES_AND_GOES, str(ready)))
    for number in range(1, MOST_WRITES):
        moment = ("before", "after")[(number + turn) % 2]
        shown = running.await_running("j")
        (loan,) = shown["run"]["loans"]
        ready_again(ready)
        running.kill()
        running.start(f"{number}:{moment}", is_leading=False)
        died = running.died_before(partial(leads, running), "the allocator to lead")
        recalled_s = time.time()
        if not died:
            ask_quietly(running, "/v1/recall", {"target": loan})
            died = running.died_before(partial(runs_again, running, shown["attempts"]), "the next run of the job")
        if died:
            running.start()
            # Where the kill came before the recall was written, nobody was promised it.
            if not runs_again(running, shown["attempts"]) and running.job("j")["run"] is not None:
                ask_quietly(running, "/v1/recall", {"target": loan})
        began_s = running.await_serving(loan, recalled_s)
        assert began_s - recalled_s < GRACE_S, (number, moment)
        until(partial(runs_again, running, shown["attempts"]), "the next run of the job")
        assert "overdue" not in running.steps_of_loan(loan)
        assert running.job("j")["crashes"] == 0
        if not died:
            assert number > 8, "the faults never came to pass"
            return
    pytest.fail(f"a recall takes more than {MOST_WRITES} writes?")


def runs_again(running: AllocatorProcess, attempts: int) -> bool:
    found = running.job("j")
    assert found["attempts"] <= attempts + 1
    return bool(found["state"] == "running" and found["attempts"] == attempts + 1)


@pytest.mark.parametrize("number", range(1, 9))
def test_killed_at_any_write_of_a_start_the_gang_starts_once(tmp_path: Path, number: int) -> None:
    ran = tmp_path / "ran"
    body = {"name": "j", "queue": "q", "cards": ["k80"], "gang": 2,
            "command": python(f"open({str(ran)!r}, 'a').write('x')\n" + FOREVER)}
    with allocator(tmp_path) as running:
        running.kill()
        running.start(f"{number}:{('before', 'after')[number % 2]}", is_leading=False)
        if not running.died_before(partial(leads, running), "the allocator to lead"):
            ask_quietly(running, "/v1/jobs", body)
            running.died_before(lambda: running.job("j")["state"] == "running", "the start")
        if not running.is_running:
            running.start()
            ask_quietly(running, "/v1/jobs", body)      # twice at worst, and one job
        running.await_running("j")
        until(ran.exists, "the job to run")
        time.sleep(0.3)
        assert ran.read_text() == "x"
        assert len(running.live_runs()) == 1
        events = running.check_journal()
        assert sum(isinstance(event, JobSubmitted) for event in events) == 1
        assert sum(isinstance(event, RunPlaced) for event in events) == 1


def test_while_nobody_is_there_the_deadline_is_kept(running: AllocatorProcess, tmp_path: Path) -> None:
    """The allocator dies with a recall under way and stays away: the deaf job is gone in time, by its shim."""
    running.submit("deaf", python(DEAF, str(tmp_path / "ready")))
    (loan,) = running.await_running("deaf")["run"]["loans"]
    ready_again(tmp_path / "ready")
    running.recall(loan, deadline_s=4.0, emergency=True)
    until(lambda: running.loans()[loan]["state"] == "draining", "the order to be given")
    running.kill()
    until(lambda: not running.live_runs(), "the job to be gone", limit_s=8.0)
    running.start()
    running.await_home(loan)
    assert running.job("deaf")["recalls"] == 1


def test_a_restart_after_the_deadline_calls_nobody_where_the_devices_are_idle(
    running: AllocatorProcess, tmp_path: Path
) -> None:
    """The job's shim has kept the deadline. The loan is late, which is said; to be done by hand there is nothing."""
    running.submit("deaf", python(DEAF, str(tmp_path / "ready")))
    (loan,) = running.await_running("deaf")["run"]["loans"]
    ready_again(tmp_path / "ready")
    running.recall(loan, deadline_s=3.0, emergency=True)
    until(lambda: running.loans()[loan]["state"] == "draining", "the order to be given")
    running.kill()
    until(lambda: not running.live_runs(), "the job to be gone", limit_s=8.0)
    time.sleep(3.0)
    running.start()
    running.await_home(loan)
    assert "overdue" in running.steps_of_loan(loan)
    text = running.log.read_text()
    assert "are proven idle and go home once they are probed" in text
    assert "ALARM" not in text


def test_a_restart_later_than_the_deadline_is_said_and_put_right(running: AllocatorProcess, tmp_path: Path) -> None:
    """Killed between the recall's write and its order: nobody told the job. Then the alarm is raised, and it goes."""
    running.submit("deaf", python(DEAF, str(tmp_path / "ready")))
    (loan,) = running.await_running("deaf")["run"]["loans"]
    ready_again(tmp_path / "ready")
    running.kill()
    running.start("LoanRecalled:after", is_leading=False)
    running.await_leading()
    ask_quietly(running, "/v1/recall", {"target": loan, "deadline_s": 1.5, "emergency": True})
    until(lambda: not running.is_running, "the kill")
    assert isinstance(running.journal().events()[-1].event, LoanRecalled)
    time.sleep(2.0)
    running.start()
    running.await_home(loan)
    assert "overdue" in running.steps_of_loan(loan)
    assert running.steps_of_loan(loan)[-1] == "returned"
    assert "ALARM: loan" in running.log.read_text()


@pytest.mark.anyio
@pytest.mark.parametrize("jump_s", [3600.0, -3600.0])
async def test_a_wall_clock_that_jumps_by_an_hour_moves_no_deadline(tmp_path: Path, jump_s: float) -> None:
    """F6: set in the middle of a recall of a deaf job. World time is even, and so are the engine's deadlines."""
    from allocator.service.job_request import JobRequest, request_text
    from allocator.service.keeper import Note
    from allocator.service.levers import Recall, recall
    from allocator.service.service import Service, open_store
    from headrace.allocator.file import load_allocator

    process = AllocatorProcess(tmp_path, document(tmp_path))
    declared = load_allocator(process.file)
    ahead_s = [0.0]
    service = Service(declared, lambda: declared, open_store(declared), "http://here",
                      clocks=Clocks(unix_s=lambda: time.time() + ahead_s[0]))
    running = asyncio.create_task(service.run())

    async def until_true(look: object, limit_s: float = 20.0) -> None:
        end_s = time.monotonic() + limit_s
        while not look():  # type: ignore[operator]
            assert time.monotonic() < end_s, look
            await asyncio.sleep(0.02)

    try:
        await until_true(lambda: service.keeper is not None)
        keeper = service.keeper
        assert keeper is not None
        asked = JobRequest.model_validate({
            "name": "deaf", "queue": "q", "cards": ["v100"], "gang": 2, "work_unit_s": 6000.0,
            "checkpoint": {"takes_s": 0.5, "restart_s": 1.0},
            "command": python(DEAF, str(tmp_path / "ready"))})
        await keeper.record([Note(JobSubmitted(at_s=keeper.clock.now_s(), job=asked.job()), request_text(asked))])
        await until_true((tmp_path / "ready").exists)
        (loan,) = keeper.world.loans
        recalled_s = time.monotonic()
        await recall(keeper, Recall(target=loan, deadline_s=4.0, emergency=True))
        ahead_s[0] = jump_s
        await until_true(lambda: loan not in keeper.world.loans)
        assert 2.0 < time.monotonic() - recalled_s < 6.0
        assert abs(keeper.world.wall_offset_s + keeper.clock.now_s() - time.time() - jump_s) < 2.0
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        service.database.dispose()
        await asyncio.to_thread(sweep, tmp_path / "state")


def test_a_file_is_taken_over_amid_a_recall_or_not_at_all(running: AllocatorProcess, tmp_path: Path) -> None:
    """F19: a broken file and one that takes away a lent node change nothing; a right one leaves the recall as it is."""
    running.submit("deaf", python(DEAF, str(tmp_path / "ready")))
    (loan,) = running.await_running("deaf")["run"]["loans"]
    ready_again(tmp_path / "ready")
    recalled_s = time.time()
    running.recall(loan, deadline_s=6.0, emergency=True)
    before = running.get("/v1/config")["version"]
    due_s = running.loans()[loan]["due_in_s"] - (time.time() - recalled_s)

    def reloads(result: str) -> float:
        page = ask(running.url, "/metrics")[1].decode()
        return float(next(line.split()[-1] for line in page.splitlines()
                          if line.startswith(f'headrace_allocator_config_reloads_total{{result="{result}"}}')))

    running.write("version: 1\nnodes: [")
    until(lambda: reloads("refused") == 1.0, "the broken file to be refused")
    kept = dict(running.document)
    running.document["nodes"] = kept["nodes"][:1]
    running.document["backends"] = []
    running.document["supplies"] = []
    running.write()
    until(lambda: reloads("refused") == 2.0, "the file without the node to be refused")
    assert "in use; cordon it" in running.get("/v1/config")["last_reload"]["problems"][0]
    assert running.get("/v1/config")["version"] == before
    running.document = {**kept, "queues": [*kept["queues"], {"name": "another", "parent": "training"}],
                        "rules": {**kept["rules"], "grace_s": 60.0}}
    running.write()
    until(lambda: running.get("/v1/config")["version"] != before, "the right file to be taken over")
    assert {queue["queue"] for queue in running.get("/v1/quota")["queues"]} == {"q", "another"}
    if loan in running.loans():
        assert running.loans()[loan]["due_in_s"] <= due_s
    assert running.await_serving(loan, recalled_s) - recalled_s < 8.0
    assert "overdue" not in running.steps_of_loan(loan)

