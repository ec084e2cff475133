"""The engines that `headrace up` can start: real llama.cpp servers, or simulated cards. Each set is a few facts and
knows how to run them, what they cost and what to write about them in the fleet file.
"""

import asyncio
import datetime
import importlib.metadata
import os
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import backends
from backends.catalog.spec import BackendSpec, Coefficients, ParallelLayout
from backends.embedded import model_files, trio
from backends.embedded.supervisor import ChildSpec
from headrace.up.scene import LLAMACPP, SIMULATED, Scene

Progress = Callable[[str, int, int], None]


def python_path() -> str:
    """Where a child process finds our packages: also from a checkout that is not installed."""
    root = str(Path(backends.__file__).parent.parent)
    inherited = os.environ.get("PYTHONPATH")
    return os.pathsep.join((root, inherited)) if inherited else root


class EngineSet(Protocol):
    """Engines of one model, ready to be run. `ports` goes by engine name."""

    @property
    def names(self) -> tuple[str, ...]: ...
    @property
    def model(self) -> str: ...
    @property
    def aliases(self) -> tuple[str, ...]: ...
    @property
    def latency_classes(self) -> tuple[Mapping[str, Any], ...]: ...
    @property
    def scene(self) -> Scene:
        """Of the lending demo."""
        ...
    def about(self) -> str:
        """What the reader of the fleet file should know of its numbers."""
        ...
    def children(self, ports: Mapping[str, int], log_folder: Path) -> tuple[ChildSpec, ...]: ...
    async def measure(self, ports: Mapping[str, int], progress: Progress) -> dict[str, Coefficients]:
        """Coefficients by engine; measures those that are not known yet."""
        ...
    def backends(
        self, ports: Mapping[str, int], coefficients: Mapping[str, Coefficients]
    ) -> tuple[BackendSpec, ...]: ...


