"""Power of two choices over requests in flight, as Envoy's `LEAST_REQUEST` (choice count 2) and Finagle's `P2C`.

It differs in heeding weights while it samples: Envoy leaves P2C for a weighted schedule as soon as weights are unequal,
and Finagle samples uniformly. Known to be good among equal servers; among unequal ones it can be unstable
(Hurtado-Lange and Maguluri, "Throughput and delay optimality of power-of-d choices in inhomogeneous load balancing
systems", arXiv 2004.00538).
"""

from policies.spec import PartSpec, Preset

PRESET = Preset(
    name="p2c",
    doc="The less loaded of two backends drawn at random by weight.",
    picker=PartSpec("p2c"),
)
