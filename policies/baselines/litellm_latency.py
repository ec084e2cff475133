"""LiteLLM's `latency-based-routing`: `litellm/router_strategy/lowest_latency.py` @015b9454, as shipped.

The lowest mean latency per completion token, over lists that keep their first nine entries for an hour
(`policies.learners.peers.latency_lists`); nothing in flight is counted, so everyone runs to one backend. It differs in
leaving out the tokens and requests per minute that an operator can cap a deployment at.
"""

from policies.spec import PartSpec, Preset

PRESET = Preset(
    name="litellm_latency",
    doc="The lowest latency per completion token over the first nine samples and the last.",
    picker=PartSpec("litellm_latency"),
    learner="latency_lists",
)
