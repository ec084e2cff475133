"""What a simulation has to say on the terminal: a table for people, one JSON object for programs."""

import json as jsonlib
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from loadtest.sim.measures import Tally
from loadtest.sim.rows import Row, by_backend, by_class
from loadtest.sim.scenarios import Scenario

WIDTH = 150
MOST_BACKENDS = 8
"""More in one line nobody can read."""
COLUMNS = ("in budget %", "worst class", "late %", "shed %", "lost %", "cost/1k", "TTFT p50", "TTFT p99", "ITL p99",
           "cover %", "µs")
BOUND_COLUMNS = ("cost/bound", "good/bound")


def as_json(rows: Sequence[Row], *, timing: bool = False) -> dict[str, object]:
    """For `--json`. The same runs give the same bytes, unless decision times are asked for."""
    return {"rows": [row.as_json(timing=timing) for row in rows], "details": [row.details() for row in rows]}


def show(rows: Sequence[Row], *, json: bool, timing: bool, report: str | None) -> None:
    """The answer on standard output."""
    if json:
        print(jsonlib.dumps(as_json(rows, timing=timing)))
        return
    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, WIDTH)  # figures cut in half would mislead; a wrapped line only looks bad
    for scenario in dict.fromkeys(row.scenario for row in rows):
        shown = [row for row in rows if row.scenario == scenario]
        console.print(_table(shown))
        if predicting := [row for row in shown if row.coverage()]:
            console.print(_coverage_table(predicting))
    for row in rows:
        for line in _remarks(row):
            console.print(line, markup=False)
    if report:
        console.print(f"report: {report}", markup=False)


def show_scenarios(scenarios: Sequence[Scenario], *, json: bool) -> None:
    """Names, usual rates on four cards, and what each shows."""
    if json:
        print(jsonlib.dumps({"scenarios": [{"name": one.name, "rate_per_s": one.rate_per_s, "shows": one.shows}
                                           for one in scenarios]}))
        return
    for one in scenarios:
        print(f"{one.name:<20} {one.rate_per_s:>5g}/s  {one.shows}")


def _table(rows: Sequence[Row]) -> Table:
    first = rows[0]
    seeds = f"{len(first.seeds)} seeds" if len(first.seeds) > 1 else f"seed {first.seeds[0]}"
    table = Table(box=None, pad_edge=False, header_style="bold", title_justify="left", title_style="bold", title=(
        f"\n{first.scenario}, pool {first.pool}, {first.rate_per_s:g} requests/s, {first.seconds:g} s, {seeds}"))
    table.add_column("policy", no_wrap=True)
    for column in columns(rows):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("shares", no_wrap=True)
    best = max(row.mean("in_budget") or 0.0 for row in rows)
    for row in rows:
        style = "bold" if row.mean("in_budget") == best and len(rows) > 1 else None
        table.add_row(row.policy, *cells(row, bounded=bounded(rows)), style=style)
    return table


def _coverage_table(rows: Sequence[Row]) -> Table:
    """By backend, in the order of the pool, and by class; with how many, for a share of few says little."""
    backends = list(rows[0].means("shares"))
    backends = backends if len(backends) <= MOST_BACKENDS else []
    classes = list(dict.fromkeys(name for row in rows for name in by_class(row.coverage())))
    table = Table(box=None, pad_edge=False, header_style="bold", title_justify="left",
                  title="first tokens within their predicted P99, % (of how many)")
    table.add_column("policy", no_wrap=True)
    for name in (*backends, *classes):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        of_backend, of_class = by_backend(row.coverage()), by_class(row.coverage())
        table.add_row(row.policy, *(covered(of_backend.get(name)) for name in backends),
                      *(covered(of_class.get(name)) for name in classes))
    return table


def covered(tally: Tally | None) -> str:
    """`98.92 (1204)`."""
    return "-" if tally is None or tally.share is None else f"{100 * tally.share:.2f} ({tally.of})"


def bounded(rows: Sequence[Row]) -> bool:
    """Whether any of the rows was held against the bound."""
    return any(row.cost_over_bound is not None or row.goodput_over_bound is not None for row in rows)


def columns(rows: Sequence[Row]) -> tuple[str, ...]:
    """The titles between policy and shares."""
    return (*COLUMNS, *BOUND_COLUMNS) if bounded(rows) else COLUMNS


def cells(row: Row, *, bounded: bool) -> list[str]:
    """The row as text, in the order of `columns`, with the shares of the backends after it."""
    ratios = [_number(row.cost_over_bound, 2), _number(row.goodput_over_bound, 3)] if bounded else []
    return [
        _spread(row, "in_budget", 100.0, 1), _percent(row.mean("worst_class")), _percent(row.mean("late")),
        _percent(row.mean("shed")), _percent(row.mean("lost"), 2), _spread(row, "cost_per_1k_in_budget", 1.0, 3),
        _time(row.mean("ttft_p50_s")), _time(row.mean("ttft_p99_s")), _time(row.mean("itl_p99_s")),
        _percent(row.mean("coverage_p99"), 2), _number(row.mean("decision_us"), 0),
        *ratios, _shares(row),
    ]


def _remarks(row: Row) -> list[str]:
    remarks = []
    if (found := row.mean("detection_s")) is not None:
        remarks.append(f"{row.scenario}, {row.policy}: slowdown noticed after {found:.1f} s")
    if (hits := row.mean("hit_rate")) is not None:
        remarks.append(f"{row.scenario}, {row.policy}: {hits:.1%} of prompt tokens found in a prefix cache")
    return remarks


def _shares(row: Row) -> str:
    """Percent of the served requests on each backend, in the order of the pool."""
    shares = list(row.means("shares").values())
    if len(shares) > MOST_BACKENDS:
        return f"{len(shares)} backends"
    return "/".join(f"{100 * share:.0f}" for share in shares)


def _spread(row: Row, figure: str, factor: float, digits: int) -> str:
    value, apart = row.mean(figure), row.sd(figure)
    if value is None:
        return "-"
    text = f"{factor * value:.{digits}f}"
    return text if apart is None else f"{text}±{factor * apart:.{digits}f}"


def _percent(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{100 * value:.{digits}f}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _time(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{1000 * value:.0f} ms" if value < 1 else f"{value:.2f} s"
