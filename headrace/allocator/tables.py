"""Tables of what an allocator says: pools, loans, jobs, quotas. What is unknown is a dash, never a zero."""

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from rich.table import Table
from rich.text import Text

UNKNOWN = "–"
STATE_STYLE = {
    "running": "green", "returned": "green", "completed": "green", "lent": "cyan", "offered": "yellow",
    "starting": "yellow", "waiting": "yellow", "recall_requested": "yellow", "draining": "yellow", "stopping": "yellow",
    "returning": "yellow", "overdue": "bold red", "lost": "bold red", "failed": "red", "cancelled": "dim",
    "withdrawn": "dim",
}
Row = Mapping[str, Any]


def span(seconds: float | None) -> str:
    """A duration in short: `4.2 s`, `12 min`, `3.5 h`, `2.1 d`; negative where it is past."""
    if seconds is None:
        return UNKNOWN
    size = abs(seconds)
    for limit, divisor, unit in ((10.0, 1.0, ".1f s"), (120.0, 1.0, ".0f s"), (7200.0, 60.0, ".0f min"),
                                 (172800.0, 3600.0, ".1f h")):
        if size < limit:
            form, word = unit.split()
            return f"{seconds / divisor:{form}} {word}"
    return f"{seconds / 86400.0:.1f} d"


def number(value: float | None, form: str = "g") -> str:
    return UNKNOWN if value is None else f"{value:{form}}"


def state(word: str) -> Text:
    return Text(word, style=STATE_STYLE.get(word, ""))


def jobs_table(jobs: Iterable[Row]) -> Table:
    """One row a job; the last column says where it runs, or why it waits."""
    table = _table("job", "state", "queue", "kind", right=("gang", "priority", "for", "attempts"))
    table.add_column("where, or why not", overflow="fold")
    for job in jobs:
        run, why = job.get("run"), job.get("why")
        least, most = job["gang"]
        if run:
            where = f"{run['card']} ×{len(run['devices'])} in {run['pool']}" + (" (lent)" if run["loans"] else "")
            if run.get("stop_in_s") is not None:
                left_s = run["stop_in_s"]
                where += (f", leaves in {span(left_s)}" if left_s >= 0.0 else f", late by {span(-left_s)}") \
                    + f" ({run['stop_reason']})"
            elif job.get("cancelled"):
                where += ", is about to be told to leave (cancelled)"
        else:
            where = why["sentence"] if why else UNKNOWN
        table.add_row(Text(job["job"]), state(job["state"]), Text(job["queue"]), job["kind"],
                      f"{least}" if least == most else f"{least}–{most}", number(job["priority"]),
                      span(run["for_s"] if run else job.get("waiting_s")), number(job["attempts"]), Text(where))
    return table


_COUNTS = ("devices", "healthy", "used", "free", "lent", "borrowed", "serving", "lendable", "spare")


def pools_table(pools: Iterable[Row]) -> Table:
    """One row a pool and card; `serving` counts replicas, as the two after it do."""
    table = _table("pool", "kind", "card", right=(*_COUNTS, "jobs", "waiting"))
    for pool in pools:
        # Jobs wait for a pool, whichever card they get: their number stands once.
        jobs = (number(pool["running"]), number(pool["waiting"]))
        for index, card in enumerate(pool["cards"] or [{}]):
            table.add_row(Text(pool["pool"]), pool["kind"] + ("" if pool["open"] else " (closed)"),
                          str(card.get("card") or UNKNOWN), *(number(card.get(key)) for key in _COUNTS),
                          *(jobs if index == 0 else ("", "")))
    return table


def loans_table(loans: Iterable[Row]) -> Table:
    """One row a loan that is not over."""
    table = _table("loan", "state", "lender", "borrower", "card", "devices", "jobs",
                   right=("epoch", "lent for", "promised", "due"))
    table.add_column("reason")
    for loan in loans:
        table.add_row(Text(loan["loan"]), state(loan["state"]), Text(loan["lender"]), Text(loan["borrower"]),
                      loan["card"], number(len(loan["devices"])), Text(", ".join(loan["jobs"]) or UNKNOWN),
                      number(loan["epoch"]), span(loan["lent_s_ago"]), span(loan["promised_for_s"]),
                      span(loan["due_in_s"]), str(loan["recall_reason"] or UNKNOWN))
    return table


_SPANS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "job": {"after": ("wait_s", "jct_s", "held_s"), "work lost": ("lost_unit_s",)},
    "loan": {"away for": ("away_s",), "recalled for": ("recall_s",)},
}
"""Of jobs or loans: the columns with durations, each with the figures that it shows, the first one that there is. Work
is in seconds of a reference card."""


def history_table(moves: Iterable[Row], name: str) -> Table:
    """One row a change of state, the oldest first."""
    columns = _SPANS[name]
    table = _table("at", name, "was", "became", "reason", right=("epoch", *columns))
    table.add_column("said", overflow="fold")
    for move in moves:
        at = datetime.fromtimestamp(move["at_unix_s"]).astimezone().strftime("%m-%d %H:%M:%S")
        spans = [span(next((move[key] for key in keys if key in move), None)) for keys in columns.values()]
        table.add_row(at, Text(move[name]), state(move["was"] or UNKNOWN), state(move["became"]), move["reason"],
                      number(move["epoch"]), *spans, Text(move.get("detail", "")))
    return table


def quota_table(queues: Iterable[Row]) -> Table:
    """One row a queue and key."""
    table = _table("queue", "under", "key", right=("nominal", "used", "borrowed", "available", "lends", "borrows",
                                                   "weight", "share", "charged"))
    for queue in queues:
        for key in queue["keys"]:
            table.add_row(Text(queue["queue"]), Text(queue["parent"]), key["key"],
                          *(number(key[name]) for name in ("nominal", "used", "borrowed", "available")),
                          "all" if key["lending_limit"] is None else number(key["lending_limit"]),
                          "all" if key["borrowing_limit"] is None else number(key["borrowing_limit"]),
                          number(queue["weight"]), number(queue["share"], ".3f"),
                          f"{queue['charged_unit_s'] / 3600.0:.2f} unit·h")
    return table


def _table(*left: str, right: tuple[str, ...] = ()) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in left:
        table.add_column(title, overflow="fold")
    for title in right:
        table.add_column(title, justify="right", no_wrap=True)
    return table
