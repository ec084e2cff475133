"""What `headrace sim training` has to say: a table for people, JSON for programs, a page with curves."""

import json as jsonlib
from collections.abc import Sequence
from html import escape
from pathlib import Path
from statistics import mean

from rich.console import Console
from rich.table import Table

from loadtest.sim.charts import page
from loadtest.sim.drawing import Axes, lines
from loadtest.sim.training.gavel import CARDS, CARDS_EACH, COUNTED, JOBS_PER_HOUR, PUBLISHED_JCT_H
from loadtest.sim.training.rows import HOUR_S, Row
from loadtest.sim.training.runs import POLICIES, gavel_replayed_jct_s, soonest_jct_s

PUBLISHED_SEEDS = (0, 1)
WIDTH = 118


def as_json(rows: Sequence[Row]) -> dict[str, object]:
    """For `--json`: the same runs give the same bytes."""
    seeds = rows[0].seeds
    return {
        "rows": [row.as_json() for row in rows],
        "details": [row.by_seed() for row in rows],
        "published_jct_mean_h": {name: list(hours) for name, hours in PUBLISHED_JCT_H.items()},
        "bound_jct_mean_s": [round(soonest_jct_s(seed, JOBS_PER_HOUR), 3) for seed in seeds],
        "replayed_fifo_perf_jct_mean_s": [round(gavel_replayed_jct_s(seed), 3) for seed in seeds],
    }


def show(rows: Sequence[Row], *, json: bool, report: str | None) -> None:
    """The answer on standard output."""
    if json:
        print(jsonlib.dumps(as_json(rows)))
        return
    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, WIDTH)
    console.print(_table(rows))
    for row in rows:
        console.print(f"{row.policy}: {POLICIES[row.policy].shows}", markup=False)
    if report:
        console.print(f"report: {report}", markup=False)


def write_page(rows: Sequence[Row], at: Path) -> None:
    """The page, and its rows as JSON beside it."""
    at.parent.mkdir(parents=True, exist_ok=True)
    at.write_text(html(rows), encoding="utf-8")
    at.with_suffix(".json").write_text(jsonlib.dumps(as_json(rows), indent=1) + "\n", encoding="utf-8")


def html(rows: Sequence[Row]) -> str:
    """The whole page."""
    cells = "".join(f"<tr><td>{escape(line[0])}</td>" + "".join(f"<td>{escape(cell)}</td>" for cell in line[1:])
                    + "</tr>" for line in _lines(rows))
    head = "".join(f"<th>{escape(column)}</th>" for column in ("policy", *_columns(rows)))
    curves = {row.policy: row.curves["jct"] for row in rows}
    furthest = max(max(x for x, _ in curve) for curve in curves.values())
    axes = Axes((0.0, min(furthest, 60.0)), (0.0, 1.0), "hours from submission to completion", "jobs", y_percent=True)
    return page("headrace sim training", [
        f"<p>{escape(_title(rows))}</p><table><tr>{head}</tr>{cells}</table>",
        f"<h3>Completion times, seed {rows[0].seeds[0]} (left is better)</h3>", lines(curves, axes)])


def _title(rows: Sequence[Row]) -> str:
    return (f"Gavel's jobs {COUNTED[0]} to {COUNTED[-1]}, {JOBS_PER_HOUR:g} an hour on "
            f"{' + '.join(f'{CARDS_EACH} {card.upper()}' for card in CARDS)}: mean hours to completion")


def _columns(rows: Sequence[Row]) -> tuple[str, ...]:
    return (*(f"seed {seed}" for seed in rows[0].seeds), "mean", "p95", "wait min", "utilisation %", "$/unit h")


def _table(rows: Sequence[Row]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", title_justify="left", title_style="bold",
                  title=f"\n{_title(rows)}")
    table.add_column("policy", no_wrap=True)
    for column in _columns(rows):
        table.add_column(column, justify="right", no_wrap=True)
    for line in _lines(rows):
        table.add_row(*line)
    return table


def _lines(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Ours, Gavel's own as published, its `fifo_perf` replayed, and what no policy can be below."""
    seeds = rows[0].seeds
    found = [(row.policy, *_hours([run.jct_mean_s for run in row.runs]), f"{(row.mean('jct_p95_s') or 0) / HOUR_S:.1f}",
              f"{(row.mean('queue_wait_mean_s') or 0) / 60:.1f}", f"{100 * (row.mean('utilisation') or 0):.1f}",
              f"{row.mean('unit_cost') or 0:.3f}") for row in rows]
    rest = ("-",) * 4
    if seeds == PUBLISHED_SEEDS:
        found += [(name, *(f"{hours:.1f}" for hours in by_seed), f"{mean(by_seed):.1f}", *rest)
                  for name, by_seed in PUBLISHED_JCT_H.items()]
        found.append(("gavel fifo_perf, replayed", *_hours([gavel_replayed_jct_s(seed) for seed in seeds]), *rest))
    found.append(("each at once on its fastest", *_hours([soonest_jct_s(seed, JOBS_PER_HOUR) for seed in seeds]),
                  *rest))
    return found


def _hours(seconds: Sequence[float]) -> tuple[str, ...]:
    return (*(f"{each / HOUR_S:.2f}" for each in seconds), f"{mean(seconds) / HOUR_S:.2f}")
