"""The sections of a fleet file, one class each. Every setting has its meaning, its default and an example here.

`docs/configuration.md` has a row for each of them, which a test holds. `FleetConfig` (`fleet_file`) puts them together.
"""

from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from backends.catalog.health import HealthRules
from backends.catalog.spec import BackendSpec, Coefficients, ParallelLayout
from policies.admission import ClassRules
from policies.facts import Budget
from policies.hedging import HedgeRules
from policies.spec import PartSpec
from router.config.fields import Degree, Milliseconds, ModelName, Seconds, SecondsFromZero, Settings, Share, Tokens
from settings.fields import BaseUrl, Host, Labels, Name, Port, Section, Text, VariableName
from settings.problems import Finding, validation_error

_RULES = HealthRules()


class ListenSection(Section):
    """Where clients connect."""

    host: Host = Field(default="127.0.0.1", description="Address that the gateway binds.", examples=["::"])
    port: Port = Field(default=8080, description="TCP port; 0 takes a free one.", examples=[8080])


class AdminSection(Section):
    """Where operators connect: admin API, status, reload. Not for clients."""

    host: Host = Field(
        default="127.0.0.1", description="Address that the admin listener binds.", examples=["127.0.0.1"])
    port: Port = Field(default=8081, description="TCP port; 0 takes a free one.", examples=[8081])


class AuthSection(Section):
    """Who may ask. Without keys, everyone who reaches the listener may."""

    api_keys_env: tuple[VariableName, ...] = Field(
        default=(), strict=False,
        description="Environment variables that hold the keys that clients may use; none: no key is asked for.",
        examples=[["HEADRACE_CLIENT_KEY"]])
    keys_file: Text | None = Field(
        default=None, description="File of hashed keys, beside the fleet file; see docs/keys.md.",
        examples=["keys.yaml"])


class DecisionLogSection(Section):
    """One line for each request, for replay and cost reports."""

    path: Text | None = Field(
        default=None, description="File of decision records, beside the fleet file; left out: none is kept.",
        examples=["decisions.jsonl"])
    max_bytes: Annotated[int, Field(ge=1_048_576, le=1_099_511_627_776)] = Field(
        default=268_435_456, description="Size at which the file moves aside.", examples=[268_435_456])
    keep_files: Annotated[int, Field(ge=0, le=1_000)] = Field(
        default=8, description="Files that moved aside and are kept.", examples=[8])
    queue_records: Annotated[int, Field(ge=1, le=1_000_000)] = Field(
        default=4_096, description="Records that may wait to be written; one more is dropped.", examples=[4_096])


class StateSection(Section):
    """What was learned, kept over a restart."""

    path: Text | None = Field(
        default=None,
        description="File of what the policy, the prompt sizes and the forecast of demand have learned, beside the "
                    "fleet file; left out: each start learns afresh.",
        examples=["state.json"])
    save_every_s: Seconds = Field(
        default=60.0, description="Between two savings; the last one is at the end.", examples=[60])


class ModelSection(Section):
    """A model that clients can ask for."""

    name: ModelName = Field(description="The name that `/v1/models` lists.", examples=["Qwen/Qwen3-32B"])
    aliases: tuple[ModelName, ...] = Field(
        default=(), strict=False, description="Other names that clients may use for it.", examples=[["qwen3"]])


class LatencyClassSection(Section):
    """A promise to a kind of caller. A time that is left out is not promised."""

    name: Name = Field(description="What a request names in the header `x-headrace-class`.", examples=["interactive"])
    ttft_s: Seconds | None = Field(
        default=None, description="P99 budget of the time to first token, in seconds.", examples=[1.0])
    inter_token_s: Seconds | None = Field(
        default=None, description="P99 budget of the time between tokens, in seconds.", examples=[0.15])
    e2e_s: Seconds | None = Field(
        default=None, description="P99 budget from the first byte in to the last byte out, in seconds.", examples=[30])
    priority: Annotated[int, Field(ge=-1_000, le=1_000)] = Field(
        default=0,
        description="Larger goes first where requests wait, and is the last to be turned away there.",
        examples=[10])
    sheddable: bool = Field(
        default=False,
        description="Whether a refusal at once is better than an answer that is predicted to come late.",
        examples=[True])
    reserved_share: Share = Field(
        default=0.0,
        description="Share of `limits.max_in_flight` that is kept free of other classes.",
        examples=[0.25])
    max_queue: Annotated[int, Field(ge=0, le=1_000_000)] | None = Field(
        default=None,
        description="Its requests that may wait at once while no backend is up, each for at most 0.4 of its `ttft_s`; "
                    "0: none waits; left out: `limits.max_waiting` alone bounds them.",
        examples=[64])

    def budget(self) -> Budget:
        """The promise as routing decisions take it."""
        return Budget(ttft_s=self.ttft_s, inter_token_s=self.inter_token_s, e2e_s=self.e2e_s)

    def admission(self) -> ClassRules:
        """How it is admitted."""
        return ClassRules(reserved_share=self.reserved_share, max_waiting=self.max_queue)


