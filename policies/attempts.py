"""After a failed attempt: try another backend, or stop and tell the client.

A retry is allowed only where it cannot be seen and cannot do harm: no byte has reached the client, the failure is not
the request's own doing, attempts and time are left, and the retry budget has room. The budget is one for the whole
router: were every request of a bad minute tried three times, the retries would finish what the fault began.

Whose fault a 5xx was, `to_blame` says at the end of the request's course, for only then it is known what others said.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

from backends.catalog.views import BackendView
from policies.facts import RequestFacts


class FailureCause(StrEnum):
    """How an attempt failed. The word is also the metric label and the reason of a retry."""

    CONNECT = "connect"
    """No connection: the request was not sent."""
    RESET_BEFORE_BYTE = "reset_before_byte"
    """The connection ended before a byte of the answer."""
    HEAD_TIMEOUT = "head_timeout"
    FIRST_TOKEN_TIMEOUT = "first_token_timeout"  # noqa: S105
    STATUS_429 = "status_429"
    STATUS_502 = "status_502"
    STATUS_503 = "status_503"
    STATUS_504 = "status_504"
    STATUS_5XX_OTHER = "status_5xx_other"
    """Mostly 500: a broken backend, or the request's own doing. One other backend is asked for its opinion."""
    TRUNCATED = "truncated"
    """The answer began and broke off."""
    INTER_TOKEN_TIMEOUT = "inter_token_timeout"  # noqa: S105
    CLIENT_ERROR = "client_error"
    """A 4xx other than 429, or 501: every backend would say the same."""
    CLIENT_GONE = "client_gone"
    SUPERSEDED = "superseded"
    """Another attempt on the same request, made beside it, answered first."""


RETRYABLE = frozenset({
    FailureCause.CONNECT, FailureCause.RESET_BEFORE_BYTE, FailureCause.HEAD_TIMEOUT, FailureCause.FIRST_TOKEN_TIMEOUT,
    FailureCause.STATUS_429, FailureCause.STATUS_502, FailureCause.STATUS_503, FailureCause.STATUS_504,
    FailureCause.TRUNCATED,
})
"""Causes that another backend may well not share. TRUNCATED counts only for answers of which nothing was passed on."""


SECOND_OPINION = frozenset({FailureCause.STATUS_5XX_OTHER})
"""Causes that one other backend is asked about and no third: what is the request's own doing would take down one
backend after another."""


@dataclass(frozen=True, slots=True)
class Failure:
    """One failed attempt."""

    backend: str
    cause: FailureCause
    at_s: float
    """Monotonic time of the failure."""
    retry_after_s: float | None = None
    """What the backend asked for, where it did."""
    first_byte_sent: bool = False
    """Whether a byte of its answer has reached the client."""
    status: int | None = None
    """What the backend answered; `None` where it gave no whole answer."""


@dataclass(frozen=True, slots=True)
class AttemptRules:
    """The bounds of retrying."""

    max_attempts: int = 3
    """Attempts for one request, the first included."""
    retryable: frozenset[FailureCause] = RETRYABLE


class StopReason(StrEnum):
    """Why there is no further attempt; also the metric label."""

    FIRST_BYTE_SENT = "first_byte_sent"
    NOT_RETRYABLE = "not_retryable"
    MAX_ATTEMPTS = "max_attempts"
    DEADLINE = "deadline"
    RETRY_BUDGET_EMPTY = "retry_budget_empty"


@dataclass(frozen=True, slots=True)
class Retry:
    """Decide again, with `avoid` as `RequestFacts.tried`; take one from the retry budget first."""

    avoid: tuple[str, ...]
    reason: FailureCause
    elsewhere: bool = False
    """Only another backend than these will do: what is wanted is its opinion."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Give the client the last failure."""

    reason: StopReason


class RetryBudgetView(Protocol):
    """What `next_attempt` asks of a retry budget."""

    def available(self, now: float) -> float: ...


def next_attempt(
    rules: AttemptRules, facts: RequestFacts, failures: tuple[Failure, ...], now: float, budget: RetryBudgetView,
    *, deadline_s: float | None = None,
) -> Retry | Stop:
    """What follows the last of `failures`, which holds one at least. `deadline_s` ends the request, in monotonic time.

    Raises:
        ValueError: where nothing has failed.
    """
    if not failures:
        raise ValueError("next_attempt needs the failure that it follows")
    last = failures[-1]
    if any(failure.first_byte_sent for failure in failures):
        return Stop(StopReason.FIRST_BYTE_SENT)
    doubtful = [failure for failure in failures if failure.cause not in rules.retryable]
    if len(doubtful) > 1 or any(failure.cause not in SECOND_OPINION for failure in doubtful):
        return Stop(StopReason.NOT_RETRYABLE)
    if len(failures) >= rules.max_attempts:
        return Stop(StopReason.MAX_ATTEMPTS)
    if deadline_s is not None and now >= deadline_s:
        return Stop(StopReason.DEADLINE)
    if budget.available(now) < 1.0:
        return Stop(StopReason.RETRY_BUDGET_EMPTY)
    avoid = tuple(dict.fromkeys((*facts.tried, *(failure.backend for failure in failures))))
    return Retry(avoid, last.cause, elsewhere=bool(doubtful))


