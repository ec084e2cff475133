"""What the gateway means to reach beside its peers, and whether a run showed it. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from loadtest.bench.rows import Row

OURS = "headrace"
RUST_ROUTERS = ("vllm-router", "sglang-router")


@dataclass(frozen=True, slots=True)
class Verdict:
    """One goal after a run. `met` is `None` where the run cannot tell; `why` then says what is missing."""

    goal: str
    measured: float | None
    limit: float | None
    met: bool | None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure of ours against `factor` times the strictest of the same figure of some peers, or against a number."""

    text: str
    workload: str
    figure: str
    at_least: bool
    factor: float
    peers: tuple[str, ...] = ()
    connections: int | None = None

    def judge(self, rows: Sequence[Row]) -> Verdict:
        """Whether these rows show it."""
        ours, why = self._value(OURS, rows)
        theirs = {peer: self._value(peer, rows) for peer in self.peers}
        unknown = [why for value, why in theirs.values() if value is None]
        if ours is None or unknown:
            return Verdict(self.text, ours, None, None, why or unknown[0])
        strictest: Callable[[list[float]], float] = max if self.at_least else min
        limit = self.factor * (strictest([value for value, _ in theirs.values() if value is not None])
                               if theirs else 1.0)
        return Verdict(self.text, ours, limit, ours >= limit if self.at_least else ours <= limit)

    def _value(self, target: str, rows: Sequence[Row]) -> tuple[float | None, str]:
        for row in rows:
            if row.target != target:
                continue
            if row.absent:
                return None, f"{target} is absent"
            if row.workload == self.workload and self.connections in (None, row.connections):
                if not row.trusted:
                    return None, f"{target}: {row.doubt}"
                value: float | None = getattr(row, self.figure)
                return value, "" if value is not None else f"{target}: no such figure"
        return None, f"{target} was not measured"


GOALS = (
    Goal("W1 at 64 connections: 2 × the faster Rust router's requests/s", "W1", "rps", True, 2.0, RUST_ROUTERS, 64),
    Goal("W1 at 64 connections: 50 × LiteLLM's requests/s", "W1", "rps", True, 50.0, ("litellm",), 64),
    Goal("W1 at 64 connections: 0.40 × nginx's requests/s", "W1", "rps", True, 0.40, ("nginx",), 64),
    Goal("W2s: 0.75 × nginx's chunks/s a core", "W2s", "chunks_per_core_s", True, 0.75, ("nginx",)),
    Goal("W2s: more chunks/s a core than both Rust routers", "W2s", "chunks_per_core_s", True, 1.0, RUST_ROUTERS),
    Goal("W1o: added p50 within 1.5 × nginx's", "W1o", "added_p50_ms", False, 1.5, ("nginx",)),
    Goal("W1o: added p99 below both Rust routers'", "W1o", "added_p99_ms", False, 1.0, RUST_ROUTERS),
    Goal("W4: 10 KB a stream", "W4", "kb_per_stream", False, 10.0),
    Goal("W4: 80 MB resident with 1,000 streams", "W4", "rss_mb", False, 80.0),
)


def judge(rows: Sequence[Row], goals: Sequence[Goal] = GOALS) -> tuple[Verdict, ...]:
    """One verdict a goal."""
    return tuple(goal.judge(rows) for goal in goals)
