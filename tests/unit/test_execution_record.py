"""Records on disk, device variables, plans, and what a report makes of them."""

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from allocator.execution import cgroups
from allocator.execution.assess import Sight, assess
from allocator.execution.devices import VISIBILITY, Device, UnknownVendor, visibility_env
from allocator.execution.drain import Orders
from allocator.execution.engine import BadLaunch
from allocator.execution.plans import make_plan
from allocator.execution.processes import Found, Identity, Process
from allocator.execution.record import (
    BadRecord,
    Plan,
    Progress,
    RunFolder,
    Started,
    run_folders,
    try_lock,
    write_atomically,
)
from allocator.execution.values import CheckpointContract, Launch, Member, RunState

MEMBERS = (Identity(11, 100), Identity(12, 100))
ASKED = Orders(1, deadline_unix_s=50.0, deadline_boot_s=50.0, signal=10, saving=True)
FRESH = Sight("run", Orders(1), Progress(), MEMBERS, (), (), True, kept=True, starting=False)


def alive(*ranks: int, others: int = 0) -> tuple[Found, ...]:
    identities = [MEMBERS[rank] for rank in ranks] + [Identity(90 + index, 100) for index in range(others)]
    return tuple(Found(Process(identity, 1, 1, "S", "job"), "environment") for identity in identities)


def over(*exits: int | None, **more: object) -> Progress:
    return replace(Progress({str(rank): code for rank, code in enumerate(exits)}, over=True), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(("changes", "state"), [
    ({"members": (), "starting": True}, RunState.STARTING),
    ({"members": (), "starting": True, "found": alive(0)}, RunState.STARTING),
    ({"members": (), "progress": Progress(failure="no", over=True)}, RunState.NOT_STARTED),
    ({"found": alive(0, 1, others=3)}, RunState.RUNNING),
    ({"found": alive(0)}, RunState.BROKEN),
    ({"found": alive(others=1)}, RunState.ENDING),
    ({}, RunState.ENDING),
    ({"found": alive(0, 1), "orders": ASKED}, RunState.DRAINING),
    ({"orders": ASKED}, RunState.DRAINING),
    ({"found": alive(0), "orders": replace(ASKED, kill=True)}, RunState.KILLING),
    ({"found": alive(0), "progress": Progress(forced="deadline")}, RunState.KILLING),
    # The record says that it is over; the process table says that it is not.
    ({"found": alive(0), "progress": over(0, 0)}, RunState.BROKEN),
    ({"progress": over(0, 0)}, RunState.COMPLETED),
    ({"progress": over(0, 0, forced="leftovers")}, RunState.COMPLETED),
    ({"progress": over(0, 3)}, RunState.FAILED),
    ({"progress": over(0, 3, forced="leftovers")}, RunState.FAILED),
    ({"kept": False}, RunState.FAILED),
    ({"progress": over(0, 0), "orders": ASKED, "acks": ({}, {})}, RunState.CHECKPOINTED),
    ({"progress": over(-9, -9, forced="leftovers"), "orders": ASKED, "acks": ({}, {})}, RunState.CHECKPOINTED),
    ({"progress": over(0, -9, forced="deadline"), "orders": ASKED, "acks": ({}, None)}, RunState.KILLED),
    ({"progress": over(0, 1), "orders": ASKED, "acks": ({}, None)}, RunState.FAILED),
    ({"progress": over(0, 0), "orders": ASKED, "acks": (None, None)}, RunState.COMPLETED),
    ({"progress": over(0, 0), "orders": ASKED, "acks": (None, None), "acknowledged_by_file": False},
     RunState.CHECKPOINTED),
    ({"progress": over(0, 1), "orders": ASKED, "acks": (None, None), "acknowledged_by_file": False}, RunState.FAILED),
    ({"progress": over(-15, 0), "orders": replace(ASKED, signal=15, saving=False)}, RunState.STOPPED),
    ({"progress": over(-9, -9, forced="deadline"), "orders": replace(ASKED, signal=15, saving=False)}, RunState.KILLED),
    ({"progress": over(-9, -9), "orders": Orders(1, kill=True)}, RunState.KILLED),
])
def test_the_state_of_a_run(changes: dict[str, object], state: RunState) -> None:
    report = assess(replace(FRESH, **changes), 10.0, 10.0)      # type: ignore[arg-type]
    assert report.state is state
    assert not (report.ended and report.processes), "never over while a process is left"


def test_a_report_says_what_the_state_does_not() -> None:
    sight = replace(FRESH, orders=ASKED, found=alive(1, others=2), acks=({"step": 4, "resume_from": "/c"}, None),
                    progress=Progress({"0": -11}, forced="deadline"), kept=False)
    report = assess(sight, 50.5, 3650.5)
    assert (report.overdue, report.forced, report.processes, report.deadline_unix_s) == (True, True, 3, 3650.0)
    assert report.note == ("SIGKILL sent: deadline; member 0 ended with SIGSEGV; 2 processes beside the members; "
                           "its shim is gone")
    saved, lost = report.members
    assert (saved.alive, saved.exit_code, saved.acknowledged, saved.step, saved.resume_from) == (
        False, -11, True, 4, "/c")
    assert (lost.alive, lost.acknowledged) == (True, False)
    assert not assess(sight, 49.5, 49.5).overdue


def test_an_acknowledgement_in_other_words_still_counts() -> None:
    sight = replace(FRESH, orders=ASKED, progress=over(0, 0), acks=({"step": "four", "resume_from": 7}, {}))
    report = assess(sight, 0.0, 0.0)
    assert report.state is RunState.CHECKPOINTED
    assert {(member.step, member.resume_from) for member in report.members} == {(None, None)}


# --- files

PLAN = Plan("run", 1, "nonce", (("a",), ("b", "c")), ({"A": "1"}, {}), "/", 10, True, 2.0, 0.5, "/group")


def test_what_is_written_is_read_and_nobody_else_may(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert (folder.plan(), folder.orders(), folder.started(), folder.shims(), folder.progress(), folder.launch()) == (
        None, None, None, (), Progress(), None)
    values = {"plan": PLAN, "orders": ASKED, "started": Started("boot", MEMBERS),
              "progress": Progress({"0": -9, "1": None}, (10, 15), "deadline", None, True)}
    for name, value in values.items():
        folder.write(name, value)
    folder.write("shim", MEMBERS)
    assert (folder.plan(), folder.orders(), folder.started(), folder.progress()) == tuple(values.values())
    assert folder.shims() == MEMBERS
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"epoch": 1, "other": 2}', "null", "3"])
def test_a_file_that_is_not_ours_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "orders.json").write_text(text)
    with pytest.raises(BadRecord, match=r"orders\.json"):
        RunFolder(tmp_path).orders()


