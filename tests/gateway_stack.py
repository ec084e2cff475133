"""A real gateway in the test's own event loop, in front of backends that the test runs."""

import contextlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx

from router import app
from router.app import Running, running
from router.path.hotprotocol import protocol_for
from router.wire.head import WireLimits
from tests.scripted_backend import ScriptedBackend

MODEL = "chat-large"
ALIAS = "chat"


def fleet_document(backends: Sequence[ScriptedBackend | Mapping[str, Any]], **sections: Any) -> dict[str, Any]:
    """A fleet of `backends` named b0, b1, …; `sections` replace or add top-level sections."""
    entries = []
    for number, backend in enumerate(backends):
        given: Mapping[str, Any] = (
            {"url": backend.url, "served_model_name": backend.served_model_name}
            if isinstance(backend, ScriptedBackend)
            else backend
        )
        entries.append({
            "name": f"b{number}", "engine": "openai", "model": MODEL, "card": {"type": "test"}, "slots": 64, **given,
        })  # fmt: skip
    document = {
        "version": 1,
        "listen": {"port": 0},
        "admin": {"port": 0},
        "models": [{"name": MODEL, "aliases": [ALIAS]}],
        "policy": {"name": "round_robin"},
        "backends": entries,
        "poll": {"interval_s": 0.2, "timeout_s": 1.0},
    }
    return {**document, **sections}


def write_fleet(path: Path, document: Mapping[str, Any]) -> None:
    """JSON is YAML."""
    path.write_text(json.dumps(document, indent=1))


@contextlib.asynccontextmanager
async def gateway(
    folder: Path,
    backends: Sequence[ScriptedBackend | Mapping[str, Any]],
    *,
    drain_s: float = 2.0,
    wire: WireLimits | None = None,
    **sections: Any,
) -> AsyncIterator[Running]:
    """A running gateway on free ports; its fleet file is `folder/fleet.yaml`. `wire` replaces its limits."""
    path = folder / "fleet.yaml"
    write_fleet(path, fleet_document(backends, **sections))
    with contextlib.ExitStack() as patched:
        if wire is not None:
            limited = partial(protocol_for, limits=wire)
            patched.enter_context(patch.object(app, "protocol_for", lambda dispatcher, _: limited(dispatcher)))
        async with running(path, drain_s=drain_s) as process:
            yield process


@contextlib.asynccontextmanager
async def client_of(process: Running, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=process.url, timeout=30.0, **options) as client:
        yield client


def chat(**members: Any) -> dict[str, Any]:
    """A chat request body."""
    return {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **members}
