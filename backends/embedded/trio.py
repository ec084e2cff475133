"""The three engines of the embedded default, as data: one model, three precisions, unlike speed, room and price.

They are chosen so that no one of them is best at everything. On two threads, q8_0 reads prompts some four times as fast
as the others, for the highest price; q4_1 writes most tokens for the money and alone takes long prompts; f16 is
cheapest to read a prompt on, and slow. Prices are assumed, not quoted: of the order of what a cloud asks for a virtual
CPU, and spread so that each engine is the right one for some shape of request.
"""

import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from backends.catalog.spec import BackendSpec, Coefficients
from backends.embedded.model_files import MODEL_NAME, ModelFile
from backends.embedded.supervisor import ChildSpec

ENGINE = "llamacpp"
SITE = "local"


@dataclass(frozen=True, slots=True)
class EmbeddedEngine:
    """One llama.cpp server as it is to run."""

    name: str
    precision: str
    threads: int
    slots: int
    context_tokens: int
    """Of each slot."""
    price_per_hour: float
    """Assumed, in the fleet's currency."""

    @property
    def served_model_name(self) -> str:
        """The name that this engine knows the model by: not the fleet's, as in a fleet that has grown."""
        return f"smollm2-{self.precision}"


TRIO: tuple[EmbeddedEngine, ...] = (
    EmbeddedEngine("llama-f16", "f16", threads=1, slots=4, context_tokens=2048, price_per_hour=0.024),
    EmbeddedEngine("llama-q8", "q8_0", threads=2, slots=4, context_tokens=2048, price_per_hour=0.12),
    EmbeddedEngine("llama-q4", "q4_1", threads=1, slots=2, context_tokens=4096, price_per_hour=0.03),
)


def card_type(machine: str | None = None) -> str:
    """What the engines run on, as a card type. The wheel of llama.cpp uses AVX2 on x86-64, not AVX-512."""
    machine = machine or platform.machine()
    return "cpu-avx2" if machine in ("x86_64", "AMD64") else f"cpu-{machine}"


def child_spec(engine: EmbeddedEngine, file: ModelFile, port: int, log_path: Path, python_path: str) -> ChildSpec:
    """How the supervisor runs this engine. `python_path` is where the child finds this package."""
    return ChildSpec(
        name=engine.name,
        argv=(
            sys.executable, "-m", "backends.embedded.llama_server", "--model", str(file.path), "--port", str(port),
            "--threads", str(engine.threads), "--slots", str(engine.slots), "--context", str(engine.context_tokens),
            "--alias", engine.served_model_name,
        ),
        env={"PYTHONPATH": python_path},
        log_path=log_path,
        ready_url=f"{url(port)}/health",
    )


def url(port: int) -> str:
    """Base URL of a child on this machine."""
    return f"http://127.0.0.1:{port}"


def backend_specs(
    ports: Mapping[str, int], coefficients: Mapping[str, Coefficients], engines: Sequence[EmbeddedEngine] = TRIO
) -> tuple[BackendSpec, ...]:
    """The engines as backends, with what was measured of each; `ports` and `coefficients` go by engine name."""
    return tuple(
        BackendSpec(
            name=engine.name,
            url=url(ports[engine.name]),
            engine=ENGINE,
            model=MODEL_NAME,
            served_model_name=engine.served_model_name,
            card_type=card_type(),
            quantization=engine.precision,
            context_tokens=engine.context_tokens,
            slots=engine.slots,
            price_per_hour=engine.price_per_hour,
            site=SITE,
            labels={"pool": "embedded", "threads": str(engine.threads)},
            coefficients=coefficients.get(engine.name),
        )
        for engine in engines
    )
