"""What one of several workers may do on its own."""

import json
import os
from pathlib import Path

import pytest

from router.config.fleet_file import load_fleet_bytes
from router.workers.parent import MAX_BACKOFF_S, backoff_s, own_folder
from router.workers.table import MAX_WORKERS
from router.workers.worker import SeatPlan, WorkerGateway
from tests.gateway_stack import fleet_document


def test_the_floors_of_retries_and_hedges_are_divided_and_the_file_is_shown_as_it_is(tmp_path: Path) -> None:
    def loaded(floor: float) -> bytes:
        backend = {"url": "http://127.0.0.1:9"}
        sections = {name: {"budget_floor_per_s": floor} for name in ("retries", "hedging")}
        return json.dumps(fleet_document([backend], **sections)).encode()

    path = tmp_path / "fleet.yaml"
    gateway = WorkerGateway(path, load_fleet_bytes(loaded(12.0), str(path), {}), {}, workers=4)
    assert gateway.dispatcher.generation.config.retries.budget_floor_per_s == 3.0
    assert gateway.dispatcher.generation.config.hedging.budget_floor_per_s == 3.0
    assert gateway.loaded.config.retries.budget_floor_per_s == 12.0
    assert gateway.dispatcher.generation.config_hash == gateway.loaded.config_hash
    gateway.apply(load_fleet_bytes(loaded(20.0), str(path), {}))
    assert gateway.dispatcher.generation.config.retries.budget_floor_per_s == 5.0
    gateway.fleet.close()


def test_what_runs_can_be_handed_to_a_successor(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    backend = {"url": "http://127.0.0.1:9", "api_key_env": "ENGINE_KEY"}
    document = fleet_document([backend], timeouts={"drain_s": 3}, health={"base_ejection_s": 2})
    first = load_fleet_bytes(json.dumps(document).encode(), str(path), {"ENGINE_KEY": "secret"})
    handed = json.dumps(first.config.model_dump(mode="json")).encode()
    assert b"secret" not in handed
    again = load_fleet_bytes(handed, str(path), {"ENGINE_KEY": "secret"})
    assert again.config_hash == first.config_hash
    assert again.specs == first.specs


def test_a_plan_survives_the_command_line() -> None:
    plan = SeatPlan("fleet.yaml", 3, 4, 5, 8, [6, 7], 1, 2, 9, 2, os.getpid(), "/tmp/x.sock", True, ["b0"], 2.5)
    assert SeatPlan(**json.loads(plan.arguments()[0])) == plan


def test_a_worker_that_dies_again_and_again_waits_longer_each_time() -> None:
    waits = [backoff_s(failures) for failures in range(40)]
    assert waits[:2] == [0.0, 0.0]
    assert waits == sorted(waits)
    assert waits[-1] == MAX_BACKOFF_S


def test_folders_of_killed_parents_are_swept_up_and_those_in_use_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    live, held = own_folder()
    dead, released = own_folder()
    os.close(released)  # as the kernel does at a process's end
    (dead / "1.sock").touch()
    newest, lock = own_folder()
    assert live.exists()
    assert not dead.exists()
    assert sorted(tmp_path.iterdir()) == sorted([live, newest])
    assert newest.stat().st_mode & 0o777 == 0o700
    os.close(held)
    os.close(lock)


@pytest.mark.parametrize("given", ["0", "-1", "two", "1.5", str(MAX_WORKERS + 1)])
def test_the_number_of_workers_is_checked(given: str, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from headrace.cli import app

    done = CliRunner().invoke(app, ["serve", "--config", str(tmp_path / "none.yaml"), "--workers", given])
    assert done.exit_code == 2
    assert "--workers" in done.output
