"""docs/allocator-service.md has a row for each setting, command and route, and a heading for each metric."""

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from starlette.routing import Route
from typer.main import get_command

from allocator.service.api import api
from allocator.service.config import AllocatorConfig
from allocator.service.job_request import JobRequest
from allocator.service.metrics import AllocatorMetrics
from headrace import cli
from headrace.allocator.file import load_allocator
from tests.unit.test_docs_configuration import settings_of

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "allocator-service.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| `(?P<name>[^`]+)` \| (?P<default>[^|]*?) \| (?P<meaning>.*) \|$", re.MULTILINE)


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def default_text(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    default: Any = info.default
    if default is None or default == "" or isinstance(default, BaseModel) or default in ((), {}):
        return "–"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    if isinstance(default, tuple):
        return "see text"
    return f"`{default:g}`" if isinstance(default, float) else f"`{default}`"


@pytest.mark.parametrize(("title", "model"), [("The file", AllocatorConfig), ("Jobs", JobRequest)])
def test_every_setting_has_its_row_and_no_row_is_stale(title: str, model: type[BaseModel]) -> None:
    expected = {path: (default_text(info), info.description) for path, info in settings_of(model)}
    found = {match["name"]: (match["default"], match["meaning"]) for match in ROW.finditer(section(title))}
    assert found == expected


@pytest.mark.parametrize("model", [AllocatorConfig, JobRequest])
def test_every_setting_is_described_and_has_an_example(model: type[BaseModel]) -> None:
    for path, info in settings_of(model):
        assert info.description, path
        assert info.examples, path


def test_every_command_has_its_row_and_no_row_is_stale() -> None:
    ours = ("allocate", "jobs", "pools", "loans", "recall", "supply", "cordon", "quota", "top")
    commands = get_command(cli.app).commands  # type: ignore[attr-defined]
    expected = {f"headrace {name} {child}".strip() for name in ours
                for child in getattr(commands[name], "commands", {"": None})}
    assert set(re.findall(r"^\| `(headrace [^`]+)` \|", section("Commands"), re.MULTILINE)) == expected


def test_every_route_is_named() -> None:
    metrics = AllocatorMetrics(lambda: None, dict)
    routes = {route.path for route in api(None, metrics, None).routes if isinstance(route, Route)}  # type: ignore[arg-type]
    told = section("HTTP API")
    assert [path for path in sorted(routes) if f"{path}`" not in told] == []


def test_every_metric_has_its_heading_and_no_heading_is_stale() -> None:
    metrics = AllocatorMetrics(lambda: None, lambda: {"ok": 0})
    exported = {family.name + ("_total" if family.type == "counter" else "") for family in metrics.registry.collect()}
    assert sorted(re.findall(r"^### `(\w+)`$", PAGE, re.MULTILINE)) == sorted(exported)


def test_the_example_file_is_usable() -> None:
    declared = load_allocator(ROOT / "deploy" / "allocator.example.yaml")
    assert len(declared.backends) == 2
    assert declared.price_per_hour["v100"] > declared.price_per_hour["k80"] > 0.0
