"""Whether a backend may be sent requests: a pure state machine fed by probes and by what became of requests.

::

    UNKNOWN ──good probe or success──▶ HEALTHY ◀──slow_start_s── SLOW_START ◀──2 good trials── HALF_OPEN
       │                                  │                          ▲  │                       ▲    │
       │  probes fail                     ├── requests fail ─────────│──┴─────▶ EJECTED ──time──┘    │ trial fails
       ▼                                  ▼                          │             ▲                 │
    UNHEALTHY ◀────── probes fail ────────┴───── 2 good probes ──────┘             └─────────────────┘

Two kinds of evidence never overrule each other. A good probe does not bring back a backend that fails its requests (a
frozen scheduler still answers `/health`), and a probe that merely comes late does not take out a backend that answers
its requests. Client mistakes, client departures, requests called back, excused errors and 429 say nothing about health.

Time passes lazily: nothing ticks, `Health.at` says what the state is now. After each step the caller asks
`hold_last_healthy`, the one rule that looks beyond a single backend.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import exp


class HealthState(StrEnum):
    """Where a backend stands. UNKNOWN, HEALTHY and SLOW_START are in service; HALF_OPEN takes trial requests only."""

    UNKNOWN = "unknown"
    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"
    EJECTED = "ejected"
    HALF_OPEN = "half_open"
    SLOW_START = "slow_start"


IN_SERVICE = frozenset({HealthState.UNKNOWN, HealthState.HEALTHY, HealthState.SLOW_START})


class OutcomeKind(StrEnum):
    """What became of one request, as far as health is concerned."""

    SUCCESS = "success"
    CONNECT_ERROR = "connect_error"
    TIMEOUT = "timeout"
    RESET = "reset"
    SERVER_ERROR = "server_error"
    """A 5xx that is the backend's fault; never 501, which is an answer about the request."""
    EXCUSED = "excused"
    """A 5xx that is the request's own doing, as far as anybody knows (`policies.attempts.to_blame`)."""
    TRUNCATED = "truncated"
    """A stream that ended without its terminator."""
    OVERLOADED = "overloaded"
    """429: load, not health."""
    CLIENT_ERROR = "client_error"
    CLIENT_GONE = "client_gone"
    SUPERSEDED = "superseded"
    """Cancelled, since another backend answered the same request first."""


# Nothing came back at all: Envoy's "local origin failures". These are surer signs than an error that somebody sent.
SILENT = frozenset({OutcomeKind.CONNECT_ERROR, OutcomeKind.TIMEOUT, OutcomeKind.RESET})
COUNTED = SILENT | {OutcomeKind.SERVER_ERROR, OutcomeKind.TRUNCATED}


class Cause(StrEnum):
    """Why a backend was taken out, or would have been."""

    NONE = ""
    REFUSED = "connections fail"
    TIMEOUTS = "requests time out"
    FAILURES = "requests fail"
    FAILURE_RATIO = "too many requests fail"
    TRIAL_FAILED = "the trial request failed"
    PROBES_FAIL = "probes fail"
    PROBES_LATE = "probes are late"


# What overload alone can produce. Taking such backends out moves their load to the next ones and topples those.
LOAD_SHAPED = frozenset({Cause.TIMEOUTS, Cause.PROBES_LATE})


