"""One configuration as requests see it: built whole, swapped by one assignment, kept by each request to its end."""

from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType

from policies.admission import AdmissionRules
from policies.facts import Budget
from policies.hedging import HedgeRules
from policies.policy import Pipeline
from router.config.fleet_file import FleetConfig, LoadedFleet
from router.config.sections import TimeoutsSection
from router.keys.ring import KeyRing
from router.request.intake import LatencyClass, PhaseTimeouts, Vocabulary


@dataclass(frozen=True, slots=True)
class Generation:
    """What a request reads of the configuration. A request that began under one generation ends under it."""

    config: FleetConfig
    config_hash: str
    pipeline: Pipeline
    vocabulary: Vocabulary
    keys: KeyRing = field(repr=False)
    admission: AdmissionRules = field(repr=False)
    hedging: HedgeRules | None = None
    """`None`: no request is hedged."""

    @classmethod
    def of(cls, loaded: LoadedFleet) -> "Generation":
        config = loaded.config
        models = {alias: model.name for model in config.models for alias in (model.name, *model.aliases)}
        classes = {
            entry.name: LatencyClass(entry.name, entry.budget(), phase_timeouts(config.timeouts, entry.budget()),
                                     entry.priority, entry.sheddable)
            for entry in config.latency_classes
        }
        vocabulary = Vocabulary(MappingProxyType(models), MappingProxyType(classes), config.default_latency_class,
                                partial(lengthened_timeouts, config.timeouts))
        return cls(config, loaded.config_hash, loaded.pipeline, vocabulary, loaded.keys, config.admission_rules(),
                   config.hedging.rules())


def phase_timeouts(given: TimeoutsSection, budget: Budget) -> PhaseTimeouts:
    """The timeouts of one class. What the file leaves out follows the class's promise: a request far past its P99 is
    broken, not slow. The figures are those that `TimeoutsSection` describes.
    """
    return PhaseTimeouts(
        connect_s=given.connect_s,
        first_token_s=given.first_token_s or _multiple(budget.ttft_s, 10, 5, 120, unpromised=30),
        inter_token_s=given.inter_token_s or _multiple(budget.inter_token_s, 50, 5, 60, unpromised=15),
        total_s=given.total_s or _multiple(budget.e2e_s, 10, 60, 3600, unpromised=600),
        heartbeat_s=given.heartbeat_s,
    )


def lengthened_timeouts(given: TimeoutsSection, latency_class: LatencyClass, budget: Budget) -> PhaseTimeouts:
    """The timeouts of one request with a budget of its own: those of its class, longer where it allows more time.

    They are never shorter. A timeout counts against the backend, and no caller's impatience may take one out.
    """
    of_class, wished = latency_class.timeouts, phase_timeouts(given, budget)
    return replace(
        of_class,
        first_token_s=max(of_class.first_token_s, wished.first_token_s),
        inter_token_s=max(of_class.inter_token_s, wished.inter_token_s),
    )


def _multiple(promised_s: float | None, factor: float, low_s: float, high_s: float, *, unpromised: float) -> float:
    return unpromised if promised_s is None else min(high_s, max(low_s, factor * promised_s))
