"""`headrace status` and `headrace reload`: what a running gateway says of its fleet over the admin API."""

import json as jsonlib
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
from rich.console import Console
from rich.live import Live
from rich.measure import Measurement
from rich.table import Table

WATCH_INTERVAL_S = 1.0
UNKNOWN = "–"
_HEALTH_STYLE = {"healthy": "green", "slow_start": "yellow", "half_open": "yellow", "unknown": "yellow",
                 "unhealthy": "red", "ejected": "red", "retiring": "yellow"}
_COLUMNS = ("backend", "card", "quant", "layout", "health", "in flight", "running", "waiting", "KV", "age", "weight",
            "price/h", "TTFT", "served", "failed", "share")
_TEXT_COLUMNS = 5
_FIRST_TO_GO = ("layout", "quant", "age", "weight", "running", "price/h", "waiting", "KV", "card", "failed", "share")


class AdminError(Exception):
    """The admin listener did not give an answer that can be used; the message says what to do."""

    def __init__(self, message: str, *, answered: bool = True) -> None:
        super().__init__(message)
        self.answered = answered

    @property
    def exit_code(self) -> int:
        """2 where nobody could be asked, as the allocator's commands have it."""
        return 1 if self.answered else 2


def show_status(admin: str, *, json: bool = False, watch: bool = False) -> int:
    """Print the fleet once, or each second until interrupted. Returns the exit code."""
    try:
        if not watch:
            _print(fetch_fleet(admin), json)
        elif json:
            while True:
                _print(fetch_fleet(admin), json)
                time.sleep(WATCH_INTERVAL_S)
        else:
            _watch(admin)
    except AdminError as error:
        print(f"headrace status: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        pass
    return 0


def request_reload(admin: str, *, json: bool = False) -> int:
    """Ask for a reload and print what came of it. Exit code 1 where the file was refused, 2 where nobody answers."""
    try:
        result = _ask("POST", admin, "/admin/reload")
    except AdminError as error:
        print(f"headrace reload: {error}", file=sys.stderr)
        return error.exit_code
    if json:
        print(jsonlib.dumps(result))
    elif result.get("ok"):
        word = "reloaded" if result.get("changed") else "nothing changed"
        print(f"{word}: the fleet is {result.get('config_hash') or UNKNOWN}")
        needs_restart = (result.get("diff") or {}).get("needs_restart")
        if needs_restart:
            print(f"  needs a restart, and holds its old value until then: {', '.join(needs_restart)}")
        for warning in result.get("warnings") or ():
            print(f"  warning: {_problem(warning)}")
    else:
        print(f"headrace reload: refused; the fleet stays {result.get('config_hash') or UNKNOWN}", file=sys.stderr)
        for problem in result.get("problems") or ():
            print(f"  {_problem(problem)}", file=sys.stderr)
    return 0 if result.get("ok") else 1


def fetch_fleet(admin: str) -> dict[str, Any]:
    """The body of `GET /admin/fleet`. Raises `AdminError`."""
    fleet = _ask("GET", admin, "/admin/fleet")
    if not isinstance(fleet.get("backends"), list):
        raise AdminError(f"{admin} answers, but not as Headrace's admin listener does; is --admin right?")
    return fleet


def fleet_table(fleet: Mapping[str, Any], console: Console) -> Table:
    """One row a backend; those that a reload has removed and that still finish requests are `retiring`, at the end.

    What the gateway does not know is a dash, never a zero.

    Where the console is too narrow for all columns, those that matter least are left out: what is shown is whole.
    """
    retiring = [{**backend, "health": {"state": "retiring"}, "draining": False, "sample": None}
                for backend in fleet.get("retiring") or ()]  # fmt: skip
    total = sum(backend.get("served_requests") or 0 for backend in fleet["backends"])
    rows = [_cells(backend, total) for backend in fleet["backends"]] + [_cells(backend, 0) for backend in retiring]
    endless = console.options.update(max_width=10_000)
    for left_out in range(len(_FIRST_TO_GO) + 1):
        table = _table(rows, without=_FIRST_TO_GO[:left_out])
        if Measurement.get(console, endless, table).maximum <= console.width:
            break
    return table


def _table(rows: Sequence[Sequence[str]], without: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    kept = [number for number, title in enumerate(_COLUMNS) if title not in without]
    for number in kept:
        table.add_column(_COLUMNS[number], justify="left" if number < _TEXT_COLUMNS else "right")
    for row in rows:
        table.add_row(*[row[number] for number in kept])
    return table


def _cells(backend: Mapping[str, Any], total: int) -> list[str]:
    health = backend.get("health") or {}
    state = str(health.get("state") or "unknown").lower()
    draining = " [yellow]draining[/]" if backend.get("draining") else ""
    shown = f"[{_HEALTH_STYLE.get(state, 'red')}]{state}[/]{draining}"
    sample = backend.get("sample") or {}
    served = backend.get("served_requests")
    return [
        str(backend["name"]), f"{backend.get('card_type') or UNKNOWN} ×{backend.get('card_count') or 1}",
        str(backend.get("quantization") or UNKNOWN), layout(backend.get("parallel")), shown,
        _number((backend.get("in_flight") or {}).get("requests")),
        _number(sample.get("running_requests")), _number(sample.get("waiting_requests")),
        _number(sample.get("kv_usage_ratio"), "{:.0%}"), _number(sample.get("age_s"), "{:.1f} s"),
        _number(backend.get("weight"), "{:g}"), _number(backend.get("price_per_hour"), "{:.2f}"),
        _number(backend.get("ttft_ewma_s"), "{:.3f} s"), _number(served), _number(backend.get("failed_requests")),
        _number(served / total if served is not None and total else None, "{:.0%}"),
    ]


def layout(parallel: Any) -> str:
    """A parallel layout in short: `tp2·pp2`; degrees of one go without saying."""
    if not isinstance(parallel, Mapping):
        return str(parallel or UNKNOWN)
    return "·".join(f"{name}{degree}" for name, degree in parallel.items() if degree and degree > 1) or "tp1"


def _number(value: float | None, form: str = "{}") -> str:
    return UNKNOWN if value is None else form.format(value)


def _title(fleet: Mapping[str, Any]) -> str:
    title = (f"policy {fleet.get('policy') or UNKNOWN} · fleet {fleet.get('config_hash') or UNKNOWN} · "
             f"{fleet.get('form') or UNKNOWN}")
    owed = fleet.get("needs_restart")
    return f"{title}\nneeds a restart, and holds its old value until then: {', '.join(owed)}" if owed else title


def _print(fleet: Mapping[str, Any], json: bool) -> None:
    if json:
        print(jsonlib.dumps(fleet), flush=True)
        return
    # Into a pipe or file the rows stay whole, whatever width is assumed there.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    console.print(_title(fleet))
    console.print(fleet_table(fleet, console))


def _watch(admin: str) -> None:
    console = Console()

    def picture() -> Table:
        fleet = fetch_fleet(admin)
        table = fleet_table(fleet, console)
        table.title, table.title_justify = _title(fleet), "left"
        return table

    with Live(picture(), console=console, auto_refresh=False, screen=False) as live:
        while True:
            time.sleep(WATCH_INTERVAL_S)
            live.update(picture(), refresh=True)


def _ask(method: str, admin: str, path: str) -> dict[str, Any]:
    try:
        # The admin listener is near; a proxy from the environment is not meant for it.
        with httpx.Client(base_url=admin, timeout=10, trust_env=False) as client:
            answer = client.request(method, path)
    except (httpx.InvalidURL, httpx.UnsupportedProtocol):
        raise AdminError(f"{admin!r} is not an address; for example --admin http://127.0.0.1:8081",
                         answered=False) from None
    except httpx.TransportError as error:
        raise AdminError(f"no gateway answers on {admin} ({error}); is `headrace up` or `headrace serve` running? "
                         "Another address: --admin URL", answered=False) from None
    try:
        body = answer.json()
    except ValueError:
        body = None
    # A refused reload is an answer too: it comes with an error status and its own body.
    if not isinstance(body, dict) or (answer.is_error and "ok" not in body):
        raise AdminError(f"{method} {admin}{path} answered {answer.status_code}; is --admin the admin listener?")
    return body


def _problem(problem: Any) -> str:
    if not isinstance(problem, Mapping):
        return str(problem)
    place = ":".join(str(problem[key]) for key in ("file", "line", "column") if problem.get(key) is not None)
    line = "  ".join(str(part) for part in (place, problem.get("path"), problem.get("message")) if part)
    return f"{line}\n      {problem['hint']}" if problem.get("hint") else line
