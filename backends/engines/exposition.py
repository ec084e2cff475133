"""The Prometheus text format, read for a handful of gauges and counters.

Made for pages of other people's engines: a line that is not well formed is skipped, a value that cannot be true of a
count (NaN, negative, infinite) makes its sum unknown, and nothing here ever turns "missing" into 0. Format:
https://prometheus.io/docs/instrumenting/exposition_formats/ (with OpenMetrics exemplars tolerated).
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from math import isfinite

MAX_PAGE_BYTES = 4 * 1024 * 1024
"""A longer page is refused whole: the sum over half a page would look like an answer."""

_LABEL_BODY = r'[^"{}]|"(?:[^"\\]|\\.)*"'
# Possessive throughout, so that no hostile line takes more than linear time.
_SAMPLE = re.compile(
    r"(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*+)[ \t]*+"
    rf"(?:\{{(?P<labels>(?:{_LABEL_BODY})*+)\}})?[ \t]*+"
    r"(?P<value>(?<=[ \t}])[^\s#{}]++)"
    r"(?:[ \t]++-?[0-9.]++)?"  # timestamp
    r"(?:[ \t]++#.*)?"         # exemplar
)
_LABEL = re.compile(r'\s*+([a-zA-Z_][a-zA-Z0-9_]*+)\s*+=\s*+"((?:[^"\\]|\\.)*+)"\s*+(?:,|$)')
_ESCAPE = re.compile(r"\\(.)")
_MAX_COUNT = 1e15


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a page; `value` is `None` where the page said something that no count can be."""

    labels: Mapping[str, str]
    value: float | None


@dataclass(frozen=True, slots=True)
class Page:
    """The wanted series of one scrape. Every reader takes several names and answers for the first that is there."""

    series: Mapping[str, tuple[Series, ...]]

    def find(self, *names: str) -> tuple[Series, ...]:
        """The series of the first name that the page has: engines rename, and for a while show both."""
        return next((self.series[name] for name in names if name in self.series), ())

    def total(self, *names: str) -> float | None:
        """Sum over all label sets (engines, models, reasons); `None` where none is there or one is unreadable."""
        return _over_all((one.value for one in self.find(*names)), sum)

    def mean_ratio(self, *names: str) -> float | None:
        """Mean of a ratio over all label sets, 0 to 1; `None` also where it is no ratio."""
        return as_ratio(_over_all((one.value for one in self.find(*names)), mean))

    def per_rank(self, label: str, *names: str) -> tuple[float | None, ...]:
        """The largest value within each value of `label`: ranks that share work report it more than once."""
        ranks: dict[str, list[float | None]] = {}
        for one in self.find(*names):
            ranks.setdefault(one.labels.get(label, ""), []).append(one.value)
        return tuple(_over_all(values, max) for values in ranks.values())


def read_page(text: bytes, wanted: Collection[str]) -> Page:
    """The series of `text` whose names are `wanted`; an empty page where `text` is longer than `MAX_PAGE_BYTES`."""
    found: dict[str, dict[tuple[tuple[str, str], ...], Series]] = {}
    if len(text) > MAX_PAGE_BYTES:
        return Page({})
    for line in text.decode("utf-8", errors="replace").split("\n"):
        # Histograms are most of a page; this leaves before the pattern has to look at them.
        name = line.split("{", 1)[0].split(maxsplit=1)
        if not name or name[0] not in wanted:
            continue
        match = _SAMPLE.fullmatch(line.strip())
        if match is None:
            continue
        labels = _labels(match["labels"] or "")
        if labels is None:
            continue
        found.setdefault(match["name"], {})[tuple(sorted(labels.items()))] = Series(labels, _count(match["value"]))
    return Page({name: tuple(series.values()) for name, series in found.items()})


def mean(values: list[float]) -> float:
    """Arithmetic mean. `statistics` would bring `random` into the pure core."""
    return sum(values) / len(values)


def as_count(value: float | None) -> int | None:
    """A whole number of requests or tokens."""
    return None if value is None else round(value)


def as_ratio(value: float | None) -> float | None:
    """A share in 0 to 1. A hair above 1 is rounding; anything more is a percentage or a mistake, so unknown."""
    if value is None or value > 1.05:
        return None
    return min(1.0, value)


def share(part: float | None, whole: float | None) -> float | None:
    """`part / whole` as a ratio; `None` before anything was counted."""
    if part is None or not whole:
        return None
    return as_ratio(part / whole)


def over_ranks(values: tuple[float | None, ...], reduce: Callable[[list[float]], float] = sum) -> float | None:
    """One figure of several ranks; `None` where there is none or one is unknown."""
    return _over_all(values, reduce)


def _over_all(values: Iterable[float | None], reduce: Callable[[list[float]], float]) -> float | None:
    known: list[float] = []
    for value in values:
        if value is None:
            return None
        known.append(value)
    return reduce(known) if known else None


def _labels(body: str) -> dict[str, str] | None:
    labels: dict[str, str] = {}
    at, body = 0, body.strip()
    while at < len(body):
        match = _LABEL.match(body, at)
        if match is None:
            return None
        labels[match[1]] = _ESCAPE.sub(lambda esc: "\n" if esc[1] == "n" else esc[1], match[2])
        at = match.end()
    return labels


def _count(text: str) -> float | None:
    try:
        value = float(text) if "_" not in text else None
    except ValueError:
        return None
    return value if value is not None and isfinite(value) and 0 <= value < _MAX_COUNT else None
