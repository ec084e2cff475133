"""`headrace top`: pools, loans on a time line, and the queue, live in the terminal."""

import json as json_module
import sys
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from headrace.allocator.client import AllocatorClient, AllocatorError
from headrace.allocator.tables import UNKNOWN, jobs_table, number, pools_table, span, state

BAR = 40
"""Cells of a loan's time line."""
MOST_JOBS = 20
Document = Mapping[str, Any]


def run_top(url: str, *, once: bool, interval_s: float, json: bool) -> int:
    """Draws a frame a second until interrupted. Returns the exit code."""
    client = AllocatorClient(url)
    try:
        found = client.get("/v1/top")
        if once or json:
            _print_once(found, json)
            while json and not once:
                time.sleep(interval_s)
                _print_once(client.get("/v1/top"), json)
            return 0
        with Live(frame(found), auto_refresh=False, screen=True) as live:
            while True:
                time.sleep(interval_s)
                live.update(_next(client), refresh=True)
    except AllocatorError as error:
        print(f"headrace top: {error}", file=sys.stderr)
        return 1 if error.answered else 2
    except KeyboardInterrupt:
        return 0


def _next(client: AllocatorClient) -> Group:
    # A restart of the allocator, or a change of leader, is no reason to leave.
    try:
        return frame(client.get("/v1/top"))
    except AllocatorError as error:
        return Group(Text(str(error), style="bold red"))


def _print_once(found: Document, json: bool) -> None:
    if json:
        print(json_module.dumps(found), flush=True)
        return
    Console(highlight=False, width=None if sys.stdout.isatty() else 160).print(frame(found))


def frame(found: Document) -> Group:
    """One picture of the allocator."""
    parts: list[Any] = [_title(found), pools_table(found["pools"]), Text()]
    parts += [_loans(found["loans"])] if found["loans"] else [Text("nothing is lent", style="dim")]
    jobs = sorted(found["jobs"], key=lambda job: (job["state"] == "waiting", -(job.get("waiting_s") or 0.0)))
    parts += [Text(), jobs_table(jobs[:MOST_JOBS]) if jobs else Text("no job waits or runs", style="dim")]
    if len(jobs) > MOST_JOBS:
        parts.append(Text(f"and {len(jobs) - MOST_JOBS} more: headrace jobs list", style="dim"))
    return Group(*parts)


def _title(found: Document) -> Text:
    figures = found["figures"]
    jobs = found["jobs"]
    waiting = sum(job["state"] == "waiting" for job in jobs)
    shares = [f"{word} {number(figures[key], '.0%')}" for word, key in (("utilisation", "utilisation"),
                                                                       ("busy", "busy"))]
    spans = [f"{word} {span(figures[key])}" for word, key in (("mean wait", "queue_wait_mean_s"),
                                                             ("mean JCT", "jct_mean_s"))]
    cost = figures["cost_per_unit_h"]
    return Text(" · ".join([
        time.strftime("%H:%M:%S", time.localtime(found["wall_unix_s"])), f"{len(jobs) - waiting} run, {waiting} wait",
        *shares, *spans, f"unit·h {UNKNOWN if cost is None else f'{cost:.3f}'}", f"config {found['config']}",
        f"units {found['coefficients']}", f"term {found['term']}, event {found['seq']}"]), style="bold")


def _loans(loans: list[Document]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("loan", "state", "card", "from → to", "jobs"):
        table.add_column(title, overflow="fold")
    table.add_column(f"since it was lent {'─' * (BAR - 20)}", no_wrap=True)
    table.add_column("next", justify="right", no_wrap=True)
    for loan in loans:
        table.add_row(Text(loan["loan"]), state(loan["state"]), f"{loan['card']} ×{len(loan['devices'])}",
                      Text(f"{loan['lender']} → {loan['borrower']}"), Text(", ".join(loan["jobs"]) or UNKNOWN),
                      time_line(loan), _next_step(loan))
    return table


def time_line(loan: Document) -> Text:
    """What has passed of a loan, against what was promised; from a recall on, against its deadline.

    `█` has passed, `·` is promised, `▒` is grace that has passed, `░` grace that is left, `!` is overdue.
    """
    lent_s = loan["lent_s_ago"]
    if lent_s is None:
        return Text("·" * BAR, style="yellow")
    due_s, recalled_s = loan["due_in_s"], loan["recalled_s_ago"]
    if due_s is None or recalled_s is None:
        total_s = max(lent_s + max(0.0, loan["promised_for_s"]), 1e-9)
        passed = min(BAR, round(BAR * lent_s / total_s))
        return Text("█" * passed, style="cyan") + Text("·" * (BAR - passed), style="dim")
    total_s = max(lent_s + max(0.0, due_s), 1e-9)
    before = min(BAR, round(BAR * max(0.0, lent_s - recalled_s) / total_s))
    grace = min(BAR - before, round(BAR * min(lent_s, recalled_s) / total_s)) if due_s > 0.0 else BAR - before
    style = "yellow" if due_s > 0.0 else "bold red"
    return (Text("█" * before, style="cyan") + Text(("▒" if due_s > 0.0 else "!") * grace, style=style)
            + Text("░" * (BAR - before - grace), style=style))


def _next_step(loan: Document) -> str:
    if loan["due_in_s"] is not None:
        return f"due in {span(loan['due_in_s'])}" if loan["due_in_s"] > 0.0 else f"late by {span(-loan['due_in_s'])}"
    if loan["lent_s_ago"] is None:
        return "is being drained"
    return f"promised for {span(loan['promised_for_s'])}" if loan["promised_for_s"] > 0.0 else "promise is over"
