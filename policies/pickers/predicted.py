"""The prediction that pickers of latency-predicting balancers choose by.

The pipeline makes one for each candidate where it has prices or a margin; where it has neither, it is made here.
"""

from policies.estimate import Estimate, predict
from policies.facts import RequestFacts
from policies.policy import Priced


def predicted(facts: RequestFacts, candidate: Priced, now: float) -> Estimate:
    """What the request would meet on the candidate."""
    return candidate.estimate or predict(facts, candidate.backend, now)
