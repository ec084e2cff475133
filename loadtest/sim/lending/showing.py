"""What `headrace sim lending` has to say: a table for people, JSON for programs, a page with curves."""

import json as jsonlib
from collections.abc import Sequence
from html import escape
from pathlib import Path

from rich.console import Console
from rich.table import Table

from loadtest.sim.charts import page
from loadtest.sim.drawing import Axes, Point, lines
from loadtest.sim.lending.policies import POLICIES
from loadtest.sim.training.rows import HOUR_S, Row

WIDTH = 172
BASE = "no_lending"
COLUMNS = ("wait h", "p95", "gangs 16+", "JCT h", "p95", "utilisation %", "$/unit h", "recalls", "recall p99 s",
           "overdue", "lost device h", "lost/best", "missed %", "wait x", "JCT x")


def as_json(rows: Sequence[Row]) -> dict[str, object]:
    """For `--json`: the same runs give the same bytes."""
    return {"rows": [row.as_json() for row in rows], "details": [row.by_seed() for row in rows]}


def show(rows: Sequence[Row], *, json: bool, report: str | None) -> None:
    """The answer on standard output."""
    if json:
        print(jsonlib.dumps(as_json(rows)))
        return
    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, WIDTH)
    for scenario in dict.fromkeys(row.scenario for row in rows):
        console.print(_table([row for row in rows if row.scenario == scenario]))
    for policy in dict.fromkeys(row.policy for row in rows):
        console.print(f"{policy}: {POLICIES[policy].shows}", markup=False)
    if report:
        console.print(f"report: {report}", markup=False)


def write_page(rows: Sequence[Row], at: Path) -> None:
    """The page, and its rows as JSON beside it."""
    at.parent.mkdir(parents=True, exist_ok=True)
    at.write_text(html(rows), encoding="utf-8")
    at.with_suffix(".json").write_text(jsonlib.dumps(as_json(rows), indent=1) + "\n", encoding="utf-8")


def html(rows: Sequence[Row]) -> str:
    """The whole page."""
    return page("headrace sim lending", [_section([row for row in rows if row.scenario == scenario])
                                         for scenario in dict.fromkeys(row.scenario for row in rows)])


def _section(rows: Sequence[Row]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in ("policy", *COLUMNS))
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in line) + "</tr>" for line in _lines(rows))
    serving = {row.policy: row.curves["serving"] for row in rows} | {"needed": rows[0].curves["needed"]}
    hours = max(at for at, _ in rows[0].curves["needed"])
    most = max(count for curve in serving.values() for _, count in curve)
    return "".join([
        f"<h2>{escape(rows[0].scenario)}</h2><table><tr>{head}</tr>{body}</table>",
        f"<h3>Replicas that serve, and that demand needs (seed {rows[0].seeds[0]})</h3>",
        lines(serving, Axes((0.0, hours), (0.0, most), "hours", "replicas")),
        "<h3>Time in the queue (left is better)</h3>", _distribution(rows, "wait", "hours that a job waits in all"),
        "<h3>Completion (left is better)</h3>", _distribution(rows, "jct", "hours from submission to completion")])


def _distribution(rows: Sequence[Row], curve: str, title: str) -> str:
    curves: dict[str, Sequence[Point]] = {row.policy: row.curves[curve] for row in rows}
    furthest = max(points[-2][0] for points in curves.values())
    return lines(curves, Axes((0.0, max(furthest, 0.1)), (0.0, 1.0), title, "jobs", y_percent=True))


def _table(rows: Sequence[Row]) -> Table:
    seeds = f"{len(rows[0].seeds)} seeds" if len(rows[0].seeds) > 1 else f"seed {rows[0].seeds[0]}"
    table = Table(box=None, pad_edge=False, header_style="bold", title_justify="left", title_style="bold",
                  title=f"\n{rows[0].scenario}, {seeds}; times over {BASE}'s are so many times shorter")
    table.add_column("policy", no_wrap=True)
    for column in COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    for line in _lines(rows):
        table.add_row(*line)
    return table


def _lines(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    base = next((row for row in rows if row.policy == BASE), None)
    return [(
        row.policy, _hours(row, "queue_wait_mean_s"), _hours(row, "queue_wait_p95_s"),
        _hours(row, "gang16_wait_mean_s"), _hours(row, "jct_mean_s"), _hours(row, "jct_p95_s"),
        _number(row.mean("utilisation"), 1, 100.0), _number(row.mean("unit_cost"), 2),
        _number(row.mean("recalls"), 0), _number(row.mean("recall_p99_s"), 0), _number(row.mean("overdue"), 0),
        _number(row.mean("lost_device_h"), 1), _number(row.mean("lost_over_optimum"), 2),
        _number(row.mean("p99_breach"), 3, 100.0), _shorter(base, row, "queue_wait_mean_s"),
        _shorter(base, row, "jct_mean_s"),
    ) for row in rows]


def _shorter(base: Row | None, row: Row, figure: str) -> str:
    before, now = base and base.mean(figure), row.mean(figure)
    return f"{before / now:.2f}" if before and now and row is not base else "-"


def _hours(row: Row, figure: str) -> str:
    return _number(row.mean(figure), 2, 1 / HOUR_S)


def _number(value: float | None, digits: int, factor: float = 1.0) -> str:
    return "-" if value is None else f"{factor * value:.{digits}f}"
