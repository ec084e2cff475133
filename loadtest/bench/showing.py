"""What a bench run has to say on the terminal: a table for people, one JSON object for programs."""

import json as jsonlib
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from loadtest.bench.goals import Verdict
from loadtest.bench.processes import Cores
from loadtest.bench.rows import Row
from loadtest.bench.workloads import Workload

COLUMNS: Mapping[str, str] = {
    "rps": "req/s", "us_per_request": "µs/req", "added_p50_ms": "+p50 ms", "added_p99_ms": "+p99 ms",
    "chunks_per_s": "chunks/s", "us_per_chunk": "µs/chunk", "chunks_per_core_s": "chunks/core·s",
    "mb_per_s": "MB/s", "kb_per_stream": "KB/stream",
    "rss_mb": "RSS MB", "busy": "core", "others": "others", "to_nginx": "× nginx", "to_direct": "× direct",
    "spread": "spread",
}
SHOWN: Mapping[str, tuple[str, ...]] = {
    "W1": ("rps", "us_per_request", "busy", "others", "to_nginx", "to_direct", "spread"),
    "W1o": ("added_p50_ms", "added_p99_ms", "us_per_request", "busy", "others", "to_nginx", "spread"),
    "W2": ("us_per_chunk", "added_p50_ms", "added_p99_ms", "chunks_per_s", "busy", "others", "to_nginx", "spread"),
    "W2s": ("chunks_per_core_s", "chunks_per_s", "us_per_chunk", "busy", "others", "to_nginx", "spread"),
    "W3": ("rps", "mb_per_s", "us_per_request", "busy", "others", "to_nginx", "to_direct", "spread"),
    "W4": ("kb_per_stream", "rss_mb", "to_nginx", "spread"),
}
"""The columns that each workload is about."""


TABLE_WIDTH = 104
QUIET = 0.05
"""Share of a core that others may take before a reader is warned."""


def setting(cores: Cores, rows: Sequence[Row], taken_s: float, left_out: int) -> dict[str, str]:
    """Under what circumstances the numbers came about."""
    found = {
        "machine": f"{_processor()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}",
        "cores": f"targets on core {cores.gateway}, mock and load client on core {cores.load}",
        "load average at the end": f"{os.getloadavg()[0]:.1f}",
        "taken": f"{taken_s / 60:.1f} min",
    }
    if cores.shared:
        found["warning"] = "one core for everything: no figure is a measure of the target alone"
    if (noise := max((row.others or 0.0 for row in rows), default=0.0)) > QUIET:
        found["noise"] = (f"other processes took up to {noise:.0%} of a core (column others); "
                          "only figures from a quiet machine are to be quoted")
    if left_out:
        found["left out"] = f"{left_out} visits, for lack of time"
    return found


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines():
        if line.startswith(("model name", "Model")):
            return line.partition(":")[2].strip()
    return platform.machine()


def as_json(rows: Sequence[Row], verdicts: Sequence[Verdict], setting: Mapping[str, str]) -> dict[str, object]:
    """For `--json` and `rows.json`."""
    return {
        "setting": dict(setting),
        "rows": [row.as_json() for row in rows],
        "goals": [{"goal": verdict.goal, "measured": verdict.measured, "limit": verdict.limit, "met": verdict.met,
                   "why": verdict.why} for verdict in verdicts],
    }


def show(
    rows: Sequence[Row], verdicts: Sequence[Verdict], workloads: Sequence[Workload], setting: Mapping[str, str], *,
    json: bool, report: Path | None,
) -> None:
    """The answer on standard output."""
    if json:
        print(jsonlib.dumps(as_json(rows, verdicts, setting)))
        return
    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, TABLE_WIDTH)  # figures cut in half would mislead; a wrapped line only looks bad
    for workload in workloads:
        of_workload = [row for row in rows if row.workload == workload.name]
        if of_workload:
            console.print(_table(workload, of_workload))
            for row in of_workload:
                if row.doubt:
                    console.print(f"? {row.target}, {row.connections}: {row.doubt}", markup=False, style="yellow")
    for row in rows:
        if row.absent:
            console.print(f"{row.target}: {row.absent}", markup=False)
    for verdict in verdicts:
        console.print(verdict_line(verdict), markup=False)
    console.print("; ".join(f"{name}: {value}" for name, value in setting.items()), markup=False)
    if report:
        console.print(f"report: {report}/index.html", markup=False)


def _table(workload: Workload, rows: Sequence[Row]) -> Table:
    columns = SHOWN[workload.name]
    table = Table(box=None, pad_edge=False, header_style="bold", title=f"\n{workload.name}: {workload.title}",
                  title_justify="left", title_style="bold")
    table.add_column("target")
    table.add_column("conns", justify="right")
    for name in columns:
        table.add_column(COLUMNS[name], justify="right", no_wrap=True)
    for row in rows:
        cells = [cell(row, name, workload) for name in columns]
        table.add_row(row.target, str(row.connections), *cells, style=None if row.trusted else "yellow")
    return table


def cell(row: Row, name: str, workload: Workload) -> str:
    """One figure as text; marked where it says more of the load side, or of errors, than of the target."""
    value: float | None = getattr(row, name)
    if value is None:
        return "-"
    if name in ("busy", "others", "spread"):
        return f"{value:.0%}"
    doubtful = (name == workload.headline and not row.trusted) or (name == workload.limit and row.load_limited)
    return f"{number(value)}{'?' if doubtful else ''}"


def number(value: float) -> str:
    """Three significant digits; thousands in full."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def verdict_line(verdict: Verdict) -> str:
    """One goal in a line."""
    if verdict.met is None or verdict.measured is None or verdict.limit is None:
        return f"goal ?     {verdict.goal} ({verdict.why})"
    word = "met   " if verdict.met else "MISSED"
    return f"goal {word} {verdict.goal}: {number(verdict.measured)}, limit {number(verdict.limit)}"
