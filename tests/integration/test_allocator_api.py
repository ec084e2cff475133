"""The HTTP API and the command line, against one running allocator."""

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner, Result

from headrace import cli
from tests.allocator_processes import FOREVER, TRAINING_NODE, AllocatorProcess, allocator, document, python, sweep
from tests.processes import ask, until

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="the local engine reads /proc"),
              pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AllocatorProcess]:
    """With one job on a lent replica, `lent`, and one that waits for ever, `huge`."""
    with allocator(tmp_path_factory.mktemp("api")) as process:
        process.submit("lent", python(FOREVER))
        process.submit("huge", python(FOREVER), gang=64)
        process.await_running("lent")
        yield process
        process.check_journal()


def headrace(running: AllocatorProcess | str, *arguments: str, **environment: str) -> Result:
    """One command, in this process: a new one for each takes a second."""
    url = running if isinstance(running, str) else running.url
    return CliRunner().invoke(cli.app, list(arguments), env={"HEADRACE_ALLOCATOR": url, **environment})


def as_json(running: AllocatorProcess, *arguments: str) -> Any:
    done = headrace(running, *arguments, "--json")
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


def raw(running: AllocatorProcess, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, Any]:
    parts = urlsplit(running.url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=20)
    try:
        connection.request(method, path, body or None, {key.replace("_", "-"): text for key, text in headers.items()})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


JOB = {"name": "x", "queue": "q", "cards": ["k80"], "command": ["true"]}


@pytest.mark.parametrize(("change", "status", "said"), [
    ({"queue": "nowhere"}, 422, "There is no queue nowhere. Known: q."),
    ({"cards": []}, 422, "cards"),
    ({"name": "a b"}, 422, "must be 1 to 64 letters"),
    ({"gang": {"min": 3, "max": 2}}, 422, "gang: min must not be above max"),
    ({"gang": 0}, 422, "gang"),
    ({"folder": "here"}, 422, "folder: must be absolute"),
    ({"colour": "red"}, 422, "colour"),
    ({"work_unit_s": float("inf")}, 422, "work_unit_s"),
    ({"command": []}, 422, "command"),
    ({"windows": [{"opens": "25:00", "closes": "06:00"}]}, 422, "must be a time of day"),
    ({"name": "huge"}, 409, "a name is used once"),
])
def test_a_job_that_cannot_be_taken_is_refused_with_what_is_wrong(
    running: AllocatorProcess, change: dict[str, Any], status: int, said: str
) -> None:
    found = running.ask("/v1/jobs", "POST", {**JOB, **change})
    assert (found[0], said in found[1]["error"]["message"]) == (status, True), found


def test_the_same_submission_twice_is_one_job(running: AllocatorProcess) -> None:
    body = {**JOB, "name": "twice", "gang": 64}
    assert running.ask("/v1/jobs", "POST", body)[0] == 201
    status, found = running.ask("/v1/jobs", "POST", body)
    assert (status, found["job"], len(found["history"])) == (200, "twice", 1)
    assert running.ask("/v1/jobs/twice", "DELETE")[1]["state"] == "cancelled"
    status, found = running.ask("/v1/jobs", "POST", body)       # also when it is over: a name is used once
    assert (status, found["state"]) == (200, "cancelled")


def test_a_web_page_of_elsewhere_is_not_let_in(running: AllocatorProcess) -> None:
    body = json.dumps({**JOB, "name": "evil"}).encode()
    assert raw(running, "POST", "/v1/jobs", body, content_type="text/plain")[0] == 415
    status, found = raw(running, "POST", "/v1/jobs", body, content_type="application/json", origin="http://evil.test")
    assert (status, found["error"]["code"]) == (403, "foreign_origin")
    # Its own name may point here (DNS rebinding); then origin and host agree, but the host is a name.
    status, found = raw(running, "POST", "/v1/jobs", body, content_type="application/json", host="evil.test:8082",
                        origin="http://evil.test:8082")
    assert (status, found["error"]["code"]) == (403, "foreign_host")
    assert raw(running, "GET", "/v1/jobs", origin=running.url)[0] == 200
    assert raw(running, "GET", "/v1/jobs", host="localhost:8082")[0] == 200
    assert raw(running, "GET", "/v1/jobs", host="[::1]:8082")[0] == 200
    assert running.ask("/v1/jobs/evil")[0] == 404


