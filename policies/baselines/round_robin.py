"""Weighted round robin, as nginx's default upstream balancing and Envoy's `ROUND_ROBIN`.

It differs in being stateless: turns come from the decision counter and not from a running weight per peer, so several
routers, a replay and a simulator all agree on them. Blind to load, request size and budgets, as the originals are.
"""

from policies.spec import PartSpec, Preset

PRESET = Preset(
    name="round_robin",
    doc="Each backend in turn, in proportion to its weight.",
    picker=PartSpec("round_robin"),
)
