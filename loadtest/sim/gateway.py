"""One simulated gateway: views, decisions, leases, health, retries and the learner, as `router.path` joins them.

It holds no clock: each call says what time it is. What it wants done (send this attempt there) it returns.
"""

from dataclasses import replace
from operator import is_
from random import Random
from time import perf_counter

from backends.catalog.health import Health, HealthRules, HealthState, Outcome, OutcomeKind, Probe, step_health
from backends.catalog.health import hold_last_healthy as hold
from backends.catalog.views import BackendView, FleetView
from loadtest.sim.flight import Flight
from loadtest.sim.link import Link
from policies.attempts import AttemptRules, Failure, FailureCause, Retry, RetryBudget, next_attempt
from policies.learning import End, Learner, NoLearner
from policies.pipeline import decide
from policies.policy import Decision, Pipeline, Priced, predicted_p99_s
from router.fleet.leases import Lease
from router.fleet.live import BOOK_SUCCESSES_EVERY_S

RULES = HealthRules()
ATTEMPTS = AttemptRules()

OUTCOMES = {
    FailureCause.CONNECT: OutcomeKind.CONNECT_ERROR,
    FailureCause.RESET_BEFORE_BYTE: OutcomeKind.RESET,
    FailureCause.TRUNCATED: OutcomeKind.TRUNCATED,
    FailureCause.CLIENT_ERROR: OutcomeKind.CLIENT_ERROR,
}


