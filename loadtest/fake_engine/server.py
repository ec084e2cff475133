"""The fake engine behind a socket, with vLLM's endpoints, metrics and manners.

Beside vLLM's routes there are two of its own: `/fake/faults` (GET, POST: what goes wrong, changed live) and
`/fake/requests` (what the engine did with each request, seen from the inside).
"""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from loadtest.fake_engine import wire
from loadtest.fake_engine.driver import EngineDriver
from loadtest.fake_engine.engine import FakeEngine, FakeEngineOptions
from loadtest.fake_engine.faults import BadFault, FaultKind, read_faults
from loadtest.fake_engine.inference import CompletionRoute, EmbeddingRoute
from loadtest.fake_engine.wire import ApiError

__all__ = ["FakeEngineOptions", "FakeEngineServer", "bind", "build_app", "serve_fake_engine", "url_of"]

logger = logging.getLogger(__name__)

VLLM_VERSION = "0.32.0+fake"
METRICS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def build_app(options: FakeEngineOptions, *, die: Callable[[], None] | None = None) -> Starlette:
    """The ASGI app of one fake engine; its engine starts and ends with the lifespan.

    `die` ends the process at once, for the fault of that name; without it such faults are refused.

    Raises:
        UnknownCard: the options name a card that does not exist or cannot be simulated.
        BadFault: a death is scheduled and `die` is not given.
        ValueError: limits that make no sense.
    """
    engine = FakeEngine(options, die)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        engine.set_faults(options.faults)
        task = asyncio.create_task(engine.driver.run(), name="fake engine")
        task.add_done_callback(lambda done: _report_crash(done, engine.driver))
        try:
            yield
        finally:
            engine.set_faults(())
            engine.close()
            task.cancel()

    app = Starlette(
        routes=[
            Route("/v1/chat/completions", CompletionRoute(engine, "chat"), methods=["POST"]),
            Route("/v1/completions", CompletionRoute(engine, "completion"), methods=["POST"]),
            Route("/v1/embeddings", EmbeddingRoute(engine), methods=["POST"]),
            *_plain_routes(engine),
            *_own_routes(engine),
        ],
        exception_handlers={HTTPException: _refuse_route},
        lifespan=lifespan,
    )
    app.state.engine = engine
    return app


def _report_crash(task: asyncio.Task[None], driver: EngineDriver) -> None:
    if not task.cancelled() and (problem := task.exception()):
        logger.critical("the fake engine stopped", exc_info=problem)
        driver.abort_all()


def _plain_routes(engine: FakeEngine) -> list[Route]:
    async def models(request: Request) -> Response:
        try:
            engine.check_key(request.scope)
        except ApiError as problem:
            return Response(problem.body(), problem.status, media_type="application/json")
        name = engine.options.served_model_name
        return _json({"object": "list", "data": [{
            "id": name, "object": "model", "created": engine.created, "owned_by": "vllm", "root": engine.card.model,
            "parent": None, "max_model_len": engine.context_tokens,
        }]})

    async def health(_: Request) -> Response:
        if slow := engine.fault(FaultKind.SLOW_HEALTH):
            await asyncio.sleep(slow.delay_s)
        return Response(status_code=200)

    async def metrics(_: Request) -> Response:
        return Response(engine.metrics_page(), media_type=METRICS_CONTENT_TYPE)

    async def version(_: Request) -> Response:
        return _json({"version": VLLM_VERSION})

    async def load(_: Request) -> Response:
        return _json({"server_load": engine.in_flight})

    return [
        Route("/v1/models", models), Route("/health", health), Route("/metrics", metrics),
        Route("/version", version), Route("/load", load),
    ]


def _own_routes(engine: FakeEngine) -> list[Route]:
    def schedule() -> Response:
        faults = [str(fault) for fault in engine.driver.faults]
        return _json({"now_s": engine.driver.fault_time_s, "faults": faults})

    async def show_faults(_: Request) -> Response:
        return schedule()

    async def change_faults(request: Request) -> Response:
        """Body: `{"faults": ["slow x3 from 0 to 5", ...]}`; times count from now."""
        try:
            document = wire.decode_body(await request.body())
            if not isinstance(document.get("faults"), list):
                raise BadFault("the body must be an object with a list `faults`")
            engine.set_faults(read_faults(document["faults"]))
        except ApiError as problem:
            return Response(problem.body(), problem.status, media_type="application/json")
        except BadFault as problem:
            return Response(wire.bad_request(str(problem), "faults").body(), 400, media_type="application/json")
        return schedule()

    async def requests(_: Request) -> Response:
        return _json({
            "now_s": engine.driver.elapsed_s,
            "in_flight": engine.in_flight,
            "requests": [stream.as_row() for stream in engine.driver.ledger],
        })

    return [
        Route("/fake/faults", show_faults, methods=["GET"]),
        Route("/fake/faults", change_faults, methods=["POST"]),
        Route("/fake/requests", requests, methods=["GET"]),
    ]


def _json(document: object) -> Response:
    return Response(msgspec.json.encode(document), media_type="application/json")


async def _refuse_route(_: Request, problem: Exception) -> Response:
    status = problem.status_code if isinstance(problem, HTTPException) else 500
    kind = "NotFoundError" if status == 404 else "BadRequestError"
    detail = problem.detail if isinstance(problem, HTTPException) else "Internal Server Error"
    return Response(ApiError(status, kind, detail).body(), status, media_type="application/json")


def drop_cut_streams(record: logging.LogRecord) -> bool:
    """A log filter. Responses left unfinished are this server's trade, and uvicorn takes each for an error."""
    return record.getMessage() != "ASGI callable returned without completing response."


def uvicorn_config(app: Starlette) -> uvicorn.Config:
    """Quiet, and with little patience at the end. Logging is left as the process has it."""
    config = uvicorn.Config(
        app, http="httptools", ws="none", log_config=None, log_level="warning", access_log=False,
        timeout_graceful_shutdown=1, timeout_keep_alive=75,
    )
    logging.getLogger("uvicorn.error").addFilter(drop_cut_streams)
    return config


class FakeEngineServer(uvicorn.Server):
    """A uvicorn server that ends what its engine is doing before it waits for connections to close."""

    def __init__(self, app: Starlette) -> None:
        super().__init__(uvicorn_config(app))
        self._engine: FakeEngine = app.state.engine

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._engine.close()
        await super().shutdown(sockets)


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to that address; port 0 takes a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol left open (0), asyncio would not set TCP_NODELAY, and each answer would wait 40 ms for an ACK.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    return listener


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _EmbeddedServer(FakeEngineServer):
    """Leaves the signals to the process that it is embedded in."""

    def capture_signals(self) -> nullcontext[None]:  # type: ignore[override]
        return nullcontext()


@asynccontextmanager
async def serve_fake_engine(options: FakeEngineOptions | None = None, **changes: Any) -> AsyncIterator[str]:
    """Runs a fake engine in this event loop on a free port of loopback; yields its base URL, without /v1.

    `changes` are fields of `FakeEngineOptions`, in place of `options` given whole.
    """
    app = build_app(options or FakeEngineOptions(**changes))
    listener = bind("127.0.0.1", 0)
    server = _EmbeddedServer(app)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        while not server.started:
            if task.done():
                await task
                raise RuntimeError("the fake engine did not start")
            await asyncio.sleep(0.005)
        yield url_of(listener)
    finally:
        server.should_exit = True
        await task
        listener.close()
