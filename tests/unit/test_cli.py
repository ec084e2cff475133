"""The command line as a user meets it: help, exit codes, one-line errors, JSON."""

import inspect
import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.main import get_command
from typer.testing import CliRunner

from headrace import cli
from headrace.gateway.status import AdminError, fetch_fleet, fleet_table, layout, request_reload, show_status
from loadtest.reliability.run import FIGURES
from loadtest.stack import free_ports

COMMANDS = [
    "up", "serve", "check", "status", "reload", "keys", "loadtest", "bench", "reliability", "fake-engine", "version",
    "sim", "allocate", "jobs", "pools", "loans", "recall", "supply", "cordon", "quota",
    "top",
]
FLEET: dict[str, Any] = {
    "config_hash": "0123456789ab", "policy": "headrace",
    "backends": [
        {"name": "llama-f16", "url": "http://127.0.0.1:9001", "engine": "llamacpp", "model": "m",
         "served_model_name": "m", "card_type": "cpu-avx2", "card_count": 1, "quantization": "f16",
         "parallel": {"tp": 2, "pp": 1, "dp": 1, "ep": 1}, "site": "local", "weight": 1.0, "price_per_hour": 0.4,
         "health": {"state": "healthy", "since_s": 3.0, "detail": ""}, "draining": False,
         "in_flight": {"requests": 3, "prefill_tokens": 10, "context_tokens": 99},
         "sample": {"age_s": 0.4, "running_requests": 2, "waiting_requests": 0, "kv_usage_ratio": 0.25},
         "served_requests": 30, "failed_requests": 1, "ttft_ewma_s": 0.1234, "drift": 1.1},
        {"name": "llama-q4", "url": "http://127.0.0.1:9002", "engine": "llamacpp", "model": "m",
         "served_model_name": "m", "card_type": "cpu-avx2", "card_count": 1, "quantization": None, "parallel": "tp1",
         "site": None, "weight": 0.0, "price_per_hour": 0.1,
         "health": {"state": "ejected", "since_s": 1.0, "detail": "5 errors"}, "draining": True,
         "in_flight": {"requests": 0, "prefill_tokens": 0, "context_tokens": 0}, "sample": None, "served_requests": 10,
         "failed_requests": 5, "ttft_ewma_s": None, "drift": 1.0},
    ],
}


@contextmanager
def admin(answers: dict[tuple[str, str], tuple[int, bytes]]) -> Iterator[str]:
    """A real admin listener that knows a few answers."""
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answers.get((self.command, self.path), (404, b"{}"))
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def fleet_admin(fleet: object = FLEET) -> Any:
    return admin({("GET", "/admin/fleet"): (200, json.dumps(fleet).encode())})


def headrace(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "headrace", *arguments], capture_output=True, text=True, timeout=60,
                          env={**os.environ, **environment}, check=False)


def test_help_names_every_command_with_a_whole_sentence() -> None:
    shown = CliRunner().invoke(cli.app, ["--help"]).output
    for command in COMMANDS:
        (line,) = [line for line in shown.splitlines() if line.split()[:1] == [command]]
        assert line.endswith("."), f"cut short or missing: {line!r}"
        assert "..." not in line


def leaves() -> Iterator[tuple[str, Any]]:
    """Every command by its whole name, those of groups too."""
    for name, command in get_command(cli.app).commands.items():  # type: ignore[attr-defined]
        children = getattr(command, "commands", {})
        yield from ((f"{name} {child}", inner) for child, inner in children.items()) if children else [(name, command)]


def test_each_command_takes_json() -> None:
    commands = dict(leaves())
    assert sorted({name.partition(" ")[0] for name in commands}) == sorted(COMMANDS)
    for name, command in commands.items():
        assert any("--json" in parameter.opts for parameter in command.params), name


def test_each_option_says_what_it_is() -> None:
    for name, command in leaves():
        for parameter in command.params:
            if parameter.param_type_name == "option":
                assert parameter.help, f"{name} {parameter.opts}"


