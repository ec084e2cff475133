"""The `cheapest_feasible` preset: the cheapest backend of which a multiple of the predicted mean keeps the budget.

The plain form of the idea behind `headrace`, with a fixed safety factor (`margin`) where that learns its tails. In
simulation a margin of 1 keeps 67 to 95 % of requests in budget, 1.5 fails where the coefficients are 30 % off, 2 keeps
98 %; all of them lose more than `headrace` under bursts.
"""

from policies.spec import PartSpec, Preset

PRESET = Preset(
    name="cheapest_feasible",
    doc="The cheapest backend of which `margin` times the predicted mean keeps the caller's latency budget.",
    prices=(PartSpec("request_cost"), PartSpec("drain_time")),
    picker=PartSpec("cheapest"),
    margin=2.0,
    learner="ccr",
)
