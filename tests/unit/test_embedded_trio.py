"""The embedded engines as data, and the fleet file that describes them."""

import os
from pathlib import Path

import pytest

from backends.catalog.spec import Coefficients
from backends.embedded.model_files import PRECISIONS, ModelFile
from backends.embedded.trio import TRIO, backend_specs, card_type, child_spec
from headrace.up.engine_sets import EngineSet, LlamaCppEngines, SimulatedEngines
from headrace.up.fleet_file import FleetFile, render
from router.config.fleet_file import load_fleet

PORTS = {engine.name: 9101 + index for index, engine in enumerate(TRIO)}
FILES = {precision: ModelFile(precision, Path(f"/models/{precision}.gguf"), 1, "0" * 64) for precision in PRECISIONS}
MEASURED = {
    engine.name: Coefficients(f"2026-11-29/{index:04x}", "a test", 18.204312345, 3.5, 0.00114852, 0.0, 8.6, 0.0077,
                              kv_capacity_tokens=8192)
    for index, engine in enumerate(TRIO)
}


def test_three_engines_that_differ_in_what_a_router_must_weigh() -> None:
    assert len(TRIO) == 3
    assert {engine.precision for engine in TRIO} == set(PRECISIONS)
    assert len({engine.name for engine in TRIO}) == len({engine.served_model_name for engine in TRIO}) == 3
    assert len({engine.price_per_hour for engine in TRIO}) == 3
    assert len({engine.threads for engine in TRIO}) > 1
    assert len({engine.slots for engine in TRIO}) > 1
    assert len({engine.context_tokens for engine in TRIO}) > 1


def test_backends_carry_what_the_engines_are() -> None:
    specs = backend_specs(PORTS, MEASURED)
    for engine, spec in zip(TRIO, specs, strict=True):
        assert (spec.name, spec.quantization, spec.slots, spec.context_tokens, spec.price_per_hour) == (
            engine.name, engine.precision, engine.slots, engine.context_tokens, engine.price_per_hour)
        assert spec.url == f"http://127.0.0.1:{PORTS[engine.name]}"
        assert spec.coefficients == MEASURED[engine.name]
    assert all(spec.coefficients is None for spec in backend_specs(PORTS, {}))


def test_a_child_runs_its_file_with_its_threads_and_slots(tmp_path: Path) -> None:
    engine = TRIO[1]
    spec = child_spec(engine, FILES[engine.precision], 9102, tmp_path / "log", "/code")
    options = dict(zip(spec.argv[3::2], spec.argv[4::2], strict=True))
    assert options == {
        "--model": f"/models/{engine.precision}.gguf", "--port": "9102", "--threads": str(engine.threads),
        "--slots": str(engine.slots), "--context": str(engine.context_tokens), "--alias": engine.served_model_name,
    }
    assert spec.ready_url == "http://127.0.0.1:9102/health"


@pytest.mark.parametrize(("machine", "expected"), [("x86_64", "cpu-avx2"), ("AMD64", "cpu-avx2"),
                                                   ("aarch64", "cpu-aarch64")])
def test_the_card_is_named_after_the_processor(machine: str, expected: str) -> None:
    assert card_type(machine) == expected


@pytest.mark.parametrize("engines", [LlamaCppEngines(FILES), SimulatedEngines(), SimulatedEngines(time_scale=7.5)],
                         ids=["llamacpp", "simulated", "simulated-fast"])
def test_the_fleet_file_loads_without_a_warning_and_says_what_the_specs_say(engines: EngineSet, tmp_path: Path) -> None:
    ports = {name: 9101 + index for index, name in enumerate(engines.names)}
    coefficients = {name: next(iter(MEASURED.values())) for name in engines.names}
    specs = engines.backends(ports, coefficients)
    file = FleetFile("127.0.0.1", 8080, 8081, engines.model, engines.aliases, engines.latency_classes, engines.about())
    path = tmp_path / "fleet.yaml"
    path.write_text(render(file, specs))

    loaded = load_fleet(path, os.environ)
    assert loaded.warnings == ()
    assert [spec.identity for spec in loaded.specs] == [spec.identity for spec in specs]
    for found, meant in zip(loaded.specs, specs, strict=True):
        assert (found.card_type, found.card_count, found.quantization, found.parallel, found.context_tokens) == (
            meant.card_type, meant.card_count, meant.quantization, meant.parallel, meant.context_tokens)
        assert (found.slots, found.price_per_hour, found.site, dict(found.labels)) == (
            meant.slots, meant.price_per_hour, meant.site, dict(meant.labels))
        assert found.coefficients is not None
        assert meant.coefficients is not None
        assert found.coefficients.version == meant.coefficients.version
        assert found.coefficients.prefill_base_ms == pytest.approx(meant.coefficients.prefill_base_ms, rel=1e-5)
    assert path.read_text().startswith("# Three ")


def test_a_simulated_clock_scales_budgets_and_costs_alike() -> None:
    import asyncio

    def nothing(what: str, done: int, total: int) -> None:
        raise AssertionError("there is nothing to measure")

    slow, fast = SimulatedEngines(), SimulatedEngines(time_scale=10)
    as_cards = asyncio.run(slow.measure({}, nothing))
    quick = asyncio.run(fast.measure({}, nothing))
    for name, coefficients in as_cards.items():
        assert quick[name].decode_base_ms == pytest.approx(coefficients.decode_base_ms / 10)
        assert quick[name].prefill_ms_per_token == pytest.approx(coefficients.prefill_ms_per_token / 10)
        assert quick[name].kv_capacity_tokens == coefficients.kv_capacity_tokens
        assert quick[name].version != coefficients.version
    assert fast.latency_classes[0]["ttft_s"] == pytest.approx(slow.latency_classes[0]["ttft_s"] / 10)
