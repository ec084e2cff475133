"""llm-d's predicted-latency routing, with the least headroom (its default) and with the most.

`llm-d-router`: `filter/sloheadroomtier/plugin.go` @45c38549 and `scorer/latency/plugin.go` @2b0e7579. **Idealised**: it
is lent our prediction for each backend, our drift and our exact books. The original learns one model of one kind of pod
(its guide: skip it where the pool is heterogeneous), counts words for tokens and knows queues from scrapes. Its filter
for cached prefixes is left out; what is cached counts through the prediction.
"""

from policies.spec import PartSpec, Preset

LEAST = Preset(
    name="llmd_headroom_least",
    doc="The backend whose prediction comes closest to the caller's budgets without passing them.",
    picker=PartSpec("headroom"),
    learner="ccr",
)

MOST = Preset(
    name="llmd_headroom_most",
    doc="The backend whose prediction stays farthest below the caller's budgets.",
    picker=PartSpec("headroom", {"prefer_most": True}),
    learner="ccr",
)
