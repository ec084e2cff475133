"""The live state of all backends. Hands out one frozen `FleetView` per decision; nothing else of it is read to decide.

Everything here runs on the event loop, and no method awaits: two requests never see each other's half-made changes.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import is_
from time import monotonic
from typing import Any, Protocol

from backends.catalog.health import (
    Health,
    HealthRules,
    HealthState,
    Outcome,
    OutcomeKind,
    Probe,
    hold_last_healthy,
    step_health,
)
from backends.catalog.sample import LoadSample
from backends.catalog.spec import BackendSpec
from backends.catalog.views import BackendView, FleetView
from backends.turns import Turns
from backends.upstream import PoolLimits, UpstreamPool
from policies.estimate import DRIFT_RANGE, predict
from policies.facts import RequestFacts
from policies.learning import Learner, NoLearner
from router.fleet.feedback import Pacing
from router.fleet.leases import Books, Lease
from router.request.intake import Endpoint

EWMA_WEIGHT = 0.1
BLAMELESS = frozenset({
    OutcomeKind.CLIENT_ERROR, OutcomeKind.CLIENT_GONE, OutcomeKind.EXCUSED, OutcomeKind.OVERLOADED,
    OutcomeKind.SUPERSEDED,
})
"""Ends of attempts that are no failure of their backend."""
LATELY_UP_S = 30.0
"""A backend that has been out for longer is not waited for."""
BOOK_SUCCESSES_EVERY_S = 0.1
MIN_TOKENS_FOR_DRIFT = 8
"""A shorter stream says more of its start than of its pace."""


class Siblings(Protocol):
    """The other worker processes of this gateway, as a fleet sees them (`router.workers.peers`)."""

    def arrange(self, backends: Iterable["LiveBackend"]) -> None:
        """These are the backends now: give each that has none a place in shared memory."""

    def loads(self) -> Sequence[int]:
        """In flight over all processes, four figures a slot. Brings in what the others found out, first."""

    def publish(self, live: "LiveBackend") -> None:
        """Its health or its silence has changed."""


class LiveBackend:
    """One backend that serves, or still finishes what it has."""

    def __init__(
        self, spec: BackendSpec, limits: PoolLimits, clock: Callable[[], float] = monotonic, turns: Turns | None = None
    ) -> None:
        self._clock = clock
        self.spec = spec
        self.pool = UpstreamPool(spec.url, limits, turns=turns)
        self.health = Health()
        self.sample: LoadSample | None = None
        self.in_flight_at_sample: int | None = None
        self.books = Books()
        self.pacing = Pacing()
        self.slot = -1
        """Where it stands in shared memory; -1 where nothing is shared."""
        self.siblings: Siblings | None = None
        self.drained_by_hand = False
        self.lent = False
        """Let go, or not yet back (`router.lending.stages`)."""
        self.retired = False
        self.silent_until_s = 0.0
        self.silence_asked_until_s = 0.0
        self.drift = 1.0
        self.ttft_ewma_s: float | None = None
        self.served_requests = 0
        self.unbooked_successes = 0
        """Successes that the health machine has not been told of yet (`Fleet.on_outcome`)."""
        self.failed_requests = 0
        self._heads: dict[tuple[Endpoint, bool, str | None], bytes] = {}
        self._view: BackendView | None = None
        self._load: Sequence[int] = ()
        self.last_outcome_at_s: float | None = None
        self.was_up_until_s: float | None = None
        """When its health last took it out of service; `None` where it was never known to be well."""

    @property
    def draining(self) -> bool:
        return self.spec.weight == 0 or self.drained_by_hand or self.lent

    @property
    def backoff_until_s(self) -> float:
        """Until when the backend asked for silence."""
        return self.silent_until_s

    @backoff_until_s.setter
    def backoff_until_s(self, until_s: float) -> None:
        self.silent_until_s = until_s
        if self.siblings is not None:
            self.siblings.publish(self)

    def rest_until(self, until_s: float, *, asked: bool) -> None:
        """Leave it alone until then; `asked` where it named that time itself."""
        self.backoff_until_s = max(self.backoff_until_s, until_s)
        if asked:
            self.silence_asked_until_s = max(self.silence_asked_until_s, until_s)

    def load(self, loads: Sequence[int] | None = None) -> Sequence[int]:
        """What is in flight there, in the order of `Books.cells`: by its own books, or out of the sum over all."""
        start = 4 * self.slot
        return self.books.cells.tolist() if loads is None or start < 0 else loads[start : start + 4]

    @property
    def belief(self) -> Any:
        """What its learner believed at the last decision: a live look, or `None`."""
        return None if self._view is None else self._view.belief

    def seen(self, belief: Any) -> BackendView:
        """Its frozen picture as of now."""
        return self.view(self.load(None if self.siblings is None else self.siblings.loads()), belief)

    def view(self, load: Sequence[int], belief: Any = None) -> BackendView:
        """Its frozen picture with that `load`, and with what its learner believes. One that has not changed is given
        out again, with what was worked out of it."""
        view = self._view
        if (view is None or load != self._load or belief is not view.belief
                or self.last_outcome_at_s is not view.last_outcome_at_s or self.health is not view.health
                or self.sample is not view.sample or self.spec is not view.spec
                or self.served_requests != view.served_requests or self.drift != view.drift
                or self.silent_until_s != view.backoff_until_s or self.draining is not view.draining
                or self.silence_asked_until_s != view.silence_asked_until_s):  # fmt: skip
            self._load = load
            view = self._view = self._make_view(load, belief)
        return view

    def _make_view(self, load: Sequence[int], belief: Any) -> BackendView:
        prefill_requests, prefill_tokens, decode_requests, context_tokens = load
        return BackendView(
            spec=self.spec,
            health=self.health,
            draining=self.draining,
            in_flight_requests=prefill_requests + decode_requests,
            in_flight_prefill_requests=prefill_requests,
            in_flight_prefill_tokens=prefill_tokens,
            in_flight_decode_requests=decode_requests,
            in_flight_context_tokens=context_tokens,
            sample=self.sample,
            in_flight_at_sample=self.in_flight_at_sample,
            backoff_until_s=self.silent_until_s,
            silence_asked_until_s=self.silence_asked_until_s,
            drift=self.drift,
            served_requests=self.served_requests,
            last_outcome_at_s=self.last_outcome_at_s,
            belief=belief,
        )

    def head(self, endpoint: Endpoint, stream: bool) -> bytes:
        """Request line and headers of all requests to one route of it, made once."""
        api_key = self.spec.api_key
        head = self._heads.get((endpoint, stream, api_key))
        if head is None:
            accept = b"text/event-stream" if stream else b"application/json"
            headers = [(b"content-type", b"application/json"), (b"accept", accept), (b"accept-encoding", b"identity"),
                       (b"user-agent", b"headrace")]  # fmt: skip
            if api_key is not None:
                headers.append((b"authorization", b"Bearer " + api_key.encode("ascii")))
            head = self.pool.head(endpoint.encode("ascii"), headers)
            self._heads = {key: kept for key, kept in self._heads.items() if key[2] == api_key}
            self._heads[endpoint, stream, api_key] = head
        return head

    def lease(self, prompt_tokens: int) -> "BackendLease":
        """Books for one attempt; the pool of a retired backend closes with its last lease."""
        return BackendLease(self, prompt_tokens)

    def retire(self) -> None:
        """No longer in the configuration: finish open streams, then close."""
        self.retired = True
        if self.books.requests == 0:
            self.pool.close()

    def observe_ttft(self, ttft_s: float) -> None:
        known = self.ttft_ewma_s
        self.ttft_ewma_s = ttft_s if known is None else known + EWMA_WEIGHT * (ttft_s - known)

    def expected_pace_s(self, facts: RequestFacts, decided_on: BackendView) -> float:
        """What the coefficients say of the request's time per token, drift left out."""
        return predict(facts, replace(decided_on, drift=1.0), self._clock()).tpot_s

    def observe_pace(self, expected_tpot_s: float, tpot_s: float, generated_tokens: int) -> None:
        """Move the drift factor by one finished stream: what its pace was over what was expected.

        An EWMA of the log ratio, so that twice too slow and twice too fast weigh alike.
        """
        if generated_tokens < MIN_TOKENS_FOR_DRIFT or not (expected_tpot_s > 0 and math.isfinite(expected_tpot_s)):
            return
        low, high = DRIFT_RANGE
        ratio = min(high, max(low, tpot_s / expected_tpot_s))
        self.drift = math.exp((1 - EWMA_WEIGHT) * math.log(self.drift) + EWMA_WEIGHT * math.log(ratio))


