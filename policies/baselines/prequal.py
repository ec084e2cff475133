"""Prequal: Wydrowski, Kleinberg, Rumble, Archer, "Load is not what you should balance" (NSDI 2024, arXiv 2312.10172).

Hot and cold by the quantile of requests in flight, then by latency. It differs in that probes are free and never old:
requests in flight are this router's own books, and the latency that a replica would report (the median at its present
load) is kept by the router, with first-token times for latencies. The quantile is that of the pool at hand. The paper
means replicas that are alike but for their neighbours; among unlike cards the large one is always the hot one.
"""

from policies.spec import PartSpec, Preset

PRESET = Preset(
    name="prequal",
    doc="The fastest first token among backends that are not hot by their requests in flight.",
    picker=PartSpec("prequal"),
    learner="ttft_by_load",
)
