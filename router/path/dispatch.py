"""The path of one request: admit, decide, try, and retry elsewhere while the client has not had a byte.

Everything that decides is a pure function of `policies`; everything that takes time is in `attempt`, `relay` and
`backends.upstream`, which call back. This room joins them, and leaves in each `Exchange` what became of it.
"""

import asyncio
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from time import monotonic, perf_counter

from policies.admission import Refusal, Refused, admit
from policies.attempts import (
    AttemptRules,
    CourseEnd,
    Failure,
    RetryBudget,
    Stop,
    StopReason,
    next_attempt,
    poor_witnesses,
)
from policies.facts import RequestFacts
from policies.filters import Rejection
from policies.hopeless import MAX_RETRY_AFTER_S, beyond_idle
from policies.pipeline import decide
from policies.policy import Decision
from router.fleet.feedback import Faults
from router.fleet.leases import InFlight, Rate
from router.fleet.live import Fleet
from router.fleet.standing import class_belief
from router.keys.ring import Parallel
from router.path.attempt import Answered
from router.path.course import Course
from router.path.hedging import Hedging
from router.path.waiting import Timer, WaitingRoom
from router.record.ledger import Ledger
from router.record.metrics import Metrics
from router.request.exchange import Exchange
from router.request.generation import Generation
from router.request.intake import Endpoint, InferenceRequest, class_name, read_request
from router.request.prompt_ratios import PromptRatios
from router.wire.errors import (
    ApiError,
    budget_beyond_idle,
    context_too_long,
    no_backend,
    overloaded,
    unauthorized,
)

