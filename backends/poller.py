"""Watches every backend on its own schedule: is it there, is it the right one, and how loaded does it say it is.

Each backend has its own task and its own connections, so a hung one delays nobody. A check opens a fresh connection:
it then tests what a new request would meet, and never fails on a kept-alive connection that the engine just closed.

What a probe says, and what it leaves to `backends.catalog.health`:

- answered well, in under half the timeout: `ok`; in more: `ok` and `slow`
- no answer within the timeout: not `ok`, `slow`. Overload does this too, so it is weighed against served requests.
- refused, reset, an error status, or another model than the fleet file says: not `ok`, not `slow`
"""

import asyncio
import logging
import random
import ssl
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import httpx
import msgspec

from backends.catalog.health import Probe
from backends.catalog.sample import LoadSample
from backends.catalog.spec import BackendSpec
from backends.engines import DIALECTS, Dialect
from backends.engines.exposition import MAX_PAGE_BYTES

log = logging.getLogger(__name__)

T = TypeVar("T")
OnSample = Callable[[str, LoadSample], None]
OnProbe = Callable[[str, Probe], None]

MAX_MODELS_BYTES = 1024 * 1024
JITTER_SHARE = 0.1
"""Each wait is drawn from ±10 %, so that backends and routers that start together do not poll in step."""


class _Model(msgspec.Struct):
    id: str
    aliases: list[str] = []
    """llama.cpp's."""


class _Models(msgspec.Struct):
    data: list[_Model]


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    body: bytes
    whole: bool
    """False where the body went on past the cap."""
    took_s: float


class Poller:
    """Polls health, identity and metrics of each backend until closed, and never raises for what a backend does.

    `on_probe(name, probe)` and `on_sample(name, sample)` are called in the event loop, between `run` and `aclose`, and
    never for a backend that `update` has removed; one that raises is logged. A failed scrape calls nothing: the last
    sample grows old instead.
    """

    def __init__(
        self,
        specs: Sequence[BackendSpec],
        *,
        interval_s: float = 1.0,
        timeout_s: float = 1.0,
        on_sample: OnSample,
        on_probe: OnProbe,
        clock: Callable[[], float] = time.monotonic,
        identity_interval_s: float = 10.0,
        dialects: Mapping[str, Dialect] = DIALECTS,
        rng: random.Random | None = None,
    ) -> None:
        self.interval_s = interval_s
        self.timeout_s = timeout_s
        self.identity_interval_s = identity_interval_s
        self.on_sample = on_sample
        self.on_probe = on_probe
        self.clock = clock
        self.rng = rng or random.Random()
        self._dialects = dialects
        self._tls = httpx.create_ssl_context(trust_env=False)
        self._watches: dict[str, tuple[BackendSpec, asyncio.Task[None]]] = {}
        self._retired: set[asyncio.Task[None]] = set()
        self._closed = asyncio.Event()
        self._running = False
        self._specs = self._checked(specs)

    async def run(self) -> None:
        """Poll until `aclose` or cancellation; on return no task and no connection is left."""
        self._running = True
        try:
            self._reconcile()
            await self._closed.wait()
        finally:
            self._running = False
            for name in list(self._watches):
                self._retire(name)
            if self._retired:
                await asyncio.wait(set(self._retired))

    def update(self, specs: Sequence[BackendSpec], *, interval_s: float | None = None,
               timeout_s: float | None = None) -> None:
        """Watch these backends from now on; one whose address, engine, model and key stay keeps its schedule.

        Raises `ValueError`, and changes nothing, where a backend's engine has no dialect.
        """
        self._specs = self._checked(specs)
        self.interval_s = self.interval_s if interval_s is None else interval_s
        self.timeout_s = self.timeout_s if timeout_s is None else timeout_s
        if self._running:
            self._reconcile()

    async def aclose(self) -> None:
        """Stop polling. `run` returns once each watch has let go of its connections."""
        self._closed.set()
        for name in list(self._watches):
            self._retire(name)
        if self._retired:
            await asyncio.wait(set(self._retired))

    def _checked(self, specs: Iterable[BackendSpec]) -> dict[str, BackendSpec]:
        checked = {spec.name: spec for spec in specs}
        for spec in checked.values():
            if spec.engine not in self._dialects:
                raise ValueError(f"backend {spec.name}: no dialect for engine {spec.engine!r}; "
                                 f"known: {', '.join(sorted(self._dialects))}")
        return checked

    def _reconcile(self) -> None:
        for name, (old, _) in list(self._watches.items()):
            new = self._specs.get(name)
            if new is None or (new.identity, new.api_key) != (old.identity, old.api_key):
                self._retire(name)
        for name, spec in self._specs.items():
            if name not in self._watches:
                watch = _Watch(self, spec, self._dialects[spec.engine], self._tls)
                self._watches[name] = (spec, asyncio.create_task(watch.run(), name=f"poll {name}"))

    def _retire(self, name: str) -> None:
        _, task = self._watches.pop(name)
        task.cancel()
        self._retired.add(task)
        task.add_done_callback(self._retired.discard)


