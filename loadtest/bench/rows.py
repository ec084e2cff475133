"""From the figures of all repetitions to the rows of the answer: medians, differences and ratios. Pure.

Differences and ratios are taken within one repetition and only then reduced to their median: targets follow each other
closely there, so that what the machine does meanwhile hits both sides.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median

from loadtest.bench.figures import Figures, Sample, figures
from loadtest.bench.workloads import Workload

DIRECT = "direct"
YARDSTICK = "nginx"
TRUSTED_SHARE = 0.8
"""Above this share of the direct figure, the mock and the load client may be the limit instead of the target."""
MEASURED = ("rps", "us_per_request", "added_p50_ms", "added_p99_ms", "chunks_per_s", "us_per_chunk",
            "chunks_per_core_s", "mb_per_s", "kb_per_stream", "rss_mb", "busy", "others", "p50_ms", "p99_ms")
WITH_ADDED_LATENCY = ("W1o", "W2")
"""Latency over direct means something only where the load does not depend on the target."""


@dataclass(frozen=True, slots=True)
class Row:
    """One target under one workload: medians over the repetitions."""

    target: str
    workload: str
    connections: int | None = None
    rps: float | None = None
    us_per_request: float | None = None
    """CPU time of the target's processes; `direct`: of the mock."""
    added_p50_ms: float | None = None
    added_p99_ms: float | None = None
    """Latency over direct; of W2 the time of a chunk on its way."""
    chunks_per_s: float | None = None
    us_per_chunk: float | None = None
    mb_per_s: float | None = None
    kb_per_stream: float | None = None
    rss_mb: float | None = None
    version: str | None = None
    absent: str | None = None
    """Why the target was not measured and what to do about it."""
    p50_ms: float | None = None
    p99_ms: float | None = None
    busy: float | None = None
    """Share of one core that the target took."""
    others: float | None = None
    """Share of a core that processes of neither side took, on the core where they took most: noise."""
    chunks_per_core_s: float | None = None
    """Chunks over the CPU time that the target took for them."""
    load_limited: bool = False
    """The target came so close to direct that the mock and the load client may be the limit."""
    repetitions: int = 0
    trusted: bool = True
    """False where `doubt` says why the headline figure is no measure of the target."""
    doubt: str | None = None
    to_nginx: float | None = None
    to_direct: float | None = None
    """The workload's headline figure over that of nginx, of direct. `None` where either is not trusted."""
    spread: float | None = None
    """(largest - smallest) / median of the headline figure over the repetitions."""

    def as_json(self) -> dict[str, object]:
        """All fields; numbers to six significant digits."""
        return {name: float(f"{value:.6g}") if isinstance(value, float) else value
                for name, value in asdict(self).items()}


Cell = tuple[str, str, int]
"""Target, workload, connections."""


@dataclass(frozen=True, slots=True)
class _Measured:
    """All repetitions of one cell."""

    by_repetition: Mapping[int, Figures]
    added_p50_ms: Mapping[int, float] = field(default_factory=dict)
    added_p99_ms: Mapping[int, float] = field(default_factory=dict)

    def values(self, name: str) -> dict[int, float]:
        """One figure by repetition, where it was measured."""
        if name in ("added_p50_ms", "added_p99_ms"):
            return dict(getattr(self, name))
        found = {repetition: getattr(each, name) for repetition, each in self.by_repetition.items()}
        return {repetition: value for repetition, value in found.items() if value is not None}


def summarize(
    samples: Iterable[Sample], workloads: Sequence[Workload], versions: Mapping[str, str | None],
    absent: Mapping[str, str],
) -> tuple[Row, ...]:
    """One row a measured cell, in the order of workloads, connections and targets; then one for each absent target.

    Args:
        versions: by target, in the order in which targets are to be listed.
        absent: by target, why it was not measured.
    """
    measured = _measured(samples)
    rows = []
    for workload in workloads:
        for connections in dict.fromkeys(run.connections for run in workload.runs):
            for target in versions:
                if (target, workload.name, connections) in measured:
                    rows.append(_row(target, workload, connections, measured, versions[target]))  # noqa: PERF401
    return (*rows, *(Row(target, "", absent=why, repetitions=0) for target, why in absent.items()))


