"""One backend as one simulated gateway knows it: books, health, last sample, and the frozen view made of them.

The counterpart of `router.fleet.live.LiveBackend`. Books and leases are the router's own; health goes through the same
machine. Two things differ in form, not in meaning. What streams have grown by is not booked token by token: all
streams of an engine that emit get a token in each of its iterations, so a count of streams and a count of iterations
stand for it. And peers' loads come from the last gossip rather than from shared memory.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import exp, isfinite, log
from typing import Any

from backends.catalog.health import Health
from backends.catalog.sample import LoadSample
from backends.catalog.spec import BackendSpec
from backends.catalog.views import BackendView
from loadtest.sim.engine import SimEngine
from loadtest.sim.flight import Flight
from policies.estimate import DRIFT_RANGE, predict
from policies.facts import RequestFacts
from policies.learning import Learner
from router.fleet.leases import Books
from router.fleet.live import EWMA_WEIGHT, MIN_TOKENS_FOR_DRIFT

Load = tuple[int, int, int, int]
NOTHING: Load = (0, 0, 0, 0)


class Link:
    """See the module's text."""

    def __init__(self, spec: BackendSpec, engine: SimEngine, half_rtt_s: float) -> None:
        self.spec = spec
        self.name = spec.name
        self.engine = engine
        self.books = Books()
        self.health = Health()
        self.sample: LoadSample | None = None
        self.in_flight_at_sample: int | None = None
        self.draining = False
        self.silent_until_s = 0.0
        self.silence_asked_until_s = 0.0
        self.drift = 1.0
        self.served_requests = 0
        self.unbooked_successes = 0
        self.last_outcome_at_s: float | None = None
        self.peers: Load = NOTHING
        """In flight through other gateways, by the last gossip."""
        self.waiting: dict[int, Flight] = {}
        """Attempts that are sent and have no first token yet."""
        self.emitting: dict[int, Flight] = {}
        """Streams that get a token in each iteration that decodes; the one that reported its pace last comes last."""
        self.paused: dict[int, Flight] = {}
        """Streams that the engine has preempted."""
        self._grown_tokens = 0
        self._round = 0
        self._half_rtt_s = half_rtt_s
        self._reported_at_s = 0.0
        self._reported_round = 0
        self._view: BackendView | None = None
        self._round_of_view = 0

    # --- tokens --------------------------------------------------------------------------------------------------

    def advance(self, rounds: int) -> None:
        """All iterations up to that count have been seen here."""
        if rounds > self._round:
            self._grown_tokens += len(self.emitting) * (rounds - self._round)
            self._round = rounds

    def starts(self, flight: Flight, now: float) -> None:
        """The first token is here."""
        del self.waiting[flight.number]
        flight.first_token_at_s = now
        flight.joined_round = self._round
        flight.lease.first_token()
        flight.lease.generated(1)
        self.emitting[flight.number] = flight
        self.changed()

    def pauses(self, flight: Flight) -> None:
        """The engine has preempted the stream."""
        if self.emitting.pop(flight.number, None) is not None:
            flight.tokens_before += self._round - flight.joined_round
            self.paused[flight.number] = flight
            self.changed()

    def resumes(self, flight: Flight) -> None:
        """It is back, with its next token."""
        del self.paused[flight.number]
        flight.tokens_before += 1
        self._grown_tokens += 1
        flight.joined_round = self._round
        self.emitting[flight.number] = flight
        self.changed()

    def tokens_of(self, flight: Flight) -> int:
        """Tokens of an open stream that have come so far."""
        if flight.number in self.waiting:
            return 0
        since = self._round - flight.joined_round if flight.number in self.emitting else 0
        return flight.tokens_before + since

    def ends(self, flight: Flight) -> int:
        """The attempt is over in whatever way; returns the tokens that came."""
        tokens = self.tokens_of(flight)
        if tokens:
            self._grown_tokens -= tokens - 1
            if self.emitting.pop(flight.number, None) is None:
                del self.paused[flight.number]
        else:
            del self.waiting[flight.number]
        flight.lease.settle()
        self.changed()
        return tokens

    @property
    def grown_tokens(self) -> int:
        """Tokens after the first of all open streams, as far as they have been seen."""
        return self._grown_tokens

    def load(self, now: float) -> Load:
        """In flight through this gateway alone, in the order of `Books.cells`."""
        return self._load(self._seen(now))

    def _seen(self, now: float) -> int:
        """Iterations whose tokens have come by now."""
        return max(self._round, self.engine.visible_rounds(now - self._half_rtt_s))

    def _load(self, seen: int) -> Load:
        waiting, prefill_tokens, decoding, context_tokens = self.books.cells.tolist()
        grown = self._grown_tokens + len(self.emitting) * (seen - self._round)
        return waiting, prefill_tokens, decoding, context_tokens + grown

    # --- what the gateway believes -----------------------------------------------------------------------------

    def changed(self) -> None:
        """The next view is a new one."""
        self._view = None

    def view(self, now: float, belief: Any) -> BackendView:
        """The frozen picture, as `LiveBackend.view` makes it; the same one while nothing has changed."""
        return self._viewed(self._seen(now), belief)

    def _viewed(self, seen: int, belief: Any) -> BackendView:
        known = self._view
        if known is not None and known.belief is belief and (seen == self._round_of_view or not self.emitting):
            return known
        waiting, prefill_tokens, decoding, context_tokens = self._load(seen)
        if self.peers is not NOTHING:
            their_waiting, their_prefill, their_decoding, their_context = self.peers
            waiting += their_waiting
            prefill_tokens += their_prefill
            decoding += their_decoding
            context_tokens += their_context
        self._round_of_view = seen
        made = self._view = BackendView(
            self.spec, self.health, self.draining, waiting + decoding, waiting, prefill_tokens, decoding,
            context_tokens, self.sample, self.in_flight_at_sample, self.silent_until_s, self.silence_asked_until_s,
            self.drift, self.served_requests, self.last_outcome_at_s, belief)
        return made

    def take_sample(self, sample: LoadSample, now: float) -> None:
        """A scrape was answered."""
        waiting, _, decoding, _ = self.load(now)
        self.sample = sample
        self.in_flight_at_sample = waiting + decoding + self.peers[0] + self.peers[2]
        self.changed()

    def report_pace(self, learner: Learner, now: float) -> None:
        """One of the streams, in turn, tells of its tokens since the last report of this backend."""
        since_s, since_round = self._reported_at_s, self._reported_round
        self._reported_at_s, self._reported_round = now, self._round
        if not self.emitting:
            return
        number, flight = next(iter(self.emitting.items()))
        if len(self.emitting) > 1:
            del self.emitting[number]
            self.emitting[number] = flight
        assert flight.sent is not None
        assert flight.first_token_at_s is not None
        since_s = max(since_s, flight.first_token_at_s)
        tokens = self._round - max(since_round, flight.joined_round)
        if tokens > 0:
            # Not `view(now)`: the engine may have run ahead of this moment.
            view = self._viewed(self._round, learner.belief(self.name, now))
            learner.paced(flight.sent, view, (now - since_s) / tokens, tokens, now)

    def observe_pace(self, facts: RequestFacts, decided_on: BackendView, tpot_s: float, tokens: int,
                     now: float) -> None:
        """Move the drift factor by one finished stream, as `LiveBackend.observe_pace` does."""
        if tokens < MIN_TOKENS_FOR_DRIFT or decided_on.belief is not None:  # a belief has a drift of its own
            return
        predicted_s = predict(facts, replace(decided_on, drift=1.0), now).tpot_s
        if not (predicted_s > 0 and isfinite(predicted_s)):
            return
        low, high = DRIFT_RANGE
        ratio = min(high, max(low, tpot_s / predicted_s))
        self.drift = exp((1 - EWMA_WEIGHT) * log(self.drift) + EWMA_WEIGHT * log(ratio))
        self.changed()


def share_loads(links: Sequence[Link], now: float) -> None:
    """Gateways tell each other what they have in flight on one backend; `links` are theirs to it."""
    loads = [link.load(now) for link in links]
    waiting, prefill, decoding, context = (sum(column) for column in zip(*loads, strict=True))
    for link, own in zip(links, loads, strict=True):
        link.peers = (waiting - own[0], prefill - own[1], decoding - own[2], context - own[3])
        link.changed()
