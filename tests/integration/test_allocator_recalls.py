"""Recalls with real processes: replicas that are lent, jobs that behave and jobs that do not."""

import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace import cli
from tests.allocator_processes import (
    DEAF,
    FOREVER,
    GRACE_S,
    INFERENCE_NODE,
    SAVES,
    SAVES_AND_GOES,
    AllocatorProcess,
    allocator,
    python,
    training,
)
from tests.processes import ask, is_running, until

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="the local engine reads /proc"),
              pytest.mark.timeout(240)]


@pytest.fixture
def running(tmp_path: Path) -> Iterator[AllocatorProcess]:
    with allocator(tmp_path) as process:
        yield process
        process.check_journal()


def lend(running: AllocatorProcess, name: str, text: str, *arguments: str, **given: Any) -> str:
    """A job on a lent replica; returns the loan."""
    running.submit(name, python(text, *arguments), **given)
    found = running.await_running(name)
    (loan,) = found["run"]["loans"]
    return str(loan)


def log_of(folder: Path, run: str) -> str:
    return (folder / "state" / "runs" / run / "log-0").read_text()


def test_a_job_that_saves_gives_its_devices_back_and_goes_on_elsewhere(running: AllocatorProcess, tmp_path: Path
                                                                       ) -> None:
    pytest.importorskip("numpy", reason="the training job needs the extra `engines`")
    given = training(tmp_path, "j", "--checkpoint-s", "0.3")
    running.submit("j", given.pop("command"), **given)
    first = running.await_running("j")["run"]
    (loan,) = first["loans"]
    until(lambda: '"event": "step"' in log_of(tmp_path, first["run"]), "its first step")
    recalled_s = time.time()
    running.set_supply(0)
    began_s = running.await_serving(loan, recalled_s)
    assert began_s - recalled_s < 0.3 * GRACE_S
    assert running.steps_of_loan(loan) == ["offered", "lent", "recall_requested", "draining", "returning", "returned"]
    shown = running.job("j")
    assert (shown["state"], shown["recalls"], shown["crashes"]) == ("waiting", 1, 0)
    assert shown["resume_from"] == str(tmp_path / "j.npz")
    assert shown["why"]["code"] in ("no_such_card", "gang_too_large", "no_surplus")
    running.set_supply(1)
    again = running.await_running("j")
    assert again["attempts"] == 2
    assert '"event": "begin", "step": 0,' in log_of(tmp_path, first["run"])
    assert '"event": "saved"' in log_of(tmp_path, first["run"])
    until(lambda: '"event": "begin"' in log_of(tmp_path, again["run"]["run"]), "its start")
    assert '"event": "begin", "step": 0,' not in log_of(tmp_path, again["run"]["run"])


def test_a_job_that_ignores_its_signals_is_gone_at_the_deadline(running: AllocatorProcess, tmp_path: Path) -> None:
    """F2. Not earlier than the kill margin before it: the grace that was promised is given."""
    loan = lend(running, "deaf", DEAF, str(tmp_path / "ready"))
    until((tmp_path / "ready").exists, "the job to turn deaf")
    recalled_s = time.time()
    running.recall(loan, deadline_s=4.0, emergency=True)
    began_s = running.await_serving(loan, recalled_s)
    assert 2.0 < began_s - recalled_s < 6.0
    assert "overdue" not in running.steps_of_loan(loan)
    assert running.job("deaf")["recalls"] == 1


def test_a_checkpoint_that_fails_is_seen_by_whoever_looks(running: AllocatorProcess, tmp_path: Path) -> None:
    """F4: in the job's count, its history, the metrics and the log."""
    loan = lend(running, "j", SAVES + "raise SystemExit('disk full')", str(tmp_path / "ready"),
                checkpoint={"restart_s": 1.0})
    until((tmp_path / "ready").exists, "the job to be ready")
    running.set_supply(0)
    running.await_home(loan)
    shown = running.job("j")
    assert (shown["recalls"], shown["crashes"], shown["unsaved"], shown["resume_from"]) == (1, 0, 1, None)
    gone = next(move for move in shown["history"] if "saved" in move)
    assert (gone["became"], gone["saved"]) == ("waiting", False)
    assert gone["detail"] == "told to save, it ended without having saved: member 0 ended with exit code 1"
    assert gone["lost_unit_s"] > 0.0
    assert 'headrace_allocator_unsaved_total{queue="q"} 1.0' in ask(running.url, "/metrics")[1].decode()
    assert "WARNING" in next(line for line in running.log.read_text().splitlines() if gone["detail"] in line)
    printed = CliRunner().invoke(cli.app, ["jobs", "show", "j"], env={"HEADRACE_ALLOCATOR": running.url}).stdout
    assert "told to save, it ended without having saved 1 times" in printed
    assert "work lost" in printed


