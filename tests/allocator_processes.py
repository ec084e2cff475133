"""`headrace allocate` as a process, with real replicas and real jobs under its local execution engine.

Two replicas of two devices each are lent to one queue. A replica's engine is a shell that notes when it began, so the
tests can tell when a lender had its devices back. Whatever is left at the end is killed.
"""

import asyncio
import contextlib
import http.client
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from allocator.events import Event
from allocator.execution.local import LocalEngine
from allocator.store.audit import faults
from allocator.store.journal import FAULT_VARIABLE, Journal
from allocator.store.schema import open_database
from loadtest.stack import child, tail
from tests.contracts.execution_engine import DEAF, FOREVER, SAVES
from tests.processes import START_LIMIT_S, Started, ask, free_port, read_line, until

ROOT = Path(__file__).resolve().parents[1]
TRAINING_NODE, INFERENCE_NODE = f"t{os.getpid()}", f"i{os.getpid()}"
"""Names that no other run of the tests on this machine has: what it left on a device would keep ours off it."""
GRACE_S = 20.0
QUICK = {"tick_s": 0.2, "grace_s": GRACE_S, "kill_margin_s": 1.0, "surplus_hold_s": 0.0, "min_run_s": 0.0,
         "idle_return_s": 0.5, "promised_min_s": 600.0, "quarantine_after_s": 5.0,
         "max_recalls": 100, "restart_pause_s": 0.1, "recall_keep_s": 0.0}
SAVES_AND_GOES = SAVES + "acknowledge()\n"
STEPS = "loadtest.training_job"


def document(folder: Path, **changes: Any) -> dict[str, Any]:
    """An allocator file: a training node, an inference node with two replicas, one queue."""
    def engine(name: str) -> list[str]:
        return ["/bin/sh", "-c", f"date +%s.%N >> {folder}/{name}.began; exec sleep 1000"]

    return {
        "version": 1, "state": "state", "listen": {"port": free_port()}, "execution": {"poll_s": 0.05},
        "nodes": [{"name": TRAINING_NODE, "card": "k80", "devices": 2, "labels": {"for": "training"}},
                  {"name": INFERENCE_NODE, "card": "v100", "devices": 4, "labels": {"for": "inference"}}],
        "pools": [{"name": "training", "kind": "training", "selector": {"for": "training"}},
                  {"name": "inference", "kind": "inference", "selector": {"for": "inference"}}],
        "queues": [{"name": "q", "parent": "training"}],
        "backends": [{"name": f"chat-{index}", "pool": "inference", "command": engine(f"chat-{index}"),
                      "devices": [f"{INFERENCE_NODE}:{number}" for number in (2 * index, 2 * index + 1)]}
                     for index in range(2)],
        "supplies": [{"pool": "inference", "card": "v100", "lendable": 1, "spare": 1}],
        "rules": dict(QUICK), **changes,
    }