def poor_witnesses(backends: Sequence[BackendView], facts: RequestFacts, avoid: Sequence[str]) -> tuple[str, ...]:
    """Those whose opinion of a request tells little: they have served nothing since they last answered with an error.

    Of two broken backends, each would excuse the other for ever, while a third that serves others is never asked.
    Empty where no better one is in service.
    """
    others = [view for view in backends if view.spec.model == facts.model and view.spec.name not in avoid]
    poor = tuple(view.spec.name for view in others if view.health.last_success_s is None)
    better = any(view.health.last_success_s is not None and view.health.in_service for view in others)
    return poor if better else ()


class CourseEnd(StrEnum):
    """How a request's course ended, as far as it tells whose fault an error before was."""

    SERVED = "served"
    """A backend answered it."""
    REFUSED = "refused"
    """A backend found fault with the request itself."""
    FAILED = "failed"
    """No backend did either, and no other is asked."""
    UNASKED = "unasked"
    """Another could have been asked, and retries were used up for the moment."""
    LEFT = "left"
    """Nobody waited for the answer any more."""


REQUEST_REFUSED = frozenset({400, 413, 415, 422})
"""Statuses that say of a request's content that it is wrong."""


def to_blame(errors: Sequence[Failure], end: CourseEnd) -> Sequence[Failure]:
    """Those of `errors`, the 5xx of one request, that are held against their backends.

    A backend that served the request shows that it could be served. One that refuses it, or two that answer it with
    the same status, show that it could not. Where no other backend could be asked, one opinion stands against the
    backend that gave it. Where another could, and was not because the client left or retries were used up, the case
    is open: else whoever sends such requests fast enough, or leaves in time, would have healthy backends ejected. A
    broken one has others: the retry budget goes on to pay for second opinions, and it takes a handful.
    """
    if end in (CourseEnd.REFUSED, CourseEnd.UNASKED, CourseEnd.LEFT):
        return ()
    if end is CourseEnd.FAILED:
        said = {(failure.backend, failure.status) for failure in errors}
        if len({status for _, status in said}) < len(said):
            return ()
    return errors


DEFAULT_SILENCE_S = 1.0
MAX_SILENCE_S = 60.0


def backoff_until_s(failure: Failure) -> float | None:
    """Until when the failed backend is left alone, in monotonic time; `None` where the failure asks for no silence.

    429 and 503 do, for as long as their `Retry-After` says: a second where it says nothing, a minute at most, so that
    a clumsy header cannot take a backend out for a day.
    """
    if failure.cause not in (FailureCause.STATUS_429, FailureCause.STATUS_503):
        return None
    asked_s = DEFAULT_SILENCE_S if failure.retry_after_s is None else failure.retry_after_s
    return failure.at_s + min(MAX_SILENCE_S, max(0.0, asked_s))


@dataclass(frozen=True, slots=True)
class RetryBudget:
    """A token bucket that attempts after the first draw from: `ratio` per request, and a floor per second for quiet
    routers. Retries have one, hedges another (`policies.hedging`).

    Over any stretch of `t` seconds with `n` requests, at most `capacity + ratio·n + floor_per_s·t` retries pass.
    Ratio and floor are Linkerd's and Finagle's defaults: 20 % and 10 per second.
    """

    ratio: float = 0.2
    floor_per_s: float = 10.0
    capacity: float = 20.0
    """Tokens that can be saved up, hence the largest burst of retries."""
    tokens: float = 10.0
    at_s: float | None = None
    """Time up to which the floor has been credited; `None` until the first look."""

    def deposit(self) -> "RetryBudget":
        """The budget after one more first attempt."""
        # Built outright, since every request comes by here and `replace` costs five times as much.
        tokens = min(self.capacity, self.tokens + self.ratio)
        return RetryBudget(self.ratio, self.floor_per_s, self.capacity, tokens, self.at_s)

    def available(self, now: float) -> float:
        """Retries that could be paid at this time; a clock that steps back credits nothing."""
        elapsed_s = 0.0 if self.at_s is None else max(0.0, now - self.at_s)
        return min(self.capacity, self.tokens + self.floor_per_s * elapsed_s)

    def withdraw(self, now: float) -> "RetryBudget | None":
        """The budget after one retry, or `None` where it cannot pay for one."""
        available = self.available(now)
        if available < 1.0:
            return None
        at_s = now if self.at_s is None else max(now, self.at_s)
        return replace(self, tokens=available - 1.0, at_s=at_s)