@dataclass(frozen=True, slots=True)
class Probe:
    """One active check. `ok=False, slow=True` is no answer in time; `ok=True, slow=True` a late one that still came."""

    ok: bool
    slow: bool = False
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of one request on this backend, or of several that ended alike one after the other."""

    kind: OutcomeKind
    count: int = 1
    """More than 1 for SUCCESS only: successes in a row change nothing but counts, so they may come together."""


@dataclass(frozen=True, slots=True)
class HealthRules:
    """Thresholds of the machine. The defaults suit requests of seconds and a probe each second."""

    failures_to_eject: int = 5
    """Counted failures in a row. Envoy's `consecutive_5xx` default."""
    silent_failures_to_eject: int = 3
    """Connect errors, resets and timeouts in a row: a dead host is out before a fourth request pays for it."""
    failure_ratio_to_eject: float | None = 0.5
    """Share of failures over `failure_window_s` that ejects even where successes break each streak; `None`: off."""
    failure_ratio_min_requests: int = 20
    """Requests that the window must hold before its ratio is believed."""
    failure_window_s: float = 30.0
    """Time constant of the ratio: a request counts e⁻¹ after this long."""
    probe_failures_to_unhealthy: int = 3
    """In a row. A backend that was never heard needs one: it has no record to weigh against it."""
    probe_successes_to_healthy: int = 2
    traffic_vouches_s: float = 10.0
    """A success this recent, with no failure since, outweighs a late probe: the backend is busy, not hung."""
    base_ejection_s: float = 5.0
    """First ejection; each further one doubles, up to `max_ejection_s`."""
    max_ejection_s: float = 60.0
    forgive_after_s: float = 120.0
    """Healthy for this long, and earlier ejections are forgotten."""
    trial_requests: int = 1
    """Requests that a half-open backend may hold at once."""
    trial_successes: int = 2
    """Trials in a row that end a half-open phase."""
    slow_start_s: float = 10.0
    """A returned backend's share grows linearly over this time, as HAProxy's `slowstart` does."""
    slow_start_floor: float = 0.1
    """Share at the start of it, and of a backend that is kept in against the evidence."""
    min_healthy_share: float = 0.5
    """Signs of overload alone (late probes, timeouts) never leave less than this share of a model's backends.
    Envoy's panic threshold has the same default."""

    def ejection_s(self, ejections: int) -> float:
        """Seconds that the n-th ejection in a row lasts."""
        # The exponent is capped since 2.0 ** 1024 overflows; 2 ** 30 base ejections are past any maximum.
        return min(self.max_ejection_s, self.base_ejection_s * 2.0 ** min(max(0, ejections - 1), 30))


DEFAULT_RULES = HealthRules()


@dataclass(frozen=True, slots=True)
class Health:
    """One backend's health; `Health()` is one that was never heard. Times are monotonic seconds."""

    state: HealthState = HealthState.UNKNOWN
    since_s: float = 0.0
    until_s: float = 0.0
    """End of the ejection; read in EJECTED only."""
    cause: Cause = Cause.NONE
    detail: str = ""
    """Last words of the probe or outcome that counted."""
    held: bool = False
    """The evidence says out, but too few would be left (`hold_last_healthy`)."""
    failures: int = 0
    """Counted failures in a row."""
    silent_failures: int = 0
    probe_failures: int = 0
    """Failed and late probes in a row. A late one that traffic vouches against leaves the count as it is."""
    probe_successes: int = 0
    trial_successes: int = 0
    ejections: int = 0
    """Ejections not yet forgiven."""
    last_success_s: float | None = None
    """Last request served, `None` again after a failure, an excused one included."""
    recent_requests: float = 0.0
    recent_failures: float = 0.0
    recent_at_s: float = 0.0
    rules: HealthRules = field(default=DEFAULT_RULES, repr=False)
    """The rules of the last step, so that whoever holds a `Health` can ask it without knowing them."""

    @property
    def in_service(self) -> bool:
        """Takes requests without being on trial."""
        return self.state in IN_SERVICE

    def at(self, now: float) -> "Health":
        """This health with the passing of time applied: ejections end, slow starts finish, old sins are forgiven."""
        health = self
        if health.state is HealthState.EJECTED and now >= health.until_s:
            # No caller's request is spent on a backend that its own probes already find dead.
            dead = health.probe_failures >= health.rules.probe_failures_to_unhealthy
            health = health._enter(HealthState.UNHEALTHY if dead else HealthState.HALF_OPEN, health.until_s)
        slow_start_ends_s = health.since_s + health.rules.slow_start_s
        if health.state is HealthState.SLOW_START and now >= slow_start_ends_s:
            health = health._enter(HealthState.HEALTHY, slow_start_ends_s)
        if (health.state is HealthState.HEALTHY and health.ejections
                and now - health.since_s >= health.rules.forgive_after_s):
            health = replace(health, ejections=0)
        return health

    def accepts(self, in_flight_requests: int, now: float) -> bool:
        """Whether one more request may go there, given how many this router has there already."""
        state = self.state
        if state is HealthState.HEALTHY:  # time changes nothing about it, and it is what decisions mostly meet
            return True
        state = self.at(now).state
        if state is HealthState.HALF_OPEN:
            return in_flight_requests < self.rules.trial_requests
        return state in IN_SERVICE

    def ramp(self, now: float) -> float:
        """Share of its usual attraction, in (0, 1]: below 1 in a slow start and where it is held in.

        A half-open backend has 1: `accepts` already bounds its trials, and a trial that never comes ends nothing.
        """
        if self.state is HealthState.HEALTHY and not self.held:
            return 1.0
        health = self.at(now)
        floor = min(1.0, max(1e-3, self.rules.slow_start_floor))
        if health.held:
            return floor
        if health.state is not HealthState.SLOW_START:
            return 1.0
        return min(1.0, max(floor, (now - health.since_s) / max(self.rules.slow_start_s, 1e-9)))

    def describe(self) -> str:
        """A short phrase for a status page: the state, and why where it is not plainly good."""
        words = self.state.value.replace("_", " ")
        if self.cause is Cause.NONE:
            return words
        reason = f"{self.cause.value} ({self.detail})" if self.detail else self.cause.value
        if self.held:
            return f"{words}, held in service though {reason}"
        returning = self.state in (HealthState.HALF_OPEN, HealthState.SLOW_START)
        return f"{words}, was out: {reason}" if returning else f"{words}: {reason}"

    def _enter(self, state: HealthState, now: float) -> "Health":
        cause = Cause.NONE if state is HealthState.HEALTHY else self.cause
        return replace(self, state=state, since_s=now, cause=cause, detail=self.detail if cause else "",
                       held=False, trial_successes=0, probe_successes=0)


