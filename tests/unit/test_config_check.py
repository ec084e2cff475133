"""`headrace check`: what it prints and what it returns."""

import json
from pathlib import Path

import pytest

from headrace.gateway.check import check

SMALL = Path(__file__).resolve().parent.parent.joinpath("fixtures/fleets/small.yaml").read_text(encoding="utf-8")


@pytest.fixture
def fleet_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = Path("fleet.yaml")
    path.write_text(SMALL, encoding="utf-8")
    return path


def test_a_good_file_is_summed_up(fleet_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(fleet_file, environ={}) == 0
    printed = capsys.readouterr().out
    for word in ("smollm2-135m-instruct", "llama-f16", "1 × cpu-avx2", "q4_k_m", "tp1", "0.40", "interactive (default)",
                 "0.15 s", "request_cost", "chance_constrained", "fleet.yaml: usable; configuration "):
        assert word in printed


def test_warnings_are_shown_and_do_not_fail(fleet_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fleet_file.write_text(SMALL.replace("    price_per_hour: 0.20\n", "").replace("weight: 2", "weight: 0"))
    assert check(fleet_file, environ={}) == 0
    printed = capsys.readouterr().out
    assert "fleet.yaml:20:5  backends[1]  warning: has no price_per_hour" in printed
    assert "0 (drains)" in printed
    assert "usable, 1 warning;" in printed


def test_each_problem_is_one_line_with_its_place_and_an_indented_hint(
    fleet_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet_file.write_text(SMALL.replace("weight: 2", "weight: -1").replace("slots: 2", "slotz: 2"))
    assert check(fleet_file, environ={}) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "fleet.yaml:18:5  backends[0].slotz  unknown setting"
    assert lines[1] == '    did you mean "slots"?'
    assert lines[2] == "fleet.yaml:27:5  backends[1].weight  must be ≥ 0, got -1"
    assert lines[-1] == "2 problems: this file cannot be used."


def test_text_from_the_file_is_not_taken_for_markup(fleet_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fleet_file.write_text(SMALL + '"[red]x\\e[31m": 1\n')
    assert check(fleet_file, environ={}) == 1
    assert '["[red]x\\x1b[31m"]  unknown setting' in capsys.readouterr().out


def test_json_is_one_object_for_programs(fleet_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(fleet_file, json=True, environ={}) == 0
    good = json.loads(capsys.readouterr().out)
    assert (good["ok"], good["problems"], good["warnings"], len(good["config_hash"])) == (True, [], [], 12)
    fleet_file.write_text(SMALL.replace("weight: 2", "weight: -1"))
    assert check(fleet_file, json=True, environ={}) == 1
    bad = json.loads(capsys.readouterr().out)
    assert (bad["ok"], bad["config_hash"]) == (False, None)
    assert bad["problems"] == [{
        "file": "fleet.yaml", "line": 27, "column": 5, "path": "backends[1].weight", "message": "must be ≥ 0, got -1",
        "hint": bad["problems"][0]["hint"]}]


def test_a_file_that_is_not_there_is_a_problem_too(fleet_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(fleet_file.with_name("other.yaml"), environ={}) == 1
    assert capsys.readouterr().out.splitlines()[0] == "other.yaml  does not exist"


def test_keys_are_looked_up_where_the_gateway_would(fleet_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet_file.write_text(SMALL.replace("    weight: 2", "    api_key_env: HEADRACE_TEST_KEY"))
    assert check(fleet_file) == 1
    monkeypatch.setenv("HEADRACE_TEST_KEY", "k")
    assert check(fleet_file) == 0