class PolicyPart(Section):
    """A filter, price or picker: its name, and its own settings beside it."""

    model_config = ConfigDict(extra="allow")

    name: Text = Field(description="Which part.", examples=["drain_time"])

    @model_validator(mode="after")
    def _settings_are_plain(self) -> "PolicyPart":
        for key, value in (self.model_extra or {}).items():
            if not isinstance(value, str | int | float) or value in (float("inf"), float("-inf")) or value != value:
                raise validation_error([Finding((key,), "must be a finite number, text, true or false")])
        return self

    def part_spec(self) -> PartSpec:
        """The part as the policy registry takes it."""
        return PartSpec(self.name, dict(self.model_extra or {}))


# `filters: [alive]` is short for `filters: [{name: alive}]`.
Part = Annotated[PolicyPart, BeforeValidator(lambda given: {"name": given} if isinstance(given, str) else given)]


class PolicySection(Section):
    """How a backend is chosen: a preset by name, and what is to differ from it."""

    name: Text = Field(
        default="headrace",
        description="A preset: `headrace`, or one of the others under Policy parts.",
        examples=["headrace"])
    settings: Settings = Field(
        default={},
        description="Settings of the preset's parts, where they differ from its own.",
        examples=[{"miss_value": 10}])
    filters: tuple[Part, ...] | None = Field(
        default=None, strict=False,
        description="Which backends may serve a request; replaces the preset's filters.",
        examples=[["serves_model", "alive", "fits_context"]])
    prices: tuple[Part, ...] | None = Field(
        default=None, strict=False,
        description="What a request costs there, in money; replaces the preset's prices.",
        examples=[["request_cost", {"name": "drain_time", "price_per_s": 0.002}]])
    picker: Part | None = Field(
        default=None,
        description="Which of the priced backends is chosen; replaces the preset's.",
        examples=[{"name": "chance_constrained", "miss_value": 10}])


class CardSection(Section):
    """The accelerators under one backend."""

    type: Text = Field(
        description="Card type, in any words; backends of one type are compared under it.", examples=["h100-sxm"])
    count: Annotated[int, Field(ge=1, le=65_536)] = Field(
        default=1, description="How many cards the engine runs on.", examples=[2])


class ParallelSection(Section):
    """How the engine splits the model over its cards."""

    tp: Degree = Field(default=1, description="Tensor parallel degree.", examples=[2])
    pp: Degree = Field(default=1, description="Pipeline parallel degree.", examples=[1])
    dp: Degree = Field(default=1, description="Data parallel degree.", examples=[1])
    ep: Degree = Field(default=1, description="Expert parallel degree.", examples=[1])


class CoefficientsSection(Section):
    """Step times of this backend from a measurement (equation in `backends.catalog.spec.Coefficients`)."""

    version: Text = Field(description="Names the measurement; each decision records it.", examples=["2026-01-h100x2"])
    source: Text = Field(description="Where the numbers come from.", examples=["own benchmark of 2026-01-15"])
    prefill_base_ms: Milliseconds = Field(description="A step that only prefills, before any token.", examples=[9.1])
    prefill_ms_per_token: Milliseconds = Field(description="Each new prompt token.", examples=[0.036])
    prefill_ms_per_pair: Milliseconds = Field(
        description="Each pair of tokens that prefill attends over.", examples=[1.5e-6])
    decode_base_ms: Milliseconds = Field(description="A step that decodes, before any sequence.", examples=[9.6])
    decode_ms_per_seq: Milliseconds = Field(description="Each decoding sequence.", examples=[0.024])
    decode_ms_per_seq_token: Milliseconds = Field(
        description="Each token of context of each decoding sequence.", examples=[4.2e-5])
    host_ms: Milliseconds = Field(default=0.0, description="Host time of every step.", examples=[0.0])
    first_token_overhead_ms: Milliseconds = Field(
        default=0.0, description="Time to first token beyond queue and prefill.", examples=[30])
    kv_capacity_tokens: Tokens | None = Field(
        default=None, description="Tokens that the KV cache holds.", examples=[420_850])
    chunk_tokens: Tokens | None = Field(
        default=None,
        description="Tokens of one iteration, prompt and decode together (vLLM `max_num_batched_tokens`); left out: "
                    "2048.",
        examples=[2_048])


