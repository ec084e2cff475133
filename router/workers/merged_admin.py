"""The operators' listener where several worker processes serve: one picture, and levers that reach all of them.

A question goes to the leader, or to all of them where the answer is a sum. Whatever changes something goes to all, and
is answered with the leader's words; where one of the others fails, with its status.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any

import httpx
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from router.api.admin import seconds_in, whole_in
from router.api.public import api_error_response, http_error_response
from router.wire.errors import ApiError, no_backend
from router.workers.merged_lending import LendingOrder, merge_backend, merge_publications
from router.workers.merged_metrics import page_of
from router.workers.table import Header, RowState

if TYPE_CHECKING:
    from router.workers.parent import Worker, Workers

LENDING_POLL_S = 0.05
"""How often workers are asked while somebody waits for news of lending."""
Handler = Callable[[Request], Awaitable[Response]]


def merged_admin_app(workers: "Workers") -> Starlette:
    """The routes of `router.api.admin`, over all workers, and `/admin/workers`."""

    async def fleet(_: Request) -> Response:
        documents = [answer.json() for _, answer in await _ask(workers, "GET", "/admin/fleet")]
        return JSONResponse({**merge_fleets(documents), "workers": workers_document(workers)})

    async def config(_: Request) -> Response:
        answers = await _ask(workers, "GET", "/admin/config")
        hashes = {str(worker.process.pid): answer.json()["config_hash"] for worker, answer in answers}
        return JSONResponse(
            {**answers[0][1].json(), "workers": hashes, "is_coherent": len(set(hashes.values())) == 1}
        )

    async def ask_leader(request: Request) -> Response:
        return _passed_on((await _ask(workers, "GET", _target(request), leader_only=True))[0][1])

    async def explain(request: Request) -> Response:
        told = {name: value for name, value in request.headers.items() if name == "authorization" or name[:2] == "x-"}
        answers = await _ask(
            workers, "POST", "/admin/explain", body=await request.body(), leader_only=True, headers=told
        )
        return _passed_on(answers[0][1])

    async def tell_all(request: Request) -> Response:
        answers = await _ask(workers, "POST", _target(request), body=await request.body())
        return _passed_on(next((answer for _, answer in answers if answer.status_code >= 400), answers[0][1]))

    async def lending(request: Request) -> Response:
        after, wait_s = whole_in(request, "after", 0), seconds_in(request, "wait_s")
        end_s = monotonic() + (wait_s if after else 0.0)
        while True:
            found = await _publication(workers)
            if found["version"] > after or monotonic() >= end_s:
                return JSONResponse(found)
            await asyncio.sleep(LENDING_POLL_S)

    async def lend(request: Request) -> Response:
        name, verb = request.path_params["name"], request.url.path.rpartition("/")[2]
        answers = await _ask(workers, "POST", _target(request))
        refused = next((answer for _, answer in answers if answer.status_code >= 400), None)
        if refused is None:
            order = workers.orders[name] = LendingOrder(verb, whole_in(request, "epoch", 0))
            for worker, _ in answers:
                worker.orders = {**worker.orders, name: order}
            return JSONResponse(merge_backend([answer.json() for _, answer in answers]))
        if verb == "release":       # all of them let go, or none does
            epoch = whole_in(request, "epoch", 0)
            await asyncio.gather(*(_undo(worker, name, epoch) for worker, answer in answers if answer.is_success))
        return _passed_on(refused)

    async def drain(request: Request) -> Response:
        response = await tell_all(request)
        if response.status_code < 400:
            name = request.path_params["name"]
            (workers.drained.add if request.path_params["verb"] == "drain" else workers.drained.discard)(name)
        return response

    async def who(_: Request) -> Response:
        return JSONResponse({"workers": workers_document(workers)})

    async def metrics(_: Request) -> Response:
        pages = await workers.read_pages()
        leader = workers.leader()
        families = workers.retired.merge(pages, None if leader is None else leader.row.index)
        return Response(page_of([*families, *_families(workers)]), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    app = Starlette(
        routes=[
            Route("/admin/fleet", fleet),
            Route("/admin/config", config),
            Route("/admin/workers", who),
            Route("/admin/explain", explain, methods=["POST"]),
            Route("/admin/lending", lending),
            Route("/admin/backends/{name}/release", lend, methods=["POST"]),
            Route("/admin/backends/{name}/return", lend, methods=["POST"]),
            Route("/admin/backends/{name}/{verb}", drain, methods=["POST"]),
            Route("/admin/{path:path}", ask_leader),
            Route("/admin/{path:path}", tell_all, methods=["POST"]),
            Route("/metrics", metrics),
        ],
        exception_handlers={ApiError: api_error_response, HTTPException: http_error_response},
    )
    app.router.redirect_slashes = False
    return app


async def _publication(workers: "Workers") -> dict[str, Any]:
    documents = [answer.json() for _, answer in await _ask(workers, "GET", "/admin/lending") if answer.is_success]
    if not documents:
        raise no_backend("No worker answers now. Try again shortly.", 1.0)
    merged = merge_publications(documents, 0)
    stages = {entry["name"]: entry["stage"] for entry in merged["backends"]}
    if stages != workers.lending_stages:
        workers.lending_version += bool(workers.lending_stages)
        workers.lending_stages = stages
    return {**merged, "version": workers.lending_version}


async def _undo(worker: "Worker", name: str, epoch: int) -> None:
    with contextlib.suppress(httpx.HTTPError):
        await worker.client.post(f"/admin/backends/{name}/return?epoch={epoch}")


def workers_document(workers: "Workers") -> list[dict[str, Any]]:
    """Each worker process as its row says."""
    now, leader = monotonic(), workers.leader()
    return [
        {
            "row": worker.row.index,
            "epoch": worker.epoch,
            "pid": worker.process.pid,
            "state": RowState(worker.row.header[Header.STATE]).name.lower(),
            "leads": worker is leader,
            "in_flight": worker.row.header[Header.IN_FLIGHT],
            "config_hash": f"{worker.row.header[Header.CONFIG]:012x}",
            "heartbeat_age_s": round(max(0.0, now - worker.row.floats[Header.HEARTBEAT_S]), 3),
            "up_s": round(now - worker.started_at_s, 1),
        }
        for worker in sorted(workers.workers, key=lambda worker: worker.row.index)
    ]


def merge_fleets(documents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One fleet document: what is counted is summed, what is observed is the first one's, which is the leader's."""
    merged = dict(documents[0])
    merged["in_flight"] = sum(document["in_flight"] for document in documents)
    # One that has taken a predecessor's place has started with more than those before it.
    merged["needs_restart"] = sorted({path for document in documents for path in document.get("needs_restart", ())})
    merged["ready"] = any(document["ready"] for document in documents)
    for section in ("backends", "retiring"):
        entries: dict[tuple[str, str], dict[str, Any]] = {}
        for document in documents:
            for entry in document[section]:
                known = entries.setdefault((entry["name"], entry["url"]), entry)
                if known is not entry:
                    _add(known, entry)
        merged[section] = list(entries.values())
    running = {(entry["name"], entry["url"]) for entry in documents[0]["backends"]}
    merged["backends"] = [entry for entry in merged["backends"] if (entry["name"], entry["url"]) in running]
    return merged


