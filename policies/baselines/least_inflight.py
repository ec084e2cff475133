"""Least requests, as HAProxy's `leastconn`, nginx's `least_conn` and LiteLLM's `least-busy`.

It differs in counting requests and not connections, in weighing the request at hand too, and in settling ties by dice
where HAProxy and nginx take turns. Sizes of requests and the speed of a card enter through the weight only.
"""

from policies.spec import PartSpec, Preset

PRESET = Preset(
    name="least_inflight",
    doc="The backend with the fewest requests in flight per weight.",
    picker=PartSpec("least_inflight"),
)
