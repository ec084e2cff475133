"""Real llama.cpp engines for the whole session: the embedded default's three precisions, one thread each."""

import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from backends.embedded.model_files import MODEL_NAME, ModelFile, ModelFilesError, prepare
from backends.embedded.trio import TRIO, EmbeddedEngine
from tests.processes import EngineProcess, GatewayProcess

CONTEXT_TOKENS = 1024
MAX_BODY_BYTES = 64 * 1024


class LlamaEngine(EngineProcess):
    """One of the embedded engines, small: one thread, two slots."""

    def __init__(self, engine: EmbeddedEngine, file: ModelFile, folder: Path) -> None:
        self.engine = engine

        def command(port: int) -> list[str]:
            return [
                sys.executable, "-m", "backends.embedded.llama_server", "--model", str(file.path), "--port", str(port),
                "--threads", "1", "--slots", "2", "--context", str(CONTEXT_TOKENS),
                "--alias", engine.served_model_name,
            ]

        super().__init__(engine.name, command, folder)

    @property
    def backend(self) -> dict[str, Any]:
        """Its entry in a fleet file."""
        return {
            "name": self.name, "url": self.url, "engine": "llamacpp", "model": MODEL_NAME,
            "served_model_name": self.engine.served_model_name, "card": {"type": "cpu"},
            "quantization": self.engine.precision, "slots": 2, "context_tokens": CONTEXT_TOKENS,
            "price_per_hour": self.engine.price_per_hour,
        }


@dataclass(frozen=True)
class LlamaFleet:
    """Three real engines and the gateway before them."""

    engines: tuple[LlamaEngine, ...]
    gateway: GatewayProcess


@pytest.fixture(scope="session")
def llama_models() -> dict[str, ModelFile]:
    """The weights by precision; skips where they, or the engine, cannot be had."""
    missing = [name for name in ("xllamacpp", "gguf", "numpy") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)} (pip install 'headrace[engines]')")
    try:
        return prepare(os.environ)
    except ModelFilesError as error:
        pytest.skip(f"no weights: {error}")


@pytest.fixture(scope="session")
def llama_fleet(llama_models: dict[str, ModelFile], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaFleet]:
    """Three real engines under the `headrace` policy."""
    folder = tmp_path_factory.mktemp("llama_fleet")
    with ExitStack() as running:
        engines = tuple(
            running.enter_context(LlamaEngine(engine, llama_models[engine.precision], folder)) for engine in TRIO
        )
        document = {
            "version": 1,
            "models": [{"name": MODEL_NAME, "aliases": ["smollm2"]}],
            "policy": {"name": "headrace"},
            "backends": [engine.backend for engine in engines],
            "limits": {"max_body_bytes": MAX_BODY_BYTES},
            "poll": {"interval_s": 0.2, "timeout_s": 2.0},
            "health": {"base_ejection_s": 1.0, "slow_start_s": 2.0},
            "timeouts": {"connect_s": 2.0, "first_token_s": 60.0, "inter_token_s": 60.0},
        }
        yield LlamaFleet(engines, running.enter_context(GatewayProcess(folder, document)))