def test_a_child_that_outlives_the_acknowledgement_keeps_the_device_until_it_is_gone(
    running: AllocatorProcess, tmp_path: Path
) -> None:
    """F3."""
    child = ("import os, sys\nif os.fork() == 0:\n    os.setsid()\n    open(argv[3], 'w').write(str(os.getpid()))\n"
             "    import time\n    time.sleep(600)\n")
    loan = lend(running, "parent", child + SAVES_AND_GOES, str(tmp_path / "ready"), str(tmp_path / "child"))
    until((tmp_path / "ready").exists, "the job to be ready")
    until(lambda: (tmp_path / "child").exists() and (tmp_path / "child").read_text(), "the child")
    pid = int((tmp_path / "child").read_text())
    recalled_s = time.time()
    running.recall(loan)
    running.await_serving(loan, recalled_s)
    assert not is_running(pid)
    assert running.steps_of_loan(loan)[-1] == "returned"


def test_of_two_recalls_the_earlier_deadline_stands(running: AllocatorProcess, tmp_path: Path) -> None:
    """F7."""
    loan = lend(running, "deaf", DEAF, str(tmp_path / "ready"))
    until((tmp_path / "ready").exists, "the job to turn deaf")
    recalled_s = time.time()
    running.recall(loan)
    running.recall(loan, deadline_s=3.0, emergency=True)
    status, found = running.ask("/v1/recall", "POST", {"target": loan, "deadline_s": 60.0})
    assert status == 409, found
    assert running.loans()[loan]["due_in_s"] < 3.5
    assert running.await_serving(loan, recalled_s) - recalled_s < GRACE_S / 3


def test_a_shorter_deadline_than_promised_is_for_emergencies(running: AllocatorProcess, tmp_path: Path) -> None:
    loan = lend(running, "j", SAVES_AND_GOES, str(tmp_path / "ready"))
    status, found = running.ask("/v1/recall", "POST", {"target": loan, "deadline_s": 1.0})
    assert status == 409
    assert "closer than the promised grace of 20 s" in found["error"]["message"]
    assert running.loans()[loan]["state"] == "lent"


@pytest.mark.parametrize("delay_s", [0.0, 0.1, 0.2])
def test_a_recall_beside_a_completion_ends_in_one_return(running: AllocatorProcess, tmp_path: Path, delay_s: float
                                                         ) -> None:
    """F8: whichever comes first, nobody is overdue, and the work counts as done."""
    loan = lend(running, "j", "import os, time\nwhile not os.path.exists(argv[2]): time.sleep(0.01)\n",
                str(tmp_path / "go"), checkpoint=None, work_unit_s=60.0)
    (tmp_path / "go").touch()
    time.sleep(delay_s)
    running.ask("/v1/recall", "POST", {"target": loan})
    until(lambda: running.job("j")["state"] == "completed", "the job to be done, now or in its next run")
    running.await_home(loan)
    assert "overdue" not in running.steps_of_loan(loan)
    assert [move["became"] for move in running.job("j")["history"]][-1] == "completed"


def test_a_recall_of_an_offer_withdraws_it(tmp_path: Path) -> None:
    """F8: the gang waits on, and gets the replica with the next offer."""
    slow = ["/bin/sh", "-c", "trap '' TERM; sleep 1000"]      # takes its time to be drained
    with allocator(tmp_path) as running:
        for backend in running.document["backends"]:
            backend["command"] = slow
        running.kill()
        running.write()
        running.start()
        running.submit("j", python(SAVES_AND_GOES, str(tmp_path / "ready")))
        loan = until(lambda: next((name for name, loan in running.loans().items() if loan["state"] == "offered"), None),
                     "an offer")
        running.recall(str(loan))
        until(lambda: "withdrawn" in running.steps_of_loan(str(loan)), "the offer to be withdrawn")
        running.check_journal()


