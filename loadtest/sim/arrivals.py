"""When requests arrive: Poisson processes whose rate varies, drawn by thinning (Lewis and Shedler 1979).

`Rate.at(t)` must never exceed `Rate.peak`. Modulated traffic is a two-state process, calm and burst, on a slow sine:
bursts of 1.8 to 2.6 times the calm rate last about four seconds and come about every twenty. The mean over a long time
is the rate that was asked for.
"""

from bisect import bisect_right
from dataclasses import dataclass
from math import pi, sin
from random import Random
from typing import Protocol

BURST_FACTOR = (1.8, 2.6)
MEAN_BURST_S = 4.0
MEAN_CALM_S = 16.0
SINE_AMPLITUDE = 0.25
SINE_PERIOD_S = 200.0


class Rate(Protocol):
    """Arrivals a second over time, and a bound that they never exceed."""

    @property
    def peak(self) -> float: ...
    def at(self, t_s: float) -> float: ...


@dataclass(frozen=True, slots=True)
class Steady:
    """A Poisson process."""

    rate_per_s: float

    @property
    def peak(self) -> float:
        return self.rate_per_s

    def at(self, t_s: float) -> float:
        return self.rate_per_s


@dataclass(frozen=True, slots=True)
class Modulated:
    """Calm and bursts in turn, on a sine. Make it with `modulated`."""

    calm_per_s: float
    phase: float
    changes_s: tuple[float, ...]
    """Moments at which the factor changes; the first is 0."""
    factors: tuple[float, ...]

    @property
    def peak(self) -> float:
        return self.calm_per_s * (1.0 + SINE_AMPLITUDE) * max(self.factors)

    def at(self, t_s: float) -> float:
        factor = self.factors[max(0, bisect_right(self.changes_s, t_s) - 1)]
        return self.calm_per_s * factor * (1.0 + SINE_AMPLITUDE * sin(2.0 * pi * t_s / SINE_PERIOD_S + self.phase))


def modulated(rate_per_s: float, seconds: float, rng: Random) -> Modulated:
    """Bursts and sine around that mean rate, laid out over the whole run."""
    changes, factors = [0.0], [1.0]
    t_s = rng.expovariate(1.0 / MEAN_CALM_S)
    while t_s < seconds:
        changes.append(t_s)
        factors.append(rng.uniform(*BURST_FACTOR))
        t_s += rng.expovariate(1.0 / MEAN_BURST_S)
        changes.append(t_s)
        factors.append(1.0)
        t_s += rng.expovariate(1.0 / MEAN_CALM_S)
    mean_factor = (MEAN_CALM_S + MEAN_BURST_S * sum(BURST_FACTOR) / 2.0) / (MEAN_CALM_S + MEAN_BURST_S)
    return Modulated(rate_per_s / mean_factor, rng.uniform(0.0, 2.0 * pi), tuple(changes), tuple(factors))


@dataclass(frozen=True, slots=True)
class Crowd:
    """A rate that is `factor` times as high for a while."""

    calm: Rate
    from_s: float
    to_s: float
    factor: float

    @property
    def peak(self) -> float:
        return self.calm.peak * self.factor

    def at(self, t_s: float) -> float:
        return self.calm.at(t_s) * (self.factor if self.from_s <= t_s < self.to_s else 1.0)


def draw_arrivals(rate: Rate, seconds: float, rng: Random) -> list[float]:
    """Times of arrival before `seconds`, in order."""
    times: list[float] = []
    peak = rate.peak
    t_s = rng.expovariate(peak)
    while t_s < seconds:
        if rng.random() * peak < rate.at(t_s):
            times.append(t_s)
        t_s += rng.expovariate(peak)
    return times
