"""AIBrix's `least-latency`: `pkg/plugins/gateway/algorithms/least_latency.go` @0338af7d.

Mean prefill time per prompt token and decode time per output token, for a request of the pool's mean size. It differs
in reading them at the gateway: queueing is part of prefill, where the original adds a queue time from the engine.
Neither the request's own size nor what is in flight plays a part.
"""

from policies.spec import PartSpec, Preset

PRESET = Preset(
    name="aibrix_least_latency",
    doc="The lowest latency for a request of the usual size, by lifetime means.",
    picker=PartSpec("lifetime_latency"),
    learner="lifetime_means",
)