def _measured(samples: Iterable[Sample]) -> dict[Cell, _Measured]:
    cells: dict[Cell, dict[int, Figures]] = {}
    for sample in samples:
        cell = (sample.target, sample.workload, sample.connections)
        cells.setdefault(cell, {})[sample.repetition] = figures(sample)
    found = {}
    for cell, by_repetition in cells.items():
        direct = cells.get((DIRECT, *cell[1:]), {})
        compared = cell[0] != DIRECT and cell[1] in WITH_ADDED_LATENCY
        found[cell] = _Measured(
            by_repetition,
            _difference(by_repetition, direct, "p50_ms") if compared else {},
            _difference(by_repetition, direct, "p99_ms") if compared else {})
    return found


def _difference(ours: Mapping[int, Figures], direct: Mapping[int, Figures], name: str) -> dict[int, float]:
    pairs = {repetition: (getattr(each, name), getattr(direct.get(repetition), name, None))
             for repetition, each in ours.items()}
    return {repetition: high - low for repetition, (high, low) in pairs.items() if high is not None and low is not None}


def _row(
    target: str, workload: Workload, connections: int, measured: Mapping[Cell, _Measured], version: str | None
) -> Row:
    cell = measured[target, workload.name, connections]
    headline = cell.values(workload.headline)
    doubts = {name: _doubt(name, workload, connections, measured) for name in (target, YARDSTICK, DIRECT)}
    limited = _load_limited(target, workload, connections, measured)

    def ratio_to(other: str) -> float | None:
        # The cost of the mock itself is not what a gateway's cost is to be measured by.
        unlike = DIRECT in (target, other) and workload.headline != workload.limit
        if other == target or unlike or doubts[target] or doubts[other]:
            return None
        return _ratio(headline, measured[other, workload.name, connections].values(workload.headline))

    middle = _median(headline)
    row = Row(
        target, workload.name, connections, version=version, repetitions=len(cell.by_repetition),
        trusted=doubts[target] is None, doubt=doubts[target] or limited, load_limited=limited is not None,
        to_nginx=ratio_to(YARDSTICK), to_direct=ratio_to(DIRECT),
        spread=(max(headline.values()) - min(headline.values())) / middle if middle and len(headline) > 1 else None,
    )
    return replace(row, **{name: _median(cell.values(name)) for name in MEASURED})  # type: ignore[arg-type]


def _doubt(target: str, workload: Workload, connections: int, measured: Mapping[Cell, _Measured]) -> str | None:
    """Why the figures of a target are no measure of it; `None` where they are."""
    cell = measured.get((target, workload.name, connections))
    if cell is None:
        return "not measured"
    said = dict.fromkeys(doubt for each in cell.by_repetition.values() for doubt in each.doubts)
    # One bad repetition of three does not reach a median; a majority does.
    if 2 * sum(bool(each.doubts) for each in cell.by_repetition.values()) >= len(cell.by_repetition) and said:
        return next(iter(said))
    # CPU time per piece of work is the target's own, whoever is the slower side.
    return _load_limited(target, workload, connections, measured) if workload.headline == workload.limit else None


def _load_limited(
    target: str, workload: Workload, connections: int, measured: Mapping[Cell, _Measured]
) -> str | None:
    """Why the load side may be what limits this target; `None` where it has room to spare."""
    cell = measured.get((target, workload.name, connections))
    if target == DIRECT or workload.limit is None or cell is None:
        return None
    direct = measured.get((DIRECT, workload.name, connections))
    if direct is None:
        return "direct was not measured, so the mock may have been the limit"
    share = _ratio(cell.values(workload.limit), direct.values(workload.limit))
    if share is not None and share > TRUSTED_SHARE:
        return f"{share:.0%} of direct, above {TRUSTED_SHARE:.0%}: the load side may be the limit"
    return None


def _ratio(ours: Mapping[int, float], theirs: Mapping[int, float]) -> float | None:
    return _median({repetition: value / theirs[repetition] for repetition, value in ours.items()
                    if theirs.get(repetition)})


def _median(values: Mapping[int, float]) -> float | None:
    return median(values.values()) if values else None