@pytest.mark.parametrize(("method", "path", "body", "status"), [
    ("GET", "/v1/nothing", None, 404), ("PUT", "/v1/jobs", None, 405), ("GET", "/v1/jobs/nobody", None, 404),
    ("DELETE", "/v1/jobs/nobody", None, 404), ("GET", "/v1/jobs/nobody/why", None, 404),
    ("POST", "/v1/recall", {"target": "nowhere"}, 404), ("POST", "/v1/recall", {"target": "training"}, 409),
    ("POST", "/v1/recall", {"target": "inference", "deadline_s": -1}, 422),
    ("POST", "/v1/nodes/nowhere", {"state": "down"}, 409),
    ("POST", f"/v1/nodes/{TRAINING_NODE}", {"state": "sideways"}, 422),
    ("POST", "/v1/devices", {"devices": [f"{TRAINING_NODE}:9"], "condition": "cordoned"}, 409),
    ("PUT", "/v1/supply", {"pool": "inference", "card": "v100", "lendable": -1, "spare": 0}, 422),
    ("GET", "/v1/loans/history?limit=many", None, 422),
    ("GET", "/v1/loans/history?limit=%C2%B2", None, 422),
])
def test_what_makes_no_sense_is_refused_in_one_shape(
    running: AllocatorProcess, method: str, path: str, body: Any, status: int
) -> None:
    found = running.ask(path, method, body)
    assert found[0] == status
    assert found[1]["error"]["message"]
    assert found[1]["error"]["code"]


def test_a_body_that_is_too_large_or_no_json_is_refused(running: AllocatorProcess) -> None:
    assert raw(running, "POST", "/v1/jobs", b"{", content_type="application/json")[0] == 422
    assert raw(running, "POST", "/v1/jobs", b" " * 1_100_000, content_type="application/json")[0] == 413


def test_cordoned_devices_start_nothing_until_they_are_let_go(running: AllocatorProcess) -> None:
    devices = {"devices": [f"{TRAINING_NODE}:0"], "condition": "cordoned"}
    assert running.ask("/v1/devices", "POST", devices)[0] == 202
    running.submit("pair", python(""), cards=["k80"])
    assert running.get("/v1/jobs/pair/why")["code"] in ("not_healthy", "next_tick")
    assert running.ask("/v1/devices", "POST", {**devices, "condition": "healthy"})[0] == 202
    until(lambda: running.job("pair")["state"] == "completed", "the job to be done")
    assert running.get("/v1/jobs/pair/why")["code"] == "over"


def test_the_file_is_read_again_on_request_and_on_sighup(running: AllocatorProcess) -> None:
    version = running.get("/v1/config")["version"]
    running.document["rules"]["warn_before_s"] = 7.0
    text = json.dumps(running.document) + "\n"
    status, found = running.ask("/v1/reload?dry_run=1", "POST")
    assert (status, found["changed"]) == (200, False)
    running.file.write_text(text)       # the watch may be faster: either way it is taken over
    running.send_signal(signal.SIGHUP)
    until(lambda: running.get("/v1/config")["version"] != version, "the file to be taken over")
    status, found = running.ask("/v1/reload", "POST")
    assert (status, found["ok"], found["changed"]) == (200, True, False)
    running.file.write_text("version: 2\n")
    status, found = running.ask("/v1/reload?dry_run=1", "POST")
    assert status == 422
    assert any("must be 1" in problem for problem in found["problems"])
    running.file.write_text(text)