def step_health(health: Health, event: Probe | Outcome, now: float, rules: HealthRules = DEFAULT_RULES) -> Health:
    """The health after one event. Total: every state takes every event, at any time."""
    health = (health if health.rules == rules else replace(health, rules=rules)).at(now)
    if isinstance(event, Probe):
        return _good_probe(health, now) if event.ok else _bad_probe(health, event, now)
    if event.kind is OutcomeKind.SUCCESS:
        return _success(health, event.count, now)
    if event.kind in COUNTED:
        return _failure(health, event.kind, now)
    if event.kind is OutcomeKind.EXCUSED and health.last_success_s is not None:
        return replace(health, last_success_s=None)
    return health


def hold_last_healthy(before: Mapping[str, Health], name: str, after: Health,
                      rules: HealthRules = DEFAULT_RULES) -> Health:
    """Veto a step that takes `name` out where the model's other backends would be too few.

    `before` holds every backend that serves the model and is not draining, `name` included, as they were before the
    step. Signs of overload leave `min_healthy_share` of them in service; failing requests leave at least one. A
    backend that refuses connections or fails its probes outright goes in any case: sending it work helps nobody.
    A vetoed backend keeps its counters, so that the next bad sign asks again, and a `ramp` at the floor until then.
    """
    was = before.get(name)
    if was is None or not was.in_service or after.in_service or after.cause in (Cause.REFUSED, Cause.PROBES_FAIL):
        return after
    left = sum(other.in_service for key, other in before.items() if key != name)
    floor = max(1.0, rules.min_healthy_share * len(before)) if after.cause in LOAD_SHAPED else 1.0
    if left >= floor:
        return after
    return replace(after, state=was.state, since_s=was.since_s, until_s=was.until_s, ejections=was.ejections, held=True)


def _good_probe(health: Health, now: float) -> Health:
    health = replace(health, probe_failures=0, probe_successes=health.probe_successes + 1)
    if health.held and health.cause is Cause.PROBES_LATE:
        health = replace(health, held=False, cause=Cause.NONE, detail="")
    match health.state:
        case HealthState.UNKNOWN:
            return health._enter(HealthState.HEALTHY, now)
        case HealthState.UNHEALTHY if health.probe_successes >= health.rules.probe_successes_to_healthy:
            # One that had also failed its requests must prove itself on requests.
            return health._enter(HealthState.HALF_OPEN if health.ejections else HealthState.SLOW_START, now)
        case HealthState.EJECTED if health.cause is Cause.REFUSED and health.ejections <= 1:
            # The probe tests just what had failed, so a restarted engine need not sit out its time. Only once: one
            # that crashes in a loop would otherwise cost a request at each start.
            return health._enter(HealthState.HALF_OPEN, now)
        case _:
            return health


