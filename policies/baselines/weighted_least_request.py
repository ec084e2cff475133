"""Weighted least request, as Envoy's `LEAST_REQUEST` with unequal weights and a bias of 1, and HAProxy's `leastconn`.

Weights are the operator's times the measured capacity. It differs from Envoy in taking the lowest outright, where Envoy
turns `weight / (active + 1)` into the weights of a round robin. Sizes of requests and budgets play no part.
"""

from policies.spec import PartSpec, Preset

PRESET = Preset(
    name="weighted_least_request",
    doc="The backend with the fewest requests in flight per weight and measured capacity.",
    picker=PartSpec("weighted_least_request"),
)
