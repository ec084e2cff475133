"""On what grounds a backend was chosen, as the decision log keeps it: candidates with price and prediction, rejections.

Every field is copied by name from a noun whose content is known, so that no key, address or label can come along.
"""

from collections.abc import Sequence

from policies.estimate import Estimate, coefficients_of, predict
from policies.facts import RequestFacts
from policies.filters import Rejection
from policies.footing import drift_of
from policies.policy import Decision, Priced, Rejected
from router.record.grounds_record import CandidateRecord, ExpectedRecord, Grounds, RejectedRecord

MAX_LISTED = 32
"""Candidates and rejected backends that a record lists; a fleet of a thousand would fill a disk by itself."""


def grounds_of(decision: Decision, facts: RequestFacts, decided_at_s: float) -> Grounds:
    """The grounds of a decision that was made at that time.

    Where the policy predicted nothing (a baseline), the prediction for each candidate is made here from what the
    decision saw: `policies.estimate.predict` is pure. Candidates that it could dismiss unpredicted stay so.
    """
    chosen, listed = decision.chosen, _listed(decision)
    blind = not any(entry.estimate for entry in listed)
    candidates: list[CandidateRecord] = []
    expected: Estimate | None = None
    miss: float | None = None
    for entry in listed:
        estimate = entry.estimate
        if estimate is None and (blind or entry.backend is chosen):
            estimate = predict(facts, entry.backend, decided_at_s)
        candidates.append(_candidate(entry, estimate, decided_at_s))
        if entry.backend is chosen:
            expected, miss = estimate, entry.miss
    return Grounds(
        policy=decision.policy,
        backend=None if chosen is None else chosen.spec.name,
        reason=decision.reason,
        price=decision.price,
        coefficients=None if chosen is None else coefficients_of(chosen).version,
        expected=None if expected is None else ExpectedRecord(
            expected.ttft_s, expected.tpot_s, expected.e2e_s, expected.ttft_p99_s, expected.e2e_p99_s),
        miss=miss,
        candidates=candidates,
        candidate_count=len(decision.candidates),
        rejected=_rejected(decision.rejected),
        rejected_count=len(decision.rejected),
    )


def _listed(decision: Decision) -> Sequence[Priced]:
    """The candidates that a record has room for: the chosen one, and the cheapest others."""
    if len(decision.candidates) <= MAX_LISTED:
        return decision.candidates
    return sorted(decision.candidates, key=lambda entry: (entry.backend is not decision.chosen, entry.price))[
        :MAX_LISTED]


# Runs once per candidate of each request, on the same core as the requests themselves: its numbers are copied as they
# are, since rounding them costs as much as all else here.
def _candidate(entry: Priced, estimate: Estimate | None, decided_at_s: float) -> CandidateRecord:
    view = entry.backend
    _, ttft_s, tpot_s, e2e_s, *_ = (None, None, None, None) if estimate is None else estimate
    return CandidateRecord(view.spec.name, entry.price, dict(entry.terms), entry.late_s, ttft_s, tpot_s, e2e_s,
                           entry.miss, entry.crowding, coefficients_of(view).version, drift_of(view, decided_at_s),
                           view.in_flight_requests)


def _rejected(rejected: tuple[Rejected, ...]) -> list[RejectedRecord]:
    """Those that serve the model: that the others do not is no news."""
    serving = [entry for entry in rejected if entry.reason != Rejection.OTHER_MODEL]
    return [RejectedRecord(entry.backend, entry.reason) for entry in serving[:MAX_LISTED]]
