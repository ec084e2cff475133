"""`headrace jobs`, `pools`, `loans`, `recall`, `supply`, `cordon`, `quota`: asks a running allocator and prints."""

import json as json_module
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from rich.console import Console, RenderableType
from rich.text import Text

from headrace.allocator.client import AllocatorClient, AllocatorError
from headrace.allocator.tables import (
    history_table,
    jobs_table,
    loans_table,
    pools_table,
    quota_table,
    span,
)
from settings.fields import Name

Document = dict[str, Any]


def submit(url: str, file: Path, *, json: bool) -> int:
    """Send a job file. Exit code 1 where it is wrong or refused."""
    from headrace.allocator.file import lines_of, load_job
    from settings.source import ConfigError

    try:
        request = load_job(file)
    except ConfigError as error:
        for line in lines_of(error.problems):
            print(line, file=sys.stderr)
        return 1
    body = request.model_dump(mode="json", exclude_defaults=True)
    return _show("jobs submit", url, lambda client: client.ask("POST", "/v1/jobs", body=body), _job, json)


def list_jobs(url: str, *, history: bool, json: bool) -> int:
    """Every job that is not over; with `history`, what became of the others."""
    def shown(found: Document) -> list[RenderableType]:
        rows: list[RenderableType] = [jobs_table(found["jobs"])] if found["jobs"] else [Text("no job waits or runs")]
        return [*rows, history_table(found["history"], "job")] if history else rows

    return _show("jobs list", url, lambda client: client.get("/v1/jobs", history=int(history)), shown, json)


def show_job(url: str, name: str, *, json: bool) -> int:
    """All that is known of one job."""
    return _show("jobs show", url, lambda client: client.get(_path(name)), _job, json)


def cancel_job(url: str, name: str, *, json: bool) -> int:
    """Stop a job, or take it out of its queue."""
    return _show("jobs cancel", url, lambda client: client.ask("DELETE", _path(name)), _job, json)


def why_job(url: str, name: str, *, json: bool) -> int:
    """The first thing that would have to change for a job to start."""
    return _show("jobs why", url, lambda client: client.get(_path(name) + "/why"),
                 lambda found: [Text(f"{found['code']}: {found['sentence']}")], json)


def pools(url: str, *, json: bool) -> int:
    """Pools and their cards."""
    return _show("pools", url, lambda client: client.get("/v1/pools"), lambda found: [pools_table(found["pools"])],
                 json)


def loans(url: str, *, history: bool, limit: int, json: bool) -> int:
    """Loans that are out, or every step of those that were."""
    if history:
        return _show("loans", url, lambda client: client.get("/v1/loans/history", limit=limit),
                     lambda found: [history_table(found["history"], "loan")], json)
    return _show("loans", url, lambda client: client.get("/v1/loans"),
                 lambda found: [loans_table(found["loans"]) if found["loans"] else Text("nothing is lent")], json)


def recall(url: str, target: str, *, deadline_s: float | None, replicas: int | None, emergency: bool,
           json: bool) -> int:
    """Call a loan back, or those of a pool."""
    body = {"target": target, "deadline_s": deadline_s, "replicas": replicas, "emergency": emergency}
    body = {key: value for key, value in body.items() if value is not None}

    def shown(found: Document) -> list[RenderableType]:
        rows: list[RenderableType] = [
            Text(f"{one['loan']}: {one['state']}" + (f", back in {span(one['due_in_s'])} at the latest"
                                                     if one["due_in_s"] is not None else ""))
            for one in found["recalled"]]
        if found.get("kept_for_s"):
            rows.append(Text(f"kept for {span(found['kept_for_s'])}: no more is lent in its place, unless `headrace "
                             "supply` says what can be spared"))
        return rows

    return _show("recall", url, lambda client: client.ask("POST", "/v1/recall", body=body), shown, json)


def supply(url: str, pool: str, card: str, *, lendable: int, spare: int | None, json: bool) -> int:
    """Say what an inference pool can do without."""
    body = {"pool": pool, "card": card, "lendable": lendable, "spare": lendable if spare is None else spare}
    return _show("supply", url, lambda client: client.ask("PUT", "/v1/supply", body=body),
                 lambda found: [pools_table(one for one in found["pools"] if one["pool"] == pool)], json)


def cordon(url: str, targets: list[str], *, undo: bool, json: bool) -> int:
    """Take devices, or all of a node's, out of use or back into it: what runs there may end, nothing new starts."""
    def ask(client: AllocatorClient) -> Document:
        nodes = {node["node"]: [one["device"] for one in node["devices"]] for node in client.get("/v1/nodes")["nodes"]}
        devices = [device for target in targets for device in nodes.get(target, [target])]
        condition = "healthy" if undo else "cordoned"
        return client.ask("POST", "/v1/devices", body={"devices": devices, "condition": condition})

    def shown(found: Document) -> list[RenderableType]:
        return [Text(f"{one['device']}: {one['condition']}"
                     + (f", run {one['run']} may end" if one["run"] and one["condition"] == "cordoned" else ""))
                for node in found["nodes"] for one in node["devices"]
                if node["node"] in targets or one["device"] in targets]

    return _show("cordon", url, ask, shown, json)


def quota(url: str, *, json: bool) -> int:
    """Promises to queues and what they use of them."""
    return _show("quota", url, lambda client: client.get("/v1/quota"), lambda found: [quota_table(found["queues"])],
                 json)


def _path(name: str) -> str:
    """Of a job. Raises AllocatorError for what would lead somewhere else."""
    try:
        return f"/v1/jobs/{TypeAdapter(Name).validate_python(name)}"
    except ValidationError:
        raise AllocatorError(f"{name[:64]!r}: no job can be called so; names are 1 to 64 letters, digits, `.`, `_` "
                             "or `-`") from None


def _job(found: Document) -> list[RenderableType]:
    rows: list[RenderableType] = []
    if found.get("gang"):
        rows.append(jobs_table([found]))
    else:
        rows.append(Text(f"{found['job']}: {found['state']}"))
    if found.get("run"):
        rows.append(Text("devices: " + ", ".join(found["run"]["devices"])))
    if found.get("resume_from"):
        rows.append(Text(f"resumes from: {found['resume_from']}"))
    if found.get("unsaved"):
        rows.append(Text(f"told to save, it ended without having saved {found['unsaved']} times: what it had done "
                         "since its last checkpoint is lost; the log of its run may say why", style="red"))
    if found.get("history"):
        rows.append(history_table(found["history"], "job"))
    return rows


def _show(command: str, url: str, ask: Callable[[AllocatorClient], Document],
          shown: Callable[[Document], list[RenderableType]], json: bool) -> int:
    try:
        found = ask(AllocatorClient(url))
    except AllocatorError as error:
        print(f"headrace {command}: {error}", file=sys.stderr)
        return 1 if error.answered else 2
    if json:
        print(json_module.dumps(found), flush=True)
        return 0
    # Into a pipe or file the rows stay whole, whatever width is assumed there.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    for part in shown(found):
        console.print(part)
    return 0
