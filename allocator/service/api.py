"""The HTTP API: jobs, pools, loans, recalls, quota, and the levers. JSON in, JSON out.

Whoever may submit a job may run programs here. So it listens on loopback, or asks for a token; it takes bodies as
`application/json` only and no request that a web page sends, which keeps a browser on the same machine from being used
as a bridge.
"""

import asyncio
import hmac
import re
from collections.abc import Awaitable, Callable, Mapping
from ipaddress import ip_address
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from allocator.events import JobCancelled, JobSubmitted
from allocator.service import views
from allocator.service.job_request import JobRequest, request_text
from allocator.service.keeper import Keeper, Note
from allocator.service.levers import Devices, NodeState, Recall, SupplyBody, judge, recall, set_node, tell_supply
from allocator.service.metrics import AllocatorMetrics
from allocator.service.refusals import ApiError
from allocator.service.service import Service
from allocator.store.history import What
from allocator.store.leadership import Deposed
from allocator.store.schema import StoreError
from allocator.why import why_pending
from settings.problems import untagged

MAX_BODY_BYTES = 1_000_000
HISTORY_LIMIT = 1_000
Handler = Callable[[Request], Awaitable[Response]]
Model = TypeVar("Model", bound=BaseModel)


def api(service: Service, metrics: AllocatorMetrics, token: str | None) -> Starlette:
    """The application. `token`: what every request must carry; `None`: nothing is asked for."""
    handlers = _Handlers(service, metrics)

    def route(path: str, handler: Handler, *methods: str, is_open: bool = False) -> Route:
        async def guarded(request: Request) -> Response:
            if not is_open:
                _admit(request, token)
            return await handler(request)

        return Route(path, guarded, methods=list(methods) or ["GET"])

    app = Starlette(
        routes=[
            route("/health", handlers.health, is_open=True),
            route("/readiness", handlers.readiness, is_open=True),
            route("/metrics", handlers.metrics_page, is_open=True),
            route("/v1/jobs", handlers.jobs),
            route("/v1/jobs", handlers.submit, "POST"),
            route("/v1/jobs/{name}", handlers.job),
            route("/v1/jobs/{name}", handlers.cancel, "DELETE"),
            route("/v1/jobs/{name}/why", handlers.why),
            route("/v1/pools", handlers.pools),
            route("/v1/loans", handlers.loans),
            route("/v1/loans/history", handlers.loan_history),
            route("/v1/recall", handlers.recall, "POST"),
            route("/v1/quota", handlers.quota),
            route("/v1/nodes", handlers.nodes),
            route("/v1/nodes/{name}", handlers.node, "POST"),
            route("/v1/devices", handlers.devices, "POST"),
            route("/v1/supply", handlers.supply, "PUT"),
            route("/v1/top", handlers.top),
            route("/v1/config", handlers.config),
            route("/v1/reload", handlers.reload, "POST"),
        ],
        exception_handlers={ApiError: _api_error, HTTPException: _http_error, Exception: _crash,
                            StoreError: _store_error, Deposed: _store_error},
    )
    app.router.redirect_slashes = False
    return app


class Json(JSONResponse):
    """JSON in which what is infinite is null: no parser has to know of infinities."""

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


