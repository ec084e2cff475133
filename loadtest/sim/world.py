"""Discrete events on a virtual clock: requests arrive, gateways decide, engines iterate, cards fail and are lent.

Two kinds of events. From *outside* come arrivals, attempts that failed, polls, gossip, and what befalls a card: only
these can give an engine something to do or take it away. From *inside* come an engine's iterations and the news that
they send to the gateways. An engine therefore runs ahead to the next event from outside (`SimEngine.run`), and an
iteration that nobody will notice costs no event. Ties are settled by the order in which events were made.
"""

from collections.abc import Hashable
from heapq import heappop, heappush
from math import inf
from typing import Any

from backends.catalog.health import Probe
from backends.catalog.sample import LoadSample
from loadtest.fake_engine.step import SequenceRequest, TokenEventKind, TooLarge
from loadtest.sim.engine import News, SimEngine
from loadtest.sim.flight import Fate, Flight, Outcome
from loadtest.sim.gateway import Gateway
from loadtest.sim.link import Link, share_loads
from loadtest.sim.pools import MODEL, Pool
from loadtest.sim.telling import told_coefficients
from loadtest.sim.watching import Watch
from loadtest.sim.workload import EventKind, FleetEvent, SimRequest, Workload, dice
from policies.attempts import FailureCause
from policies.facts import RequestFacts
from policies.learning import Learner
from policies.policy import Pipeline

POLL_EVERY_S = 1.0
PATIENCE_S = 7200.0
"""Virtual time after the last arrival in which every request must have ended."""
_ITERATE, _NEWS, _FAILED, _POLL, _GOSSIP, _BEFALL = range(6)

Event = tuple[float, int, int, Any, Any]
"""When, a number that settles ties, what kind, and what about."""