class AllocatorProcess(Started):
    """One allocator and its file. `start` may follow `kill`, as often as is wanted."""

    def __init__(self, folder: Path, document: Mapping[str, Any], *, log: str = "allocator.log") -> None:
        self.folder = folder
        self.document = dict(document)
        self.url = f"http://127.0.0.1:{document['listen']['port']}"
        self.file = folder / f"{log}.yaml"
        self.log = folder / log
        self.process: subprocess.Popen[bytes] | None = None
        self.environment: dict[str, str] = {}
        self._running = contextlib.ExitStack()
        self.write()

    def write(self, text: str | None = None) -> None:
        """Puts the document, or any text, in the file's place by one rename."""
        part = self.file.with_suffix(".part")
        part.write_text(json.dumps(self.document, indent=1) + "\n" if text is None else text)
        part.replace(self.file)

    def start(self, fault: str = "", *, is_leading: bool = True) -> None:
        """Returns once it leads, or once it listens; `fault` is where the journal kills it."""
        self._running.close()
        given = [f"{key}={value}" for key, value in ({**self.environment, FAULT_VARIABLE: fault}).items()]
        command = ["env", *given, sys.executable, "-m", "headrace", "allocate", "-c", str(self.file), "--json"]
        self.process = self._running.enter_context(child(command, self.log, stdout=subprocess.PIPE))
        line = read_line(self.process, START_LIMIT_S, self.log)
        assert line["event"] == "ready", line
        if is_leading and not fault:
            self.await_leading()

    def await_leading(self, limit_s: float = 20.0) -> None:
        until(lambda: ask(self.url, "/readiness")[0] == 200, f"the allocator to lead; its log: {tail(self.log)}",
              limit_s=limit_s)

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def kill(self) -> None:
        """SIGKILL."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def died_before(self, look: Callable[[], Any], what: str, limit_s: float = GRACE_S) -> bool:
        """True once it is dead, False once the answer of `look` is true."""
        def either() -> bool:
            try:
                return not self.is_running or bool(look())
            except (OSError, http.client.HTTPException, AssertionError):
                return False

        until(either, f"{what}, or the kill; log: {tail(self.log)}", limit_s=limit_s)
        return not self.is_running

    def send_signal(self, signum: int) -> None:
        assert self.process is not None
        self.process.send_signal(signum)

    def close(self) -> None:
        if self.is_running:
            self.kill()
        self._running.close()

    # What it says

    def ask(self, path: str, method: str = "GET", body: Any = None) -> tuple[int, Any]:
        status, raw = ask(self.url, path, method=method, body=body)
        return status, json.loads(raw)

    def get(self, path: str) -> Any:
        status, found = self.ask(path)
        assert status == 200, found
        return found

    def job(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.get(f"/v1/jobs/{name}")
        return found

    def loans(self) -> dict[str, dict[str, Any]]:
        return {loan["loan"]: loan for loan in self.get("/v1/loans")["loans"]}

    def steps_of_loan(self, name: str) -> list[str]:
        """The states that the loan went through, all of its lives."""
        return [move["became"] for move in self.get(f"/v1/loans/history?name={name}")["history"]]

    # What is done to it

    def submit(self, name: str, command: list[str], **given: Any) -> None:
        """A job of two V100, which only the lender has."""
        body = {"name": name, "queue": "q", "cards": ["v100"], "gang": 2, "work_unit_s": 6000.0, "command": command,
                "checkpoint": {"takes_s": 0.5, "restart_s": 1.0, "linger_s": 0.5}, **given}
        status, found = self.ask("/v1/jobs", "POST", {key: value for key, value in body.items() if value is not None})
        assert status in (200, 201), found

    def recall(self, target: str, **given: Any) -> dict[str, Any]:
        status, found = self.ask("/v1/recall", "POST", {"target": target, **given})
        assert status == 202, found
        return dict(found)

    def set_supply(self, lendable: int, spare: int | None = None) -> None:
        body = {"pool": "inference", "card": "v100", "lendable": lendable,
                "spare": lendable if spare is None else spare}
        status, found = self.ask("/v1/supply", "PUT", body)
        assert status == 200, found

    def await_running(self, job: str, limit_s: float = 20.0) -> dict[str, Any]:
        found = until(lambda: (shown := self.job(job))["state"] == "running" and shown, f"{job} to run",
                      limit_s=limit_s)
        assert isinstance(found, dict)
        return found

    def await_home(self, loan: str, limit_s: float = GRACE_S) -> None:
        until(lambda: loan not in self.loans(), f"{loan} to be back; log: {tail(self.log)}", limit_s=limit_s)

    def began(self, backend: str) -> list[float]:
        """Wall seconds at which the replica's engine began, every time."""
        path = self.folder / f"{backend}.began"
        return [float(line) for line in path.read_text().split()] if path.exists() else []

    def await_serving(self, backend: str, since_s: float = 0.0, limit_s: float = GRACE_S) -> float:
        """When the replica's engine began after that time."""
        found = until(lambda: [at_s for at_s in self.began(backend) if at_s > since_s], f"{backend} to serve",
                      limit_s=limit_s)
        assert isinstance(found, list)
        return float(found[0])

    # What it leaves

    def journal(self) -> Journal:
        return Journal(open_database(f"sqlite:///{self.folder / 'state' / 'allocator.db'}"))

    def check_journal(self) -> list[Event]:
        """Every prefix of the journal keeps every invariant; returns the events."""
        journal = self.journal()
        assert [str(fault) for fault in faults(journal)] == []
        return [written.event for written in journal.events()]

    def engine(self) -> LocalEngine:
        """The execution engine as the allocator sees it."""
        return LocalEngine(self.folder / "state")

    def live_runs(self) -> list[str]:
        """Runs of jobs of which any process is left."""
        return [report.run_id for report in asyncio.run(self.engine().adopt())
                if report.processes and not report.run_id.startswith("serve-")]


@contextlib.contextmanager
def allocator(folder: Path, **changes: Any) -> Iterator[AllocatorProcess]:
    """A running allocator; whatever it has started is gone when the context ends."""
    process = AllocatorProcess(folder, document(folder, **changes))
    try:
        with process:
            yield process
    finally:
        sweep(folder / "state")


def sweep(state: Path) -> None:
    """Kills every run on record there."""
    async def kill_all() -> None:
        engine = LocalEngine(state)
        for report in await engine.adopt():
            if not report.ended:
                await engine.kill(report.run_id, 10**9)

    def all_gone() -> bool:
        return all(report.ended for report in asyncio.run(LocalEngine(state).adopt()))

    if state.exists():
        asyncio.run(kill_all())
        until(all_gone, "every process of the test to be gone")


def python(text: str, *arguments: str) -> list[str]:
    """A command that runs a small program; `argv[2]` on are the arguments."""
    return [sys.executable, "-S", "-c", "from sys import argv\n" + text, "job", *arguments]


def training(folder: Path, name: str, *options: str) -> dict[str, Any]:
    """The sample training job, as the members of a job file."""
    return {
        "command": [sys.executable, "-m", STEPS, "--json", "--step-ms", "20", "--steps", "100000", "--checkpoint",
                    str(folder / f"{name}.npz"), *options],
        "resume_args": ["--resume"], "env": {"PYTHONPATH": str(ROOT)}}


__all__ = ["DEAF", "FOREVER", "GRACE_S", "SAVES", "SAVES_AND_GOES", "AllocatorProcess", "allocator",
           "document", "python", "sweep", "training"]
