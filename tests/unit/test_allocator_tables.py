"""What the allocator's tables show, and where."""

from typing import Any

from rich.console import Console
from rich.table import Table

from headrace.allocator.tables import history_table, pools_table


def rows_of(table: Table) -> list[list[str]]:
    """The cells as they are printed, the titles first."""
    console = Console(width=400)
    columns = [[str(column.header), *(console.render_str(str(cell)).plain for cell in column.cells)]
               for column in table.columns]
    return [list(row) for row in zip(*columns, strict=True)]


def cells_of(table: Table, *titles: str) -> list[list[str]]:
    """Those of these columns."""
    head, *rows = rows_of(table)
    return [[row[head.index(title)] for title in titles] for row in rows]


def a_card(card: str, serving: int | None = None) -> dict[str, Any]:
    return {"card": card, "devices": 2, "healthy": 2, "used": 0, "free": 2, "lent": 0, "borrowed": 0,
            "serving": serving, "lendable": None, "spare": None}


def test_the_jobs_of_a_pool_stand_once_and_not_on_each_card() -> None:
    pool = {"pool": "training", "kind": "training", "open": True, "cards": [a_card("k80"), a_card("v100")],
            "running": 3, "waiting": 1}
    other = {**pool, "pool": "inference", "cards": [a_card("v100", serving=2)], "running": 0, "waiting": 0}
    assert cells_of(pools_table([pool, other]), "pool", "card", "serving", "jobs", "waiting") == [
        ["training", "k80", "–", "3", "1"], ["training", "v100", "–", "", ""], ["inference", "v100", "2", "0", "0"]]


def a_move(name: str, **figures: object) -> dict[str, Any]:
    return {name: "x", "epoch": 1, "was": "lent", "became": "returned", "at_unix_s": 0.0, "at_s": 0.0,
            "reason": "idle", **figures}


def test_how_long_a_loan_was_away_and_how_long_its_recall_took_are_two_columns() -> None:
    table = history_table([a_move("loan", away_s=600.0, recall_s=4.0), a_move("loan", away_s=60.0), a_move("loan")],
                          "loan")
    assert cells_of(table, "away for", "recalled for") == [["10 min", "4.0 s"], ["60 s", "–"], ["–", "–"]]


def test_the_history_of_a_job_shows_the_work_that_a_stop_lost() -> None:
    table = history_table([a_move("job", held_s=30.0, lost_unit_s=240.0), a_move("job", wait_s=5.0)], "job")
    assert cells_of(table, "after", "work lost") == [["30 s", "4 min"], ["5.0 s", "–"]]