class _Handlers:
    """One method a route."""

    def __init__(self, service: Service, metrics: AllocatorMetrics) -> None:
        self._service = service
        self._metrics = metrics

    async def health(self, _: Request) -> Response:
        return Json({"status": "ok"})

    async def readiness(self, _: Request) -> Response:
        leads = self._service.keeper is not None
        return Json({"status": "leading" if leads else "not leading"}, status_code=200 if leads else 503)

    async def metrics_page(self, _: Request) -> Response:
        return Response(generate_latest(self._metrics.registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    async def jobs(self, request: Request) -> Response:
        keeper = await self._keeper()
        found: dict[str, Any] = {"jobs": views.jobs_document(keeper.world, keeper.clock.now_s())}
        if request.query_params.get("history", "0") not in ("0", "false"):
            found["history"] = await self._history(What.JOB, request)
        return Json(found)

    async def submit(self, request: Request) -> Response:
        keeper = await self._keeper()
        asked = await _body(request, JobRequest)
        known, _ = await keeper.request_of(asked.name)
        if known is not None:
            if known != asked:
                raise ApiError(409, "name_taken", f"There was a job {asked.name} before, and another one; a name is "
                                                  "used once. Choose another name.")
            return await self._shown(keeper, asked.name, 200)
        if keeper.world.config.queue(asked.queue) is None:
            queues = ", ".join(queue.name for queue in keeper.world.config.queues) or "none"
            raise ApiError(422, "unknown_queue", f"There is no queue {asked.queue}. Known: {queues}.")
        event = JobSubmitted(at_s=keeper.clock.now_s(), job=asked.job())
        outcome = await keeper.record([Note(event, request_text(asked))])
        if outcome.refused:
            raise ApiError(409, "refused", outcome.refused[0][1])
        return await self._shown(keeper, asked.name, 201)

    async def job(self, request: Request) -> Response:
        return await self._shown(await self._keeper(), request.path_params["name"], 200)

    async def cancel(self, request: Request) -> Response:
        keeper, name = await self._keeper(), request.path_params["name"]
        outcome = await keeper.record([JobCancelled(at_s=keeper.clock.now_s(), job=name)])
        if outcome.refused and name not in keeper.world.jobs:
            raise ApiError(404, "unknown_job", f"There is no job {name[:64]!a} that is not over.")
        return await self._shown(keeper, name, 202)

    async def why(self, request: Request) -> Response:
        keeper, name = await self._keeper(), request.path_params["name"]
        found = why_pending(keeper.world, name, keeper.clock.now_s())
        if found is None:
            past = await self._moves_of(name)
            if not past:
                raise _unknown_job(name)
            last = past[-1]
            return Json({"job": name, "code": "over", "facts": {"became": last["became"]},
                                 "sentence": f"It is over: {last['became']} ({last['reason']})."})
        return Json({"job": name, **views.answer_document(found)})

    async def pools(self, _: Request) -> Response:
        keeper = await self._keeper()
        return Json({"pools": views.pools_document(keeper.world, keeper.clock.now_s())})

    async def loans(self, _: Request) -> Response:
        keeper = await self._keeper()
        return Json({"loans": views.loans_document(keeper.world, keeper.clock.now_s())})

    async def loan_history(self, request: Request) -> Response:
        await self._keeper()
        return Json({"history": await self._history(What.LOAN, request)})

    async def recall(self, request: Request) -> Response:
        keeper = await self._keeper()
        return Json(await recall(keeper, await _body(request, Recall)), status_code=202)

    async def quota(self, _: Request) -> Response:
        keeper = await self._keeper()
        return Json({"queues": views.quota_document(keeper.world, keeper.clock.now_s())})

    async def nodes(self, _: Request) -> Response:
        keeper = await self._keeper()
        return Json({"nodes": views.nodes_document(keeper.world)})

    async def node(self, request: Request) -> Response:
        keeper = await self._keeper()
        await set_node(keeper, request.path_params["name"], await _body(request, NodeState))
        return Json({"nodes": views.nodes_document(keeper.world)}, status_code=202)

    async def devices(self, request: Request) -> Response:
        keeper = await self._keeper()
        await judge(keeper, await _body(request, Devices))
        return Json({"nodes": views.nodes_document(keeper.world)}, status_code=202)

    async def supply(self, request: Request) -> Response:
        keeper, lender = await self._keeper(), self._service.lender
        assert lender is not None
        await tell_supply(keeper, lender, await _body(request, SupplyBody))
        return Json({"pools": views.pools_document(keeper.world, keeper.clock.now_s())})

    async def top(self, _: Request) -> Response:
        keeper = await self._keeper()
        world, now_s = keeper.world, keeper.clock.now_s()
        return Json({
            "now_s": now_s, "wall_unix_s": keeper.clock.clocks.unix_s(), "seq": keeper.seq,
            "term": keeper.term.number, "config": world.config.version, "coefficients": world.active,
            "pools": views.pools_document(world, now_s), "loans": views.loans_document(world, now_s),
            "jobs": views.jobs_document(world, now_s), "figures": self._metrics.figures()})

    async def config(self, _: Request) -> Response:
        service = self._service
        keeper = service.keeper
        last = service.last_reload
        return Json({
            "config": service.declared.config.model_dump(mode="json"), "leads": keeper is not None,
            "version": keeper.world.config.version if keeper else None,
            "coefficients": keeper.world.active if keeper else None,
            "last_reload": None if last is None else
            {"ok": last.ok, "changed": last.changed, "problems": list(last.problems)}})

    async def reload(self, request: Request) -> Response:
        dry_run = request.query_params.get("dry_run", "0") not in ("0", "false")
        result = await self._service.reload(dry_run=dry_run)
        return Json({"ok": result.ok, "changed": result.changed, "config": result.config,
                             "problems": list(result.problems)}, status_code=200 if result.ok else 422)

    async def _keeper(self) -> Keeper:
        keeper = self._service.keeper
        if keeper is not None:
            return keeper
        leader = await self._service.leader()
        if leader.holder and leader.url != self._service.url:
            raise ApiError(503, "not_leading", f"This allocator does not lead; {leader.url} does.", leader=leader.url)
        raise ApiError(503, "not_leading", "No allocator leads yet; the log says why.")

    async def _shown(self, keeper: Keeper, name: str, status: int) -> Response:
        past = await self._moves_of(name)
        request, saved = await keeper.request_of(name)
        world = keeper.world
        state = world.jobs.get(name)
        if state is None and not past and request is None:
            raise _unknown_job(name)
        now_s = keeper.clock.now_s()
        found: dict[str, Any]
        if state is not None:
            found = next(one for one in views.jobs_document(world, now_s) if one["job"] == name)
        else:
            found = {"job": name, "state": past[-1]["became"] if past else "unknown", "why": None, "run": None}
        found["request"] = request.model_dump(mode="json", exclude_defaults=True) if request else None
        found["resume_from"] = saved.resume_from if saved else None
        found["history"] = past
        return Json(found, status_code=status)

    async def _moves_of(self, name: str) -> list[dict[str, Any]]:
        keeper = await self._keeper()
        return views.moves_document(await asyncio.to_thread(
            lambda: keeper.journal.history(What.JOB, name=name, limit=HISTORY_LIMIT)), "job")

    async def _history(self, what: What, request: Request) -> list[dict[str, Any]]:
        keeper = await self._keeper()
        limit = _number(request.query_params, "limit", 100)
        name = request.query_params.get("name")
        return views.moves_document(await asyncio.to_thread(
            lambda: keeper.journal.history(what, name=name, limit=limit)), what.value)


def _unknown_job(name: str) -> ApiError:
    return ApiError(404, "unknown_job", f"There is no job {name[:64]!a}, and there was none.")


def _admit(request: Request, token: str | None) -> None:
    if token is not None:
        given = request.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
            raise ApiError(401, "unauthorized", "The token is missing or wrong. Send it as 'Authorization: Bearer "
                                                "<token>'.")
    elif not _names_an_address(request.headers.get("host", "")):
        raise ApiError(403, "foreign_host", "Without a token, only an address or localhost is taken as Host.")
    origin = request.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != request.headers.get("host"):
        raise ApiError(403, "foreign_origin", "Web pages of elsewhere are not let in.")


def _names_an_address(host: str) -> bool:
    """A web page that had its own name point here could otherwise pass for one of ours (DNS rebinding)."""
    name = urlsplit(f"//{host}").hostname or ""
    try:
        ip_address(name)
    except ValueError:
        return name == "localhost"
    return True


async def _body(request: Request, model: type[Model]) -> Model:
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "not_json", "Send JSON as 'Content-Type: application/json'.")
    raw = b""
    async for part in request.stream():
        raw += part
        if len(raw) > MAX_BODY_BYTES:
            raise ApiError(413, "too_large", f"The body is over {MAX_BODY_BYTES:,} bytes.")
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, untagged(model, one['loc']))) or 'body'}: {one['msg']}"
                    for one in error.errors(include_url=False, include_input=False)]
        raise ApiError(422, "invalid", "; ".join(problems), problems=problems) from None


def _number(given: Mapping[str, str], name: str, default: int) -> int:
    text = given.get(name, str(default))
    if not re.fullmatch("[0-9]{1,6}", text) or not 1 <= int(text) <= 100_000:
        raise ApiError(422, "invalid", f"{name} must be a whole number from 1 to 100,000, got {text[:20]!a}")
    return int(text)


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return Json(error.body(), status_code=error.status)


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    words = {404: "Unknown path.", 405: "This path does not take that method."}
    return Json(ApiError(error.status_code, "http", words.get(error.status_code, str(error.detail))).body(),
                        status_code=error.status_code, headers=error.headers)


async def _store_error(_: Request, error: Exception) -> Response:
    return Json(ApiError(503, "store", f"The journal cannot be written now, so nothing was done: {error}"
                                 ).body(), status_code=503)


async def _crash(_: Request, error: Exception) -> Response:
    return Json(ApiError(500, "internal", "The allocator failed; its log says where.").body(), status_code=500)
