"""The Shepherd model gateway's `least_load`: lightseekorg/smg, `model_gateway/src/policies/least_load.rs` @3bb34d02.

Time to drain plus a barrier against a full KV cache, both in seconds. It differs in its signals. Prompt work ahead is
by this router's books, which are exact, where the original adds what it sent to what an engine last reported. The
generation rate is worked out from coefficients and decoding streams: most engines report counters, not rates.
"""

from policies.spec import PartSpec, Preset

PRESET = Preset(
    name="smg_least_load",
    doc="The least prompt work over the decode rate, plus a barrier against a full KV cache.",
    picker=PartSpec("least_load"),
)
