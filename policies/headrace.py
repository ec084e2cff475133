"""The `headrace` preset: the cheapest backend whose probability of missing the caller's budget is about 1 % or less.

Chance-constrained cost routing: per backend a latency model with a tail learned online, per request `min cost subject
to P(miss) ≤ alpha`, and a limit to what a request may do to those already there. The parts say how:
`policies.footing` and `policies.estimate` predict, `policies.chance` makes probabilities of it, `pickers/
chance_constrained` chooses, and `learners/ccr` learns.
"""

from policies.spec import STANDARD_FILTERS, PartSpec, Preset

PRESET = Preset(
    name="headrace",
    doc="The cheapest backend whose probability of missing the caller's latency budget is about 1 % or less.",
    filters=(*STANDARD_FILTERS, PartSpec("quality_floor")),
    prices=(PartSpec("request_cost"),),
    picker=PartSpec("chance_constrained"),
    learner="ccr",
)
