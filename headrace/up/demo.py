"""`headrace up --demo lending`: a wave of traffic, a loan in its trough and the recall before its crest, live.

The gateway serves, an allocator of its own (`allocator.service`, its journal in the run folder) lends, and a training
job waits for a card. Nothing is staged: the router learns the wave and says what it can spare, the allocator borrows
and is told to give back, and callers must not notice. At the end there is one account of all that; it is fine where no
request failed, P99 kept its budgets, and a replica was lent and came back.
"""

import asyncio
import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from allocator.events import JobCancelled, JobSubmitted
from allocator.execution.engine import ExecutionEngine
from allocator.execution.local import LocalEngine
from allocator.lender.router_lender import RouterAdmin, RouterLender
from allocator.service.config import Declared
from allocator.service.job_request import JobRequest, request_text
from allocator.service.keeper import Keeper, Note
from allocator.service.service import BadFile, Service, open_store
from allocator.store.history import Move, What
from backends.embedded.supervisor import Supervisor
from headrace.allocator.file import load_allocator
from headrace.up.account import PROMISES, Account
from headrace.up.engine_sets import python_path
from headrace.up.narrator import Narrator
from headrace.up.scene import JOB, Scene, training_job, write_allocator_file
from headrace.up.supervised_engines import SupervisedEngines

SAY_EVERY_S = 5.0
LOOK_EVERY_S = 0.25
HOLD_S = 1.0
"""Of the lender's figures (`allocator.lender.figures.Steady`)."""
LEAD_WITHIN_S = 30.0
HOME_WITHIN_S = 30.0
"""After the wave, for loans that are still out."""


class DemoError(Exception):
    """The demo cannot go on; the text says why."""


