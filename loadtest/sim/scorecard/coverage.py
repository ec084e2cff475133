"""Claims about the predicted P99 of first tokens: 99 of 100 come within it, wherever one looks."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce

from loadtest.sim.measures import TIME_BINS, Tally
from loadtest.sim.pools import find_pool
from loadtest.sim.rows import by_backend, by_class, pooled
from loadtest.sim.run import lay_out
from loadtest.sim.scorecard.claims import NOTHING, Finding, OfOneCase, percent
from loadtest.sim.scorecard.estimates import Estimate, estimate, off_target
from loadtest.sim.scorecard.sample import Sample

TARGET = 0.99
WINDOW_S = 30.0
SHOWN = 4
EVERYWHERE = "all"


@dataclass(frozen=True, slots=True)
class Covered(OfOneCase):
    """The share of first tokens within their predicted P99 is 99 %, give or take this."""

    within: float
    source: str

    @property
    def says(self) -> str:
        return f"{self.case}: first tokens within their predicted P99"

    @property
    def goal(self) -> str:
        return f"{percent(TARGET, 0)} ± {100 * self.within:g} points"

    def judge(self, sample: Sample) -> Finding:
        found = estimate([run.coverage_p99 for run in sample.runs(self.case) if run.coverage_p99 is not None])
        if found is None:
            return NOTHING
        return Finding(abs(found.mean - TARGET) <= self.within, found.text(100, 2, " %"), found)


@dataclass(frozen=True, slots=True)
class CoveredEachAlone(OfOneCase):
    """The same of each backend, each class, and each class on each backend.

    One is off where it lies farther away, and by more than chance explains (`off_target`): a share of few says little.
    """

    within: float
    source: str

    @property
    def says(self) -> str:
        return f"{self.case}: the same of each backend, each class, each pair"

    @property
    def goal(self) -> str:
        return f"all {percent(TARGET, 0)} ± {100 * self.within:g} points"

    def judge(self, sample: Sample) -> Finding:
        cells = pooled([run.coverage for run in sample.runs(self.case)])
        tallies = dict(_each(cells))
        if not tallies:
            return NOTHING
        off = {name: tally for name, tally in tallies.items() if off_target(tally, TARGET, self.within)}
        named = [f"{name} {percent(tally.share or 0.0, 2)} of {tally.of}" for name, tally in off.items()]
        beside = "; ".join(named[:SHOWN]) + (f"; {len(named) - SHOWN} more" if len(named) > SHOWN else "")
        return Finding(not off, f"{len(off)} of {len(tallies)} off", Estimate(float(len(off)), None), beside, cells)


def _each(cells: dict[str, dict[str, Tally]]) -> Iterator[tuple[str, Tally]]:
    yield from by_backend(cells).items()
    yield from by_class(cells).items()
    for backend, row in cells.items():
        for name, tally in row.items():
            yield f"{backend}/{name}", tally


@dataclass(frozen=True, slots=True)
class Recovered(OfOneCase):
    """After cards have changed, the predicted P99 is right again within so many seconds, and stays so.

    Windows of half a minute from the change on, of all requests and of each backend that changed. The first from which
    on none is off tells when; it is off as in `CoveredEachAlone`.
    """

    within_s: float
    tolerance: float
    source: str

    @property
    def says(self) -> str:
        return f"{self.case}: predicted P99 right again after the change"

    @property
    def goal(self) -> str:
        return f"<= {self.within_s:g} s"

    def judge(self, sample: Sample) -> Finding:
        workload = lay_out(sample.job(self.case, sample.subject, sample.seeds[0]))
        changed_s = min(event.at_s for event in workload.events)
        families = {event.family for event in workload.events}
        changed = {backend.name for backend in find_pool(self.case.pool).backends if backend.family in families}
        timelines = self._timelines(sample, changed)
        if not timelines:
            return NOTHING
        right_s, said = 0.0, []
        for name, bins in timelines.items():
            windows = list(_windows(bins, changed_s, sample.seconds))
            said.append(f"{name} {' '.join(_short(tally) for _, tally in windows)}")
            off_s = [end_s for end_s, tally in windows if off_target(tally, TARGET, self.tolerance)]
            right_s = max(right_s, max(off_s, default=changed_s) - changed_s)
        beside = f"% by {WINDOW_S:g} s: {'; '.join(said)}"
        return Finding(right_s <= self.within_s, f"{right_s:.0f} s", Estimate(right_s, None), beside)

    def _timelines(self, sample: Sample, changed: set[str]) -> dict[str, list[Tally]]:
        """By backend that changed, and of all; summed over seeds."""
        found: dict[str, list[Tally]] = {}
        for run in sample.runs(self.case):
            for backend, bins in run.coverage_timelines.items():
                for name in (EVERYWHERE, backend) if backend in changed else (EVERYWHERE,):
                    row = found.setdefault(name, [Tally()] * TIME_BINS)
                    found[name] = [before.plus(tally) for before, tally in zip(row, bins, strict=True)]
        return {name: bins for name, bins in found.items() if any(tally.of for tally in bins)}


def _windows(bins: list[Tally], from_s: float, seconds: float) -> Iterator[tuple[float, Tally]]:
    """End and tally of each whole window; a bin belongs to the window in which it begins."""
    step_s = seconds / TIME_BINS
    start_s = from_s
    while start_s + WINDOW_S <= seconds + step_s / 2:
        inside = [tally for place, tally in enumerate(bins)
                  if start_s - step_s / 2 <= place * step_s < start_s + WINDOW_S - step_s / 2]
        yield start_s + WINDOW_S, reduce(Tally.plus, inside, Tally())
        start_s += WINDOW_S


def _short(tally: Tally) -> str:
    return "-" if tally.share is None else f"{100 * tally.share:.1f}"