FULL = {
    Refusal.FULL: "The gateway holds as many requests as it may. Try again shortly.",
    Refusal.RESERVED: "What room the gateway has left is kept for other latency classes. Try again shortly.",
}


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
        self.fleet = fleet
        self.metrics = metrics
        self.prompt_ratios = PromptRatios()
        self.faults = Faults()
        """Of the policy's learner."""
        self.waiting = WaitingRoom(clock, _call_later)
        fleet.on_change = self.waiting.wake
        self._ends = Rate(clock)
        self._rng = rng or random.Random()
        self.clock = clock
        self._retry_budget = RetryBudget()
        self._hedging = Hedging(self)
        self._first_attempts = 0
        """Since the budget was last looked at."""

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
        return Exchange(endpoint, request_id, self.generation, began_at_s=self.clock())

    def admit(self, exchange: Exchange, headers: Mapping[bytes, bytes], authorization: bytes | None) -> None:
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
        latency_class = class_name(headers, generation.vocabulary)
        self._let_in(exchange, latency_class)
        if principal.max_parallel is not None:
            lease = self.parallel.lease(principal)
            try:
                lease.take()
            except ApiError:
                self.metrics.turned_away.inc((latency_class, "key_limit"))
                raise
            exchange.parallel_lease = lease

    def _let_in(self, exchange: Exchange, latency_class: str) -> None:
        """Count a request in its class, if there is room for it beside the others' floors."""
        held = self.held
        # Counted first and looked at then: of two processes that race for the last place, one at least sees the other.
        held.admit(latency_class)
        exchange.admitted = latency_class
        counts = held.by_class()
        others = {**counts, latency_class: counts[latency_class] - 1}
        answer = admit(exchange.generation.admission, others, latency_class, self._ends.per_s)
        if isinstance(answer, Refused):
            exchange.admitted = None
            held.give_back(latency_class)
            self.metrics.turned_away.inc((latency_class, answer.reason))
            raise overloaded(FULL[answer.reason], answer.retry_after_s)

    def read(self, exchange: Exchange, headers: Mapping[bytes, bytes], body: bytes) -> InferenceRequest:
        """Read a request whose body has come.

        Raises:
            ApiError: 400, 404 or 415.
        """
        generation = exchange.generation
        exchange.received_at_s = exchange.received_at_s or self.clock()
        principal = exchange.principal
        request = read_request(
            exchange.endpoint, exchange.request_id, headers, body, generation.vocabulary, self.prompt_ratios,
            tenant=None if principal is None else principal.tenant, expect_output=self._expect_output,
        )  # fmt: skip
        exchange.facts = request.facts
        exchange.deadline_s = exchange.received_at_s + request.timeouts.total_s
        return request

    def run(self, exchange: Exchange, request: InferenceRequest, client: Answered) -> Course:
        """Send a request on its way. What comes of it `client` is told, never before this returns.

        Raises:
            ApiError: nobody can take it.
        """
        self._first_attempts += 1
        course = Course(self, exchange, request, client)
        decision = self.place(course)
        if decision.chosen is None:
            if not nobody_is_up(decision):
                raise self.refusal(decision, request.facts)
            self._let_wait(course, decision)
        return course

    def place(self, course: Course) -> Decision:
        """Decide on a request, and send it where somebody can take it."""
        exchange, now = course.exchange, self.clock()
        decision = self._decide(exchange, course.facts, now)
        exchange.decided(decision, now)
        if decision.chosen is not None:
            course.send(self.fleet.backends[decision.chosen.spec.name])
            if exchange.generation.hedging is not None:
                self._hedging.watch(course, decision, now)
        return decision

    def _let_wait(self, course: Course, decision: Decision) -> None:
        """No backend is up: let the request wait for one, if it can spare the time."""
        facts, now = course.facts, self.clock()
        waiter = QueuedRequest(self, course, now)
        back_in_s = self.fleet.expected_back_s(facts.model, now)
        key = self.waiting.enter(course.exchange.generation.admission, waiter, facts, back_in_s)
        if isinstance(key, Refused):
            self.metrics.turned_away.inc((facts.latency_class, key.reason))
            raise self.refusal(decision, facts)
        waiter.key = key
        course.leave_queue = waiter.leave

    def failed(self, course: Course, failure: Failure) -> None:
        """Send a request elsewhere, if it may and can be, or tell the client. Called by its course."""
        exchange, now = course.exchange, self.clock()
        retries = exchange.generation.config.retries
        budget = self._retry_budget_for(retries.budget_ratio, retries.budget_floor_per_s)
        step = next_attempt(
            AttemptRules(max_attempts=retries.max_attempts),
            course.facts, course.failures, now, budget, deadline_s=exchange.deadline_s,
        )  # fmt: skip
        if isinstance(step, Stop):
            unpaid = step.reason is StopReason.RETRY_BUDGET_EMPTY and retries.budget_ratio + retries.budget_floor_per_s
            course.give_up(failure, CourseEnd.UNASKED if unpaid else CourseEnd.FAILED)
            return
        course.facts = replace(course.facts, tried=step.avoid, waited_s=now - exchange.received_at_s)
        asking = course.facts
        if step.elsewhere:
            poor = poor_witnesses(self.fleet.view().backends, asking, step.avoid)
            asking = replace(asking, tried=(*step.avoid, *poor))
        decision = self._decide(exchange, asking, now)
        chosen = decision.chosen
        if chosen is None or (step.elsewhere and chosen.spec.name in step.avoid):
            course.give_up(failure)
            return
        self._retry_budget = budget.withdraw(now) or budget
        self.metrics.retries.inc((step.reason,))
        exchange.decided(decision, now)
        course.send(self.fleet.backends[chosen.spec.name])

    def considered(self, exchange: Exchange, facts: RequestFacts, now: float) -> Decision:
        """What a decision on the request would be now. Nothing is booked by it."""
        return decide(exchange.generation.pipeline, facts, self.fleet.view(), now, self._rng)

    def by_class(self) -> Mapping[str, int]:
        """Requests in flight, over all processes."""
        return self.held.by_class()

    def end(self, exchange: Exchange) -> None:
        """A request has ended, in whatever way."""
        self.held.leave()
        if exchange.admitted is not None:
            self.held.give_back(exchange.admitted)
            self._ends.count()
        if exchange.parallel_lease is not None:
            exchange.parallel_lease.release()
        exchange.ended_at_s = self.clock()
        self.metrics.count(exchange)
        if self.ledger is not None:
            self.ledger.append(exchange)

    def _decide(self, exchange: Exchange, facts: RequestFacts, now: float) -> Decision:
        started_s = perf_counter()
        decision = decide(exchange.generation.pipeline, facts, self.fleet.view(), now, self._rng)
        kind = class_belief(self.fleet.pool_belief, facts)
        exchange.miss_weight = None if kind is None else kind.weight
        self.metrics.decided(decision, perf_counter() - started_s)
        return decision

    def _expect_output(self, facts: RequestFacts) -> int:
        try:
            return self.fleet.learner.expect_output(facts)
        except Exception as error:
            self.faults.caught(error, self.clock())
            return facts.expected_output_tokens

    def _retry_budget_for(self, ratio: float, floor_per_s: float) -> RetryBudget:
        """What retries may draw from now: first attempts since the last look pay in.

        Ratio and floor follow the configuration; the tokens saved so far do not start anew with it.
        """
        budget, count = self._retry_budget, self._first_attempts
        self._first_attempts = 0
        tokens = min(budget.capacity, budget.tokens + count * budget.ratio)
        self._retry_budget = replace(budget, ratio=ratio, floor_per_s=floor_per_s, tokens=tokens)
        return self._retry_budget

    def refusal(self, decision: Decision, facts: RequestFacts) -> ApiError:
        """What to answer where a decision chose nobody."""
        turned_away, latency_class = self.metrics.turned_away, facts.latency_class
        serving = [entry.reason for entry in decision.rejected if entry.reason != Rejection.OTHER_MODEL]
        for reason in serving:
            self.metrics.rejections.inc((str(reason),))
        if serving and all(reason == Rejection.CONTEXT_TOO_SMALL for reason in serving):
            names = [entry.backend for entry in decision.rejected if entry.reason == Rejection.CONTEXT_TOO_SMALL]
            longest = max(self.fleet.backends[name].spec.context_tokens or 0 for name in names)
            return context_too_long(facts.model, facts.prompt_tokens, facts.max_output_tokens, longest)
        if decision.retry_after_s is not None:
            turned_away.inc((latency_class, "budget"))
            beyond = beyond_idle(facts, decision.candidates, self.clock())
            if beyond is not None:
                return budget_beyond_idle(beyond.budget, beyond.promised_s, beyond.needed_s, MAX_RETRY_AFTER_S)
            message = "No backend can keep the latency budget now. Try again when it is time."
            return overloaded(message, decision.retry_after_s)
        retry_after_s = self.fleet.back_in_s(self.clock())
        if Rejection.SILENCE_ASKED in serving:
            turned_away.inc((latency_class, "silence_asked"))
            return overloaded("All backends are at their limits. Try again when it is time.", retry_after_s)
        return no_backend("No backend can take the request now. Try again shortly.", retry_after_s)


