"""The `headrace` preset: the least cost of all requests together while at most one in a hundred misses its budget.

Chance-constrained cost routing: per backend a latency model with a tail learned online, per request the least price
with a price on the chance of a miss, which follows from the promise of its class, and on what it does to those already
there. The parts say how: `footing` and `estimate` predict, `chance` makes probabilities of it, `pickers/
chance_constrained` chooses, `learners/ccr` learns, and `docs/decisions/0010-price-of-a-miss.md` says why not otherwise.
"""

from policies.spec import STANDARD_FILTERS, PartSpec, Preset

PRESET = Preset(
    name="headrace",
    doc="The least cost while at most one in a hundred requests misses its latency budget, by a tail learned online.",
    filters=(*STANDARD_FILTERS, PartSpec("quality_floor")),
    prices=(PartSpec("request_cost"),),
    picker=PartSpec("chance_constrained"),
    learner="ccr",
)