class BackendLease(Lease):
    """A lease that lets a retired backend go when it was the last."""

    __slots__ = ("_backend",)

    def __init__(self, backend: LiveBackend, prompt_tokens: int) -> None:
        super().__init__(backend.books, prompt_tokens)
        self._backend = backend

    def settle(self) -> None:
        super().settle()
        if self._backend.retired and self._backend.books.requests == 0:
            self._backend.pool.close()


class Fleet:
    """All backends of one gateway process."""

    def __init__(
        self,
        *,
        pool_limits: PoolLimits | None = None,
        clock: Callable[[], float] = monotonic,
        on_transition: Callable[[str, Health, Health], None] | None = None,
    ) -> None:
        self._clock = clock
        self._pool_limits = pool_limits or PoolLimits()
        self.turns = Turns()
        """Of the loop, for whatever could fill several."""
        self._rules = HealthRules()
        self._on_transition = on_transition
        self.on_change: Callable[[], None] | None = None
        """Called when a backend's health state has changed, whoever found out."""
        self._sequence = 0
        self._views: tuple[BackendView, ...] = ()
        self.pool_belief: Any = None
        """What the learner believed of the whole at the last decision."""
        self.learner: Learner = NoLearner()
        """What it believes stands on every view."""
        self.siblings: Siblings | None = None
        self.backends: dict[str, LiveBackend] = {}
        self.retiring: list[LiveBackend] = []
        self.config_hash = ""

    def apply(self, specs: Iterable[BackendSpec], rules: HealthRules, config_hash: str) -> None:
        """Take over a configuration. A backend whose identity is unchanged keeps its live state and connections."""
        before = self.backends
        after: dict[str, LiveBackend] = {}
        for spec in specs:
            live = before.get(spec.name)
            if live is not None and live.spec.identity == spec.identity:
                if live.spec.coefficients != spec.coefficients:
                    self.learner.forget(spec.name)  # what it learned is how far the old ones were off
                live.spec = spec
            else:
                live = LiveBackend(spec, self._pool_limits, self._clock, self.turns)
            after[spec.name] = live
        kept = set(map(id, after.values()))
        gone = [live for live in before.values() if id(live) not in kept]
        self.backends, self._rules, self.config_hash = after, rules, config_hash
        self.retiring = [live for live in self.retiring if live.books.requests] + gone
        for live in gone:
            self.learner.forget(live.spec.name)
            live.retire()
        if self.siblings is not None:
            self.siblings.arrange(after.values())

    def view(self) -> FleetView:
        """The frozen picture for one decision."""
        self._sequence += 1
        return self._picture(self._clock(), self._sequence - 1)

    def preview(self) -> FleetView:
        """The picture that the next decision will see, for whoever only looks."""
        return self._picture(self._clock(), self._sequence)

    def _picture(self, now: float, sequence: int) -> FleetView:
        belief, siblings = self.learner.belief, self.siblings
        if siblings is None:
            views = [live.view(live.books.cells.tolist(), belief(name, now)) for name, live in self.backends.items()]
        else:
            loads = siblings.loads()
            views = [live.view(live.load(loads), belief(name, now)) for name, live in self.backends.items()]
        known = self._views
        if len(known) != len(views) or not all(map(is_, known, views)):
            known = self._views = tuple(views)  # else the same tuple as before: a policy may remember by it
        self.pool_belief = self.learner.pool_belief(now)
        return FleetView(known, self.config_hash, sequence, self.pool_belief)

    def on_sample(self, name: str, sample: LoadSample) -> None:
        live = self.backends.get(name)
        if live is not None:
            live.sample = sample
            prefilling, _, decoding, _ = live.load(None if self.siblings is None else self.siblings.loads())
            live.in_flight_at_sample = prefilling + decoding

    def on_probe(self, name: str, probe: Probe, *, told: bool = True) -> None:
        """Book a probe. One that a sibling made and counts is not `told` on."""
        live = self.backends.get(name)
        if live is not None:
            self._book_successes(live)
            self._enter(live, step_health(live.health, probe, self._clock(), self._rules), told=told)

    def adopt(self, live: LiveBackend, found: Health) -> None:
        """Take over what a sibling found out about a backend's health."""
        self._enter(live, found, told=False)

    def on_outcome(self, live: LiveBackend, kind: OutcomeKind) -> None:
        """Book the end of one attempt. Also takes outcomes of backends that a reload has removed."""
        if kind is OutcomeKind.SUCCESS:
            now = self._clock()
            live.served_requests += 1
            live.last_outcome_at_s = now
            live.unbooked_successes += 1
            health = live.health
            # Successes in a row change nothing but counts, so on a backend that is well they are told together.
            if (health.state is HealthState.HEALTHY and not health.held and not health.failures
                    and now - health.recent_at_s < BOOK_SUCCESSES_EVERY_S):  # fmt: skip
                return
            self._book_successes(live)
            return
        if kind not in BLAMELESS:
            live.failed_requests += 1
            live.last_outcome_at_s = self._clock()
        self._book_successes(live)
        self._step(live, Outcome(kind))

    def health_of_model(self, model: str) -> Mapping[str, Health]:
        """Health of each backend that serves `model` and is not draining."""
        return {
            name: live.health
            for name, live in self.backends.items()
            if live.spec.model == model and not live.draining
        }

    def ready(self, now: float) -> bool:
        """Some backend may be sent a request."""
        return any(
            not live.draining and live.health.accepts(live.books.requests, now) for live in self.backends.values()
        )

    def back_in_s(self, now: float) -> float:
        """Seconds until the next backend may come back by itself; a second where none has a date."""
        dates = [max(live.health.until_s, live.backoff_until_s) - now for live in self.backends.values()]
        return min((date for date in dates if date > 0), default=1.0)

    def expected_back_s(self, model: str, now: float) -> float | None:
        """Seconds until a backend of the model may take requests again; `None` where one may at any time, infinite
        where none is expected."""
        soonest_s = math.inf
        for live in self.backends.values():
            if live.spec.model != model or live.draining:
                continue
            health = live.health.at(now)
            if health.state is HealthState.EJECTED:
                soonest_s = min(soonest_s, health.until_s - now)
            elif health.state is not HealthState.UNHEALTHY:
                return None
            elif live.was_up_until_s is not None and now - live.was_up_until_s < LATELY_UP_S:
                return None  # as while it restarts
        return soonest_s

    def close(self) -> None:
        for live in (*self.backends.values(), *self.retiring):
            live.pool.close()

    def _book_successes(self, live: LiveBackend) -> None:
        count, live.unbooked_successes = live.unbooked_successes, 0
        if count:
            self._step(live, Outcome(OutcomeKind.SUCCESS, count))

    def _step(self, live: LiveBackend, event: Outcome) -> None:
        self._enter(live, step_health(live.health, event, self._clock(), self._rules))

    def _enter(self, live: LiveBackend, after: Health, *, told: bool = True) -> None:
        before = live.health
        if before.in_service and not after.in_service and self.backends.get(live.spec.name) is live:
            after = hold_last_healthy(self.health_of_model(live.spec.model), live.spec.name, after, self._rules)
        live.health = after
        if after.state is before.state:
            return
        if before.state in (HealthState.HEALTHY, HealthState.SLOW_START) and not after.in_service:
            live.was_up_until_s = self._clock()
        if after.state is HealthState.UNHEALTHY:
            # A request that waits for its first byte there can still be answered elsewhere, and nothing is answered
            # twice. Streams that have begun keep their own timeouts.
            live.pool.fail_waiting("health checks gave the backend up")
        if self.siblings is not None:
            self.siblings.publish(live)
        if self.on_change is not None:
            self.on_change()
        if told and self._on_transition is not None:
            self._on_transition(live.spec.name, before, after)
