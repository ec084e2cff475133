"""The service in this process: doubtful writes, an engine that cannot tell, shrinking, orders that come late."""

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from allocator.effects import EffectKind, outstanding
from allocator.events import JobCancelled, JobSubmitted, RunPlaced, StopOrdered
from allocator.execution.engine import EngineUnreachable
from allocator.execution.local import LocalEngine
from allocator.execution.values import Launch, Member, Report
from allocator.model.inventory import Condition
from allocator.model.world import World
from allocator.plan import Plan, plan
from allocator.service import reconcile
from allocator.service.acting import Acting
from allocator.service.config import Declared
from allocator.service.job_request import JobRequest, request_text
from allocator.service.keeper import Keeper, Note
from allocator.service.levers import Recall, recall
from allocator.service.service import Service, open_store
from allocator.store.history import What
from allocator.store.journal import Journal
from allocator.store.leadership import Deposed
from allocator.store.schema import StoreError
from headrace.allocator.file import load_allocator
from tests.allocator_processes import (
    FOREVER,
    QUICK,
    SAVES_AND_GOES,
    TRAINING_NODE,
    AllocatorProcess,
    document,
    python,
    sweep,
)
from tests.allocator_stores import lead

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="the local engine reads /proc"), pytest.mark.anyio]


class Stand:
    """A service in this loop, and what a test does with it."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        process = AllocatorProcess(folder, document(folder, **changes))
        self.file = process.file
        self.declared: Declared = load_allocator(self.file)
        self.service = Service(self.declared, lambda: self.declared, open_store(self.declared), "http://here")
        self.running = asyncio.create_task(self.service.run())

    @property
    def keeper(self) -> Keeper:
        assert self.service.keeper is not None
        return self.service.keeper

    async def until(self, look: Callable[[], Any], what: str, limit_s: float = 20.0) -> None:
        end_s = asyncio.get_running_loop().time() + limit_s
        while not look():
            assert not self.running.done(), self.running
            assert asyncio.get_running_loop().time() < end_s, f"waited in vain for {what}"
            await asyncio.sleep(0.02)

    async def leads(self) -> Keeper:
        await self.until(lambda: self.service.keeper is not None, "the service to lead")
        return self.keeper

    async def submit(self, name: str, **given: Any) -> None:
        request = JobRequest.model_validate({
            "name": name, "queue": "q", "cards": ["k80"], "gang": 2, "command": python(FOREVER), "work_unit_s": 6000.0,
            **given})
        outcome = await self.keeper.record(
            [Note(JobSubmitted(at_s=self.keeper.clock.now_s(), job=request.job()), request_text(request))])
        assert outcome.refused == ()

    def phase(self, job: str) -> str:
        state = self.keeper.world.jobs.get(job)
        run = self.keeper.world.runs.get(state.run) if state and state.run else None
        return run.phase.value if run else "waiting" if state else "over"

    async def close(self) -> None:
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        self.service.database.dispose()


@pytest.fixture
async def stand(tmp_path: Path) -> AsyncIterator[Stand]:
    stand = Stand(tmp_path)
    try:
        await stand.leads()
        yield stand
    finally:
        await stand.close()
        await asyncio.to_thread(sweep, tmp_path / "state")


async def test_a_stop_is_not_lost_in_a_term_that_ends_badly(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store fails while the term is being closed for a stop: the allocator stops, and begins no other term."""
    async def failing(self: Acting) -> None:
        raise StoreError("the disk is full")

    monkeypatch.setattr(Acting, "close", failing)
    stand.running.cancel()
    await asyncio.wait({stand.running}, timeout=20.0)
    assert stand.running.cancelled()


