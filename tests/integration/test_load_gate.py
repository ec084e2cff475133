"""The whole load client, locust included, against a real engine process that stops for six seconds (P51)."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtest.measured import measure
from loadtest.run import LoadOptions, load, planned_requests, read_thresholds
from loadtest.stack import child, child_environment
from loadtest.traffic import Lengths
from loadtest.verdict import judge

pytestmark = pytest.mark.load
MODEL = "Qwen3-32B"
OPTIONS = LoadOptions(users=4, rate_per_s=6.0, duration_s=8.0, drain_s=15.0, outputs=Lengths(40, 0.5, 80))


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[tuple[str, int]]:
    command = [sys.executable, "-m", "loadtest.fake_engine", "--card", "h100x2-fp8", "--served-model-name", MODEL,
               "--time-scale", "2", "--die-with-parent"]
    with child(command, tmp_path / "engine.log", stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        yield ready["url"], ready["pid"]


def test_p51_six_frozen_seconds_fail_no_request_and_still_fail_the_gate(
    engine: tuple[str, int], tmp_path: Path
) -> None:
    url, pid = engine

    def freeze() -> None:
        time.sleep(2.5)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(6.0)
        os.kill(pid, signal.SIGCONT)

    freezer = threading.Thread(target=freeze)
    freezer.start()
    try:
        records = load(OPTIONS, url, MODEL, tmp_path, exact_tokens=True, classes={})
    finally:
        freezer.join()
    measured = measure(records, planned=planned_requests(OPTIONS, {}), duration_s=OPTIONS.duration_s)
    rows = {row.threshold.name: row for row in judge(measured, read_thresholds(OPTIONS.thresholds, "simulated"))}
    # Nothing failed and nothing was lost, so a gate on errors alone would open.
    assert all(rows[name].passed for name in ("failed_requests", "unfinished_requests", "lost_tokens"))
    assert not rows["ttft_p99_s"].passed
    assert measured["ttft_p99_s"] > 4.0
    assert measured["ttft_p50_s"] > 0.2, "arrivals went on through the freeze, so it weighs on half of all callers"
    assert rows["lag_p99_s"].passed, "the generator itself did not stand still"


def test_locust_imports_the_file_in_its_own_process() -> None:
    """Locust puts the file's folder first on `sys.path`: nothing there may hide a module of the standard library."""
    done = subprocess.run(
        [sys.executable, "-m", "locust", "-f", "loadtest/locustfile.py", "--list"], capture_output=True, text=True,
        env=child_environment(), timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "ChatUser" in done.stdout


@pytest.mark.parametrize(("arguments", "said"), [
    (["--cards", "abacus"], "no card 'abacus'"),
    (["--cards", "a100x2-bf16,a100x1-bf16"], "different cards of one model"),
    (["--host", "nonsense"], "not an http(s) address"),
    (["--thresholds", "/nowhere.yaml"], "cannot read /nowhere.yaml"),
    (["--fault", "a100x2-bf16=sulk"], "the fake engine a100x2-bf16 did not start"),
    (["--policy", "astrology"], "--policy: there is no preset 'astrology'"),
])
def test_a_run_that_cannot_take_place_says_why_and_exits_2(tmp_path: Path, arguments: list[str], said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "headrace", "loadtest", "--report", str(tmp_path), *arguments], capture_output=True,
        text=True, env=child_environment(), timeout=60, check=False)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
