"""The HTML report: one file without scripts or links, its charts drawn as SVG here. Pure but for `write`."""

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from loadtest.bench.goals import OURS, Verdict
from loadtest.bench.rows import DIRECT, Row
from loadtest.bench.showing import COLUMNS, SHOWN, as_json, cell, number, verdict_line
from loadtest.bench.workloads import Workload

WIDTH, BAR, GAP, LABELS, FIGURES = 720, 18, 8, 150, 110
COLOURS = {OURS: "#0b6e75", f"{OURS}-compiled": "#3c9aa1", DIRECT: "#c9ced6"}
OTHER = "#8a97a8"
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1b2733; max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2.2rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid #e3e8ee }
th:first-child, td:first-child, td:last-child { text-align: left }
.doubt { color: #9a6700 } svg text { font: 12px system-ui, sans-serif; fill: #1b2733 }
"""


def write(
    rows: Sequence[Row], verdicts: Sequence[Verdict], workloads: Sequence[Workload], setting: Mapping[str, str],
    folder: Path,
) -> None:
    """`index.html` and `rows.json` in `folder`, which is made where it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "index.html").write_text(page(rows, verdicts, workloads, setting), encoding="utf-8")
    (folder / "rows.json").write_text(json.dumps(as_json(rows, verdicts, setting), indent=1) + "\n", encoding="utf-8")


def page(
    rows: Sequence[Row], verdicts: Sequence[Verdict], workloads: Sequence[Workload], setting: Mapping[str, str]
) -> str:
    """The whole page."""
    parts = ["<!doctype html><html lang='en'><meta charset='utf-8'><title>headrace bench gateway</title>",
             f"<style>{_STYLE}</style><h1>headrace bench gateway</h1><p>",
             "<br>".join(f"{escape(name)}: {escape(value)}" for name, value in setting.items()), "</p>"]
    if verdicts:
        parts += ["<h2>Goals</h2><pre>", escape("\n".join(map(verdict_line, verdicts))), "</pre>"]
    for workload in workloads:
        of_workload = [row for row in rows if row.workload == workload.name]
        if of_workload:
            parts.append(_section(workload, of_workload))
    if absent := [row for row in rows if row.absent]:
        parts += ["<h2>Absent</h2><ul>",
                  *(f"<li>{escape(row.target)}: {escape(row.absent or '')}</li>" for row in absent), "</ul>"]
    return "".join(parts) + "</html>\n"


def _section(workload: Workload, rows: Sequence[Row]) -> str:
    better = "more is better" if workload.more_is_better else "less is better"
    parts = [f"<h2>{escape(workload.name)}: {escape(workload.title)}</h2>"]
    for connections in dict.fromkeys(row.connections for row in rows):
        charted = [row for row in rows if row.connections == connections]
        many = f", {connections} connections" if len(workload.runs) > 1 else ""
        parts.append(bars(charted, workload.headline, f"{COLUMNS[workload.headline]}{many} ({better})"))
    return "".join(parts) + _table(workload, rows)


def bars(rows: Sequence[Row], figure: str, caption: str) -> str:
    """A horizontal bar a row, in the order given; rows without the figure are left out, doubtful ones hatched pale."""
    values = [(row, float(value)) for row in rows if (value := getattr(row, figure)) is not None]
    largest = max((value for _, value in values), default=0.0)
    if largest <= 0:
        return ""
    height = 24 + len(values) * (BAR + GAP)
    drawn = [f"<svg role='img' width='{WIDTH}' height='{height}' viewBox='0 0 {WIDTH} {height}'>",
             f"<title>{escape(caption)}</title><text x='0' y='14'>{escape(caption)}</text>"]
    for place, (row, value) in enumerate(values):
        top = 24 + place * (BAR + GAP)
        length = max(1.0, max(0.0, value) / largest * (WIDTH - LABELS - FIGURES))
        opacity = 1 if row.trusted else 0.45
        drawn.append(
            f"<text x='0' y='{top + 13}'>{escape(row.target)}</text>"
            f"<rect x='{LABELS}' y='{top}' width='{length:.1f}' height='{BAR}' rx='2' opacity='{opacity}' "
            f"fill='{COLOURS.get(row.target, OTHER)}'/>"
            f"<text x='{LABELS + length + 6:.1f}' y='{top + 13}'>{number(value)}{'' if row.trusted else '?'}</text>")
    return "".join(drawn) + "</svg>"


def _table(workload: Workload, rows: Sequence[Row]) -> str:
    columns = SHOWN[workload.name]
    head = "".join(f"<th>{escape(title)}</th>" for title in ("target", "version", "connections",
                                                             *(COLUMNS[name] for name in columns), ""))
    lines = [f"<table><tr>{head}</tr>"]
    for row in rows:
        values = (row.target, row.version or "", str(row.connections),
                  *(cell(row, name, workload) for name in columns))
        lines.append("<tr>" + "".join(f"<td>{escape(value)}</td>" for value in values)
                     + f"<td class='doubt'>{escape(row.doubt or '')}</td></tr>")
    return "".join(lines) + "</table>"