def test_the_help_of_reliability_names_every_figure() -> None:
    (argument,) = [parameter for name, command in leaves() if name == "reliability"
                   for parameter in command.params if parameter.param_type_name == "argument"]
    assert argument.help == f"Which: {' '.join(FIGURES)}; left out: all."


@pytest.mark.real_time
def test_help_loads_no_room() -> None:
    """The gateway, locust and httpx cost a second between them; help must not wait for that."""
    code = ("import sys; from headrace.cli import app; from typer.testing import CliRunner\n"
            "assert 'loadtest' in CliRunner().invoke(app, ['--help']).output\n"
            "print([m for m in ('router', 'httpx', 'pydantic', 'locust', 'uvloop', 'starlette') if m in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("arguments", [["nope"], ["status", "--nope"], ["serve"], ["up", "--engines", "steam"],
                                       ["loadtest", "--rate", "0"], ["sim", "list", "burst"],
                                       ["loadtest", "--fault", "slow"],
                                       ["up", "--port", "99999"],
                                       ["keys", "new", "--tenant", "t", "--max-parallel", "0"],
                                       ["up", "--admin-port", "-1"],
                                       ["serve", "-c", "fleet.yaml", "--port", "65536"]])
@pytest.mark.real_time
def test_usage_errors_exit_2_without_a_traceback(arguments: list[str]) -> None:
    done = headrace(*arguments)
    assert done.returncode == 2
    assert "Error: " in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.real_time
def test_version_in_both_forms() -> None:
    plain, as_json = headrace("version"), headrace("version", "--json")
    assert (plain.returncode, as_json.returncode) == (0, 0)
    found = json.loads(as_json.stdout)
    assert plain.stdout.strip() == f"{found['version']} ({found['form']})"
    assert found["form"] == "interpreted"


@pytest.mark.real_time
def test_status_without_a_gateway_is_one_line_that_helps() -> None:
    done = headrace("status", "--admin", "http://127.0.0.1:9")
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert "headrace up" in done.stderr


def test_an_unexpected_error_is_one_line_and_its_traceback_is_kept_for_who_asks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def break_down(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "/etc/fleet.yaml")

    monkeypatch.setattr(cli, "app", break_down)
    monkeypatch.delenv("HEADRACE_TRACEBACK", raising=False)
    with pytest.raises(SystemExit) as left:
        cli.main()
    error = capsys.readouterr().err
    assert left.value.code == 1
    assert error.count("\n") == 1
    assert "Permission denied" in error
    monkeypatch.setenv("HEADRACE_TRACEBACK", "1")
    with pytest.raises(PermissionError):
        cli.main()


