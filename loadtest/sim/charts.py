"""The HTML report of a simulation: one file, its charts drawn here. Pure but for `write`."""

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from statistics import mean

from loadtest.sim.drawing import Axes, Point, lines, points
from loadtest.sim.measures import CDF_POINTS, TIME_BINS
from loadtest.sim.rows import Row
from loadtest.sim.showing import as_json, bounded, cells, columns

CDF_TO = 2.0
"""First-token times are drawn up to twice their budget."""
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1b2733; max-width: 76rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.2rem; margin-top: 2.6rem } h3 { font-size: 1rem; margin-bottom: .3rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem }
th, td { padding: .2rem .6rem; text-align: right; border-bottom: 1px solid #e3e8ee } th:first-child, td:first-child,
th:last-child, td:last-child { text-align: left } svg text { font: 12px system-ui, sans-serif; fill: #1b2733 }
svg text.mark { font-size: 11px; fill: #c0392b }
"""


def write(rows: Sequence[Row], page: Path) -> None:
    """The page, and its rows as JSON beside it; the folder is made where it is not there."""
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(html(rows), encoding="utf-8")
    page.with_suffix(".json").write_text(json.dumps(as_json(rows), indent=1) + "\n", encoding="utf-8")


def html(rows: Sequence[Row]) -> str:
    """The whole page."""
    return page("headrace sim", [_section([row for row in rows if row.scenario == scenario])
                                 for scenario in dict.fromkeys(row.scenario for row in rows)])


def page(title: str, parts: Sequence[str]) -> str:
    """One page of the house's looks; the parts are HTML."""
    return "".join(["<!doctype html><html lang='en'><meta charset='utf-8'>", f"<title>{escape(title)}</title>",
                    f"<style>{_STYLE}</style><h1>{escape(title)}</h1>", *parts, "</html>\n"])


def _section(rows: Sequence[Row]) -> str:
    first = rows[0]
    seeds = ", ".join(map(str, first.seeds))
    parts = [f"<h2>{escape(first.scenario)}</h2><p>pool {escape(first.pool)}, {first.rate_per_s:g} requests/s, "
             f"{first.seconds:g} s, seeds {seeds}</p>", _table(rows)]
    costs = {row.policy: (cost, kept) for row in rows
             if (cost := row.mean("cost_per_1k_in_budget")) is not None and (kept := row.mean("in_budget")) is not None}
    if costs:
        low = min(kept for _, kept in costs.values())
        axes = Axes(_around([cost for cost, _ in costs.values()]), (max(0.0, low - 0.02), 1.0),
                    "accounted cost per 1,000 requests in budget", "in budget", y_percent=True)
        parts += ["<h3>Cost against requests in budget (up and left is better)</h3>", points(costs, axes)]
    curves = {row.policy: curve for row in rows if (curve := _curve(row))}
    if curves:
        axes = Axes((0.0, CDF_TO), (0.0, 1.0), "time to first token over its budget", "share of served requests",
                    y_percent=True)
        parts += ["<h3>First tokens (right of 1 is late)</h3>", lines(curves, axes, {"budget": 1.0})]
    axes = Axes((0.0, first.seconds), (0.0, 1.0), "time of arrival, s", "in budget", y_percent=True)
    parts += ["<h3>In budget over time, mean over seeds</h3>",
              lines({row.policy: _timeline(row) for row in rows}, axes, first.events)]
    for row in rows[:1]:
        if shares := _share_lines(row):
            axes = Axes((0.0, row.seconds), (0.0, 1.0), "time of arrival, s", "share of requests", y_percent=True)
            parts += [f"<h3>Where {escape(row.policy)} sends, mean over seeds</h3>", lines(shares, axes, row.events)]
    return "".join(parts)


def _table(rows: Sequence[Row]) -> str:
    head = "".join(f"<th>{escape(title)}</th>" for title in ("policy", *columns(rows), "shares"))
    shown = [(row.policy, *cells(row, bounded=bounded(rows))) for row in rows]
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in each) + "</tr>" for each in shown)
    return f"<table><tr>{head}</tr>{body}</table>"


def _curve(row: Row) -> list[Point]:
    known = [run.ttft_cdf for run in row.runs if run.ttft_cdf]
    if not known:
        return []
    return [(mean(values), at / (CDF_POINTS - 1)) for at, values in enumerate(zip(*known, strict=True))]


def _timeline(row: Row) -> list[Point]:
    series = []
    for place in range(TIME_BINS):
        known = [value for run in row.runs if (value := run.timeline[place]) is not None]
        if known:
            series.append(((place + 0.5) / TIME_BINS * row.seconds, mean(known)))
    return series


def _share_lines(row: Row) -> dict[str, list[Point]]:
    names = row.runs[0].share_timelines
    return {name: [((place + 0.5) / TIME_BINS * row.seconds,
                    mean([run.share_timelines[name][place] for run in row.runs])) for place in range(TIME_BINS)]
            for name in names}


def _around(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    room = 0.15 * (high - low) or 0.1 * high or 1.0
    return max(0.0, low - room), high + room
