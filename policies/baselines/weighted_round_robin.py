"""Smooth weighted round robin, as nginx's default (`ngx_http_upstream_round_robin.c`) and Envoy's `ROUND_ROBIN`.

Weights are the operator's times the measured capacity: what somebody would set who measured each card once and wrote
the weights down. It differs in how it is smooth: nginx keeps a running weight per peer, Envoy a queue of deadlines;
here turns lie in the middle of their stretches (`policies.learners.peers.turns`). Blind to load, size and budget.
"""

from policies.spec import PartSpec, Preset

PRESET = Preset(
    name="weighted_round_robin",
    doc="Each backend in turn, in proportion to its weight and measured capacity.",
    picker=PartSpec("weighted_round_robin"),
    learner="turns",
)
