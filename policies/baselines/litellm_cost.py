"""LiteLLM's `cost-based-routing`: `litellm/router_strategy/lowest_cost.py` @03a79b6a.

The lowest sum of input and output price, whatever the load. It differs in where prices come from (the hourly price of
a card and its measured token times, for want of a price list) and in leaving out the caps per minute, without which
everything goes to one backend.
"""

from policies.spec import PartSpec, Preset

PRESET = Preset(
    name="litellm_cost",
    doc="The lowest price of an input and an output token, whatever the load.",
    picker=PartSpec("token_price"),
)
