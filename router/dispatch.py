"""The path of one request: admit, decide, try, and retry elsewhere while the client has not had a byte.

Everything that decides is a pure function of `policies`; everything that waits is in `attempt`, `relay` and
`backends.upstream`. This room joins them, and leaves in each `Exchange` what became of it.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from time import monotonic, perf_counter

from policies.attempts import AttemptRules, Failure, RetryBudget, Stop, next_attempt
from policies.facts import RequestFacts
from policies.filters import Rejection
from policies.pipeline import decide
from policies.policy import Decision
from router.attempt import Attempt
from router.errors import ApiError, no_backend, overloaded, unauthorized
from router.exchange import Exchange
from router.fleet import Fleet
from router.generation import Generation
from router.intake import Endpoint, InferenceRequest, read_request
from router.keys import Parallel
from router.leases import InFlight
from router.ledger import Ledger
from router.metrics import Metrics
from router.relay import Client

FULL_RETRY_AFTER_S = 1.0


class Dispatcher:
    """Serves requests from the fleet. One a process; `generation` and `ledger` are swapped by a reload."""

    def __init__(
        self,
        generation: Generation,
        fleet: Fleet,
        metrics: Metrics,
        *,
        rng: random.Random | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.generation = generation
        self.ledger: Ledger | None = None
        """Where decision records go; `None`: none are kept."""
        self.held = InFlight()
        self.parallel = Parallel()
        self._fleet = fleet
        self._metrics = metrics
        self._rng = rng or random.Random()
        self._clock = clock
        self._retry_budget = RetryBudget()

    @property
    def in_flight(self) -> int:
        """Requests that this process holds."""
        return self.held.own

    @property
    def max_body_bytes(self) -> int:
        return self.generation.config.limits.max_body_bytes

    def begin(self, endpoint: Endpoint, request_id: str) -> Exchange:
        """A request's head has come."""
        self.held.enter()
        return Exchange(endpoint, request_id, self.generation, began_at_s=self._clock())

    def admit(self, exchange: Exchange, authorization: bytes | None) -> None:
        """Make sure of the caller and of room for one more, before its body takes memory.

        `authorization` as `keys.sole_authorization` gives it.

        Raises:
            ApiError: 401 where keys are asked for and none is given; 429 where the gateway or the key holds as many
                requests as it may.
        """
        generation = exchange.generation
        principal = generation.keys.authenticate(authorization)
        if principal is None:
            raise unauthorized()
        exchange.principal = principal
        if self.held.total() > generation.config.limits.max_in_flight:
            raise overloaded("The gateway holds as many requests as it may. Try again shortly.", FULL_RETRY_AFTER_S)
        if principal.max_parallel is not None:
            lease = self.parallel.lease(principal)
            lease.take()
            exchange.parallel_lease = lease

    def read(self, exchange: Exchange, headers: Mapping[bytes, bytes], body: bytes) -> InferenceRequest:
        """Read a request whose body has come.

        Raises:
            ApiError: 400, 404 or 415.
        """
        generation = exchange.generation
        exchange.received_at_s = self._clock()
        request = read_request(
            exchange.endpoint, exchange.request_id, headers, body, generation.vocabulary, self._fleet.tokens_per_byte
        )
        exchange.read(request)
        exchange.deadline_s = exchange.received_at_s + request.timeouts.total_s
        return request

    async def run(self, exchange: Exchange, request: InferenceRequest, client: Client) -> None:
        """Answer a request.

        Raises:
            ApiError: nothing has reached the client.
        """
        generation = exchange.generation
        retries = generation.config.retries
        rules = AttemptRules(max_attempts=retries.max_attempts)
        # Ratio and floor follow the configuration, the tokens saved so far do not start anew with it.
        budget = self._retry_budget
        if budget.ratio != retries.budget_ratio or budget.floor_per_s != retries.budget_floor_per_s:
            budget = replace(budget, ratio=retries.budget_ratio, floor_per_s=retries.budget_floor_per_s)
        self._retry_budget = budget.deposit()
        attempt = Attempt(self._fleet, self._metrics, exchange, request, client, clock=self._clock)
        failures: tuple[Failure, ...] = ()
        facts = request.facts
        while True:
            decided_at_s = self._clock()
            decision = self._decide(generation, facts, decided_at_s)
            if decision.chosen is None and failures:
                return attempt.give_up(failures[-1])
            exchange.decision, exchange.decided_at_s = decision, decided_at_s
            if decision.chosen is None:
                raise self._nobody(decision)
            failure = await attempt.on(self._fleet.backends[decision.chosen.spec.name])
            if failure is None:
                return None
            failures = (*failures, failure)
            now = self._clock()
            step = next_attempt(rules, facts, failures, now, self._retry_budget, deadline_s=attempt.deadline_s)
            paid = None if isinstance(step, Stop) else self._retry_budget.withdraw(now)
            if isinstance(step, Stop) or paid is None:
                return attempt.give_up(failure)
            self._retry_budget = paid
            self._metrics.retries.inc((step.reason.value,))
            facts = replace(facts, tried=step.avoid)

    def end(self, exchange: Exchange) -> None:
        """A request has ended, in whatever way."""
        self.held.leave()
        if exchange.parallel_lease is not None:
            exchange.parallel_lease.release()
        now = self._clock()
        exchange.settle(self._metrics, now)
        if self.ledger is not None:
            self.ledger.append(exchange.settled(now))

    def _decide(self, generation: Generation, facts: RequestFacts, now: float) -> Decision:
        started = perf_counter()
        decision = decide(generation.pipeline, facts, self._fleet.view(), now, self._rng)
        self._metrics.decision_seconds.observe((), perf_counter() - started)
        return decision

    def _nobody(self, decision: Decision) -> ApiError:
        serving = [entry.reason for entry in decision.rejected if entry.reason != Rejection.OTHER_MODEL]
        for reason in serving:
            self._metrics.rejections.inc((str(reason),))
        if serving and all(reason == Rejection.CONTEXT_TOO_SMALL for reason in serving):
            message = "The prompt and the requested output do not fit the context of any backend."
            return ApiError(400, "context_length_exceeded", message, param="messages")
        retry_after_s = self._fleet.back_in_s(self._clock())
        if Rejection.SILENCE_ASKED in serving:
            return overloaded("All backends are at their limits. Try again when it is time.", retry_after_s)
        return no_backend("No backend can take the request now. Try again shortly.", retry_after_s)