@dataclass(frozen=True, slots=True)
class LlamaCppEngines:
    """The embedded default: see `backends.embedded.trio`."""

    files: Mapping[str, model_files.ModelFile]
    calibrate: bool = True
    """False: use what was measured before, measure nothing now."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(engine.name for engine in trio.TRIO)

    @property
    def model(self) -> str:
        return model_files.MODEL_NAME

    @property
    def aliases(self) -> tuple[str, ...]:
        return ("smollm2",)

    @property
    def latency_classes(self) -> tuple[Mapping[str, Any], ...]:
        return ({"name": "interactive", "ttft_s": 1.0, "inter_token_s": 0.15, "e2e_s": 30.0}, {"name": "batch"})

    @property
    def scene(self) -> Scene:
        return LLAMACPP

    def about(self) -> str:
        return (
            "Three llama.cpp servers of SmolLM2-135M-Instruct (Apache-2.0) on this machine. The f16 and q8_0 weights\n"
            "are the shipped q4_1 weights in wider cells: unlike in speed and memory, alike in quality.\n"
            "Prices are assumed. Coefficients were measured here, one engine at a time on an otherwise idle machine."
        )

    def children(self, ports: Mapping[str, int], log_folder: Path) -> tuple[ChildSpec, ...]:
        return tuple(
            trio.child_spec(engine, self.files[engine.precision], ports[engine.name],
                            log_folder / f"{engine.name}.log", python_path())
            for engine in trio.TRIO
        )

    async def measure(self, ports: Mapping[str, int], progress: Progress) -> dict[str, Coefficients]:
        from backends.embedded import calibrate

        folder = model_files.cache_home(os.environ) / "calibration"
        known: dict[str, Coefficients] = {}
        for engine in trio.TRIO:
            key = calibrate.engine_key(
                gguf_sha256=self.files[engine.precision].sha256, threads=engine.threads, slots=engine.slots,
                context_tokens=engine.context_tokens, library_version=importlib.metadata.version("xllamacpp"),
            )
            path = folder / f"{engine.name}-{key}.json"
            coefficients = calibrate.load(path)
            if coefficients is None and self.calibrate:
                samples = await calibrate.measure(
                    trio.url(ports[engine.name]), engine.served_model_name, engine.slots, rng=random.Random(),
                    progress=lambda done, total, name=engine.name: progress(f"measuring {name}", done, total),  # type: ignore[misc]
                )
                today = datetime.datetime.now().astimezone().date()
                coefficients = calibrate.fit(
                    samples, version=calibrate.name_version(today, samples), source=calibrate.SOURCE,
                    kv_capacity_tokens=engine.slots * engine.context_tokens,
                )
                await asyncio.to_thread(calibrate.save, path, coefficients, samples)
            if coefficients is not None:
                known[engine.name] = coefficients
        return known

    def backends(
        self, ports: Mapping[str, int], coefficients: Mapping[str, Coefficients]
    ) -> tuple[BackendSpec, ...]:
        return trio.backend_specs(ports, coefficients)


@dataclass(frozen=True, slots=True)
class SimulatedEngines:
    """Fake engines with the measured physics of three cards, `time_scale` times as fast as those."""

    time_scale: float = 1.0
    cards: tuple[str, ...] = ("h100x2-fp8", "a100x2-bf16", "l40sx2-fp8")
    slots: int = 64
    context_tokens: int = 32_768

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"sim-{card}" for card in self.cards)

    @property
    def model(self) -> str:
        return "qwen3-32b"

    @property
    def aliases(self) -> tuple[str, ...]:
        return ("Qwen/Qwen3-32B",)

    @property
    def latency_classes(self) -> tuple[Mapping[str, Any], ...]:
        budget = {"ttft_s": 2.0, "inter_token_s": 0.08, "e2e_s": 60.0}
        scaled = {name: float(f"{seconds / self.time_scale:.6g}") for name, seconds in budget.items()}
        return ({"name": "interactive", **scaled}, {"name": "batch"})

    @property
    def scene(self) -> Scene:
        return SIMULATED

    def about(self) -> str:
        speed = "" if self.time_scale == 1 else f" Their clocks run {self.time_scale:g} times as fast as the cards'."
        return (
            "Three simulated engines: no model runs, the text is numbered filler, the timing is that of the cards\n"
            f"named (see loadtest/fake_engine/cards.SOURCES.md).{speed}"
        )

    def _served_name(self, card: str) -> str:
        return f"{self.model}-{card.rpartition('-')[2]}"

    def children(self, ports: Mapping[str, int], log_folder: Path) -> tuple[ChildSpec, ...]:
        return tuple(
            ChildSpec(
                name=name,
                argv=(
                    sys.executable, "-m", "loadtest.fake_engine", "--card", card, "--port", str(ports[name]),
                    "--served-model-name", self._served_name(card), "--time-scale", f"{self.time_scale:g}",
                    "--seed", str(seed), "--slots", str(self.slots), "--context", str(self.context_tokens),
                ),
                env={"PYTHONPATH": python_path()},
                log_path=log_folder / f"{name}.log",
                ready_url=f"{trio.url(ports[name])}/health",
            )
            for seed, (name, card) in enumerate(zip(self.names, self.cards, strict=True), start=1)
        )

    async def measure(self, ports: Mapping[str, int], progress: Progress) -> dict[str, Coefficients]:
        """Nothing to measure: the engines obey the very coefficients that are known of the cards."""
        from loadtest.fake_engine.cards import find_card

        return {
            name: _faster(find_card(card).coefficients, self.time_scale)
            for name, card in zip(self.names, self.cards, strict=True)
        }

    def backends(
        self, ports: Mapping[str, int], coefficients: Mapping[str, Coefficients]
    ) -> tuple[BackendSpec, ...]:
        from loadtest.fake_engine.cards import find_card

        specs = []
        for name, card_id in zip(self.names, self.cards, strict=True):
            card = find_card(card_id)
            specs.append(BackendSpec(
                name=name,
                url=trio.url(ports[name]),
                engine="vllm",
                model=self.model,
                served_model_name=self._served_name(card_id),
                card_type=card.hardware,
                card_count=card.devices,
                quantization=card.quantization,
                parallel=ParallelLayout(tp=card.devices),
                context_tokens=self.context_tokens,
                slots=self.slots,
                price_per_hour=card.price_per_hour,
                site="simulated",
                labels={"pool": "simulated", "price": "assumed" if card.price_assumed else "public list"},
                coefficients=coefficients.get(name),
            ))
        return tuple(specs)


def _faster(coefficients: Coefficients, times: float) -> Coefficients:
    """The same engine on a clock that runs `times` as fast."""
    if times == 1:
        return coefficients
    return replace(
        coefficients,
        version=f"{coefficients.version}x{times:g}",
        prefill_base_ms=coefficients.prefill_base_ms / times,
        prefill_ms_per_token=coefficients.prefill_ms_per_token / times,
        prefill_ms_per_pair=coefficients.prefill_ms_per_pair / times,
        decode_base_ms=coefficients.decode_base_ms / times,
        decode_ms_per_seq=coefficients.decode_ms_per_seq / times,
        decode_ms_per_seq_token=coefficients.decode_ms_per_seq_token / times,
        host_ms=coefficients.host_ms / times,
        first_token_overhead_ms=coefficients.first_token_overhead_ms / times,
    )
