"""What the policy's learner is told of one attempt, and what becomes of the prediction that the attempt was sent on.

`begin` with the lease, at once after the decision; `heard` from the stream's read callback; `end` exactly once, however
the attempt ends. In between, one stream of a backend at a time measures its pace: from one report to the next, about
`PACE_EVERY_S` apart, it counts its tokens, and then another one's turn comes. So each second of a backend is looked at
once, however many streams it runs, and a stream that is not asked pays for one comparison a read.

Two things are no fault of a backend, and it is not blamed for them. A client that does not read holds its own stream
up: for the learner the attempt is over with that, as if the client had gone. And some engines put several tokens in
one event: the engine's own count over the events seen, learned per backend, makes tokens of events.

No request fails because of what a learner does: an exception of one is logged and counted, and the attempt goes on.
"""

import logging
from math import inf
from typing import Any, Protocol

from backends.catalog.spec import BackendSpec
from backends.catalog.views import BackendView
from policies.attempts import FailureCause
from policies.facts import RequestFacts
from policies.learning import End, Learner, Sent
from policies.policy import Decision, Priced, predicted_p99_s
from router.fleet.leases import Books
from router.request.promises import Prediction
from router.wire.answer_members import Usage

log = logging.getLogger("headrace.learning")

PACE_EVERY_S = 0.1
STALLED_S = 1.0
"""A stream that took its turn and has not had a token for so long loses it to one that has."""
MIN_EVENTS = 8
"""A shorter stream says little of how many tokens its engine puts in an event."""
TOKENS_PER_EVENT_RANGE = (1.0, 16.0)
EVENT_WEIGHT = 0.1
COMPLAIN_EVERY_S = 60.0


class Pacing:
    """Whose turn it is to tell of one backend's pace."""

    __slots__ = ("due_s", "events", "holder", "since_s", "tokens_per_event")

    def __init__(self) -> None:
        self.due_s = -inf
        """When there is something to do again."""
        self.holder: Feedback | None = None
        self.since_s = 0.0
        self.events = 0
        """Of the holder's stream, at `since_s`."""
        self.tokens_per_event = 1.0

    def counted(self, events: int, tokens: int) -> None:
        """A whole stream had so many events with content, and by its engine's count so many tokens."""
        if events < MIN_EVENTS or tokens <= 0:
            return
        low, high = TOKENS_PER_EVENT_RANGE
        self.tokens_per_event += EVENT_WEIGHT * (min(high, max(low, tokens / events)) - self.tokens_per_event)


class Faults:
    """What learners did wrong: counted, and said in the log once a minute."""

    def __init__(self) -> None:
        self.count = 0
        self._complained_at_s = -inf

    def caught(self, error: Exception, now: float) -> None:
        """An exception of a learner, which ends here."""
        self.count += 1
        if now - self._complained_at_s >= COMPLAIN_EVERY_S:
            self._complained_at_s = now
            log.error("the policy's learner failed (%d times so far); requests go on", self.count, exc_info=error)


class Paced(Protocol):
    """A backend whose streams take turns."""

    spec: BackendSpec
    books: Books
    pacing: Pacing

    def seen(self, belief: Any) -> BackendView:
        """Its frozen picture as of now."""


class Feedback:
    """One attempt. Holds nothing of the request but the facts that its learner keeps."""

    __slots__ = (
        "_choices",
        "_faults",
        "_learner",
        "_live",
        "_p99_s",
        "_pacing",
        "_sent",
        "first_at_s",
        "sent_at_s",
    )  # fmt: skip

    def __init__(self, learner: Learner, live: Paced, faults: Faults, *, choices: int = 1) -> None:
        self._learner = learner
        self._live = live
        self._pacing = live.pacing
        self._faults = faults
        self._choices = choices
        self._sent: Sent | None = None
        self.sent_at_s = 0.0
        self.first_at_s: float | None = None
        self._p99_s: tuple[float | None, float | None] = (None, None)

    @property
    def prediction(self) -> Prediction:
        """What it was sent on."""
        return Prediction(self.sent_at_s, *self._p99_s, self.first_at_s)

    def begin(self, facts: RequestFacts, decision: Decision, margin: float | None, now: float) -> None:
        """The attempt is sent where `decision` says. Its chosen backend is one of its candidates."""
        self.sent_at_s = now
        priced = chosen_of(decision)
        if priced is None:
            return
        self._p99_s = predicted_p99_s(priced, margin)
        try:
            self._sent = self._learner.sent(facts, priced, now)
        except Exception as error:
            self._faults.caught(error, now)

    def heard(self, events: int, now: float) -> float:
        """`events` with content have come by now, the first of them with the first call. Returns when to call again."""
        if self.first_at_s is None:
            self.first_at_s = now
            self._first_token(now)
        if self._sent is None:
            return inf
        pacing = self._pacing
        if now < pacing.due_s:
            return pacing.due_s
        holder = pacing.holder
        if holder is self:
            if not self._report(events, now):  # the next one's turn begins with this very moment
                pacing.holder = None
                return now + PACE_EVERY_S
        elif holder is not None and now - pacing.since_s < STALLED_S:
            return now  # its next token is due
        pacing.holder, pacing.since_s, pacing.events = self, now, events
        pacing.due_s = now + PACE_EVERY_S
        return pacing.due_s

    def held_up(self, now: float) -> None:
        """The client does not read: from here on the stream's times are the client's."""
        self._p99_s = (None if self.first_at_s is None else self._p99_s[0], None)
        self.end(FailureCause.CLIENT_GONE, 0, None, now)

    def end(self, cause: FailureCause | None, events: int, usage: Usage | None, now: float) -> None:
        """The attempt is over, well or badly; `events` with content came. Later calls change nothing."""
        self._give_turn_back()
        sent, self._sent = self._sent, None
        if sent is None:
            return
        tokens, prompt_tokens, cached_tokens = events, None, None
        if usage is not None:
            prompt_tokens, cached_tokens = usage.prompt_tokens, usage.cached_tokens
            if usage.completion_tokens:
                tokens = usage.completion_tokens
                if self.first_at_s is not None and self._choices == 1:
                    self._pacing.counted(events, tokens)
        try:
            self._learner.ended(sent, End(tokens // self._choices, cause, prompt_tokens, cached_tokens), now)
        except Exception as error:
            self._faults.caught(error, now)

    def _first_token(self, now: float) -> None:
        if self._sent is None:
            return
        try:
            self._learner.first_token(self._sent, now)
        except Exception as error:
            self._faults.caught(error, now)

    def _report(self, events: int, now: float) -> bool:
        """Tell of the pace since the turn was taken; returns whether no other stream is there to take the next."""
        pacing, sent, live, learner = self._pacing, self._sent, self._live, self._learner
        assert sent is not None
        view = live.seen(learner.belief(live.spec.name, now))
        # Choices side by side have a token each in one iteration.
        tokens = (events - pacing.events) * pacing.tokens_per_event / self._choices
        if tokens > 0.0:
            try:
                learner.paced(sent, view, (now - pacing.since_s) / tokens, max(1, round(tokens)), now)
            except Exception as error:
                self._faults.caught(error, now)
        return live.books.decode_requests <= 1

    def _give_turn_back(self) -> None:
        pacing = self._pacing
        if pacing.holder is self:
            pacing.holder, pacing.due_s = None, -inf


def chosen_of(decision: Decision) -> Priced | None:
    """The candidate that a decision chose; `None` where it chose none."""
    chosen = decision.chosen
    for candidate in decision.candidates:
        if candidate.backend is chosen:
            return candidate
    return None if chosen is None else Priced(chosen, decision.price or 0.0)
