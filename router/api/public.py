"""What clients see besides the inference routes: models, health, metrics, and errors in OpenAI's shape for the rest."""

import asyncio
from time import time
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from router.gateway import Gateway
from router.keys.ring import sole_authorization
from router.request.intake import Endpoint, request_id_of
from router.wire.errors import ApiError, method_not_allowed, not_found, unauthorized

OWNER = "headrace"


def public_app(gateway: Gateway) -> Starlette:
    """Every route but the inference requests, which `hotprotocol` keeps to itself."""
    started_at = int(time())

    def card(name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": started_at, "owned_by": OWNER}

    async def list_models(request: Request) -> Response:
        _authorize(gateway, request)
        names = [model.name for model in gateway.loaded.config.models]
        return JSONResponse({"object": "list", "data": [card(name) for name in names]})

    async def show_model(request: Request) -> Response:
        _authorize(gateway, request)
        name = request.path_params["name"]
        vocabulary = gateway.dispatcher.generation.vocabulary
        if name not in vocabulary.models:
            raise ApiError(404, "model_not_found", f"The model {name[:64]!a} does not exist here.", param="model")
        return JSONResponse(card(name))

    async def liveness(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def readiness(_: Request) -> Response:
        ready = gateway.ready()
        word = "ready" if ready else "stopping" if gateway.stopping else "no backend can take requests"
        return JSONResponse({"status": word}, status_code=200 if ready else 503)

    async def elsewhere(_: Request) -> Response:
        raise not_found()  # an inference path in an odd spelling, or with a query: the plain one never gets here

    app = Starlette(
        routes=[
            *[Route(endpoint.value, elsewhere, methods=["POST"]) for endpoint in Endpoint],
            Route("/v1/models", list_models),
            Route("/v1/models/{name:path}", show_model),
            Route("/health", liveness),
            Route("/liveness", liveness),
            Route("/readiness", readiness),
            Route("/metrics", metrics_endpoint(gateway)),
        ],
        exception_handlers={ApiError: api_error_response, HTTPException: http_error_response, Exception: _crash},
    )
    app.router.redirect_slashes = False  # a redirect would name this host, and may resend a body in the clear
    return app


def _authorize(gateway: Gateway, request: Request) -> None:
    authorization = sole_authorization(request.scope["headers"])
    if gateway.dispatcher.generation.keys.authenticate(authorization) is None:
        raise unauthorized()


def metrics_endpoint(gateway: Gateway) -> Any:
    """GET handler for the Prometheus page, rendered off the loop: it takes milliseconds on a large fleet."""

    async def metrics(_: Request) -> Response:
        page = await asyncio.to_thread(generate_latest, gateway.metrics.registry)
        return Response(page, media_type=CONTENT_TYPE_PLAIN_0_0_4)

    return metrics


def error_response(error: ApiError, request: Request) -> Response:
    """An error with its headers and the request's id."""
    response = Response(error.body(), status_code=error.status)
    for name, value in error.response_headers():
        response.headers[name.decode("ascii")] = value.decode("ascii")
    response.headers["x-request-id"] = request_id_of(dict(request.scope["headers"]))
    return response


async def api_error_response(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error, request)


async def http_error_response(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        allow = (error.headers or {}).get("Allow", "GET")
        return error_response(method_not_allowed(allow), request)
    if error.status_code == 404:
        return error_response(not_found(), request)
    return error_response(ApiError(error.status_code, "http_error", str(error.detail)), request)


async def _crash(request: Request, _: Exception) -> Response:
    return error_response(ApiError(500, "internal_error", "The gateway failed."), request)
