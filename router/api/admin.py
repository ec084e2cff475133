"""The operators' listener: what the fleet looks like now, what configuration runs, and the levers.

It listens on a port of its own, on loopback unless the fleet file says otherwise, and has no keys: whoever reaches it
may use it.
"""

import dataclasses
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from compiled import form
from router.api.explain import explained
from router.api.public import api_error_response, http_error_response, metrics_endpoint
from router.config.reload import ReloadResult
from router.fleet.live import LiveBackend
from router.fleet.standing import drift_now, model_state
from router.gateway import Gateway
from router.lending.stages import Stage
from router.wire.errors import ApiError

MAX_WAIT_S = 300.0
"""A question is held open for at most so long."""


def admin_app(gateway: Gateway) -> Starlette:
    """Routes under /admin, and /metrics."""

    async def fleet(_: Request) -> Response:
        return JSONResponse(fleet_document(gateway))

    async def config(_: Request) -> Response:
        status = dataclasses.asdict(gateway.reloader.status())
        running = gateway.loaded.config.model_dump(mode="json")  # keys stand in it by their variables' names only
        return JSONResponse({**status, "config": running})

    async def explain(request: Request) -> Response:
        headers = dict(request.scope["headers"])
        return JSONResponse(explained(gateway.dispatcher, headers, await request.body()))

    async def reload(request: Request) -> Response:
        if request.query_params.get("dry_run", "0") not in ("0", "false"):
            return _result(await gateway.reloader.dry_run())
        return _result(await gateway.reloader.reload("admin"))

    async def rollback(_: Request) -> Response:
        return _result(await gateway.reloader.rollback())

    async def drain(request: Request) -> Response:
        return _set_drained(gateway, request.path_params["name"], drained=True)

    async def undrain(request: Request) -> Response:
        return _set_drained(gateway, request.path_params["name"], drained=False)

    async def lending(request: Request) -> Response:
        after, wait_s = whole_in(request, "after", 0), seconds_in(request, "wait_s")
        if wait_s and after:
            await gateway.desk.lending.until_changed(after, wait_s)
        return JSONResponse(gateway.desk.document())

    async def release(request: Request) -> Response:
        name, wait_s = request.path_params["name"], seconds_in(request, "wait_s")
        place = gateway.desk.lending.release(name, whole_in(request, "epoch", 0))
        end_s = gateway.clock() + wait_s
        while place.stage is Stage.DRAINING and (left_s := end_s - gateway.clock()) > 0:
            await gateway.desk.lending.until_changed(gateway.desk.lending.version, left_s)
        return JSONResponse(gateway.desk.backend_document(name))

    async def take_back(request: Request) -> Response:
        name = request.path_params["name"]
        gateway.desk.lending.take_back(name, whole_in(request, "epoch", 0))
        return JSONResponse(gateway.desk.backend_document(name))

    app = Starlette(
        routes=[
            Route("/admin/fleet", fleet),
            Route("/admin/config", config),
            Route("/admin/explain", explain, methods=["POST"]),
            Route("/admin/reload", reload, methods=["POST"]),
            Route("/admin/rollback", rollback, methods=["POST"]),
            Route("/admin/backends/{name}/drain", drain, methods=["POST"]),
            Route("/admin/backends/{name}/undrain", undrain, methods=["POST"]),
            Route("/admin/lending", lending),
            Route("/admin/backends/{name}/release", release, methods=["POST"]),
            Route("/admin/backends/{name}/return", take_back, methods=["POST"]),
            Route("/metrics", metrics_endpoint(gateway)),
        ],
        exception_handlers={ApiError: api_error_response, HTTPException: http_error_response},
    )
    app.router.redirect_slashes = False
    return app


def fleet_document(gateway: Gateway) -> dict[str, Any]:
    """The live fleet as JSON: what is unknown is null."""
    now = gateway.clock()
    policy = gateway.dispatcher.generation.pipeline.name
    live = gateway.fleet.backends.values()
    return {
        "config_hash": gateway.fleet.config_hash,
        "needs_restart": gateway.reloader.needs_restart,
        "policy": policy,
        "form": form(),
        "currency": gateway.loaded.config.currency,
        "ready": gateway.ready(),
        "in_flight": gateway.dispatcher.in_flight,
        "backends": [_backend_document(backend, now) for backend in live],
        "retiring": [_backend_document(backend, now) for backend in gateway.fleet.retiring if backend.books.requests],
    }


def _backend_document(live: LiveBackend, now: float) -> dict[str, Any]:
    spec, books, sample = live.spec, live.books, live.sample
    health = live.health.at(now)
    return {
        "name": spec.name,
        "url": spec.url,
        "engine": spec.engine,
        "model": spec.model,
        "served_model_name": spec.served_model_name,
        "card_type": spec.card_type,
        "card_count": spec.card_count,
        "quantization": spec.quantization,
        "parallel": str(spec.parallel),
        "slots": spec.slots,
        "site": spec.site,
        "labels": dict(spec.labels),
        "weight": spec.weight,
        "price_per_hour": spec.price_per_hour,
        "coefficients": None if spec.coefficients is None else spec.coefficients.version,
        "health": {"state": health.state.value, "for_s": round(now - health.since_s, 3), "detail": health.describe()},
        "draining": live.draining,
        "in_flight": {
            "requests": books.requests,
            "prefill_tokens": books.prefill_tokens,
            "context_tokens": books.context_tokens,
        },
        "sample": None if sample is None else {
            "age_s": round(sample.age_s(now), 3),
            "running_requests": sample.running_requests,
            "waiting_requests": sample.waiting_requests,
            "kv_usage_ratio": sample.kv_usage_ratio,
        },
        "served_requests": live.served_requests,
        "failed_requests": live.failed_requests,
        "ttft_ewma_s": live.ttft_ewma_s,
        "drift": round(drift_now(live.belief, live.drift, now), 4),
        "model_state": str(model_state(spec, live.belief, now)),
    }  # fmt: skip


def _result(result: ReloadResult) -> Response:
    return JSONResponse(dataclasses.asdict(result), status_code=200 if result.ok else 422)


def _set_drained(gateway: Gateway, name: str, *, drained: bool) -> Response:
    live = gateway.fleet.backends.get(name)
    if live is None:
        known = ", ".join(gateway.fleet.backends)
        raise ApiError(404, "unknown_backend", f"There is no backend {name[:64]!a}. Known: {known}.")
    live.drained_by_hand = drained
    return JSONResponse(_backend_document(live, gateway.clock()))


def whole_in(request: Request, name: str, default: int) -> int:
    """A whole number in the query. Raises ApiError (400): it is none."""
    text = request.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise ApiError(400, "invalid_request", f"{name} must be a whole number from 0 on.", param=name)
    return int(text)


def seconds_in(request: Request, name: str) -> float:
    """How long a question may be held open; 0 where nobody asks for that. Raises ApiError (400): it is no such time."""
    text = request.query_params.get(name, "0")
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds <= MAX_WAIT_S:
        raise ApiError(400, "invalid_request", f"{name} must be a number of seconds from 0 to {MAX_WAIT_S:g}.",
                       param=name)
    return seconds
