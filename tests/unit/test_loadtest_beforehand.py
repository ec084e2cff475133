"""What a load test says before it starts."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from loadtest.beforehand import Hopeless, check_host
from loadtest.run import LoadOptions, read_thresholds, run_loadtest
from loadtest.stack import free_ports
from tests.unit.test_cli import admin

MODELS = (200, json.dumps({"object": "list", "data": [{"id": "small"}, {"id": "large"}]}).encode())
NO = (404, b"{}")


@pytest.mark.parametrize(("changes", "said"), [
    ({"rate_per_s": 4.0, "duration_s": 8.0}, "ask for 100 at least. At 4 a second, --duration 33 would do"),
    ({"policy": "nope"}, "--policy: "),
    ({"cards": ("a100x2-bf16", "nope")}, "--cards: "),
    ({"faults": {"nope": ["slow x3"]}}, "--fault: 'nope' is none of the cards"),
    ({"host": "nonsense", "rate_per_s": 50.0}, "--host: "),
    ({"host": "http://127.0.0.1:1", "rate_per_s": 50.0, "api_key_env": "NO_SUCH_KEY"}, "--api-key-env: "),
    ({"host": "http://127.0.0.1:1", "rate_per_s": 0.5}, "ask for 30 at least"),
], ids=lambda value: "" if isinstance(value, dict) else value)
def test_what_cannot_be_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: Mapping[str, object], said: str
) -> None:
    report = tmp_path / "report"
    assert run_loadtest(replace(LoadOptions(report=report), **changes)) == 2  # type: ignore[arg-type]
    found = capsys.readouterr()
    assert said in found.err
    assert found.err.count("\n") == 1
    assert not report.exists()


@pytest.mark.real_time
def test_a_dead_host_is_said_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    (port,) = free_ports(1)
    assert run_loadtest(LoadOptions(host=f"http://127.0.0.1:{port}")) == 2
    assert f"nobody answers on http://127.0.0.1:{port}: " in capsys.readouterr().err


@pytest.mark.real_time
def test_an_unknown_model_is_said_with_those_that_are_known() -> None:
    with admin({("GET", "/v1/models"): MODELS, ("GET", "/v1/models/medium"): NO}) as url:
        with pytest.raises(Hopeless, match="does not serve the model 'medium'; it knows: small, large "):
            check_host(url, "medium", "")
        with pytest.raises(Hopeless, match="'medium'"):
            check_host(url + "/v1", "medium", "")
        check_host(url, "large", "")


@pytest.mark.real_time
def test_an_alias_and_a_server_that_lists_nothing_are_taken() -> None:
    with admin({("GET", "/v1/models"): MODELS, ("GET", "/v1/models/alias"): (200, b"{}")}) as url:
        check_host(url, "alias", "")
    for answer in (NO, (200, b"<html>"), (200, b"[]"), (200, b'{"data": 3}')):
        with admin({("GET", "/v1/models"): answer}) as url:
            check_host(url, "any", "")


@pytest.mark.real_time
def test_a_key_that_is_wanted_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "wrong")
    with admin({("GET", "/v1/models"): (401, b"{}")}) as url:
        with pytest.raises(Hopeless, match="an API key is wanted"):
            check_host(url, "any", "")
        with pytest.raises(Hopeless, match="an API key is refused"):
            check_host(url, "any", "SOME_KEY")


def test_the_default_run_is_not_refused_for_its_size() -> None:
    (least,) = [row.limit for row in read_thresholds(LoadOptions().thresholds, "simulated") if row.name == "requests"]
    assert least < 0.7 * LoadOptions().rate_per_s * LoadOptions().duration_s
