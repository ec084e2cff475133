"""Writes a fleet file from backend specs: the file that `headrace up` serves, and that its user edits."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ruamel.yaml import YAML

from backends.catalog.spec import BackendSpec


@dataclass(frozen=True, slots=True)
class FleetFile:
    """What the file says beside its backends."""

    host: str
    port: int
    admin_port: int
    model: str
    aliases: tuple[str, ...]
    latency_classes: tuple[Mapping[str, Any], ...]
    """As in the file; the first one is the default."""
    header: str
    """Comment at the top, without the `#`."""
    lending: Mapping[str, Any] = field(default_factory=dict)
    """As in the file, where it differs from the defaults."""


def render(file: FleetFile, backends: Sequence[BackendSpec]) -> str:
    """The YAML text."""
    document = {
        "version": 1,
        "currency": "USD",
        "listen": {"host": file.host, "port": file.port},
        "admin": {"host": "127.0.0.1", "port": file.admin_port},
        "models": [{"name": file.model, "aliases": list(file.aliases)}],
        "latency_classes": [dict(latency_class) for latency_class in file.latency_classes],
        "default_latency_class": file.latency_classes[0]["name"],
        "policy": {"name": "headrace"},
        "decision_log": {"path": "decisions.jsonl"},
        "backends": [_backend(spec) for spec in backends],
        **({"lending": dict(file.lending)} if file.lending else {}),
    }
    yaml = YAML()
    yaml.width = 120
    yaml.indent(mapping=2, sequence=4, offset=2)
    text = io.StringIO()
    yaml.dump(document, text)
    comment = "".join(f"# {line}".rstrip() + "\n" for line in file.header.splitlines())
    return comment + text.getvalue()


def _backend(spec: BackendSpec) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "name": spec.name,
        "url": spec.url,
        "engine": spec.engine,
        "model": spec.model,
        "served_model_name": spec.served_model_name,
        "card": {"type": spec.card_type, "count": spec.card_count},
        "quantization": spec.quantization,
        "parallel": asdict(spec.parallel),
        "context_tokens": spec.context_tokens,
        "slots": spec.slots,
        "price_per_hour": spec.price_per_hour,
        "weight": spec.weight,
        "site": spec.site,
        "labels": dict(spec.labels),
        "coefficients": _coefficients(spec),
    }
    return {name: value for name, value in fields.items() if value is not None}


def _coefficients(spec: BackendSpec) -> dict[str, Any] | None:
    if spec.coefficients is None:
        return None
    fields = {name: value for name, value in asdict(spec.coefficients).items() if value is not None}
    return {name: float(f"{value:.6g}") if isinstance(value, float) else value for name, value in fields.items()}
