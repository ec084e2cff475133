"""`headrace sim` as a user meets it: repeatable to the byte, and plain about what is wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace import cli
from loadtest.sim.scenarios import SCENARIOS

SHORT = ("--seconds", "45", "--rate", "3")


def invoke(*arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(cli.app, ["sim", *arguments])
    return done.exit_code, done.stdout, done.stderr


@pytest.mark.real_time
def test_json_is_the_same_to_the_byte_in_any_process() -> None:
    command = [sys.executable, "-m", "headrace", "sim", "burst,prefix-heavy", *SHORT, "--policies",
               "headrace,session_hash,prequal", "--seeds", "1-2", "--json"]
    printed = [subprocess.run(command, capture_output=True, timeout=110, check=True,
                              env={**os.environ, "PYTHONHASHSEED": hash_seed}).stdout for hash_seed in ("1", "2")]
    assert printed[0] == printed[1]
    document = json.loads(printed[0])
    assert [(row["scenario"], row["policy"]) for row in document["rows"]] == [
        (scenario, policy) for scenario in ("burst", "prefix-heavy") for policy in ("headrace", "session_hash",
                                                                                    "prequal")]
    assert all(row["seeds"] == [1, 2] for row in document["rows"])


def test_processes_change_nothing() -> None:
    one = invoke("steady", *SHORT, "--policies", "p2c", "--seeds", "1-2", "--json")
    two = invoke("steady", *SHORT, "--policies", "p2c", "--seeds", "1-2", "--json", "--jobs", "2")
    assert one == two
    assert one[0] == 0


def test_the_table_and_the_page(tmp_path: Path) -> None:
    page = tmp_path / "reports" / "sim.html"
    code, out, _ = invoke("degrades-silently", *SHORT, "--policies", "headrace,round_robin", "--seeds", "1", "--html",
                          str(page))
    assert code == 0
    assert "headrace" in out
    assert "in budget %" in out
    assert page.read_text("utf-8").startswith("<!doctype html>")
    assert len(json.loads(page.with_suffix(".json").read_text("utf-8"))["rows"]) == 2


def test_capacity() -> None:
    code, out, _ = invoke("capacity", "steady", "--policies", "headrace,round_robin", "--rates", "1,2", "--seeds", "1",
                          "--seconds", "45", "--target", "0.9", "--json")
    assert code == 0
    ours, blind = json.loads(out)["capacities"]
    assert ours["capacity_per_s"] == 2.0
    assert ours["at_least"]
    assert [level["rate_per_s"] for level in blind["levels"]] == [1.0, 2.0]


def test_capacity_as_a_table_shows_the_figure_whole() -> None:
    code, out, _ = invoke("capacity", "steady", "--policies", "shortest_expected_delay", "--rates", "1,2",
                          "--seeds", "1", "--seconds", "45", "--target", "0.5")
    assert code == 0
    assert out.splitlines()[-1].split()[:3] == ["shortest_expected_delay", ">=", "2.0"]


def test_list_names_every_scenario() -> None:
    code, out, _ = invoke("list")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == list(SCENARIOS)
    assert len(json.loads(invoke("list", "--json")[1])["scenarios"]) == len(SCENARIOS)


@pytest.mark.parametrize(("arguments", "said"), [
    (("brust",), "did you mean 'burst'"),
    (("burst", "--pool", "moon"), "no pool 'moon'"),
    (("burst", "--pool", "site:5000"), "1 to 1000"),
    (("burst", "--policies", "nobody"), "no preset 'nobody'"),
    (("burst", "--seeds", "x"), "whole numbers such as 1-5"),
    (("burst", "--seconds", "20"), "warm-up"),
    (("burst", "--trace-dir", "/nowhere/at/all"), "is no folder"),
    (("burst", *SHORT, "--policies", "p2c", "--seeds", "1", "--html", "/dev/null/page.html"),
     "no page can be written"),
    (("capacity", "burst", "--target", "2"), "between 0 and 1"),
    (("capacity", "burst", "--rates", "a,b"), "numbers by commas"),
    (("capacity", "nothing"), "no scenario 'nothing'"),
])
def test_mistakes_are_one_line_and_exit_code_2(arguments: tuple[str, ...], said: str) -> None:
    code, out, err = invoke(*arguments)
    assert code == 2
    assert out == ""
    assert said in err
    assert len(err.splitlines()) == 1


def test_a_missing_trace_is_told_before_anything_runs(tmp_path: Path) -> None:
    code, _, err = invoke("azure-code", "--trace-dir", str(tmp_path))
    assert code == 2
    assert "there is no azure_llm_2023_code.csv.gz" in err
    assert "SOURCES.md" in err
