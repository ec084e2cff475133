"""The scorecard on the terminal, as JSON, and as a page."""

import json as jsonlib
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path

from rich.console import Console
from rich.table import Table

from loadtest.sim.charts import page
from loadtest.sim.measures import Tally
from loadtest.sim.rows import by_backend, by_class
from loadtest.sim.scorecard.claims import Finding
from loadtest.sim.scorecard.table import Section
from loadtest.sim.scorecard.verdicts import Scorecard, Verdict
from loadtest.sim.showing import covered

WIDTH = 210
HOLDS, FAILS = "holds", "does not hold"
Cells = Mapping[str, Mapping[str, Tally]]


def show(card: Scorecard, *, json: bool, report: Path | None) -> None:
    """The answer on standard output."""
    if json:
        print(jsonlib.dumps(card.as_json()))
        return
    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, WIDTH)
    for section, verdicts in card.sections:
        console.print(_table(card, section, verdicts))
        for title, cells in _matrices(card, verdicts):
            console.print(_matrix(title, list(_matrix_rows(cells))))
    for grid in card.grids:
        console.print(_matrix(grid.title, grid.lines()))
    console.print(f"\n{summary(card)}", markup=False)
    if report:
        console.print(f"report: {report}", markup=False)


def summary(card: Scorecard) -> str:
    """One line."""
    seeds = ", ".join(f"{sample.name} seeds {' '.join(map(str, sample.seeds))}" for sample in card.samples)
    return (f"{card.subject}: {card.holding} of {card.claims} claims hold "
            f"({seeds}; {card.seconds:g} s; code {card.code})")


def write(card: Scorecard, at: Path) -> None:
    """The page, and its JSON beside it; the folder is made where it is not there."""
    at.parent.mkdir(parents=True, exist_ok=True)
    at.write_text(html(card), encoding="utf-8")
    at.with_suffix(".json").write_text(jsonlib.dumps(card.as_json(), indent=1) + "\n", encoding="utf-8")


def html(card: Scorecard) -> str:
    """The whole page."""
    parts = [f"<p>{escape(summary(card))}</p>"]
    for section, verdicts in card.sections:
        rows = [_columns(card), *(_line(verdict) for verdict in verdicts)]
        parts.append(f"<h2>{escape(section.title)}</h2>{_html_table(rows)}")
        for title, cells in _matrices(card, verdicts):
            parts.append(f"<h3>{escape(title)}</h3>{_html_table(list(_matrix_rows(cells)))}")
    parts += [f"<h3>{escape(grid.title)}</h3>{_html_table(grid.lines())}" for grid in card.grids]
    return page("headrace sim scorecard", parts)


def _columns(card: Scorecard) -> tuple[str, ...]:
    return ("claim", "goal", "from", *(column for sample in card.samples for column in (sample.name, "")), "beside")


def _line(verdict: Verdict, samples: int = 2) -> tuple[str, ...]:
    claim, findings = verdict.claim, verdict.findings
    cells = [cell for finding in findings for cell in (finding.measured, HOLDS if finding.holds else FAILS)]
    cells += ["-", ""] * (samples - len(findings))
    return (claim.says, claim.goal, claim.source, *cells, _beside(findings))


def _beside(findings: tuple[Finding, ...]) -> str:
    return " | ".join(finding.beside for finding in findings if finding.beside)


def _table(card: Scorecard, section: Section, verdicts: tuple[Verdict, ...]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", title_justify="left", title_style="bold",
                  title=f"\n{section.title} ({section.name})")
    *first, last = _columns(card)
    for column in first:
        table.add_column(column, no_wrap=True)
    table.add_column(last, overflow="fold")
    for verdict in verdicts:
        table.add_row(*_line(verdict), style=None if verdict.holds else "red")
    return table


def _matrices(card: Scorecard, verdicts: tuple[Verdict, ...]) -> Iterator[tuple[str, Cells]]:
    for verdict in verdicts:
        for sample, finding in zip(card.samples, verdict.findings, strict=False):
            if finding.cells:
                of = verdict.claim.says.partition(":")[0]
                yield f"{of}, {sample.name} seeds: within the predicted P99, % (of how many)", finding.cells


def _matrix_rows(cells: Cells) -> Iterator[tuple[str, ...]]:
    """Backends down, classes across, sums at the ends."""
    classes = by_class(cells)
    yield ("", *classes, "all")
    for backend, whole in by_backend(cells).items():
        yield (backend, *(covered(cells[backend].get(name)) for name in classes), covered(whole))
    everything = Tally(sum(tally.within for tally in classes.values()), sum(tally.of for tally in classes.values()))
    yield ("all", *(covered(tally) for tally in classes.values()), covered(everything))


def _matrix(title: str, lines: list[tuple[str, ...]]) -> Table:
    head, *rows = lines
    table = Table(box=None, pad_edge=False, header_style="bold", title_justify="left", title=f"\n{title}")
    for place, column in enumerate(head):
        table.add_column(column, no_wrap=True, justify="right" if place else "left")
    for row in rows:
        table.add_row(*row)
    return table


def _html_table(rows: list[tuple[str, ...]]) -> str:
    def line(row: tuple[str, ...], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row) + "</tr>"

    head, *body = rows
    return f"<table>{line(head, 'th')}{''.join(line(row, 'td') for row in body)}</table>"
