"""The allocator file and the job file: what is refused, in which words, and what they declare."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allocator.execution.devices import Device
from allocator.execution.values import Acknowledgement
from allocator.model.jobs import Kind, Level, Run
from allocator.model.pools import Currency, PoolKind
from allocator.service.config import Declared
from allocator.service.job_request import JobRequest, Saved, launch_of, read_attached, request_text, saved_text
from headrace.allocator.file import load_allocator, load_job
from headrace.allocator.serve import run_allocate
from settings.source import ConfigError

FILE: dict[str, Any] = {
    "version": 1,
    "nodes": [{"name": "t0", "card": "k80", "devices": 2, "labels": {"for": "training"}, "site": "fra"},
              {"name": "i0", "card": "v100", "devices": 4, "labels": {"for": "inference"}, "vendor": "nvidia"}],
    "pools": [{"name": "training", "kind": "training", "selector": {"for": "training"}, "currency": "units"},
              {"name": "inference", "kind": "inference", "selector": {"for": "inference"}}],
    "queues": [{"name": "q", "parent": "training", "quotas": {"units": {"nominal": 3, "borrowing_limit": 2}}}],
    "backends": [{"name": "chat", "pool": "inference", "devices": ["i0:0", "i0:1"]}],
    "supplies": [{"pool": "inference", "card": "v100", "lendable": 1, "spare": 1}],
    "cards": [{"name": "v100", "purchase_price": 8766.0, "depreciation_years": 1.0, "power_w": 500.0,
               "price_per_kwh": 0.2}],
    "links": [{"source": "fra", "target": "ams", "gbps": 40.0}],
}
JOB: dict[str, Any] = {"name": "j", "queue": "q", "cards": ["v100"], "command": ["train", "--fast"]}


def load(folder: Path, content: dict[str, Any]) -> Declared:
    file = folder / "allocator.yaml"
    file.write_text(json.dumps(content, indent=1) + "\n")
    return load_allocator(file)


def changed(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(json.dumps(FILE))
    change(content)
    return content


def test_a_file_declares_what_the_core_needs(tmp_path: Path) -> None:
    declared = load(tmp_path, FILE)
    config = declared.declaration
    assert [(pool.name, pool.kind, pool.currency) for pool in config.pools] == [
        ("training", PoolKind.TRAINING, Currency.UNITS), ("inference", PoolKind.INFERENCE, Currency.CARDS)]
    quota = config.queues[0].quotas["units"]
    assert (quota.nominal, quota.lending_limit, quota.borrowing_limit) == (3.0, None, 2.0)
    assert config.links_gbps == {"fra>ams": 40.0}
    assert declared.backends[0].card == "v100"
    assert declared.device_of["t0:1"] == Device("cpu", "t0:1")
    assert declared.device_of["i0:3"] == Device("nvidia", "3")
    assert declared.price_per_hour["v100"] == pytest.approx(1.0 + 0.5 * 0.2)
    assert declared.coefficients.version.startswith("gavel-")
    assert declared.store_url({}) == f"sqlite:///{tmp_path}/.headrace/allocator/allocator.db"


def test_the_version_of_a_declaration_names_what_decides(tmp_path: Path) -> None:
    version = load(tmp_path, FILE).declaration.version
    assert load(tmp_path, changed(lambda c: c.update(listen={"port": 9}, cards=[]))).declaration.version == version
    assert load(tmp_path, changed(lambda c: c.update(rules={"grace_s": 60.0}))).declaration.version == version
    assert load(tmp_path, changed(lambda c: c.update(rules={"grace_s": 61.0}))).declaration.version != version


@pytest.mark.parametrize(("change", "path", "said"), [
    (lambda c: c.update(version=2), "version", "must be 1"),
    (lambda c: c.update(nods=[]), "nods", "unknown setting"),
    (lambda c: c["nodes"][1].update(name="t0"), "nodes[1].name", "is already nodes[0]"),
    (lambda c: c["nodes"][0].update(devices=0), "nodes[0].devices", "must be ≥ 1"),
    (lambda c: c["nodes"][0].update(vendor="abacus"), "nodes[0].vendor", "is not a known vendor"),
    (lambda c: c["nodes"][1].update(device_ids=["0"]), "nodes[1].device_ids", "names 1 devices, the node has 4"),
    (lambda c: c["nodes"][0].update(vendor="nvidia"), "nodes[1].device_ids", "device 0 of nvidia is on t0 as well"),
    (lambda c: c["nodes"][0].update(card="abacus"), "nodes[0]", "is not in the coefficients"),
    (lambda c: c["nodes"][0].update(island_devices=3), "nodes[0]", "do not divide into islands of 3"),
    (lambda c: c["pools"][1].update(selector={"for": "training"}), "nodes[0]", "its labels put it in two pools"),
    (lambda c: c["pools"][0].update(kind="enclave"), "pools[0]", "an enclave needs a reason and a review_on date"),
    (lambda c: c["pools"][0].update(kind="enclave", reason="x", review_on="never"), "pools[0].review_on",
     "must be a date such as"),
    (lambda c: c["pools"][0].update(kind="transitional", starts_at="2027-01-01"), "pools[0].starts_at",
     "must name its time zone"),
    (lambda c: c["pools"][0].update(starts_at="soon"), "pools[0].starts_at", "must be a time such as"),
    (lambda c: c["queues"][0].update(parent="nowhere"), "queues[0]", "its parents do not lead to a pool"),
    (lambda c: c["queues"][0].update(parent="inference"), "queues[0]", "is for inference and runs no jobs"),
    (lambda c: c["queues"][0].update(quotas={"v100": {"nominal": 1}}), "queues[0]", "counts in units"),
    (lambda c: c["queues"][0]["quotas"]["units"].update(nominal=-1), "queues[0].quotas.units.nominal", "must be ≥ 0"),
    (lambda c: c["backends"][0].update(pool="training"), "backends[0].pool", "names no inference pool"),
    (lambda c: c["backends"][0].update(devices=["i0:9"]), "backends[0].devices[0]", "is no device of a node"),
    (lambda c: c["backends"][0].update(devices=["i0:0", "t0:0"]), "backends[0].devices", "are of several cards"),
    (lambda c: c["backends"].append({"name": "b", "pool": "inference", "devices": ["i0:1"]}),
     "backends[1].devices[0]", "i0:1 is under chat already"),
    (lambda c: c["supplies"][0].update(pool="training"), "supplies[0].pool", "names no inference pool"),
    (lambda c: c.update(listen={"host": "0.0.0.0"}), "listen.host", "is not loopback, and no token is asked for"),
    (lambda c: c.update(store={"path": "a.db", "url_env": "DATABASE_URL"}), "store.path", "stands beside url_env"),
    (lambda c: c.update(rules={"grace_s": 5.0, "kill_margin_s": 6.0}), "rules.kill_margin_s", "6.0 leaves nothing"),
    (lambda c: c.update(rules={"grace_s": 8.0}), "rules.kill_margin_s", "10.0 leaves nothing"),
    (lambda c: c.update(rules={"grace_s": 0.4, "kill_margin_s": 0.1}), "execution.kill_margin_s", "leaves nothing"),
    (lambda c: c.update(coefficients="none.json"), "coefficients", "No such file"),
    (lambda c: c.update(router={"url": "127.0.0.1:9090"}), "router.url", "must begin with http:// or https://"),
    (lambda c: c.update(router={"url": "http://user:secret@r"}), "router.url", "must not hold a user or password"),
    (lambda c: c.update(router={}), "router.url", "is missing"),
    (lambda c: c.update(router={"url": "http://r:9090", "hold_s": -1}), "router.hold_s", "must be ≥ 0"),
    (lambda c: c.update(router={"url": "http://r:9090"}), "backends[0]", "needs a command"),
    (lambda c: c.update(router={"url": "http://r:9090"}, backends=[], supplies=[]), "router", "has no backends"),
])
def test_what_is_wrong_is_said_where_it_stands(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], path: str, said: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        load(tmp_path, changed(change))
    problems = [(problem.path, problem.message) for problem in refused.value.problems]
    assert any(place == path and said in message for place, message in problems), problems
    assert all(problem.line for problem in refused.value.problems)


def test_a_fault_of_the_rules_points_at_its_line(tmp_path: Path) -> None:
    for rules, line in (({"grace_s": 5.0, "kill_margin_s": 6.0}, '"kill_margin_s"'), ({"grace_s": 8.0}, '"rules"')):
        with pytest.raises(ConfigError) as refused:
            load(tmp_path, {**FILE, "rules": rules})
        text = (tmp_path / "allocator.yaml").read_text().splitlines()
        (problem,) = refused.value.problems
        assert line in text[(problem.line or 0) - 1]


@pytest.mark.parametrize(("quota", "said"), [
    ({"units": {"nominal": 9}}, "promised 9 units in all, and it has 0.59"), ({"units": {"nominal": 0.1}}, "")])
def test_a_guarantee_beyond_what_the_pool_has_is_a_hint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], quota: dict[str, Any], said: str
) -> None:
    load(tmp_path, changed(lambda c: c["queues"][0].update(quotas=quota)))
    assert asyncio.run(run_allocate(tmp_path / "allocator.yaml", json=False, check=True)) == 0
    printed = capsys.readouterr().out
    assert ("hint: pool training" in printed) is bool(said)
    assert said in printed
    assert asyncio.run(run_allocate(tmp_path / "allocator.yaml", json=True, check=True)) == 0
    assert len(json.loads(capsys.readouterr().out)["hints"]) == bool(said)


@pytest.mark.parametrize(("gang", "path", "said"), [
    (0, "gang", "must be ≥ 1, got 0"), ("four", "gang", "must be a whole number"), (True, "gang", "a whole number"),
    ({"min": 4}, "gang.max", "is missing"), ({"min": 0, "max": 2}, "gang.min", "must be ≥ 1"),
    ({"min": 4, "max": 2}, "gang", "min must not be above max"),
    ({"min": 1, "max": 2, "mox": 3}, "gang.mox", "unknown setting"),
])
def test_what_is_wrong_with_a_gang_is_said_once_and_by_its_own_name(
    tmp_path: Path, gang: object, path: str, said: str
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(json.dumps({**JOB, "gang": gang}))
    with pytest.raises(ConfigError) as refused:
        load_job(file)
    (problem,) = refused.value.problems
    assert problem.path == path
    assert said in problem.message


def test_a_job_file_says_what_the_planner_and_the_engine_need(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("""
name: night
queue: q
kind: finetune
cards: [v100, p100]
gang: {min: 1, max: 4}
work_unit_s: 3600
checkpoint: {takes_s: 5, signal: SIGTERM, acknowledgement: exit}
windows: [{opens: "22:00", closes: "06:30", days: [fri, sat], utc_offset_h: 1}]
widest: leaf
command: [train]
""")
    request = load_job(file)
    job = request.job()
    assert (job.kind, job.gang_min, job.gang_max, job.widest) == (Kind.FINETUNE, 1, 4, Level.LEAF)
    assert job.checkpoint is not None
    assert (job.checkpoint.takes_s, job.checkpoint.restart_s) == (5.0, 60.0)
    (window,) = job.windows
    assert (window.opens_minute, window.closes_minute, window.days, window.utc_offset_s) == (1320, 390, (4, 5), 3600.0)


def a_run(*devices: str) -> Run:
    return Run("j.3", "j", 3, "q", "training", Kind.TRAINING, "unmeasured", "v100", devices, len(devices), None, 0.0,
               1.0, "t", "c")


def test_a_launch_has_one_process_for_each_node_or_each_device() -> None:
    known = {f"{node}:{index}": Device("nvidia", f"{node}{index}") for node in "ab" for index in range(2)}
    run = a_run("a:0", "a:1", "b:1")
    by_node = launch_of(JobRequest.model_validate(JOB), run, None, known)
    assert [member.devices for member in by_node.members] == [(known["a:0"], known["a:1"]), (known["b:1"],)]
    by_device = launch_of(JobRequest.model_validate({**JOB, "processes": "device"}), run, None, known)
    assert [member.devices for member in by_device.members] == [(known[name],) for name in run.devices]
    assert (by_node.run_id, by_node.epoch) == ("j.3", 3)
    assert by_node.members[0].env == {"HEADRACE_JOB": "j", "HEADRACE_CARD": "v100"}


def test_a_launch_goes_on_from_the_checkpoint_where_there_is_one() -> None:
    request = JobRequest.model_validate({
        **JOB, "resume_args": ["--resume", "{resume_from}"],
        "checkpoint": {"signal": "SIGUSR2", "acknowledgement": "exit", "linger_s": 9}})
    known = {"a:0": Device("cpu", "x")}
    fresh = launch_of(request, a_run("a:0"), None, known)
    assert fresh.members[0].argv == ("train", "--fast")
    again = launch_of(request, a_run("a:0"), Saved("/ck/7", 7), known)
    assert again.members[0].argv == ("train", "--fast", "--resume", "/ck/7")
    assert again.members[0].env["HEADRACE_RESUME_FROM"] == "/ck/7"
    assert again.checkpoint.acknowledgement is Acknowledgement.EXIT
    assert (again.checkpoint.signal, again.checkpoint.linger_s) == (12, 9.0)


@given(st.lists(st.builds(Saved, st.text(min_size=1), st.none() | st.integers(0, 10**9)), max_size=4))
def test_what_is_kept_beside_events_comes_back(saved: list[Saved]) -> None:
    request = JobRequest.model_validate({**JOB, "gang": {"min": 1, "max": 2}, "env": {"A": "é"}})
    texts = [("job_submitted", request_text(request))]
    texts += [("checkpoint_acknowledged", saved_text(one)) for one in saved]
    assert read_attached(texts) == (request, saved[-1] if saved else None)
