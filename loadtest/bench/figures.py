"""From what one run of the load client gave to the numbers that it stands for. Pure.

A figure that a run cannot give is `None`, never 0: a target that answered nothing has no cost per request.
"""

from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from loadtest.bench.workloads import Mode

ERRORS_BORNE = 0.001
"""Share of requests that may fail before a run is not believed."""
LATE_BORNE = 0.01
"""Share of an open loop's requests that may be unanswered at its end before the target counts as overloaded."""


class Quantiles(msgspec.Struct, frozen=True):
    """A histogram of the load client, in microseconds."""

    count: int
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    p999: float | None = None
    max: float | None = None


class LoadReport(msgspec.Struct, frozen=True):
    """The load client's last line."""

    event: Literal["report"]
    mode: Mode
    seconds: float
    requests: int
    chunks: int
    errors: int
    unfinished: int
    dropped: int
    dials: int
    streams_begun: int
    bytes_in: int
    bytes_out: int
    latency_us: Quantiles
    first_token_us: Quantiles
    relay_us: Quantiles
    gap_us: Quantiles
    error_kinds: dict[str, int]


@dataclass(frozen=True, slots=True)
class Sample:
    """One run against one target."""

    target: str
    workload: str
    connections: int
    repetition: int
    report: LoadReport
    cpu_s: float | None
    """CPU time that the target's processes took within the measured time."""
    window_s: float
    """The measured time, by the meter that read `cpu_s`."""
    foreign_s: float = 0.0
    """CPU time that processes of neither side took meanwhile of the core where they took most."""
    rss_bytes: int | None = None
    rss_before_bytes: int | None = None
    """The same before the streams of a `hold` run were opened."""


@dataclass(frozen=True, slots=True)
class Figures:
    """The numbers of one run. Latencies are of whole answers; of streams, the time of a chunk on its way."""

    rps: float | None = None
    us_per_request: float | None = None
    p50_ms: float | None = None
    p99_ms: float | None = None
    chunks_per_s: float | None = None
    us_per_chunk: float | None = None
    chunks_per_core_s: float | None = None
    """Chunks over the CPU time they took."""
    mb_per_s: float | None = None
    kb_per_stream: float | None = None
    rss_mb: float | None = None
    busy: float | None = None
    """CPU time over wall time: 1.0 is one whole core."""
    others: float | None = None
    """Share of a core that processes of neither side took, on the core where they took most: noise."""
    doubts: tuple[str, ...] = ()
    """Why the run should not be believed, if so."""


def figures(sample: Sample) -> Figures:
    """The numbers of one run, and what speaks against them."""
    report = sample.report
    common = Figures(
        rss_mb=None if sample.rss_bytes is None else sample.rss_bytes / 1e6,
        busy=None if sample.cpu_s is None or not sample.window_s else sample.cpu_s / sample.window_s,
        others=sample.foreign_s / sample.window_s if sample.window_s else None,
        doubts=tuple(_doubts(sample)),
    )
    if report.mode == "hold":
        return replace(common, kb_per_stream=_kb_per_stream(sample))
    if report.mode == "stream":
        return replace(
            common, chunks_per_s=report.chunks / report.seconds, us_per_chunk=_each_us(sample.cpu_s, report.chunks),
            chunks_per_core_s=report.chunks / sample.cpu_s if sample.cpu_s else None,
            p50_ms=_ms(report.relay_us.p50), p99_ms=_ms(report.relay_us.p99),
            mb_per_s=report.bytes_in / report.seconds / 1e6)
    return replace(
        common, rps=report.requests / report.seconds, us_per_request=_each_us(sample.cpu_s, report.requests),
        p50_ms=_ms(report.latency_us.p50), p99_ms=_ms(report.latency_us.p99),
        mb_per_s=(report.bytes_in + report.bytes_out) / report.seconds / 1e6)


def _each_us(cpu_s: float | None, count: int) -> float | None:
    # No tick of the kernel's clock fell into it: less than can be measured, not nothing.
    return cpu_s * 1e6 / count if cpu_s and count else None


def _ms(us: float | None) -> float | None:
    return None if us is None else us / 1e3


def _kb_per_stream(sample: Sample) -> float | None:
    """What a stream adds to the resident memory, in 1,024 bytes."""
    if sample.rss_bytes is None or sample.rss_before_bytes is None or sample.report.streams_begun < sample.connections:
        return None
    return (sample.rss_bytes - sample.rss_before_bytes) / 1024 / sample.connections


def _doubts(sample: Sample) -> list[str]:
    report = sample.report
    doubts = []
    asked = report.requests + report.errors
    if report.errors > ERRORS_BORNE * asked:
        kinds = ", ".join(f"{count} × {kind}" for kind, count in report.error_kinds.items())
        doubts.append(f"{report.errors} of {asked} requests failed: {kinds}")
    if report.mode == "open" and report.unfinished + report.dropped > LATE_BORNE * max(1, asked):
        doubts.append(f"overloaded: {report.unfinished + report.dropped} requests were never answered")
    if report.mode == "hold" and report.streams_begun < sample.connections:
        doubts.append(f"only {report.streams_begun} of {sample.connections} streams came to be open")
    if report.mode in ("closed", "open") and not report.requests:
        doubts.append("no request was answered")
    if report.mode == "stream" and not report.chunks:
        doubts.append("no chunk came")
    return doubts
