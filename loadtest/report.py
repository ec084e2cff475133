"""What a load test has to say: a table for people, one JSON object for programs, a summary file to keep."""

import json as jsonlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from loadtest.verdict import Row, passed


@dataclass(frozen=True, slots=True)
class Result:
    """A judged run."""

    rows: tuple[Row, ...]
    measured: Mapping[str, float]
    shares: Mapping[str, float]
    failures: Mapping[str, int]

    @property
    def word(self) -> str:
        """`PASS` or `FAIL`."""
        return "PASS" if passed(self.rows) else "FAIL"

    def as_json(self) -> dict[str, object]:
        """For `--json` and `summary.json`."""
        return {
            "passed": passed(self.rows),
            "rows": [
                {"name": row.threshold.name, "measured": row.measured, "must_be": row.threshold.must_be,
                 "limit": row.threshold.limit, "unit": row.threshold.unit, "passed": row.passed,
                 "why": row.threshold.why}
                for row in self.rows
            ],
            "measured": dict(self.measured), "shares": dict(self.shares), "failures": dict(self.failures),
        }


def write(result: Result, folder: Path) -> None:
    """`summary.md` and `summary.json` beside locust's own files."""
    lines = [f"# Load test: {result.word}", "", "| threshold | measured | must be | |", "|---|---:|---:|---|"]
    lines += [f"| {row.threshold.name} | {_measured(row)} | {_limit(row)} | {_word(row)} |" for row in result.rows]
    lines += ["", "| measured | value |", "|---|---:|"]
    lines += [f"| {name} | {number(value)} |" for name, value in result.measured.items()]
    lines += ["", "| backend | share of whole requests |", "|---|---:|"]
    lines += [f"| {name} | {share:.1%} |" for name, share in result.shares.items()]
    lines += [f"\nFailed: {count} × {kind}" for kind, count in result.failures.items()]
    (folder / "summary.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "summary.json").write_text(jsonlib.dumps(result.as_json(), indent=1) + "\n", encoding="utf-8")


def show(result: Result, folder: Path | None, *, json: bool) -> None:
    """The verdict on standard output; `folder` is where the files are, if they are kept."""
    if json:
        print(jsonlib.dumps(result.as_json()))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title, side in (("threshold", "left"), ("measured", "right"), ("must be", "right"), ("", "left")):
        table.add_column(title, justify=side)  # type: ignore[arg-type]
    for row in result.rows:
        table.add_row(row.threshold.name, _measured(row), _limit(row), _word(row), style=None if row.passed else "red")
    console = Console(highlight=False, soft_wrap=True)
    console.print(table)
    console.print("served: " + ", ".join(f"{name} {share:.0%}" for name, share in result.shares.items()))
    for kind, count in result.failures.items():
        console.print(f"failed: {count} × {kind}")
    for row in result.rows:
        if not row.passed:
            console.print(f"{row.threshold.name}: {row.threshold.why}")
    console.print(f"{result.word}  (all numbers: {folder}/summary.md)" if folder else result.word)


def _measured(row: Row) -> str:
    return "not measured" if row.measured is None else f"{number(row.measured)} {row.threshold.unit}".strip()


def _limit(row: Row) -> str:
    return f"{row.threshold.must_be} {number(row.threshold.limit)} {row.threshold.unit}".strip()


def _word(row: Row) -> str:
    return "pass" if row.passed else "FAIL"


def number(value: float) -> str:
    """Whole numbers as such, others to four digits."""
    return f"{value:.0f}" if value == int(value) else f"{value:.4g}"