def test_orders_stand_under_the_epoch_of_the_launch_at_least(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    plan = replace(PLAN, epoch=5)
    assert folder.standing_orders(plan) == Orders(5)
    folder.write("orders", Orders(3))
    assert folder.standing_orders(plan) == Orders(5)
    folder.write("orders", replace(ASKED, epoch=6))
    assert folder.standing_orders(plan) == replace(ASKED, epoch=6)


@pytest.mark.parametrize(("text", "ack"), [
    ("", {}), ("saved", {}), ("[1]", {}), ('{"step": 3}', {"step": 3}), ("\udcff", {})])
def test_an_acknowledgement_may_hold_anything(tmp_path: Path, text: str, ack: dict[str, object]) -> None:
    folder = RunFolder(tmp_path)
    assert folder.ack(0) is None
    folder.ack_path(0).write_bytes(text.encode(errors="surrogateescape"))
    assert folder.ack(0) == ack
    folder.remove_acks()
    assert folder.ack(0) is None


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def full(descriptor: int) -> None:
        raise OSError(28, "no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"


def test_a_lock_is_held_until_its_last_copy_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first = try_lock(path)
    assert first is not None
    assert try_lock(path) is None
    copy = os.dup(first)
    os.close(first)
    assert try_lock(path) is None
    os.close(copy)
    second = try_lock(path)
    assert second is not None
    os.close(second)


def test_folders_are_listed_by_name(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / name).mkdir()
    (tmp_path / "file").touch()
    assert [folder.run_id for folder in run_folders(tmp_path)] == ["a", "b"]


# --- devices

@pytest.mark.parametrize(("devices", "env"), [
    ((Device("nvidia", "2"), Device("nvidia", "0")),
     {"CUDA_VISIBLE_DEVICES": "2,0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}),
    ((Device("amd", "1"),), {"HIP_VISIBLE_DEVICES": "1"}),
    ((Device("ascend", "3"), Device("ascend", "7")), {"ASCEND_RT_VISIBLE_DEVICES": "3,7"}),
    ((Device("intel", "0"), Device("intel", "1")), {"ONEAPI_DEVICE_SELECTOR": "level_zero:0,1"}),
    ((), {"CUDA_VISIBLE_DEVICES": ""}),
    ((Device("cpu", "0"),), {"CUDA_VISIBLE_DEVICES": ""}),
])
def test_a_process_is_shown_its_devices(devices: tuple[Device, ...], env: dict[str, str]) -> None:
    assert visibility_env(devices) == env


def test_every_row_of_the_table_names_its_source_and_shows_a_device() -> None:
    for vendor, row in VISIBILITY.items():
        assert row.source, vendor
        env = visibility_env([Device(vendor, "5")])
        assert row.variable is None or env[row.variable].endswith("5")


@pytest.mark.parametrize(("devices", "error", "text"), [
    ([Device("nvidia", "0"), Device("amd", "0")], ValueError, "amd, nvidia"),
    ([Device("voodoo", "0")], UnknownVendor, "known: amd, ascend"),
    ([Device("ascend", "1, 2")], ValueError, "no comma and no blank"),
    ([Device("nvidia", "")], ValueError, "not empty"),
])
def test_devices_that_cannot_be_shown(devices: list[Device], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        visibility_env(devices)


# --- plans

LAUNCH = Launch("run", 4, (Member((sys.executable, "-V"), (Device("nvidia", "1"),), {"RANK": "mine"}),
                           Member(("sh", "-c", "true"), (Device("nvidia", "0"),), {"HEADRACE_RUN": "forged"})))


def plan_of(launch: Launch, folder: Path) -> Plan:
    return make_plan(launch, RunFolder(folder), {"PATH": "/usr/bin:/bin", "SECRET": "s"}, nonce="n", kill_margin_s=0.5)


def test_a_plan_is_worked_out_for_each_member(tmp_path: Path) -> None:
    plan = plan_of(LAUNCH, tmp_path)
    assert (plan.epoch, plan.checkpoint_signal, plan.acknowledged_by_file) == (4, signal.SIGUSR1, True)
    first, second = plan.envs
    assert first == {
        "PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "RANK": "mine",
        "WORLD_SIZE": "2", "HEADRACE_RUN_ID": "run", "HEADRACE_CHECKPOINT_ACK": str(tmp_path / "ack-0"),
        "HEADRACE_RUN": "run/n", "HEADRACE_DEVICES": "nvidia:1"}
    assert (second["RANK"], second["HEADRACE_RUN"]) == ("1", "run/n"), "the mark is ours whatever the launch says"
    assert json.loads(json.dumps(plan.argvs)) == [[sys.executable, "-V"], ["sh", "-c", "true"]]


@pytest.mark.parametrize(("launch", "text"), [
    (replace(LAUNCH, members=()), "at least one member"),
    (replace(LAUNCH, members=LAUNCH.members[:1] * 2), "nvidia:1 is given to two members"),
    (replace(LAUNCH, members=(*LAUNCH.members, Member(("sh",), (Device("amd", "0"),)))), "one type .* amd, nvidia"),
    (replace(LAUNCH, members=(Member(("sh",), (Device("voodoo", "0"),)),)), "member 0: no vendor 'voodoo'"),
    (replace(LAUNCH, members=(Member(()),)), "member 0: a command has at least one word"),
    (replace(LAUNCH, members=(Member(("sh", "a\0b")),)), "zero byte"),
    (replace(LAUNCH, members=(Member(("sh",), env={"A=B": "1"}),)), "'A=B' is no name"),
    (replace(LAUNCH, members=(Member(("no-such-program",)),)), "no program 'no-such-program'.* in PATH=/usr/bin:/bin"),
    (replace(LAUNCH, members=(Member(("./no-such-program",)),)), "no program './no-such-program'"),
    (replace(LAUNCH, folder="/no/such/folder"), "working folder /no/such/folder does not exist"),
    (replace(LAUNCH, checkpoint=CheckpointContract(signal=signal.SIGKILL)), "signal 9 cannot ask"),
    (replace(LAUNCH, checkpoint=CheckpointContract(signal=99)), "signal 99 cannot ask"),
    (replace(LAUNCH, checkpoint=CheckpointContract(linger_s=float("nan"))), "linger_s"),
])
def test_a_launch_that_makes_no_sense_says_why(tmp_path: Path, launch: Launch, text: str) -> None:
    with pytest.raises(BadLaunch, match=text):
        plan_of(launch, tmp_path)


def test_a_program_is_looked_for_from_the_working_folder(tmp_path: Path) -> None:
    (tmp_path / "job").write_text("#!/bin/sh\n")
    launch = replace(LAUNCH, members=(Member(("./job",)),), folder=str(tmp_path))
    with pytest.raises(BadLaunch, match="may be executed"):
        plan_of(launch, tmp_path)
    (tmp_path / "job").chmod(0o755)
    assert plan_of(launch, tmp_path).folder == str(tmp_path)


# --- control groups, on a folder that looks like one

def test_a_group_that_is_gone_has_no_members(tmp_path: Path) -> None:
    below = tmp_path / "below"
    below.mkdir()
    (tmp_path / "cgroup.procs").write_text("1\n22\n")
    (below / "cgroup.procs").write_text("333\n")
    assert cgroups.members(tmp_path) == {1, 22, 333}
    assert cgroups.members(tmp_path / "gone") == frozenset()
    assert cgroups.remove(tmp_path / "gone")
    assert not cgroups.remove(tmp_path), "not empty"
    assert not cgroups.kill(tmp_path / "gone")