class BackendSection(Section):
    """One engine deployment that serves one model on one card type."""

    name: Name = Field(description="Unique; appears in response headers, metrics and logs.", examples=["h100-fp8"])
    url: BaseUrl = Field(description="Base address of the engine, without `/v1`.", examples=["http://10.0.0.7:8000"])
    engine: Text = Field(
        description="Which dialect it speaks: `llamacpp`, `vllm`, `vllm-ascend`, `sglang`, `tgi` or `openai`.",
        examples=["vllm"])
    model: ModelName = Field(description="Which of `models` it serves.", examples=["Qwen/Qwen3-32B"])
    served_model_name: ModelName | None = Field(
        default=None, description="The model's name at the engine, where it differs.", examples=["qwen3-32b-fp8"])
    card: CardSection = Field(description="What it runs on.", examples=[{"type": "h100-sxm", "count": 2}])
    quantization: Text | None = Field(default=None, description="Weight precision.", examples=["fp8"])
    parallel: ParallelSection = Field(
        default=ParallelSection(), description="How the model is split over the cards.", examples=[{"tp": 2}])
    context_tokens: Tokens | None = Field(
        default=None,
        description="Longest prompt plus answer, in tokens; left out: unknown, and every request is taken to fit.",
        examples=[32_768])
    slots: Annotated[int, Field(ge=1, le=1_000_000)] | None = Field(
        default=None,
        description="Sequences that the engine runs at once (vLLM `max_num_seqs`, llama.cpp `--parallel`).",
        examples=[256])
    price_per_hour: Annotated[float, Field(ge=0, le=1e6)] = Field(
        default=0.0, description="Price of all its cards for an hour, in `currency`.", examples=[5.90])
    weight: Annotated[float, Field(ge=0, le=1_000)] = Field(
        default=1.0,
        description="Operator's preference: above 1 more attractive, below 1 less; 0 drains: open streams end, no new "
                    "request comes.",
        examples=[1.0])
    site: Text | None = Field(default=None, description="Where it stands.", examples=["eu-north1"])
    labels: Labels = Field(default={}, description="Any text by key, for operators.", examples=[{"pool": "edge"}])
    api_key_env: VariableName | None = Field(
        default=None, description="Environment variable that holds the engine's API key.", examples=["LLAMA_KEY"])
    coefficients: CoefficientsSection | None = Field(
        default=None,
        description="Measured step times; left out: a deliberately slow assumption, until traffic teaches better.",
        examples=[{"version": "2026-01-h100x2", "source": "own benchmark"}])

    def spec(self, api_key: str | None) -> BackendSpec:
        """The backend as the catalog knows it, with its secret looked up."""
        return BackendSpec(
            name=self.name, url=self.url, engine=self.engine, model=self.model,
            served_model_name=self.served_model_name or self.model,
            card_type=self.card.type, card_count=self.card.count, quantization=self.quantization,
            parallel=ParallelLayout(**self.parallel.model_dump()),
            context_tokens=self.context_tokens, slots=self.slots,
            price_per_hour=self.price_per_hour, weight=self.weight, site=self.site,
            labels=MappingProxyType(dict(self.labels)),
            coefficients=Coefficients(**self.coefficients.model_dump()) if self.coefficients else None,
            api_key=api_key,
        )


