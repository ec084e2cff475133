"""The grounds of a decision in the shape that the decision log writes, and that memory keeps them in meanwhile."""

import zlib

import msgspec


class CandidateRecord(msgspec.Struct, gc=False):
    """A backend that could have served the request, as the decision saw it."""

    backend: str
    price: float
    terms: dict[str, float]
    late_s: float
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float | None
    miss: float | None
    crowding: float
    coefficients: str
    drift: float
    in_flight: int


class RejectedRecord(msgspec.Struct, gc=False):
    """A backend that a filter removed."""

    backend: str
    reason: str


class ExpectedRecord(msgspec.Struct, gc=False):
    """What of an `estimate.Estimate` the record tells; P99s are `None` where the policy knows no tails."""

    ttft_s: float
    tpot_s: float
    e2e_s: float
    ttft_p99_s: float | None
    e2e_p99_s: float | None


class Grounds(msgspec.Struct, frozen=True, gc=False):
    """One decision, as a record tells it."""

    policy: str
    backend: str | None
    """The chosen one."""
    reason: str
    price: float | None
    coefficients: str | None
    """Version of the chosen backend's coefficients."""
    expected: ExpectedRecord | None
    """Of the chosen backend."""
    miss: float | None
    """Probability that the budget is missed there."""
    candidates: list[CandidateRecord]
    candidate_count: int
    rejected: list[RejectedRecord]
    rejected_count: int

    def packed(self) -> bytes:
        """As little memory as it takes to keep it for as long as a stream runs: a tenth."""
        return zlib.compress(msgspec.msgpack.encode(self), 1)

    @classmethod
    def unpacked(cls, packed: bytes) -> "Grounds":
        return msgspec.msgpack.decode(zlib.decompress(packed), type=cls)