class World:
    """One run. Make it, `run` it once, read `outcomes` and the live parts."""

    def __init__(
        self, pool: Pool, workload: Workload, pipelines: list[Pipeline], learners: list[Learner], seed: int
    ) -> None:
        """`pipelines` and `learners` are one for each of the workload's gateways."""
        physics = workload.physics
        self.pool = pool
        self.workload = workload
        self.outcomes: list[Outcome] = []
        self.now = 0.0
        self.half_rtt_s = physics.rtt_s / 2.0
        block = workload.prefix_block_tokens
        self.engines = [SimEngine(backend, physics, dice(seed, "engine", backend.name), block)
                        for backend in pool.backends]
        specs = [backend.told(told_coefficients(backend, physics, dice(seed, "told", backend.name)))
                 for backend in pool.backends]
        self.gateways = [
            Gateway(pipeline, learner,
                    [Link(spec, engine, self.half_rtt_s) for spec, engine in zip(specs, self.engines, strict=True)],
                    dice(seed, "gateway", number))
            for number, (pipeline, learner) in enumerate(zip(pipelines, learners, strict=True))
        ]
        self.watch = Watch(workload, pool)
        self._gateway_dice = dice(seed, "which gateway")
        self._inside: list[Event] = []
        self._outside: list[Event] = []
        self._made = 0
        self._attempts = 0
        self._flights: dict[Hashable, Flight] = {}
        self._leaving: set[int] = set()
        """Engines that drain for a loan."""
        self._open_requests = len(workload.requests)
        self._caches = bool(physics.prefix_cache_share)

    def run(self) -> "World":
        """To the end of the last request. Raises `RuntimeError` if one never ends."""
        for gateway in self.gateways:
            for link in gateway.links:
                gateway.probed(link, Probe(ok=True), 0.0)
        for number in range(len(self.engines)):
            self._push(self._outside, POLL_EVERY_S * (number + 1) / len(self.engines), _POLL, number)
        if len(self.gateways) > 1:
            self._push(self._outside, self.workload.gossip_s, _GOSSIP)
        for event in self.workload.events:
            self._push(self._outside, event.at_s, _BEFALL, event)
        self._loop()
        return self

    def _loop(self) -> None:
        inside, outside, requests = self._inside, self._outside, iter(self.workload.requests)
        upcoming = next(requests, None)
        arrival_s = upcoming.arrival_s if upcoming else inf
        while self._open_requests:
            horizon_s = min(arrival_s, outside[0][0])
            if inside and inside[0][0] < horizon_s:
                self.now, _, kind, what, more = heappop(inside)
                if kind == _NEWS:
                    self._tell(what, more)
                else:
                    self._iterate(what, more, horizon_s)
            elif upcoming is not None and arrival_s <= outside[0][0]:
                self.now = arrival_s
                self._arrive(upcoming)
                upcoming = next(requests, None)
                arrival_s = upcoming.arrival_s if upcoming else inf
            else:
                self._from_outside(heappop(outside))

    def _from_outside(self, event: Event) -> None:
        self.now, _, kind, what, more = event
        if kind == _FAILED:
            self._fail(self._flights.get(what), more)
        elif kind == _POLL:
            self._poll(what)
        elif kind == _GOSSIP:
            self._gossip()
        else:
            self._befall(what)

    def _push(self, heap: list[Event], at_s: float, kind: int, what: Any = None, more: Any = None) -> None:
        self._made += 1
        heappush(heap, (at_s, self._made, kind, what, more))

    # --- requests ------------------------------------------------------------------------------------------------

    def _arrive(self, request: SimRequest) -> None:
        number = int(self._gateway_dice.random() * len(self.gateways)) if len(self.gateways) > 1 else 0
        facts = RequestFacts(
            MODEL, request.prompt_tokens, request.max_output_tokens,
            stream=True, latency_class=request.latency_class,
            budget=self.workload.classes[request.latency_class].budget, tenant=request.tenant,
            session_key=request.session_key, prefix_keys=request.prefix_keys,
            prefix_block_tokens=self.workload.prefix_block_tokens,
            sheddable=self.workload.sheddable)
        flight = Flight(request, number, facts)
        self.gateways[number].arrived(flight)
        self._send(flight)

    def _send(self, flight: Flight) -> None:
        """Decide and send; a request that nobody takes ends here."""
        gateway = self.gateways[flight.gateway]
        self._attempts += 1
        flight.number = self._attempts
        decision = gateway.decide(flight, self.now)
        self.watch.decided(flight, gateway, self.now)
        if decision.chosen is None:
            self._end(flight, Fate.LOST if decision.retry_after_s is None else Fate.SHED, None, 0)
            return
        self._flights[flight.number] = flight
        engine = self.engines[flight.backend]
        back_s = self.now + 2.0 * self.half_rtt_s
        if not engine.alive:
            self._push(self._outside, back_s, _FAILED, flight.number, FailureCause.CONNECT)
            return
        request = flight.request
        try:
            engine.submit(SequenceRequest(flight.number, request.prompt_tokens, request.output_tokens,
                                          self.now + self.half_rtt_s, prefix_keys=request.prefix_keys))
        except TooLarge:
            self._push(self._outside, back_s, _FAILED, flight.number, FailureCause.CLIENT_ERROR)
            return
        if not engine.scheduled:
            engine.scheduled = True
            start_s = engine.next_start_s()
            assert start_s is not None
            self._push(self._inside, max(start_s, self.now), _ITERATE, flight.backend, engine.life)

    def _end(self, flight: Flight, fate: Fate, backend: int | None, cached_tokens: int) -> None:
        request = flight.request
        cost = flight.spent
        if fate is Fate.SERVED and backend is not None:
            cost += self.pool.backends[backend].cost(request.prompt_tokens, cached_tokens, request.output_tokens)
        first_s = flight.first_token_at_s
        kept = fate is Fate.SERVED and first_s is not None and self._in_budget(request, first_s, self.now)
        self._open_requests -= 1
        self.outcomes.append(Outcome(
            request, fate, backend, first_s, self.now, len(flight.failures) + (fate is Fate.SERVED), cost,
            cached_tokens, flight.ttft_p99_s, flight.e2e_p99_s, flight.miss, kept))

    def _in_budget(self, request: SimRequest, first_token_at_s: float, end_s: float) -> bool:
        """First token and last token, each by its deadline; what an early first token saves may be spent later."""
        budget = self.workload.classes[request.latency_class].budget
        took_s = end_s - request.arrival_s
        if budget.e2e_s is not None and took_s > budget.e2e_s:
            return False
        if budget.ttft_s is None:
            return True
        if first_token_at_s - request.arrival_s > budget.ttft_s:
            return False
        return budget.inter_token_s is None or took_s <= (
            budget.ttft_s + (request.output_tokens - 1) * budget.inter_token_s)

    def _fail(self, flight: Flight | None, cause: FailureCause) -> None:
        """An attempt has failed, as its gateway sees it now."""
        if flight is None:
            return
        del self._flights[flight.number]
        gateway, backend = self.gateways[flight.gateway], flight.backend
        begun = flight.first_token_at_s is not None
        if begun:
            tokens = gateway.links[backend].tokens_of(flight)
            flight.spent += self.pool.backends[backend].cost(flight.request.prompt_tokens, 0, tokens)
        if gateway.failed(flight, cause, self.now):
            self._send(flight)
        else:
            self._end(flight, Fate.LOST, backend, 0)

    # --- engines -------------------------------------------------------------------------------------------------

    def _iterate(self, number: int, life: int, horizon_s: float) -> None:
        """Let an engine run up to the next event from outside; what it sends meanwhile is under way."""
        engine = self.engines[number]
        if life != engine.life:
            return
        came = engine.run(horizon_s)
        while isinstance(came, News):
            self._push(self._inside, came.at_s + self.half_rtt_s, _NEWS, number, came)
            came = engine.run(horizon_s)
        if came is None:
            engine.scheduled = False
        else:
            self._push(self._inside, came, _ITERATE, number, life)

    def _tell(self, number: int, news: News) -> None:
        """What an iteration brought reaches the gateways."""
        engine = self.engines[number]
        if news.life != engine.life:
            return
        now, flights = self.now, self._flights
        for event in news.events:
            flight = flights.get(event.id)
            if flight is None:
                continue
            gateway = self.gateways[flight.gateway]
            link = gateway.links[number]
            if event.kind is TokenEventKind.PREEMPTED:
                link.advance(news.rounds_before)
                link.pauses(flight)
                continue
            link.advance(news.rounds)
            if event.kind is TokenEventKind.FIRST_TOKEN:
                gateway.first_token(flight, now)
            elif event.kind is TokenEventKind.RESUMED:
                link.resumes(flight)
            else:
                cached = engine.take_cached(event.id) if self._caches else 0
                del flights[flight.number]
                gateway.finished(flight, cached if self._caches else None, now)
                self._end(flight, Fate.SERVED, number, cached)
        if news.reports:
            for gateway in self.gateways:
                link = gateway.links[number]
                link.advance(news.rounds)
                link.report_pace(gateway.learner, now)
        if number in self._leaving:
            self._let_go(number)

    # --- the fleet -----------------------------------------------------------------------------------------------

    def _poll(self, number: int) -> None:
        """Every gateway probes and scrapes one backend."""
        engine, now = self.engines[number], self.now
        if now > self.workload.seconds + PATIENCE_S:
            raise RuntimeError(f"{self._open_requests} requests have not ended by {now:.0f} s")
        self._push(self._outside, now + POLL_EVERY_S, _POLL, number)
        if engine.alive:
            state = engine.state
            sample = LoadSample(
                now, state.running_seqs, state.waiting_seqs, state.kv_usage_ratio, state.limits.kv_capacity_tokens)
            probe = Probe(ok=True)
        else:
            probe = Probe(ok=False, detail="connection refused")
        for gateway in self.gateways:
            link = gateway.links[number]
            if engine.alive:
                link.take_sample(sample, now)
            # A backend that is lent is gone from the fleet; nobody probes it.
            if engine.alive or not link.draining:
                gateway.probed(link, probe, now)

    def _gossip(self) -> None:
        for links in zip(*[gateway.links for gateway in self.gateways], strict=True):
            share_loads(links, self.now)
        self._push(self._outside, self.now + self.workload.gossip_s, _GOSSIP)

    def _befall(self, event: FleetEvent) -> None:
        for number, engine in enumerate(self.engines):
            if engine.backend.family == event.family:
                self._befall_one(number, engine, event)

    def _befall_one(self, number: int, engine: SimEngine, event: FleetEvent) -> None:
        match event.kind:
            case EventKind.SLOW:
                engine.slow_factor = event.factor
            case EventKind.DIE:
                self._break_off(number)
                engine.die()
            case EventKind.RETURN:
                engine.revive(self.now)
            case EventKind.DRAIN:
                for gateway in self.gateways:
                    gateway.drained(gateway.links[number], True)
                self._leaving.add(number)
                self._let_go(number)
            case EventKind.RECALL:
                self._leaving.discard(number)
                if not engine.alive:
                    engine.revive(self.now)
                    for gateway in self.gateways:
                        gateway.came_back_cold(gateway.links[number])
                        gateway.probed(gateway.links[number], Probe(ok=True), self.now)
                for gateway in self.gateways:
                    gateway.drained(gateway.links[number], False)

    def _let_go(self, number: int) -> None:
        """A card that is to be lent goes with its last stream."""
        if not any(gateway.links[number].books.requests for gateway in self.gateways):
            self._leaving.discard(number)
            self.engines[number].die()

    def _break_off(self, number: int) -> None:
        """All streams of a dying engine break; their gateways notice half a round trip later."""
        for gateway in self.gateways:
            link = gateway.links[number]
            link.advance(self.engines[number].visible_rounds(self.now))
            for flight in (*link.waiting.values(), *link.emitting.values(), *link.paused.values()):
                cause = (FailureCause.RESET_BEFORE_BYTE if flight.first_token_at_s is None
                         else FailureCause.TRUNCATED)
                self._push(self._outside, self.now + self.half_rtt_s, _FAILED, flight.number, cause)