def _add(entry: dict[str, Any], other: dict[str, Any]) -> None:
    entry["in_flight"] = {name: value + other["in_flight"][name] for name, value in entry["in_flight"].items()}
    for name in ("served_requests", "failed_requests"):
        entry[name] += other[name]


async def _ask(
    workers: "Workers", method: str, target: str, *, body: bytes = b"", leader_only: bool = False,
    headers: Mapping[str, str] | None = None
) -> list[tuple["Worker", httpx.Response]]:
    """Answers of the workers that serve or drain, the leader's first. One that ends meanwhile has none.

    Raises:
        ApiError: 503 where nobody answers.
    """
    leader = workers.leader()
    chosen = [leader] if leader is not None else []
    if not leader_only:
        chosen += [worker for worker in workers.workers if worker.ready and worker is not leader]

    async def ask(worker: "Worker") -> httpx.Response | None:
        try:
            return await worker.client.request(method, target, content=body, headers=headers)
        except httpx.HTTPError:
            return None

    answers = await asyncio.gather(*map(ask, chosen))
    found = [(worker, answer) for worker, answer in zip(chosen, answers, strict=True) if answer is not None]
    if not found:
        raise no_backend("No worker answers now. Try again shortly.", 1.0)
    return found


def _target(request: Request) -> str:
    query = request.url.query
    return f"{request.url.path}?{query}" if query else request.url.path


def _passed_on(answer: httpx.Response) -> Response:
    return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))


def _families(workers: "Workers") -> list[Metric]:
    serving = GaugeMetricFamily("headrace_workers", "Worker processes that serve.", value=len(workers.serving()))
    starts = CounterMetricFamily(
        "headrace_worker_starts", "Worker processes started, the first ones among them.", value=workers.starts
    )
    return [serving, starts]
