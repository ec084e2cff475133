"""One metrics page out of those of all worker processes.

Counters and histograms add up, and so do gauges of what is in flight or waits. Every other gauge is one worker's view
of something that they all see, and is taken from the leader; whether the configuration is in force is true only where
it is true everywhere.

A counter never falls, though workers come and go: the last page of a worker that has ended stays part of the sum.
"""

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

SUMMED_GAUGES = frozenset({
    "headrace_backend_in_flight_requests", "headrace_backend_in_flight_tokens", "headrace_waiting_requests",
})  # fmt: skip
LEAST_GAUGES = frozenset({"headrace_config_last_reload_successful"})
ADDED = frozenset({"counter", "histogram", "summary"})

Key = tuple[str, tuple[tuple[str, str], ...]]


class Page:
    """Families of one worker's page, and its samples by name and labels."""

    def __init__(self, text: str) -> None:
        self.families: dict[str, Metric] = {}
        self.samples: dict[str, dict[Key, float]] = {}
        for family in text_string_to_metric_families(text):
            self.families[family.name] = family
            self.samples[family.name] = {
                (sample.name, tuple(sample.labels.items())): sample.value
                for sample in family.samples
                if not sample.name.endswith("_created")
            }


class Retired:
    """What the workers that have ended had counted."""

    def __init__(self) -> None:
        self._families: dict[str, Metric] = {}
        self._sums: dict[str, dict[Key, float]] = {}

    def add(self, page: Page) -> None:
        for name, family in page.families.items():
            if family.type in ADDED:
                self._families[name] = family
                _add(self._sums.setdefault(name, {}), page.samples[name])

    def merge(self, pages: Mapping[int, Page], leader: int | None) -> list[Metric]:
        """Families over these workers' pages and all that have ended."""
        ordered = sorted(pages, key=lambda row: (row != leader, row))
        names = dict.fromkeys(name for row in ordered for name in pages[row].families)
        names.update(dict.fromkeys(self._families))
        return [self._family(name, [pages[row] for row in ordered if name in pages[row].families]) for name in names]

    def _family(self, name: str, pages: list[Page]) -> Metric:
        family = pages[0].families[name] if pages else self._families[name]
        sums: dict[Key, float] = {}
        if family.type in ADDED or name in SUMMED_GAUGES:
            for samples in (*(page.samples[name] for page in pages), self._sums.get(name, {})):
                _add(sums, samples)
        elif name in LEAST_GAUGES:
            for page in pages:
                for key, value in page.samples[name].items():
                    sums[key] = min(value, sums.get(key, value))
        elif pages:
            sums = pages[0].samples[name]
        merged = Metric(name, family.documentation, family.type)
        for (sample_name, labels), value in sums.items():
            merged.add_sample(sample_name, dict(labels), value)
        return merged


def _add(sums: dict[Key, float], samples: Mapping[Key, float]) -> None:
    for key, value in samples.items():
        sums[key] = sums.get(key, 0.0) + value


def page_of(families: Iterable[Metric]) -> bytes:
    """The text of these families."""

    class Given(Collector):
        def collect(self) -> Iterable[Metric]:
            return families

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Given())
    return generate_latest(registry)