@dataclass(slots=True)
class QueuedRequest:
    """A request that waits for a backend to come up; a `waiting.Waiter`."""

    dispatcher: Dispatcher
    course: Course
    since_s: float
    key: int = -1

    def offer(self) -> bool:
        dispatcher, course, leave = self.dispatcher, self.course, self.course.leave_queue
        course.leave_queue = None  # from here on a client that goes leaves a backend, not the queue
        try:
            now = dispatcher.clock()
            course.facts = replace(course.facts, waited_s=now - course.exchange.received_at_s)
            self._waited(now)
            decision = dispatcher.place(course)
            if decision.chosen is None and nobody_is_up(decision):
                course.leave_queue = leave
                return False
            self._over("turned_away" if decision.chosen is None else "served")
            if decision.chosen is None:
                course.client.refuse(dispatcher.refusal(decision, course.facts))
        except Exception as error:
            course.client.crashed(error)
        return True

    def turn_away(self, reason: Refusal) -> None:
        dispatcher, facts, now = self.dispatcher, self.course.facts, self.dispatcher.clock()
        self.course.leave_queue = None
        self._waited(now)
        self._over("turned_away")
        dispatcher.metrics.turned_away.inc((facts.latency_class, reason))
        retry_after_s = dispatcher.fleet.back_in_s(now)
        self.course.client.refuse(no_backend("No backend came up in time. Try again shortly.", retry_after_s))

    def leave(self) -> None:
        """Its client is gone, or the process ends."""
        self.dispatcher.waiting.leave(self.key)
        self._waited(self.dispatcher.clock())
        self._over("left")

    def _waited(self, now: float) -> None:
        exchange = self.course.exchange
        more_s = now - self.since_s - exchange.queued_s
        exchange.queued_s += more_s
        exchange.waited_s += more_s

    def _over(self, how: str) -> None:
        self.dispatcher.metrics.queue_seconds.observe((how,), self.course.exchange.queued_s)


def nobody_is_up(decision: Decision) -> bool:
    """Whether a decision found nobody because those that could serve are out of service, and that alone."""
    words = {entry.reason for entry in decision.rejected}
    return decision.retry_after_s is None and Rejection.UNHEALTHY in words and Rejection.SILENCE_ASKED not in words


def _call_later(wait_s: float, what: Callable[[], None]) -> Timer:
    return asyncio.get_running_loop().call_later(wait_s, what)