class _Watch:
    """One backend's schedule."""

    def __init__(self, poller: Poller, spec: BackendSpec, dialect: Dialect, tls: ssl.SSLContext) -> None:
        self._poller = poller
        self._spec = spec
        self._dialect = dialect
        self._tls = tls
        self._headers = {"accept-encoding": "identity", "user-agent": "headrace-poller"}
        if spec.api_key:
            self._headers["authorization"] = f"Bearer {spec.api_key}"
        self._client = self._new_client()
        self._identity_due_s = float("-inf")

    async def run(self) -> None:
        try:
            while True:
                started_s = self._poller.clock()
                await self._poll_once()
                jitter = self._poller.rng.uniform(1.0 - JITTER_SHARE, 1.0 + JITTER_SHARE)
                left_s = self._poller.interval_s * jitter - (self._poller.clock() - started_s)
                await asyncio.sleep(max(0.01, left_s))
        finally:
            await self._client.aclose()

    async def _poll_once(self) -> None:
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._check())
                both.create_task(self._scrape())
        except* Exception:  # a schedule outlives its worst day
            log.exception("poll of backend %s failed", self._spec.name)

    async def _check(self) -> None:
        probe = await self._probe()
        if not probe.ok:
            self._identity_due_s = float("-inf")  # whoever answers next may be somebody else
        self._tell(self._poller.on_probe, probe)

    async def _probe(self) -> Probe:
        path = self._dialect.health_path
        answer = await self._get(path, MAX_MODELS_BYTES)
        if isinstance(answer, Probe):
            return answer
        slow = answer.took_s > self._poller.timeout_s / 2
        if answer.status == 429:
            return Probe(ok=True, slow=True, detail=f"GET {path} answered 429")
        if not 200 <= answer.status < 300:
            return Probe(ok=False, detail=f"GET {path} answered {answer.status}{_advice(answer.status)}")
        stranger = await self._stranger(answer)
        if stranger:
            return Probe(ok=False, detail=stranger)
        return Probe(ok=True, slow=slow, detail=f"answered in {answer.took_s:.2f} s" if slow else "")

    async def _stranger(self, health: _Answer) -> str:
        """What is wrong with who answers there; empty where nothing is, or where the engine does not say."""
        now = self._poller.clock()
        if self._dialect.health_path != self._dialect.models_path:
            if now < self._identity_due_s:
                return ""
            answer = await self._get(self._dialect.models_path, MAX_MODELS_BYTES)
            if isinstance(answer, Probe) or not 200 <= answer.status < 300:
                return ""
            health = answer
        names = _served_names(health)
        if names and self._spec.served_model_name not in names:
            listed = ", ".join(sorted(names)[:5])
            return f"serves {listed}, not {self._spec.served_model_name}"
        self._identity_due_s = now + self._poller.identity_interval_s
        return ""

    async def _scrape(self) -> None:
        if self._dialect.metrics_path is None:
            return
        answer = await self._get(self._dialect.metrics_path, MAX_PAGE_BYTES)
        if isinstance(answer, Probe) or answer.status != 200 or not answer.whole:
            return
        self._tell(self._poller.on_sample, self._dialect.parse_metrics(answer.body, self._poller.clock()))

    def _tell(self, listener: Callable[[str, T], None], news: T) -> None:
        try:
            listener(self._spec.name, news)
        except Exception:
            log.exception("news of backend %s was not taken", self._spec.name)

    async def _get(self, path: str, cap_bytes: int) -> _Answer | Probe:
        """GET `path`, reading `cap_bytes` at most; a failed probe where there was no answer."""
        timeout_s = self._poller.timeout_s
        late = Probe(ok=False, slow=True, detail=f"GET {path}: no answer within {timeout_s:g} s")
        started_s = self._poller.clock()
        client = self._client
        try:
            # httpx bounds each read, and a server that drips bytes passes those for ever: the outer limit is for it.
            async with asyncio.timeout(1.5 * timeout_s):
                answer = await self._read(client, path, cap_bytes, started_s)
        except httpx.TimeoutException:
            return late
        except TimeoutError:
            # A request cancelled from outside can leave its connection on httpx's books for ever.
            if client is self._client:
                self._client = self._new_client()
            await client.aclose()
            return late
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            return Probe(ok=False, detail=f"GET {path}: {_words(error)}")
        return answer if answer.took_s <= timeout_s else late

    async def _read(self, client: httpx.AsyncClient, path: str, cap_bytes: int, started_s: float) -> _Answer:
        url = self._spec.url.rstrip("/") + path
        body = bytearray()
        whole = True
        async with client.stream("GET", url, headers=self._headers, timeout=self._poller.timeout_s) as response:
            # Raw, since a small compressed body may be a very large one.
            async for chunk in response.aiter_raw():
                body += chunk[: cap_bytes - len(body) + 1]
                if len(body) > cap_bytes:
                    whole = False
                    break
        return _Answer(response.status_code, bytes(body), whole, self._poller.clock() - started_s)

    def _new_client(self) -> httpx.AsyncClient:
        # No environment: a proxy variable must not come between a router and its backends.
        return httpx.AsyncClient(
            verify=self._tls, trust_env=False, follow_redirects=False,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        )


def _served_names(answer: _Answer) -> set[str]:
    try:
        models = msgspec.json.decode(answer.body, type=_Models) if answer.whole else _Models([])
    except (ValueError, RecursionError):  # not a model list, so no evidence
        return set()
    return {name for model in models.data for name in (model.id, *model.aliases)}


def _advice(status: int) -> str:
    if status in (401, 403):
        return ": its key is wrong or missing"
    if status == 404:
        return ": is this the right engine?"
    return ": redirects are not followed" if 300 <= status < 400 else ""


def _words(error: Exception) -> str:
    return (str(error) or type(error).__name__)[:160]