def _bad_probe(health: Health, probe: Probe, now: float) -> Health:
    if probe.slow and _vouched(health, now):
        return replace(health, probe_successes=0)
    health = replace(health, probe_failures=health.probe_failures + 1, probe_successes=0)
    needed = health.rules.probe_failures_to_unhealthy
    if health.state is HealthState.UNKNOWN and not probe.slow:
        needed = 1
    # An ejected backend is out already; its failed probes count when its time is over (`Health.at`).
    if health.probe_failures < needed or health.state in (HealthState.EJECTED, HealthState.UNHEALTHY):
        return health
    cause = Cause.PROBES_LATE if probe.slow else Cause.PROBES_FAIL
    return replace(health, cause=cause, detail=probe.detail[:200])._enter(HealthState.UNHEALTHY, now)


def _vouched(health: Health, now: float) -> bool:
    return health.last_success_s is not None and now - health.last_success_s < health.rules.traffic_vouches_s


def _success(health: Health, count: int, now: float) -> Health:
    health = replace(health, failures=0, silent_failures=0, last_success_s=now)
    health = _remember(health, float(count), 0.0, now)
    if health.held:
        health = replace(health, held=False, cause=Cause.NONE, detail="", probe_failures=0)
    match health.state:
        case HealthState.UNKNOWN:
            return health._enter(HealthState.HEALTHY, now)
        case HealthState.HALF_OPEN:
            health = replace(health, trial_successes=health.trial_successes + 1)
            if health.trial_successes >= health.rules.trial_successes:
                return health._enter(HealthState.SLOW_START, now)
            return health
        case _:
            return health


def _failure(health: Health, kind: OutcomeKind, now: float) -> Health:
    silent = health.silent_failures + 1 if kind in SILENT else 0
    health = replace(health, failures=health.failures + 1, silent_failures=silent, last_success_s=None)
    health = _remember(health, 1.0, 1.0, now)
    if health.state in (HealthState.EJECTED, HealthState.UNHEALTHY):
        return health  # a straggler, sent before it was taken out
    cause = _ejection_cause(health, kind)
    if cause is Cause.NONE:
        return health
    ejections = health.ejections + 1
    out = replace(health, cause=cause, detail=kind.value, ejections=ejections)._enter(HealthState.EJECTED, now)
    # The window starts anew, so that a returned backend is judged on itself and not on what led here.
    return replace(out, until_s=now + health.rules.ejection_s(ejections), recent_requests=0.0, recent_failures=0.0)


def _ejection_cause(health: Health, kind: OutcomeKind) -> Cause:
    rules = health.rules
    if kind is OutcomeKind.CONNECT_ERROR and health.silent_failures >= rules.silent_failures_to_eject:
        return Cause.REFUSED
    if health.state is HealthState.HALF_OPEN:
        return Cause.REFUSED if kind is OutcomeKind.CONNECT_ERROR else Cause.TRIAL_FAILED
    if health.silent_failures >= rules.silent_failures_to_eject or health.failures >= rules.failures_to_eject:
        return Cause.TIMEOUTS if kind is OutcomeKind.TIMEOUT else Cause.FAILURES
    if (rules.failure_ratio_to_eject is not None
            and health.recent_requests >= rules.failure_ratio_min_requests
            and health.recent_failures >= rules.failure_ratio_to_eject * health.recent_requests):
        return Cause.TIMEOUTS if kind is OutcomeKind.TIMEOUT else Cause.FAILURE_RATIO
    return Cause.NONE


def _remember(health: Health, requests: float, failed: float, now: float) -> Health:
    """Add requests to exponentially decayed counts: a sliding ratio in three numbers."""
    window_s = health.rules.failure_window_s
    keep = exp(-max(0.0, now - health.recent_at_s) / window_s) if window_s > 0 else 0.0
    return replace(health, recent_requests=health.recent_requests * keep + requests,
                   recent_failures=health.recent_failures * keep + failed, recent_at_s=max(now, health.recent_at_s))
