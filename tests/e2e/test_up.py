"""`headrace up` as its user runs it: one command, a line when it is ready, and nothing left when it ends."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from backends.embedded.model_files import ModelFile
from loadtest.run import LoadOptions, planned_requests
from loadtest.run import load as run_locust
from loadtest.stack import child
from loadtest.traffic import Lengths
from tests.processes import (
    RawStream,
    answers,
    ask_json,
    failures,
    is_running,
    read_line,
    served_by,
    until,
)

pytestmark = pytest.mark.real_engine

READY_LIMIT_S = 60.0
LLAMACPP = ("--engines", "llamacpp", "--no-calibrate")
LOCUST = LoadOptions(users=3, rate_per_s=4.0, duration_s=8.0, drain_s=20.0, seed=2,
                     prompts=Lengths(20, 0.3, 60), outputs=Lengths(12, 0.3, 24))
SIMULATED = ("--engines", "simulated", "--time-scale", "4")


class Up:
    """A running `headrace up`, and the line that it printed."""

    def __init__(self, process: "subprocess.Popen[bytes]", line: dict[str, Any]) -> None:
        self.process = process
        self.line = line
        self.url, self.admin_url, self.model = line["gateway_url"], line["admin_url"], line["model"]

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(Path(self.line["state_file"]).read_text())
        return found

    def engine_pids(self) -> dict[str, int]:
        return {engine["name"]: engine["pid"] for engine in self.state()["engines"]}

    def status(self) -> dict[str, Any]:
        """`headrace status --json`, the command."""
        done = subprocess.run(
            [sys.executable, "-m", "headrace", "status", "--admin", self.admin_url, "--json"],
            capture_output=True, text=True, timeout=30, check=True)
        found: dict[str, Any] = json.loads(done.stdout)
        return found


@contextmanager
def running_up(folder: Path, *options: str) -> Iterator[Up]:
    command = [sys.executable, "-m", "headrace", "up", "--json", "--port", "0", "--admin-port", "0",
               "--run-dir", str(folder / "run"), *options]
    log = folder / "up.log"
    with child(command, log, stdout=subprocess.PIPE) as process:
        yield Up(process, read_line(process, READY_LIMIT_S, log))


@pytest.fixture(params=["simulated", "llamacpp"])
def options(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """Both engine sets, the real one where its weights can be had."""
    if request.param == "simulated":
        return SIMULATED
    request.getfixturevalue("llama_models")
    return LLAMACPP


def test_up_serves_streams_shows_three_live_backends_and_ends_on_ctrl_c(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    with running_up(tmp_path, *options) as up:
        print(f"{options[1]}: ready after {up.line['ready_after_s']} s")
        assert up.line["ready"]
        with RawStream(up.url, model=up.model, max_tokens=12).send() as stream:
            stream.read_to_end()
        assert stream.ended_well
        assert stream.backend in up.engine_pids()
        assert b"x-headrace-reason: " in stream.seen.lower()
        assert _text_of(stream.seen).strip()

        status = until(lambda: _with_samples(up.status()), "three live backends", every_s=0.2)
        assert [entry["name"] for entry in status["backends"]] == [engine["name"] for engine in up.line["engines"]]
        for entry in status["backends"]:
            assert entry["health"]["state"] == "healthy"
            assert entry["sample"]["running_requests"] == 0
            assert entry["sample"]["age_s"] < 10
            assert entry["in_flight"]["requests"] == 0
            assert entry["price_per_hour"] > 0

        pids = up.engine_pids()
        assert len(set(pids.values())) == 3
        assert all(map(is_running, pids.values()))
        assert up.process.poll() is None
        up.process.send_signal(signal.SIGINT)
        assert up.process.wait(timeout=20) == 0
    assert not any(map(is_running, pids.values()))
    assert not answers(up.url, "/health")
    assert not Path(up.line["state_file"]).exists()


def test_sigkill_of_up_takes_every_engine_with_it(options: tuple[str, ...], tmp_path: Path) -> None:
    with running_up(tmp_path, *options) as up:
        pids = up.engine_pids()
        assert all(map(is_running, pids.values()))
        up.process.kill()
        up.process.wait()
        until(lambda: not any(map(is_running, pids.values())), "the engines to be gone", limit_s=10)
    for engine in up.line["engines"]:
        assert not answers(engine["url"], "/health")


def test_a_second_up_in_the_same_folder_is_refused_in_one_line_and_harms_nobody(tmp_path: Path) -> None:
    with running_up(tmp_path, *SIMULATED) as first:
        command = [sys.executable, "-m", "headrace", "up", "--json", *SIMULATED, "--admin-port", "0"]
        port = first.url.rpartition(":")[2]
        for options, word in ((("--port", "0", "--run-dir", str(tmp_path / "run")), str(tmp_path / "run")),
                              (("--port", port, "--run-dir", str(tmp_path / "other")), f"port {port}")):
            done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=30, check=False)
            assert done.returncode == 1
            assert done.stdout == ""
            assert len(done.stderr.strip().splitlines()) == 1, done.stderr
            assert word in done.stderr
        assert first.status()["ready"]
        assert all(map(is_running, first.engine_pids().values()))


@pytest.mark.load
def test_an_engine_of_up_killed_by_its_pid_under_a_locust_load_loses_nothing_and_comes_back(
    llama_models: dict[str, ModelFile], tmp_path: Path
) -> None:
    """The supervisor restarts it; meanwhile the other two answer."""
    with running_up(tmp_path, *LLAMACPP) as up, ThreadPoolExecutor(1) as background:
        load = background.submit(run_locust, LOCUST, up.url, up.model, tmp_path, exact_tokens=False, classes={})
        until(lambda: sum(entry["served_requests"] for entry in _fleet(up)) >= 4, "locust to be at work")
        victim = until(lambda: max(_fleet(up), key=_in_flight) if any(map(_in_flight, _fleet(up))) else {},
                       "an engine at work")["name"]
        killed = up.engine_pids()[victim]
        assert not load.done()
        os.kill(killed, signal.SIGKILL)
        until(lambda: up.engine_pids()[victim] not in (killed, None), "the supervisor to start it again")
        until(lambda: _health(up, victim) in ("slow_start", "half_open", "healthy"), "it to be trusted again")
        records = load.result(timeout=60)
        # A real model may end at its first token: an answer without text, yet whole.
        failed = [record for record in failures(records) if record.failure != "no_tokens"]
        print(f"{len(records)} requests by locust, {len(failed)} cut in mid answer; {served_by(records)}")
        assert len(records) == planned_requests(LOCUST, {})
        assert all((record.backend, record.failure) == (victim, "error_in_stream") for record in failed), failed
        assert all(record.tokens > 0 for record in failed)
        restarts = {engine["name"]: engine["restarts"] for engine in up.state()["engines"]}
        assert restarts == {name: int(name == victim) for name in restarts}


def _fleet(up: Up) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = ask_json(up.admin_url, "/admin/fleet")["backends"]
    return found


def _in_flight(entry: dict[str, Any]) -> int:
    return int(entry["in_flight"]["requests"])


def _health(up: Up, name: str) -> str:
    return next(str(entry["health"]["state"]) for entry in _fleet(up) if entry["name"] == name)


def _with_samples(status: dict[str, Any]) -> dict[str, Any]:
    """The status, once each backend has a sample of its load taken after the request ended."""
    live = [entry for entry in status["backends"] if entry["sample"] and entry["sample"]["running_requests"] == 0]
    return status if len(live) == len(status["backends"]) == 3 else {}


def _text_of(stream: bytes) -> str:
    """The generated text of a streamed answer as it came over the socket."""
    events = [line[6:] for line in stream.splitlines() if line.startswith(b"data: {")]
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)
