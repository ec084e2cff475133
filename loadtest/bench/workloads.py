"""What is asked of each target. Pure: a workload is the load client's arguments for each of its runs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

Mode = Literal["closed", "open", "stream", "hold"]
KB = 1024
NEVER_MS = 3_600_000
"""An interval between chunks that no run sees the end of: the stream idles."""


class UnknownWorkload(LookupError):
    """No such workload; the message lists what there is."""


@dataclass(frozen=True, slots=True)
class LoadRun:
    """One run of the load client (`native/load.c`)."""

    mode: Mode
    connections: int
    seconds: float
    warm_s: float
    body_bytes: int = KB
    chunks: int = 100
    interval_ms: int = 20
    rate_per_s: float = 300.0
    ramp_s: float = 0.2

    def arguments(self, port: int, key: str) -> tuple[str, ...]:
        """Its command line, without the program."""
        options = {
            "mode": self.mode, "port": port, "connections": self.connections, "body-bytes": self.body_bytes,
            "seconds": f"{self.seconds:g}", "warm": f"{self.warm_s:g}", "rate": f"{self.rate_per_s:g}",
            "chunks": self.chunks, "interval-ms": self.interval_ms, "ramp": f"{self.ramp_s:g}", "key": key,
        }
        return tuple(text for name, value in options.items() for text in (f"--{name}", str(value)))

    @property
    def longest_s(self) -> float:
        """When it is over at the latest; the open loop waits two seconds for answers."""
        return self.warm_s + self.seconds + (2.0 if self.mode == "open" else 0.0)


@dataclass(frozen=True, slots=True)
class Workload:
    """A named question; its runs go to one freshly started target, one after the other."""

    name: str
    title: str
    headline: str
    """The figure that the workload is about (`rows.Row`)."""
    more_is_better: bool
    limit: str | None
    """The figure that shows the target at its limit, for which the load side's own could be mistaken; if it has one."""
    runs: tuple[LoadRun, ...]


@dataclass(frozen=True, slots=True)
class Pace:
    """How much time and which numbers of connections a run takes."""

    seconds: float
    warm_s: float
    connections: tuple[int, ...]
    repeat: int
    time_limit_s: float


FULL = Pace(seconds=2.0, warm_s=0.5, connections=(1, 16, 64, 256), repeat=3, time_limit_s=1500.0)
QUICK = Pace(seconds=1.0, warm_s=0.4, connections=(16, 64), repeat=3, time_limit_s=240.0)


def workloads(pace: Pace) -> tuple[Workload, ...]:
    """All of them, in the order in which they run."""
    usual = LoadRun("closed", 16, pace.seconds, pace.warm_s)
    # Streams need a while until all of them run; their first chunks cost a request each, which is not what is asked.
    streams = replace(usual, mode="stream", connections=200, warm_s=pace.warm_s + 0.4)
    return (
        Workload("W1", "closed loop, 1 KB bodies", "rps", True, "rps",
                 tuple(replace(usual, connections=number) for number in pace.connections)),
        Workload("W1o", "open loop, Poisson, 300 requests/s, 1 KB bodies", "added_p50_ms", False, None,
                 (replace(usual, mode="open", connections=1, seconds=2 * pace.seconds),)),
        Workload("W2", "200 streams × 50 chunks/s", "us_per_chunk", False, None,
                 (replace(streams, seconds=2 * pace.seconds, chunks=200),)),
        # More chunks than a core relays; a target that cannot keep up holds the mock back by back pressure. What counts
        # is chunks a second of the target's CPU time: the mock and the client together may be slower than the target.
        Workload("W2s", "200 streams × 1,000 chunks/s, saturating", "chunks_per_core_s", True, "chunks_per_s",
                 (replace(streams, chunks=2000, interval_ms=1),)),
        Workload("W3", "closed loop, 200 KB bodies", "rps", True, "rps", (replace(usual, body_bytes=200 * KB),)),
        Workload("W4", "1,000 idle streams", "kb_per_stream", False, None,
                 (LoadRun("hold", 1000, seconds=12.0, warm_s=0.0, chunks=1000, interval_ms=NEVER_MS, ramp_s=1.0),)),
    )


def chosen(names: Sequence[str], pace: Pace) -> tuple[Workload, ...]:
    """Those of these names, all where none is named. Raises `UnknownWorkload`."""
    known = {workload.name.lower(): workload for workload in workloads(pace)}
    if unknown := [name for name in names if name.lower() not in known]:
        listed = ", ".join(workload.name for workload in known.values())
        raise UnknownWorkload(f"no workload {unknown[0]!r}; there are {listed}")
    wanted = {name.lower() for name in names} or set(known)
    return tuple(workload for name, workload in known.items() if name in wanted)
