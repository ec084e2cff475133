"""What `headrace bench policies` has to say: a table for people, one JSON object for programs."""

import json as jsonlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from loadtest.live.classes import LiveClass
from loadtest.live.intervals import Interval
from loadtest.live.rows import Row, Verdict

WIDTH = 180
COLUMNS = ("requests", "in budget %", "minus ours", "late %", "shed %", "lost %", "cost/1k", "cost/ours", "TTFT p50",
           "TTFT p99", "ITL p99", "shares")


def as_json(
    rows: Sequence[Row], verdict: Verdict | None, classes: Sequence[LiveClass], setting: Mapping[str, object]
) -> dict[str, object]:
    """For `--json` and `rows.json`."""
    return {
        "rows": [row.as_json() for row in rows],
        "goal": verdict.as_json() if verdict else None,
        "classes": [{"name": each.name, "share": each.share, "ttft_s": each.ttft_s,
                     "inter_token_s": each.inter_token_s} for each in classes],
        "setting": dict(setting),
    }


def show(
    rows: Sequence[Row], verdict: Verdict | None, classes: Sequence[LiveClass], setting: Mapping[str, object], *,
    json: bool, report: Path | None,
) -> None:
    """The answer on standard output."""
    if json:
        print(jsonlib.dumps(as_json(rows, verdict, classes, setting)))
        return
    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, WIDTH)  # figures cut in half would mislead; a wrapped line only looks bad
    console.print(_table(rows))
    console.print(f"shares: {' / '.join(rows[0].figures.shares)}, in percent of the answers", markup=False)
    for each in classes:
        console.print(f"{each.name}: first token {_time(each.ttft_s)}, then {_time(each.inter_token_s)} a token, "
                      f"{each.share:.0%} of requests", markup=False)
    for row in rows:
        for kind, count in row.figures.failures.items():
            console.print(f"{row.policy}: {count} × {kind}", markup=False)
    if verdict:
        console.print(verdict_line(rows[0].policy, verdict), markup=False)
    facts = {name: value for name, value in setting.items() if name != "warnings"}
    console.print("; ".join(f"{name}: {value}" for name, value in facts.items()), markup=False)
    for warning in setting.get("warnings", ()):  # type: ignore[attr-defined]
        console.print(f"warning: {warning}", markup=False, style="yellow")
    if report:
        console.print(f"report: {report}", markup=False)


def _table(rows: Sequence[Row]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("policy", no_wrap=True)
    for column in COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    for number, row in enumerate(rows):
        figures, compared = row.figures, row.compared
        table.add_row(
            row.policy, str(figures.requests), _percent(figures.in_budget) + _between(compared.in_budget_ci, 100, 1),
            "" if not number else f"{100 * compared.in_budget_minus_ours:+.1f}"
            + _between(compared.in_budget_minus_ours_ci, 100, 1),
            _percent(figures.late), _percent(figures.shed), _percent(figures.lost),
            _number(figures.cost_per_1k_in_budget),
            "" if not number else _ratio(compared.cost_over_ours) + _between(compared.cost_over_ours_ci, 1, 2),
            _time(figures.ttft_p50_s), _time(figures.ttft_p99_s), _time(figures.itl_p99_s),
            "/".join(f"{100 * share:.0f}" for share in figures.shares.values()),
            style="bold" if not number else None)
    return table


def verdict_line(ours: str, verdict: Verdict) -> str:
    """The goal in a line."""
    word = {True: "met   ", False: "MISSED", None: "?     "}[verdict.met]
    return (f"goal {word} {ours} beside {verdict.best_other}, the best of the others: in budget "
            f"{100 * verdict.ahead:+.1f} points{_between(verdict.ahead_ci, 100, 1)}, cost × "
            f"{_ratio(verdict.cost_ratio)}{_between(verdict.cost_ratio_ci, 1, 2)}")


def _between(interval: Interval | None, factor: float, digits: int) -> str:
    if interval is None:
        return ""
    return f" [{factor * interval.low:.{digits}f}, {factor * interval.high:.{digits}f}]"


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _time(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{1000 * value:.0f} ms" if value < 1 else f"{value:.2f} s"
