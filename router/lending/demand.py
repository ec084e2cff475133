"""What is asked of each model: requests per second by bins of time, what they are like, and what is to be expected.

What arrives in a bin is what ended in it and what more is in flight at its end than at its beginning, so an overloaded
fleet, which ends few requests, is not mistaken for a quiet one.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from backends.catalog.spec import BackendSpec
from policies.facts import Budget
from policies.forecast.forecaster import Forecaster, Step
from policies.forecast.mix import ClassMix, Mix
from policies.forecast.outlooks import EwmaLevel, SeasonalNaive
from router.config.sections import LendingSection
from router.request.exchange import Exchange, Outcome

MAX_BINS_AT_ONCE = 10_000
"""A clock that stood still for longer than so many bins begins anew."""
ASKED_FOR = frozenset({Outcome.OK, Outcome.SHED, Outcome.BACKEND_ERROR, Outcome.TRUNCATED, Outcome.TIMEOUT,
                       Outcome.NO_BACKEND, Outcome.CLIENT_CLOSED})
"""Outcomes of requests that needed capacity, whether they got it or not."""


class Tally:
    """Requests that have ended, by model. `router.workers.demand` has the one of several processes together."""

    def __init__(self) -> None:
        self.own: Counter[str] = Counter()

    def add(self, model: str) -> None:
        """One more has ended here."""
        self.own[model] += 1

    def total(self, model: str) -> int:
        """How many there were so far; never less than before."""
        return self.own[model]

    def in_flight_elsewhere(self, specs: Iterable[BackendSpec]) -> int:
        """Requests that other processes of the gateway have open at these backends."""
        return 0


class ModelDemand:
    """The demand for one model. Time comes with each call; bins close by themselves as it passes."""

    def __init__(self, settings: LendingSection, now: float, ended_before: int = 0) -> None:
        self._settings = settings
        season = max(2, round(settings.season_s / settings.bin_s))
        outlook = SeasonalNaive(season, settings.bin_s) if settings.forecaster == "seasonal_naive" else EwmaLevel()
        self._forecaster = Forecaster(outlook, bin_s=settings.bin_s, horizon_s=settings.horizon_s)
        self._mix = Mix()
        self._bin_ends_s = now + settings.bin_s
        self._ended_before = ended_before
        self._in_flight_before = 0
        self.last_per_s: float | None = None
        """Of the last whole bin."""

    def learn(self, exchange: Exchange) -> None:
        """What one of its requests was like."""
        facts = exchange.facts
        if facts is not None and exchange.outcome is Outcome.OK:
            usage = exchange.usage
            prompt = usage.prompt_tokens if usage is not None and usage.prompt_tokens else facts.prompt_tokens
            output = usage.completion_tokens if usage is not None and usage.completion_tokens else None
            self._mix.learn(facts.latency_class, prompt, output or exchange.generated_tokens or 1)

    def catch_up(self, now: float, count_in_flight: Callable[[], int], count_ended: Callable[[], int]) -> None:
        """Close the bins that are over. Both counts are of all processes of the gateway."""
        if now < self._bin_ends_s:
            return
        bin_s, in_flight, ended = self._settings.bin_s, count_in_flight(), count_ended()
        if now - self._bin_ends_s > MAX_BINS_AT_ONCE * bin_s:
            self._bin_ends_s = now
        while now >= self._bin_ends_s:
            arrived = max(0, ended - self._ended_before + in_flight - self._in_flight_before)
            self._ended_before, self._in_flight_before = ended, in_flight
            self.last_per_s = arrived / bin_s
            self._forecaster.learn(self.last_per_s)
            self._mix.fade()
            self._bin_ends_s += bin_s

    def export(self) -> dict[str, Any]:
        """What was learned of it, as JSON values."""
        return {"forecast": self._forecaster.export(), "mix": self._mix.export()}

    def restore(self, saved: Mapping[str, Any], age_s: float) -> None:
        """Begin with what was learned until so long ago."""
        self._forecaster.restore(saved["forecast"], age_s)
        self._mix.restore(saved["mix"])

    def steps(self) -> tuple[Step, ...]:
        """The forecast; empty where nothing is known yet."""
        return self._forecaster.steps()

    def classes(self, budgets: Mapping[str, Budget]) -> tuple[ClassMix, ...]:
        """What its requests are like."""
        return self._mix.classes(budgets)


class Demand:
    """All models. `in_flight` counts the requests of a model that some backend has now."""

    def __init__(self, settings: LendingSection, clock: Callable[[], float],
                 in_flight: Callable[[str], int]) -> None:
        self._settings = settings
        self._clock = clock
        self._in_flight = in_flight
        self._models: dict[str, ModelDemand] = {}
        self.tally = Tally()

    def resettle(self, settings: LendingSection) -> None:
        """New settings. What forecasts are made of starts anew where they say so; nothing else does."""
        if _made_of(settings) != _made_of(self._settings):
            self._models.clear()
        self._settings = settings

    def ended(self, exchange: Exchange) -> None:
        """A request has ended."""
        if exchange.facts is not None and exchange.outcome in ASKED_FOR:
            model = exchange.facts.model
            self.of(model).learn(exchange)
            self.tally.add(model)

    def of(self, model: str) -> ModelDemand:
        """Up to date as of now."""
        now = self._clock()
        known = self._models.get(model)
        if known is None:
            known = self._models[model] = ModelDemand(self._settings, now, self.tally.total(model))
        known.catch_up(now, partial(self._in_flight, model), partial(self.tally.total, model))
        return known

    def export(self) -> dict[str, Any]:
        """What was learned, as JSON values."""
        return {"made_of": _made_of(self._settings),
                "models": {model: self.of(model).export() for model in list(self._models)}}

    def restore(self, saved: Mapping[str, Any], age_s: float) -> None:
        """Begin with what was learned until so long ago, where forecasts were made of the same. Before any request."""
        if saved.get("made_of") != _made_of(self._settings):
            return
        for model, learned in saved["models"].items():
            self.of(model).restore(learned, age_s)


def _made_of(settings: LendingSection) -> dict[str, Any]:
    """The settings that a forecast rests on: under others what was learned is worth nothing."""
    return {name: getattr(settings, name) for name in ("forecaster", "bin_s", "season_s", "horizon_s")}
