"""llm-d's endpoint picker as it comes: `llm-d-router`, `pkg/epp/config/loader/defaults.go` @0b59e4ed.

Scores for the queue (weight 2), the KV cache (2) and the prefix (3), and the highest sum. It differs in the age of its
news: the original scrapes engines every 50 ms, here the router's own books make up for a scrape that is older. What a
prefix is differs as in `sglang_cache_aware`.
"""

from policies.spec import PartSpec, Preset

PRESET = Preset(
    name="llmd_default",
    doc="The highest weighted sum of scores for a short queue, free KV cache and cached prefix.",
    picker=PartSpec("weighted_scores"),
    learner="prefix_map",
)
