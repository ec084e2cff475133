"""The lender that is a router: its word on what can be spared, its levers to let go and take back.

::

    offer       drain(epoch)   POST release     router: draining → released     then the engine is stopped
    return      serve(epoch)   POST return      router: returning → serving     while the engine starts

Level-triggered: each look compares where a backend is with where it is wanted, and orders again what did not come
about, so a router or an allocator that restarts costs a look. A backend counts as released only when the router has no
stream there *and* its engine is gone.
"""

import logging
import time
from collections.abc import Callable, Mapping

import httpx

from allocator.execution.values import Report
from allocator.lender.engines import EngineKeeper
from allocator.lender.figures import Steady, figures
from allocator.lender.publication import BadPublication, Publication, Published, read, read_backend
from allocator.model.inventory import Backend, BackendState, Supply
from allocator.service.config import Declared
from allocator.service.lender import LenderUnreachable, Seen

log = logging.getLogger("headrace.allocator.router")

HOLD_S = 5.0
"""A surplus or a want that does not last so long is none."""
TIMEOUT_S = 5.0


class RouterUnreachable(LenderUnreachable):
    """The router does not answer, or not as a router does; the text says what came."""


class RouterAdmin:
    """The admin listener of one router, as far as loans need it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._client = httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, trust_env=False)

    async def publication(self) -> Publication:
        """Raises RouterUnreachable."""
        try:
            return read((await self._ask("GET", "/admin/lending")).content)
        except BadPublication as problem:
            raise RouterUnreachable(f"{self.url}: {problem}") from problem

    async def order(self, backend: str, verb: str, epoch: int) -> Published | None:
        """`release` or `return`; `None` where the router refuses, which is logged. Raises RouterUnreachable."""
        answer = await self._ask("POST", f"/admin/backends/{backend}/{verb}?epoch={epoch}")
        if answer.is_success:
            try:
                return read_backend(answer.content)
            except BadPublication as problem:
                raise RouterUnreachable(f"{self.url}: {problem}") from problem
        log.warning("the router does not %s %s: %s", verb, backend, answer.text[:300])
        return None

    async def aclose(self) -> None:
        await self._client.aclose()

    async def _ask(self, method: str, path: str) -> httpx.Response:
        try:
            answer = await self._client.request(method, path)
        except httpx.HTTPError as problem:
            raise RouterUnreachable(f"{self.url} does not answer: {problem or type(problem).__name__}") from problem
        if answer.status_code >= 500 or (method == "GET" and not answer.is_success):
            raise RouterUnreachable(f"{self.url}{path} answered {answer.status_code}")
        return answer


class RouterLender:
    """The backends of the allocator file that a router serves. Keeps `allocator.service.lender.Lender`."""

    def __init__(self, router: RouterAdmin, engines: EngineKeeper, declared: Declared, *, hold_s: float = HOLD_S,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self._router = router
        self._engines = engines
        self._declared = declared
        self._hold_s = hold_s
        self._clock = clock
        self._is_wanted: dict[str, bool] = {}
        self._epochs: dict[str, int] = {}
        self._steady: dict[tuple[str, str], Steady] = {}
        self._told = {(supply.pool, supply.card): supply for supply in declared.supplies}
        self._complaint = ""
        self._unknown: set[str] = set()

    def redeclare(self, declared: Declared) -> None:
        """Takes over an edited file. Supplies that it states anew replace what was told."""
        before = {(supply.pool, supply.card): supply for supply in self._declared.supplies}
        for supply in declared.supplies:
            if before.get((supply.pool, supply.card)) != supply:
                self.tell(supply)
        self._declared = declared
        self._engines.redeclare(declared)

    def tell(self, supply: Supply) -> None:
        """A person's own figures, from the file or the API: they may lend less than the router can, never more."""
        self._told[supply.pool, supply.card] = supply

    def restore(self, states: Mapping[str, BackendState]) -> None:
        """See the protocol."""
        self._is_wanted = {name: state in (BackendState.SERVING, BackendState.WARMING)
                           for name, state in states.items()}

    def owns_run(self, run_id: str) -> bool:
        """See the protocol."""
        return self._engines.owns_run(run_id)

    async def aclose(self) -> None:
        """See the protocol."""
        await self._router.aclose()

    async def drain(self, backend: str, epoch: int) -> None:
        """See the protocol. Raises RouterUnreachable."""
        self._want(backend, False, epoch)
        await self._router.order(backend, "release", self._epochs[backend])

    async def serve(self, backend: str, epoch: int) -> None:
        """See the protocol. The router waits for the engine, so it is told first. Raises RouterUnreachable."""
        self._want(backend, True, epoch)
        await self._router.order(backend, "return", self._epochs[backend])
        await self._engines.start(backend)

    async def observe(self, reports: Mapping[str, Report]) -> Seen | None:
        """See the protocol."""
        await self._engines.look(reports)
        try:
            published = await self._router.publication()
            backends = [backend for one in self._declared.backends
                        if (found := published.of(one.name)) is not None
                        and (backend := await self._brought(one, found)) is not None]
        except RouterUnreachable as problem:
            self._complain(str(problem))
            return None
        self._complain("")
        self._note_unknown(published)
        return Seen(tuple(backends), self._supplies(published))

    def _want(self, backend: str, is_wanted: bool, epoch: int) -> None:
        self._is_wanted[backend] = is_wanted
        self._epochs[backend] = max(epoch, self._epochs.get(backend, 0))

    async def _brought(self, declared: Backend, found: Published) -> Backend | None:
        """The backend, a step nearer to where it is wanted."""
        name = declared.name
        # Who restarts learns from the other how far epochs have come.
        epoch = self._epochs[name] = max(found.epoch, self._epochs.get(name, 0))
        is_wanted = self._is_wanted.get(name)
        if is_wanted is None:
            # Nobody here has said anything about it yet: the router's word stands.
            if found.stage in ("serving", "returning"):
                await self._engines.start(name)
        elif is_wanted:
            if found.stage in ("draining", "released"):
                found = await self._router.order(name, "return", epoch) or found
            await self._engines.start(name)
        elif found.stage in ("serving", "returning"):
            found = await self._router.order(name, "release", epoch) or found
        elif found.stage == "released":
            await self._engines.stop(name)
        state = await self._state(found)
        return Backend(name, declared.pool, declared.card, declared.devices, state, found.return_s)

    async def _state(self, found: Published) -> BackendState:
        if found.stage == "released":
            is_gone = self._is_wanted.get(found.name) is False and await self._engines.is_gone(found.name)
            return BackendState.RELEASED if is_gone else BackendState.DRAINING
        return {"serving": BackendState.SERVING, "draining": BackendState.DRAINING}.get(
            found.stage, BackendState.WARMING)

    def _supplies(self, published: Publication) -> tuple[Supply, ...]:
        groups: dict[tuple[str, str], list[Published]] = {}
        for declared in self._declared.backends:
            found = published.of(declared.name)
            if found is not None:
                groups.setdefault((declared.pool, declared.card), []).append(found)
        supplies, now = [], self._clock()
        for (pool, card), members in groups.items():
            steady = self._steady.setdefault((pool, card), Steady(self._hold_s))
            lendable, spare = steady.after(figures(members), now)
            told = self._told.get((pool, card))
            if told is not None:
                lendable, spare = min(lendable, told.lendable), min(spare, told.spare)
            supplies.append(Supply(pool, card, lendable, spare))
        return tuple(supplies)

    def _note_unknown(self, published: Publication) -> None:
        unknown = {one.name for one in self._declared.backends if published.of(one.name) is None}
        if unknown - self._unknown:
            log.warning("the router at %s knows no backend %s; names must be those of its fleet file", self._router.url,
                        ", ".join(sorted(unknown)))
        self._unknown = unknown

    def _complain(self, problem: str) -> None:
        if problem and problem != self._complaint:
            log.warning("%s", problem)
        elif self._complaint and not problem:
            log.info("%s answers again", self._router.url)
        self._complaint = problem
