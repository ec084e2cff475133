"""One configuration as requests see it: built whole, swapped by one assignment, kept by each request to its end."""

from dataclasses import dataclass, field
from types import MappingProxyType

from policies.policy import Pipeline
from router.config import FleetConfig, LoadedFleet
from router.intake import LatencyClass, Vocabulary


@dataclass(frozen=True, slots=True)
class Generation:
    """What a request reads of the configuration. A request that began under one generation ends under it."""

    config: FleetConfig
    config_hash: str
    pipeline: Pipeline
    vocabulary: Vocabulary
    api_keys: tuple[bytes, ...] = field(default=(), repr=False)
    """Keys that clients may use; none means that everyone may."""

    @classmethod
    def of(cls, loaded: LoadedFleet) -> "Generation":
        config = loaded.config
        models = {alias: model.name for model in config.models for alias in (model.name, *model.aliases)}
        classes = {entry.name: LatencyClass(entry.name, entry.budget()) for entry in config.latency_classes}
        vocabulary = Vocabulary(MappingProxyType(models), MappingProxyType(classes), config.default_latency_class)
        return cls(config, loaded.config_hash, loaded.pipeline, vocabulary, loaded.client_keys)