class TimeoutsSection(Section):
    """How long a request may take, phase by phase. What is left out follows the class's budget."""

    receive_head_s: Seconds = Field(default=10.0, description="For a request's head to come.", examples=[10])
    receive_body_s: Seconds = Field(
        default=30.0, description="For its body to come, plus a second for each 16 KiB.", examples=[30])
    connect_s: Seconds = Field(default=2.0, description="To reach a backend.", examples=[2])
    first_token_s: Seconds | None = Field(
        default=None,
        description="From the request sent to its first token back; left out: 10 times the class's `ttft_s`, within 5 "
                    "to 120, and 30 where it has none.",
        examples=[30])
    inter_token_s: Seconds | None = Field(
        default=None,
        description="Between two pieces of a stream; left out: 50 times the class's `inter_token_s`, within 5 to 60, "
                    "and 15 where it has none.",
        examples=[15])
    total_s: Seconds | None = Field(
        default=None,
        description="From the last byte in to the last byte out; left out: 10 times the class's `e2e_s`, within 60 to "
                    "3600, and 600 where it has none.",
        examples=[600])
    heartbeat_s: Seconds | None = Field(
        default=None,
        description="Silence before a stream's first token after which a comment is sent, and again each time; left "
                    "out: none. The first one commits the answer to its backend.",
        examples=[15])
    drain_s: Seconds = Field(
        default=30.0, description="What open requests are given to end after SIGTERM.", examples=[30])


class RetriesSection(Section):
    """When a request that has sent nothing to its client yet is tried on another backend."""

    max_attempts: Annotated[int, Field(ge=1, le=10)] = Field(
        default=3, description="Backends tried for a request, the first included; 1 is no retry.", examples=[3])
    budget_ratio: Share = Field(
        default=0.2, description="Retries over requests, for all traffic together.", examples=[0.2])
    budget_floor_per_s: Annotated[float, Field(ge=0, le=100_000)] = Field(
        default=10.0, description="Retries a second that are always allowed.", examples=[10])


class HedgingSection(Section):
    """When a request whose backend is silent is sent to a second one too; see docs/reliability.md."""

    enabled: bool = Field(default=False, description="Whether requests are hedged at all.", examples=[True])
    after: Annotated[float, Field(ge=0.5, le=0.9999)] = Field(
        default=0.99,
        description="A first attempt is late when this share of such attempts would have begun their answer.",
        examples=[0.95])
    latency_classes: tuple[Name, ...] = Field(
        default=(), strict=False,
        description="Classes whose requests are hedged; none: all that promise a `ttft_s` or, for answers that are no "
                    "streams, an `e2e_s`.",
        examples=[["interactive"]])
    budget_ratio: Annotated[float, Field(ge=0, le=0.25)] = Field(
        default=0.02, description="Hedges over requests, for all traffic together.", examples=[0.02])
    budget_floor_per_s: Annotated[float, Field(ge=0, le=1_000)] = Field(
        default=0.1, description="Hedges a second that are always allowed.", examples=[0.1])

    def rules(self) -> HedgeRules | None:
        """As decisions take them; `None` where nothing is hedged."""
        return HedgeRules(self.after, frozenset(self.latency_classes)) if self.enabled else None


class LimitsSection(Section):
    """What the gateway takes on."""

    max_body_bytes: Annotated[int, Field(ge=1_024, le=1_073_741_824)] = Field(
        default=16_777_216, description="Largest request body; a larger one is answered 413.", examples=[16_777_216])
    max_connections: Annotated[int, Field(ge=1, le=1_000_000)] = Field(
        default=8_192, description="Client connections held at once; one more is answered 503.", examples=[8_192])
    max_in_flight: Annotated[int, Field(ge=1, le=1_000_000)] = Field(
        default=4_096, description="Requests held at once; one more is answered 429.", examples=[4_096])
    max_waiting: Annotated[int, Field(ge=0, le=1_000_000)] = Field(
        default=256,
        description="Requests of all classes that may wait at once while no backend is up; one more takes the place of "
                    "the least important, or is answered 503.",
        examples=[256])


class PollSection(Section):
    """How the engines' health and metrics are read."""

    interval_s: Annotated[float, Field(ge=0.05, le=300)] = Field(
        default=1.0, description="Between two readings of a backend.", examples=[1.0])
    timeout_s: Annotated[float, Field(ge=0.05, le=300)] = Field(
        default=1.0, description="For one reading.", examples=[1.0])


_Count = Annotated[int, Field(ge=1, le=10_000)]


