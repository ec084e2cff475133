"""Peak EWMA with power of two choices, as Finagle's `PeakEwma.scala`, tower's `load/peak_ewma.rs` and Linkerd.

Read at tower @00329237. It differs in what latency is: the time to first token, as the time to the last mostly says how
long the answer was. Requests count as pending until their last token. Like the originals it heeds no weights, and
decays towards 0 while nothing is seen. The average measures the mix of prompts as much as the backend.
"""

from policies.spec import PartSpec, Preset

PRESET = Preset(
    name="peak_ewma",
    doc="The better of two backends in peak-sensitive average first-token time times requests in flight.",
    picker=PartSpec("peak_ewma"),
    learner="peak_ewma",
)