async def test_a_write_that_fails_ends_the_term_and_the_next_one_knows_what_was_written(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full, or the network gone: nothing is taken over that is not in the journal."""
    keeper = stand.keeper
    append = Journal.append
    failing = [True]

    def fail_once(self: Journal, *arguments: Any) -> int:
        if failing.pop() if failing else False:
            raise StoreError("disk full")
        return append(self, *arguments)

    monkeypatch.setattr(Journal, "append", fail_once)
    before = keeper.world
    with pytest.raises(StoreError, match="disk full"):
        await stand.submit("j")
    # A tick whose write was under way may have moved the clocks meanwhile.
    assert replace(keeper.world, version=before.version, now_s=before.now_s,
                   wall_offset_s=before.wall_offset_s) == before
    await stand.submit("j")
    await stand.until(lambda: stand.phase("j") == "running", "the job to run")


async def test_a_store_that_fails_in_the_loop_makes_it_lead_anew(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    first = stand.keeper
    append = Journal.append
    failures = [3]

    def fail(self: Journal, *arguments: Any) -> int:
        if failures[0]:
            failures[0] -= 1
            raise StoreError("the server went away")
        return append(self, *arguments)

    await stand.submit("j")
    monkeypatch.setattr(Journal, "append", fail)
    await stand.until(lambda: failures[0] == 0 and stand.service.keeper not in (None, first), "the next term")
    # The term that the last failure ends may still be seen for a moment.
    await stand.until(lambda: stand.service.keeper is not None and stand.phase("j") == "running", "the job to run")
    assert stand.keeper.term.number > first.term.number


async def test_a_deposed_keeper_takes_nothing_over(stand: Stand) -> None:
    keeper = stand.keeper
    await asyncio.to_thread(lead, stand.service.database, "usurper")
    with pytest.raises(Deposed):
        await keeper.record([JobSubmitted(at_s=1.0, job=JobRequest.model_validate({
            "name": "late", "queue": "q", "cards": ["k80"], "command": ["true"]}).job())])
    assert "late" not in keeper.world.jobs
    await stand.until(lambda: stand.service.keeper is not keeper, "the service to notice")


async def test_a_caller_that_goes_away_leaves_no_half_taken_write(stand: Stand) -> None:
    keeper = stand.keeper
    for number in range(20):
        request = JobRequest.model_validate({"name": f"j{number}", "queue": "q", "cards": ["k80"], "gang": 9,
                                             "command": ["true"]})
        task = asyncio.create_task(keeper.record([JobSubmitted(at_s=keeper.clock.now_s(), job=request.job())]))
        await asyncio.sleep(0.0005 * number)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await keeper.record([])     # in line behind the last of them
    assert await asyncio.to_thread(keeper.journal.world_at, 10**9) == keeper.world


async def test_an_elastic_run_on_a_recalled_replica_saves_and_starts_again_smaller(tmp_path: Path) -> None:
    """No engine takes devices from a running gang, so the service has the whole run go, as a recall and no crash."""
    # The job before it needs both replicas, and leaves them lent.
    stand = Stand(tmp_path, supplies=[{"pool": "inference", "card": "v100", "lendable": 2, "spare": 2}],
                  rules={**QUICK, "idle_return_s": 300.0})
    try:
        await stand.leads()
        await stand.submit("wide", cards=["v100"], gang={"min": 3, "max": 4}, checkpoint={"restart_s": 1.0},
                           kind="finetune")
        await stand.until(lambda: stand.phase("wide") == "running", "the job to run")
        await stand.keeper.record([JobCancelled(at_s=stand.keeper.clock.now_s(), job="wide")])
        await stand.until(lambda: stand.phase("wide") == "over", "the job to be gone")
        await stand.submit("elastic", cards=["v100"], gang={"min": 1, "max": 4}, checkpoint={"restart_s": 1.0})
        await stand.until(lambda: stand.phase("elastic") == "running", "the elastic job to run")
        world = stand.keeper.world
        run = world.runs[world.jobs["elastic"].run or ""]
        loans = sorted({world.loaned[device] for device in run.devices})
        assert len(loans) == 2
        await recall(stand.keeper, Recall(target=loans[0]))
        await stand.until(lambda: loans[0] not in stand.keeper.world.loans, "the return")
        events = await asyncio.to_thread(lambda: [one.event for one in stand.keeper.journal.events()])
        stopped = [event for event in events if isinstance(event, StopOrdered) and event.run == run.id]
        assert "cannot shrink a gang" in stopped[0].why.detail
        assert stand.keeper.world.jobs["elastic"].crashes == 0
    finally:
        await stand.close()
        await asyncio.to_thread(sweep, tmp_path / "state")


async def test_what_comes_while_a_plan_is_made_is_answered_and_planned_for(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planner thinks beside the loop: a cancellation meanwhile is taken at once, and its start is refused."""
    planning, go_on = threading.Event(), threading.Event()

    def slow(world: World, now_s: float) -> Plan:
        found = plan(world, now_s)
        if any(isinstance(event, RunPlaced) for event in found.events):
            planning.set()
            assert go_on.wait(20.0)
        return found

    monkeypatch.setattr(reconcile, "plan", slow)
    await stand.submit("gone")
    await stand.until(planning.is_set, "a plan with a start in it")
    await stand.keeper.record([JobCancelled(at_s=stand.keeper.clock.now_s(), job="gone")])
    await stand.submit("next")
    assert stand.phase("gone") == "over", "the loop waited for the planner"
    go_on.set()
    await stand.until(lambda: stand.phase("next") == "running", "what was planned again")
    events = await asyncio.to_thread(lambda: [one.event for one in stand.keeper.journal.events()])
    assert [event.run.job for event in events if isinstance(event, RunPlaced)] == ["next"]


async def test_a_checkpoint_that_the_reports_missed_is_not_lost(
    stand: Stand, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The proof that a device is free may be newer than the run's last report: its last word is asked for."""
    await stand.submit("j", command=python(SAVES_AND_GOES, str(tmp_path / "ready")), checkpoint={"linger_s": 0.5})
    await stand.until((tmp_path / "ready").exists, "the job to be ready")
    await stand.until(lambda: stand.phase("j") == "running", "the job to run")
    seen = await stand.service.engine().adopt()

    async def late(_: LocalEngine) -> tuple[Report, ...]:
        return seen

    monkeypatch.setattr(LocalEngine, "adopt", late)
    await stand.keeper.record([JobCancelled(at_s=stand.keeper.clock.now_s(), job="j")])
    await stand.until(lambda: stand.phase("j") == "over", "the job to be over")
    _, saved = await stand.keeper.request_of("j")
    assert saved is not None
    assert (saved.resume_from, saved.step) == ("/seven", 7)


async def test_an_engine_that_cannot_tell_anything_leaves_everything_as_it_is(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F14: /proc cannot be read, or a remote engine is down."""
    await stand.submit("j")
    await stand.until(lambda: stand.phase("j") == "running", "the job to run")

    async def unreachable(_: LocalEngine) -> tuple[Report, ...]:
        raise EngineUnreachable("no answer")

    monkeypatch.setattr(LocalEngine, "adopt", unreachable)
    run = next(iter(stand.keeper.world.runs))
    await stand.until(lambda: stand.keeper.world.runs[run].unreachable, "the run to be out of reach")
    await asyncio.sleep(0.5)
    assert stand.phase("j") == "running"
    monkeypatch.undo()
    await stand.until(lambda: not stand.keeper.world.runs[run].unreachable, "the run to be in reach")


async def test_a_device_that_carries_a_stranger_is_set_aside_until_it_is_gone(stand: Stand, tmp_path: Path) -> None:
    """The world believes it idle, the process table does not: the start fails, the device waits in quarantine."""
    name = f"{TRAINING_NODE}:0"
    device = stand.declared.device_of[name]
    other = LocalEngine(tmp_path / "elsewhere")         # another program that marks its processes as we do
    await other.start(Launch("stranger", 1, (Member(tuple(python(FOREVER)), (device,)),)))
    try:
        await stand.submit("j")
        await stand.until(lambda: stand.keeper.world.conditions.get(name) is Condition.QUARANTINED, "the quarantine")
    finally:
        await other.kill("stranger", 1)
    await stand.until(lambda: stand.phase("j") == "running", "the job to run once the device is free")
    history = await asyncio.to_thread(lambda: stand.keeper.journal.history(What.JOB, name="j"))
    assert any("carries run stranger" in move.figures.get("detail", "") for move in history)


async def test_a_replica_whose_engine_dies_is_started_again(
    stand: Stand, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = stand.service.engine()
    began = tmp_path / "chat-0.began"
    await stand.until(lambda: began.exists(), "the replica")

    async def serving() -> list[str]:
        return [report.run_id for report in await engine.adopt()
                if report.run_id.startswith("serve-chat-0-") and not report.ended]

    (run,) = await serving()
    await engine.kill(run, 1)
    await stand.until(lambda: len(began.read_text().split()) == 2, "its second start")
    assert len(await serving()) == 1
    assert run not in await serving()
    said = [record.getMessage() for record in caplog.records if "ended by itself" in record.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("the engine of chat-0 ended by itself: ")
    assert said[0].endswith(f"its output is in {tmp_path}/state/runs/{run}/log-0")


async def test_old_records_are_cleared_away_and_the_latest_are_kept(tmp_path: Path) -> None:
    stand = Stand(tmp_path, execution={"poll_s": 0.05, "keep_runs": 2}, backends=[], supplies=[])
    try:
        await stand.leads()
        for number in range(5):
            await stand.submit(f"j{number}", command=["true"])
        await stand.until(lambda: not stand.keeper.world.jobs, "all jobs to be over")
        runs = tmp_path / "state" / "runs"
        await stand.until(lambda: len(list(runs.iterdir())) == 2, "the old records to go")
        events = await asyncio.to_thread(lambda: [one.event for one in stand.keeper.journal.events()])
        latest = sorted(event.run.epoch for event in events if isinstance(event, RunPlaced))[-2:]
        assert sorted(int(path.name.rpartition(".")[2]) for path in runs.iterdir()) == latest
    finally:
        await stand.close()
        await asyncio.to_thread(sweep, tmp_path / "state")


async def test_once_all_is_done_nothing_is_outstanding_and_nothing_is_written(stand: Stand) -> None:
    """P57: a quiet cluster writes nothing, tick after tick."""
    await stand.submit("j", command=["true"])
    await stand.until(lambda: "j" not in stand.keeper.world.jobs, "the job to be done")
    await stand.until(lambda: all(backend.state.value == "serving" for backend in stand.keeper.world.backends.values()),
                      "the replicas to serve")
    assert [effect for effect in outstanding(stand.keeper.world) if effect.kind is not EffectKind.ALARM] == []
    before = stand.keeper.seq
    await asyncio.sleep(1.0)
    assert stand.keeper.seq == before
