"""The `headrace` preset: the cheapest backend that is predicted to keep the caller's budget.

Predictions are means from the backend's step-time coefficients and its drift, held against the budget with a margin
(`Pipeline.margin`). Money is what the request takes of the machine plus what its wait is worth.
"""

from policies.spec import PartSpec, Preset

# Cheapest-feasible routing on means needs about twice the mean to keep a P99: in simulation a margin of 1 keeps 67 to
# 95 % of requests in budget, 1.5 fails where the coefficients are 30 % off, 2 keeps 98 %.
PRESET = Preset(
    name="headrace",
    doc="The cheapest backend among those predicted to keep the caller's latency budget.",
    prices=(PartSpec("request_cost"), PartSpec("drain_time")),
    picker=PartSpec("cheapest"),
    margin=2.0,
)
