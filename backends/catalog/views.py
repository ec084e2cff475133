"""The frozen picture that a decision is made on."""

from dataclasses import dataclass, field
from typing import Any

from backends.catalog.health import Health
from backends.catalog.sample import LoadSample
from backends.catalog.spec import BackendSpec


@dataclass(frozen=True, slots=True)
class BackendView:
    """One backend at one instant. The `in_flight_*` figures are this router's own books, so they are always known."""

    spec: BackendSpec
    health: Health
    draining: bool = False
    """No new requests: weight 0, or drained by hand. Open streams finish."""
    in_flight_requests: int = 0
    in_flight_prefill_requests: int = 0
    """Requests sent whose first token has not come."""
    in_flight_prefill_tokens: int = 0
    """Prompt tokens of those."""
    in_flight_decode_requests: int = 0
    in_flight_context_tokens: int = 0
    """Prompt plus generated tokens of the streams that decode."""
    sample: LoadSample | None = None
    in_flight_at_sample: int | None = None
    """This router's own `in_flight_requests` when the sample was taken: what it counts beyond these is others' load."""
    backoff_until_s: float = 0.0
    """The backend asked for silence until then (`Retry-After` on 429 or 503); 0 where it did not."""
    silence_asked_until_s: float = 0.0
    """The same where it named the time itself: until then nobody is sent there, whatever else is left."""
    drift: float = 1.0
    """Observed over predicted time, learned online; 1 where nothing is known."""
    served_requests: int = 0
    """Requests completed since this router knows the backend."""
    last_outcome_at_s: float | None = None
    belief: Any = None
    """What the policy's learner believes of this backend (`policies.learning`); `None` where nothing learns."""
    memo: dict[Any, Any] = field(default_factory=dict, init=False, compare=False, repr=False)
    """What pure functions have worked out of this view alone, so that the next decision on it need not. No part of the
    value: a copy starts with an empty one."""


@dataclass(frozen=True, slots=True)
class FleetView:
    """All backends at one instant, with what names the picture."""

    backends: tuple[BackendView, ...]
    config_hash: str = ""
    sequence: int = 0
    """Decisions taken before this one by this router: the state of round robin, so that pickers stay pure."""
    belief: Any = None
    """What the policy's learner believes of the whole: expectations and thresholds by latency class."""
