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

from router.errors import ApiError
from router.fleet import LiveBackend
from router.gateway import Gateway
from router.public import api_error_response, http_error_response, metrics_endpoint
from router.reload import ReloadResult


def admin_app(gateway: Gateway) -> Starlette:
    """Routes under /admin, and /metrics."""

    async def fleet(_: Request) -> Response:
        return JSONResponse(fleet_document(gateway))

    async def config(_: Request) -> Response:
        status = dataclasses.asdict(gateway.reloader.status())
        running = gateway.loaded.config.model_dump(mode="json")  # keys stand in it by their variables' names only
        return JSONResponse({**status, "config": running})

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

    app = Starlette(
        routes=[
            Route("/admin/fleet", fleet),
            Route("/admin/config", config),
            Route("/admin/reload", reload, methods=["POST"]),
            Route("/admin/rollback", rollback, methods=["POST"]),
            Route("/admin/backends/{name}/drain", drain, methods=["POST"]),
            Route("/admin/backends/{name}/undrain", undrain, methods=["POST"]),
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
        "policy": policy,
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
        "drift": round(live.drift, 4),
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