def test_the_metrics_tell_of_what_is_there(running: AllocatorProcess) -> None:
    page = ask(running.url, "/metrics")[1].decode()
    samples = {(sample.name, *sorted(sample.labels.values())): sample.value
               for family in text_string_to_metric_families(page) for sample in family.samples}
    prefix = "headrace_allocator_"
    assert samples[f"{prefix}leading",] == 1.0
    assert samples[f"{prefix}devices", "inference", "lent", "v100"] == 2.0
    assert samples[f"{prefix}devices", "borrowed", "training", "v100"] == 2.0
    assert samples[f"{prefix}loans", "inference", "lent"] == 1.0
    assert samples[f"{prefix}jobs", "q", "running"] >= 1.0
    assert samples[f"{prefix}queue_wait_seconds_count", "q", "small"] >= 1.0
    until(lambda: f'{prefix}used_unit_seconds_total{{card="v100",pool="training"}}'
          in ask(running.url, "/metrics")[1].decode(), "the first sum over time")


# --- the command line


def test_jobs_are_submitted_shown_and_cancelled(running: AllocatorProcess, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("name: from-file\nqueue: q\ncards: [k80]\ngang: 64\ncommand: [sleep, '100']\n")
    assert as_json(running, "jobs", "submit", str(file))["job"] == "from-file"
    assert headrace(running, "jobs", "submit", str(file)).exit_code == 0
    listed = as_json(running, "jobs", "list", "--history")
    assert {job["job"] for job in listed["jobs"]} >= {"from-file", "huge", "lent"}
    assert any(move["job"] == "lent" and move["became"] == "running" for move in listed["history"])
    shown = headrace(running, "jobs", "show", "lent")
    assert "v100 ×2 in training (lent)" in shown.stdout
    why = headrace(running, "jobs", "why", "from-file")
    assert why.stdout.startswith("gang_too_large: It needs 64 k80, the pool has 2")
    assert as_json(running, "jobs", "why", "huge")["code"] == "gang_too_large"
    assert as_json(running, "jobs", "cancel", "from-file")["state"] == "cancelled"
    assert "from-file: cancelled" in headrace(running, "jobs", "show", "from-file").stdout


def test_a_job_that_failed_says_why(running: AllocatorProcess, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("name: fails\nqueue: q\ncards: [k80]\ncommand: [sh, -c, 'echo out of luck; exit 7']\n")
    assert headrace(running, "jobs", "submit", str(file)).exit_code == 0
    until(lambda: as_json(running, "jobs", "show", "fails")["state"] == "failed", "the last try")
    assert "member 0 ended with exit code 7" in headrace(running, "jobs", "show", "fails").stdout


@pytest.mark.parametrize("name", ["huge?", "huge#", "huge/why", "..", "", "名前"])
@pytest.mark.parametrize("command", ["show", "why", "cancel"])
def test_what_can_be_no_jobs_name_is_nothing_else_either(running: AllocatorProcess, command: str, name: str) -> None:
    done = headrace(running, "jobs", command, name)
    assert done.exit_code == 1
    assert "no job can be called so" in done.stderr
    assert as_json(running, "jobs", "show", "huge")["state"] == "waiting"


def test_a_wrong_job_file_is_said_with_its_lines(running: AllocatorProcess, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("name: wrong\nqueue: q\ncards: k80\ngangs: 2\ncommand: [sleep]\n")
    done = headrace(running, "jobs", "submit", str(file))
    assert (done.exit_code, done.stdout) == (1, "")
    assert f"{file}:3:1  cards  must be a list" in done.stderr
    assert f'{file}:4:1  gangs  unknown setting (did you mean "gang"?)' in done.stderr


def test_pools_loans_and_quota_in_both_forms(running: AllocatorProcess) -> None:
    (inference,) = [pool for pool in as_json(running, "pools")["pools"] if pool["pool"] == "inference"]
    assert inference["cards"][0]["lent"] == 2
    assert "inference  v100" in headrace(running, "pools").stdout
    (loan,) = as_json(running, "loans")["loans"]
    assert (loan["state"], loan["jobs"], loan["due_in_s"]) == ("lent", ["lent"], None)
    assert loan["loan"] in headrace(running, "loans").stdout
    history = as_json(running, "loans", "--history", "--limit", "2")["history"]
    assert [move["became"] for move in history] == ["offered", "lent"]
    assert "claim_ready" in headrace(running, "loans", "--history").stdout
    (queue,) = as_json(running, "quota")["queues"]
    assert {key["key"]: key["used"] for key in queue["keys"]}["v100"] == 2.0
    assert "unit·h" in headrace(running, "quota").stdout


def test_top_draws_one_frame(running: AllocatorProcess) -> None:
    frame = headrace(running, "top", "--once").stdout
    assert "1 run, " in frame
    assert "inference → training" in frame
    assert "promised for" in frame
    assert "It needs 64 v100" in frame
    assert as_json(running, "top", "--once")["pools"]


def test_a_recall_by_hand(running: AllocatorProcess) -> None:
    (loan,) = running.loans()
    assert headrace(running, "recall", loan, "--deadline", "1").exit_code == 1
    found = as_json(running, "recall", "inference", "--replicas", "1", "--deadline", "30")
    assert [one["loan"] for one in found["recalled"]] == [loan]
    until(lambda: running.steps_of_loan(loan)[-1] == "returned" or "returned" in running.steps_of_loan(loan),
          "the return")
    running.await_running("lent")


def test_what_is_recalled_by_hand_is_kept_until_somebody_says_what_can_be_spared(
    running: AllocatorProcess, tmp_path: Path
) -> None:
    """Two replicas can be spared and one is lent: its sibling is not sent in its place."""
    running.document["rules"]["recall_keep_s"] = 300.0
    running.write()
    assert running.ask("/v1/reload", "POST", {})[0] == 200
    try:
        (loan,) = running.loans()
        printed = headrace(running, "recall", loan, "--emergency").stdout
        assert "kept for 5 min: no more is lent in its place" in printed
        until(lambda: running.job("lent")["state"] == "waiting", "the job to be gone")
        time.sleep(2.0)       # several ticks
        assert running.loans() == {}
        (card,) = next(pool for pool in as_json(running, "pools")["pools"] if pool["pool"] == "inference")["cards"]
        assert (card["most_out"], 0.0 < card["kept_for_s"] < 300.0) == (0, True)
        assert headrace(running, "supply", "inference", "v100", "--lendable", "2").exit_code == 0
        running.await_running("lent")
    finally:
        running.document["rules"]["recall_keep_s"] = 0.0
        running.write()


def test_a_cordon_and_its_end(running: AllocatorProcess) -> None:
    node = running.document["nodes"][0]["name"]
    assert f"{node}:1: cordoned" in headrace(running, "cordon", node).stdout
    free = {device["condition"] for one in running.get("/v1/nodes")["nodes"] if one["node"] == node
            for device in one["devices"]}
    assert free == {"cordoned"}
    assert f"{node}:0: healthy" in headrace(running, "cordon", f"{node}:0", "--undo").stdout
    assert headrace(running, "cordon", node, "--undo").exit_code == 0
    done = headrace(running, "cordon", "no-such-node")
    assert done.exit_code == 1
    assert "device no-such-node is unknown" in done.stderr


@pytest.mark.parametrize("command", [
    ["jobs", "list"], ["jobs", "show", "x"], ["jobs", "cancel", "x"], ["jobs", "why", "x"], ["pools"], ["loans"],
    ["loans", "--history"], ["recall", "x"], ["quota"], ["top", "--once"],
])
def test_without_an_allocator_every_command_says_so_in_one_line(command: list[str]) -> None:
    done = headrace("http://127.0.0.1:9", *command)
    assert (done.exit_code, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert "is `headrace allocate` running?" in done.stderr


# --- starting


def test_with_a_token_nobody_comes_in_without_it(tmp_path: Path) -> None:
    process = AllocatorProcess(tmp_path, document(tmp_path, backends=[], supplies=[]))
    process.document["listen"]["token_env"] = "TEST_TOKEN"
    process.write()
    process.environment = {"TEST_TOKEN": "s3cret"}
    try:
        with process:
            assert ask(process.url, "/v1/jobs")[0] == 401
            assert raw(process, "GET", "/v1/jobs", authorization="Bearer wrong")[0] == 401
            assert raw(process, "GET", "/v1/jobs", authorization="Bearer s3cret")[0] == 200
            assert ask(process.url, "/health")[0] == 200
            done = headrace(process, "pools", "--json", HEADRACE_ALLOCATOR_TOKEN="s3cret")
            assert json.loads(done.stdout)["pools"]
            assert "The token is missing or wrong" in headrace(process, "pools").stderr
    finally:
        sweep(tmp_path / "state")


def start(folder: Path, **changes: Any) -> "subprocess.CompletedProcess[str]":
    file = folder / "allocator.yaml"
    file.write_text(json.dumps(document(folder, **changes)) + "\n")
    environment = {key: value for key, value in os.environ.items() if key != "NO_SUCH_VARIABLE"}
    return subprocess.run([sys.executable, "-m", "headrace", "allocate", "-c", str(file)], capture_output=True,
                          text=True, timeout=60, env=environment, check=False)


@pytest.mark.parametrize(("changes", "said"), [
    ({"listen": {"port": 8082, "token_env": "NO_SUCH_VARIABLE"}}, "NO_SUCH_VARIABLE is not set or empty"),
    ({"store": {"url_env": "NO_SUCH_VARIABLE"}}, "NO_SUCH_VARIABLE is not set"),
    ({"store": {"path": "/proc/none/x.db"}}, "unable to open database file"),
    ({"listen": {"host": "0.0.0.0"}}, "is not loopback, and no token is asked for"),
    ({"coefficients": "missing.json"}, "No such file"),
    ({"state": "/proc/none"}, "state: the folder /proc/none cannot be made: No such file or directory; name one that"),
])
def test_what_cannot_start_says_why_in_a_line(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    done = start(tmp_path, **changes)
    assert done.returncode == 1
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_journal_is_audited_beside_the_allocator_that_writes_it(running: AllocatorProcess) -> None:
    done = CliRunner().invoke(cli.app, ["allocate", "-c", str(running.file), "--audit", "--json"])
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert (said["ok"], said["faults"]) == (True, [])
    assert said["events"] > 5
    assert CliRunner().invoke(cli.app, ["allocate", "-c", "none.yaml", "--audit"]).exit_code == 1


def test_an_audit_of_no_journal_says_so_and_makes_none(tmp_path: Path) -> None:
    file = tmp_path / "allocator.yaml"
    file.write_text(json.dumps(document(tmp_path)) + "\n")
    done = CliRunner().invoke(cli.app, ["allocate", "-c", str(file), "--audit"])
    assert done.exit_code == 1
    assert f"there is no journal {tmp_path}/state/allocator.db" in done.stderr
    assert sorted(tmp_path.iterdir()) == [file]


def test_a_second_allocator_on_one_store_waits_and_says_for_whom(running: AllocatorProcess, tmp_path: Path) -> None:
    store = running.folder / "state" / "allocator.db"
    second = AllocatorProcess(tmp_path, document(tmp_path, store={"path": str(store)}))
    try:
        second.start(is_leading=False)
        until(lambda: f"waiting: {running.url} leads on this store" in second.log.read_text(), "its word")
        assert headrace(second, "jobs", "list").exit_code == 0      # the command follows to the leader
    finally:
        second.close()


def test_a_taken_port_is_said(running: AllocatorProcess, tmp_path: Path) -> None:
    done = start(tmp_path, listen={"port": running.document["listen"]["port"]})
    assert done.returncode == 1
    assert "is another allocator running?" in done.stderr