class HealthSection(Section):
    """When a backend is taken out and how it comes back (`backends.catalog.health`)."""

    failures_to_eject: _Count = Field(
        default=_RULES.failures_to_eject, description="Failed requests in a row that take a backend out.", examples=[5])
    silent_failures_to_eject: _Count = Field(
        default=_RULES.silent_failures_to_eject,
        description="The same for requests that got no answer at all: refused, reset, timed out.",
        examples=[3])
    failure_ratio_to_eject: Annotated[float, Field(gt=0, le=1)] | None = Field(
        default=_RULES.failure_ratio_to_eject,
        description="Share of failed requests that takes a backend out even where successes lie between; `null`: off.",
        examples=[0.5])
    failure_ratio_min_requests: _Count = Field(
        default=_RULES.failure_ratio_min_requests,
        description="Requests needed before that share is believed.",
        examples=[20])
    failure_window_s: Seconds = Field(
        default=_RULES.failure_window_s, description="Time over which that share fades.", examples=[30])
    probe_failures_to_unhealthy: _Count = Field(
        default=_RULES.probe_failures_to_unhealthy,
        description="Failed health checks in a row that take a backend out.",
        examples=[3])
    probe_successes_to_healthy: _Count = Field(
        default=_RULES.probe_successes_to_healthy,
        description="Good health checks in a row that bring it back.",
        examples=[2])
    traffic_vouches_s: SecondsFromZero = Field(
        default=_RULES.traffic_vouches_s,
        description="A request served this recently outweighs a late health check.",
        examples=[10])
    base_ejection_s: Seconds = Field(
        default=_RULES.base_ejection_s,
        description="How long the first ejection lasts; each further one doubles.",
        examples=[5])
    max_ejection_s: Seconds = Field(default=_RULES.max_ejection_s, description="Longest ejection.", examples=[60])
    forgive_after_s: Seconds = Field(
        default=_RULES.forgive_after_s,
        description="Healthy for this long: earlier ejections are forgotten.",
        examples=[120])
    trial_requests: _Count = Field(
        default=_RULES.trial_requests, description="Requests that a backend on trial may hold at once.", examples=[1])
    trial_successes: _Count = Field(
        default=_RULES.trial_successes, description="Successes in a row that end the trial.", examples=[2])
    slow_start_s: SecondsFromZero = Field(
        default=_RULES.slow_start_s,
        description="Time over which a returned backend's share grows to its full size.",
        examples=[10])
    slow_start_floor: Annotated[float, Field(gt=0, le=1)] = Field(
        default=_RULES.slow_start_floor, description="Its share at the start of that time.", examples=[0.1])
    min_healthy_share: Share = Field(
        default=_RULES.min_healthy_share,
        description="Share of a model's backends that signs of mere overload never take out.",
        examples=[0.5])


class LendingSection(Section):
    """What is told to an allocator of the capacity that can be done without; see docs/lending.md."""

    forecaster: Literal["seasonal_naive", "ewma_quantile"] = Field(
        default="seasonal_naive",
        description="What is expected of the demand: the shape of earlier seasons, or the level of late.",
        examples=["seasonal_naive"])
    bin_s: Annotated[float, Field(ge=0.1, le=3600)] = Field(
        default=60.0, description="Demand is counted over so long.", examples=[60])
    season_s: Annotated[float, Field(ge=1, le=31_536_000)] = Field(
        default=86_400.0, description="After this time demand repeats itself; nothing is lent before one has passed.",
        examples=[86_400])
    horizon_s: Annotated[float, Field(gt=0, le=604_800)] = Field(
        default=2_400.0, description="A loan is meant to last this long: nothing is lendable that is missed sooner.",
        examples=[2_400])
    grace_s: SecondsFromZero = Field(
        default=60.0, description="What a borrower takes to let go: part of the time that a recall needs.",
        examples=[60])
    target: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.7, description="Share of a backend's capacity at the mean that is counted on, so that P99 holds.",
        examples=[0.7])
    headroom_replicas: Annotated[float, Field(ge=0, le=1_000)] = Field(
        default=1.0, description="Kept beyond the forecast, in backends of the largest size.", examples=[1])
    assumed_return_s: Seconds = Field(
        default=120.0, description="Taken for load and warm-up of an engine until they were measured.", examples=[120])
    warmup_requests: Annotated[int, Field(ge=0, le=1_000)] = Field(
        default=2, description="Short requests that a returned engine answers before it gets traffic.", examples=[2])