@dataclass(slots=True)
class LendingDemo:
    """One run of it, beside a gateway that serves."""

    scene: Scene
    gateway_url: str
    admin_url: str
    model: str
    budget: Mapping[str, Any]
    """The default latency class, as in the fleet file."""
    engines: Sequence[str]
    supervisor: Supervisor
    folder: Path
    narrator: Narrator
    account: Account = field(init=False)
    _stages: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.account = Account(self.budget)

    async def run(self) -> Mapping[str, Any]:
        """Play it to its end; returns the account. Raises DemoError."""
        self.narrator.say("The router gets to know its traffic.")
        async with httpx.AsyncClient(base_url=self.admin_url, timeout=10.0, trust_env=False) as admin:
            prelude = self.scene.prelude_per_s
            await self._traffic(prelude, prelude, self.scene.prelude_s, counted=False)
            trough, peak = self._rates(await self._capacity_per_s(admin))
            self.account.began_s = time.monotonic()
            async with self._allocator() as service:
                watching = asyncio.create_task(self._watch(admin))
                try:
                    await self._traffic(trough, peak, self.scene.wave_s, counted=True)
                    await self._end_job(service)
                    await self._until_home(service)
                finally:
                    watching.cancel()
                    await asyncio.gather(watching, return_exceptions=True)
        return self.account.document()

    async def _capacity_per_s(self, admin: httpx.AsyncClient) -> float:
        """Of all engines as they were measured. What the first few requests say of their drift is not to be trusted."""
        drifts = {entry["name"]: entry["drift"] for entry in (await admin.get("/admin/fleet")).json()["backends"]}
        published = (await _published(admin))["backends"]
        capacity: float = sum((entry["capacity_per_s"] or 0.0) * drifts[entry["name"]] for entry in published)
        if not capacity:
            raise DemoError("these engines have no capacity within the budget, or it was never measured. Leave out "
                            "--no-calibrate, give the machine a quieter moment, or use --engines simulated.")
        return capacity

    def _rates(self, capacity: float) -> tuple[float, float]:
        trough, peak = self.scene.trough_share * capacity, self.scene.peak_share * capacity
        self.narrator.say(
            f"Within the P99 budget these engines take {capacity:.1f} requests/s. A wave comes: {trough:.1f} to "
            f"{peak:.1f} requests/s, every {self.scene.period_s:.0f} s. The router lends nothing before it has seen "
            "a whole one.")
        return trough, peak

    async def _traffic(self, trough: float, peak: float, duration_s: float, *, counted: bool) -> None:
        scene = self.scene
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "loadtest.tide", "--url", self.gateway_url, "--model", self.model,
            "--trough", f"{trough:.4f}", "--peak", f"{peak:.4f}", "--period", f"{scene.period_s:g}",
            "--begin", f"{scene.begins_at:g}", "--duration", f"{duration_s:g}",
            "--prompt-tokens", str(scene.prompt_tokens), "--output-tokens", str(scene.output_tokens),
            "--seed", str(scene.seed), *(("--even",) if scene.is_even else ()),
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, start_new_session=True,
            env={**os.environ, "PYTHONPATH": python_path()})
        try:
            assert child.stdout is not None
            async for line in child.stdout:
                if counted:
                    self.account.take(json.loads(line))
            if await child.wait():
                raise DemoError(f"the traffic ended with exit code {child.returncode}")
        finally:
            if child.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    child.kill()
                await child.wait()

    @contextlib.asynccontextmanager
    async def _allocator(self) -> AsyncIterator[Service]:
        """An allocator that borrows this gateway's backends, with a job in its queue, while inside."""
        declared = load_allocator(write_allocator_file(self.folder, self.engines, self.scene))
        if declared.state.exists():     # of an earlier demo here, whose job may still run
            await _end_runs(LocalEngine(declared.state))
            await asyncio.to_thread(shutil.rmtree, declared.state)
        engines = SupervisedEngines(self.supervisor)
        database = open_store(declared)

        def no_reload() -> Declared:
            raise BadFile(("the demo's file does not change",))

        def make_lender(_: ExecutionEngine, declared: Declared) -> RouterLender:
            return RouterLender(RouterAdmin(self.admin_url), engines, declared, hold_s=HOLD_S)

        service = Service(declared, no_reload, database, "demo", watchers=[self._moved], make_lender=make_lender)
        running = asyncio.create_task(service.run())
        try:
            await self._submit(await _leading(service))
            yield service
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await _end_runs(service.engine())
            database.dispose()

    async def _submit(self, keeper: Keeper) -> None:
        asked = JobRequest.model_validate(training_job(self.folder, self.engines, python_path()))
        submitted = JobSubmitted(at_s=keeper.clock.now_s(), job=asked.job())
        outcome = await keeper.record([Note(submitted, request_text(asked))])
        if outcome.refused:
            raise DemoError(f"the training job was refused: {outcome.refused[0][1]}")

    async def _end_job(self, service: Service) -> None:
        keeper = await _leading(service)
        await keeper.record([JobCancelled(at_s=keeper.clock.now_s(), job=JOB)])

    async def _until_home(self, service: Service) -> None:
        """A loan that is out at the end comes home too, and what the job has saved is noted."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HOME_WITHIN_S):
                while ((await _leading(service)).world.loans  # noqa: ASYNC110  two parties must have come to rest
                       or any(stage != "serving" for stage in self._stages.values())):
                    await asyncio.sleep(LOOK_EVERY_S)
        _, saved = await (await _leading(service)).request_of(JOB)
        self.account.steps = None if saved is None else saved.step

    def _moved(self, move: Move) -> None:
        now = time.monotonic()
        if move.what is What.LOAN:
            self.account.loan_moved(move.name, move.epoch, move.became, now, move.reason)
        self._say(f"{move.what.value} {move.name}: {move.became.replace('_', ' ')}"
                  + (f" ({move.reason.replace('_', ' ')})" if move.reason else ""))

    async def _watch(self, admin: httpx.AsyncClient) -> None:
        said_s = -SAY_EVERY_S
        while True:
            with contextlib.suppress(httpx.HTTPError):
                published = await _published(admin)
                for entry in published["backends"]:
                    self._stage(entry["name"], entry["stage"])
                if time.monotonic() - said_s >= SAY_EVERY_S:
                    said_s = time.monotonic()
                    self._say(self._line(published))
            await asyncio.sleep(LOOK_EVERY_S)

    def _stage(self, backend: str, stage: str) -> None:
        before = self._stages.get(backend, "serving")
        self._stages[backend] = stage
        if stage == before:
            return
        words = f"router  {backend}: {stage}"
        if stage == "serving":
            loan = self.account.serves_again(backend, time.monotonic())
            if loan is not None and loan.recalled_s is not None and loan.serving_s is not None:
                words += f", {loan.serving_s - loan.recalled_s:.1f} s after the recall"
        self._say(words)

    def _line(self, published: Mapping[str, Any]) -> str:
        model = published["models"][0]
        serving = sum(entry["stage"] == "serving" for entry in published["backends"])
        demand, forecast, first_s = model["demand_per_s"], model["forecast_q99_per_s"], self.account.p99()["ttft_s"]
        return (f"{demand or 0.0:5.1f} requests/s"
                + ("" if forecast is None else f", at most {forecast:.1f} to come, of {model['capacity_per_s']:.1f}")
                + f"; {serving} of {len(published['backends'])} serve"
                + ("" if first_s is None else f"; P99 first token {first_s:.2f} s")
                + f"; {sum(self.account.failures.values())} of {len(self.account.requests)} failed")

    def _say(self, words: str) -> None:
        self.narrator.say(f"{time.monotonic() - self.account.began_s:6.1f} s  {words}")


async def _published(admin: httpx.AsyncClient) -> dict[str, Any]:
    found: dict[str, Any] = (await admin.get("/admin/lending")).raise_for_status().json()
    return found


async def _leading(service: Service) -> Keeper:
    """The world's keeper, once there is one. Raises DemoError."""
    try:
        async with asyncio.timeout(LEAD_WITHIN_S):
            while service.keeper is None:  # noqa: ASYNC110  leadership has no event to wait for
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise DemoError("the allocator does not come up; see the messages above") from None
    return service.keeper


async def _end_runs(engine: LocalEngine) -> None:
    """Jobs outlive an allocator by design; those of a demo must not."""
    for report in await engine.adopt():
        if not report.ended:
            await engine.kill(report.run_id, report.epoch or 0)


def story(account: Mapping[str, Any]) -> str:
    """The account for people."""
    lines = [f"{account['requests']} requests, {account['failed']} failed."]
    for name, budget in account["budget"].items():
        found = account["p99"][PROMISES[name]]
        during = account["p99_during_recalls"][PROMISES[name]]
        lines.append(f"P99 {name}: {found:g} of {budget:g} s" + ("" if during is None else f", {during:g} in recalls"))
    lines += [f"{loan['backend']}: lent for {loan['lent_for_s']} s"
              + ("" if loan["recall_to_serving_s"] is None else
                 f"; recalled, its device free after {loan['recall_to_let_go_s']} s, serving again after "
                 f"{loan['recall_to_serving_s']} s") for loan in account["loans"] if loan["lent_at_s"] is not None]
    lines.append(f"Training got {account['training_steps'] or 0} steps done and saved.")
    lines.append("All promises were kept." if account["ok"] else "Not all promises were kept.")
    return "\n".join(lines)
