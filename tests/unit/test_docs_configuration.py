"""docs/configuration.md has one row for every setting, with its true default, and no row for a setting that is gone."""

import json
import re
from collections.abc import Iterator
from math import isclose
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from ruamel.yaml import YAML

from backends.catalog.health import HealthRules
from backends.catalog.spec import Coefficients
from backends.engines import DIALECTS
from policies.registry import describe
from router.config.fleet_file import FleetConfig, LoadedFleet, load_fleet, load_fleet_bytes
from router.config.sections import CoefficientsSection, HealthSection
from settings.problems import section_in

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLE = ROOT / "deploy" / "fleet.example.yaml"
PAGE = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| `(?P<name>[^`]+)` \| (?P<default>[^|]*?) \|(?P<meaning>.*)\|$", re.MULTILINE)


def settings_of(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, info in section.model_fields.items():
        path = f"{prefix}{name}"
        yield path, info
        if inner := section_in(info.annotation):
            is_list = "tuple" in str(info.annotation)
            yield from settings_of(inner, f"{path}[]." if is_list else f"{path}.")


def default_text(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    default = info.default
    if default is None:
        return "–"
    if isinstance(default, BaseModel | tuple | dict):
        return "–" if not default or isinstance(default, BaseModel) else "see text"
    return f"`{default:g}`" if isinstance(default, float) else f"`{default}`"


SETTINGS = dict(settings_of(FleetConfig))
DOCUMENTED = {match["name"]: match for match in ROW.finditer(PAGE.split("## Policy parts")[0])}
PARTS = {match["name"]: match for match in ROW.finditer(PAGE.split("## Policy parts")[1])}


@pytest.mark.parametrize("path", SETTINGS)
def test_every_setting_has_its_row_with_its_default(path: str) -> None:
    info = SETTINGS[path]
    row = f"| `{path}` | {default_text(info)} | {info.description} |"
    assert path in DOCUMENTED, f"docs/configuration.md has no row; add: {row}"
    assert DOCUMENTED[path]["default"] == default_text(info), f"wrong default; the row is: {row}"
    assert len(DOCUMENTED[path]["meaning"].strip()) > 10


def test_no_row_is_stale() -> None:
    assert sorted(DOCUMENTED.keys() - SETTINGS.keys()) == []
    assert PAGE.count("\n| `") == len(DOCUMENTED) + len(PARTS), "a setting has two rows"


def test_every_policy_part_and_its_settings_have_rows_and_no_row_is_stale() -> None:
    expected: dict[str, str] = {}
    for part in describe():
        expected[part.name] = part.kind
        if part.kind != "preset":
            expected |= {f"{part.name}.{setting.name}": f"`{setting.default:g}`" if isinstance(setting.default, float)
                         else f"`{str(setting.default).lower()}`" for setting in part.settings}
    kinds = {name: match["default"] for name, match in PARTS.items()}
    # A picker and the preset made of it share a name; the row names both.
    assert {name: text.split(" and ")[-1] for name, text in kinds.items()} == expected


def test_every_setting_is_described_and_has_an_example() -> None:
    for path, info in SETTINGS.items():
        assert info.description, path
        assert info.description.endswith("."), path
        assert info.examples, path


def test_every_engine_is_named_in_the_description_of_the_setting() -> None:
    assert all(f"`{name}`" in str(SETTINGS["backends[].engine"].description) for name in DIALECTS)


@pytest.mark.parametrize(("section", "noun"), [(HealthSection, HealthRules), (CoefficientsSection, Coefficients)])
def test_sections_have_exactly_the_fields_of_their_nouns(section: type[BaseModel], noun: Any) -> None:
    assert set(section.model_fields) == set(noun.__dataclass_fields__)


def load_example() -> LoadedFleet:
    return load_fleet(EXAMPLE, {})


def test_the_example_loads_without_a_warning() -> None:
    loaded = load_example()
    assert loaded.warnings == ()
    assert [spec.engine for spec in loaded.specs] == ["vllm", "vllm", "vllm-ascend", "sglang"]
    assert all(spec.coefficients for spec in loaded.specs)


def test_the_example_shows_every_setting_live_or_as_a_comment() -> None:
    text = EXAMPLE.read_text(encoding="utf-8")
    live = set(_paths(YAML(typ="safe", pure=True).load(text)))
    commented = {path for path in SETTINGS if path not in live}
    alternatives = ("policy.filters", "policy.prices", "policy.picker", "backends[].api_key_env", "auth",
                    "timeouts.first_token_s", "timeouts.inter_token_s", "timeouts.total_s", "timeouts.heartbeat_s",
                    "decision_log.path", "state.path")
    assert commented == {path for path in SETTINGS if path.startswith(alternatives)}
    for path in commented:
        leaf = path.rsplit(".", 1)[-1].removesuffix("[]")
        assert re.search(rf"^ *#.*\b{leaf}: ?", text, re.MULTILINE), path


def test_the_commented_settings_of_the_example_work_when_uncommented() -> None:
    text = EXAMPLE.read_text(encoding="utf-8")
    text = re.sub(r"^( *)# (api_key_env:|filters:|prices:|picker:|  - )", r"\1\2", text, flags=re.MULTILINE)
    loaded = load_fleet_bytes(text.encode(), "fleet.yaml", {"H100_ENGINE_KEY": "k"})
    assert loaded.specs[0].api_key == "k"
    assert [price.name for price in loaded.pipeline.prices] == ["request_cost", "drain_time", "lateness"]


def test_the_defaults_spelled_out_in_the_example_are_the_defaults() -> None:
    config = load_example().config
    for name in ("timeouts", "retries", "hedging", "limits", "decision_log", "state", "poll", "health"):
        section = getattr(config, name)
        assert section == FleetConfig.model_fields[name].default
        fields = type(section).model_fields
        assert section.model_fields_set == {field for field in fields if fields[field].default is not None or
                                            field == "failure_ratio_to_eject"}


def test_the_examples_coefficients_are_those_of_the_calibration() -> None:
    calibration = ROOT.parent / "shared" / "data" / "fits" / "calibrated_backends.json"
    if not calibration.exists():
        pytest.skip(f"needs the calibration data, {calibration.name}, which is not part of this repository")
    fits = {fit["id"]: fit for fit in json.loads(calibration.read_text(encoding="utf-8"))["Qwen3-32B"]}
    for spec in load_example().specs:
        fit, coefficients = fits[spec.name], spec.coefficients
        assert coefficients is not None
        for ours, theirs in (
            (coefficients.prefill_base_ms, fit["prefill"]["a_ms"]),
            (coefficients.prefill_ms_per_token, fit["prefill"]["b_ms_per_tok"]),
            (coefficients.prefill_ms_per_pair, fit["prefill"]["q_ms_per_pair"]),
            (coefficients.decode_base_ms, fit["decode"]["c_ms"]),
            (coefficients.decode_ms_per_seq, fit["decode"]["d_ms_per_seq"]),
            (coefficients.decode_ms_per_seq_token, fit["decode"]["e_ms_per_seq_tok"]),
        ):
            assert isclose(ours, theirs, rel_tol=1e-5), (spec.name, ours, theirs)
        assert coefficients.kv_capacity_tokens == fit["kv_capacity_tokens"]
        if fit["usd_per_hour"] is not None:
            assert isclose(spec.price_per_hour, fit["usd_per_hour"], rel_tol=1e-3)


def _paths(value: Any, path: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            inner = f"{path}.{key}" if path else key
            yield inner
            yield from _paths(item, inner)
    elif isinstance(value, list):
        for item in value:
            yield from _paths(item, f"{path}[]")