def test_what_one_of_several_tasks_found_is_said_and_not_that_there_was_a_group(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def break_down(*_: object, **__: object) -> None:
        raise ExceptionGroup("unhandled errors in a TaskGroup", [ExceptionGroup("inner", [ValueError("no such card")])])

    monkeypatch.setattr(cli, "app", break_down)
    monkeypatch.delenv("HEADRACE_TRACEBACK", raising=False)
    with pytest.raises(SystemExit):
        cli.main()
    assert capsys.readouterr().err.startswith("headrace: ValueError: no such card (")


@pytest.mark.real_time
def test_ctrl_c_is_quiet() -> None:
    """130, as a shell expects, and not a word."""
    with fleet_admin() as url, subprocess.Popen(
            [sys.executable, "-m", "headrace", "status", "--watch", "--json", "--admin", url],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        assert watching.stderr is not None
        assert json.loads(watching.stdout.readline())["policy"] == "headrace"
        watching.send_signal(2)
        assert watching.wait(timeout=20) in (0, 130)
        assert watching.stderr.read() == ""


@pytest.mark.real_time
def test_status_shows_each_backend_and_dashes_for_the_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    with fleet_admin() as url:
        assert show_status(url) == 0
    title, header, first, second = capsys.readouterr().out.splitlines()
    assert "0123456789ab" in title
    assert header.split()[:3] == ["backend", "card", "quant"]
    assert " ".join(first.split()) == "llama-f16 cpu-avx2 ×1 f16 tp2 healthy 3 2 0 25% 0.4 s 1 0.40 0.123 s 30 1 75%"
    assert " ".join(second.split()) == "llama-q4 cpu-avx2 ×1 – tp1 ejected draining 0 – – – – 0 0.10 – 10 5 25%"


@pytest.mark.real_time
def test_status_shows_what_a_removed_backend_still_has(capsys: pytest.CaptureFixture[str]) -> None:
    with fleet_admin({**FLEET, "retiring": [{**FLEET["backends"][0], "name": "old"}]}) as url:
        assert show_status(url) == 0
    last = " ".join(capsys.readouterr().out.splitlines()[-1].split())
    assert last == "old cpu-avx2 ×1 f16 tp2 retiring 3 – – – – 1 0.40 0.123 s 30 1 –"


@pytest.mark.real_time
def test_status_says_what_waits_for_a_restart(capsys: pytest.CaptureFixture[str]) -> None:
    fleet = {**FLEET, "needs_restart": ["listen.port", "state.path"]}
    with admin({("GET", "/admin/fleet"): (200, json.dumps(fleet).encode())}) as url:
        assert show_status(url) == 0
    assert "\nneeds a restart, and holds its old value until then: listen.port, state.path\n" in capsys.readouterr().out


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
def test_a_narrow_terminal_gets_fewer_columns_and_each_of_them_whole(width: int) -> None:
    console = Console(width=width, file=io.StringIO(), highlight=False)
    console.print(fleet_table(FLEET, console))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 1 + len(FLEET["backends"])
    assert "…" not in "".join(lines)
    assert lines[0].split()[0] == "backend"
    assert lines[1].split()[0] == "llama-f16"
    assert "ejected draining" in lines[2]
    assert ("layout" in lines[0]) == (width == 200)


@pytest.mark.real_time
def test_status_as_json_is_what_the_gateway_said(capsys: pytest.CaptureFixture[str]) -> None:
    with fleet_admin() as url:
        assert show_status(url, json=True) == 0
    assert json.loads(capsys.readouterr().out) == FLEET


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"backends": 3}', b"\xff\xfe"])
@pytest.mark.real_time
def test_another_server_on_the_admin_port_is_said_plainly(body: bytes) -> None:
    with admin({("GET", "/admin/fleet"): (200, body)}) as url, pytest.raises(AdminError, match="--admin"):
        fetch_fleet(url)


@pytest.mark.parametrize("url", ["127.0.0.1:8081", "http://[", "nonsense"])
def test_an_address_that_is_none(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert show_status(url) == 2
    assert "headrace status: " in capsys.readouterr().err


@pytest.mark.parametrize("words", [["status"], ["reload"], ["pools"], ["jobs", "list"], ["top", "--once"]])
@pytest.mark.real_time
def test_where_nobody_answers_the_exit_code_is_2_whoever_was_asked(words: list[str]) -> None:
    (port,) = free_ports(1)
    asked = "--admin" if words[0] in ("status", "reload") else "--allocator"
    done = CliRunner().invoke(cli.app, [*words, asked, f"http://127.0.0.1:{port}"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert f"answers on http://127.0.0.1:{port} (" in done.stderr


@pytest.mark.real_time
def test_where_somebody_else_answers_it_is_1() -> None:
    with admin({}) as url:
        assert (show_status(url), request_reload(url)) == (1, 1)


@pytest.mark.real_time
def test_version_and_help_by_their_usual_names() -> None:
    assert headrace("--version").stdout == headrace("version").stdout != ""
    for words in ((), ("status",), ("jobs", "list"), ("fake-engine",)):
        short = headrace(*words, "-h")
        assert short.returncode == 0
        assert short.stdout == headrace(*words, "--help").stdout
        assert short.stdout.lower().startswith(" ".join(("usage: headrace", *words)))


@pytest.mark.parametrize(("status", "answer", "code", "said"), [
    (200, {"ok": True, "changed": True, "config_hash": "abc", "problems": []}, 0, "reloaded: the fleet is abc"),
    (200, {"ok": True, "changed": False, "config_hash": "abc"}, 0, "nothing changed: the fleet is abc"),
    (422, {"ok": False, "changed": False, "config_hash": "old", "problems": [
        {"file": "fleet.yaml", "line": 14, "column": 5, "path": "backends[1].weight",
         "message": "must be ≥ 0, got -1"}]},
     1, "fleet.yaml:14:5  backends[1].weight  must be ≥ 0, got -1"),
    (422, {"ok": False, "changed": False, "config_hash": "old", "problems": [
        {"file": "fleet.yaml", "line": 1, "column": 1, "path": "", "message": "is empty", "hint": "start from here"}]},
     1, "fleet.yaml:1:1  is empty\n      start from here"),
    (200, {"ok": True, "changed": True, "config_hash": "abc", "diff": {"needs_restart": ["listen.port", "state.path"]}},
     0, "needs a restart, and holds its old value until then: listen.port, state.path"),
    (200, {"ok": True, "changed": False, "config_hash": "abc", "diff": {"needs_restart": ["listen.port"]}},
     0, "needs a restart, and holds its old value until then: listen.port"),
    (200, {"ok": True, "changed": True, "config_hash": "abc", "warnings": [
        {"file": "fleet.yaml", "line": 18, "column": 5, "path": "backends[3]", "message": "has no price_per_hour"}]},
     0, "warning: fleet.yaml:18:5  backends[3]  has no price_per_hour"),
])
@pytest.mark.real_time
def test_reload_says_what_came_of_it(status: int, answer: dict[str, Any], code: int, said: str,
                                     capsys: pytest.CaptureFixture[str]) -> None:
    with admin({("POST", "/admin/reload"): (status, json.dumps(answer).encode())}) as url:
        assert request_reload(url) == code
        shown = capsys.readouterr()
        assert said in shown.out + shown.err
        assert request_reload(url, json=True) == code
        assert json.loads(capsys.readouterr().out) == answer


@pytest.mark.parametrize(("parallel", "shown"), [
    ({"tp": 4, "pp": 2, "dp": 1, "ep": 1}, "tp4·pp2"), ({"tp": 1}, "tp1"), ("tp2", "tp2"), (None, "–")])
def test_layouts_are_shown_short(parallel: object, shown: str) -> None:
    assert layout(parallel) == shown


def test_up_hands_over_what_was_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import headrace.up.run

    seen: list[headrace.up.run.UpOptions] = []

    async def run_up(options: headrace.up.run.UpOptions) -> int:
        seen.append(options)
        return 3

    monkeypatch.setattr(headrace.up.run, "run_up", run_up)
    done = CliRunner().invoke(cli.app, ["up", "--engines", "simulated", "--port", "1", "--run-dir", str(tmp_path),
                                        "--time-scale", "5", "--no-calibrate", "--json"])
    assert done.exit_code == 3
    (options,) = seen
    assert (options.engines, options.port, options.admin_port, options.run_dir, options.time_scale, options.calibrate,
            options.json) == ("simulated", 1, 8081, tmp_path, 5.0, False, True)


@pytest.mark.real_time
def test_fake_engine_passes_its_own_options_on() -> None:
    done = headrace("fake-engine", "--json", "--help")
    assert done.returncode == 0
    assert "--time-scale" in done.stdout
    assert headrace("fake-engine", "--card", "abacus", "--port", "0").returncode != 0


def test_every_command_is_a_short_function() -> None:
    """The command line holds no logic of its own."""
    for command in cli.app.registered_commands:
        assert command.callback is not None
        body = inspect.getsource(command.callback).split('"""')[-1]
        assert len(body.splitlines()) <= 14, command.callback.__name__
