"""Consistent hashing of conversations with bounded loads: a session stays where it was unless that place is full.

::

    full   where in_flight_requests + 1 > ceil(load_factor · share · (in flight over all candidates + 1))
    score  = -weight / ln(u)        u in (0, 1): hash of session and backend; the highest that is not full wins

`share` is the candidate's part of the weights, operator's times measured capacity. The order of the scores is that of
weighted rendezvous hashing: it shares sessions by weight, and each session has an order of its own, so what a full
backend overflows is spread over all others and not put on one neighbour of a ring.

Where a signal is missing: no session → the first block of the prompt is hashed; neither → the least load per weight.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import ceil, log
from typing import ClassVar

from backends.catalog.views import FleetView
from policies.facts import RequestFacts
from policies.pickers.capacity import measured_pull
from policies.pickers.weighing import lowest
from policies.policy import Priced, Rng
from policies.spec import setting


@dataclass(frozen=True, slots=True)
class BoundedHash:
    """The session's own backend, or the next in its order that is not above its share of the load."""

    name: ClassVar[str] = "bounded_hash"
    load_factor: float = setting(
        1.25, "How far above its share of the requests in flight a backend may go.", at_least=1)

    def __call__(
        self, facts: RequestFacts, candidates: Sequence[Priced], fleet: FleetView, now: float, rng: Rng
    ) -> tuple[Priced, str]:
        pulls = [measured_pull(c.backend, now) for c in candidates]
        key = _key(facts)
        if key is None:
            loads = [(c.backend.in_flight_requests + 1) / width for c, width in zip(candidates, pulls, strict=True)]
            return candidates[lowest(loads, rng, pulls)], f"no session, least load of {len(candidates)}"
        scores = [width / -log(_point(key, c.backend.spec.name)) for c, width in zip(candidates, pulls, strict=True)]
        allowed = self.load_factor * (sum([c.backend.in_flight_requests for c in candidates]) + 1) / sum(pulls)
        room = [index for index, c in enumerate(candidates)
                if c.backend.in_flight_requests + 1 <= ceil(allowed * pulls[index])]
        # Rounding up leaves room somewhere: were all full, they would hold more than all that is in flight.
        chosen = max(room or range(len(candidates)), key=scores.__getitem__)
        word = "session's own" if scores[chosen] == max(scores) else "overflow"
        return candidates[chosen], f"{word}, inflight {candidates[chosen].backend.in_flight_requests}"


def _key(facts: RequestFacts) -> str | None:
    if facts.session_key is not None:
        return facts.session_key
    return repr(facts.prefix_keys[0]) if facts.prefix_keys else None


def _point(key: str, backend: str) -> float:
    """In (0, 1), the same in every process: Python's own hash of text is salted."""
    digest = blake2b(f"{key}\0{backend}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return ((int.from_bytes(digest, "big") >> 12) + 0.5) / 2.0**52   # 52 bits and a half: exact, and never 0 or 1