def test_a_node_that_dies_while_lent_is_lost_and_its_old_process_is_ended(running: AllocatorProcess, tmp_path: Path
                                                                          ) -> None:
    """F5: when it comes back with the job still alive, the devices stay away until that is gone."""
    loan = lend(running, "j", FOREVER)
    (old,) = running.live_runs()
    assert running.ask(f"/v1/nodes/{INFERENCE_NODE}", "POST", {"state": "down"})[0] == 202
    assert running.loans()[loan]["state"] == "lost"
    shown = running.job("j")
    assert (shown["state"], shown["crashes"]) == ("waiting", 0)
    assert running.ask(f"/v1/nodes/{INFERENCE_NODE}", "POST", {"state": "up"})[0] == 202
    until(lambda: old not in running.live_runs(), "the old process to be ended")
    until(lambda: running.loans().get(loan, {"epoch": 0})["epoch"] != 1, "the loan to be repaired")
    conditions = {device["condition"] for node in running.get("/v1/nodes")["nodes"] for device in node["devices"]}
    until(lambda: {device["condition"] for node in running.get("/v1/nodes")["nodes"] for device in node["devices"]}
          == {"healthy"}, f"all devices to be healthy, not {conditions}")
    assert running.await_running("j")["attempts"] == 2


def test_a_node_that_dies_while_draining_is_no_overdue_loan(running: AllocatorProcess, tmp_path: Path) -> None:
    """F5."""
    loan = lend(running, "deaf", DEAF, str(tmp_path / "ready"))
    until((tmp_path / "ready").exists, "the job to turn deaf")
    running.recall(loan)
    until(lambda: running.loans()[loan]["state"] == "draining", "the drain")
    running.ask(f"/v1/nodes/{INFERENCE_NODE}", "POST", {"state": "down"})
    assert running.loans()[loan]["state"] == "lost"
    time.sleep(0.5)
    assert "overdue" not in running.steps_of_loan(loan)


def test_while_the_engine_cannot_tell_nothing_is_given_away(running: AllocatorProcess, tmp_path: Path) -> None:
    """F14: the run's record cannot be read, so its state is unknown; the devices are nobody's until it can."""
    loan = lend(running, "j", SAVES_AND_GOES, str(tmp_path / "ready"))
    until((tmp_path / "ready").exists, "the job to be ready")
    run = running.job("j")["run"]["run"]
    plan = tmp_path / "state/runs" / run / "plan.json"
    kept = plan.read_bytes()
    plan.write_text("{")
    until(lambda: running.job("j")["run"]["reachable"] is False, "the run to be unreachable")
    running.set_supply(0)
    until(lambda: running.loans().get(loan, {}).get("due_in_s") is not None, "the recall")
    time.sleep(1.0)
    assert running.loans()[loan]["state"] in ("recall_requested", "draining")
    assert running.job("j")["state"] == "stopping"
    recalled_s = time.time()
    plan.write_bytes(kept)
    running.await_serving(loan, recalled_s)
    assert running.steps_of_loan(loan)[-1] == "returned"


def test_an_estimate_that_is_overrun_is_not_believed(running: AllocatorProcess, tmp_path: Path) -> None:
    """F16: a job that should have been over long ago is told to go like any other."""
    loan = lend(running, "late", SAVES_AND_GOES, str(tmp_path / "ready"), work_unit_s=2.0,
                checkpoint={"restart_s": 0.0})
    until((tmp_path / "ready").exists, "the job to be ready")
    time.sleep(1.5)
    recalled_s = time.time()
    running.recall(loan)
    assert running.await_serving(loan, recalled_s) - recalled_s < GRACE_S
    assert running.job("late")["recalls"] == 1


def test_a_job_that_fails_again_and_again_is_given_up(running: AllocatorProcess) -> None:
    running.submit("broken", python("raise SystemExit(3)"), cards=["k80"])
    until(lambda: running.job("broken")["state"] == "failed", "the job to be given up")
    assert sum(move["became"] == "starting" for move in running.job("broken")["history"]) == 4
    running.submit("no-such-program", ["/no/such/program"], cards=["k80"])
    until(lambda: running.job("no-such-program")["state"] == "failed", "the job to be given up")


def test_cancelled_while_it_runs_a_job_may_save_and_is_over(running: AllocatorProcess, tmp_path: Path) -> None:
    lend(running, "j", SAVES_AND_GOES, str(tmp_path / "ready"))
    until((tmp_path / "ready").exists, "the job to be ready")
    assert running.ask("/v1/jobs/j", "DELETE")[0] == 202
    until(lambda: running.job("j")["state"] == "cancelled", "the job to be over")
    assert running.job("j")["resume_from"] == "/seven"


def test_what_the_service_is_told_by_signal_ends_it_and_leaves_the_job_alone(running: AllocatorProcess) -> None:
    lend(running, "j", FOREVER)
    running.send_signal(signal.SIGTERM)
    assert running.process is not None
    assert running.process.wait(20) == 0
    assert running.live_runs() == ["j.2"]
    running.start()
    shown = running.job("j")
    assert (shown["state"], shown["attempts"]) == ("running", 1)