class Gateway:
    """See the module's text."""

    def __init__(self, pipeline: Pipeline, learner: Learner, links: list[Link], rng: Random) -> None:
        self.pipeline = pipeline
        self.learner = learner
        self.links = links
        self.index = {link.name: number for number, link in enumerate(links)}
        self.decisions = 0
        self.decision_times_s: list[float] = []
        """Real seconds that each call of `decide` took."""
        self._rng = rng
        self._retry_budget = RetryBudget()
        self._sequence = 0
        self._learns = type(learner) is not NoLearner
        self._views: tuple[BackendView, ...] = ()

    def fleet_view(self, now: float) -> FleetView:
        """The frozen picture for one decision."""
        sequence, self._sequence = self._sequence, self._sequence + 1
        if self._learns:
            belief = self.learner.belief
            views = [link.view(now, belief(link.name, now)) for link in self.links]
            return FleetView(self._same(views), "", sequence, self.learner.pool_belief(now))
        return FleetView(self._same([link.view(now, None) for link in self.links]), "", sequence)

    def decide(self, flight: Flight, now: float) -> Decision:
        """Where the attempt goes. Takes the lease and tells the learner, so that the next decision sees it."""
        facts = flight.facts
        fleet = self.fleet_view(now)
        began = perf_counter()
        decision = decide(self.pipeline, facts, fleet, now, self._rng)
        took = perf_counter() - began
        self.decisions += 1
        self.decision_times_s.append(took)
        chosen = decision.chosen
        if chosen is None:
            return decision
        priced = next((c for c in decision.candidates if c.backend is chosen), None) or Priced(chosen, 0.0)
        flight.decided_on = chosen
        flight.backend = self.index[chosen.spec.name]
        flight.first_token_at_s = None
        flight.tokens_before = 1
        flight.ttft_p99_s, flight.e2e_p99_s = predicted_p99_s(priced, self.pipeline.margin)
        flight.miss = priced.miss
        flight.sent = self.learner.sent(facts, priced, now)
        link = self.links[flight.backend]
        flight.lease = Lease(link.books, facts.prompt_tokens)
        flight.lease.take()
        link.waiting[flight.number] = flight
        link.changed()
        return decision

    def arrived(self, flight: Flight) -> None:
        """A client's request has come: its first attempt pays into the retry budget."""
        self._retry_budget = self._retry_budget.deposit()
        expected = self.learner.expect_output(flight.facts)
        if expected != flight.facts.expected_output_tokens:
            flight.facts = replace(flight.facts, expected_output_tokens=expected)

    def first_token(self, flight: Flight, now: float) -> None:
        self.links[flight.backend].starts(flight, now)
        assert flight.sent is not None
        self.learner.first_token(flight.sent, now)

    def finished(self, flight: Flight, cached_tokens: int | None, now: float) -> None:
        """The whole answer has come."""
        link = self.links[flight.backend]
        tokens = link.ends(flight)
        self._learn_end(flight, End(tokens, None, flight.facts.prompt_tokens, cached_tokens), now)
        self._succeeded(link, now)
        assert flight.first_token_at_s is not None
        assert flight.decided_on is not None
        if tokens > 1:
            tpot_s = (now - flight.first_token_at_s) / (tokens - 1)
            link.observe_pace(flight.facts, flight.decided_on, tpot_s, tokens, now)

    def failed(self, flight: Flight, cause: FailureCause, now: float) -> bool:
        """The attempt is over; returns whether to decide again (`flight.facts` then says where not to go)."""
        link = self.links[flight.backend]
        begun = flight.first_token_at_s is not None
        tokens = link.ends(flight)
        self._learn_end(flight, End(tokens, cause), now)
        link.last_outcome_at_s = now
        self._book_successes(link, now)
        self._enter(link, step_health(link.health, Outcome(OUTCOMES[cause]), now, RULES))
        flight.failures = (*flight.failures, Failure(link.name, cause, now, first_byte_sent=begun))
        step = next_attempt(ATTEMPTS, flight.facts, flight.failures, now, self._retry_budget)
        paid = self._retry_budget.withdraw(now) if isinstance(step, Retry) else None
        if paid is None or not isinstance(step, Retry):
            return False
        self._retry_budget = paid
        waited_s = now - flight.request.arrival_s
        flight.facts = replace(flight.facts, tried=step.avoid, waited_s=waited_s)
        return True

    def probed(self, link: Link, probe: Probe, now: float) -> None:
        """A health check has come back."""
        self._book_successes(link, now)
        self._enter(link, step_health(link.health, probe, now, RULES))

    def drained(self, link: Link, draining: bool) -> None:
        """The operator, or the allocator, takes it out of the fleet or puts it back."""
        link.draining = draining
        link.changed()

    def came_back_cold(self, link: Link) -> None:
        """After a loan it is another process: what was believed of the old one is forgotten, its books are empty."""
        link.health = Health()
        link.drift = 1.0
        link.served_requests = link.unbooked_successes = 0
        link.last_outcome_at_s = None
        self.learner.forget(link.name)
        link.changed()

    # --- books of outcomes -------------------------------------------------------------------------------------

    def _same(self, views: list[BackendView]) -> tuple[BackendView, ...]:
        """The tuple of last time where no view has changed, so that a policy may remember by it."""
        known = self._views
        if len(known) != len(views) or not all(map(is_, known, views)):
            self._views = tuple(views)
        return self._views

    def _learn_end(self, flight: Flight, end: End, now: float) -> None:
        assert flight.sent is not None
        self.learner.ended(flight.sent, end, now)
        flight.sent = None

    def _succeeded(self, link: Link, now: float) -> None:
        link.served_requests += 1
        link.last_outcome_at_s = now
        link.unbooked_successes += 1
        health = link.health
        if not (health.state is HealthState.HEALTHY and not health.held and not health.failures
                and now - health.recent_at_s < BOOK_SUCCESSES_EVERY_S):  # fmt: skip
            self._book_successes(link, now)

    def _book_successes(self, link: Link, now: float) -> None:
        count, link.unbooked_successes = link.unbooked_successes, 0
        if count:
            self._enter(link, step_health(link.health, Outcome(OutcomeKind.SUCCESS, count), now, RULES))

    def _enter(self, link: Link, after: Health) -> None:
        before = link.health
        if before.in_service and not after.in_service:
            after = hold({other.name: other.health for other in self.links if not other.draining}, link.name, after,
                         RULES)
        link.health = after
        link.changed()
