"""The fleet file: what it may say, and how it becomes what the rest of Headrace works with.

A file is read (`settings.source`), validated here against strict models, checked for what single settings cannot see
(`checks`), and built into backend specs and a routing pipeline. All of that happens in `load_fleet`, before
anything runs on it: a `LoadedFleet` is known to be usable, so that taking it over is one assignment.

Secrets are named, never held: `api_key_env` says which environment variable has the key. The key itself appears only
in `BackendSpec.api_key`, which its `repr` leaves out.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError, model_validator

from backends.catalog.health import HealthRules
from backends.catalog.spec import BackendSpec
from policies.admission import AdmissionRules
from policies.facts import Budget
from policies.policy import Pipeline
from policies.registry import build_pipeline
from policies.spec import PartSpec, PolicyError, PolicySpec
from router.config.checks import contradictions, doubts
from router.config.sections import (
    AdminSection,
    AuthSection,
    BackendSection,
    DecisionLogSection,
    HealthSection,
    HedgingSection,
    LatencyClassSection,
    LendingSection,
    LimitsSection,
    ListenSection,
    ModelSection,
    PolicyPart,
    PolicySection,
    PollSection,
    RetriesSection,
    StateSection,
    TimeoutsSection,
)
from router.keys.file import load_keys, unique_rows
from router.keys.ring import KeyRing, environment_rows
from settings.fields import Name, Section, Text
from settings.problems import Finding, problems_of, validation_error
from settings.source import ConfigError, Loc, Problem, SourceDocument, parse_source, read_source

__all__ = ["ConfigError", "FleetConfig", "LoadedFleet", "Problem", "load_fleet", "load_fleet_bytes"]


class FleetConfig(Section):
    """A whole fleet file."""

    version: Literal[1] = Field(description="Version of this format.", examples=[1])
    currency: Annotated[Text, Field(max_length=16)] = Field(
        default="USD", description="Unit of every price; a name only, nothing is converted.", examples=["USD"])
    listen: ListenSection = Field(
        default=ListenSection(), description="Where clients connect.", examples=[{"port": 8080}])
    admin: AdminSection = Field(
        default=AdminSection(), description="Where operators connect.", examples=[{"port": 8081}])
    auth: AuthSection = Field(
        default=AuthSection(), description="Who may ask.", examples=[{"api_keys_env": ["HEADRACE_CLIENT_KEY"]}])
    models: Annotated[tuple[ModelSection, ...], Field(min_length=1, max_length=1_000)] = Field(
        strict=False, description="What clients can ask for.", examples=[[{"name": "Qwen/Qwen3-32B"}]])
    latency_classes: Annotated[tuple[LatencyClassSection, ...], Field(min_length=1, max_length=100)] = Field(
        default=(LatencyClassSection(name="default"),), strict=False,
        description="Promises to callers.",
        examples=[[{"name": "interactive", "ttft_s": 1.0}]])
    default_latency_class: Name = Field(
        default="default", description="The class of a request that names none.", examples=["interactive"])
    policy: PolicySection = Field(
        default=PolicySection(), description="How a backend is chosen.", examples=[{"name": "headrace"}])
    backends: Annotated[tuple[BackendSection, ...], Field(min_length=1, max_length=10_000)] = Field(
        strict=False,
        description="What serves the models.",
        examples=[[{"name": "h100-fp8", "url": "http://10.0.0.7:8000", "engine": "vllm", "model": "Qwen/Qwen3-32B",
                    "card": {"type": "h100-sxm"}}]])
    timeouts: TimeoutsSection = Field(
        default=TimeoutsSection(), description="How long a request may take.", examples=[{"total_s": 600}])
    retries: RetriesSection = Field(
        default=RetriesSection(), description="When a request is tried elsewhere.", examples=[{"max_attempts": 3}])
    hedging: HedgingSection = Field(
        default=HedgingSection(), description="When a request is sent to a second backend beside the first.",
        examples=[{"enabled": True}])
    limits: LimitsSection = Field(
        default=LimitsSection(), description="What the gateway takes on.", examples=[{"max_in_flight": 4_096}])
    decision_log: DecisionLogSection = Field(
        default=DecisionLogSection(), description="Record of decisions.", examples=[{"path": "decisions.jsonl"}])
    state: StateSection = Field(
        default=StateSection(), description="What was learned, kept over a restart.", examples=[{"path": "state.json"}])
    poll: PollSection = Field(
        default=PollSection(), description="How engines are watched.", examples=[{"interval_s": 1.0}])
    health: HealthSection = Field(
        default=HealthSection(),
        description="When a backend is taken out and how it comes back.",
        examples=[{"failures_to_eject": 5}])

    lending: LendingSection = Field(
        default=LendingSection(), description="What an allocator is told of capacity that can be done without.",
        examples=[{"headroom_replicas": 1}])

    @model_validator(mode="after")
    def _fits_together(self) -> "FleetConfig":
        if findings := list(contradictions(self)):
            raise validation_error(findings)
        return self

    def health_rules(self) -> HealthRules:
        """Thresholds of the health machine."""
        return HealthRules(**self.health.model_dump())

    def policy_spec(self) -> PolicySpec:
        """The policy as its registry takes it."""
        def parts(given: tuple[PolicyPart, ...] | None) -> tuple[PartSpec, ...] | None:
            return None if given is None else tuple(part.part_spec() for part in given)

        policy = self.policy
        return PolicySpec(name=policy.name, filters=parts(policy.filters), prices=parts(policy.prices),
                          picker=policy.picker.part_spec() if policy.picker else None, settings=dict(policy.settings))

    def budget_of(self, class_name: str) -> Budget:
        """What the class promises.

        Raises:
            KeyError: where there is no such class.
        """
        for latency_class in self.latency_classes:
            if latency_class.name == class_name:
                return latency_class.budget()
        raise KeyError(class_name)

    def admission_rules(self) -> AdmissionRules:
        """Who is let in while there is room, and who may wait."""
        return AdmissionRules(
            max_in_flight=self.limits.max_in_flight,
            max_waiting=self.limits.max_waiting,
            classes={entry.name: entry.admission() for entry in self.latency_classes},
        )

    def backend_specs(self, environ: Mapping[str, str]) -> tuple[BackendSpec, ...]:
        """All backends, with the secrets that they name.

        Raises:
            ConfigError: where a named environment variable is not set or cannot be a key. The key is not quoted.
        """
        if findings := _missing_keys(self, environ):
            raise ConfigError([Problem("", None, None, ".".join(map(str, loc)), why, hint)
                               for loc, why, hint in findings])
        return tuple(
            backend.spec(environ[backend.api_key_env].strip() if backend.api_key_env else None)
            for backend in self.backends
        )

    def content_hash(self) -> str:
        """12 hex digits that name the content: comments, layout and spelled-out defaults do not change them."""
        canonical = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(canonical.encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class LoadedFleet:
    """A fleet file that was read, validated and built: ready to be swapped in."""

    config: FleetConfig
    config_hash: str
    warnings: tuple[Problem, ...]
    specs: tuple[BackendSpec, ...]
    pipeline: Pipeline = field(repr=False)
    keys: KeyRing = field(repr=False)
    """Who may ask."""


def load_fleet(path: Path, environ: Mapping[str, str]) -> LoadedFleet:
    """Read, validate and build a fleet file; nothing is started or changed.

    Raises:
        ConfigError: with every problem found, each with its line.
    """
    return load_fleet_bytes(read_source(path), str(path), environ)


def load_fleet_bytes(raw: bytes, file: str, environ: Mapping[str, str]) -> LoadedFleet:
    """`load_fleet` on bytes already read; `file` is the name that problems carry.

    Raises:
        ConfigError: as `load_fleet`.
    """
    document = parse_source(raw, file, "deploy/fleet.example.yaml")
    try:
        config = FleetConfig.model_validate(document.content)
    except ValidationError as error:
        raise ConfigError(problems_of(error, document, FleetConfig)) from None
    missing = [document.problem(*finding) for finding in _missing_keys(config, environ)]
    pipeline = _pipeline(config, document, missing)
    return LoadedFleet(
        config=config,
        config_hash=config.content_hash(),
        warnings=tuple(document.problem(*finding) for finding in doubts(config, document)),
        specs=config.backend_specs(environ),
        pipeline=pipeline,
        keys=_key_ring(config, Path(file), environ),
    )


def keys_file_of(config: FleetConfig, fleet_file: Path) -> Path | None:
    """Where the keys file is: beside the fleet file, unless it says otherwise."""
    return None if config.auth.keys_file is None else fleet_file.parent / config.auth.keys_file


def _key_ring(config: FleetConfig, fleet_file: Path, environ: Mapping[str, str]) -> KeyRing:
    names, keys_file = config.auth.api_keys_env, keys_file_of(config, fleet_file)
    if not names and keys_file is None:
        return KeyRing.asking_nothing()
    in_environment = environment_rows({name: environ[name].strip().encode("ascii") for name in names})
    in_file = () if keys_file is None else load_keys(keys_file)
    return KeyRing.of(*unique_rows(str(keys_file or fleet_file), in_file, in_environment))


def _pipeline(config: FleetConfig, document: SourceDocument, problems: list[Problem]) -> Pipeline:
    """The built policy; a policy that cannot be built joins the problems found so far, and all are raised."""
    try:
        pipeline = build_pipeline(config.policy_spec())
    except PolicyError as error:
        path = error.path[1:] if error.path[:1] == ("policy",) else error.path
        problems = [*problems, document.problem(("policy", *path), error.message)]
        raise ConfigError(problems) from None
    if problems:
        raise ConfigError(problems)
    return pipeline


def _missing_keys(config: FleetConfig, environ: Mapping[str, str]) -> list[Finding]:
    named: list[tuple[Loc, str]] = [
        (("backends", index, "api_key_env"), backend.api_key_env)
        for index, backend in enumerate(config.backends) if backend.api_key_env is not None
    ]
    named += [(("auth", "api_keys_env", index), name) for index, name in enumerate(config.auth.api_keys_env)]
    findings = []
    for loc, name in named:
        key = environ.get(name, "").strip()
        if not key:
            findings.append(Finding(loc, f"environment variable {name} is not set or empty",
                                    f"export {name}=… where Headrace runs, or leave it out of the file"))
        elif not (key.isascii() and key.isprintable() and " " not in key):
            findings.append(Finding(loc, f"environment variable {name} holds characters that cannot go in an HTTP "
                                         "header", "it must be the bare key: printable ASCII, no spaces"))
    return findings
